// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// Snapshot is the state of the driver for tests: what the ledger says must agree with it to the byte.
type Snapshot struct {
	Files   int           `json:"files"`
	Clients int           `json:"clients"`
	Objects int           `json:"objects"` // clients included
	Exports int           `json:"exports"` // descriptors that hold memory
	Events  int           `json:"events"`  // OS events, of all files
	Faults  int           `json:"faults"`  // how often a GPU computed with memory that was taken from it, since the driver's start
	Stray   int           `json:"stray"`   // writes to memory that was free
	Stale   int           `json:"stale"`   // files by which somebody may see memory that is not theirs any more
	Host    quota.Bytes   `json:"host"`    // host memory that handles and files keep
	GPUs    []GPUSnapshot `json:"gpus"`
}

// GPUSnapshot is one card.
type GPUSnapshot struct {
	Index     int            `json:"index"`
	Minor     int            `json:"minor"`
	UUID      string         `json:"uuid"`
	Memory    quota.Bytes    `json:"memory"`
	Used      quota.Bytes    `json:"used"`      // Allocated + Hidden
	Allocated quota.Bytes    `json:"allocated"` // class 0x40, every piece once
	Hidden    quota.Bytes    `json:"hidden"`    // contexts and page tables
	BAR1      quota.Bytes    `json:"bar1"`      // what windows of the processor take of it
	Kept      int            `json:"kept"`      // channels that UVM address spaces retain
	Engine    runlist.Totals `json:"engine"`    // of graphics, since the driver's start
	Processes []Process      `json:"processes"` // ascending by pid
	TSGs      []TSGSnapshot  `json:"tsgs"`      // by client and handle
	Xids      []uint64       `json:"xids,omitempty"`
	Lost      bool           `json:"lost,omitempty"`
}

// Process is what one process holds on a card. Memory that two processes share counts for both; memory that only an
// exported descriptor holds counts for none.
type Process struct {
	PID     int32       `json:"pid"`
	Bytes   quota.Bytes `json:"bytes"`
	Objects int         `json:"objects"`
}

// TSGSnapshot is one channel group.
type TSGSnapshot struct {
	Client      uint32 `json:"client"`
	Handle      uint32 `json:"handle"`
	PID         int32  `json:"pid"`
	EngineType  uint32 `json:"engineType"`
	TimesliceUs uint64 `json:"timesliceUs"`
	Preempts    uint64 `json:"preempts"`
	CILP        bool   `json:"cilp"`
	Channels    int    `json:"channels"`
	Disabled    int    `json:"disabled"` // channels stopped by FIFO_DISABLE_CHANNELS
	// Of a group on the graphics engine.
	Paused      bool          `json:"paused"` // does not run: no channel is scheduled and not disabled
	Kernels     uint64        `json:"kernels"`
	GPUTime     time.Duration `json:"gpuTime"`
	Waiting     time.Duration `json:"waiting"` // had work that did not run
	Switches    uint64        `json:"switches"`
	Preemptions uint64        `json:"preemptions"`
}

// Snapshot describes the driver's state.
func (d *Driver) Snapshot() Snapshot {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tick()
	s := Snapshot{Files: len(d.files), Clients: len(d.clients), Objects: d.objects, Exports: len(d.exports), Events: len(d.events),
		Faults: d.faults, Stale: d.stale(), Stray: d.stray, Host: d.hostPages()}
	for _, g := range d.gpus {
		s.GPUs = append(s.GPUs, GPUSnapshot{
			Index: g.Index, Minor: g.Minor, UUID: g.UUID,
			Memory: g.Memory, Used: g.used, Allocated: g.allocated, Hidden: g.hidden, BAR1: g.bar1, Kept: g.kept, Engine: g.engine.Totals(),
			Processes: d.processes(g), TSGs: d.groups(g),
			Xids: slices.Clone(g.xids), Lost: g.lost,
		})
	}
	return s
}

func (d *Driver) processes(g *gpu) []Process {
	count := map[int32]int{}
	for _, c := range d.clients {
		for _, o := range c.objects {
			if o.gpu == g {
				count[c.pid]++
			}
		}
	}
	list := []Process{}
	for pid, n := range count {
		u := d.usageOf(g, pid)
		list = append(list, Process{PID: pid, Bytes: u.private + u.sharedOwned + u.sharedDuped, Objects: n})
	}
	slices.SortFunc(list, func(a, b Process) int { return cmp.Compare(a.PID, b.PID) })
	return list
}

func (d *Driver) groups(g *gpu) []TSGSnapshot {
	list := []TSGSnapshot{}
	for _, c := range d.clients {
		for _, o := range c.objects {
			if o.group == nil || o.gpu != g {
				continue
			}
			t := TSGSnapshot{Client: c.handle, Handle: o.handle, PID: c.pid, EngineType: o.group.engineType,
				TimesliceUs: o.group.timesliceUs, Preempts: o.group.preempts, CILP: o.group.cilp}
			if tsg := o.group.tsg; tsg != nil {
				a := tsg.Account()
				t.Paused, t.Kernels, t.GPUTime, t.Waiting = tsg.Paused(), a.Kernels, a.GPUTime, a.Waiting
				t.Switches, t.Preemptions = a.Switches, a.Preemptions
			}
			for _, ch := range o.children {
				if ch.channel != nil {
					t.Channels++
					if ch.channel.disabled {
						t.Disabled++
					}
				}
			}
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(a, b TSGSnapshot) int {
		return cmp.Or(cmp.Compare(a.Client, b.Client), cmp.Compare(a.Handle, b.Handle))
	})
	return list
}
