// SPDX-License-Identifier: Apache-2.0

// Cgpu-sim serves the simulated GPU driver of a node on <run dir>/sim.sock, with the GPUs of <run dir>/node.json.
//
// cgpu-refresh starts it when cgpu.toml says driver = "sim"; the guards are its clients. It also shows the driver's state
// and makes it slow, for tests:
//
//	cgpu-sim --run-dir DIR                       serve until SIGTERM
//	cgpu-sim snapshot --run-dir DIR              print the state as JSON
//	cgpu-sim delay --run-dir DIR --alloc 5ms     make allocations slow (--free, --control, --other)
//	cgpu-sim xid --run-dir DIR --gpu 0 79        have GPU 0 report Xid 79 (several: 79 48)
//	cgpu-sim lose --run-dir DIR --gpu 0          have it fall off the bus
//	cgpu-sim restore --run-dir DIR --gpu 0       and come back
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/sim"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cgpu-sim:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	command := "serve"
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		command, args = args[0], args[1:]
	}
	dir := os.Getenv("CGPU_RUN_DIR")
	if dir == "" {
		dir = "/run/cgpu"
	}
	var delay sim.Delay
	var trouble sim.Trouble
	fs := flag.NewFlagSet("cgpu-sim "+command, flag.ExitOnError)
	fs.StringVar(&dir, "run-dir", dir, "folder of node.json and sim.sock")
	if command == "delay" {
		fs.DurationVar(&delay.Alloc, "alloc", 0, "time that an allocation of device memory takes")
		fs.DurationVar(&delay.Free, "free", 0, "time that RM_FREE takes")
		fs.DurationVar(&delay.Control, "control", 0, "time that RM_CONTROL takes")
		fs.DurationVar(&delay.Other, "other", 0, "time that every other call takes")
	}
	if slices.Contains([]string{"xid", "lose", "restore"}, command) {
		fs.IntVar(&trouble.GPU, "gpu", 0, "index of the GPU")
	}
	_ = fs.Parse(args) // exits on an error
	if fs.NArg() > 0 && command != "xid" {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	socket := filepath.Join(dir, "sim.sock")
	switch command {
	case "serve":
		return serve(dir, socket)
	case "snapshot":
		return snapshot(socket)
	case "delay":
		c, err := sim.Dial(socket, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		return c.SetDelay(delay)
	case "xid":
		for _, arg := range fs.Args() {
			n, err := strconv.ParseUint(arg, 10, 32)
			if err != nil {
				return fmt.Errorf("xid %q: want numbers such as 79", arg)
			}
			trouble.Xids = append(trouble.Xids, n)
		}
		return makeTrouble(socket, trouble)
	case "lose", "restore":
		trouble.Lost = new(command == "lose")
		return makeTrouble(socket, trouble)
	}
	return fmt.Errorf("unknown command %q: want serve, snapshot, delay, xid, lose or restore", command)
}

func makeTrouble(socket string, t sim.Trouble) error {
	c, err := sim.Dial(socket, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Trouble(t)
}

func snapshot(socket string) error {
	c, err := sim.Dial(socket, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := c.Snapshot()
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	return out.Encode(s)
}

func serve(dir, socket string) error {
	d, err := driver(filepath.Join(dir, "node.json"))
	if err != nil {
		return err
	}
	unlock, err := lock(filepath.Join(dir, "sim.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	// Under the lock a socket in the way is a dead server's.
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	// Only root may be a guard. The mode is set before anyone can connect: bind makes the file under this umask.
	old := syscall.Umask(0o177)
	l, err := net.Listen("unix", socket)
	syscall.Umask(old)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	return d.Serve(ctx, l)
}

// driver makes the driver that node.json describes.
func driver(path string) (*sim.Driver, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w; run cgpu-refresh", err)
	}
	var t device.Table
	if err := json.Unmarshal(b, &t); err != nil {
		return nil, fmt.Errorf("%s: %w; run cgpu-refresh", path, err)
	}
	if t.Driver != device.DriverSim {
		return nil, fmt.Errorf("%s: driver is %q: set driver = %q in cgpu.toml and run cgpu-refresh", path, t.Driver, device.DriverSim)
	}
	cfg := sim.Config{DriverVersion: t.DriverVersion}
	for _, g := range t.GPUs {
		cfg.GPUs = append(cfg.GPUs, sim.GPU{Index: g.Index, Minor: g.Minor, UUID: g.UUID, BusID: g.BusID, Name: g.Name, Memory: g.Memory})
	}
	return sim.New(cfg)
}

// lock makes sure that one server runs per run dir.
func lock(path string) (func(), error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w: another cgpu-sim serves this folder", path, err)
	}
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%d\n", os.Getpid()) // for people
	return func() { f.Close() }, nil
}
