// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// hardware are the releases that all of cgpu was tried with on a real GPU (docs/measurements.md).
var hardware = []string{"580.159.04"}

// matrix is docs/drivers.md.
func matrix(root string) (string, error) {
	t, tags, err := readTable(filepath.Join(root, facts))
	if err != nil {
		return "", err
	}
	gvisor, err := os.ReadFile(filepath.Join(root, tables, "parity/parity_test.go"))
	if err != nil {
		return "", err
	}
	m := pageData{t, map[int][]string{}, versions(string(gvisor))}
	for _, tag := range tags {
		m.tags[major(tag)] = append(m.tags[major(tag)], tag)
	}
	var b strings.Builder
	fmt.Fprint(&b, `# Driver branches

<!-- made by make drivers from pkg/rm/testdata/params.csv: do not edit -->

cgpu serves the branches of NVIDIA's driver below, with open kernel modules or proprietary ones. What a branch needs was read in the open
modules, release by release: every structure that cgpu looks into was laid out by a compiler. A release of a known branch that is newer
than those read is served too: inside of a branch no structure that matters has changed since 550. A branch that is not in the table is
refused; [internals/drivers.md](internals/drivers.md) tells how to add it.

| branch | releases read | changed since the branch before | changed inside of it | compared with gVisor | on hardware |
|---|---|---|---|---|---|
`)
	before := ""
	for _, br := range m.branches() {
		list := m.tags[br]
		inside := m.inside(list)
		fmt.Fprintf(&b, "| %d | %d: %s to %s | %s | %s | %s | %s |\n", br, len(list), list[0], list[len(list)-1],
			m.count(before, list[0]), or(strings.Join(inside, ", "), "–"), m.compared(br), or(ofBranch(hardware, br), "–"))
		before = list[len(list)-1]
	}
	fmt.Fprintf(&b, "\n%s\n", refused(m.branches()))
	fmt.Fprint(&b, "\n## Structures whose size differs\n\nBytes at the end of each branch, as compiled; – where the branch has none. "+
		"All others that containers may hand to the driver\nhave the same size everywhere.\n\n")
	m.sizes(&b)
	return b.String(), nil
}

type pageData struct {
	table  table
	tags   map[int][]string // by branch
	gvisor []string
}

func major(tag string) int {
	v, _ := rm.ParseVersion(tag)
	return v.Major
}

var quoted = regexp.MustCompile(`"(\d{3}\.\d+\.\d+)"`)

func versions(text string) (out []string) {
	for _, m := range quoted.FindAllStringSubmatch(text, -1) {
		out = append(out, m[1])
	}
	return out
}

// branches are those that pkg/rm knows and releases were read of.
func (m pageData) branches() (out []int) {
	for _, s := range rm.KnownBranches() {
		if n, _ := strconv.Atoi(s); len(m.tags[n]) > 0 {
			out = append(out, n)
		}
	}
	return out
}

// count tells how many facts differ between two releases.
func (m pageData) count(a, b string) string {
	if a == "" {
		return "–"
	}
	changed, added, gone, code := 0, 0, 0, 0
	for k := range m.table {
		before, after := m.table.at(k, a), m.table.at(k, b)
		switch {
		case before == after:
		case k.kind == "code":
			code++
		case before == absent:
			added++
		case after == absent:
			gone++
		default:
			changed++
		}
	}
	return fmt.Sprintf("%d changed, %d new, %d gone, %d pieces of code", changed, added, gone, code)
}

// inside are the releases of a branch that change the size of a structure that is let through.
func (m pageData) inside(tags []string) (out []string) {
	for i, tag := range tags {
		for k := range m.table {
			old, now := m.size(k, tags[max(i-1, 0)]), m.size(k, tag)
			if letThrough(k, tag) && old != now && old != "-" && now != "-" && !slices.Contains(out, tag) {
				out = append(out, tag)
			}
		}
	}
	return out
}

// letThrough reports that a container may make this call of a driver, or hand the structure to it. Where pkg/rm does not know the driver
// that cannot be ruled out.
func letThrough(k key, tag string) bool {
	a, err := rm.ForDriver(tag, false)
	if err != nil {
		return true
	}
	switch k.kind {
	case "control":
		c, ok := a.Control(number(k.id))
		return ok && c.Kind != rm.ControlDeny
	case "class":
		c, ok := a.Class(number(k.id))
		return ok && c.Kind != rm.ClassDeny
	}
	return true
}

func (m pageData) size(k key, tag string) string {
	s, _, _ := strings.Cut(m.table.at(k, tag), ",")
	return s
}

func (m pageData) compared(branch int) string {
	return or(ofBranch(m.gvisor, branch), "–")
}

func ofBranch(tags []string, branch int) string {
	var out []string
	for _, tag := range tags {
		if major(tag) == branch && !slices.Contains(out, tag) {
			out = append(out, tag)
		}
	}
	return strings.Join(out, ", ")
}

// refused tells from which branch on allow_unknown_driver does not help either.
func refused(known []int) string {
	last := known[len(known)-1]
	text := fmt.Sprintf("A newer branch is refused, unless `allow_unknown_driver = true` lets it in with the tables of %d.", last)
	for br := last + 1; br < last+200; br++ {
		if _, err := rm.ForDriver(fmt.Sprintf("%d.10", br), true); err != nil {
			return fmt.Sprintf("%s From %d on it is refused with that setting too:\n`%s`.", text, br, strings.TrimPrefix(err.Error(), "rm: "))
		}
	}
	return text
}

// sizes writes a line for each structure of which branches have different sizes; structures that change alike share one.
func (m pageData) sizes(b *strings.Builder) {
	branches := m.branches()
	fmt.Fprint(b, "| structure of |")
	for _, br := range branches {
		fmt.Fprintf(b, " %d |", br)
	}
	fmt.Fprintf(b, "\n|---|%s\n", strings.Repeat("---:|", len(branches)))
	names, order := map[string][]string{}, []string{}
	for _, k := range m.table.keys() {
		var cells, distinct []string
		for _, br := range branches {
			size := m.size(k, m.tags[br][len(m.tags[br])-1])
			if size == "-" {
				size = "–"
			} else if !slices.Contains(distinct, size) {
				distinct = append(distinct, size)
			}
			cells = append(cells, size)
		}
		newest := m.tags[branches[len(branches)-1]]
		if len(distinct) < 2 || !letThrough(k, newest[len(newest)-1]) {
			continue
		}
		line := strings.Join(cells, " | ")
		if names[line] == nil {
			order = append(order, line)
		}
		names[line] = append(names[line], m.name(k))
	}
	for _, line := range order {
		list := names[line]
		if n := len(list); n > 3 {
			list = append(list[:2:2], fmt.Sprintf("%d more", n-2))
		}
		fmt.Fprintf(b, "| %s | %s |\n", strings.Join(list, ", "), line)
	}
}

// name is what a person calls it.
func (m pageData) name(k key) string {
	switch k.kind {
	case "class":
		return rm.ClassName(number(k.id))
	case "control":
		return rm.ControlName(number(k.id))
	case "uvm":
		runs := m.table[k]
		for i := len(runs) - 1; i >= 0; i-- {
			if name, _, _ := strings.Cut(runs[i].fact[strings.LastIndex(runs[i].fact, ",")+1:], " "); name != "" {
				return name
			}
		}
	}
	return k.id
}
