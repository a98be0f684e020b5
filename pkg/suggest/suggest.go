// SPDX-License-Identifier: Apache-2.0

// Package suggest names the known word that somebody probably meant.
package suggest

import (
	"fmt"
	"strings"
)

// DidYouMean names the known word that somebody probably meant, as a question behind a message; empty where there is none, or
// where the word is known.
func DidYouMean(word string, known []string) string {
	best, least := "", min(len(word)/3, 5)+1 // of a short word few letters may be wrong, and long ones often begin alike
	for _, k := range known {
		if k == word {
			return ""
		}
		if d := distance(strings.ToLower(word), strings.ToLower(k)); k != "" && d < least {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", best)
}

// distance is how many letters have to be added, removed, replaced or exchanged with the next one to make b of a (optimal string
// alignment).
func distance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		before, last, row = last, row, before
		row[0] = i
		for j := 1; j <= len(b); j++ {
			same := 1
			if a[i-1] == b[j-1] {
				same = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+same)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
	}
	return row[len(b)]
}
