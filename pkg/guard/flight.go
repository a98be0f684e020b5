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
type flight struct {
	notif    seccompNotif // ID 0: none
	listener int32        // descriptor
	phase    atomic.Uint32
	commit   atomic.Uint64 // that settles the call; 0: the books do not change by it
	outer    uint64        // where the task has the structure
	fd       int32         // the guard's copy of the task's file
	errno    int32
	cmd      uint32
	made     uint32 // the object that the call makes, under a name that nothing had before; 0: there is none, or the driver chooses the name
	whole    uint32 // not 0: the call is described here
	resume   uint32 // not 0: the answer is that the task makes the call itself
	blockN   uint32
	partN    uint32
	at       flightPart // of the outer structure
	blocks   [maxParts]flightBlock
	parts    [maxParts]flightPart // to be written to the task
}

// The phases of a call.
const (
	phaseReceived = iota // nobody was asked anything
	phaseAsked           // the driver may have been
	phaseAnswered        // commit settles it, and the answer is in parts, if the books have it
)

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

// asked is called before the driver is.
func (c *trappedCall) asked() {
	f := c.flight
	if f == nil {
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
	f.phase.Store(phaseAsked)
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
	c.guard.books.commit(func(number uint64) {
		f.commit.Store(number)
		f.phase.Store(phaseAnswered)
	})
}

// received makes a flight one of a notification that is about to come.
func (f *flight) received(listener int) {
	f.phase.Store(phaseReceived)
	f.commit.Store(0)
	f.listener = int32(listener)
}
