// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

func psCommand() *cli.Command {
	return &cli.Command{
		Name:  "ps",
		Usage: "list the processes that use GPU memory, and whose they are",
		Description: "A line for each process and GPU. PID is the process on the host, INSIDE its number in the container. USED is what\n" +
			"cgpu charges it: memory that processes share counts for each of them. In preload mode nobody knows the processes.\n\n" +
			filterHelp + "\n\n" +
			"Examples:\n   cgpu ps\n   cgpu ps --gpu 0\n   cgpu ps --container web -o json | jq '.[].pid'",
		ArgsUsage: " ",
		Flags:     append(filterFlags(), outputFlag()),
		Before:    noArguments,
		Action: func(c *cli.Context) error {
			sel, err := selectionOf(c)
			if err != nil {
				return usageError{fmt.Errorf("ps: %w", err)}
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			v, err := node.View(device.RunDir())
			if err != nil {
				return err
			}
			if v, err = sel.Apply(v); err != nil {
				return fmt.Errorf("ps: %w", err)
			}
			list := view.ProcessesOf(v)
			if inJSON {
				return terminal.EncodeJSON(c.App.Writer, list, "  ")
			}
			return view.PrintProcesses(c.App.Writer, list)
		},
	}
}
