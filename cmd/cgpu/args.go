// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/cmdline"
)

// run runs a command line. Flags may stand behind arguments, as in docker's (cgpu set web --weight 3); package flag
// would take them for arguments.
func run(a *cli.App, args []string) error {
	if len(args) > 1 && args[1] == completeName {
		return cmdline.PrintCandidates(cmp.Or[io.Writer](a.Writer, os.Stdout), a, args[2:])
	}
	args = helpFirst(args)
	if len(args) > 1 {
		if c := a.Command(args[1]); c != nil && c.Name != runName { // a command's flags are its own
			args = append(args[:2:2], cmdline.FlagsFirst(c.Flags, args[2:])...)
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

// typed tells the value of a flag, and whether it was given, to whom a refusal names flags.
func typed(c *cli.Context) func(flag string) (string, bool) {
	return func(flag string) (string, bool) { return fmt.Sprint(c.Value(flag)), c.IsSet(flag) }
}
