// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Managed memory (cudaMallocManaged) is made by mmap(2) of nvidia-uvm, not by an ioctl, so no call of it comes by the guard
// (kernel-open/nvidia-uvm/uvm.c, uvm_mmap). Two things make up for that. The limiter, the preload library in the container,
// asks before it lets such a mapping happen; that is exact, and for honest programs. And once a second the guard looks at the
// memory maps of the container's processes: what was mapped without asking and passes the limit has the container's GPU work
// paused and, when it is still there half a second later, its process killed.
//
// The pages can be anywhere, on every GPU of the container and on the host, and the driver evicts them for others' needs. What
// counts is the size of the mappings, on each sliced GPU.

const (
	// managedLook is how often maps are looked at while the container has RM clients, overLook while it is over its limit.
	managedLook = time.Second
	overLook    = 500 * time.Millisecond
	// claimTime is how long what the limiter announced may take to appear in the maps.
	claimTime = 2 * time.Second
	// poolSize is what CUDA maps of nvidia-uvm for each context: a semaphore pool, which is host memory (UVM_ALLOC_SEMAPHORE_POOL;
	// seen with CUDA 13.0). So mappings as small as that, one for each channel group, are not counted unless announced.
	poolSize = 2 * quota.MiB
	// maxSpans bounds the ranges remembered for a container; the kernel's own bound on mappings is 65530 for each process. Of
	// processes beyond it only the sum is kept, see oneSpan.
	maxSpans = 1 << 16
	// lastAddress is beyond what any process can map (arm64 has 52 bits, amd64 56).
	lastAddress = 1 << 63
)

// managed is the managed memory of the container. Its mutex comes before all others but a task's: a call that is served waits
// for it, and who holds it looks through files, sweeps, and charges.
type managed struct {
	books         *books
	mu            sync.Mutex
	procs         map[int][]span // by process, ascending, not overlapping
	spans         int            // in all of them
	watching      bool
	over          bool          // GPU work is paused because of it
	killed        int           // the last process that was killed for it
	cpu           time.Duration // that the container had used at the last look
	scanNotBefore time.Time     // until then no process can have the maps looked at by asking for memory
	pids          func() []int  // the container's processes; nil: those of its cgroup

	looker atomic.Pointer[peerpage.Lookout] // tells when the container has run; nil: nobody does
	ran    chan struct{}                    // it has
}

// onManaged answers the limiter, which is about to map managed memory (page.ReserveManaged) or has unmapped some.
func (g *Guard) onManaged(c *trappedCall, cmd uint32) reply {
	if !c.loadOuter(cmd, c.notif.Args[2], managedCallSize) {
		return fail(unix.EFAULT)
	}
	o := c.call.Outer
	base, length := rm.U64(o, managedCallBase), rm.U64(o, managedCallLength)
	status := uint32(rm.StatusOK)
	switch {
	case length == 0 || base >= lastAddress || length > lastAddress-base:
		status = rm.StatusInvalidArgument
	case !g.countsManaged():
	case !c.valid():
		return replyDone
	case cmd == page.ReleaseManaged:
		g.releaseManaged(c.task.proc.tgid, base, base+length)
	case g.cfg.Settings.Managed == device.ManagedDeny:
		status = rm.StatusNoMemory
	case !g.reserveManaged(c.task.proc.tgid, base, base+length):
		status = rm.StatusNoMemory
	}
	if status == rm.StatusNoMemory {
		g.stats.denied.Add(1)
	}
	rm.PutU32(o, managedCallStatus, status)
	return replyDone
}

// Of page.ManagedCall.
const (
	managedCallBase   = 0
	managedCallLength = 8
	managedCallStatus = 16
	managedCallSize   = 24
)

// countsManaged: the container has a limit, and managed memory is to be held against it.
func (g *Guard) countsManaged() bool {
	return g.cfg.Settings.Managed != device.ManagedAllow && g.gpuTime.Schedules()
}

// reserveManaged charges what a process is about to map. False: it does not fit.
func (g *Guard) reserveManaged(tgid int, base, end uint64) bool {
	m := &g.managed
	m.mu.Lock()
	defer m.mu.Unlock()
	g.startWatchingMaps()
	if m.spans+2 > maxSpans { // a range in the middle of another one makes three of it
		return false
	}
	list := m.procs[tgid]
	claim := span{base, end, true, time.Now()}
	more := claim.size() - overlapSize(list, base, end)
	if more > 0 && !g.account.reserveManaged(more, false) {
		// Something may be gone unnoticed. To look for it costs the guard more than the caller, so not for every call.
		g.sweepUntil(func() bool { return g.account.fitsManaged(more) })
		if claim.announced.After(m.scanNotBefore) {
			g.scanMaps()
		}
		list = m.procs[tgid]
		more = claim.size() - overlapSize(list, base, end)
		if !g.account.reserveManaged(more, true) {
			return false
		}
	}
	m.setSpans(tgid, insertSpan(list, claim))
	return true
}

