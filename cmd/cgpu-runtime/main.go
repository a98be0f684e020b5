// SPDX-License-Identifier: Apache-2.0

// Command cgpu-runtime is an OCI runtime that stands in for runc: an engine starts it with runc's arguments.
//
// It gives a container that asks for a slice of a GPU (CGPU_MEM, or ALIYUN_COM_GPU_MEM_CONTAINER) its virtual GPU and then becomes
// runc by execve. Every other container and command it hands to runc untouched, also when cgpu itself is broken on the
// node. It starts several times in the life of every container, so it links no more than it needs.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// version is set by the build.
var version = "unknown"

func main() {
	runDir := device.RunDir()
	c, only := understand(os.Args[1:], runDir)
	c.report(run(c, only, runDir)) // it came back
	os.Exit(1)
}

// understand reads the command line as the low-level runtime will. only: another kind of runtime would read it differently.
func understand(args []string, runDir string) (c call, only bool) {
	c = parse(args, likeRunc)
	other := parse(args, likeCrun)
	if c.same(other) {
		return c, false
	}
	if low, err := findRuntime(configured(runDir), other.creator()); err == nil && isCrun(low) {
		return other, true
	}
	return c, true
}

// run becomes the low-level runtime. It returns only when that, or what has to be done before, failed.
func run(c call, only bool, runDir string) error {
	if err := notAgain(); err != nil {
		return err
	}
	undo := func() {}
	var err error
	switch c.command {
	case "create", "run":
		switch {
		case c.id != "":
			undo, err = create(&c, runDir)
		case c.strange != "": // else the low-level runtime tells what is wrong
			err = fmt.Errorf("cgpu-runtime: option %q: cgpu does not know it, nor so which argument is the container: write --option=value, or "+
				"upgrade cgpu", c.strange)
		}
	case "restore":
		err = refuseRestore(c, runDir)
	case "exec":
		c.args = join(c, runDir)
	}
	if err == nil {
		// Not before create: it may have had the node table made anew, with other runtimes.
		var low string
		if low, err = findRuntime(configured(runDir), c.creator()); err == nil {
			if only && isCrun(low) != (c.grammar == likeCrun) {
				err = errors.New("cgpu-runtime: runtimes in cgpu.toml has just changed between runc and crun: try " +
					"again")
			} else {
				if c.command == "kill" {
					endFirst(&c, low, runDir)
				}
				if c.made != "" {
					c.redirect(isCrun(low))
				}
				err = execute(low, c.args)
			}
		}
	}
	undo()
	return err
}

