// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// trappedCall is one notification while it is served: who called, on which file, with what.
type trappedCall struct {
	guard    *Guard
	listener *listener // nil in tests: a task that always waits
	notif    *seccompNotif
	task     *task
	mem      *arena
	fd       int  // the guard's copy of the file, closed at the end; -1 if none
	node     node // what the file is
	file     *file

	call      rm.Call
	outerAddr uint64
	ahead     []byte // what the task's memory holds behind the outer structure
	// before holds copies of the outer structure and the blocks as the task passed them, to tell what changed and to
	// recognise the same call when it comes again after a signal.
	before [][]byte
	// statusOnly is the offset of the status word where that is all that a call changes; then before is empty.
	statusOnly int
	// undo takes back what the call made, for a caller that is gone before it could be told. Nil: nothing was made.
	undo func()
	// once is set when the driver has said OK to a call that it may refuse if it is made again.
	once bool
	// root is the file of a root alloc that is let through.
	root *file
	// wrapped marks a call out of an XFER: it must not run natively, since what sits in the XFER may change.
	wrapped bool
	// executed is set once the driver has been asked; such a call must not be asked again.
	executed bool
	// absent is set when the call names what there is not; roots were let through until then. named is what was looked at last, for the log;
	// it is gone if it must not be made meanwhile.
	absent bool
	named  uint32
	gone   bool
	// elsewhere is set when what was looked at last is below another object than its record.
	elsewhere bool
	roots     int64
	// locked are the clients whose calls wait for this one.
	locked callLock
	// acquired is what the call refers to, whose charges stay until it has ended.
	acquired []object
	// What the call is, where the escape alone does not tell.
	control  rm.Control
	class    rm.Class
	params   []byte        // of RM_CONTROL and RM_ALLOC
	start    time.Time     // of its worker, see there
	inDriver time.Duration // that it took
	flight   *flight       // what the next guard would find of the call; nil: there is no keeper
	// repeated marks a call that got the answer of the thread's last one, see lastAnswer.
	repeated bool
}

// reply is the answer to a notification.
type reply struct {
	resume bool          // let the task make the call itself
	errno  syscall.Errno // else the result: 0 or an error
}

var (
	replyDone   = reply{}
	replyResume = reply{resume: true}
)

func fail(e syscall.Errno) reply { return reply{errno: e} }

// lookahead is read beyond an outer structure: its parameters mostly lie close behind it on the caller's stack, and a
// second copy from another process costs more than a longer first one.
const lookahead = 2048

// loadOuter copies n bytes of the task into the call as its outer structure.
func (c *trappedCall) loadOuter(cmd uint32, addr uint64, n int) bool {
	c.call.Cmd, c.outerAddr = cmd, addr
	c.call.Blocks = c.call.Blocks[:0]
	c.before = c.before[:0]
	c.call.Outer = nil
	b := c.mem.alloc(n + lookahead)
	if b == nil {
		return false
	}
	got := readSome(c.task.tid, addr, b)
	if got < n {
		return false
	}
	c.call.Outer, c.ahead = b[:n:n], b[n:got]
	return c.keepOriginal(c.call.Outer)
}

// keepOriginal remembers what the task passed.
func (c *trappedCall) keepOriginal(b []byte) bool {
	old := c.mem.alloc(len(b))
	if old == nil {
		return false
	}
	copy(old, b)
	c.before = append(c.before, old)
	return true
}

// loadBlock copies the memory behind the pointer at off of the outer structure (in = -1) or of a block. A null pointer or
// size 0 makes an empty block, which the driver sees as null.
func (c *trappedCall) loadBlock(in, off, n int) ([]byte, bool) {
	if len(c.call.Blocks) >= maxParts-1 {
		return nil, false
	}
	parent := c.call.Outer
	if in >= 0 {
		parent = c.call.Blocks[in].Data
	}
	addr := rm.U64(parent, off)
	if addr == 0 {
		n = 0
	}
	b := c.mem.alloc(n)
	if b == nil || !c.copyIn(addr, b) || !c.keepOriginal(b) {
		return nil, false
	}
	c.call.Blocks = append(c.call.Blocks, rm.Block{In: in, Off: off, Addr: addr, Data: b})
	return b, true
}

// copyIn copies from the task, out of what was read with the outer structure if it was.
func (c *trappedCall) copyIn(addr uint64, b []byte) bool {
	start := c.outerAddr + uint64(len(c.call.Outer))
	if addr >= start && addr-start <= uint64(len(c.ahead)) && uint64(len(b)) <= uint64(len(c.ahead))-(addr-start) {
		copy(b, c.ahead[addr-start:])
		return true
	}
	return readMemory(c.task.tid, addr, b)
}

// target is the call's own file.
func (c *trappedCall) target() Target {
	return Target{FD: c.fd, PID: c.task.proc.tgid, TID: c.task.tid}
}

// valid reports that the task is still waiting in this very call. Everything read before is the task's own only if it is
// true afterwards. A nil listener, in tests, stands for a task that always waits.
func (c *trappedCall) valid() bool { return c.listener == nil || c.listener.valid(c.notif.ID) }

// changedParts lists what the task must be told: the ranges that differ from what it passed. Unchanged parts are not written,
// so that constant memory may stand behind an input pointer.
func (c *trappedCall) changedParts(parts []memoryPart) []memoryPart {
	if c.statusOnly > 0 {
		return append(parts, memoryPart{c.outerAddr + uint64(c.statusOnly), c.call.Outer[c.statusOnly : c.statusOnly+4]})
	}
	for i, b := range c.call.Blocks {
		parts = appendChanged(parts, b.Addr, c.before[i+1], b.Data)
	}
	return appendChanged(parts, c.outerAddr, c.before[0], c.call.Outer)
}

// appendChanged adds the range from the first to the last byte that differs.
func appendChanged(parts []memoryPart, addr uint64, before, now []byte) []memoryPart {
	if bytes.Equal(before, now) {
		return parts
	}
	first, last := 0, len(now)
	for before[first] == now[first] {
		first++
	}
	for before[last-1] == now[last-1] {
		last--
	}
	return append(parts, memoryPart{addr + uint64(first), now[first:last]})
}
