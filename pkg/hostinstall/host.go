// SPDX-License-Identifier: Apache-2.0

// Package hostinstall puts the programs of an image onto the node below it, and into the configuration of the node's container
// engine: `cgpu install --host-root`, which the optional DaemonSet cgpu-installer runs.
//
// On the node there is, below DIR (/opt/cgpu):
//
//	versions/NAME/{bin,lib/cgpu}   a version, whole or not there; NAME is made of what is in it
//	current -> versions/NAME       what engines call. A program that was started by this name finds its version's others
//
// and below /run/cgpu/installer, which a reboot empties, as it ends every container:
//
//	used/NAME   the version was current since the boot, so containers may name its files
//	pending     the engine's socket, as it was when its configuration was changed and it had not been restarted
//
// Every step may be the last one of a killed process, or be done again by the next. What is made is made under a name that nobody
// reads and renamed; a lock keeps a second installer out.
package hostinstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/install"
)

// DefaultDir is where the programs go on the node.
const DefaultDir = "/opt/cgpu"

// Order is what a command line asks for.
type Order struct {
	Root          string // the node's file system, as it is mounted here
	Dir           string // on the node
	Engine        string // "auto": the one that is there
	Socket        string // of the engine; "": the usual one
	install.Order        // its Config may be empty: the engine's usual file
}

// Installer carries an order out.
type Installer struct {
	Order
	Source string // the folder above bin/ and lib/
	Out    io.Writer
	poll   time.Duration
	// enter makes the node's root this process's; refresh makes the node's table of GPUs.
	enter   func(root string) error
	refresh func(ctx context.Context, program string) ([]byte, error)
	step    func(what string) // for tests: something was done
}

// New is an installer of the version to which this program belongs.
func New(o Order, out io.Writer) (*Installer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &Installer{Order: o, Source: filepath.Dir(filepath.Dir(self)), Out: out, poll: 2 * time.Second,
		enter: enter, refresh: refresh, step: func(string) {}}, nil
}

// Install puts the version there and has the engine call it. It ends when new containers get it.
func (i *Installer) Install(ctx context.Context) error {
	p, err := i.place(ctx)
	if err != nil {
		return fmt.Errorf("install: %w", err)
	}
	return p.settle(ctx)
}

// place is Install up to what the engine has yet to read.
func (i *Installer) place(ctx context.Context) (p *pending, err error) {
	defer unix.Umask(unix.Umask(hostrun.Umask)) // containers read what is made here
	image, err := os.OpenRoot(i.Source)         // it can be read from when the root is another
	if err != nil {
		return nil, err
	}
	defer image.Close()
	t, err := readTree(image.FS(), i.Source)
	if err != nil {
		return nil, err
	}
	e, err := i.onHost()
	if err != nil {
		return nil, err
	}
	unlock, err := i.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := i.folder(); err != nil {
		return nil, fmt.Errorf("--host-dir %q: %w", i.Dir, err)
	}
	p, o := i.order(e)
	o.Kubernetes = true
	if has, err := e.Program(i.Config, i.Name); err == nil && has != "" && has != o.Path {
		return nil, fmt.Errorf("%s: the program of runtime %q is %q, not %q: others put it there: take it out first (cgpu uninstall), or keep "+
			"cgpu-installer off this node", i.Config, i.Name, has, o.Path)
	}
	if err := i.add(ctx, t); err != nil {
		return nil, err
	}
	if err := e.Install(i.Out, o); err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "install: "))
	}
	i.step("configured")
	return p, i.collect()
}

// add makes a version the current one. It makes the node's table first: what does not run on this node, or finds no driver, must not be
// what engines call, to start containers as to stop those that run.
func (i *Installer) add(ctx context.Context, t tree) error {
	versions := filepath.Join(i.Dir, "versions")
	if err := os.MkdirAll(versions, 0o755); err != nil {
		return err
	}
	if err := t.stage(versions); err != nil {
		return err
	}
	i.step("staged")
	if out, err := i.refresh(ctx, filepath.Join(versions, t.name, "bin/cgpu-refresh")); err != nil {
		return fmt.Errorf("the node's table of GPUs could not be made: %w: %s", err, strings.TrimSpace(string(out)))
	}
	i.step("refreshed")
	if err := i.choose(t.name); err != nil {
		return err
	}
	_, err := fmt.Fprintf(i.Out, "%s is version %s\n", i.current(), t.name)
	return err
}

