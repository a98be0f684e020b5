// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/manual"
	"github.com/opencgpu/cgpu/pkg/suggest"
)

// noCommand is the error for a command that there is not.
func noCommand(a *cli.App, name string) error {
	known := []string{"help"}
	for _, c := range a.Commands {
		if !c.Hidden {
			known = append(known, c.Name)
		}
	}
	return fmt.Errorf("%q: no such command%s (cgpu help lists them)", name, suggest.DidYouMean(name, known))
}

// numberOf says what number a flag wants.
func numberOf(flags []cli.Flag, name string) string {
	for _, f := range flags {
		if _, fraction := f.(*cli.Float64Flag); fraction && slices.Contains(f.Names(), name) {
			return "a number, such as 0.5"
		}
	}
	return "a whole number"
}

// badFlag makes sentences of what package flag says of a command's flags.
func badFlag(command string, flags []cli.Flag) cli.OnUsageErrorFunc {
	var known []string
	for _, f := range flags {
		for _, name := range f.Names() {
			known = append(known, manual.Dashes(name))
		}
	}
	before, help := "", "cgpu help"
	if command != "" {
		before, help = command+": ", "cgpu "+command+" --help"
	}
	return func(_ *cli.Context, err error, _ bool) error {
		text := err.Error()
		if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
			name = manual.Dashes(strings.TrimPrefix(name, "-"))
			return usageError{fmt.Errorf("%s%s: no such option%s (%s lists them)", before, name, suggest.DidYouMean(name, known), help)}
		}
		if name, ok := strings.CutPrefix(text, "flag needs an argument: -"); ok {
			return usageError{fmt.Errorf("%s%s: wants a value (see %s)", before, manual.Dashes(strings.TrimPrefix(name, "-")), help)}
		}
		if rest, ok := strings.CutPrefix(text, "invalid boolean value "); ok {
			value, rest, _ := strings.Cut(rest, " for -")
			name, _, _ := strings.Cut(rest, ":")
			return usageError{fmt.Errorf("%s%s=%s: wants no value, or true or false (see %s)", before, manual.Dashes(name), value, help)}
		}
		if rest, ok := strings.CutPrefix(text, "invalid value "); ok {
			value, rest, _ := strings.Cut(rest, " for flag -")
			name, _, _ := strings.Cut(rest, ":")
			return usageError{fmt.Errorf("%s%s %s: want %s (see %s)", before, manual.Dashes(name), value, numberOf(flags, name), help)}
		}
		return usageError{fmt.Errorf("%s%w", before, err)}
	}
}
