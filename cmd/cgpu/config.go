// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/suggest"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func configCommand() *cli.Command {
	return &cli.Command{
		Name:      "config",
		Usage:     "say whether cgpu.toml is good, without using it",
		ArgsUsage: "check [FILE]",
		Description: "Without a FILE it is the one that the node uses. Nothing is changed; cgpu refresh, or the next container, takes the " +
			"file\n" +
			"over. The exit status is 1 when something is wrong; the message has the line or the key, the value, and what is wanted.\n\n" +
			"Examples:\n   cgpu config check\n   cgpu config check ./cgpu.toml && sudo install -m 0644 cgpu.toml /etc/cgpu/",
		Flags: []cli.Flag{outputFlag()},
		Action: inFormat(func(c *cli.Context, inJSON bool) error {
			if c.Args().First() != "check" || c.NArg() > 2 {
				return usageError{fmt.Errorf("config: want check [FILE]%s; see cgpu config --help",
					suggest.DidYouMean(c.Args().First(), []string{"check"}))}
			}
			path := c.Args().Get(1)
			if path == "" {
				path = device.ConfigFile()
			} else if _, err := os.Stat(path); err != nil { // one that is named must be there
				return fmt.Errorf("config: %w", err)
			}
			_, bad := config.Load(path)
			_, err := os.Stat(path)
			v := configView{File: path, Present: !errors.Is(err, fs.ErrNotExist)}
			if bad != nil {
				v.Fault = bad.Error()
			}
			if inJSON {
				return errors.Join(terminal.EncodeJSON(c.App.Writer, v, "  "), bad)
			}
			if bad != nil {
				return bad
			}
			text := "is good"
			if !v.Present {
				text = "is not there: the defaults hold"
			}
			_, err = fmt.Fprintf(c.App.Writer, "%s %s\n", path, text)
			return err
		}),
	}
}

// configView is what cgpu config check -o json prints.
type configView struct {
	File    string `json:"file"`
	Present bool   `json:"present"`         // if not, the defaults hold
	Fault   string `json:"fault,omitempty"` // what is wrong with the file, where something is; the exit status is then 1
}
