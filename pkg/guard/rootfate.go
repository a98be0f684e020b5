// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// watchRoot looks now and then what became of a root alloc, until that is known. It rests as every look that the guard takes by itself.
func (g *Guard) watchRoot(f *file, p *pendingRoot) {
	known := false
	took := g.chargeTime(func() { known = g.checkPendingRoot(f, p) })
	if !known {
		time.AfterFunc(max(min(time.Second, 2*time.Since(p.since)), backgroundShare*took), func() { g.watchRoot(f, p) })
	}
}

func (g *Guard) checkPendingRoot(f *file, p *pendingRoot) (known bool) {
	if g.resolveRoot(f, p, 0, false) {
		return true
	}
	if time.Since(p.since) > time.Second {
		g.startAudit(suspects) // what it has made elsewhere may be here already, and its thread be held on the way back
		g.preemptWhilePending()
	}
	return false
}

// resolveRoot finds out what became of a root alloc, and ends what could hold the result of one that went elsewhere. candidate is a client
// that a later call on the file names, or 0; over says that the thread has left the call. False: it may still be under way.
func (g *Guard) resolveRoot(f *file, p *pendingRoot, candidate uint32, over bool) bool {
	fate := g.rootFate(f, p, candidate, over)
	if fate == rootLost {
		g.rootWentAstray(p)
	}
	return fate != rootOpen
}

// rootWentAstray is told of a call that did not make the client that it was let through for. One in an hour may be honest: a signal that
// comes in the same moment as the guard's answer keeps the call from being made (see lastAnswer), and the thread then makes it again. For
// this one the guard looks at device memory, lets no context run whose kernels cannot be stopped, and ends what is in a trust domain's
// channel group; the second one ends all.
func (g *Guard) rootWentAstray(p *pendingRoot) {
	now := time.Now()
	before := g.astrayAt.Swap(now.UnixNano())
	g.books.note(&g.own)
	if before == 0 || now.Sub(time.Unix(0, before)) > forgiveness {
		g.log.Warn("an RM client was asked for and is not there: a signal came in between, or another thread made something else of the call",
			"pid", p.task.proc.tgid)
		g.endShared(p.task.proc.tgid)
		g.startAudit(suspects)
		g.preemptUnseen()
		return
	}
	g.endAllClients(p)
}

// forgiveness is for how long a root alloc that went elsewhere counts.
const forgiveness = time.Hour

// fate is what became of a root alloc.
type fate int

const (
	rootOpen    fate = iota // it may still be under way
	rootSettled             // the file has the client, or the driver makes none
	rootLost                // it went elsewhere
)

func (g *Guard) rootFate(f *file, p *pendingRoot, candidate uint32, over bool) fate {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.pending != p:
		return rootSettled
	case p.since.IsZero():
		return rootOpen
	}
	at := threadOutside
	if !over {
		at = p.whereabouts() // before it is asked what the file has: the call may end in between
	}
	if g.madeClient(f, p, candidate) {
		g.settleRoot(f, candidate)
		return rootSettled
	}
	if at != threadOutside && candidate != 0 { // soon again
		return rootOpen
	}
	// To search costs thousands of calls, and is for a thread of which it is known where it is.
	if at == threadUnseen || at == threadInside && time.Since(p.since) <= stallTime {
		return rootOpen
	}
	// What the driver has answered stands in the task's memory, which is not read: the task can keep who does so waiting for ever (readSome).
	// But the driver counts the handles of clients up, so what it calls the guard's is behind the one that is looked for.
	last, refused, err := g.probeRoot()
	if err != nil {
		g.logOnce("tryroot", "cannot ask the driver for a client", "err", err)
		return rootOpen
	}
	for i := uint32(1); !refused && i <= handlesBack; i++ {
		if h := handleAfter(last, -i); g.madeClient(f, p, h) {
			g.settleRoot(f, h)
			return rootSettled
		}
	}
	// A thread that sleeps in its call for so long, while the driver makes clients for others, waits for memory of its own
	// (userfaultfd), not for the driver.
	if at != threadOutside && (refused || p.whereabouts() != threadInside) {
		return rootOpen
	}
	g.rootSettled(p) // before it is no more pending. If it is refused, no offence; but a call that became another one needs no client
	g.endPending(f)
	f.rooted = f.clients > 0
	g.books.note(f)
	if refused {
		return rootSettled
	}
	return rootLost
}

const (
	// handlesBack is how many clients may have been made since, by anybody, where no call on the file names the one. The first look is after
	// 2 ms; to make a client takes RM's exclusive lock, and some 20 µs.
	handlesBack = 4096
	// handlesAhead is the same where the guard has asked before.
	handlesAhead = 1024
	// stallTime is far beyond what the driver's locks are held for at a time.
	stallTime = 10 * time.Second
	// clientHandles is how many handles there are for clients (RS_CLIENT_HANDLE_MAX, resserv.h).
	clientHandles = 1 << 20
)

