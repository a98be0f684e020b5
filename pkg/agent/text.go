// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// tidy makes a line of at most most bytes out of text of which a tenant may have chosen parts: what acts on a terminal,
// writes from right to left or shows nothing is replaced, and not left out, so that a name does not look like another's.
func tidy(text string, most int) string {
	if len(text) > 8*most { // what is cut anyway is not looked at
		text = text[:8*most]
	}
	text = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
	if len(text) <= most {
		return text
	}
	const mark = "…"
	n := most - len(mark)
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n] + mark
}
