// SPDX-License-Identifier: Apache-2.0

//go:build integration

// Package docs holds the documentation to what the programs do: it runs every ```console block of README.md and docs/*.md,
// file by file and in order, on a private node with the simulated driver, and compares what is printed with what is shown.
//
// A block that cannot run there (a GPU, a service manager, an engine's own configuration) is marked ```sh or ```text instead.
// Run it by `make integration`, or alone: hack/with-node.sh -- go test -tags integration ./test/docs/
package docs

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// step is one command of a console block and what it shall print.
type step struct {
	line    int // of the command, from 1
	command string
	want    []string
	status  int // exit status, 0 unless the last line shown is "(exit status N)"
}

// steps reads the console blocks of a page. A command is a line that begins with "$ ", goes on in the next line after a
// backslash, and is followed by what it prints. "…" stands for any text in a line, and alone for any number of lines. A
// command without anything behind it may print what it likes.
func steps(page string) (all []step, err error) {
	inside := ""
	for i, line := range strings.Split(page, "\n") {
		fence := strings.HasPrefix(line, "```")
		switch {
		case fence && inside != "":
			inside = ""
		case fence:
			if inside = strings.TrimPrefix(line, "```"); inside == "" {
				inside = "text"
			}
		case inside != "console":
		case strings.HasPrefix(line, "$ "):
			all = append(all, step{line: i + 1, command: strings.TrimPrefix(line, "$ ")})
		case len(all) == 0:
			return nil, fmt.Errorf("line %d: %q stands in a console block before the first command: begin commands with %q", i+1, line, "$ ")
		default:
			last := &all[len(all)-1]
			if len(last.want) == 0 && strings.HasSuffix(last.command, "\\") {
				last.command += "\n" + line
				continue
			}
			last.want = append(last.want, line)
		}
	}
	if inside != "" {
		return nil, fmt.Errorf("a block of %q is not closed", inside)
	}
	for i := range all {
		s := &all[i]
		if n := len(s.want); n > 0 {
			if m := exitStatus.FindStringSubmatch(s.want[n-1]); m != nil {
				if s.status, err = strconv.Atoi(m[1]); err != nil {
					return nil, fmt.Errorf("line %d: %w", s.line, err)
				}
				if s.want = s.want[:n-1]; len(s.want) == 0 {
					s.want = nil
				}
			}
		}
	}
	return all, nil
}

var exitStatus = regexp.MustCompile(`^\(exit status (\d+)\)$`)

// shown reports that output is what a page shows. Columns may be wider or narrower, and empty lines count for nothing.
func shown(want []string, output string) bool {
	return matches(tidy(want), tidy(strings.Split(output, "\n")))
}

// tidy makes one space of many and drops empty lines.
func tidy(lines []string) (kept []string) {
	for _, l := range lines {
		if l = strings.Join(strings.Fields(l), " "); l != "" {
			kept = append(kept, l)
		}
	}
	return kept
}

func matches(want, have []string) bool {
	if len(want) == 0 {
		return len(have) == 0
	}
	if want[0] == "…" {
		for n := range len(have) + 1 {
			if matches(want[1:], have[n:]) {
				return true
			}
		}
		return false
	}
	return len(have) > 0 && like(want[0], have[0]) && matches(want[1:], have[1:])
}

// like compares one line, in which "…" stands for anything.
func like(want, have string) bool {
	parts := strings.Split(want, "…")
	for i, p := range parts {
		parts[i] = regexp.QuoteMeta(p)
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(have)
}

// looks reports a command that only looks, so that it can be given again until what was begun before it is there.
func looks(command string) bool {
	for _, prefix := range []string{"cgpu smi", "cgpu ps", "cgpu events", "cgpu inspect", "cgpu policy\n", "docker logs", "cat "} {
		if strings.HasPrefix(strings.TrimPrefix(command, "sudo ")+"\n", prefix) {
			return true
		}
	}
	return false
}
