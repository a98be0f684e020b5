// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/control"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/suggest"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

func healthCommand() *cli.Command {
	return &cli.Command{
		Name:      "health",
		Usage:     "show which GPUs are unhealthy and why, watch them, or take a GPU for healthy again",
		ArgsUsage: "[watch|clear GPU|clear all]",
		Description: "A GPU that is unhealthy gets no new containers: nobody is placed on it, and Kubernetes is told. A container that names " +
			"it is\n" +
			"started all the same, with a warning; those that run go on. docs/health.md tells what makes a GPU unhealthy, and when it is healthy " +
			"again.\n\n" +
			"watch asks the driver every second until SIGTERM or Ctrl-C; the unit cgpu-health runs it. Without it nobody notices anything. One " +
			"process\n" +
			"watches a node. As long as it runs the driver is in use.\n\n" +
			"clear forgets what was reported of a GPU, after it was mended. What is still wrong is found again at once.\n\n" +
			"Examples:\n   cgpu health\n   sudo systemctl enable --now cgpu-health\n   sudo cgpu health clear 0",
		Flags: []cli.Flag{outputFlag()},
		Action: func(c *cli.Context) error {
			switch args := c.Args().Slice(); {
			case len(args) == 0:
				return showHealth(c)
			case len(args) == 1 && args[0] == "watch":
				return watchHealth(c)
			case len(args) == 2 && args[0] == "clear":
				return clearHealth(c, args[1])
			}
			return usageError{fmt.Errorf("health: %q: want nothing, watch, or clear and a GPU%s; see cgpu health --help",
				strings.Join(c.Args().Slice(), " "),
				suggest.DidYouMean(c.Args().First(), []string{"watch", "clear"}))}
		},
	}
}

func showHealth(c *cli.Context) error {
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	v, err := view.HealthOf(device.RunDir())
	if err != nil {
		return err
	}
	if inJSON {
		return terminal.EncodeJSON(c.App.Writer, v, "  ")
	}
	return view.PrintHealth(c.App.Writer, v, time.Now())
}

func watchHealth(c *cli.Context) error {
	ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := device.MakeRunDir(device.RunDir()); err != nil {
		return err
	}
	_, _ = node.Load(device.RunDir()) // once; later ones are others' to make
	h := nvmlclient.New(device.HealthLine, nvmlclient.HealthRest)
	defer h.Close()
	w := &health.Watcher{RunDir: device.RunDir(), Load: device.Load, Ask: h.Ask,
		Complain: func(err error) {
			fmt.Fprintln(c.App.ErrWriter, "cgpu: warning: the GPUs are not watched:", terminal.Printable(err.Error()))
		}}
	return w.Run(ctx)
}

func clearHealth(c *cli.Context, name string) error {
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	w := c.App.Writer
	if inJSON {
		w = io.Discard // the state afterwards is printed
	}
	runDir := device.RunDir()
	t, err := node.Load(runDir)
	if err != nil {
		return err
	}
	gpus := t.GPUs
	if name != "all" {
		if gpus, err = node.FindGPUs(t, name); err != nil {
			return fmt.Errorf("health: %w", err)
		}
	}
	if err := control.ClearHealth(w, runDir, t, gpus); err != nil {
		return err
	}
	if inJSON {
		return showHealth(c)
	}
	return nil
}
