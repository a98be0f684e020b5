// SPDX-License-Identifier: Apache-2.0

// Package install adds the runtime to a container engine's configuration and takes it out again: it makes the edits that pkg/engine
// plans, has the engine check them, and puts the files back where it refuses.
package install

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/engine"
)

// Target is an engine whose configuration install edits.
type Target struct {
	Name   string
	Config func(runtime string) string // the usual file; "" is not it
	json   bool                        // the file is JSON, else TOML
	daemon string                      // the program that reads it
	unit   string                      // of systemd; "" for an engine without a daemon
	// reload makes systemd have the daemon read its configuration again.
	reload        string
	planInstall   func(root fs.FS, config string, r engine.Request) (engine.Plan, error)
	planUninstall func(root fs.FS, config, name string) (engine.Plan, error)
	check         func(config string, missing bool) checked
	// Kubelet: it starts the containers of Kubernetes.
	Kubelet bool
}

func Targets() []Target {
	same := func(path string) func(string) string { return func(string) string { return path } }
	return []Target{
		{
			Name: "docker", Config: same(engine.DockerConfig), json: true, daemon: "dockerd", unit: "docker", reload: "reload", check: checkDockerd,
			planInstall: func(root fs.FS, config string, r engine.Request) (engine.Plan, error) {
				text, note, err := dockerFiles(root, config)
				if err != nil {
					return engine.Plan{}, err
				}
				return engine.InstallDocker(config, text, note, r)
			},
			planUninstall: func(root fs.FS, config, name string) (engine.Plan, error) {
				text, note, err := dockerFiles(root, config)
				if err != nil {
					return engine.Plan{}, err
				}
				return engine.UninstallDocker(config, text, note, name)
			},
		},
		{
			Name: "containerd", Config: same(engine.ContainerdConfig), daemon: "containerd", unit: "containerd", reload: "restart",
			check: checkContainerd, Kubelet: true,
			planInstall: func(root fs.FS, config string, r engine.Request) (engine.Plan, error) {
				return engine.InstallContainerd(root, config, containerdVersion(), r)
			},
			planUninstall: func(root fs.FS, config, name string) (engine.Plan, error) {
				return engine.UninstallContainerd(root, config, containerdVersion(), name)
			},
		},
		{
			Name: "k3s", Config: same(engine.K3sConfig), daemon: "k3s", unit: unitOf("k3s", "k3s-agent"), reload: "restart", check: noCheck,
			Kubelet: true, planInstall: engine.InstallGenerated, planUninstall: engine.UninstallGenerated,
		},
		{
			Name: "rke2", Config: same(engine.RKE2Config), daemon: "rke2", unit: unitOf("rke2-server", "rke2-agent"),
			reload: "restart", check: noCheck,
			Kubelet: true, planInstall: engine.InstallGenerated, planUninstall: engine.UninstallGenerated,
		},
		{
			Name: "crio", Config: engine.CRIOConfig, daemon: "crio", unit: "crio", reload: "restart", check: checkCRIO, Kubelet: true,
			planInstall: engine.InstallCRIO, planUninstall: engine.UninstallCRIO,
		},
		{
			Name: "podman", Config: engine.PodmanConfig, check: noCheck,
			planInstall: engine.InstallPodman, planUninstall: engine.UninstallPodman,
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

// Order is what a command line asks for.
type Order struct {
	engine.Request        // its Path may be empty: the cgpu-runtime beside this program
	Verb           string // "install" or "uninstall"
	Config         string // the file to edit
	DryRun         bool
	Restart        bool   // have the engine read it
	Pods           string // with Kubernetes, who allocates
	PodsAsked      bool   // somebody has said so
	// Watch, where it is set, is told of a change, and has the engine read the files (Reread).
	Watch Watch
	// Edited, where it is set, is told of each file that was changed, or of which a dry run shows the change, in place of a diff.
	Edited func(engine.Edit)
	// KeepPods: uninstall leaves who allocates to pods in cgpu.toml, as the engine may still have the runtime.
	KeepPods bool
}

// Watch follows a change of the engine's files.
type Watch interface {
	Changing() error                 // the first file changes next
	Changed(undo func() error) error // all did; undo puts them back, unless others have changed them since
	PutBack() error                  // they are as they were
}

// Unwatched is a change that the engine does not read.
type Unwatched struct{}

func (Unwatched) Changing() error            { return nil }
func (Unwatched) Changed(func() error) error { return nil }
func (Unwatched) PutBack() error             { return nil }

// Install adds the runtime to the engine's configuration, and tells w what was done.
func (t Target) Install(w io.Writer, o Order) error {
	plan, err := t.planned(&o)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Verb, err)
	}
	return t.carryOut(w, o, plan)
}

// planned is the plan of install; it finds the runtime's path.
func (t Target) planned(o *Order) (plan engine.Plan, err error) {
	if !o.DryRun {
		if err := dropAllLeftovers(o.Config, t); err != nil {
			return plan, err
		}
	}
	if o.Path, err = runtimePath(o.Path); err != nil {
		return plan, err
	}
	if t.Name == "docker" {
		if err := dockerFlags(o.Config, o.Default); err != nil {
			return plan, err
		}
	}
	if plan, err = t.planInstall(os.DirFS("/"), o.Config, o.Request); err != nil {
		return plan, err
	}
	if o.Kubernetes {
		err = joinPods(&plan, t, o.Pods, o.PodsAsked)
	}
	return plan, err
}

// Uninstall takes the runtime out of the engine's configuration, and tells w what was done. With o.Path only one with that program.
func (t Target) Uninstall(w io.Writer, o Order) error {
	if !o.DryRun {
		if err := dropAllLeftovers(o.Config, t); err != nil {
			return fmt.Errorf("%s: %w", o.Verb, err)
		}
	}
	plan, err := t.planUninstall(os.DirFS("/"), o.Config, o.Name)
	if err != nil {
		return fmt.Errorf("uninstall: %w", err)
	}
	if has := plan.Runtimes[o.Name]; o.Path != "" && has != "" && has != o.Path {
		return fmt.Errorf("uninstall: %s: the program of runtime %q is %q, not %q: others put it there, and it stays: cgpu uninstall takes it "+
			"out",
			o.Config, o.Name, has, o.Path)
	}
	o.Path = "" // none is installed
	if !t.Kubelet || o.KeepPods {
		return t.takeOut(w, o, plan)
	}
	return t.uninstallPods(w, o, plan)
}

// uninstallPods takes the runtime out of an engine that starts pods, and then who allocates to pods out of cgpu.toml: until it was
// restarted the engine has the runtime still, and a pod would get what it asks for by itself.
func (t Target) uninstallPods(w io.Writer, o Order, plan engine.Plan) error {
	pods, err := leavePods(plan, o.Name)
	if err != nil {
		return fmt.Errorf("uninstall: %w", err)
	}
	last := len(pods.Edits) > 0
	if last && len(plan.Edits) > 0 && !restarts(t, o.Config, o.Restart) {
		plan.Hints = append(plan.Hints, fmt.Sprintf("%s: pods stays, since %s has the runtime until it is restarted: then run this command again",
			pods.Edits[0].Path, t.daemon))
		last = false
	}
	plan.Hints = append(plan.Hints, pods.Hints...)
	if len(plan.Edits) > 0 || !last || o.Restart {
		if err := t.takeOut(w, o, plan); err != nil || !last {
			return err
		}
	}
	pods.Hints = nil
	o.Watch = Unwatched{}
	return t.takeOut(w, o, pods)
}

// takeOut carries out a plan of uninstall.
func (t Target) takeOut(w io.Writer, o Order, plan engine.Plan) error {
	restore(&plan, t.json)
	return t.carryOut(w, o, plan)
}

// Program is the program of a runtime of the engine's configuration, by name; "" if there is none.
func (t Target) Program(config, name string) (string, error) {
	plan, err := t.planUninstall(os.DirFS("/"), config, name)
	return plan.Runtimes[name], err
}

// Refused is why the engine does not start with its configuration, where it can be asked.
func (t Target) Refused(config string) error {
	if now := t.check(config, !exists(config)); now.err != nil {
		return errors.New(now.note)
	}
	return nil
}

// State is the folder in which the engine keeps what runs, if it says so.
func (t Target) State(config string) string {
	state, _ := t.check(config, !exists(config)).tree["state"].(string)
	return state
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
func (t Target) carryOut(w io.Writer, o Order, plan engine.Plan) error {
	for _, hint := range plan.Hints {
		fmt.Fprintf(w, "note: %s\n", hint)
	}
	if len(plan.Edits) == 0 {
		return t.unchanged(w, o)
	}
	if o.DryRun {
		for _, e := range plan.Edits {
			switch {
			case e.Note:
			case o.Edited != nil:
				o.Edited(e)
			default:
				fmt.Fprint(w, engine.Diff(e))
			}
		}
		return nil
	}
	before := t.check(o.Config, !exists(o.Config))
	if before.note != "" {
		fmt.Fprintf(w, "note: %s\n", before.note)
	}
	done, err := t.change(o, plan.Edits, before)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Verb, err)
	}
	for _, e := range done.edits {
		if o.Edited != nil && !e.Note {
			o.Edited(e)
		}
	}
	for _, line := range plan.Done {
		fmt.Fprintf(w, "%s: %s\n", o.Config, line)
	}
	for _, line := range plan.Elsewhere {
		fmt.Fprintln(w, line)
	}
	for _, line := range done.said {
		fmt.Fprintln(w, line)
	}
	if o.Verb == "uninstall" {
		for _, line := range done.dropBackups(plan.Edits, t.json) {
			fmt.Fprintln(w, line)
		}
	}
	if o.Watch != nil {
		return nil
	}
	return reread(w, t, o.Config, o.Restart, plan.Restart)
}

