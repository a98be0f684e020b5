package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/engine"
)

// target is an engine whose configuration install edits.
type target struct {
	name   string
	config func(runtime string) string // the usual file; "" is not it
	json   bool                        // the file is JSON, else TOML
	daemon string                      // the program that reads it
	unit   string                      // of systemd; "" for an engine without a daemon
	// reload makes systemd have the daemon read its configuration again.
	reload    string
	install   func(root fs.FS, config string, r engine.Request) (engine.Plan, error)
	uninstall func(root fs.FS, config, name string) (engine.Plan, error)
	check     func(config string, missing bool) checked
	// kubelet: it starts the containers of Kubernetes.
	kubelet bool
}

func targets() []target {
	same := func(path string) func(string) string { return func(string) string { return path } }
	return []target{
		{
			name: "docker", config: same(engine.DockerConfig), json: true, daemon: "dockerd", unit: "docker", reload: "reload", check: checkDockerd,
			install: func(root fs.FS, config string, r engine.Request) (engine.Plan, error) {
				text, note, err := dockerFiles(root, config)
				if err != nil {
					return engine.Plan{}, err
				}
				return engine.InstallDocker(config, text, note, r)
			},
			uninstall: func(root fs.FS, config, name string) (engine.Plan, error) {
				text, note, err := dockerFiles(root, config)
				if err != nil {
					return engine.Plan{}, err
				}
				return engine.UninstallDocker(config, text, note, name)
			},
		},
		{
			name: "containerd", config: same(engine.ContainerdConfig), daemon: "containerd", unit: "containerd", reload: "restart", check: checkContainerd, kubelet: true,
			install: func(root fs.FS, config string, r engine.Request) (engine.Plan, error) {
				return engine.InstallContainerd(root, config, containerdVersion(), r)
			},
			uninstall: func(root fs.FS, config, name string) (engine.Plan, error) {
				return engine.UninstallContainerd(root, config, containerdVersion(), name)
			},
		},
		{
			name: "k3s", config: same(engine.K3sConfig), daemon: "k3s", unit: unitOf("k3s", "k3s-agent"), reload: "restart", check: noCheck, kubelet: true,
			install: engine.InstallGenerated, uninstall: engine.UninstallGenerated,
		},
		{
			name: "rke2", config: same(engine.RKE2Config), daemon: "rke2", unit: unitOf("rke2-server", "rke2-agent"), reload: "restart", check: noCheck, kubelet: true,
			install: engine.InstallGenerated, uninstall: engine.UninstallGenerated,
		},
		{
			name: "crio", config: engine.CRIOConfig, daemon: "crio", unit: "crio", reload: "restart", check: checkCRIO, kubelet: true,
			install: engine.InstallCRIO, uninstall: engine.UninstallCRIO,
		},
		{
			name: "podman", config: engine.PodmanConfig, check: noCheck,
			install: engine.InstallPodman, uninstall: engine.UninstallPodman,
		},
	}
}

// dockerFiles reads a daemon.json and install's note beside it; nil where there is none.
func dockerFiles(root fs.FS, config string) (text, note []byte, err error) {
	for path, into := range map[string]*[]byte{config: &text, engine.DockerNote(config): &note} {
		*into, err = fs.ReadFile(root, strings.TrimPrefix(path, "/"))
		if errors.Is(err, fs.ErrNotExist) {
			*into = nil
		} else if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", path, errors.Unwrap(err))
		} else if *into == nil {
			*into = []byte{}
		}
	}
	return text, note, nil
}

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
			"Examples:\n   cgpu install docker --restart\n   cgpu install docker --default --dry-run\n   cgpu install containerd\n   cgpu install containerd --kubernetes\n   cgpu install podman --name cgpu",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "default", Usage: "make it the engine's default runtime; containers without a quota are not touched by it"},
			&cli.BoolFlag{Name: "dry-run", Usage: "show what would change, as a diff, and change nothing"},
			configFlag(),
			&cli.StringFlag{Name: "runtime-path", Usage: "`PATH` of cgpu-runtime", DefaultText: "the one beside this program"},
			&cli.BoolFlag{Name: "kubernetes", Usage: "for a node of Kubernetes: pods get what cgpu-agent allocates; containerd and crio only"},
			nameFlag(),
			&cli.StringFlag{Name: "pods", Usage: "with --kubernetes, `WHO` allocates: \"allocated\" is cgpu-agent, \"gpushare\" also gpushare's own device plugin", DefaultText: "allocated"},
			restartFlag(),
		},
		Action: func(c *cli.Context) error {
			t, r, config, err := installArguments(c)
			if err != nil {
				return err
			}
			r.Kubernetes = c.Bool("kubernetes")
			pods, err := podsFlag(c, t)
			if err != nil {
				return err
			}
			if !c.Bool("dry-run") {
				if err := dropAllLeftovers(config, t); err != nil {
					return fmt.Errorf("%s: %w", c.Command.Name, err)
				}
			}
			r.Default = c.Bool("default")
			r.Path, err = runtimePath(c.String("runtime-path"))
			if err != nil {
				return fmt.Errorf("install: %w", err)
			}
			if t.name == "docker" {
				if err := dockerFlags(config, r.Default); err != nil {
					return fmt.Errorf("install: %w", err)
				}
			}
			plan, err := t.install(os.DirFS("/"), config, r)
			if err != nil {
				return fmt.Errorf("install: %w", err)
			}
			if r.Kubernetes {
				if err := joinPods(&plan, t, pods, c.IsSet("pods")); err != nil {
					return fmt.Errorf("install: %w", err)
				}
			}
			return carryOut(c, t, config, r, plan)
		},
	}
}

