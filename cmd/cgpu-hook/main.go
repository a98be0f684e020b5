// SPDX-License-Identifier: Apache-2.0

// Command cgpu-hook runs at fixed points of a container's life, where spec.Apply put it into config.json:
//
//	started  (createRuntime)   notes the container's first process, in preload mode; has the driver limit its cgroup
//	setup    (createContainer) the driver's files, links and ld cache for its libraries, in the container's mount namespace
//	release  (poststop)        gives the reservation back
//
// A hook "allocated" is how an allocation of Kubernetes travels to cgpu-runtime (package alloc), which takes it out. It runs
// only under another runtime, and refuses the start.
//
// Under the name nvidia-container-runtime-hook, or with the argument prestart, it does nothing: Docker accepts --gpus
// only when a program of that name is in its PATH, and cgpu-runtime has done the work by then.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/name"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/page"
)

func main() {
	if err := run(os.Args, os.Stdin, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "cgpu-hook:", err) // engines show it: "error running hook #0: … stderr: …"
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader, stderr io.Writer) error {
	if len(args) < 2 {
		return nil
	}
	// Whatever is needed of it: crun dies of SIGPIPE where a hook ends before the container's state is written to it.
	text, err := io.ReadAll(io.LimitReader(stdin, maxState))
	if err != nil {
		return fmt.Errorf("container state: %w", err)
	}
	stdin = bytes.NewReader(text)
	if args[1] == "prestart" || filepath.Base(args[0]) == "nvidia-container-runtime-hook" {
		return nil
	}
	switch args[1] {
	case "started":
		return started(args[2:], stdin)
	case "setup":
		return setup(args[2:], driverParams, stderr)
	case "release":
		return release(args[2:], stdin)
	case alloc.HookCommand:
		return allocated(args)
	}
	// A newer cgpu-runtime's hook; a container must not fail to start for it.
	fmt.Fprintf(stderr, "cgpu-hook: unknown command %q: ignored\n", args[1])
	return nil
}

// allocated refuses a container that was allocated a share of a GPU and whose runtime is another than cgpu's: it would start
// without the GPU, and its program would fail with an error that tells nothing.
func allocated(args []string) error {
	what := "a share of a GPU"
	if s, ours, err := alloc.FromHookArgs(args); ours && err == nil {
		switch {
		case s.Whole:
			what = "GPU " + s.UUID
		case s.UUID == "":
			what = fmt.Sprintf("%v of a GPU", s.Limit)
		default:
			what = fmt.Sprintf("%v of GPU %s", s.Limit, s.UUID)
		}
	}
	return fmt.Errorf("the container was allocated %s, but does not have the cgpu runtime: set runtimeClassName: cgpu in the pod's spec", what)
}

