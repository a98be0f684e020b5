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
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func configCommand() *cli.Command {
	return &cli.Command{
		Name:      "config",
		Usage:     "say whether cgpu.toml is good, without using it",
		ArgsUsage: "check [FILE]",
		Description: "Without a FILE it is the one that the node uses. Nothing is changed; cgpu refresh, or the next container, takes the file\n" +
			"over. The exit status is 1 when something is wrong; the message has the line or the key, the value, and what is wanted.\n\n" +
			"Examples:\n   cgpu config check\n   cgpu config check ./cgpu.toml && sudo install -m 0644 cgpu.toml /etc/cgpu/",
		Flags: []cli.Flag{outputFlag()},
		Action: func(c *cli.Context) error {
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			if c.Args().First() != "check" || c.NArg() > 2 {
				return usageError{errors.New("config: want check [FILE]; see cgpu config --help")}
			}
			path := c.Args().Get(1)
			if path == "" {
				path = device.ConfigFile()
			} else if _, err := os.Stat(path); err != nil { // one that is named must be there
				return fmt.Errorf("config: %w", err)
			}
			if _, err := config.Load(path); err != nil {
				return err
			}
			_, err = os.Stat(path)
			v := configView{File: path, Present: !errors.Is(err, fs.ErrNotExist)}
			if inJSON {
				return terminal.EncodeJSON(c.App.Writer, v, "  ")
			}
			text := "is good"
			if !v.Present {
				text = "is not there: the defaults hold"
			}
			_, err = fmt.Fprintf(c.App.Writer, "%s %s\n", path, text)
			return err
		},
	}
}

// configView is what cgpu config check -o json prints of a file that is good.
type configView struct {
	File    string `json:"file"`
	Present bool   `json:"present"` // if not, the defaults hold
}
