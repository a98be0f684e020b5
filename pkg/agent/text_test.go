// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTidy(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                     "plain",
		"a\x1b[2J\nb":               "a?[2J?b",
		"\u202eevil":                "?evil",
		"\xff\xfe":                  "??",
		"ä→":                        "ä→",
		strings.Repeat("é", 100):    strings.Repeat("é", 8) + "…",
		strings.Repeat("x", 20):     strings.Repeat("x", 20),
		strings.Repeat("y", 21):     strings.Repeat("y", 17) + "…",
		strings.Repeat("z", 10<<20): strings.Repeat("z", 17) + "…",
	} {
		if got := tidy(in, 20); got != want || !utf8.ValidString(got) || len(got) > 20 {
			t.Errorf("%.40q: %q, want %q", in, got, want)
		}
	}
}
