// SPDX-License-Identifier: Apache-2.0

// Cgpu-refresh writes node.json, the table of this node's GPUs and driver files that every other part of cgpu reads.
//
// cgpu-runtime runs it when the table is missing or stale (a boot, a driver or configuration change); people run it as
// cgpu refresh. It is the only program of cgpu that is built with cgo: go-nvml loads NVIDIA's management library. With
// driver = "sim" in cgpu.toml it makes the simulated driver's device nodes and starts its server instead.
//
//	cgpu-refresh [-v] [-force]
//	cgpu-refresh -hardware
//	cgpu-refresh -limit CGROUP UUID=BYTES …
//
// It exits with 0 when a good table is in place, 1 when none could be made, 2 when called wrongly; faults and warnings
// are lines on standard error.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/mount"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
)

var version = "unknown" // set by the linker

func main() {
	if os.Geteuid() == 0 {
		// It serves the node, and may have been started by cgpu run: a program in Go gives a child the limit of descriptors that it began
		// with itself, whatever it has set since (syscall, forkAndExecInChild1).
		hostrun.ResetInherited()
	}
	flags := flag.NewFlagSet("cgpu-refresh", flag.ExitOnError) // exits with 2
	verbose := flags.Bool("v", false, "print what was found")
	force := flags.Bool("force", false, "make the table anew even when it is fresh")
	forever := flags.Bool("hardware", false, "answer each line of standard input with what NVML says of the GPUs (for cgpu exporter)")
	cgroup := flags.String("limit", "", "have the driver limit the memory of a `cgroup`, UUID=BYTES for each GPU (for cgpu-hook)")
	showVersion := flags.Bool("version", false, "print the version and exit")
	_ = flags.Parse(os.Args[1:])
	if flags.NArg() > 0 && *cgroup == "" {
		fmt.Fprintf(os.Stderr, "cgpu-refresh: %q: want no arguments\n", flags.Arg(0))
		os.Exit(2)
	}
	if *showVersion {
		fmt.Println("cgpu-refresh", version)
		return
	}
	helper, err := os.Executable()
	switch {
	case *forever:
		err = serveHardware(os.Stdin, os.Stdout)
	case *cgroup != "":
		err = limit(*cgroup, flags.Args())
	case err == nil:
		err = refresh{runDir: device.RunDir(), configFile: device.ConfigFile(), helper: helper, simDir: simNodeDir, verbose: *verbose}.run(*force)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cgpu-refresh:", strings.ReplaceAll(err.Error(), "\n", " "))
		os.Exit(1)
	}
}

// limit has the driver limit a cgroup. Where the driver is, the table says by which the container was admitted: a hook does not know which
// cgpu.toml that was made from, so that to it the table may look stale.
func limit(cgroup string, limits []string) error {
	t, err := device.Load(device.RunDir())
	if t == nil {
		return err
	}
	return limitCgroup(t, nvmlclient.CgroupRoot, cgroup, limits)
}

type refresh struct {
	runDir     string
	configFile string
	helper     string // this program; cgpu-sim lies beside it
	simDir     string // folder of the simulated driver's nodes
	verbose    bool
}

// run is the whole way: lock, look whether another was faster, make the table, write it.
func (r refresh) run(force bool) error {
	if err := device.MakeRunDir(r.runDir); err != nil {
		return err
	}
	unlock, err := lock(device.LockFile(r.runDir), lockTimeout)
	if err != nil {
		return err
	}
	defer unlock()
	old, err := device.Load(r.runDir)
	switch {
	case err == nil && !force:
		r.say("%s is fresh: %s", device.TableFile(r.runDir), summary(old))
		return nil
	case err == nil, errors.Is(err, device.ErrMissing), errors.Is(err, device.ErrStale):
	default:
		return err
	}
	// The file's time is read before the file: a change in between makes the table stale, not wrong.
	before, err := device.ReadKey("", r.configFile, r.helper, "")
	if err != nil {
		return err
	}
	c, err := config.Load(r.configFile)
	if err != nil {
		return err
	}
	t := &device.Table{Version: device.TableVersion, Driver: c.Driver, DriverRoot: c.DriverRoot, Config: c.Settings}
	if t.Hook, err = device.Program("cgpu-hook"); err != nil {
		return err
	}
	err = mount.Try(device.LockFile(r.runDir))
	if t.HookMounts = err == nil; err != nil {
		r.say("the low-level runtime mounts the driver's files: cgpu-hook could not: %v", err)
	}
	// Without it a max_spill in percent is nothing, and whoever asks for spill is told; others need not suffer.
	if t.HostMemory, err = hostMemory(memInfo); err != nil {
		r.warn("the machine's memory is not known: %v", err)
	}
	if c.Driver == device.DriverSim {
		err = r.simulated(t, c.Sim, old, before)
	} else {
		err = r.nvidia(t, c.DriverRoot, before)
	}
	if err != nil {
		return err
	}
	r.say("%s: %s", device.TableFile(r.runDir), summary(t))
	return nil
}

// save completes the key and writes the table. before holds the stamps of the files that were read first.
func (r refresh) save(t *device.Table, before device.Key, library string) error {
	key, err := device.ReadKey(t.Driver, r.configFile, r.helper, library)
	if err != nil {
		return err
	}
	key.ConfigTime, key.ConfigSize = before.ConfigTime, before.ConfigSize
	t.Key = key
	return t.Save(r.runDir)
}

func (r refresh) say(format string, args ...any) {
	if r.verbose {
		fmt.Fprintf(os.Stderr, "cgpu-refresh: "+format+"\n", args...)
	}
}

func (r refresh) warn(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "cgpu-refresh: warning: "+format+"\n", args...)
}

// summary is one line about a table.
func summary(t *device.Table) string {
	var names []string
	for _, g := range t.GPUs {
		names = append(names, fmt.Sprintf("%d %s %v", g.Index, g.Name, g.Memory))
	}
	return fmt.Sprintf("driver %s %s, %d GPUs (%s), %d mounts, %d links", t.Driver, t.DriverVersion, len(t.GPUs),
		strings.Join(names, "; "), len(t.Mounts), len(t.Links))
}

// lockTimeout is above the slowest refresh seen (NVML without persistence mode takes seconds for each GPU), and below
// what an engine waits for a container.
const lockTimeout = 60 * time.Second

// lock takes the refresh lock; the file stays, because a lock on a removed file locks nothing.
func lock(path string, timeout time.Duration) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != syscall.EWOULDBLOCK && err != syscall.EINTR || time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("%s: %w: another cgpu-refresh runs for more than %v", path, err, timeout)
		}
	}
}
