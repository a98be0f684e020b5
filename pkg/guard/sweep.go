// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/proc"
)

// sweep looks which followed files are closed for good, takes what was on them out of the account, and waits until it is freed.
func (g *Guard) sweep() { g.sweepUntil(func() bool { return false }) }

// sweepUntil is sweep for who needs something that it may free: it returns when there is enough.
func (g *Guard) sweepUntil(enough func() bool) {
	for _, torn := range g.startSweep() {
		if enough() {
			return
		}
		<-torn
	}
}

// startSweep is sweep without waiting: it returns what is closed when an address space is torn down, for each that is under way. UVM can
// take as long for one as its kernels run, so nothing is locked meanwhile that others need.
func (g *Guard) startSweep() (underWay []chan struct{}) {
	g.sweepMu.Lock() // two at once would end the same address space
	defer g.sweepMu.Unlock()
	for _, f := range g.files.reap() {
		g.fileClosed(f)
	}
	g.endWindows()
	g.gpuTime.LetGo()
	for _, f := range g.orphans() {
		if !g.ownerExiting(f) {
			f.tornDown = make(chan struct{})
			go func() {
				defer close(f.tornDown)
				g.chargeUnpaidTime(func() time.Duration { return g.endUVM(f) })
			}()
		}
	}
	for _, f := range g.files.snapshot() {
		if f.tornDown != nil {
			underWay = append(underWay, f.tornDown)
		}
	}
	return underWay
}

// fileClosed takes what was on a file out of the account.
func (g *Guard) fileClosed(f *file) {
	g.account.dropFile(f)
	f.mu.Lock()
	exports, sim, exporter := f.exports, f.sim, f.exporter
	if f.pending != nil {
		g.pendingRoots.Add(-1)
		_ = unix.Close(f.pending.fd)
		f.pending = nil
	}
	f.exports = nil
	g.books.note(f) // before what it held ends
	f.mu.Unlock()
	for _, e := range exports {
		g.dropExport(e)
	}
	if sim != 0 {
		if exporter {
			g.driver.CloseExport(uint32(sim))
		}
		g.driver.CloseFile(uint32(sim))
	}
	g.books.end(f) // not before: a simulated driver's files do not close by themselves
	f.close(g.books)
}

// ownerPIDs are the processes that used an address space.
func (f *file) ownerPIDs() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.owners))
}

// ownerExiting reports that a process which used an address space is about to end. It has no descriptors any more, but perhaps still
// channels that run. When they are gone its pidfd tells, whoever asks it: the watcher may be held up by the end of another one.
func (g *Guard) ownerExiting(f *file) bool {
	for _, tgid := range f.ownerPIDs() {
		if g.tasks.lives(tgid) && proc.Exiting(tgid) {
			return true
		}
	}
	return false
}

// processGone gives back what a process held. Its clients went with its files, unless a child has those too.
func (g *Guard) processGone(p *process) {
	p.gone.Store(true)
	g.tasks.dropProcess(p)
	g.sweepNext()
	g.managedGone(p.tgid) // may wait for a sweep
}

// sweepNext sweeps at once or, where sweeps have just taken long, when the guard has rested from them. However many ask for it meanwhile,
// it is done once.
func (g *Guard) sweepNext() {
	if g.sweepPending.CompareAndSwap(false, true) {
		go func() {
			g.sweepTurnMu.Lock()
			defer g.sweepTurnMu.Unlock()
			time.Sleep(time.Until(g.sweepNotBefore))
			g.sweepPending.Store(false) // who asks from now on may have closed something that this one does not see
			took := g.chargeTime(func() { g.startSweep() })
			g.sweepNotBefore = time.Now().Add(backgroundShare * took)
		}()
	}
}

// sweepSoon sweeps a few times in the near future: memory whose last handle was freed is still held by a UVM mapping, and
// the program is likely to close that address space next (cudaDeviceReset).
func (g *Guard) sweepSoon() {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch g.sweepWait {
	case firstSweep: // it comes, however often it is asked for
		return
	case 0:
		g.sweepTimer = time.AfterFunc(firstSweep, g.sweepAgain)
	default: // the next one would come late
		g.sweepTimer.Reset(firstSweep)
	}
	g.sweepWait = firstSweep
}

const (
	firstSweep = 10 * time.Millisecond
	lastSweep  = 256 * firstSweep
)

func (g *Guard) sweepAgain() {
	g.sweepNext()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sweepWait >= lastSweep || !g.account.hasZombies() {
		g.sweepWait = 0
		return
	}
	g.sweepWait = max(firstSweep, g.sweepWait) * 4
	g.sweepTimer.Reset(g.sweepWait)
}

// orphans are the UVM address spaces that no process of the container has open. Each process is looked at once, however many address
// spaces there are, and only until all are found: first those that used them, then the others.
func (g *Guard) orphans() []*file {
	left := map[*file]bool{}
	for _, f := range g.files.snapshot() {
		if f.strong >= 0 && f.tornDown == nil {
			left[f] = true
		}
	}
	seen := map[int]bool{}
	look := func(tgid int) {
		if seen[tgid] || len(left) == 0 {
			return
		}
		seen[tgid] = true
		eachTable(tgid, &g.nodes, func(fd int, _ place) bool {
			if f := g.files.find(fd, nodeUVM); f != nil {
				f.mu.Lock()
				f.owners[tgid] = true
				g.books.note(f)
				f.mu.Unlock()
				delete(left, f)
			}
			_ = unix.Close(fd)
			return len(left) > 0
		})
	}
	for _, f := range slices.Collect(maps.Keys(left)) {
		for _, tgid := range f.ownerPIDs() {
			if left[f] {
				look(tgid)
			}
		}
	}
	if len(left) > 0 {
		for _, tgid := range g.containerCgroups().processes() {
			look(tgid)
		}
	}
	return slices.Collect(maps.Keys(left))
}
