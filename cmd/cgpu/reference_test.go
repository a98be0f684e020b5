// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// docs/reference.md lists every name that a user can write, from the tables and flags of the code, so that none can be
// forgotten. What a name means stands once: in the tables of docs/variables.md and docs/dialects.md, and in the usage of flags.
func TestReference(t *testing.T) {
	const path = "../../docs/reference.md"
	prose := tables(t, "../../docs/variables.md", "../../docs/dialects.md")
	got := referenceHead
	for _, r := range reference(t, prose) {
		got += fmt.Sprintf("| `%s` | %s | %s | %s |\n", r.name, r.kind, r.values, strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(r.meaning))
	}
	if *golden.Update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("docs/reference.md is not what the code says; go test ./cmd/cgpu -run TestReference -update writes it anew")
	}
}

const referenceHead = `# Reference: every name

Everything that can be set, by name. This page is generated from the code (` + "`go test ./cmd/cgpu -run TestReference -update`" + `), and a test
holds it up to date. [variables.md](variables.md) says how the settings of a container work together, [policies.md](policies.md) what weights,
percentages and priorities mean, [dialects.md](dialects.md) how to switch on the names of other systems, [cli.md](cli.md) how commands are used.

Names of a dialect count only where cgpu.toml enables it. The dialect ` + "`gpushare`" + ` has no names of its own: it lets annotations with the names of
the variables ` + "`ALIYUN_COM_GPU_MEM_DEV`, `_IDX` and `_POD`" + ` count.

| name | what | value | meaning |
|---|---|---|---|
`

type referenceRow struct{ name, kind, values, meaning string }

func reference(t *testing.T, prose map[string][]string) []referenceRow {
	t.Helper()
	text, err := os.ReadFile("../../docs/dialects.md")
	if err != nil {
		t.Fatal(err)
	}
	dialects := string(text)
	var rows []referenceRow
	// documented adds a name with the cells behind it in the table that has it.
	documented := func(name, kind string, numbered bool) {
		cells := prose[name]
		if len(cells) < 2 {
			t.Errorf("%s (%s): no table of docs/variables.md or docs/dialects.md has it in its first column", name, kind)
			return
		}
		if numbered {
			name += "[_N]"
		}
		values := ""
		if len(cells) > 2 {
			values = cells[len(cells)-2]
		}
		meaning := cells[len(cells)-1]
		if plain, ok := strings.CutSuffix(meaning, " *"); ok {
			meaning = plain + "; what `cgpu policy` has set wins"
		}
		rows = append(rows, referenceRow{name, kind, values, meaning})
	}
	for _, n := range quota.Names() {
		if n.Variable == "" {
			documented(n.Annotation, "annotation", false)
			continue
		}
		documented(n.Variable, "variable", false)
		rows = append(rows, referenceRow{n.Annotation, "annotation", "", "as the variable `" + n.Variable + "`"})
		if n.Native != "" {
			rows = append(rows, referenceRow{n.Native, "variable", "", "as the variable `" + n.Variable + "`"})
		}
	}
	for _, w := range quota.Words() {
		kind := "variable"
		if w.Annotation {
			kind = "annotation"
		}
		kind += ", dialect `" + string(w.Dialect) + "`"
		if prose[w.Name] == nil && strings.Contains(dialects, "`"+w.Name+"`") {
			rows = append(rows, referenceRow{w.Name, kind, "", "not mapped: `cgpu spec` lists it as ignored ([dialects.md](dialects.md))"})
			continue
		}
		documented(w.Name, kind, w.Numbered)
	}
	for _, key := range config.Keys() {
		documented(key, "cgpu.toml", false)
	}
	for _, name := range programVariables(t) {
		documented(name, "environment of cgpu's programs", false)
	}
	for _, name := range appliedAnnotations(t) {
		meaning, ok := appliedMeaning[name]
		if !ok {
			t.Errorf("cgpu.io/applied.%s is not in appliedMeaning", name)
		}
		rows = append(rows, referenceRow{"cgpu.io/applied." + name, "annotation that cgpu writes", "", meaning})
	}
	for _, c := range app().Commands {
		if c.Hidden {
			continue
		}
		rows = append(rows, referenceRow{"cgpu " + c.Name, "command", "", c.Usage})
		rows = append(rows, flagRows(c)...)
	}
	slices.SortStableFunc(rows, func(a, b referenceRow) int {
		return cmp.Compare(strings.ToLower(strings.Trim(a.name, "[]")), strings.ToLower(strings.Trim(b.name, "[]")))
	})
	return rows
}

