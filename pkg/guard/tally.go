package guard

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/tally"
)

// count has the guard count in a page.
func (g *Guard) count(p *tally.Page) {
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
	g.count(f.Page)
	return func() {
		g.countCPU()
		f.Release()
	}
}

// countTime counts a GPU's time, which may be corrected downwards for a moment (Tracker.Idle): a counter is not.
func (g *Guard) countTime(gpu int, used time.Duration, exact bool) {
	if exact && used >= 0 {
		c := g.tally.On(gpu)
		c.Exact.Store(1)
		tally.Raise(&c.Time, uint64(used))
	}
}

// countLooked counts each GPU's time up to the last look at it: it is known then, and later perhaps corrected.
func (g *Guard) countLooked() {
	for _, x := range g.compute.cards {
		x.mu.Lock()
		own, _ := x.tracker.Usage(x.tracker.Last())
		exact := x.source != nil
		x.mu.Unlock()
		g.countTime(x.gpu, own.GPUTime, exact)
	}
	g.countCPU()
}

func (g *Guard) countCPU() {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		tally.Raise(&g.tally.CPU, uint64(u.Utime.Nano()+u.Stime.Nano()))
	}
}