// whose is the nonce of the reservation that a hook is about.
func whose(hook string, args []string) (nonce string, err error) {
	flags := flag.NewFlagSet(hook, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the error says it all, in one line
	flags.String("id", "", "the container, for who reads config.json")
	flags.StringVar(&nonce, "nonce", "", "of its reservation")
	if err := flags.Parse(args); err != nil {
		return "", err
	}
	if !ledger.IsNonce(nonce) { // it becomes the name of folders
		return "", fmt.Errorf("%s: want --nonce and 16 hexadecimal digits", hook)
	}
	return nonce, nil
}

// started notes the container's first process in its record, which is how others find out later that it is gone. Where there
// is a guard, the guard does this. The process is in its cgroup, and the container's program has not begun: time for the driver's limits.
func started(args []string, stdin io.Reader) error {
	nonce, err := whose("started", args)
	if err != nil {
		return err
	}
	state, err := readState(stdin)
	if err != nil {
		return err
	}
	start, err := ledger.ProcStart(state.Pid)
	if err != nil {
		return err
	}
	book, limited := ledger.Open(device.RunDir()), false
	err = book.Update(nonce, func(r *ledger.Record) (err error) {
		r.InitPID, r.InitStart = state.Pid, start
		if limited = r.DriverLimits && len(r.VGPUs) > 0; limited {
			r.LimitedCgroup, err = nvmlclient.Cgroup(state.Pid)
		}
		return err
	})
	if err != nil || !limited {
		return err
	}
	return nvmlclient.Limit(book, nonce)
}

// release drops the container's reservation and its vGPU page. The guard does the same when its last process is gone, and a
// container that was started anew has another nonce. The bundle goes last: it is the folder in which crun runs hooks.
func release(args []string, stdin io.Reader) error {
	nonce, err := whose("release", args)
	if err != nil {
		return err
	}
	err = giveBack(nonce)
	tellName(nonce, stdin)
	return errors.Join(err, page.RemoveBundle(device.RunDir(), nonce))
}

// tellName tells what the engine calls a container of which nobody can find that out later, for those who read what happened to it. The
// container itself waits for that alone: its share is given back.
func tellName(nonce string, stdin io.Reader) {
	state, err := readState(stdin)
	if err != nil {
		return
	}
	if called := name.Of(state.Bundle, state.ID); called != "" {
		_ = event.Append(device.RunDir(), event.Event{Kind: event.Deleted, Container: state.ID, Nonce: nonce, Name: called,
			Text: "by its engine"})
	}
}

func giveBack(nonce string) error {
	l := ledger.Open(device.RunDir())
	// A living guard does it itself, once the driver has the container's memory back; that takes a few milliseconds, or
	// for as long as somebody outside holds it. It is worth waiting a little, so that what is asked for next finds room.
	for begin := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		r, err := l.Get(nonce)
		if err != nil {
			break
		}
		if !r.GuardLives() {
			tellLost(r)
			break
		}
		if waited := time.Since(begin); waited > endTime || waited > guardTime && !r.ContainerLives() {
			if r.Preload { // the simulated driver's, which gives back all but the page
				return page.Remove(device.RunDir(), nonce)
			}
			return nil
		}
	}
	if err := l.Release(nonce); err != nil {
		return err
	}
	return page.Remove(device.RunDir(), nonce)
}

// tellLost tells of a guard that has ended and left its reservation: it was killed, or it crashed, and could tell nothing itself.
func tellLost(r ledger.Record) {
	if r.GuardPID == 0 { // preload mode
		return
	}
	for _, e := range []event.Event{
		{Kind: event.Warning, PID: r.GuardPID, Text: "the guard ended before the container: killed, or crashed"},
		{Kind: event.End, Text: "given back by cgpu-hook, since the guard was gone"},
	} {
		e.Container, e.Nonce, e.Name = r.ID, r.Nonce, r.Name
		_ = event.Append(device.RunDir(), e)
	}
}

const (
	// guardTime is how long release waits for the guard.
	guardTime = 500 * time.Millisecond
	// endTime is how long it does while the container's first process ends. For a low-level runtime that has ended with its first thread; the
	// last one waits for all that is in its PID namespace, on a busy machine for longer, and a container of the same ID, which an engine may
	// create as soon as this one is deleted, would be refused: it is in use.
	endTime = 5 * time.Second
)

// setup prepares the container's file system for the driver's libraries.
func setup(args []string, params string, stderr io.Writer) error {
	job, err := parseJob(args)
	if err != nil {
		return err
	}
	root, err := openRoot(job.root)
	if err != nil {
		return err
	}
	defer root.close()
	unix.Umask(0o022) // other users of the container must find what is made here
	// Before all else: what is made below makes /etc, and has a tmpfs in /proc, where no driver file may be.
	if err := bindFiles(root, job.binds, stderr); err != nil {
		return err
	}
	// They have nothing to do with each other, and the container waits for the slowest.
	said, failed := make([]bytes.Buffer, 3), make([]error, 3)
	var all sync.WaitGroup
	for i, work := range []func(stderr io.Writer) error{
		func(stderr io.Writer) error { return makeLinks(root, job.links, stderr) },
		func(io.Writer) error { return keepDeviceNodes(root, params) },
		func(stderr io.Writer) error { return forgive(stderr, updateCache(root, job, stderr)) },
	} {
		all.Go(func() { failed[i] = work(&said[i]) })
	}
	all.Wait()
	for i := range said {
		_, _ = said[i].WriteTo(stderr)
	}
	return errors.Join(failed...)
}

// maxState bounds what the runtime writes to a hook's standard input, in bytes.
const maxState = 16 << 20

func readState(stdin io.Reader) (specs.State, error) {
	var s specs.State
	if err := json.NewDecoder(stdin).Decode(&s); err != nil {
		return s, fmt.Errorf("container state: %w", err)
	}
	return s, nil
}
