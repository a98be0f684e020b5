// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// tellHandles lets the next guard, should there be one, know which handles of the guard's own there may be.
func (g *Guard) tellHandles() {
	if g.keep != nil && g.rmClient != nil {
		g.rmClient.Tell(g.keep.memory.Handle())
	}
}

// guardClient returns the guard's own RM client, on a file that no container has, made when it is first asked for. Through it the guard
// asks the driver what processes hold (audit.go), and keeps what windows show (windows.go); GPU time pauses channels and looks for work by
// it.
func (g *Guard) guardClient() (*rmclient.Client, error) {
	g.rmClientMu.Lock()
	defer g.rmClientMu.Unlock()
	if g.rmClient != nil {
		return g.rmClient, nil
	}
	var ids []uint32
	for _, x := range g.gpus {
		ids = append(ids, x.ID())
	}
	own, err := rmclient.New(g.driver, g.abi, g.cfg.ControlNode.HostPath, ids)
	if err != nil {
		return nil, fmt.Errorf("make an RM client: %w", err)
	}
	for _, sub := range own.Subdevices() {
		g.bar1 = append(g.bar1, g.bar1Size(own, sub))
	}
	g.rmClient = own
	g.tellHandles()
	g.noteOwnRM()
	return own, nil
}
