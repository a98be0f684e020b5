package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
)

// acts: a terminal acts on the character, or shows nothing of it: control characters, what changes the direction of text, and what
// has no width. Names of processes and containers are chosen by tenants.
func acts(r rune) bool {
	return unicode.Is(unicode.Cc, r) || unicode.Is(unicode.Cf, r) || r == '\u2028' || r == '\u2029'
}

// encodeJSON prints what goes to programs, and often to a terminal: JSON, in which characters that a terminal acts on are escaped.
// encoding/json does that for those below U+0020 only. A program reads the same.
func encodeJSON(w io.Writer, v any, indent string) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, escapeJSON(text.String()))
	return err
}

// escapeJSON escapes in JSON what acts: such characters stand in its strings only, but for the line ends between them.
func escapeJSON(text string) string {
	var b strings.Builder
	for _, r := range strings.ToValidUTF8(text, "\ufffd") {
		switch {
		case r == '\n' || !acts(r):
			b.WriteRune(r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}
