// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync/atomic"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/guard/keeper"
)

// A flight is a call under way as the next guard finds it, should this one be killed: in memory that both have. The kernel writes a
// notification right there, so there is no moment at which it is received and only this process knows; and the worker's copy of the call is
// there, into which the driver writes.
//
// The guard may be killed between any two stores, and what is here of the worker's call before is never cleared. So two words, stored last,
// say what may be read, of this call: asked, and settled. They are cleared before the next notification comes. Who reads it is the same
// program, which the keeper executes: after an upgrade there is other memory.
type flight struct {
	notif    seccompNotif  // ID 0: none
	listener int32         // descriptor
	asked    atomic.Uint32 // not 0: the driver may have been, and the call is described
	settled  atomic.Uint64 // 1 and the number of the commit that settles the call (number 0: no books change by it), with its answer; 0: none

	// The description.
	outer  uint64 // where the task has the structure
	fd     int32  // the guard's copy of the task's file
	cmd    uint32
	made   uint32 // the object that the call makes, under a name that nothing had before; 0: there is none, or the driver chooses the name
	whole  uint32 // not 0: what follows is all of the call
	at     flightPart
	blockN uint32
	blocks [maxParts]flightBlock

	// The answer.
	errno  int32
	resume uint32 // not 0: the task makes the call itself
	partN  uint32
	parts  [maxParts]flightPart // to be written to the task
}

type flightPart struct {
	addr    uint64
	at, len uint32 // in the worker's memory
}

type flightBlock struct {
	flightPart
	in, off int32
}

var _ [keeper.FlightHead - unsafe.Sizeof(flight{})]byte // it fits

// flightAt finds a flight in the common memory.
func flightAt(m []byte) (f *flight, body []byte) {
	return (*flight)(unsafe.Pointer(&m[0])), m[keeper.FlightHead:]
}

// body is the worker's memory: it follows.
func (f *flight) body() []byte {
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(f), keeper.FlightHead)), keeper.FlightBody)
}

// locate is where memory of the worker's is. False: it is elsewhere.
func locate(body, b []byte) (p flightPart, ok bool) {
	if len(b) == 0 {
		return p, true
	}
	at := uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&body[0]))
	if at > uintptr(len(body)) || uintptr(len(b)) > uintptr(len(body))-at {
		return p, false
	}
	return flightPart{at: uint32(at), len: uint32(len(b))}, true
}

// asked is called before the driver is. Where it is asked more than once, that is about the same call, in the same memory.
func (c *trappedCall) asked() {
	f := c.flight
	if f == nil || f.asked.Load() != 0 {
		return
	}
	f.whole, f.made, f.blockN = 0, 0, 0
	f.fd, f.cmd, f.outer = int32(c.fd), c.call.Cmd, c.outerAddr
	var ok bool
	if f.at, ok = locate(c.mem.mem, c.call.Outer); ok && len(c.call.Blocks) <= len(f.blocks) {
		for i, b := range c.call.Blocks {
			p, inside := locate(c.mem.mem, b.Data)
			ok = ok && inside
			p.addr = b.Addr
			f.blocks[i] = flightBlock{p, int32(b.In), int32(b.Off)}
		}
		f.blockN = uint32(len(c.call.Blocks))
		if ok {
			f.whole = 1
		}
	}
	if client, handle, makes := madeBy(&c.call); makes {
		if _, known := c.guard.account.lookup(client, handle); !known {
			f.made = handle
		}
	}
	f.asked.Store(1)
}

// answered is called when it is known what the task is told. From the commit on the call is over but for that.
func (c *trappedCall) answered(rep reply, parts []memoryPart) {
	f := c.flight
	if f == nil {
		c.guard.books.commit(nil)
		return
	}
	f.errno, f.resume, f.partN = int32(rep.errno), 0, 0
	if rep.resume {
		f.resume = 1
	}
	for i, x := range parts {
		p, ok := locate(c.mem.mem, x.data)
		if !ok {
			p.len = 0
		}
		p.addr = x.addr
		f.parts[i] = p
		f.partN = uint32(i + 1)
	}
	c.guard.books.commit(func(number uint64) { f.settled.Store(number + 1) })
}

// received makes a flight one of a notification that is about to come. The call before stays settled until it is no more asked: else who is
// killed in between would have it undone.
func (f *flight) received(listener int) {
	f.asked.Store(0)
	f.settled.Store(0)
	f.listener = int32(listener)
}

// outcome is what is known of a call when the guard was killed, by the last commit in its books. A call that was not asked and is not
// settled has changed nothing, whatever was noted of it.
func (f *flight) outcome(last uint64) outcome {
	switch n := f.settled.Load(); {
	case n > 0 && n-1 <= last:
		return answered
	case f.asked.Load() == 0:
		return undone
	}
	return unknown
}
