// SPDX-License-Identifier: Apache-2.0

// Command drivers keeps pkg/rm's tables true to NVIDIA's open kernel modules, which the caller brings as a git directory. Run it in the
// repository's root. docs/internals/drivers.md tells how a driver branch is added with it.
//
//	go run ./hack/drivers measure -git DIR [-keep DIR] [TAG …]   measure releases (all tags), write pkg/rm/testdata/params.csv
//	go run ./hack/drivers rows                                   write the sizes in pkg/rm's tables from that file
//	go run ./hack/drivers diff -git DIR [-code] TAG TAG          what changed from one release to another, for a person
//	go run ./hack/drivers check -git DIR TAG                     whether the tables fit a release
//	go run ./hack/drivers matrix                                 docs/drivers.md
//
// It takes the structure of a control from the driver's own method tables (src/nvidia/generated/g_*_nvoc.c), that of a class from
// resource_list.h, lets the C compiler lay them out, and reads the result from the debug information.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"slices"
	"strings"
)

const (
	facts    = tables + "/testdata/params.csv"
	readings = tables + "/testdata/effects.csv"
	page     = "docs/drivers.md"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: drivers measure|rows|diff|check|matrix; see the package's comment")
	}
	set := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	git := set.String("git", "", "git directory of NVIDIA's open-gpu-kernel-modules, with tags")
	keep := set.String("keep", "", "folder for what was measured of each release, so that it need not be measured again")
	text := set.Bool("code", false, "show what changed in the code, not only where")
	set.Parse(os.Args[2:]) // exits upon an error
	if err := run(os.Args[1], *git, *keep, *text, set.Args()); err != nil {
		log.Fatal(err)
	}
}

func run(command, git, keep string, text bool, tags []string) error {
	switch command {
	case "measure":
		return measureAll(git, keep, tags)
	case "rows":
		return writeRows()
	case "diff":
		if len(tags) != 2 {
			return fmt.Errorf("diff wants two tags")
		}
		_, err := compare(git, tags[0], tags[1], text)
		return err
	case "check":
		if len(tags) != 1 {
			return fmt.Errorf("check wants one tag")
		}
		return check(git, tags[0], text)
	case "matrix":
		p, err := matrix(".")
		if err != nil {
			return err
		}
		fmt.Print(p)
		return os.WriteFile(page, []byte(p), 0o644)
	}
	return fmt.Errorf("drivers: no command %s", command)
}

func measureAll(git, keep string, tags []string) error {
	if len(tags) == 0 {
		out, err := exec.Command("git", "--git-dir="+git, "tag").Output()
		if err != nil {
			return fmt.Errorf("%s: git tag: %w", git, err)
		}
		tags = strings.Fields(string(out))
	}
	slices.SortFunc(tags, compareTags)
	t, err := measure(git, keep, tags)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	t.write(&b, tags)
	return os.WriteFile(facts, b.Bytes(), 0o644)
}

func writeRows() error {
	t, tags, err := readTable(facts)
	if err != nil {
		return err
	}
	files, err := rows(t, tags, ".")
	if err != nil {
		return err
	}
	for path, text := range files {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// compare says whether anything changed that the tables depend on.
func compare(git, from, to string, text bool) (relevant bool, err error) {
	a, err := take(git, from)
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(a.tree.dir)
	b, err := take(git, to)
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(b.tree.dir)
	return diff(os.Stdout, readings, a, b, text)
}

// check compares a release with the newest one in the tables that is older.
func check(git, tag string, text bool) error {
	_, tags, err := readTable(facts)
	if err != nil {
		return err
	}
	base := ""
	for _, t := range tags {
		if compareTags(t, tag) < 0 {
			base = t
		}
	}
	if base == "" {
		return fmt.Errorf("nothing older than %s was measured", tag)
	}
	relevant, err := compare(git, base, tag, text)
	if err != nil {
		return err
	}
	if relevant {
		return fmt.Errorf("\n%s differs from %s in what the tables depend on", tag, base)
	}
	fmt.Printf("\n%s is served by the tables as %s is\n", tag, base)
	return nil
}
