// SPDX-License-Identifier: Apache-2.0

// Package cells is text in the cells of a terminal's line. It is apart from pkg/terminal because of Unicode's tables, which cgpu-runtime
// needs not load at each container's start.
package cells

import (
	"strings"
	"unicode"

	"golang.org/x/text/unicode/bidi"
	"golang.org/x/text/width"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Text is text of which every character takes one or two cells of a terminal's line, in the order in which they stand. Besides what
// terminal.Printable replaces that is what is drawn upon its neighbour, what is written from the right, by which terminals turn the rest of
// the line around, and what Unicode does not know yet.
func Text(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsGraphic(r) || unicode.IsMark(r) || fromRight(r) {
			return '?'
		}
		return r
	}, terminal.Printable(s))
}

func fromRight(r rune) bool {
	p, _ := bidi.LookupRune(r)
	return p.Class() == bidi.R || p.Class() == bidi.AL || p.Class() == bidi.AN
}

// Width is how many cells what Text returns takes.
func Width(s string) (n int) {
	for _, r := range s {
		n += of(r)
	}
	return n
}

func of(r rune) int {
	if k := width.LookupRune(r).Kind(); k == width.EastAsianWide || k == width.EastAsianFullwidth {
		return 2
	}
	return 1
}

// Fit cuts what Text returns to n cells, and shows that it did; or it fills it up with blanks, at the left where right is set.
func Fit(s string, n int, right bool) string {
	space := n - Width(s)
	if space < 0 {
		kept := 0
		for i, r := range s {
			if kept+of(r) > n-1 {
				s = s[:i] + strings.Repeat("…", min(n, 1))
				break
			}
			kept += of(r)
		}
		space = n - Width(s)
	}
	if right {
		return strings.Repeat(" ", space) + s
	}
	return s + strings.Repeat(" ", space)
}
