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
