// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"syscall"
)

// Trouble is what can be made to happen to a GPU, for tests of its health.
type Trouble struct {
	GPU  int      `json:"gpu"`            // index
	Xids []uint64 `json:"xids,omitempty"` // reported, without an effect on anybody's work
	Lost *bool    `json:"lost,omitempty"` // fallen off the bus, or back
}

// maxXids bounds what is kept of a GPU's.
const maxXids = 1 << 10

// Trouble makes it.
func (d *Driver) Trouble(t Trouble) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.gpus, func(g *gpu) bool { return g.Index == t.GPU })
	if i < 0 {
		return fmt.Errorf("sim: there is no GPU %d: %w", t.GPU, syscall.ENODEV)
	}
	g := d.gpus[i]
	if len(g.xids)+len(t.Xids) > maxXids {
		return fmt.Errorf("sim: GPU %d has had %d Xids: %w", t.GPU, len(g.xids), syscall.ENOSPC)
	}
	g.xids = append(g.xids, t.Xids...)
	if t.Lost != nil {
		g.lost = *t.Lost
	}
	return nil
}

// lost says whether an object's GPU has fallen off the bus.
func (o *object) lost() bool { return o.gpu != nil && o.gpu.lost }
