// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

func TestEncodeJSON(t *testing.T) {
	for in, want := range map[string]string{
		"größe <a>":            `"größe <a>"`,
		"\x1b[2J\x7f":          `"\u001b[2J\u007f"`,
		"\u009b2J\u0080\u009f": `"\u009b2J\u0080\u009f"`,
		"\u202egnp.exe\u2069":  `"\u202egnp.exe\u2069"`,
		"\u061c\u200e\ufeff":   `"\u061c\u200e\ufeff"`,
		"\U000e0041":           `"\udb40\udc41"`,
		"\u2028":               `"\u2028"`,
		"\xff":                 `"\ufffd"`,
		`\u009b`:               `"\\u009b"`,
		"a\nb":                 `"a\nb"`,
	} {
		var b bytes.Buffer
		if err := EncodeJSON(&b, []string{in}, "  "); err != nil {
			t.Fatal(err)
		}
		if got := b.String(); got != "[\n  "+want+"\n]\n" {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
		var back []string
		if err := json.Unmarshal(b.Bytes(), &back); err != nil || back[0] != strings.ToValidUTF8(in, "\ufffd") {
			t.Errorf("%q: reads %q, %v", in, back, err)
		}
	}
}

// What engines have written is not touched but for what acts.
func TestEscapeJSON(t *testing.T) {
	const text, want = "{\n\t\"a\":\r\n \"größe <\x7f>\"}\n", "{\n\t\"a\": \n \"größe <\\u007f>\"}\n"
	if got := EscapeJSON(text); got != want || !json.Valid([]byte(got)) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"python3":                           "python3",
		"\x1b[2J":                           "?[2J",
		"a\nb\tc":                           "a?b?c",
		"\u009b31m":                         "?31m",
		"\u202egnp.exe":                     "?gnp.exe",
		"\xff\xfe":                          "?",
		"\u2066a\u2069":                     "?a?",
		"\u200ea\u200fb\u061c":              "?a?b?",
		"w\u200beb\u200c\u200d\u2060\ufeff": "w?eb????",
		"a\u2028b\u00ad\U000e0041":          "a?b??",
		"web\u3164\u2800\u115f\ufe0f\u034f": "web?????", // no ink
		"größe":                             "größe",
	} {
		if got := Printable(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
