// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The root alloc makes an RM client. RM keeps the caller's process in the client and later compares it (mmap, dup), so
// this is the one allocation that must run in the task, with memory and a descriptor that other threads can swap under
// the kernel's hands: it then is any RM_ALLOC, on any file that the task has open. Three rules keep that from being of use
// (docs/adr/0004-fd-table-race.md):
//
//   - It may run only on a file of which all clients are known, and nothing else runs on that file meanwhile. So one of which the guard
//     does not know is the one that this call has made.
//   - A call makes one thing. So afterwards the guard asks RM whether the file has a new client (rootFate). If it has, this call made
//     it, and nothing else. If the call is over and the file has none, it went elsewhere, unless the driver refuses the guard the same.
//   - What it did elsewhere nobody can list: RM tells the first child of a class, and how many objects all clients of the machine
//     have, but not what one client holds. So everything ends that could hold it (endAllClients, rootfate.go).

// pendingRoot is a root alloc under way in the task.
type pendingRoot struct {
	task  *task
	fd    int       // the guard's copy of the file
	args  [3]uint64 // the registers
	call  rm.Call   // what the guard has seen
	after uint32    // the new client's handle is one of the next after this; 0: it may be any
	since time.Time // when the task was let make it; zero: not yet, the caller may be gone
	began *cpuTime  // when it was first looked at
}

// checkRootAlloc lets the task make a client. The simulated driver, which is told for which process, makes it for the guard.
func (g *Guard) checkRootAlloc(c *trappedCall) plan {
	if c.wrapped || c.node.kind != nodeControl {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	if rm.U32(c.call.Outer, rm.AllocRoot) != 0 {
		// The driver refuses such names for reasons of its own, and what it refuses is no offence (rootFate). No library chooses one.
		return answer(c.deny(rm.StatusInvalidClient, "rootname", "denied an RM client whose name the caller chooses"))
	}
	if !g.openedHere(c.fd) {
		g.logOnce("rootelsewhere", "denied an RM client on a file that was not opened in this container's /dev")
		g.stats.denied.Add(1)
		return answer(c.status(rm.StatusInsufficientPermissions))
	}
	if !g.roomForClient() || g.pendingRoots.Load() >= maxPendingRoots {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	if !c.loadRoot() {
		return answer(fail(unix.EFAULT))
	}
	f, err := g.followFile(c.fd, c.node)
	if err != nil {
		g.log.Error("cannot follow a file", "err", err)
		return answer(c.status(rm.StatusInsufficientResources))
	}
	p := &pendingRoot{task: c.task, fd: c.fd, args: [3]uint64(c.notif.Args[:3]), call: cloneCall(&c.call)}
	if !g.hasNoUnknownClient(p) {
		g.logOnce("rootunseen", "denied an RM client on a file that has one which this container's guard has not seen made")
		g.stats.denied.Add(1)
		return answer(c.status(rm.StatusInsufficientPermissions))
	}
	g.rootGate.Lock()
	f.mu.Lock()
	unlock := func() {
		f.mu.Unlock()
		g.rootGate.Unlock()
	}
	if !f.takesClient() {
		unlock()
		g.logOnce("root", "denied an RM client on a file on which one is being made, or that is for exports or for another file")
		g.stats.denied.Add(1)
		return answer(c.status(rm.StatusInsufficientResources))
	}
	return plan{ask: true, done: unlock, through: func() {
		f.pending = p
		f.rooted = true
		g.books.note(f)
		c.fd = -1 // kept until the outcome is known
		c.root = f
		g.pendingRoots.Add(1) // before it is counted: see wholenessOf
		g.rootsLet.Add(1)
	}, commit: func() {
		made := g.clientFound(f, rm.U32(c.call.Outer, rm.AllocObject), c.task.proc.tgid, c.notif.Args[0])
		t := c.target() // now: c serves other calls by the time of an undo
		c.undo = func() {
			if s, e := g.rmFree(t, made.handle, made.handle); e == 0 && s == rm.StatusOK {
				g.clientGone(made)
			}
		}
	}}
}

// takesClient reports that a client may be made on a file. Graphics libraries and Nsight Compute make several on one. The file is locked.
func (f *file) takesClient() bool {
	settled := !f.rooted || f.clients > 0
	return settled && f.pending == nil && !f.registered && !f.exporter
}

// maxPendingRoots bounds the root allocs under way at once: each other call of the container looks at them.
const maxPendingRoots = 64

// loadRoot copies what the structure of a root alloc points at, and makes sure that the driver will be able to write there: a call
// that it could not answer would look like one that went elsewhere.
func (c *trappedCall) loadRoot() bool {
	form, ok := c.guard.abi.AllocForm(len(c.call.Outer))
	if !ok {
		return false
	}
	if _, ok := c.loadBlock(-1, rm.AllocParams, rootParamsSize); !ok {
		return false
	}
	if form.RightsOff >= 0 {
		if _, ok := c.loadBlock(-1, form.RightsOff, rm.RightsSize); !ok {
			return false
		}
	}
	parts := []memoryPart{{c.outerAddr, c.call.Outer}}
	if b := c.call.Blocks[0]; len(b.Data) > 0 {
		parts = append(parts, memoryPart{b.Addr, b.Data})
	}
	return c.valid() && writeMemory(c.task.tid, parts)
}

// rootParamsSize: RM writes the handle there (rmclientConstruct_IMPL).
const rootParamsSize = 4

// cloneCall copies a call out of a worker's scratch memory.
func cloneCall(c *rm.Call) rm.Call {
	clone := rm.Call{Cmd: c.Cmd, Outer: bytes.Clone(c.Outer)}
	for _, b := range c.Blocks {
		b.Data = bytes.Clone(b.Data)
		clone.Blocks = append(clone.Blocks, b)
	}
	return clone
}

// roomForClient reports that the container may have another client. Some may be gone unnoticed.
func (g *Guard) roomForClient() bool {
	if g.account.clientCount() < g.cfg.Settings.MaxClients {
		return true
	}
	g.sweep()
	if g.account.clientCount() < g.cfg.Settings.MaxClients {
		return true
	}
	g.logOnce("maxclients", "denied an RM client: the container has too many; max_clients in cgpu.toml is the bound",
		"max", g.cfg.Settings.MaxClients)
	g.stats.denied.Add(1)
	return false
}

// rootAnswered is told whether the caller of a root alloc could be let through. One that was gone has not made it, and comes again. Until
// this is known its thread, which may be in a signal handler, says nothing of the call.
func (g *Guard) rootAnswered(f *file, through bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pending
	if !through {
		g.endPending(f)
		f.rooted = f.clients > 0
		g.books.note(f)
		return
	}
	p.since = time.Now()
	// Most programs make their next call at once, from the same thread, and that settles it. This is for the others.
	time.AfterFunc(g.rootPatience, func() { g.watchRoot(f, p) })
}

// openedHere reports that a file was opened on this container's own /dev. One that came from another container through a
// socket may have a client that this guard does not know of.
func (g *Guard) openedHere(fd int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.devDevice == 0 {
		g.devDevice = g.devFirst
		if start, err := ledger.ProcStart(g.initPID); err == nil && start == g.initStart {
			g.devDevice = deviceOfDev(g.initPID)
		}
		if g.devDevice == 0 {
			g.log.Warn("cannot look at the container's nvidiactl", "pid", g.initPID)
			return false
		}
		g.books.note(&g.own)
	}
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Dev == g.devDevice
}

// deviceOfDev tells the file system of a process' /dev, which each container has one of its own for; 0: it has no nvidiactl.
func deviceOfDev(pid int) uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/"+strconv.Itoa(livingThread(pid))+"/root/dev/nvidiactl", &st) != nil {
		return 0
	}
	return st.Dev
}

