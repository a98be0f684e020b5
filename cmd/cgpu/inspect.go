// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/inspect"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// logTail is how many lines of a guard's log inspect shows.
const logTail = 50

func inspectCommand() *cli.Command {
	return &cli.Command{
		Name:      "inspect",
		Usage:     "show everything that is known of a container, as JSON",
		ArgsUsage: "CONTAINER",
		Description: "Its reservation (record), what its guard says (guard), its vGPU page as its programs see it (page), the end of the\n" +
			"guard's log, and its events. " + containerHelp + "\n" +
			"Of a container that is gone, cgpu events --container still tells.\n\n" +
			"Examples:\n   cgpu inspect web\n   cgpu inspect 3f2a | jq .guard.calls\n   cgpu inspect web --log-lines 0",
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "log-lines", Usage: "the last `N` lines of the guard's log", Value: logTail},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError{errors.New("inspect: want one CONTAINER; see cgpu inspect --help")}
			}
			lines := c.Int("log-lines")
			if lines < 0 {
				return usageError{fmt.Errorf("inspect: --log-lines %d: want 0 or more", lines)}
			}
			runDir := device.RunDir()
			r, err := node.FindContainer(ledger.Open(runDir), c.Args().First())
			if err != nil {
				return err
			}
			t, err := device.Load(runDir)
			if t == nil {
				return err
			}
			return terminal.EncodeJSON(c.App.Writer, inspect.Gather(t, runDir, r, lines), "  ")
		},
	}
}