// Uninstall takes out what Install put there, when no container needs it any more.
func (i *Installer) Uninstall(ctx context.Context) error {
	e, err := i.onHost()
	if err != nil {
		return fmt.Errorf("uninstall: %w", err)
	}
	if err := i.unused(ctx, e); err != nil {
		return err
	}
	p, err := i.unconfigure(ctx, e)
	if err != nil {
		return err
	}
	if err := p.settle(ctx); err != nil {
		return err
	}
	// One may have been made meanwhile.
	if err := i.unused(ctx, e); err != nil {
		return err
	}
	if err := i.remove(ctx, e); err != nil {
		return fmt.Errorf("uninstall: %w", err)
	}
	return nil
}

// order is what the engine's configuration is to have, or to lose. Its restart is settle's, which knows whether one is wanted.
func (i *Installer) order(e engine) (*pending, install.Order) {
	p, o := &pending{Installer: i, engine: e}, i.Order.Order
	o.Path, o.Restart, o.Watch = filepath.Join(i.current(), "bin/cgpu-runtime"), false, p
	return p, o
}

func (i *Installer) unconfigure(ctx context.Context, e engine) (*pending, error) {
	unlock, err := i.lock(ctx)
	if err != nil {
		return nil, fmt.Errorf("uninstall: %w", err)
	}
	defer unlock()
	p, o := i.order(e)
	o.KeepPods = true // until it is restarted, the engine starts containers by our runtime
	err = e.Uninstall(i.Out, o)
	i.step("configured")
	return p, err
}

// remove deletes all that is ours, unless somebody has installed it again.
func (i *Installer) remove(ctx context.Context, e engine) error {
	unlock, err := i.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	_, o := i.order(e)
	has, err := e.Program(i.Config, i.Name)
	if err != nil {
		return err
	}
	if list := i.users(e); has != "" || len(list) > 0 {
		return fmt.Errorf("%s: it is in use again (runtime %q: %q; %s): another cgpu-installer works on this node",
			i.Dir, i.Name, has, strings.Join(list, ", "))
	}
	o.Watch = install.Unwatched{} // the engine does not read cgpu.toml
	if err := e.Uninstall(i.Out, o); err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), "uninstall: "))
	}
	i.step("pods")
	// What engines call goes first: a version of which a part is missing is nobody's then.
	for _, path := range []string{i.current(), filepath.Join(i.Dir, nextCurrent)} {
		if target, err := os.Readlink(path); err != nil || filepath.Dir(target) != "versions" || !isVersion(filepath.Base(target)) {
			continue
		}
		if err := os.Remove(path); err != nil {
			return err
		}
		i.step("no " + path)
	}
	if err := i.sweep(func(string) bool { return false }); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_ = os.Remove(filepath.Join(i.Dir, "versions")) // it stays where others have put something there
	if err := os.RemoveAll(stateDir()); err != nil {
		return err
	}
	fmt.Fprintf(i.Out, "%s: removed what cgpu-installer put there\n", i.Dir)
	return nil
}

// foreign refuses a node that has cgpu by other means: two would serve each other's containers.
func foreign() error {
	for _, path := range []string{"/usr/bin/cgpu-runtime", "/usr/local/bin/cgpu-runtime"} {
		if _, err := os.Lstat(path); err == nil {
			return fmt.Errorf("%s: cgpu is on this node already, by a package or make install: take that out first (cgpu uninstall, then the "+
				"package), or keep cgpu-installer off this node", path)
		}
	}
	return nil
}

