// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/format"
	"strings"
	"testing"
)

// w is a text of n words of six letters.
func w(n int) string { return strings.TrimSuffix(strings.Repeat("worded ", n), " ") }

func TestGo(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"short": {"var x = f(a, b)", "var x = f(a, b)"},
		"arguments": {`var x = f("` + w(14) + `", g("a", "` + w(10) + `"))`,
			`var x = f("` + w(14) + "\",\n\tg(\"a\", \"" + w(10) + `"))`},
		"conditions": {"var x = a(" + strings.Repeat("b, ", 36) + "b) && c(d, e, f, g, h) || i",
			"var x = a(" + strings.Repeat("b, ", 36) + "b) &&\n\tc(d, e, f, g, h) || i"},
		"literal":               {`var x = "` + w(25) + `"`, `var x = "` + w(18) + " \" +\n\t\"" + w(7) + `"`},
		"raw string":            {"var x = `" + w(30) + "`", "var x = `" + w(30) + "`"},
		"lines of a raw string": {"var x = `\n" + w(30) + "\n`", "var x = `\n" + w(30) + "\n`"},
		"no space":              {`var x = "` + strings.Repeat("x", 200) + `"`, `var x = "` + strings.Repeat("x", 200) + `"`},
		"function":              {"func f() int { return g(\"" + w(17) + "\") }", "func f() int {\n\treturn g(\"" + w(17) + "\")\n}"},
		"comment":               {"// " + w(22) + "\n// next\nvar x int", "// " + w(19) + "\n// " + w(3) + " next\nvar x int"},
		"list":                  {"// " + w(22) + "\n//   - item\nvar x int", "// " + w(19) + "\n// " + w(3) + "\n//   - item\nvar x int"},
		"URL": {"// https://" + strings.Repeat("x", 150) + " a\nvar x int",
			"// https://" + strings.Repeat("x", 150) + " a\nvar x int"},
		"behind": {"var x = f(" + strings.Repeat("b, ", 36) + "b) // " + w(6),
			"// " + w(6) + "\nvar x = f(" + strings.Repeat("b, ", 36) + "b)"},
		"chain":     {`var x = f("` + w(10) + `").g("` + w(10) + `", 1)`, `var x = f("` + w(10) + "\").\n\tg(\"" + w(10) + `", 1)`},
		"two alike": {`var x, y = f("` + w(11) + `", "` + w(11) + `"), 1` + "\n", `var x, y = f("` + w(11) + "\", \"" + w(11) + "\"), 1\n"},
	} {
		const head = "package x\n\n"
		got, err := breakGo([]byte(head + c.text + "\n"))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		want, err := format.Source([]byte(head + c.want + "\n"))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if name == "two alike" {
			for line := range strings.Lines(string(got)) {
				if long(strings.TrimSuffix(line, "\n")) {
					t.Errorf("%s: %s", name, line)
				}
			}
		} else if string(got) != string(want) {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
		if again, err := breakGo(got); err != nil || string(again) != string(got) {
			t.Errorf("%s: a second time %s, %v", name, again, err)
		}
	}
	if _, err := breakGo([]byte("package x\n\nvar x = f(" + strings.Repeat("bbb, ", 40))); err == nil {
		t.Error("no Go, no error")
	}
}

func TestMarkdown(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"paragraph":  {w(22) + "\nnext\n", w(20) + "\n" + w(2) + " next\n"},
		"end":        {w(22) + "\n\nnext\n", w(20) + "\n" + w(2) + "\n\nnext\n"},
		"item":       {"- " + w(22) + "\n  next\n", "- " + w(19) + "\n  " + w(3) + " next\n"},
		"next item":  {"- " + w(22) + "\n- next\n", "- " + w(19) + "\n  " + w(3) + "\n- next\n"},
		"table":      {"| " + w(22) + " |\n", "| " + w(22) + " |\n"},
		"heading":    {"## " + w(22) + "\n", "## " + w(22) + "\n"},
		"fence":      {"```\n" + w(22) + "\n```\n" + w(21) + "\n", "```\n" + w(22) + "\n```\n" + w(20) + "\nworded\n"},
		"indented":   {"    " + w(22) + "\n", "    " + w(22) + "\n"},
		"code":       {w(18) + " `" + w(3) + "`\n", w(18) + "\n`" + w(3) + "`\n"},
		"link":       {w(18) + " [" + w(3) + "](x)\n", w(18) + "\n[" + w(3) + "](x)\n"},
		"no item":    {w(20) + " - " + w(3) + "\n", w(19) + "\nworded - " + w(3) + "\n"},
		"percent":    {w(19) + " 1234 15 % of\n", w(19) + " 1234\n15 % of\n"},
		"definition": {"[x]: http://" + w(22) + "\n", "[x]: http://" + w(22) + "\n"},
	} {
		got := breakMarkdown(c.text)
		if got != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, c.want)
		}
		if again := breakMarkdown(got); again != got {
			t.Errorf("%s: a second time\n%s", name, again)
		}
	}
}
