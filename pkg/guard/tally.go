// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/tally"
)

// countIn has the guard count in a page.
func (g *Guard) countIn(p *tally.Page) {
	g.tally = p
	g.stats.calls, g.stats.killed, g.stats.processesKilled = &p.Calls, &p.FreedClients, &p.KilledProcesses
}

// keepTally has the guard count in a file of the node's, so that a kill loses nothing. It comes before the first call. Without the file
// the container is served as well: nobody's limit hangs on it.
func (g *Guard) keepTally() (release func()) {
	var uuids []string
	for _, x := range g.cfg.GPUs {
		uuids = append(uuids, x.UUID)
	}
	f, err := tally.Create(g.cfg.RunDir, g.cfg.Nonce, uuids)
	if err != nil {
		g.log.Warn("what is counted does not outlive this process", "err", err)
		return func() {}
	}
	g.countIn(f.Page)
	return func() {
		g.countCPU()
		f.Release()
	}
}

// countGPUTime counts each GPU's time up to the last switch record.
func (g *Guard) countGPUTime() {
	for i := range g.cfg.GPUs {
		used, exact := g.gpuTime.Looked(i)
		if !exact {
			continue
		}
		c := g.tally.On(i)
		c.Exact.Store(1)
		tally.Raise(&c.Time, uint64(used))
	}
	g.countCPU()
}

func (g *Guard) countCPU() {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		tally.Raise(&g.tally.CPU, uint64(u.Utime.Nano()+u.Stime.Nano()))
	}
}