// lock keeps others that install or uninstall out until the function is called. Its file is one that only root can open.
func (i *Installer) lock(ctx context.Context) (unlock func(), err error) {
	run := device.RunDir()
	if err := device.MakeRunDir(run); err != nil {
		return nil, err
	}
	if list, err := os.ReadDir(run); err == nil && len(list) == 0 { // the kubelet has made it for this pod, with a mode of its own
		if err := os.Chmod(run, device.RunDirMode); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(filepath.Join(run, "installer.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	said := false
	waited := i.until(ctx, func() bool {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return true
		}
		if !said {
			fmt.Fprintf(i.Out, "waits for another cgpu-installer, which has %s locked\n", f.Name())
		}
		said = true
		return false
	})
	if waited != nil {
		err = waited
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// folder makes the folder for the programs. It refuses one in which others have files or could put some: engines run what is there.
func (i *Installer) folder() error {
	if err := os.MkdirAll(i.Dir, 0o755); err != nil {
		return err
	}
	real, err := filepath.EvalSymlinks(i.Dir)
	if err != nil {
		return err
	}
	for dir := real; ; dir = filepath.Dir(dir) {
		if err := rootsOwn(dir); err != nil {
			return fmt.Errorf("%w: name another folder with --host-dir", err)
		}
		if dir == "/" {
			break
		}
	}
	entries, err := os.ReadDir(real)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !slices.Contains([]string{"current", nextCurrent, "versions"}, e.Name()) {
			return fmt.Errorf("%q in it is not cgpu-installer's: name a folder of its own with --host-dir", e.Name())
		}
	}
	var s unix.Statfs_t
	if err := unix.Statfs(real, &s); err != nil {
		return err
	}
	if s.Flags&unix.ST_NOEXEC != 0 {
		return errors.New("it is mounted noexec, so no engine could start a program there: name another folder with --host-dir")
	}
	return nil
}

// rootsOwn refuses what others than root can change.
func rootsOwn(path string) error {
	var s unix.Stat_t
	if err := unix.Lstat(path, &s); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if s.Uid != 0 || s.Mode&0o022 != 0 {
		return fmt.Errorf("%s: others than root can write there", path)
	}
	return nil
}

// onHost enters the node and finds its engine. From here on paths are the node's.
func (i *Installer) onHost() (e engine, err error) {
	if err := i.enter(i.Root); err != nil {
		return e, fmt.Errorf("--host-root %q: %w", i.Root, err)
	}
	if err := foreign(); err != nil {
		return e, err
	}
	return i.findEngine()
}

func enter(root string) error {
	if err := unix.Chroot(root); err != nil {
		return err
	}
	// systemctl is told that this is the host after all: it has the host's root and sockets.
	return errors.Join(os.Chdir("/"), os.Setenv("SYSTEMD_IGNORE_CHROOT", "1"),
		os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"))
}

// refreshTimeout is more than a driver needs to answer that has just been loaded.
const refreshTimeout = 3 * time.Minute

func refresh(ctx context.Context, program string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	c := exec.CommandContext(ctx, program, "-force")
	c.WaitDelay = time.Second // for a child of its own that keeps its output open
	return c.CombinedOutput()
}

func (i *Installer) current() string { return filepath.Join(i.Dir, "current") }

// nextCurrent is the link that becomes the current one.
const nextCurrent = unfinished + "current"

func stateDir() string { return filepath.Join(device.RunDir(), "installer") }

// choose makes a version the current one. It, and the one before, are noted as in use before that: their containers name them.
func (i *Installer) choose(name string) error {
	used := filepath.Join(stateDir(), "used")
	if err := os.MkdirAll(used, 0o755); err != nil {
		return err
	}
	inUse := []string{name}
	target, err := os.Readlink(i.current())
	if err == nil {
		inUse = append(inUse, filepath.Base(target))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, v := range inUse {
		if !isVersion(v) {
			return fmt.Errorf("%s: leads to %q, which is no version of cgpu-installer's: take it away", i.current(), target)
		}
		if err := atomicfile.Write(filepath.Join(used, v), nil, 0o644); err != nil {
			return err
		}
	}
	i.step("noted")
	wanted := filepath.Join("versions", name)
	if target == wanted {
		return nil
	}
	next := filepath.Join(i.Dir, nextCurrent)
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(wanted, next); err != nil {
		return err
	}
	i.step("linked")
	if err := os.Rename(next, i.current()); err != nil {
		return err
	}
	i.step("chosen")
	return syncAll(i.Dir)
}

// collect removes versions that no container can name, and what killed installers left.
func (i *Installer) collect() error {
	used, err := os.ReadDir(filepath.Join(stateDir(), "used"))
	if err != nil {
		return err
	}
	return i.sweep(func(name string) bool {
		return slices.ContainsFunc(used, func(u fs.DirEntry) bool { return u.Name() == name })
	})
}

// sweep removes versions that are not kept, and what killed installers left. It knows both by their names: others' files stay.
func (i *Installer) sweep(keep func(version string) bool) error {
	versions := filepath.Join(i.Dir, "versions")
	entries, err := os.ReadDir(versions)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		switch {
		case name == newVersion || isVersion(strings.TrimPrefix(name, gone)) && strings.HasPrefix(name, gone):
			err = os.RemoveAll(filepath.Join(versions, name))
		case isVersion(name) && !keep(name):
			err = discard(versions, name)
		}
		if err != nil {
			return err
		}
		i.step("collected")
	}
	return nil
}