func uninstallCommand() *cli.Command {
	return &cli.Command{
		Name:      "uninstall",
		Usage:     "take the runtime out of a container engine's configuration",
		ArgsUsage: "docker|containerd|k3s|rke2|crio|podman",
		Description: "What install added is taken out, also what --kubernetes wrote into cgpu.toml; the default runtime is again what it was,\n" +
			"and what others have changed since stays. If nothing else has changed, the file is again what it was before install, byte for byte.\n\n" +
			"Examples:\n   cgpu uninstall docker --restart\n   cgpu uninstall containerd --dry-run",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "dry-run", Usage: "show what would change, as a diff, and change nothing"},
			configFlag(),
			nameFlag(),
			restartFlag(),
		},
		Action: func(c *cli.Context) error {
			t, r, config, err := installArguments(c)
			if err != nil {
				return err
			}
			if !c.Bool("dry-run") {
				if err := dropAllLeftovers(config, t); err != nil {
					return fmt.Errorf("%s: %w", c.Command.Name, err)
				}
			}
			plan, err := t.uninstall(os.DirFS("/"), config, r.Name)
			if err != nil {
				return fmt.Errorf("uninstall: %w", err)
			}
			if t.kubelet {
				pods, err := withConfigFile(engine.UninstallPods)
				if err != nil {
					return fmt.Errorf("uninstall: %w", err)
				}
				plan.Join(pods)
			}
			restore(&plan, t.json)
			return carryOut(c, t, config, r, plan)
		},
	}
}

func configFlag() cli.Flag {
	return &cli.StringFlag{Name: "config", Usage: "`FILE` to edit; for CRI-O and podman the one to write", DefaultText: "the engine's usual one"}
}

func nameFlag() cli.Flag {
	return &cli.StringFlag{Name: "name", Value: "cgpu", Usage: "`NAME` of the runtime"}
}

func restartFlag() cli.Flag {
	return &cli.BoolFlag{Name: "restart", Usage: "have the engine read it: Docker reloads; containerd and CRI-O restart, if systemd runs them, and containers live on"}
}

// installArguments reads what install and uninstall have in common.
func installArguments(c *cli.Context) (t target, r engine.Request, config string, err error) {
	var names []string
	if c.NArg() == 1 {
		for _, t := range targets() {
			names = append(names, t.name)
			if t.name != c.Args().First() {
				continue
			}
			r.Name = c.String("name")
			if err := engine.CheckName(r.Name); err != nil {
				return t, r, "", usageError{fmt.Errorf("%s: --name %q: %w", c.Command.Name, r.Name, err)}
			}
			config = cmp.Or(c.String("config"), t.config(r.Name))
			if config, err = filepath.Abs(config); err != nil {
				return t, r, "", fmt.Errorf("%s: --config: %w", c.Command.Name, err)
			}
			return t, r, config, nil
		}
		return t, r, "", usageError{fmt.Errorf("%s: %q: want %s; see cgpu %[1]s --help", c.Command.Name, c.Args().First(), strings.Join(names, ", "))}
	}
	return t, r, "", usageError{fmt.Errorf("%s: want one of docker, containerd, k3s, rke2, crio, podman; see cgpu %[1]s --help", c.Command.Name)}
}

