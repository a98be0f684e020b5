// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/engine"
	"github.com/opencgpu/cgpu/pkg/hostinstall"
)

func hostRootFlag() cli.Flag {
	return &cli.StringFlag{Name: "host-root", Usage: "in a container: `FOLDER` at which the node's file system is mounted"}
}

func hostDirFlag() cli.Flag {
	return &cli.StringFlag{Name: "host-dir", Value: hostinstall.DefaultDir, Usage: "with --host-root: `FOLDER` of the node for the programs"}
}

func engineSocketFlag() cli.Flag {
	return &cli.StringFlag{Name: "engine-socket", Usage: "with --host-root: `PATH` of the engine's socket on the node",
		DefaultText: "the usual one"}
}

// onHost does something for the node below this container.
func onHost(c *cli.Context, do func(*hostinstall.Installer, context.Context) error) error {
	verb := c.Command.Name
	for _, flag := range []string{"dry-run", "default", "runtime-path"} {
		if c.IsSet(flag) {
			return usageError{fmt.Errorf("%s: --%s %q: not with --host-root", verb, flag, fmt.Sprint(c.Value(flag)))}
		}
	}
	if inJSON, err := wantsJSON(c); inJSON || err != nil {
		return cmp.Or(err, error(usageError{fmt.Errorf("%s: -o json: not with --host-root", verb)}))
	}
	if c.NArg() != 1 || !slices.Contains([]string{"auto", "containerd", "k3s", "rke2", "crio"}, c.Args().First()) {
		return usageError{fmt.Errorf("%s: %q: with --host-root want auto, containerd, k3s, rke2 or crio; see cgpu %[1]s --help",
			verb, c.Args().First())}
	}
	o := hostinstall.Order{Root: c.String("host-root"), Dir: c.String("host-dir"), Socket: c.String("engine-socket"), Engine: c.Args().First()}
	o.Verb, o.Name, o.Restart, o.Config = verb, c.String("name"), c.Bool("restart"), c.String("config")
	for flag, path := range map[string]*string{"host-root": &o.Root, "host-dir": &o.Dir, "engine-socket": &o.Socket, "config": &o.Config} {
		if *path == "" && !c.IsSet(flag) {
			continue
		}
		if !filepath.IsAbs(*path) || filepath.Clean(*path) == "/" && flag != "host-root" {
			return usageError{fmt.Errorf("%s: --%s %q: want an absolute path", verb, flag, *path)}
		}
		*path = filepath.Clean(*path)
	}
	if err := engine.CheckName(o.Name); err != nil {
		return usageError{fmt.Errorf("%s: --name %q: %w", verb, o.Name, err)}
	}
	o.Pods, o.PodsAsked = engine.PodsAllocated, c.IsSet("pods")
	if o.PodsAsked {
		o.Pods = c.String("pods")
	}
	if o.Pods != engine.PodsAllocated && o.Pods != engine.PodsGPUShare {
		return usageError{fmt.Errorf("install: --pods %q: want %q or %q", o.Pods, engine.PodsAllocated, engine.PodsGPUShare)}
	}
	i, err := hostinstall.New(o, c.App.Writer)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
	defer stop()
	return do(i, ctx)
}
