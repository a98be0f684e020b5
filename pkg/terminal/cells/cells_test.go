// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"web-1":                    "web-1",
		"größe":                    "größe",
		"模型":                       "模型",
		"\x1b[2J\u009b":            "?[2J?",
		"a\u0301\u20dd":            "a??",
		"שלום abc":                 "???? abc",
		"\u0660\u0661":             "??",
		"\U00010900":               "?",
		"\ue000\U000f0000\u0378":   "???",
		"a\xff\u200d\u3000b\u00a0": "a??\u3000b\u00a0",
	} {
		if got := Text(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestFit(t *testing.T) {
	for _, x := range []struct {
		in    string
		n     int
		right bool
		want  string
	}{
		{"abc", 5, false, "abc  "},
		{"abc", 5, true, "  abc"},
		{"abc", 3, false, "abc"},
		{"abcd", 3, false, "ab…"},
		{"abc", 1, false, "…"},
		{"abc", 0, false, ""},
		{"模型库", 6, false, "模型库"},
		{"模型库", 5, false, "模型…"},
		{"模型库", 4, false, "模… "},
		{"模型库", 4, true, " 模…"},
		{"a模型", 3, false, "a… "},
	} {
		got := Fit(x.in, x.n, x.right)
		if got != x.want || Width(got) != x.n {
			t.Errorf("%q in %d: %q, want %q", x.in, x.n, got, x.want)
		}
	}
}

func FuzzFit(f *testing.F) {
	f.Add("模型\x1b[2J\u202e", 7)
	f.Fuzz(func(t *testing.T, s string, n int) {
		n &= 0xff
		got := Fit(Text(s), n, false)
		if !utf8.ValidString(got) || Width(got) != n || strings.ContainsFunc(got, terminal.Acts) {
			t.Errorf("%q in %d: %q", s, n, got)
		}
	})
}
