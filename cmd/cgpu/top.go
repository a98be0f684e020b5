// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal/tty"
	"github.com/opencgpu/cgpu/pkg/top"
)

func topCommand() *cli.Command {
	return &cli.Command{
		Name:  "top",
		Usage: "watch GPUs and containers, full screen",
		Description: "GPU% is the part of the GPU's time that a container got, DUE% what its share of the GPU's busy time would have been, " +
			"while it\n" +
			"had work. HISTORY is what it got in the last three minutes, as far as cgpu top has been looking and there is room. Memory is in " +
			"GiB,\n" +
			"as cgpu smi counts it.\n\n" +
			"Keys: q quits, arrows choose a row and the column to sort by, r turns the order around, / finds by name, ID or state, p pauses,\n" +
			"and h shows all keys. Where output or input is no terminal, and with --once, it prints what it sees in one interval, and ends.\n\n" +
			filterHelp + "\n\n" +
			"Examples:\n   sudo cgpu top\n   sudo cgpu top --gpu 0 --interval 2\n   sudo cgpu top --once",
		Flags: append(filterFlags(),
			&cli.Float64Flag{Name: "interval", Usage: "look every `SECONDS`, 0.1 to 3600", Value: 1},
			&cli.BoolFlag{Name: "once", Usage: "print what is seen in one interval, and end"},
		),
		Before: noArguments,
		Action: func(c *cli.Context) error {
			every, err := everySeconds(c.Float64("interval"))
			if err != nil {
				return usageError{fmt.Errorf("top: --interval %v: %w", c.Float64("interval"), err)}
			}
			sel, err := selectionOf(c)
			if err != nil {
				return usageError{fmt.Errorf("top: %w", err)}
			}
			t := top.New(every, top.LookOf(os.Getenv), func() (snapshot.View, error) {
				v, err := node.View(device.RunDir())
				if err != nil {
					return v, err
				}
				return sel.Apply(v)
			})
			// The signals that ask a program to end; the terminal must be as it was.
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
			defer stop()
			out, _ := c.App.Writer.(*os.File)
			if screen := top.OpenScreen(os.Stdin, out); screen != nil && !c.Bool("once") && os.Getenv("TERM") != "dumb" {
				err = t.Run(ctx, screen)
			} else {
				_, columns, _ := tty.Size(out)
				err = t.Once(ctx, c.App.Writer, columns)
			}
			if err != nil {
				return fmt.Errorf("top: %w", err)
			}
			return nil
		},
	}
}