// rootPatience is when the guard looks by itself what became of a root alloc.
const rootPatience = 2 * time.Millisecond

// awaitPendingRoots settles root allocs that may still be under way before another call is served. It returns false, with the
// answer to give, if one on the same file does not end.
func (g *Guard) awaitPendingRoots(c *trappedCall) (reply, bool) {
	for _, f := range g.files.snapshot() {
		f.mu.Lock()
		p := f.pending
		same := p != nil && kcmpSame(g.files.self, c.fd, p.fd)
		f.mu.Unlock()
		if p == nil {
			continue
		}
		over := p.task == c.task // a thread that makes another call has left the earlier one
		// The client that this call names is the likely one: every escape that names a client has it first. A call of one that is known makes
		// no client, and graphics libraries make calls of one while another is made.
		candidate := rm.U32(c.call.Outer, 0)
		if !same || g.account.hasClientOn(f, candidate) {
			g.resolveRoot(f, p, 0, over)
			continue
		}
		for deadline := time.Now().Add(time.Second); !g.resolveRoot(f, p, candidate, over); time.Sleep(50 * time.Microsecond) {
			if time.Now().After(deadline) {
				return fail(unix.EBUSY), false
			}
		}
	}
	return replyDone, true
}

// clientFound records a client that the driver has made on a file, which is locked. The process that made it has the file there.
func (g *Guard) clientFound(f *file, handle uint32, tgid int, fd uint64) *client {
	f.rooted = true
	f.clients++
	g.books.note(f)
	made := g.account.addClient(handle, tgid, f)
	g.account.setMaker(made, euidOf(tgid), place{tgid, tgid, int(int32(fd))})
	g.clientMade()
	return made
}

// clientLives asks RM whether a file owns a client, by freeing an object that is none: RM refuses any other file (clientValidate in
// serverFreeResourceTreeLockAndFindResource). A control would ask the same, but leaves a line in the kernel log where there is no such
// client (RmDeprecatedGetControlHandler).
func (g *Guard) clientLives(t Target, client uint32) bool {
	s, e := g.rmFree(t, client, 0)
	return e == 0 && (s == rm.StatusOK || s == rm.StatusObjectNotFound)
}

// clientGone takes a freed client out of the account; its file may have another one then.
func (g *Guard) clientGone(c *client) {
	if g.dropClient(c) {
		g.endWindows()
	}
}

func (g *Guard) dropClient(c *client) bool {
	f := c.file
	if f == nil {
		return g.account.removeClient(c)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	g.books.note(f) // first, with the lock that its image takes: else the next guard may think that the file has a client
	if !g.account.removeClient(c) {
		return false
	}
	if f.clients--; f.clients <= 0 {
		f.clients, f.rooted = 0, false
	}
	return true
}
