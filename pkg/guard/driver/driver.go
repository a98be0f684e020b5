// SPDX-License-Identifier: Apache-2.0

// Package driver opens what a guard makes its calls on. It is apart from package guard, which knows nothing of package sim.
package driver

import (
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
	return rmclient.NewKernelDriver(), nil
}

// Resume is Open for a program that goes on in another one's place: conn is that one's connection to the simulated driver.
func Resume(cfg guardcfg.Config, conn *os.File, last uint64) (rmclient.Driver, error) {
	if cfg.Driver != device.DriverSim {
		return rmclient.NewKernelDriver(), nil
	}
	c, err := sim.Resume(conn, last)
	if err != nil {
		return nil, err
	}
	return simDriver{c}, nil
}

// Revive is Resume in the place of a guard that was killed.
func Revive(cfg guardcfg.Config, conn *os.File) (rmclient.Driver, error) {
	if cfg.Driver != device.DriverSim {
		return rmclient.NewKernelDriver(), nil
	}
	c, err := sim.Revive(conn)
	if err != nil {
		return nil, err
	}
	return simDriver{c}, nil
}

// simDriver answers every trapped call in the guard, since there is no kernel driver behind the container's nodes.
type simDriver struct{ conn *sim.Conn }

func dialSim(cfg guardcfg.Config) (rmclient.Driver, error) {
	var minors []int
	for _, g := range cfg.GPUs {
		minors = append(minors, g.Minor)
	}
	conn, err := sim.Dial(cfg.SimSocket, minors)
	if err != nil {
		return nil, err
	}
	return simDriver{conn}, nil
}

func (simDriver) Native() bool { return false }

func (d simDriver) Exec(t rmclient.Target, call *rm.Call) syscall.Errno {
	return d.conn.Ioctl(sim.FileID(t.File), int32(t.PID), int32(t.TID), call)
}

func (d simDriver) OpenFile(node rmclient.NodeKind, minor int) (uint32, error) {
	kinds := map[rmclient.NodeKind]sim.NodeKind{rmclient.NodeControl: sim.Control, rmclient.NodeGPU: sim.GPUNode, rmclient.NodeUVM: sim.UVM}
	id, err := d.conn.OpenFile(kinds[node], minor)
	return uint32(id), err
}

// Switches and Pending are what an arbiter and the scheduler ask (arbiter.SimSwitches, gpusched.SimWork).
func (d simDriver) Switches(minor int, since uint64) ([]sched.Switch, uint64, bool, error) {
	return d.conn.Switches(minor, since)
}

func (d simDriver) Pending(minor int, pids []int) (bool, error) { return d.conn.Pending(minor, pids) }

// State is what Resume needs (guard.HandsOver).
func (d simDriver) State() (syscall.Conn, uint64, bool) { return d.conn.State() }

func (d simDriver) CloseFile(id uint32)   { _ = d.conn.CloseFile(sim.FileID(id)) }
func (d simDriver) CloseExport(id uint32) { _ = d.conn.CloseExport(int32(id)) }
func (d simDriver) Close()                { _ = d.conn.Close() }
