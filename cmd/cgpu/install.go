// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/engine"
	"github.com/opencgpu/cgpu/pkg/hostinstall"
	"github.com/opencgpu/cgpu/pkg/install"
)

func installCommand() *cli.Command {
	return &cli.Command{
		Name:      "install",
		Usage:     "add the runtime cgpu to a container engine's configuration",
		ArgsUsage: "docker|containerd|k3s|rke2|crio|podman",
		Description: "Only what is ours is added; the rest of the file stays as it is, byte for byte. The file as it was is kept\n" +
			"in DIR.cgpu-backup beside its folder DIR. Where the engine can check its configuration it does, and the file is put back if it\n" +
			"refuses. A second install changes nothing. docs/install.md tells which files are edited.\n\n" +
			"With --kubernetes the containers of pods get what cgpu-agent allocates and nothing else: lists of annotations, CDI,\n" +
			"and pods = \"allocated\" in cgpu.toml. docs/kubernetes.md tells more.\n\n" +
			"With --host-root it works from a container, for the node whose file system is there: it also copies the programs that lie beside\n" +
			"it, into versions of which each is whole, runs cgpu-refresh, and ends when the engine has read its configuration. ENGINE may be\n" +
			"auto. It is what the optional DaemonSet cgpu-installer runs (docs/install.md).\n\n" +
			"Examples:\n   cgpu install docker --restart\n   cgpu install docker --default --dry-run\n   cgpu install containerd\n   cgpu install " +
			"containerd --kubernetes\n   cgpu install podman --name cgpu\n   cgpu install docker --dry-run -o json | jq '.files[].path'\n   cgpu " +
			"install auto --host-root /host",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "default", Usage: "make it the engine's default runtime; containers without a quota are not touched by it"},
			&cli.BoolFlag{Name: "dry-run", Usage: "show what would change, as a diff, and change nothing"},
			configFlag(),
			&cli.StringFlag{Name: "runtime-path", Usage: "`PATH` of cgpu-runtime", DefaultText: "the one beside this program"},
			&cli.BoolFlag{Name: "kubernetes", Usage: "for a node of Kubernetes: pods get what cgpu-agent allocates; containerd and crio only"},
			nameFlag(),
			&cli.StringFlag{Name: "pods",
				Usage:       "with --kubernetes, `WHO` allocates: \"allocated\" is cgpu-agent, \"gpushare\" also gpushare's own device plugin",
				DefaultText: "allocated"},
			restartFlag(), outputFlag(),
			hostRootFlag(), hostDirFlag(), engineSocketFlag(),
		},
		Action: func(c *cli.Context) error {
			if c.IsSet("host-root") {
				return onHost(c, (*hostinstall.Installer).Install)
			}
			t, o, err := installArguments(c)
			if err != nil {
				return err
			}
			o.Kubernetes, o.Default = c.Bool("kubernetes"), c.Bool("default")
			if o.Pods, err = podsFlag(c, t); err != nil {
				return err
			}
			o.PodsAsked, o.Path = c.IsSet("pods"), c.String("runtime-path")
			return installed(c, t, o, t.Install)
		},
	}
}

func uninstallCommand() *cli.Command {
	return &cli.Command{
		Name:      "uninstall",
		Usage:     "take the runtime out of a container engine's configuration",
		ArgsUsage: "docker|containerd|k3s|rke2|crio|podman",
		Description: "What install added is taken out, also what --kubernetes wrote into cgpu.toml; the default runtime is again what it was,\n" +
			"and what others have changed since stays. If nothing else has changed, the file is again what it was before install, byte for " +
			"byte.\n\n" +
			"What --kubernetes wrote stays until the engine has been restarted: by --restart, or call this again after it.\n\n" +
			"With --host-root what cgpu install --host-root did is taken back, the programs last: when no container needs them any more.\n\n" +
			"Examples:\n   cgpu uninstall docker --restart\n   cgpu uninstall containerd --dry-run\n   cgpu uninstall auto --host-root /host",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "dry-run", Usage: "show what would change, as a diff, and change nothing"},
			configFlag(),
			nameFlag(),
			restartFlag(), outputFlag(),
			hostRootFlag(), hostDirFlag(), engineSocketFlag(),
		},
		Action: func(c *cli.Context) error {
			if c.IsSet("host-root") {
				return onHost(c, (*hostinstall.Installer).Uninstall)
			}
			t, o, err := installArguments(c)
			if err != nil {
				return err
			}
			return installed(c, t, o, t.Uninstall)
		},
	}
}

func configFlag() cli.Flag {
	return &cli.StringFlag{Name: "config", Usage: "`FILE` to edit; for CRI-O and podman the one to write",
		DefaultText: "the engine's usual one"}
}

func nameFlag() cli.Flag {
	return &cli.StringFlag{Name: "name", Value: "cgpu", Usage: "`NAME` of the runtime"}
}

func restartFlag() cli.Flag {
	return &cli.BoolFlag{Name: "restart",
		Usage: "have the engine read it: Docker reloads; containerd and CRI-O restart, if systemd runs them, and containers live on"}
}

// installed does what install or uninstall are asked for, and prints what was done, as text or as JSON.
func installed(c *cli.Context, t install.Target, o install.Order, do func(io.Writer, install.Order) error) error {
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	if inJSON {
		return t.InJSON(c.App.Writer, o, do)
	}
	return do(c.App.Writer, o)
}

// installArguments reads what install and uninstall have in common.
func installArguments(c *cli.Context) (t install.Target, o install.Order, err error) {
	o = install.Order{Verb: c.Command.Name, DryRun: c.Bool("dry-run"), Restart: c.Bool("restart")}
	o.Name = c.String("name")
	var names []string
	if c.NArg() == 1 {
		for _, t := range install.Targets() {
			names = append(names, t.Name)
			if t.Name != c.Args().First() {
				continue
			}
			if err := engine.CheckName(o.Name); err != nil {
				return t, o, usageError{fmt.Errorf("%s: --name %q: %w", o.Verb, o.Name, err)}
			}
			o.Config = cmp.Or(c.String("config"), t.Config(o.Name))
			if o.Config, err = filepath.Abs(o.Config); err != nil {
				return t, o, fmt.Errorf("%s: --config: %w", o.Verb, err)
			}
			return t, o, nil
		}
		return t, o, usageError{fmt.Errorf("%s: %q: want %s; see cgpu %[1]s --help", o.Verb, c.Args().First(), strings.Join(names, ", "))}
	}
	return t, o, usageError{fmt.Errorf("%s: want one of docker, containerd, k3s, rke2, crio, podman; see cgpu %[1]s --help", o.Verb)}
}

// podsFlag is what --pods names, for --kubernetes.
func podsFlag(c *cli.Context, t install.Target) (string, error) {
	if !c.Bool("kubernetes") {
		if c.IsSet("pods") {
			return "", usageError{fmt.Errorf("install: --pods %q: only with --kubernetes", c.String("pods"))}
		}
		return "", nil
	}
	if !t.Kubelet {
		return "", usageError{fmt.Errorf("install: --kubernetes: %s does not start the containers of pods: want containerd, k3s, rke2 or crio",
			t.Name)}
	}
	value := cmp.Or(c.String("pods"), engine.PodsAllocated)
	if value != engine.PodsAllocated && value != engine.PodsGPUShare {
		return "", usageError{fmt.Errorf("install: --pods %q: want %q or %q", value, engine.PodsAllocated, engine.PodsGPUShare)}
	}
	return value, nil
}
