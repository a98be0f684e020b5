// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// gpus are those of a container as a process without a guard reaches them. Their nodes are open, without which RM gives no device.
type gpus struct {
	driver  rmclient.Driver
	abi     *rm.ABI
	control string
	ids     []uint32
	nodes   []int
	own     *rmclient.Client
}

func openGPUs(cfg guardcfg.Config, driver rmclient.Driver) (g gpus, err error) {
	g = gpus{driver: driver, control: cfg.ControlNode.HostPath}
	if g.abi, err = rm.ForDriver(cfg.DriverVersion, cfg.Settings.AllowUnknownDriver); err != nil {
		return g, err
	}
	for _, x := range cfg.GPUs {
		a, err := rmclient.ParseAddress(x.BusID)
		if err != nil {
			return g, fmt.Errorf("GPU %d: %w", x.Index, err)
		}
		g.ids = append(g.ids, a.ID())
	}
	if cfg.Driver == device.DriverSim {
		return g, nil
	}
	for _, x := range cfg.GPUs {
		fd, err := unix.Open(x.Node.HostPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			g.close()
			return g, fmt.Errorf("open %s: %w", x.Node.HostPath, err)
		}
		g.nodes = append(g.nodes, fd)
	}
	return g, nil
}

// client makes an RM client with the GPUs, once.
func (g *gpus) client() (*rmclient.Client, error) {
	if g.own != nil {
		return g.own, nil
	}
	own, err := rmclient.New(g.driver, g.abi, g.control, g.ids)
	if err != nil {
		return nil, fmt.Errorf("make an RM client: %w", err)
	}
	g.own = own
	return own, nil
}

func (g *gpus) close() {
	if g.own != nil {
		g.own.Close()
	}
	for _, fd := range g.nodes {
		_ = unix.Close(fd)
	}
}
