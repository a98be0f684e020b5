// SPDX-License-Identifier: Apache-2.0

// Lines names the lines of Go and Markdown files that have more than 140 characters and could be broken; with -w it breaks them.
// Raw strings, tables, blocks of code, and what has no place to break, such as a URL, may be longer.
//
//	go run ./hack/lines [-w] FILE...
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

const limit = 140

func main() {
	write := flag.Bool("w", false, "break them")
	flag.Parse()
	status := 0
	for _, name := range flag.Args() {
		found, err := look(name, *write)
		if err != nil {
			fmt.Fprintf(os.Stderr, "lines: %s: %v\n", name, err)
			status = 1
		}
		if found > 0 && !*write {
			fmt.Fprintf(os.Stderr, "%s:%d: a line of more than %d characters (go run ./hack/lines -w %s)\n", name, found, limit, name)
			status = 1
		}
	}
	os.Exit(status)
}

// look returns the number of the first line of a file that breaking it changes, or 0.
func look(name string, write bool) (int, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, err
	}
	broken := text
	if filepath.Ext(name) == ".go" {
		broken, err = breakGo(text)
	} else {
		broken = []byte(breakMarkdown(string(text)))
	}
	if err != nil || bytes.Equal(broken, text) {
		return 0, err
	}
	if write {
		return 0, os.WriteFile(name, broken, 0o644)
	}
	old, now := strings.Split(string(text), "\n"), strings.Split(string(broken), "\n")
	for i := range old {
		if old[i] != now[i] {
			return i + 1, nil
		}
	}
	return len(old), nil
}

func long(line string) bool { return utf8.RuneCountInString(line) > limit }

// wrap cuts a line of words at the last space where what comes before is short enough and fits says that it may be cut. Without such a
// space rest is empty.
func wrap(line, indent string, fits func(at int) bool) (head, rest string) {
	at, n := 0, 0
	for i, c := range line {
		if n++; n > limit+1 {
			break
		}
		if c == ' ' && i > len(indent) && strings.TrimSpace(line[len(indent):i]) != "" && fits(i) {
			at = i
		}
	}
	if at == 0 {
		return line, ""
	}
	return line[:at], line[at+1:]
}