// handleAfter counts a client's handle up, or down, as the driver does (_serverCreateEntryAndLockForNewClient).
func handleAfter(h, n uint32) uint32 { return h&^(clientHandles-1) | (h+n)&(clientHandles-1) }

// madeClient reports that a file has a client that the guard has not seen, and that a root alloc on it can have made.
func (g *Guard) madeClient(f *file, p *pendingRoot, h uint32) bool {
	if h == 0 || p.after != 0 && (h-p.after)&(clientHandles-1)-1 >= handlesAhead {
		return false
	}
	return !g.account.hasClientOn(f, h) && g.clientLives(Target{FD: p.fd, PID: p.task.proc.tgid, TID: p.task.tid}, h)
}

// hasNoUnknownClient reports that a file has no client that could be taken for the one to be made. It can have one that the guard does not
// know if a root alloc went elsewhere before, and made it there; so it is looked at from then on.
func (g *Guard) hasNoUnknownClient(p *pendingRoot) bool {
	if g.astrayAt.Load() == 0 {
		return true
	}
	if at := g.allEndedAt.Load(); at != 0 { // who provokes that must not keep the guard busy
		time.Sleep(time.Until(time.Unix(0, at).Add(endPause)))
	}
	last, refused, err := g.probeRoot()
	if refused || err != nil {
		return false
	}
	p.after = last
	for i := range uint32(handlesAhead) {
		if g.clientLives(Target{FD: p.fd}, handleAfter(last, i+1)) {
			return false
		}
	}
	return true
}

// endPause is how long no RM client is made after all were ended.
const endPause = time.Second

// probeRoot makes a client on the guard's own file, and frees it at once. It returns the handle; refused says that the driver makes none.
func (g *Guard) probeRoot() (handle uint32, refused bool, err error) {
	own, err := g.guardClient()
	if err != nil {
		return 0, false, err
	}
	// Nothing of what the task passed: rights that it asks for and may not have, say, would have the driver refuse every such call, and no
	// call that went elsewhere would be one.
	call := g.allocCall(allocation{class: rmclient.ClassClient, params: make([]byte, 4)})
	if e := g.driver.Exec(own.File(), &call); e != 0 { // an interruption, say: the driver has not refused a client
		return 0, false, e
	}
	if off, ok := g.abi.StatusOff(call.NR(), call.Size()); !ok || rm.U32(call.Outer, off) != rm.StatusOK {
		return 0, true, nil
	}
	handle = rm.U32(call.Outer, rm.AllocObject)
	if s, e := g.rmFree(own.File(), handle, handle); e != 0 || s != rm.StatusOK {
		g.logOnce("freeroot", "cannot free a client of the guard's own", "status", rm.StatusName(s), "errno", e)
	}
	return handle, false, nil
}

// settleRoot records the client of a root alloc that the driver has confirmed. The file is locked.
func (g *Guard) settleRoot(f *file, handle uint32) {
	p := f.pending
	g.rootSettled(p)
	g.clientFound(f, handle, p.task.proc.tgid, p.args[0])
	g.endPending(f) // last: from then on the file may be closed for good, which ends the clients that are known
}

// endPending forgets a root alloc. The file is locked.
func (g *Guard) endPending(f *file) {
	_ = unix.Close(f.pending.fd)
	f.pending = nil
	g.books.note(f)
	g.pendingRoots.Add(-1)
}

// endAllClients is for root allocs that went elsewhere. They made something below some client of the container, or a client on some file;
// which, the driver does not tell. So all clients are freed, and the processes killed that have files on which there may be clients nobody
// knows.
func (g *Guard) endAllClients(p *pendingRoot) {
	g.allEndedAt.Store(time.Now().UnixNano())
	g.books.note(&g.own)
	g.log.Error("threads of the container make something else of calls that ask for an RM client; "+
		"all its RM clients are freed, and its processes that use the GPU killed",
		"pid", p.task.proc.tgid)
	g.events.Note(event.Event{Kind: event.Freed, PID: p.task.proc.tgid, Text: "all RM clients, and processes that use the GPU killed: " +
		"threads made something else of calls that ask for an RM client"})
	g.killClients(func(*client) bool { return true })
	killed := map[int]bool{}
	for range livingTries { // one may have given its file to another meanwhile
		if g.killHolders(killed) == 0 {
			break
		}
		time.Sleep(killPause)
	}
	g.stats.processesKilled.Add(uint64(len(killed)))
	g.startAudit(suspects)
}

// killHolders kills the processes that have nvidiactl open from the container's /dev, and returns how many there were.
func (g *Guard) killHolders(killed map[int]bool) (n int) {
	for _, tgid := range g.containerPIDs() {
		holds := false
		eachTable(tgid, &g.nodes, func(fd int, _ place) bool {
			n, _, err := g.nodes.classify(fd)
			holds = err == nil && n.kind == nodeControl && g.openedHere(fd)
			_ = unix.Close(fd)
			return !holds
		})
		if holds {
			g.killProcess(tgid)
			killed[tgid] = true
			n++
		}
	}
	return n
}
