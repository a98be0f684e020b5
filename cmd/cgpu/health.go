package main

import (
	"fmt"
	"io"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func healthCommand() *cli.Command {
	return &cli.Command{
		Name:      "health",
		Usage:     "show which GPUs are unhealthy and why, watch them, or take a GPU for healthy again",
		ArgsUsage: "[watch|clear GPU|clear all]",
		Description: "A GPU that is unhealthy gets no new containers: nobody is placed on it, and Kubernetes is told. A container that names it is\n" +
			"started all the same, with a warning; those that run go on. docs/health.md tells what makes a GPU unhealthy, and when it is healthy again.\n\n" +
			"watch asks the driver every second until SIGTERM or Ctrl-C; the unit cgpu-health runs it. Without it nobody notices anything. One process\n" +
			"watches a node. As long as it runs the driver is in use.\n\n" +
			"clear forgets what was reported of a GPU, after it was mended. What is still wrong is found again at once.\n\n" +
			"Examples:\n   cgpu health\n   sudo systemctl enable --now cgpu-health\n   sudo cgpu health clear 0",
		Flags: []cli.Flag{&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table or json", Value: "table"}},
		Action: func(c *cli.Context) error {
			switch args := c.Args().Slice(); {
			case len(args) == 0:
				return showHealth(c)
			case len(args) == 1 && args[0] == "watch":
				return watchHealth(c)
			case len(args) == 2 && args[0] == "clear":
				return clearHealth(c, args[1])
			}
			return usageError{fmt.Errorf("health: %q: want nothing, watch, or clear and a GPU; see cgpu health --help", c.Args().Slice())}
		},
	}
}

// gpuHealth is a GPU as cgpu health prints it.
type gpuHealth struct {
	Index      int            `json:"index"`
	UUID       string         `json:"uuid"`
	Name       string         `json:"name"`
	Healthy    bool           `json:"healthy"`
	Faults     []health.Fault `json:"faults"`
	Containers []string       `json:"containers"` // IDs of those that have it
}

// healthView is what cgpu health -o json prints.
type healthView struct {
	Watched bool        `json:"watched"` // by cgpu health watch
	GPUs    []gpuHealth `json:"gpus"`
}

func showHealth(c *cli.Context) error {
	format := c.String("o")
	if format != "table" && format != "json" {
		return usageError{fmt.Errorf("health: -o %q: want table or json", format)}
	}
	v, err := lookAtHealth(device.RunDir())
	if err != nil {
		return err
	}
	if format == "json" {
		return terminal.EncodeJSON(c.App.Writer, v, "  ")
	}
	return printHealth(c.App.Writer, v, time.Now())
}

func lookAtHealth(runDir string) (v healthView, err error) {
	t, err := node.Load(runDir)
	if err != nil {
		return v, err
	}
	state, err := health.Read(runDir)
	if err != nil {
		return v, err
	}
	records, err := ledger.Open(runDir).List()
	if err != nil {
		return v, err
	}
	v.Watched = health.Watched(runDir)
	for _, g := range t.GPUs {
		h := gpuHealth{Index: g.Index, UUID: g.UUID, Name: g.Name, Healthy: len(state.GPUs[g.UUID]) == 0, Faults: []health.Fault{}, Containers: []string{}}
		h.Faults = append(h.Faults, state.GPUs[g.UUID]...)
		for _, r := range health.Holders(records, g.UUID) {
			h.Containers = append(h.Containers, r.ID)
		}
		v.GPUs = append(v.GPUs, h)
	}
	return v, nil
}

func printHealth(w io.Writer, v healthView, now time.Time) error {
	t := newTable(w)
	t.row("GPU", "NAME", "UUID", "CONTAINERS", "HEALTH", "FOR", "WHY")
	for _, g := range v.GPUs {
		first := []any{g.Index, short(g.Name), shortUUID(g.UUID), len(g.Containers)}
		if g.Healthy {
			t.row(append(first, healthWord(""), "-", "-")...)
		}
		for _, f := range g.Faults {
			t.row(append(slices.Clone(first), healthWord(f.Text), now.Sub(f.Since).Round(time.Second), terminal.Printable(f.Text))...)
		}
	}
	if err := t.Flush(); err != nil || v.Watched {
		return err
	}
	_, err := fmt.Fprintln(w, "\nNobody watches these GPUs: systemctl enable --now cgpu-health, or cgpu health watch.")
	return err
}

func watchHealth(c *cli.Context) error {
	ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := device.MakeRunDir(device.RunDir()); err != nil {
		return err
	}
	_, _ = node.Load(device.RunDir()) // once; later ones are others' to make
	h := newHardware(device.HealthLine, healthRest)
	defer h.close()
	w := &health.Watcher{RunDir: device.RunDir(), Load: device.Load, Ask: h.ask,
		Complain: func(err error) {
			fmt.Fprintln(c.App.ErrWriter, "cgpu: warning: the GPUs are not watched:", terminal.Printable(err.Error()))
		}}
	return w.Run(ctx)
}

func clearHealth(c *cli.Context, name string) error {
	runDir := device.RunDir()
	t, err := node.Load(runDir)
	if err != nil {
		return err
	}
	gpus := t.GPUs
	if name != "all" {
		g, err := node.FindGPU(t, name)
		if err != nil {
			return fmt.Errorf("health: %w", err)
		}
		gpus = []device.GPU{g}
	}
	for _, g := range gpus {
		cleared, err := health.Clear(runDir, g.UUID)
		if err != nil {
			return err
		}
		if len(cleared) == 0 {
			fmt.Fprintf(c.App.Writer, "GPU %d: nothing was reported of it\n", g.Index)
			continue
		}
		before := health.State{GPUs: map[string][]health.Fault{g.UUID: cleared}}
		if err := health.Tell(runDir, t, before, health.State{}); err != nil {
			return err
		}
		fmt.Fprintf(c.App.Writer, "GPU %d: forgotten: %s\n", g.Index, before.Why(g.UUID))
	}
	return nil
}