// runtimePath is where engines find cgpu-runtime.
func runtimePath(flag string) (string, error) {
	path := flag
	if path == "" {
		var err error
		if path, err = device.Program("cgpu-runtime"); err != nil {
			return "", err
		}
	}
	if err := engine.CheckPath(path); err != nil {
		return "", fmt.Errorf("--runtime-path %q: %w", path, err)
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return "", fmt.Errorf("--runtime-path %q: %w: run make install first, or name the program", path, errors.Unwrap(err))
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return "", fmt.Errorf("--runtime-path %q: want a program", path)
	}
	return path, nil
}

// carryOut makes a plan's edits, has the engine check them, and says what is to do.
func carryOut(c *cli.Context, t target, config string, r engine.Request, plan engine.Plan) error {
	w := c.App.Writer
	for _, hint := range plan.Hints {
		fmt.Fprintf(w, "note: %s\n", hint)
	}
	if len(plan.Edits) == 0 {
		return unchanged(c, t, config, r)
	}
	if c.Bool("dry-run") {
		for _, e := range plan.Edits {
			if !e.Note {
				fmt.Fprint(w, engine.Diff(e))
			}
		}
		return nil
	}
	before := t.check(config, !exists(config))
	if before.note != "" {
		fmt.Fprintf(w, "note: %s\n", before.note)
	}
	done, err := apply(plan.Edits)
	if err != nil {
		return fmt.Errorf("%s: %w", c.Command.Name, err)
	}
	if err := t.judge(config, r, before); err != nil {
		if undo := done.undo(); undo != nil {
			return fmt.Errorf("%s: %w; and putting the files back: %w", c.Command.Name, err, undo)
		}
		return fmt.Errorf("%s: %w; the files are as they were", c.Command.Name, err)
	}
	for _, line := range plan.Done {
		fmt.Fprintf(w, "%s: %s\n", config, line)
	}
	for _, line := range plan.Elsewhere {
		fmt.Fprintln(w, line)
	}
	for _, line := range done.said {
		fmt.Fprintln(w, line)
	}
	if c.Command.Name == "uninstall" {
		for _, line := range done.dropBackups(plan.Edits, t.json) {
			fmt.Fprintln(w, line)
		}
	}
	return reread(w, t, config, c.Bool("restart"), plan.Restart)
}

// unchanged is for a file that says all already: it may still be one that the engine refuses, or has not read.
func unchanged(c *cli.Context, t target, config string, r engine.Request) error {
	w := c.App.Writer
	if c.Command.Name == "install" {
		now := t.check(config, !exists(config))
		if now.err != nil {
			return fmt.Errorf("install: %s: nothing to change, but %s", config, now.note)
		}
		if err := t.effective(config, r, now); err != nil {
			return fmt.Errorf("install: %s: nothing to change, but %w", config, err)
		}
		if now.note != "" {
			fmt.Fprintf(w, "note: %s\n", now.note)
		}
	}
	if _, err := fmt.Fprintf(w, "%s: nothing to change\n", config); err != nil || !c.Bool("restart") || c.Bool("dry-run") {
		return err
	}
	return reread(w, t, config, true, false)
}

// judge has the engine check what is there now. What failed before already is not held against the edit.
func (t target) judge(config string, r engine.Request, before checked) error {
	if !before.ran || before.err != nil {
		return nil
	}
	after := t.check(config, !exists(config))
	if after.err != nil {
		return fmt.Errorf("%s refuses the edited configuration: %w", t.daemon, after.err)
	}
	if before.tree != nil && after.tree != nil {
		if foreign := engine.Foreign(before.tree, after.tree, r.Name); foreign != "" {
			return fmt.Errorf("with the edit %s would also see a change of %s: edit the configuration by hand, as in docs/install.md", t.daemon, foreign)
		}
	}
	return t.effective(config, r, after)
}

// effective requires that an installed runtime is in what the engine takes its configuration to be, where it says so.
func (t target) effective(config string, r engine.Request, now checked) error {
	if r.Path == "" || now.tree == nil || engine.CRIDisabled(now.tree) {
		return nil
	}
	program, byName := engine.Named(now.tree, r.Name)
	switch {
	case program != r.Path:
		return fmt.Errorf("%s does not see runtime %q of %s, but %q: another file that it imports overrides it; take that out, or out of its imports", t.daemon, r.Name, config, program)
	case r.Default && byName != r.Name:
		return fmt.Errorf("%s does not see the default runtime %q of %s, but %q: another file that it imports overrides it; take that out, or out of its imports", t.daemon, r.Name, config, byName)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