// change makes the edits, unless the engine refuses what comes out.
func (t Target) change(o Order, edits []engine.Edit, before checked) (done applied, err error) {
	watch := o.Watch
	if watch == nil {
		watch = Unwatched{}
	}
	if err := watch.Changing(); err != nil {
		return done, err
	}
	if done, err = apply(edits); err != nil {
		return done, errors.Join(err, watch.PutBack())
	}
	if err = watch.Changed(done.takeBack); err == nil {
		if err = t.judge(o.Config, o.Request, before); err == nil {
			return done, nil
		}
	}
	undo := done.undo()
	if undo == nil {
		undo = watch.PutBack()
	}
	if undo != nil {
		return done, fmt.Errorf("%w; and putting the files back: %w", err, undo)
	}
	return done, fmt.Errorf("%w; the files are as they were", err)
}

// Reread has the engine read its configuration, if it may be restarted and systemd runs it; else it tells w what to do.
func (t Target) Reread(w io.Writer, config string, restart bool) error {
	return reread(w, t, config, restart, false)
}

// unchanged is for a file that says all already: it may still be one that the engine refuses, or has not read.
func (t Target) unchanged(w io.Writer, o Order) error {
	if o.Verb == "install" {
		now := t.check(o.Config, !exists(o.Config))
		if now.err != nil {
			return fmt.Errorf("install: %s: nothing to change, but %s", o.Config, now.note)
		}
		if err := t.effective(o.Config, o.Request, now); err != nil {
			return fmt.Errorf("install: %s: nothing to change, but %w", o.Config, err)
		}
		if now.note != "" {
			fmt.Fprintf(w, "note: %s\n", now.note)
		}
	}
	if _, err := fmt.Fprintf(w, "%s: nothing to change\n", o.Config); err != nil || !o.Restart || o.DryRun {
		return err
	}
	return reread(w, t, o.Config, true, false)
}

