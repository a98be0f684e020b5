// SPDX-License-Identifier: Apache-2.0

// Package jsonspan finds where values are in a JSON text, for those who edit one and leave every other byte as it is.
package jsonspan

import "strings"

// SkipSpace returns the index of the first byte at or after i that is not JSON white space.
func SkipSpace(raw []byte, i int) int {
	for i < len(raw) && (raw[i] == ' ' || raw[i] == '\n' || raw[i] == '\t' || raw[i] == '\r') {
		i++
	}
	return i
}

// Member is where a member of an object is: offsets of its key, in quotes, and of its value.
type Member struct{ Key, KeyEnd, Value, End int }

// Next finds the member of an object of valid JSON that is next at or after i, which is behind the object's brace or a member. Where there
// is none, Key is where the closing brace is.
func Next(raw []byte, i int) (m Member, ok bool) {
	i = SkipSpace(raw, i)
	if raw[i] == ',' {
		i = SkipSpace(raw, i+1)
	}
	m.Key = i
	if raw[i] == '}' {
		return m, false
	}
	m.KeyEnd = SkipValue(raw, i)
	m.Value = SkipSpace(raw, SkipSpace(raw, m.KeyEnd)+1) // over the colon
	m.End = SkipValue(raw, m.Value)
	return m, true
}

// SkipValue returns the index behind the value that starts at i. It counts brackets instead of calling itself, so
// that deep nesting costs no stack.
func SkipValue(raw []byte, i int) int {
	for depth := 0; i < len(raw); {
		switch raw[i] {
		case '"':
			for i++; i < len(raw) && raw[i] != '"'; i++ {
				if raw[i] == '\\' {
					i++
				}
			}
			i++
		case '{', '[':
			depth++
			i++
			continue
		case '}', ']':
			depth--
			i++
		case ',', ':', ' ', '\n', '\t', '\r':
			i++
			continue
		default: // number, true, false, null
			for i < len(raw) && !strings.ContainsRune(",:]} \n\t\r", rune(raw[i])) {
				i++
			}
		}
		if depth == 0 {
			return i
		}
	}
	return min(i, len(raw)) // past the end where raw is not valid JSON
}
