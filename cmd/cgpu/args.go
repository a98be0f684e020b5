// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
)

// run runs a command line. Flags may stand behind arguments, as in docker's (cgpu set web --weight 3); package flag
// would take them for arguments.
func run(a *cli.App, args []string) error {
	if len(args) > 1 && args[1] == completeName {
		return printCandidates(cmp.Or[io.Writer](a.Writer, os.Stdout), a, args[2:])
	}
	args = helpFirst(args)
	if len(args) > 1 {
		if c := a.Command(args[1]); c != nil && c.Name != runName { // a command's flags are its own
			args = append(args[:2:2], flagsFirst(c.Flags, args[2:])...)
		}
	}
	return a.Run(args)
}

// helpFirst turns cgpu help COMMAND and cgpu --version into what the library knows.
func helpFirst(args []string) []string {
	if len(args) < 2 {
		return args
	}
	switch args[1] {
	case "help":
		return append(append(args[:1:1], args[2:]...), "--help")
	case "--version", "-v":
		return append(args[:1:1], "version")
	}
	return args
}

// flagsFirst moves arguments behind the flags. What follows "--" is no flag.
func flagsFirst(known []cli.Flag, args []string) []string {
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
