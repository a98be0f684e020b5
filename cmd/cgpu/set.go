// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

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
		Usage:     "change a container that runs: memory, spill, weight, percentage, priority",
		ArgsUsage: "CONTAINER",
		Description: containerHelp + "\n" +
			"What was promised to others stays theirs: a change that does not fit beside it is refused. It takes effect at once,\n" +
			"for memory at the next allocation, and lasts until the container is deleted or restarted. In JSON it prints the container as\n" +
			"cgpu smi -o json does.\n\n" +
			"Examples:\n   cgpu set 3f2a --weight 3\n   cgpu set web --memory 8GiB --priority high\n   cgpu set web --spill 4GiB\n   cgpu set " +
			"3f2a --gpu 1 --percent 40",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "memory", Usage: "`SIZE` of the memory limit, such as 8GiB"},
			&cli.StringFlag{Name: "spill", Usage: "`SIZE` of host memory beyond the limit, such as 4GiB; or none"},
			&cli.IntFlag{Name: "weight", Usage: "`N`, 1 to 64: share of the GPU's time beside others", DefaultText: "unchanged"},
			&cli.StringFlag{Name: "percent", Usage: "`N`, 1 to 100: share of the GPU's time; or none"},
			&cli.StringFlag{Name: "priority", Usage: "`LEVEL`: best-effort, default or high"},
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
			if err := changeOnly(c, t, &req); err != nil {
				return fmt.Errorf("set: --gpu: %w", err)
			}
			old, err := node.FindContainer(ledger.Open(runDir), c.Args().First())
			if err != nil {
				return err
			}
			if err := enforceable(old, req); err != nil {
				return err
			}
			if err := limitOfCard(c, t, old, req); err != nil {
				return err
			}
			if !c.Bool("force") {
				if err := roomToShrink(c, t, old, req); err != nil {
					return err
				}
			}
			changed, err := control.ChangeContainer(runDir, t, old, req)
			if err != nil {
				return refusedFlag(c, err)
			}
			if inJSON {
				return printContainer(c.App.Writer, runDir, old.Nonce)
			}
			return view.PrintChange(c.App.Writer, t, old, changed, req)
		},
	}
}

// changeOnly reads --gpu.
func changeOnly(c *cli.Context, t *device.Table, req *ledger.ChangeRequest) error {
	if !c.IsSet("gpu") {
		return nil
	}
	for name := range strings.SplitSeq(c.String("gpu"), ",") {
		g, err := node.FindGPU(t, strings.TrimSpace(name))
		if err != nil {
			return err
		}
		req.Only = append(req.Only, g.UUID)
	}
	return nil
}

// limitOfCard refuses a limit that no card of the container's has room for, whoever else is there: in the words that were typed, which
// the ledger does not know.
func limitOfCard(c *cli.Context, t *device.Table, r ledger.Record, req ledger.ChangeRequest) error {
	if req.Limit == nil {
		return nil
	}
	for _, v := range r.VGPUs {
		i := slices.IndexFunc(t.GPUs, func(g device.GPU) bool { return g.UUID == v.UUID })
		if i < 0 || !req.Changes(v.UUID) || *req.Limit == v.Limit {
			continue
		}
		g := t.GPUs[i]
		if *req.Limit >= quota.MinMemory && *req.Limit <= g.Memory {
			continue
		}
		return fmt.Errorf("set: --memory %q: is %s: want %s to the %s of GPU %d; a number alone is GiB, 6000MiB are MiB",
			c.String("memory"), *req.Limit, quota.MinMemory, g.Memory.FloorMiB(), g.Index)
	}
	return nil
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
	if req.Limit == nil && req.Spill == nil && req.Weight == nil && req.Percent == nil && req.Priority == nil {
		return req, errors.New("nothing to change: want --memory, --spill, --weight, --percent or --priority")
	}
	return req, nil
}

// enforceable refuses what needs a guard, for a container that has only the preload library, or only the driver.
func enforceable(r ledger.Record, req ledger.ChangeRequest) error {
	switch {
	case req.Weight != nil && *req.Weight > 1 && r.DriverOnly:
		return control.RefusePreload(r, "set", "weight", "share out time by weight")
	case req.Spill != nil && *req.Spill != 0:
		return control.RefusePreload(r, "set", "spill", "serve device memory from host memory")
	case req.Percent != nil && *req.Percent != 0:
		return control.RefusePreload(r, "set", "percent", "enforce a percentage")
	case req.Priority != nil && *req.Priority != quota.PriorityDefault:
		return control.RefusePreload(r, "set", "priority", "carry out priorities")
	}
	return nil
}

// roomToShrink refuses a limit or spill below what the container uses, or below what it has when nobody knows its use.
func roomToShrink(c *cli.Context, t *device.Table, r ledger.Record, req ledger.ChangeRequest) error {
	s := control.ShortageOf(t, r, req)
	if s == nil {
		return nil
	}
	flag, uses := "memory", fmt.Sprintf("uses %s of its %s", view.MiB(s.Use.Used), view.MiB(s.Use.Limit))
	if s.Spill {
		flag, uses = "spill", "has spilled "+view.MiB(s.Use.Spilled)
	}
	about := fmt.Sprintf("set: --%s %q: container %s", flag, c.String(flag), view.ShortID(r.ID))
	if s.Unknown != nil {
		who := "guard does not answer"
		if r.Preload {
			who = "vGPU page cannot be read"
		}
		if r.DriverOnly {
			who = "driver alone counts it"
		}
		return fmt.Errorf("%s has more, and what it uses is not known, because its %s (%w): see cgpu smi; --force sets it anyway",
			about, who, s.Unknown)
	}
	return fmt.Errorf("%s %s on GPU %d: free some first; --force sets it anyway, and new allocations fail until it fits",
		about, uses, s.Use.Index)
}

// refusedFlag names the flag that the ledger's refusal is about.
func refusedFlag(c *cli.Context, err error) error {
	r, ok := errors.AsType[*ledger.Refusal](err)
	if !ok {
		return err
	}
	flags := []string{"memory"}
	switch {
	case r.Time:
		flags = []string{"percent", "weight", "priority"}
	case r.Spill:
		flags = []string{"spill"}
	}
	where := ""
	if r.GPU.UUID != "" {
		where = r.GPU.String() + ": "
	}
	for _, name := range flags {
		if c.IsSet(name) {
			return fmt.Errorf("set: --%s %q: %s%s; %s", name, fmt.Sprint(c.Value(name)), where, r.Reason, r.Remedy)
		}
	}
	return err
}