func (g *Guard) releaseManaged(tgid int, base, end uint64) {
	m := &g.managed
	m.mu.Lock()
	defer m.mu.Unlock()
	list := m.procs[tgid]
	g.account.releaseManaged(overlapSize(list, base, end))
	m.setSpans(tgid, cutRange(list, base, end))
}

// managedGone gives back the managed memory of a process that has ended.
func (g *Guard) managedGone(tgid int) {
	g.freeZombies()
	g.releaseManaged(tgid, 0, ^uint64(0))
}

func (m *managed) setSpans(tgid int, list []span) {
	m.spans += len(list) - len(m.procs[tgid])
	m.books.noteSpans(tgid, list)
	if len(list) == 0 {
		delete(m.procs, tgid)
		return
	}
	if m.procs == nil {
		m.procs = map[int][]span{}
	}
	m.procs[tgid] = list
}

// startWatchingMaps begins to look at maps, if nobody does. The caller holds managed.mu.
func (g *Guard) startWatchingMaps() {
	if m := &g.managed; !m.watching && g.countsManaged() {
		m.watching = true
		go g.watchMaps()
	}
}

// clientMade is told of every RM client: without one a process has no address space on a GPU. The caller may hold a file's lock,
// which is taken with managed.mu held elsewhere (sweep, killClients), so this does not wait for that.
func (g *Guard) clientMade() {
	if !g.countsManaged() {
		return
	}
	go func() {
		g.managed.mu.Lock()
		defer g.managed.mu.Unlock()
		g.startWatchingMaps()
	}()
}

func (g *Guard) watchMaps() {
	for wait, rest := managedLook, time.Duration(0); wait > 0; {
		g.awaitMaps(wait, rest)
		if !g.serving() {
			return
		}
		rest = backgroundShare * g.chargeTime(func() { wait = g.checkMaps() })
	}
}

// mapsLook is for how long the guard that looks for all may not tell this one that its container has run.
const mapsLook = 10 * time.Second

// awaitMaps waits until the container may have mapped something: for so long, or until it is told that the container has run since.
func (g *Guard) awaitMaps(wait, rest time.Duration) {
	looker := g.managed.looker.Load()
	if looker == nil || wait < managedLook {
		g.pause(max(wait, rest))
		return
	}
	g.pause(rest)
	looker.AwaitRan()
	late := time.NewTimer(mapsLook)
	defer late.Stop()
	select {
	case <-g.done:
	case <-g.managed.ran:
	case <-late.C:
	}
}

// checkMaps tells after what time to look again; 0: there is no need to.
func (g *Guard) checkMaps() time.Duration {
	m := &g.managed
	m.mu.Lock()
	defer m.mu.Unlock()
	// A container that has not run since the last look cannot have mapped anything.
	if used, ok := cpuUsage(g.containerCgroups().cpu); !ok || used != m.cpu || m.over {
		m.cpu = used
		g.scanMaps()
		g.enforceManaged()
	}
	m.watching = m.over || len(m.procs) > 0 || g.account.clientCount() > 0
	switch {
	case !m.watching:
		return 0
	case m.over:
		return overLook
	}
	return managedLook
}

// scanMaps brings the account in line with the memory maps of the container's processes. The caller holds managed.mu.
func (g *Guard) scanMaps() {
	m := &g.managed
	g.freeZombies()
	now := time.Now()
	defer func() { m.scanNotBefore = time.Now().Add(backgroundShare * time.Since(now)) }()
	found := g.findSpans()
	g.addAnnounced(found, now)
	g.leaveOutPools(found)
	g.chargeSpans(found)
}

// findSpans reads the maps, each address space's once.
func (g *Guard) findSpans() map[int][]span {
	m := &g.managed
	found := map[int][]span{}
	var spaces []int // of found, in the order of their address spaces
	room := maxSpans
	for _, tgid := range g.containerPIDs() {
		list, seen := uvmSpans(tgid)
		if !seen {
			g.endElusive(tgid)
			found[tgid] = slices.Clone(m.procs[tgid]) // it has that until it has ended
			continue
		}
		if len(list) == 0 {
			continue
		}
		if other := sharesMaps(tgid, &spaces); other != 0 {
			if other != tgid { // cgroup.procs may have a process twice (cgroup-v2.rst)
				g.moveSpans(tgid, other)
			}
			continue
		}
		if len(list) > room {
			list = oneSpan(list)
		}
		room -= len(list)
		found[tgid] = list
	}
	return found
}

// addAnnounced adds what was announced a moment ago, and may not be mapped yet.
func (g *Guard) addAnnounced(found map[int][]span, now time.Time) {
	for tgid, old := range g.managed.procs {
		list := found[tgid]
		for _, s := range old {
			if now.Sub(s.announced) < claimTime && overlapSize(list, s.base, s.end) < s.size() && g.tasks.lives(tgid) {
				list = insertSpan(list, s)
			}
		}
		if len(list) > 0 {
			found[tgid] = list
		}
	}
}

