// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// piece is C that is not the same in two releases, plain; empty where a release does not have it.
type piece struct{ name, before, after string }

// diff tells a person what changed from one release to the next, and whether any of it is something that the tables depend on. effects is
// the file of what was read of each call; text says that the code is wanted as well.
func diff(w io.Writer, effects string, a, b snapshot, text bool) (relevant bool, err error) {
	changes, denied := a.changes(b)
	code := a.changedCode(b)
	functions, err := changedFunctions(effects, a.tree, b.tree)
	if err != nil {
		return false, err
	}
	fmt.Fprintf(w, "%s -> %s\n", a.tag, b.tag)
	section(w, "The tables depend on this: look at each", changes)
	section(w, "Code that decides which calls there are, their sizes and what is copied for pointers: read it (-code)", names(code))
	section(w, "Functions that effects.csv was read from, and that are not the same any more (-code)", names(functions))
	section(w, "Changed in calls that are denied", denied)
	section(w, "New and in no table, so denied", a.newCalls(b))
	if text {
		for _, p := range append(code, functions...) {
			if err := p.print(w, a.tag, b.tag); err != nil {
				return false, err
			}
		}
	}
	return len(changes)+len(code) > 0, nil
}

func names(pieces []piece) (out []string) {
	for _, p := range pieces {
		switch {
		case p.before == "" && p.after == "":
			p.name += ": not found"
		case p.before == "":
			p.name += ": new"
		case p.after == "":
			p.name += ": gone"
		}
		out = append(out, p.name)
	}
	return out
}

// print shows what changed in it.
func (p piece) print(w io.Writer, from, to string) error {
	dir, err := os.MkdirTemp("", "drivers")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	before, after := filepath.Join(dir, "before"), filepath.Join(dir, "after")
	if err := errors.Join(os.WriteFile(before, []byte(p.before+"\n"), 0o600), os.WriteFile(after, []byte(p.after+"\n"), 0o600)); err != nil {
		return err
	}
	out, err := exec.Command("diff", "-u", "--label", from+" "+p.name, "--label", to+" "+p.name, before, after).Output()
	if differ := (*exec.ExitError)(nil); err != nil && !errors.As(err, &differ) {
		return err
	}
	fmt.Fprintf(w, "\n%s", out)
	return nil
}

func section(w io.Writer, title string, list []string) {
	fmt.Fprintf(w, "\n%s: %d\n", title, len(list))
	for _, l := range list {
		fmt.Fprintf(w, "  %s\n", l)
	}
}

// changes are the facts that differ, but for code: of what is let through, and of what is not.
func (a snapshot) changes(b snapshot) (out, denied []string) {
	t := table{}
	t.add(a.tag, a.facts())
	t.add(b.tag, b.facts())
	for _, k := range t.keys() {
		before, after := t.at(k, a.tag), t.at(k, b.tag)
		if before == after || k.kind == "code" {
			continue
		}
		line := k.kind + " " + k.id + " " + a.name(k, b)
		switch {
		case before == absent:
			line += ": new: " + after
		case after == absent:
			line += ": gone"
		default:
			what := differences(strings.Split(before, ","), strings.Split(after, ","))
			if moved := fieldChanges(a.layouts[a.params(k)].Fields, b.layouts[b.params(k)].Fields); moved != "" {
				what = append(what, moved)
			}
			line += ": " + strings.Join(what, "; ")
		}
		if letThrough(k, a.tag) {
			out = append(out, line)
		} else {
			denied = append(denied, line)
		}
	}
	return out, denied
}

