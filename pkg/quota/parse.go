// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"math/bits"
	"strings"
)

// maxNumber bounds the length of a number before it is parsed, so that megabytes of digits cost nothing.
const maxNumber = 32

// parseWhole reads a positive whole number of decimal digits; it returns the reason for refusing.
func parseWhole(v, want string) (uint64, string) {
	if !isDigits(v) {
		return 0, want
	}
	if len(v) > maxNumber {
		return 0, "has too many digits; " + want
	}
	n, ok := digits(v)
	if !ok {
		return 0, "is too large; " + want
	}
	if n == 0 {
		return 0, "is zero; " + want
	}
	return n, ""
}

// parseSize reads "6", "1.5" (of unit), "6GiB", "1.5GiB", "512M", … and rounds down to a whole MiB.
func parseSize(v string, unit Bytes) (Bytes, string) {
	end := 0
	for end < len(v) && (isDigit(v[end]) || v[end] == '.') {
		end++
	}
	number, suffix := v[:end], v[end:]
	whole, fraction, hasPoint := strings.Cut(number, ".")
	if !isDigits(whole) || hasPoint && !isDigits(fraction) {
		return 0, wantSize
	}
	if suffix != "" {
		if unit = parseUnit(suffix); unit == 0 {
			return 0, wantSize
		}
	}
	// Nine decimal places of a GiB are about a byte; and fraction × unit stays below 2^64.
	if len(whole) > maxNumber || len(fraction) > 9 {
		return 0, "has too many digits; " + wantSize
	}
	w, ok := digits(whole)
	hi, size := bits.Mul64(w, uint64(unit))
	if !ok || hi != 0 {
		return 0, "is too large; " + wantSize
	}
	if fraction != "" {
		f, _ := digits(fraction)
		tens := uint64(1)
		for range fraction {
			tens *= 10
		}
		var carry uint64
		if size, carry = bits.Add64(size, f*uint64(unit)/tens, 0); carry != 0 {
			return 0, "is too large; " + wantSize
		}
	}
	switch limit := Bytes(size).FloorMiB(); {
	case size == 0:
		return 0, "is zero; " + wantSize
	case limit == 0:
		return 0, "is less than 1MiB; " + wantSize
	default:
		return limit, ""
	}
}

// parseUnit returns the size of a unit, 0 when it is none. All are binary: 6G and 6GB are 6 GiB, as in docker's --memory.
func parseUnit(u string) Bytes {
	switch {
	case len(u) > 3:
		return 0
	case strings.EqualFold(u, "GiB"), strings.EqualFold(u, "Gi"), strings.EqualFold(u, "GB"), strings.EqualFold(u, "G"):
		return GiB
	case strings.EqualFold(u, "MiB"), strings.EqualFold(u, "Mi"), strings.EqualFold(u, "MB"), strings.EqualFold(u, "M"):
		return MiB
	}
	return 0
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// isDigits reports that v is one or more decimal digits: no sign, no space.
func isDigits(v string) bool {
	for i := range len(v) {
		if !isDigit(v[i]) {
			return false
		}
	}
	return v != ""
}

// digits converts decimal digits; ok is false when they pass 64 bits.
func digits(v string) (n uint64, ok bool) {
	for i := range len(v) {
		hi, product := bits.Mul64(n, 10)
		sum, carry := bits.Add64(product, uint64(v[i]-'0'), 0)
		if hi != 0 || carry != 0 {
			return 0, false
		}
		n = sum
	}
	return n, true
}
