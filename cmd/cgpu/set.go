// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/control"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/view"
)

func setCommand() *cli.Command {
	return &cli.Command{
		Name:      "set",
		Usage:     "change a container that runs: memory, spill, weight, percentage, priority, threads",
		ArgsUsage: "CONTAINER",
		Description: containerHelp + "\n" +
			"What was promised to others stays theirs: a change that does not fit beside it is refused. It takes effect at once,\n" +
			"for memory at the next allocation, for threads in programs that start from then on, and lasts until the container is\n" +
			"deleted or restarted. In JSON it prints the container as cgpu smi -o json does.\n\n" +
			"Examples:\n   cgpu set 3f2a --weight 3\n   cgpu set web --memory 8GiB --priority high\n   cgpu set web --spill 4GiB\n   cgpu set " +
			"3f2a --gpu 1 --percent 40\n   cgpu set member --threads 30",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "memory", Usage: "`SIZE` of the memory limit, such as 8GiB"},
			&cli.StringFlag{Name: "spill", Usage: "`SIZE` of host memory beyond the limit, such as 4GiB; or none"},
			&cli.IntFlag{Name: "weight", Usage: "`N`, 1 to 64: share of the GPU's time beside others", DefaultText: "unchanged"},
			&cli.StringFlag{Name: "percent", Usage: "`N`, 1 to 100: share of the GPU's time; or none"},
			&cli.StringFlag{Name: "priority", Usage: "`LEVEL`: best-effort, default or high"},
			&cli.StringFlag{Name: "threads", Usage: "`N`, 1 to 100: a domain member's part of the multiprocessors; or all"},
			&cli.StringFlag{Name: "gpu", Aliases: []string{"i"},
				Usage: "change only what the container has of this `GPU` (index or UUID), or of several with commas between them"},
			outputFlag(),
			&cli.BoolFlag{Name: "force", Usage: "set a memory limit or spill below what is in use: new allocations then fail until it fits"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError{errors.New("set: want one CONTAINER; see cgpu set --help")}
			}
			req, err := changeOf(c)
			if err != nil {
				return usageError{fmt.Errorf("set: %w", err)}
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			runDir := device.RunDir()
			t, err := node.Load(runDir)
			if err != nil {
				return err
			}
			if c.IsSet("gpu") {
				if req.Only, err = node.UUIDs(t, c.String("gpu")); err != nil {
					return fmt.Errorf("set: --gpu: %w", err)
				}
			}
			old, err := node.FindContainer(ledger.Open(runDir), c.Args().First())
			if err != nil {
				return err
			}
			change := control.Set{Table: t, Old: old, Request: req, Typed: typed(c)}
			if err := change.Check(c.Bool("force")); err != nil {
				return err
			}
			changed, err := control.ChangeContainer(runDir, t, old, req)
			if err != nil {
				return change.Refusal(err)
			}
			if inJSON {
				return printContainer(c.App.Writer, runDir, old.Nonce)
			}
			return view.PrintChange(c.App.Writer, t, old, changed, req)
		},
	}
}

// changeOf reads the flags.
func changeOf(c *cli.Context) (req ledger.ChangeRequest, err error) {
	if c.IsSet("memory") {
		limit, err := quota.ParseSize(c.String("memory"))
		if err != nil {
			return req, fmt.Errorf("--memory %q: %w; want a size such as 8GiB or 6144MiB", c.String("memory"), err)
		}
		req.Limit = &limit
	}
	if c.IsSet("spill") {
		var spill quota.Bytes
		if text := c.String("spill"); text != "none" && text != "0" {
			if spill, err = quota.ParseSize(text); err != nil {
				return req, fmt.Errorf("--spill %q: %w; want a size such as 4GiB or 512MiB, or none", text, err)
			}
		}
		req.Spill = &spill
	}
	if c.IsSet("weight") {
		n := c.Int("weight")
		if n < 1 || n > quota.MaxWeight {
			return req, fmt.Errorf("--weight %d: want 1 to %d", n, quota.MaxWeight)
		}
		req.Weight = &n
	}
	if c.IsSet("percent") {
		n := 0
		if text := c.String("percent"); text != "none" {
			if n, err = strconv.Atoi(text); err != nil || n < 1 || n > quota.MaxPercent {
				return req, fmt.Errorf("--percent %q: want 1 to %d, or none", text, quota.MaxPercent)
			}
		}
		req.Percent = &n
	}
	if c.IsSet("priority") {
		p, err := quota.ParsePriority(c.String("priority"))
		if err != nil {
			return req, fmt.Errorf("--priority %q: %w", c.String("priority"), err)
		}
		req.Priority = &p
	}
	if c.IsSet("threads") {
		n := 0
		if text := c.String("threads"); text != "all" {
			if n, err = strconv.Atoi(text); err != nil || n < 1 || n > quota.MaxPercent {
				return req, fmt.Errorf("--threads %q: want 1 to %d, or all", text, quota.MaxPercent)
			}
		}
		req.Threads = &n
	}
	if reflect.ValueOf(req).IsZero() {
		return req, errors.New("nothing to change: want --memory, --spill, --weight, --percent, --priority or --threads")
	}
	return req, nil
}