// What editAnnotations of pkg/spec records.
var appliedMeaning = map[string]string{
	"version":     "the version of cgpu that edited this container's config.json",
	"nonce":       "tells this container from an earlier one with the same ID",
	"gpus":        "the container's GPUs by UUID, each with its limit, or `native`",
	"enforcement": "`preload` where no guard holds the container",
	"limits":      "`both` or `driver` where NVIDIA's driver limits the container's memory",
	"socket":      "the guard's socket",
}

var recorded = regexp.MustCompile(`\{"([a-z]+)", `)

func appliedAnnotations(t *testing.T) (all []string) {
	t.Helper()
	text, err := os.ReadFile("../../pkg/spec/annotations.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range recorded.FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1])
	}
	if len(all) == 0 {
		t.Error("pkg/spec/annotations.go: no recorded annotation found")
	}
	return all
}

var variableName = regexp.MustCompile(`"(CGPU_[A-Z_]+)"`)

// programVariables are the variables that the programs themselves read: all that are named in the code and are not a
// container's. Names in pkg/page are C macros.
func programVariables(t *testing.T) (all []string) {
	t.Helper()
	known := map[string]bool{}
	for _, n := range quota.Names() {
		known[n.Variable], known[n.Native] = true, true
	}
	for _, top := range []string{"../../cmd", "../../pkg"} {
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "pkg/page/"):
				return nil
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range variableName.FindAllStringSubmatch(string(text), -1) {
				if !known[m[1]] {
					known[m[1]] = true
					all = append(all, m[1])
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

var placeholder = regexp.MustCompile("`([^`]+)`")

func flagRows(c *cli.Command) (rows []referenceRow) {
	for _, f := range c.Flags {
		d, ok := f.(cli.DocGenerationFlag)
		if v, hides := f.(cli.VisibleFlag); !ok || hides && !v.IsVisible() || slices.Contains(f.Names(), "help") {
			continue
		}
		var names []string
		for _, n := range f.Names() {
			names = append(names, strings.Repeat("-", min(len(n), 2))+n)
		}
		values := ""
		if m := placeholder.FindStringSubmatch(d.GetUsage()); m != nil && d.TakesValue() {
			values = m[1]
		}
		if text := strings.Trim(d.GetDefaultText(), `"`); text != "" && text != "false" {
			values = strings.TrimSpace(values + " (" + text + ")")
		}
		rows = append(rows, referenceRow{"cgpu " + c.Name + " " + strings.Join(names, ", "), "flag", values,
			placeholder.ReplaceAllString(d.GetUsage(), "$1")})
	}
	return rows
}

// tables reads the rows of pages' tables by every name in code quotes in the first column, or the second where the first
// has none. A cell with "[table] key" names the key of that table, and one with "a, b" both.
func tables(t *testing.T, paths ...string) map[string][]string {
	t.Helper()
	rows := map[string][]string{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			if !strings.HasPrefix(line, "|") {
				continue
			}
			cells := splitRow(line)
			names := placeholder.FindAllStringSubmatch(cells[0], -1)
			if len(names) == 0 && len(cells) > 1 {
				names = placeholder.FindAllStringSubmatch(cells[1], -1)
			}
			for i, m := range names {
				table, list := "", m[1]
				if head, keys, ok := strings.Cut(list, "] "); ok {
					table, list = head+"] ", keys
				}
				if head := strings.Split(cells[0], "`, `"); len(names) > 1 && len(cells) > 2 {
					// Several names with as many values: each its own.
					if values := strings.Split(cells[1], ", "); len(values) == len(names) && len(head) == len(names) {
						if rows[list] == nil {
							rows[list] = []string{m[0], values[i], cells[2]}
						}
						continue
					}
				}
				for name := range strings.SplitSeq(list, ",") {
					name, _, _ = strings.Cut(strings.TrimSpace(name), "[_")
					name = strings.TrimSuffix(strings.TrimSuffix(name, "_N"), "_0")
					if name = table + name; rows[name] == nil {
						rows[name] = cells
					}
				}
			}
		}
	}
	return rows
}

// splitRow cuts a row of a table at its bars, but not at those with a backslash.
func splitRow(line string) (cells []string) {
	const kept = "\x00"
	for cell := range strings.SplitSeq(strings.Trim(strings.ReplaceAll(line, `\|`, kept), "|"), "|") {
		cells = append(cells, strings.TrimSpace(strings.ReplaceAll(cell, kept, "|")))
	}
	return cells
}

var (
	inlineCode = regexp.MustCompile("`([^`\n]+)`")
	usesCgpu   = regexp.MustCompile(`(?:^|[|;(&]\s*|\$ |sudo )cgpu ([a-z]+)\b([^|;#&]*)`)
	longFlag   = regexp.MustCompile(`(?:^|\s|\[)--?([a-z][a-z-]*)`)
)

// The commands and flags that the pages show exist.
func TestDocsShowRealCommands(t *testing.T) {
	commands := map[string]*cli.Command{}
	for _, c := range app().Commands {
		commands[c.Name] = c
		for _, alias := range c.Aliases {
			commands[alias] = c
		}
	}
	found := 0
	for _, pattern := range []string{"../../README*.md", "../../docs/*.md", "../../docs/internals/*.md"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, code := range codeOf(string(text)) {
				for _, m := range usesCgpu.FindAllStringSubmatch(code.text, -1) {
					found++
					c, ok := commands[m[1]]
					if !ok {
						t.Errorf("%s:%d: %q: there is no cgpu %s", path, code.line, code.text, m[1])
						continue
					}
					// What stands behind "--" is another program's.
					arguments, _, _ := strings.Cut(m[2]+" ", " -- ")
					for _, f := range longFlag.FindAllStringSubmatch(arguments, -1) {
						if !hasFlag(c, f[1]) {
							t.Errorf("%s:%d: %q: cgpu %s has no flag %s", path, code.line, code.text, m[1], f[1])
						}
					}
				}
			}
		}
	}
	if found < 50 {
		t.Errorf("only %d uses of cgpu found in the pages", found)
	}
}

func hasFlag(c *cli.Command, name string) bool {
	if name == "help" || name == "h" {
		return true
	}
	return slices.ContainsFunc(c.Flags, func(f cli.Flag) bool { return slices.Contains(f.Names(), name) })
}

type codeLine struct {
	line int
	text string
}

// codeOf lists a page's code: lines of blocks with commands, and what stands in code quotes in a line.
func codeOf(page string) (all []codeLine) {
	block := ""
	for i, line := range strings.Split(page, "\n") {
		switch {
		case strings.HasPrefix(line, "```"):
			if block == "" {
				block = strings.TrimPrefix(line, "```") + " "
			} else {
				block = ""
			}
		case block == "sh " || block == "console " && strings.HasPrefix(line, "$ "), block == "" && strings.HasPrefix(line, "    "):
			all = append(all, codeLine{i + 1, strings.TrimSpace(line)})
		case block == "":
			for _, m := range inlineCode.FindAllStringSubmatch(line, -1) {
				all = append(all, codeLine{i + 1, m[1]})
			}
		}
	}
	return all
}