// judge has the engine check what is there now. What failed before already is not held against the edit.
func (t Target) judge(config string, r engine.Request, before checked) error {
	if !before.ran || before.err != nil {
		return nil
	}
	after := t.check(config, !exists(config))
	if after.err != nil {
		return fmt.Errorf("%s refuses the edited configuration: %w", t.daemon, after.err)
	}
	if before.tree != nil && after.tree != nil {
		if foreign := engine.Foreign(before.tree, after.tree, r.Name); foreign != "" {
			return fmt.Errorf("with the edit %s would also see a change of %s: edit the configuration by hand, as in docs/install.md", t.daemon,
				foreign)
		}
	}
	return t.effective(config, r, after)
}

// effective requires that an installed runtime is in what the engine takes its configuration to be, where it says so.
func (t Target) effective(config string, r engine.Request, now checked) error {
	if r.Path == "" || now.tree == nil || engine.CRIDisabled(now.tree) {
		return nil
	}
	program, byName := engine.Named(now.tree, r.Name)
	switch {
	case program != r.Path:
		return fmt.Errorf("%s does not see runtime %q of %s, but %q: another file that it imports overrides it; take that out, or out of its "+
			"imports", t.daemon, r.Name, config, program)
	case r.Default && byName != r.Name:
		return fmt.Errorf("%s does not see the default runtime %q of %s, but %q: another file that it imports overrides it; take that out, or "+
			"out of its imports", t.daemon, r.Name, config, byName)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
