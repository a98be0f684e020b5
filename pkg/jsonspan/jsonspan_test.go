// SPDX-License-Identifier: Apache-2.0

package jsonspan

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"
)

// A value ends where encoding/json says.
func FuzzSkipValue(f *testing.F) {
	for _, text := range []string{`{"a":[1,{"b":"}\\\""}],"c":null}`, ` [ ] `, `-1.5e3,2`, `"\\" "`, `true}`, `{"a" : "\u0022"}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		start := SkipSpace(text, 0)
		end := SkipValue(text, start) // of what is no JSON: somewhere
		d := json.NewDecoder(bytes.NewReader(text))
		var v json.RawMessage
		if d.Decode(&v) != nil || !json.Valid(text) {
			return
		}
		if string(text[start:end]) != string(v) {
			t.Errorf("%q: %q, want %q", text, text[start:end], v)
		}
	})
}

func TestNext(t *testing.T) {
	for text, want := range map[string][]string{
		`{}`:                                 {"}"},
		"{ \n}":                              {"}"},
		`{"a":1}`:                            {`"a"`, "1", "}"},
		`{ "a" : {"b":[1,{}]} , "c":"}" } x`: {`"a"`, `{"b":[1,{}]}`, `"c"`, `"}"`, "}"},
		`{"a\"}":null,"a\"}":[]}`:            {`"a\"}"`, "null", `"a\"}"`, "[]", "}"},
	} {
		raw, got := []byte(text), []string(nil)
		m, more := Next(raw, 1)
		for ; more; m, more = Next(raw, m.End) {
			got = append(got, text[m.Key:m.KeyEnd], text[m.Value:m.End])
		}
		if got = append(got, text[m.Key:m.Key+1]); !slices.Equal(got, want) {
			t.Errorf("%s: %q", text, got)
		}
	}
}