// leaveOutPools takes out small mappings that are not counted (poolSize), and notes of the others what was agreed to before.
func (g *Guard) leaveOutPools(found map[int][]span) {
	pools := g.account.groupCount()
	for tgid, list := range found {
		old := g.managed.procs[tgid]
		list = slices.DeleteFunc(list, func(s span) bool {
			if s.size() > poolSize || overlapSize(old, s.base, s.end) > 0 || pools <= 0 {
				return false
			}
			pools--
			return true
		})
		for i := range list {
			list[i].agreed = list[i].agreed || agreedBefore(old, list[i].base, list[i].end)
		}
		found[tgid] = list
	}
}

// chargeSpans charges what was found, in place of what was known. First what is given back: it may be what another process has taken.
func (g *Guard) chargeSpans(found map[int][]span) {
	m := &g.managed
	for tgid, old := range m.procs {
		if was, is := totalSize(old), totalSize(found[tgid]); is < was {
			g.account.releaseManaged(was - is)
		}
	}
	for tgid, list := range found {
		if was, is := totalSize(m.procs[tgid]), totalSize(list); is > was {
			if g.cfg.Settings.Managed != device.ManagedDeny && g.account.reserveManaged(is-was, false) {
				agreeAll(list)
			} else {
				g.account.forceManaged(is - was)
			}
		}
		m.setSpans(tgid, list)
	}
	for tgid := range m.procs {
		if _, ok := found[tgid]; !ok {
			m.setSpans(tgid, nil)
		}
	}
}

// endElusive kills a process whose first thread has ended, and whose others end faster than they can be looked at, or that maps and
// unmaps memory as fast as it is looked at: no program has reason to.
func (g *Guard) endElusive(tgid int) {
	g.logOnce("elusive", "killing a process whose memory maps cannot be read to the end, as its threads keep ending or its mappings changing",
		"pid", tgid)
	g.stats.processesKilled.Add(1)
	g.events.Note(event.Event{Kind: event.Killed, PID: tgid,
		Text: "its threads keep ending, or its mappings changing, so that nobody can tell what managed memory it has mapped"})
	g.killProcess(tgid)
}

// containerPIDs lists the processes whose maps are looked at: those of the container's cgroup, and those that have made driver calls,
// wherever their cgroup is by now.
func (g *Guard) containerPIDs() []int {
	if g.managed.pids != nil {
		return g.managed.pids()
	}
	list := g.containerCgroups().processes()
	known := make(map[int]bool, len(list))
	for _, tgid := range list {
		known[tgid] = true
	}
	for _, p := range g.tasks.processes() {
		if !known[p.tgid] {
			list = append(list, p.tgid)
		}
	}
	return list
}

// moveSpans counts what a process has announced with the process under which their common address space is counted.
func (g *Guard) moveSpans(from, to int) {
	m := &g.managed
	list := m.procs[to]
	for _, s := range m.procs[from] {
		g.account.releaseManaged(overlapSize(list, s.base, s.end)) // charged twice so far
		list = insertSpan(list, s)
	}
	m.setSpans(to, list) // first: else a commit in between has them nowhere
	m.setSpans(from, nil)
}

// enforceManaged pauses the container's GPU work when it maps more than it may, kills the process that does when it does not stop,
// and lets the rest go on. The caller holds managed.mu.
func (g *Guard) enforceManaged() {
	m := &g.managed
	worst, most := 0, quota.Bytes(0)
	for tgid, list := range m.procs {
		var excess quota.Bytes
		for _, s := range list {
			if !s.agreed {
				excess += s.size()
			}
		}
		if excess > most {
			worst, most = tgid, excess
		}
	}
	deny := g.cfg.Settings.Managed == device.ManagedDeny
	guilty := most > 0 && (deny || g.account.managedOver())
	if most > 0 && !guilty { // it fits by now
		for tgid, list := range m.procs {
			agreeAll(list)
			m.setSpans(tgid, list)
		}
	}
	switch {
	case !guilty && m.over:
		m.over = false
		g.gpuTime.Hold(false)
		g.log.Info("managed memory is within the limit again")
		g.events.Note(event.Event{Kind: event.Let, Text: "managed memory is within the limit again"})
	case guilty && !m.over: // it may be about to unmap
		m.over, m.killed = true, 0
		g.gpuTime.Hold(true)
		g.log.Warn("a process has mapped managed memory beyond the container's limit; GPU work is paused", "pid", worst, "size", most)
		g.events.Note(event.Event{Kind: event.Held, PID: worst,
			Text: fmt.Sprintf("GPU work paused: %v of managed memory mapped beyond the limit", most)})
	case guilty:
		if m.killed != worst { // else it takes its time to end
			m.killed = worst
			g.log.Warn("killing a process for managed memory beyond the container's limit", "pid", worst, "size", most)
			g.stats.processesKilled.Add(1)
			g.events.Note(event.Event{Kind: event.Killed, PID: worst, Text: fmt.Sprintf("%v of managed memory mapped beyond the limit", most)})
		}
		g.killProcess(worst)
	}
}
