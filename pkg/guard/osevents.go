// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// An OS event joins an RM client and the number of a descriptor, by which the driver later wakes whoever polls that file. The driver keeps
// all of the node's in one list, which it searches under a spinlock, takes any numbers for it, and writes a line to the kernel log for a
// pair that is there already (allocate_os_event in osapi.c). So a container has only so many, for its own clients.

// maxEvents bounds the OS events of one container, for each of its GPUs. A CUDA context has 8.
const maxEvents = 1024

// checkAllocEvent: an event of one of the container's clients is made.
func (g *Guard) checkAllocEvent(c *trappedCall) plan {
	client, number := rm.U32(c.call.Outer, rm.OSEventClient), rm.U32(c.call.Outer, rm.OSEventFD)
	if g.account.hasEvent(client, number, g.files.self) {
		return answer(c.status(rm.StatusInsufficientResources)) // what the driver says
	}
	if !g.account.roomForEvent(g.files.self, time.Now()) {
		return answer(c.deny(rm.StatusInsufficientResources, "events", "denied an OS event: the container has too many",
			"max", maxEvents*len(g.cfg.GPUs)))
	}
	e, err := newWeakRef(c.fd)
	if err != nil {
		return answer(c.deny(rm.StatusInsufficientResources, "eventfile", "cannot follow the file of an OS event", "err", err))
	}
	return plan{ask: true, cancel: func() { e.close(nil) }, commit: func() {
		g.account.addEvent(client, number, e)
		t, outer := c.target(), slices.Clone(c.call.Outer) // now: c serves other calls by the time of an undo
		c.undo = func() { g.freeEvent(t, client, number, outer) }
	}}
}

func (g *Guard) checkFreeEvent(c *trappedCall) plan {
	return plan{ask: true, commit: func() {
		g.account.removeEvent(rm.U32(c.call.Outer, rm.OSEventClient), rm.U32(c.call.Outer, rm.OSEventFD))
	}}
}

// freeEvent ends an event whose maker was gone before it could be told.
func (g *Guard) freeEvent(t Target, client, number uint32, outer []byte) {
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return
	}
	defer lock.unlock()
	const typeCode = 3<<30 | rm.OSEventSize<<16 | 'F'<<8 | rm.EscFreeOSEvent
	if e := g.driver.Exec(t, &rm.Call{Cmd: typeCode, Outer: outer}); e == 0 && rm.U32(outer, rm.OSEventStatus) == rm.StatusOK {
		g.account.removeEvent(client, number)
	}
}

// hasEvent reports that a client has an event of this number, on a file that is still open.
func (a *account) hasEvent(client, number uint32, self int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil {
		return false
	}
	e, ok := c.osEvents[number]
	if ok && !e.alive(self) {
		a.dropEvent(c, number)
		ok = false
	}
	return ok
}

// roomForEvent reports that the container may have another one. The files of some may be closed by now; that is looked for once a second.
func (a *account) roomForEvent(self int, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	most := maxEvents * len(a.gpus)
	if a.osEvents < most || now.Sub(a.osEventsSeen) < time.Second {
		return a.osEvents < most
	}
	a.osEventsSeen = now
	for _, c := range a.clients {
		for number, e := range c.osEvents {
			if !e.alive(self) {
				a.dropEvent(c, number)
			}
		}
	}
	return a.osEvents < most
}

func (a *account) addEvent(client, number uint32, e weakRef) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil { // the driver has ended it with the client
		e.close(nil)
		return
	}
	if c.osEvents == nil {
		c.osEvents = map[uint32]weakRef{}
	}
	c.osEvents[number] = e
	a.osEvents++
	a.books.note(c)
}

func (a *account) removeEvent(client, number uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil {
		a.dropEvent(c, number)
	}
}

func (a *account) dropEvent(c *client, number uint32) {
	if e, ok := c.osEvents[number]; ok {
		delete(c.osEvents, number)
		a.osEvents--
		a.books.note(c)
		e.close(a.books)
	}
}
