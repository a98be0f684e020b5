// SPDX-License-Identifier: Apache-2.0

// Package manual is made from the commands themselves, so it cannot tell of a flag that is not there: man pages, and docs/cli.md.
package manual

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"
)

// Write writes all man pages.
func Write(a *cli.App, version, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("man: %w", err)
	}
	var overview bytes.Buffer
	if err := roffOverview(&overview, a, version); err != nil {
		return err
	}
	pages := map[string][]byte{a.Name: overview.Bytes()}
	for _, m := range Of(a) {
		var page bytes.Buffer
		if err := m.roff(&page, version); err != nil {
			return err
		}
		pages[strings.ReplaceAll(m.Name, " ", "-")] = page.Bytes()
	}
	for name, text := range pages {
		if err := os.WriteFile(filepath.Join(dir, name+".1"), text, 0o644); err != nil {
			return fmt.Errorf("man: %w", err)
		}
	}
	return nil
}

// The manual is made from the commands themselves, so it cannot tell of a flag that is not there: as man pages (cgpu man) and as
// docs/cli.md, which a test compares with what the commands say.

// Page is what there is to say of a command, without a form.
type Page struct {
	Name     string // with the words before it, such as "cgpu smi"
	Usage    string
	args     string
	text     []paragraph
	Examples []string
	Flags    []Flag
}

// paragraph is text to fill, or lines to leave as they are.
type paragraph struct {
	text     string
	verbatim bool
}

type Flag struct {
	Names  string // "-o, --output"
	value  string // "FORMAT"; "" for one that takes none
	Usage  string
	value0 string // what holds without the flag; "" for none
}

// Of are the manuals of all commands that people use, in the order of cgpu --help.
func Of(a *cli.App) []Page {
	var list []Page
	var add func(prefix string, commands []*cli.Command)
	add = func(prefix string, commands []*cli.Command) {
		for _, c := range commands {
			if !c.Hidden && c.Name != "help" { // the library gives the command that runs one
				list = append(list, pageOf(prefix, c))
				add(prefix+" "+c.Name, c.Subcommands)
			}
		}
	}
	add(a.Name, a.Commands)
	return list
}

func pageOf(prefix string, c *cli.Command) Page {
	m := Page{Name: prefix + " " + c.Name, Usage: c.Usage, args: strings.TrimSpace(c.ArgsUsage)}
	m.text, m.Examples = paragraphs(c.Description)
	for _, f := range c.VisibleFlags() {
		d, ok := f.(cli.DocGenerationFlag)
		if !ok || f.Names()[0] == "help" {
			continue
		}
		var names []string
		for _, n := range f.Names() {
			names = append(names, Dashes(n))
		}
		x := Flag{Names: strings.Join(names, ", ")}
		x.value, x.Usage = ValueName(d.GetUsage())
		switch g := f.(type) {
		case *cli.BoolFlag:
			x.value0 = g.DefaultText
		case *cli.GenericFlag:
			x.value0 = g.DefaultText
		default:
			if x.value0 = strings.Trim(d.GetDefaultText(), `"`); x.value0 == "0" && !f.IsSet() {
				x.value0 = d.GetValue() // a number's zero is a value, if nothing else is said
			}
			if x.value == "" && d.TakesValue() {
				x.value = "VALUE"
			}
		}
		m.Flags = append(m.Flags, x)
	}
	return m
}

