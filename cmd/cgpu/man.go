// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/manual"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func manCommand() *cli.Command {
	return &cli.Command{
		Name:      "man",
		Usage:     "write the man pages",
		ArgsUsage: "FOLDER",
		Description: "Writes cgpu.1 and a page for each command into FOLDER, which is made if it is not there. Packages bring them along.\n\n" +
			"Examples:\n   sudo cgpu man /usr/local/share/man/man1\n   cgpu man /tmp/man && man -l /tmp/man/cgpu-smi.1",
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError{errors.New("man: want one FOLDER; see cgpu man --help")}
			}
			folder := c.Args().First()
			if err := manual.Write(c.App, version, folder); err != nil {
				return err
			}
			_, err := fmt.Fprintf(c.App.Writer, "The man pages are in %s: man -l %s shows the first\n", terminal.Printable(folder),
				terminal.Printable(filepath.Join(folder, "cgpu.1")))
			return err
		},
	}
}
