// SPDX-License-Identifier: Apache-2.0

// Package driver opens what a guard makes its calls on. It is apart from package guard, which knows nothing of package sim.
package driver

import (
	"fmt"
	"os"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// Open opens the driver that a guard's configuration names: the simulated one, or NVIDIA's kernel modules.
func Open(cfg guardcfg.Config) (rmclient.Driver, error) {
	if cfg.Driver == device.DriverSim {
		return dialSim(cfg)
	}
	return rmclient.Kernel{}, nil
}

// Resume is Open for a program that goes on in another one's place: conn is that one's connection to the simulated driver.
func Resume(cfg guardcfg.Config, conn *os.File, last uint64) (rmclient.Driver, error) {
	if cfg.Driver != device.DriverSim {
		return rmclient.Kernel{}, nil
	}
	c, err := sim.Resume(conn, last)
	if err != nil {
		return nil, err
	}
	return &simDriver{conn: c}, nil
}

// Revive is Resume in the place of a guard that was killed. Of its files the driver keeps the known ones.
func Revive(cfg guardcfg.Config, conn *os.File, known []uint32) (rmclient.Driver, error) {
	if cfg.Driver != device.DriverSim {
		return rmclient.Kernel{}, nil
	}
	c, err := sim.Revive(conn, known)
	if err != nil {
		return nil, err
	}
	return &simDriver{conn: c}, nil
}

// simDriver answers every trapped call in the guard, since there is no kernel driver behind the container's nodes.
type simDriver struct {
	conn *sim.Conn
	name func(fd int) (uint32, error) // of the file behind a descriptor
}

func dialSim(cfg guardcfg.Config) (rmclient.Driver, error) {
	var minors []int
	for _, g := range cfg.GPUs {
		minors = append(minors, g.Minor)
	}
	conn, err := sim.Dial(cfg.SimSocket, minors)
	if err != nil {
		return nil, err
	}
	return &simDriver{conn: conn}, nil
}

func (*simDriver) ServesNodes() bool                          { return false }
func (*simDriver) Control(cmd uint32) (rm.Control, bool)      { return sim.ControlForm(cmd) }
func (d *simDriver) Number(fd int) (uint32, error)            { return d.name(fd) }
func (d *simDriver) NameFiles(name func(int) (uint32, error)) { d.name = name }

func (d *simDriver) Exec(t rmclient.Target, call *rm.Call) syscall.Errno {
	id := t.File
	if t.FD >= 0 {
		var err error
		if id, err = d.name(t.FD); err != nil {
			return syscall.ENOMEM
		}
	}
	return d.conn.Ioctl(sim.FileID(id), int32(t.PID), int32(t.TID), call)
}

func (d *simDriver) Open(string) (rmclient.Target, error) {
	id, err := d.conn.OpenFile(sim.Control, 0)
	return rmclient.Target{FD: -1, File: uint32(id)}, err
}

func (d *simDriver) OpenFile(node rmclient.NodeKind, minor int) (uint32, error) {
	kinds := map[rmclient.NodeKind]sim.NodeKind{rmclient.NodeControl: sim.Control, rmclient.NodeGPU: sim.GPUNode, rmclient.NodeUVM: sim.UVM}
	kind, ok := kinds[node]
	if !ok {
		return 0, fmt.Errorf("the simulated driver has no node of kind %d", node)
	}
	id, err := d.conn.OpenFile(kind, minor)
	return uint32(id), err
}

// Switches and Pending are what an arbiter and the scheduler ask (arbiter.SimSwitches, gpusched.SimWork).
func (d *simDriver) Switches(minor int, since uint64) ([]sched.Switch, uint64, bool, error) {
	return d.conn.Switches(minor, since)
}

func (d *simDriver) Pending(minor int, pids []int) (bool, error) { return d.conn.Pending(minor, pids) }

// State is what Resume needs (guard.HandsOver).
func (d *simDriver) State() (syscall.Conn, uint64, bool) { return d.conn.State() }

func (d *simDriver) CloseFile(id uint32)   { _ = d.conn.CloseFile(sim.FileID(id)) }
func (d *simDriver) CloseExport(id uint32) { _ = d.conn.CloseExport(int32(id)) }
func (d *simDriver) Close()                { _ = d.conn.Close() }
