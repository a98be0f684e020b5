// SPDX-License-Identifier: Apache-2.0

// Package cmdline reads a command line as it is typed: flags behind arguments, and what its last word could become.
package cmdline

import (
	"strings"

	"github.com/urfave/cli/v2"
)

// FlagsFirst moves arguments behind the flags. What follows "--" is no flag.
func FlagsFirst(known []cli.Flag, args []string) []string {
	var flags, rest []string
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		if arg == "--" {
			rest = append(rest, args...)
			break
		}
		if len(arg) < 2 || arg[0] != '-' {
			rest = append(rest, arg)
			continue
		}
		flags = append(flags, arg)
		if name := strings.TrimLeft(arg, "-"); wantsValue(known, name) {
			if len(args) == 0 {
				return flags // the parser says so
			}
			flags = append(flags, args[0])
			args = args[1:]
		}
	}
	if len(rest) > 0 {
		flags = append(append(flags, "--"), rest...)
	}
	return flags
}

// wantsValue reports a flag whose value is the next word. It is not for --name=value, nor for unknown names, which the
// parser complains about.
func wantsValue(known []cli.Flag, name string) bool {
	for _, f := range known {
		for _, n := range f.Names() {
			if n != name {
				continue
			}
			if g, ok := f.(*cli.GenericFlag); ok {
				b, ok := g.Value.(interface{ IsBoolFlag() bool })
				return !ok || !b.IsBoolFlag()
			}
			v, ok := f.(cli.DocGenerationFlag)
			return ok && v.TakesValue()
		}
	}
	return false
}
