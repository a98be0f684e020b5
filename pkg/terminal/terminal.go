// SPDX-License-Identifier: Apache-2.0

// Package terminal is text for people: what others chose, such as names of containers, is written so that a terminal shows it and
// does not obey it.
package terminal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
)

// Acts: a terminal acts on the character, or shows nothing of it: control characters, what changes the direction of text, and what
// has no width or no ink, such as Hangul's fillers. Names of processes and containers are chosen by tenants.
func Acts(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Variation_Selector, unicode.Other_Default_Ignorable_Code_Point) || r == '\u2800'
}

// EncodeJSON prints what goes to programs, and often to a terminal: JSON, in which characters that a terminal acts on are escaped.
// encoding/json does that for those below U+0020 only. A program reads the same.
func EncodeJSON(w io.Writer, v any, indent string) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", indent)
	e.SetEscapeHTML(false) // no browser reads it
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, EscapeJSON(text.String()))
	return err
}

// EscapeJSON escapes in JSON what Acts: such characters stand in its strings only, but for the white
// space between them, of which a carriage return becomes a blank.
func EscapeJSON(text string) string {
	var b strings.Builder
	for _, r := range strings.ToValidUTF8(text, "\ufffd") {
		switch {
		case r == '\n' || r == '\t' || !Acts(r):
			b.WriteRune(r)
		case r == '\r':
			b.WriteByte(' ')
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// Printable replaces what a terminal would act on or show nothing of: names of processes and containers are chosen by tenants.
// Replaced and not left out, so that a name does not look like another's.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if Acts(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// Cut shortens s to n runes, and shows that it did.
func Cut(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return strings.TrimRight(string(r[:n-1]), " ") + "…"
}

// Plural is so many of something, with an s where there is not one.
func Plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}
