// SPDX-License-Identifier: Apache-2.0

//go:build integration

package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

// Every link from one page to another leads to a file that is there, and to a heading of it.
func TestLinks(t *testing.T) {
	var pages []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/internals/*.md", "docs/adr/*.md"} {
		found, err := filepath.Glob(filepath.Join("../..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	links := 0
	for _, page := range pages {
		text := read(t, page)
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			links++
			path := page
			if target != "" {
				path = filepath.Join(filepath.Dir(page), target)
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s: link to %s: there is no such file", page, m[1])
				continue
			}
			if anchor != "" && !anchors(read(t, path))[anchor] {
				t.Errorf("%s: link to %s: there is no such heading", page, m[1])
			}
		}
	}
	if links < 100 {
		t.Errorf("only %d links found in %d pages", links, len(pages))
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
)

// anchors are the names that GitHub gives a page's headings.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		all[strings.Map(func(r rune) rune {
			switch {
			case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
				return unicode.ToLower(r)
			case r == ' ':
				return '-'
			}
			return -1
		}, link.ReplaceAllString(m[1], ""))] = true
	}
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A translation gives the same commands and shows the same output.
func TestTranslation(t *testing.T) {
	var both [2][]step
	for i, page := range []string{"../../docs/quickstart.md", "../../docs/quickstart.zh-CN.md"} {
		list, err := steps(read(t, page))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			s.line, s.want = 0, tidy(s.want)
			both[i] = append(both[i], s)
		}
	}
	if diff := cmp.Diff(both[0], both[1], cmp.AllowUnexported(step{})); diff != "" {
		t.Errorf("quickstart.zh-CN.md differs (-English +Chinese):\n%s", diff)
	}
}
