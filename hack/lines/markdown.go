// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"slices"
	"strings"
)

var item = regexp.MustCompile(`^ *(?:[-*+]|[0-9]+[.)]) +`)

// breakMarkdown fills paragraphs and items of lists. Their next line takes what a line has too much.
func breakMarkdown(text string) string {
	lines := strings.Split(text, "\n")
	fence := false
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fence = !fence
		}
		if fence || !long(line) || !prose(line) {
			continue
		}
		indent := strings.Repeat(" ", len(item.FindString(line)))
		if indent == "" {
			indent = line[:len(line)-len(strings.TrimLeft(line, " "))]
		}
		head, rest := wrap(line, line[:len(indent)], func(at int) bool {
			return outside(line, at) && words(line[at+1:])
		})
		if rest == "" {
			continue
		}
		lines[i] = head
		if i+1 < len(lines) && continues(lines[i+1], indent) {
			lines[i+1] = indent + rest + " " + strings.TrimLeft(lines[i+1], " ")
		} else {
			lines = slices.Insert(lines, i+1, indent+rest)
		}
	}
	return strings.Join(lines, "\n")
}

var definition = regexp.MustCompile(`^\[[^]]*\]:`) // of a link

func prose(line string) bool {
	return !strings.HasPrefix(line, "    ") && !strings.ContainsAny(line[:1], "\t|#<>") && !strings.HasPrefix(strings.TrimSpace(line), "|") &&
		!definition.MatchString(line)
}

// continues says that a line belongs to the paragraph of the line before, which is indented so.
func continues(line, indent string) bool {
	return strings.HasPrefix(line, indent) && words(line[len(indent):]) && prose(line) && !strings.HasSuffix(line, "  ")
}

// outside says that an offset is in no code, link or picture, which would still be right over two lines, but hard to search for.
func outside(line string, at int) bool {
	before := line[:at]
	return strings.Count(before, "`")%2 == 0 && strings.Count(before, "[") <= strings.Count(before, "]") &&
		strings.LastIndex(before, "](") <= strings.LastIndexByte(before, ')')
}
