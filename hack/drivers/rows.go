// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// tables is the package that the facts are for, seen from the repository's root.
const tables = "pkg/rm"

var (
	row    = regexp.MustCompile(`(?m)^\t\{id: (0x[0-9a-f]+),.*$`)
	sizes  = regexp.MustCompile(`sizes: \[\]since\{(.*?\})\}`)
	branch = regexp.MustCompile(`\b(from|to): (\d+)`)
)

// rows writes the sizes of classes.go and controls.go anew from the facts. What a row means, and what is behind its pointers, is for
// people: where pointers, clients or descriptors moved, pkg/rm's tests fail until somebody has looked.
func rows(t table, tags []string, root string) (map[string]string, error) {
	out := map[string]string{}
	for file, kind := range map[string]string{"classes.go": "class", "controls.go": "control"} {
		path := filepath.Join(root, tables, file)
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		out[path] = row.ReplaceAllStringFunc(string(b), func(line string) string {
			from, to := 0, 1<<30
			for _, m := range branch.FindAllStringSubmatch(line, -1) {
				n, _ := strconv.Atoi(m[2])
				if m[1] == "from" {
					from = n
				} else {
					to = n
				}
			}
			list := sizeList(t, tags, key{kind, row.FindStringSubmatch(line)[1]}, from, to)
			if list == "" {
				return line // no header has it
			}
			return sizes.ReplaceAllLiteralString(line, "sizes: []since{"+list+"}")
		})
	}
	return out, nil
}

// sizeList is the sizes of one structure in the branches from to to, as a list of pkg/rm's type since.
func sizeList(t table, tags []string, k key, from, to int) string {
	var list []string
	last, before := "", 0
	for _, tag := range tags {
		v, _ := rm.ParseVersion(tag)
		if size, _, _ := strings.Cut(t.at(k, tag), ","); v.Major >= from && v.Major <= to && size != "-" && size != last {
			list = append(list, fmt.Sprintf("{%s, %s}", since(v, len(list) == 0, before), size))
			last = size
		}
		before = v.Major
	}
	return strings.Join(list, ", ")
}

// since is a version as digits: 0 for the first entry of a list, the begin of the branch for its first release.
func since(v rm.Version, first bool, before int) string {
	switch {
	case first:
		return "0"
	case v.Major != before:
		return fmt.Sprintf("%d_000_00", v.Major)
	}
	return fmt.Sprintf("%d_%03d_%02d", v.Major, v.Minor, v.Patch)
}