// create gives the low-level runtime, for the bundle of a container that asks for a vGPU, one that has it. A container that does not
// ask, and whatever only runc can complain about, it leaves alone without an error. undo takes back what was done outside of
// the bundle.
func create(c *call, runDir string) (undo func(), err error) {
	undo = func() {}
	var ask *admit.Ask
	defer func() {
		if err != nil {
			_ = event.Refuse(runDir, event.Event{Container: c.id, Name: ask.Name(), Text: err.Error()})
		}
	}()

	// Is it ours?
	file := bundleFile{path: c.config}
	raw, err := readFile(file.path)
	if errors.Is(err, os.ErrNotExist) {
		return undo, nil
	}
	if err != nil { // runc might be able to, a moment later, and start it without what it asks for
		return undo, fmt.Errorf("cgpu-runtime: read %s: %w: it may ask for a GPU: start it again", file.path,
			err)
	}
	spoken := dialects(runDir, spec.MaySpeak(raw))
	if len(spoken) == 0 && !spec.MayAsk(raw) {
		return undo, withhold(file, raw, runDir)
	}
	ask, err = admit.Read(raw, spoken...)
	if err == nil && ask.Doc == nil {
		return undo, withhold(file, raw, runDir)
	}
	if err == nil && ask.Quota == nil {
		if missed := ask.Missed(spoken); len(missed) > 0 {
			_ = event.Refuse(runDir, event.Event{Kind: event.Warning, Container: c.id, Name: ask.Name(),
				Text: "no vGPU asked for: " + strings.Join(missed, "; ")})
		}
		edited := ask.Edited // a pause container that was given hooks of ours
		if ask.Pod && withholds(runDir) {
			withheld, err := spec.Withhold(ask.Doc)
			tellUnheld(runDir, err)
			edited = edited || withheld
		}
		if edited {
			err = file.replace(ask.Doc.Encode())
		}
	}
	if err != nil || ask.Quota == nil {
		return undo, err
	}
	if err := mayShare(runDir); err != nil {
		return undo, err
	}

	// The guard starts while we find out which GPUs, and how much of each.
	session := launch.Session{RunDir: runDir}
	undo = func() {
		for _, err := range []error{uncopy(c.made), session.Undo()} { // where /run is full, the first makes room for the second
			if err != nil {
				c.report(err)
			}
		}
	}
	if !preloads(runDir) {
		if session.Guard, err = launch.Start(runDir); err != nil {
			return undo, err
		}
	}
	table, err := launch.LoadTable(runDir)
	if err != nil {
		return undo, err
	}
	session.Table = table
	units := func(c spec.PodContainer) (quota.Units, error) { return launch.AskKubelet(table.Config.PodResources, c) }
	if err := ask.Settle(table, units); err != nil {
		return undo, err
	}
	// The table that was there may have been stale.
	switch guarded := table.Guarded(); {
	case guarded && session.Guard == nil:
		if session.Guard, err = launch.Start(runDir); err != nil {
			return undo, err
		}
	case !guarded && session.Guard != nil:
		session.Guard.Stop()
		session.Guard = nil
	}

	root, err := recordedRoot(*c, runDir)
	if err != nil {
		return undo, err
	}
	if err := session.Ask(ask, ledger.Record{ID: c.id, Root: root, Bundle: c.bundle}); err != nil {
		return undo, err
	}
	if err := session.Reserve(); err != nil {
		return undo, ask.Refused(err)
	}
	record := &session.Record

	// Edit while the guard makes itself ready.
	if err := session.Tell(nil); err != nil {
		return undo, err
	}
	plan, err := ask.Plan(*record, table)
	if err != nil {
		return undo, err
	}
	plan.RunDir, plan.Version = runDir, version
	low, err := findRuntime(configured(runDir), c.creator())
	if err != nil {
		return undo, err
	}
	// When crun runs hooks, a read-only root is read-only already; when others do, nobody knows.
	plan.HookMounts = plan.HookMounts && isRunc(low)
	if plan.Limiter != "" {
		if plan.Preload, err = preloadFile(ask.Doc, c.bundle, record); err != nil {
			return undo, err
		}
	}
	if plan.Hook, err = device.Program("cgpu-hook"); err != nil {
		return undo, err
	}
	if err := ask.Doc.MakeAbsolute(c.bundle); err != nil {
		return undo, err
	}
	if err := spec.Apply(ask.Doc, plan); err != nil {
		return undo, err
	}
	// The engine's file stays as it is, so that it can be run again, and may be on a read-only file system.
	c.made = page.Bundle(runDir, record.Nonce)
	if err := file.copied(ask.Doc.Encode(), c.made); err != nil {
		return undo, err
	}
	err = session.Ready()
	if err == nil {
		health.Warn(runDir, table, *record)
	}
	if ignored := ask.Quota.Ignored; err == nil && len(ignored) > 0 {
		_ = event.Append(runDir, event.Event{Kind: event.Warning, Container: c.id, Nonce: record.Nonce, Name: record.Name,
			Text: "ignored: " + strings.Join(ignored, "; ")})
	}
	return undo, err
}

// mayShare refuses to share GPUs for somebody other than the node's root. Rootless engines start this program as root of a user
// namespace of their own, where run dir and driver belong to nobody: what fails there later on would not say so.
func mayShare(runDir string) error {
	dir := runDir
	err := unix.Access(dir, unix.W_OK)
	if err == unix.ENOENT {
		dir = filepath.Dir(runDir)
		err = unix.Access(dir, unix.W_OK)
	}
	if err == unix.EACCES {
		return fmt.Errorf("cgpu-runtime: %s cannot be written: a share of a GPU needs the machine's root: start the container as root, not "+
			"with a rootless engine", dir)
	}
	return nil
}

// recordedRoot is the folder in which the low-level runtime will keep the container's state.
func recordedRoot(c call, runDir string) (string, error) {
	if c.root != "" { // not that of each of them
		return c.stateRoot(false), nil
	}
	low, err := findRuntime(configured(runDir), "")
	return c.stateRoot(isCrun(low)), err
}
