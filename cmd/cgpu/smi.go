// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal/tty"
	"github.com/opencgpu/cgpu/pkg/view"
)

func smiCommand() *cli.Command {
	return &cli.Command{
		Name:  "smi",
		Usage: "show the GPUs, who shares them, and what is used",
		Description: "USED is what cgpu charges: allocations and contexts of containers with a vGPU. OUTSIDE is what\n" +
			"other programs use on the same GPUs, where that is 256 MiB or more (-o json: any amount). SPILL, where a container has any, is host " +
			"memory\n" +
			"used in place of the GPU's, of what it may use; it is not in USED. UTIL is the part of the GPU's time in the last\n" +
			"second (without lines: of what the container was entitled to then), where the driver tells it.\n\n" +
			"On a terminal -o table draws lines around its columns, where they fit; -o plain, and a pipe, have columns only.\n\n" +
			filterHelp + "\n\n" +
			"Examples:\n   cgpu smi\n   cgpu smi --watch 2\n   cgpu smi -o wide\n   cgpu smi -i 0,1 --filter state=paused\n   cgpu smi " +
			"--container web --watch\n   cgpu smi --json | jq '.gpus[].vgpus[] | {id, used_bytes, limit_bytes}'",
		ArgsUsage: " ",
		Flags: append(filterFlags(),
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table, plain, wide or json", Value: "table"},
			&cli.BoolFlag{Name: "json", Usage: "the same as -o json"},
			&cli.BoolFlag{Name: "list-gpus", Aliases: []string{"L"}, Usage: "list the GPUs and their UUIDs, as nvidia-smi -L does"},
			&cli.GenericFlag{Name: "watch", Usage: "show it again every `[SECONDS]`, every second when none are given, until Ctrl-C",
				Value: new(seconds), DefaultText: "once"},
		),
		Action: func(c *cli.Context) error {
			every, err := interval(c)
			if err != nil {
				return usageError{fmt.Errorf("smi: %w", err)}
			}
			format := c.String("o")
			if c.Bool("json") {
				if c.IsSet("o") && format != "json" {
					return usageError{fmt.Errorf("smi: -o %q beside --json: want one of them", format)}
				}
				format = "json"
			}
			sel, err := selectionOf(c)
			if err != nil {
				return usageError{fmt.Errorf("smi: %w", err)}
			}
			var print func(io.Writer, snapshot.View) error
			switch format {
			case "table":
				print = view.TableFor(c.App.Writer)
			case "plain":
				print = view.PrintTable
			case "wide":
				print = view.PrintWide
			case "json":
				print = view.PrintJSON
			default:
				return usageError{fmt.Errorf("smi: -o %q: want table, plain, wide or json", format)}
			}
			if c.Bool("list-gpus") {
				print = view.PrintList
			}
			driver := nvmlclient.New(device.MemoryLine, nvmlclient.Rest)
			defer driver.Close()
			show := func(w, warnings io.Writer) error {
				v, err := node.View(device.RunDir())
				if err != nil {
					return err
				}
				if !c.Bool("list-gpus") {
					v.MeasureLimited(driver.Limited)
					v.MeasureOutside(driver.Used)
				}
				if v.Stale != "" {
					fmt.Fprintf(warnings, "cgpu: warning: %s; the next container refreshes it, or cgpu refresh\n", v.Stale)
				}
				if _, err := config.Load(device.ConfigFile()); err != nil {
					fmt.Fprintf(warnings, "cgpu: warning: no container gets a GPU until this is mended: %v\n", err)
				}
				if v, err = sel.Apply(v); err != nil {
					return fmt.Errorf("smi: %w", err)
				}
				return print(w, v)
			}
			if every == 0 {
				return show(c.App.Writer, c.App.ErrWriter)
			}
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return tty.Watch(ctx, c.App.Writer, c.App.ErrWriter, every, show)
		},
	}
}