// differences names the columns that differ.
func differences(a, b []string) (out []string) {
	for i, name := range columns[3:] {
		if a[i] != b[i] && name != "layout" {
			out = append(out, fmt.Sprintf("%s %s -> %s", name, or(a[i], "none"), or(b[i], "none")))
		}
	}
	return out
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// fieldChanges tells which fields came, went or moved; of many the first.
func fieldChanges(a, b []string) string {
	var out []string
	for _, f := range a {
		if !slices.Contains(b, f) {
			out = append(out, "-"+f)
		}
	}
	for _, f := range b {
		if !slices.Contains(a, f) {
			out = append(out, "+"+f)
		}
	}
	if n := len(out); n > 12 {
		out = append(out[:12], fmt.Sprintf("and %d more", n-12))
	}
	return strings.Join(out, " ")
}

// params is the name of the structure that a fact is about.
func (s snapshot) params(k key) string {
	switch k.kind {
	case "control":
		return s.controls[number(k.id)].params
	case "class":
		return s.classes[number(k.id)].params
	case "uvm":
		return s.uvm[number(k.id)] + "_PARAMS"
	}
	return k.id
}

func (s snapshot) name(k key, b snapshot) string {
	switch k.kind {
	case "control":
		return rm.ControlName(number(k.id))
	case "class":
		return rm.ClassName(number(k.id))
	case "uvm":
		return or(s.uvm[number(k.id)], b.uvm[number(k.id)])
	case "escape":
		return or(s.escapes[number(k.id)], b.escapes[number(k.id)])
	}
	return ""
}

// changedCode is the code that counts for the tables.
func (s snapshot) changedCode(b snapshot) (out []piece) {
	for _, c := range code {
		for _, name := range strings.Fields(or(c.functions, filepath.Base(c.file))) {
			if s.code[name] != b.code[name] {
				out = append(out, piece{name, s.code[name], b.code[name]})
			}
		}
	}
	return out
}

var reading = regexp.MustCompile(`([\w./-]+\.c):(\w+)`)

// changedFunctions compares the functions that somebody read to write testdata/effects.csv.
func changedFunctions(effects string, a, b tree) (out []piece, err error) {
	f, err := os.Open(effects)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	records, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", effects, err)
	}
	var calls []string
	at := map[string]int{} // in out
	for _, r := range records[1:] {
		for _, m := range reading.FindAllStringSubmatch(r[slices.Index(records[0], "source")], -1) {
			i, seen := at[m[0]]
			if !seen {
				if strings.HasPrefix(m[1], "g_") {
					continue // generated: the call is handed to firmware
				}
				i = len(out)
				at[m[0]] = i
				out, calls = append(out, piece{m[0], a.source(m[1], m[2]), b.source(m[1], m[2])}), append(calls, "")
			}
			calls[i] += " " + r[1]
		}
	}
	for i := range out {
		out[i].name += " (" + calls[i][1:] + ")"
	}
	return slices.DeleteFunc(out, func(p piece) bool { return p.before == p.after && p.before != "" }), nil
}

// source is a function as effects.csv names it: R/ is RM's kernel folder, K/ is UVM's, others are ends of a path. One that is dispatched
// is all that it may be dispatched to.
func (t tree) source(path, name string) string {
	path = strings.TrimPrefix(strings.TrimPrefix(path, "R/"), "K/")
	pattern := regexp.QuoteMeta(name)
	if base, ok := strings.CutSuffix(name, "_DISPATCH"); ok {
		pattern = regexp.QuoteMeta(base) + `_\w+`
	}
	var out []string
	for _, f := range t.files() {
		if strings.HasSuffix(f, "/"+path) {
			out = append(out, functions(t.read(f), pattern)...)
		}
	}
	return strings.Join(out, "\n")
}

// newCalls are what a release adds and users may make.
func (s snapshot) newCalls(b snapshot) (out []string) {
	for id, c := range b.controls {
		if _, ok := s.controls[id]; !ok && !knownControl(id) && strings.Contains(c.access, "user") {
			out = append(out, fmt.Sprintf("control %#x %s, %d bytes", id, or(c.params, "no parameters"), b.layouts[c.params].Size))
		}
	}
	for id, c := range b.classes {
		if _, ok := s.classes[id]; !ok && !knownClass(id) && c.access != "admin" && c.access != "kernel" {
			out = append(out, fmt.Sprintf("class %#x %s, %d bytes", id, or(c.params, "no parameters"), b.layouts[c.params].Size))
		}
	}
	slices.Sort(out)
	return out
}
