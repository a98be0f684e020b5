package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"
)

// The manual is made from the commands themselves, so it cannot tell of a flag that is not there: as man pages (cgpu man) and as
// docs/cli.md, which a test compares with what the commands say.

// manual is what there is to say of a command, without a form.
type manual struct {
	name     string // with the words before it, such as "cgpu smi"
	usage    string
	args     string
	text     []paragraph
	examples []string
	flags    []manualFlag
}

// paragraph is text to fill, or lines to leave as they are.
type paragraph struct {
	text     string
	verbatim bool
}

type manualFlag struct {
	names  string // "-o, --output"
	value  string // "FORMAT"; "" for one that takes none
	usage  string
	value0 string // what holds without the flag; "" for none
}

// manualsOf are the manuals of all commands that people use, in the order of cgpu --help.
func manualsOf(a *cli.App) []manual {
	var list []manual
	var add func(prefix string, commands []*cli.Command)
	add = func(prefix string, commands []*cli.Command) {
		for _, c := range commands {
			if !c.Hidden && c.Name != "help" { // the library gives the command that runs one
				list = append(list, manualOf(prefix, c))
				add(prefix+" "+c.Name, c.Subcommands)
			}
		}
	}
	add(a.Name, a.Commands)
	return list
}

func manualOf(prefix string, c *cli.Command) manual {
	m := manual{name: prefix + " " + c.Name, usage: c.Usage, args: strings.TrimSpace(c.ArgsUsage)}
	m.text, m.examples = paragraphs(c.Description)
	for _, f := range c.VisibleFlags() {
		d, ok := f.(cli.DocGenerationFlag)
		if !ok || f.Names()[0] == "help" {
			continue
		}
		var names []string
		for _, n := range f.Names() {
			names = append(names, dashes(n))
		}
		x := manualFlag{names: strings.Join(names, ", ")}
		x.value, x.usage = valueName(d.GetUsage())
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
		m.flags = append(m.flags, x)
	}
	return m
}

// dashes writes a flag as it is typed.
func dashes(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// valueName takes the word in backquotes for the value's name, as cgpu --help does.
func valueName(usage string) (value, text string) {
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
const exitStatus = "0 when it is done, 1 when something failed (one line on standard error says what, and what to do), 2 for a command line that " +
	"cannot be understood. cgpu run ends as its command did."

// roff writes a man page of section 1.
func (m manual) roff(w io.Writer, version string) error {
	var b strings.Builder
	m.head(&b, version)
	b.WriteString(".SH SYNOPSIS\n.nh\n.B " + roffText(m.name) + "\n")
	if len(m.flags) > 0 {
		b.WriteString("[\\fIOPTION\\fR]...\n")
	}
	if m.args != "" {
		b.WriteString("\\fI" + roffText(m.args) + "\\fR\n")
	}
	b.WriteString(".hy\n.SH DESCRIPTION\n")
	for i, p := range m.text {
		roffParagraph(&b, p, i > 0)
	}
	if len(m.flags) > 0 {
		b.WriteString(".SH OPTIONS\n")
	}
	for _, f := range m.flags {
		b.WriteString(".TP\n\\fB" + roffText(f.names) + "\\fR")
		if f.value != "" {
			b.WriteString(" \\fI" + roffText(f.value) + "\\fR")
		}
		b.WriteString("\n" + roffLine(f.usage+defaultOf(f)) + "\n")
	}
	if len(m.examples) > 0 {
		b.WriteString(".SH EXAMPLES\n")
		roffParagraph(&b, paragraph{strings.Join(m.examples, "\n"), true}, false)
	}
	b.WriteString(".SH SEE ALSO\n.BR cgpu (1)\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// head begins a page. It has no date, so that a package made twice is the same.
func (m manual) head(b *strings.Builder, version string) {
	page := strings.ReplaceAll(m.name, " ", "-")
	fmt.Fprintf(b, ".TH \"%s\" 1 \"\" \"cgpu %s\" \"cgpu\"\n.SH NAME\n%s \\- %s\n", roffText(strings.ToUpper(page)), roffText(version), roffText(page), roffText(m.usage))
}

func defaultOf(f manualFlag) string {
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
	manual{name: a.Name, usage: a.Usage}.head(&b, version)
	b.WriteString(".SH SYNOPSIS\n.B cgpu\n\\fICOMMAND\\fR [\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...\n.SH DESCRIPTION\n")
	text, _ := paragraphs(a.Description)
	for i, p := range text {
		roffParagraph(&b, p, i > 0)
	}
	b.WriteString(".SH COMMANDS\n")
	var pages []string
	for _, m := range manualsOf(a) {
		page := strings.ReplaceAll(m.name, " ", "-")
		fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roffText(page), roffLine(m.usage))
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

// markdown writes docs/cli.md.
func markdown(w io.Writer, a *cli.App) error {
	var b strings.Builder
	b.WriteString("# Commands\n\n<!-- Made from the commands by `go test ./cmd/cgpu -run TestManual -update`; edit those. -->\n\n")
	text, _ := paragraphs(a.Description)
	for _, p := range text {
		markdownParagraph(&b, p)
	}
	b.WriteString("Exit status: " + exitStatus + "\n\n| command | does |\n|---|---|\n")
	list := manualsOf(a)
	for _, m := range list {
		fmt.Fprintf(&b, "| [`%s`](#%s) | %s |\n", m.name, strings.ReplaceAll(m.name, " ", "-"), cell(m.usage))
	}
	for _, m := range list {
		fmt.Fprintf(&b, "\n## %s\n\n%s.\n\n", m.name, markdownText(strings.ToUpper(m.usage[:1])+m.usage[1:]))
		call := m.name
		if len(m.flags) > 0 {
			call += " [OPTION]…"
		}
		if m.args != "" {
			call += " " + m.args
		}
		b.WriteString("    " + call + "\n\n")
		for _, p := range m.text {
			markdownParagraph(&b, p)
		}
		if len(m.flags) > 0 {
			b.WriteString("| option | meaning |\n|---|---|\n")
		}
		for _, f := range m.flags {
			fmt.Fprintf(&b, "| `%s` | %s |\n", strings.TrimSpace(f.names+" "+f.value), cell(f.usage+defaultOf(f)))
		}
		if len(m.examples) > 0 {
			if len(m.flags) > 0 {
				b.WriteString("\n")
			}
			b.WriteString("```sh\n" + strings.Join(m.examples, "\n") + "\n```\n")
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

// cell is markdownText in a table.
func cell(s string) string { return strings.ReplaceAll(markdownText(s), "|", `\|`) }
