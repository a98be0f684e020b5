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
	if g.tallyFile != nil { // of the program in whose place this one goes on
		return g.releaseTally
	}
	var uuids []string
	for _, x := range g.cfg.GPUs {
		uuids = append(uuids, x.UUID)
	}
	f, err := tally.Create(g.cfg.RunDir, g.cfg.Nonce, uuids)
	if err != nil {
		g.log.Warn("what is counted does not outlive this process", "err", err)
		return func() {}
	}
	g.tallyFile = f
	g.countIn(f.Page)
	return g.releaseTally
}

func (g *Guard) releaseTally() {
	g.countCPU()
	g.tallyFile.Release()
}

// countGPUTime counts each GPU's times up to the last switch record.
func (g *Guard) countGPUTime() {
	for i := range g.cfg.GPUs {
		t, exact := g.gpuTime.Looked(i)
		if !exact {
			continue
		}
		c, w := g.tally.On(i), g.tally.Waits(i)
		c.Exact.Store(1)
		tally.Raise(&c.Time, uint64(t.Used))
		tally.Raise(&w.Waiting, uint64(t.Waiting))
		tally.Raise(&w.Throttled, uint64(t.Throttled))
		tally.Raise(&w.Entitled, uint64(t.Entitled))
	}
	g.countCPU()
}

func (g *Guard) countCPU() {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		tally.Raise(&g.tally.CPU, uint64(u.Utime.Nano()+u.Stime.Nano()))
	}
}
