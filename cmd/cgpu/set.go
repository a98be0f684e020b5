package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func setCommand() *cli.Command {
	return &cli.Command{
		Name:      "set",
		Usage:     "change a container that runs: memory, weight, percentage, priority",
		ArgsUsage: "CONTAINER",
		Description: "CONTAINER is an ID, a unique beginning of one, or the name that cgpu smi shows. What was promised to others\n" +
			"stays theirs: a change that does not fit beside it is refused. It takes effect at once, for memory at the\n" +
			"next allocation, and lasts until the container is deleted or restarted.\n\n" +
			"Examples:\n   cgpu set 3f2a --weight 3\n   cgpu set web --memory 8GiB --priority high\n   cgpu set 3f2a --gpu 1 --percent 40",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "memory", Usage: "`SIZE` of the memory limit, such as 8GiB"},
			&cli.IntFlag{Name: "weight", Usage: "`N`, 1 to 64: share of the GPU's time beside others", DefaultText: "unchanged"},
			&cli.StringFlag{Name: "percent", Usage: "`N`, 1 to 100: share of the GPU's time; or none"},
			&cli.StringFlag{Name: "priority", Usage: "`LEVEL`: best-effort, default or high"},
			&cli.StringFlag{Name: "gpu", Usage: "change only what the container has of this `GPU` (index or UUID)"},
			&cli.BoolFlag{Name: "force", Usage: "set a memory limit below what is in use: new allocations then fail until it fits"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError{errors.New("set: want one CONTAINER; see cgpu set --help")}
			}
			req, err := changeOf(c)
			if err != nil {
				return usageError{fmt.Errorf("set: %w", err)}
			}
			runDir := device.RunDir()
			t, err := loadNode(runDir)
			if err != nil {
				return err
			}
			req.GPUs, req.Overcommit, req.Card = gpusOf(t), t.Config.Overcommit, t.Config.Card()
			if name := c.String("gpu"); name != "" {
				g, err := findGPU(t, name)
				if err != nil {
					return fmt.Errorf("set: --gpu: %w", err)
				}
				req.GPU = g.UUID
			}
			book := ledger.Open(runDir)
			old, err := findContainer(book, c.Args().First())
			if err != nil {
				return err
			}
			if req.Limit != nil && !c.Bool("force") {
				if err := roomToShrink(old, req, c.String("memory")); err != nil {
					return err
				}
			}
			changed, err := book.Change(old.ID, req)
			if err != nil {
				return refusedFlag(c, err)
			}
			changed.Name = old.Name
			return printChange(c.App.Writer, t, old, changed, req.GPU)
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
	if req.Limit == nil && req.Weight == nil && req.Percent == nil && req.Priority == nil {
		return req, errors.New("nothing to change: want --memory, --weight, --percent or --priority")
	}
	return req, nil
}

// roomToShrink refuses a limit below what the container uses, or below what it has when nobody knows its use.
func roomToShrink(r ledger.Record, req ledger.ChangeRequest, asked string) error {
	shrinks := false
	for _, v := range r.VGPUs {
		shrinks = shrinks || (req.GPU == "" || req.GPU == v.UUID) && *req.Limit < v.Limit
	}
	if !shrinks {
		return nil
	}
	s, err := ask(r)
	if err != nil {
		return fmt.Errorf("set: --memory %q: container %s has more, and what it uses is not known, because its guard does not answer (%w): see cgpu smi; --force sets the limit anyway",
			asked, shortID(r.ID), err)
	}
	for _, v := range s.VGPUs {
		if !v.Native && (req.GPU == "" || req.GPU == v.UUID) && v.Used > *req.Limit {
			return fmt.Errorf("set: --memory %q: container %s uses %s of its %s on GPU %d: free some first; --force sets the limit anyway, and new allocations fail until it fits",
				asked, shortID(r.ID), mib(v.Used), mib(v.Limit), v.Index)
		}
	}
	return nil
}

// refusedFlag names the flag that the ledger's refusal is about.
func refusedFlag(c *cli.Context, err error) error {
	r, ok := errors.AsType[*ledger.Refusal](err)
	if !ok {
		return err
	}
	flags := []string{"memory"}
	if r.Time {
		flags = []string{"percent", "weight", "priority"}
	}
	for _, name := range flags {
		if c.IsSet(name) {
			return fmt.Errorf("set: --%s %q: %s: %s; %s", name, fmt.Sprint(c.Value(name)), r.GPU, r.Reason, r.Remedy)
		}
	}
	return err
}

// printChange tells what is different, a line for each slice.
func printChange(w io.Writer, t *device.Table, old, changed ledger.Record, only string) error {
	for i, now := range changed.VGPUs {
		if only != "" && now.UUID != only {
			continue
		}
		was := now
		if i < len(old.VGPUs) && old.VGPUs[i].UUID == now.UUID {
			was = old.VGPUs[i]
		}
		var diffs []string
		diff := func(what, before, after string) {
			if before != after {
				diffs = append(diffs, fmt.Sprintf("%s %s → %s", what, before, after))
			}
		}
		diff("memory", mib(was.Limit), mib(now.Limit))
		diff("weight", strconv.Itoa(was.Weight), strconv.Itoa(now.Weight))
		diff("percent", orNone(was.Percent), orNone(now.Percent))
		diff("priority", was.Priority.String(), now.Priority.String())
		if len(diffs) == 0 {
			diffs = []string{"nothing to change"}
		}
		gpu := shortUUID(now.UUID)
		for _, g := range t.GPUs {
			if g.UUID == now.UUID {
				gpu = strconv.Itoa(g.Index)
			}
		}
		if _, err := fmt.Fprintf(w, "%s%s, GPU %s: %s\n", shortID(changed.ID), label(changed), gpu, strings.Join(diffs, ", ")); err != nil {
			return err
		}
	}
	return nil
}

func orNone(n int) string {
	if n == 0 {
		return "none"
	}
	return strconv.Itoa(n)
}