// Dashes writes a flag as it is typed.
func Dashes(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// ValueName takes the word in backquotes for the value's name, as cgpu --help does.
func ValueName(usage string) (value, text string) {
	before, rest, ok := strings.Cut(usage, "`")
	if !ok {
		return "", usage
	}
	value, after, _ := strings.Cut(rest, "`")
	return value, before + value + after
}

// paragraphs takes a description apart: empty lines are between paragraphs, "Examples:" begins the examples, and what is indented is
// as it should be.
func paragraphs(description string) (text []paragraph, examples []string) {
	for _, block := range strings.Split(strings.TrimSpace(description), "\n\n") {
		lines := strings.Split(block, "\n")
		if lines[0] == "Example:" || lines[0] == "Examples:" {
			for _, l := range lines[1:] {
				examples = append(examples, strings.TrimPrefix(l, "   "))
			}
			continue
		}
		for len(lines) > 0 { // runs of lines of one kind
			indented := strings.HasPrefix(lines[0], " ")
			n := 0
			for n < len(lines) && strings.HasPrefix(lines[n], " ") == indented {
				n++
			}
			if indented {
				text = append(text, paragraph{strings.Join(lines[:n], "\n"), true})
			} else {
				text = append(text, paragraph{strings.Join(lines[:n], " "), false})
			}
			lines = lines[n:]
		}
	}
	return text, examples
}

// exitStatus is what all commands but run have in common.
const exitStatus = "0 when it is done, 1 when something failed (one line on standard error says what, and what to do), 2 for a " +
	"command line that cannot be understood. cgpu run ends as its command did."

// roff writes a man page of section 1.
func (m Page) roff(w io.Writer, version string) error {
	var b strings.Builder
	m.head(&b, version)
	b.WriteString(".SH SYNOPSIS\n.nh\n.B " + roffText(m.Name) + "\n")
	if len(m.Flags) > 0 {
		b.WriteString("[\\fIOPTION\\fR]...\n")
	}
	if m.args != "" {
		b.WriteString("\\fI" + roffText(m.args) + "\\fR\n")
	}
	b.WriteString(".hy\n.SH DESCRIPTION\n")
	for i, p := range m.text {
		roffParagraph(&b, p, i > 0)
	}
	if len(m.Flags) > 0 {
		b.WriteString(".SH OPTIONS\n")
	}
	for _, f := range m.Flags {
		b.WriteString(".TP\n\\fB" + roffText(f.Names) + "\\fR")
		if f.value != "" {
			b.WriteString(" \\fI" + roffText(f.value) + "\\fR")
		}
		b.WriteString("\n" + roffLine(f.Usage+defaultOf(f)) + "\n")
	}
	if len(m.Examples) > 0 {
		b.WriteString(".SH EXAMPLES\n")
		roffParagraph(&b, paragraph{strings.Join(m.Examples, "\n"), true}, false)
	}
	b.WriteString(".SH SEE ALSO\n.BR cgpu (1)\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// head begins a page. It has no date, so that a package made twice is the same.
func (m Page) head(b *strings.Builder, version string) {
	page := strings.ReplaceAll(m.Name, " ", "-")
	fmt.Fprintf(b, ".TH \"%s\" 1 \"\" \"cgpu %s\" \"cgpu\"\n.SH NAME\n%s \\- %s\n", roffText(strings.ToUpper(page)), roffText(version),
		roffText(page), roffText(m.Usage))
}

func defaultOf(f Flag) string {
	if f.value0 == "" {
		return ""
	}
	return " (default: " + f.value0 + ")"
}

func roffParagraph(b *strings.Builder, p paragraph, space bool) {
	switch {
	case p.verbatim:
		b.WriteString(".PP\n.nf\n")
		for _, l := range strings.Split(p.text, "\n") {
			b.WriteString(roffLine(l) + "\n")
		}
		b.WriteString(".fi\n")
	case space:
		b.WriteString(".PP\n" + roffLine(p.text) + "\n")
	default:
		b.WriteString(roffLine(p.text) + "\n")
	}
}

// roffText escapes what roff would act on within a line.
func roffText(s string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`, "…", `\[u2026]`, "→", `\[->]`).Replace(s)
}

// roffLine is roffText for a whole line, whose first character may be a request's.
func roffLine(s string) string {
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		return `\&` + roffText(s)
	}
	return roffText(s)
}

// roffOverview writes the page of cgpu itself.
func roffOverview(w io.Writer, a *cli.App, version string) error {
	var b strings.Builder
	Page{Name: a.Name, Usage: a.Usage}.head(&b, version)
	b.WriteString(".SH SYNOPSIS\n.B cgpu\n\\fICOMMAND\\fR [\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...\n.SH DESCRIPTION\n")
	text, _ := paragraphs(a.Description)
	for i, p := range text {
		roffParagraph(&b, p, i > 0)
	}
	b.WriteString(".SH COMMANDS\n")
	var pages []string
	for _, m := range Of(a) {
		page := strings.ReplaceAll(m.Name, " ", "-")
		fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roffText(page), roffLine(m.Usage))
		pages = append(pages, page)
	}
	fmt.Fprintf(&b, ".SH EXIT STATUS\n%s\n.SH SEE ALSO\n", roffLine(exitStatus))
	for i, page := range pages {
		comma := " ,"
		if i == len(pages)-1 {
			comma = ""
		}
		fmt.Fprintf(&b, ".BR %s (1)%s\n", roffText(page), comma)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Markdown writes docs/cli.md.
func Markdown(w io.Writer, a *cli.App) error {
	var b strings.Builder
	b.WriteString("# Commands\n\n<!-- Made from the commands by `go test ./cmd/cgpu -run TestManual -update`; edit those. -->\n\n")
	text, _ := paragraphs(a.Description)
	for _, p := range text {
		markdownParagraph(&b, p)
	}
	b.WriteString("Exit status: " + exitStatus + "\n\n| command | does |\n|---|---|\n")
	list := Of(a)
	for _, m := range list {
		fmt.Fprintf(&b, "| [`%s`](#%s) | %s |\n", m.Name, strings.ReplaceAll(m.Name, " ", "-"), Cell(m.Usage))
	}
	for _, m := range list {
		fmt.Fprintf(&b, "\n## %s\n\n%s.\n\n", m.Name, markdownText(strings.ToUpper(m.Usage[:1])+m.Usage[1:]))
		call := m.Name
		if len(m.Flags) > 0 {
			call += " [OPTION]…"
		}
		if m.args != "" {
			call += " " + m.args
		}
		b.WriteString("    " + call + "\n\n")
		for _, p := range m.text {
			markdownParagraph(&b, p)
		}
		if len(m.Flags) > 0 {
			b.WriteString("| option | meaning |\n|---|---|\n")
		}
		for _, f := range m.Flags {
			fmt.Fprintf(&b, "| `%s` | %s |\n", strings.TrimSpace(f.Names+" "+f.value), Cell(f.Usage+defaultOf(f)))
		}
		if len(m.Examples) > 0 {
			if len(m.Flags) > 0 {
				b.WriteString("\n")
			}
			b.WriteString("```sh\n" + strings.Join(m.Examples, "\n") + "\n```\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func markdownParagraph(b *strings.Builder, p paragraph) {
	if p.verbatim {
		b.WriteString("```text\n" + p.text + "\n```\n\n")
		return
	}
	b.WriteString(markdownText(p.text) + "\n\n")
}

// markdownText escapes what Markdown would act on. An underscore within a word is none of that.
func markdownText(s string) string {
	return strings.NewReplacer("<", `\<`, "*", `\*`, "`", "\\`").Replace(s)
}

// Cell is markdownText in a table.
func Cell(s string) string { return strings.ReplaceAll(markdownText(s), "|", `\|`) }
