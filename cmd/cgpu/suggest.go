package main

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// didYouMean names the known word that somebody probably meant, as a question behind a message; empty where there is none, or
// where the word is known.
func didYouMean(word string, known []string) string {
	best, least := "", len(word)/3+1 // of a short word few letters may be wrong
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

// noCommand is the error for a command that there is not.
func noCommand(a *cli.App, name string) error {
	known := []string{"help"}
	for _, c := range a.Commands {
		if !c.Hidden {
			known = append(known, c.Name)
		}
	}
	return fmt.Errorf("%q: no such command%s (cgpu help lists them)", name, didYouMean(name, known))
}

// badFlag makes sentences of what package flag says of a command's flags.
func badFlag(command string, flags []cli.Flag) cli.OnUsageErrorFunc {
	var known []string
	for _, f := range flags {
		for _, name := range f.Names() {
			known = append(known, dashes(name))
		}
	}
	before, help := "", "cgpu help"
	if command != "" {
		before, help = command+": ", "cgpu "+command+" --help"
	}
	return func(_ *cli.Context, err error, _ bool) error {
		text := err.Error()
		if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
			name = dashes(strings.TrimPrefix(name, "-"))
			return usageError{fmt.Errorf("%s%s: no such option%s (%s lists them)", before, name, didYouMean(name, known), help)}
		}
		if name, ok := strings.CutPrefix(text, "flag needs an argument: -"); ok {
			return usageError{fmt.Errorf("%s%s: wants a value (see %s)", before, dashes(strings.TrimPrefix(name, "-")), help)}
		}
		if rest, ok := strings.CutPrefix(text, "invalid value "); ok {
			value, rest, _ := strings.Cut(rest, " for flag -")
			name, _, _ := strings.Cut(rest, ":")
			return usageError{fmt.Errorf("%s%s %s: want a whole number (see %s)", before, dashes(name), value, help)}
		}
		return usageError{fmt.Errorf("%s%w", before, err)}
	}
}
