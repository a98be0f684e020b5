// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// savedCall is a call that was carried out but whose caller was interrupted by a signal before the answer. The kernel
// restarts the system call (or the library repeats it on EINTR), so it comes again with the same registers and either the
// same memory or, since results are written before the answer is sent, with the results in it.
type savedCall struct {
	args   [3]uint64
	out    []savedPart
	before []savedPart // as out, before the results
	rep    reply
	undo   func()
	once   bool
	// repeated is the call's own. What the thread's last call was is then noted already.
	repeated bool
	blocks   int   // 1 if out[1] is the first block
	fd       int   // kept for undo
	size     int64 // what keeping it counts for
	// onRelease is called when the result is no longer kept.
	onRelease func()
}

type savedPart struct {
	addr uint64
	data []byte
}

// lastAnswer is the last call of a thread that changed something, after its answer was sent. That the answer was
// sent does not mean that it arrived: a signal can take the caller away at the same moment, and then the kernel restarts
// the call all the same (seccomp_do_user_notification returns the interruption although the notification is answered). So
// when the next call of the thread is the same, with the results already in its memory, and now fails, the first answer
// stands.
type lastAnswer struct {
	args  [3]uint64
	outer []byte
	block []byte // the first block
	valid bool
}

// record remembers an answered call. Its buffers are used again and again.
func (a *lastAnswer) record(c *trappedCall) {
	if c.repeated {
		return // what it repeats stays noted: this answer may get lost as well
	}
	a.valid = c.once
	if !a.valid {
		return
	}
	a.args = [3]uint64{c.notif.Args[0], c.notif.Args[1], c.notif.Args[2]}
	a.outer = append(a.outer[:0], c.call.Outer...)
	a.block = a.block[:0]
	if len(c.call.Blocks) > 0 {
		a.block = append(a.block, c.call.Blocks[0].Data...)
	}
}

// repeats reports that a call is the answered one again.
func (a *lastAnswer) repeats(c *trappedCall) bool {
	if !a.valid || len(c.before) == 0 || a.args != [3]uint64{c.notif.Args[0], c.notif.Args[1], c.notif.Args[2]} ||
		!bytes.Equal(a.outer, c.before[0]) {
		return false
	}
	if len(c.call.Blocks) > 0 {
		return bytes.Equal(a.block, c.before[1])
	}
	return len(a.block) == 0
}

// isMadeOnce reports a call that the driver may refuse if it is made again: any but a control that asks for something, or makes so what is
// so. UVM mappings, of which the status is all that is written, are made again in place of themselves.
func (c *trappedCall) isMadeOnce() bool {
	if c.node.kind == nodeUVM || c.call.NR() != rm.EscControl {
		return c.statusOnly == 0
	}
	switch c.control.Kind {
	case rm.ControlFD, rm.ControlCreateExportFD, rm.ControlExportFD, rm.ControlExportFDs, rm.ControlImportFD, rm.ControlImportFDs,
		rm.ControlPeerMemory, rm.ControlResetChannel, rm.ControlStreamAlloc, rm.ControlStreamFree, rm.ControlStreamBind,
		rm.ControlFlexibleAttach, rm.ControlFlexibleDetach:
		return true
	}
	return false
}

// refuses reports an answer to a call that cannot be the answer to the same call that was carried out before: it failed, or the task is to
// make it, and the driver would find nothing of what the guard has done in its place.
func (c *trappedCall) refuses(rep reply) bool { return rep.resume || c.failed(rep) }

// replayOrForget is called when a call was handled, and reports that the first answer stands, whose results are then the call's. Otherwise
// that is forgotten; but not for a notification whose caller is away already, and which changed nothing: the call comes again.
func (a *lastAnswer) replayOrForget(c *trappedCall, refused, waits func() bool) bool {
	if a.repeats(c) && refused() {
		a.restore(c)
		return true
	}
	if c.executed || waits() {
		a.valid = false
	}
	return false
}

// restore puts the first answer's results into a call.
func (a *lastAnswer) restore(c *trappedCall) {
	c.repeated = true
	copy(c.call.Outer, c.before[0])
	for i, b := range c.call.Blocks {
		copy(b.Data, c.before[i+1])
	}
}

// savedSize is what saving the call would take.
func (c *trappedCall) savedSize() int {
	n := 2 * len(c.call.Outer)
	for _, b := range c.call.Blocks {
		n += 2 * len(b.Data)
	}
	return n
}

// save keeps the result of a call whose caller is away.
func (c *trappedCall) save(rep reply) *savedCall {
	s := &savedCall{args: [3]uint64{c.notif.Args[0], c.notif.Args[1], c.notif.Args[2]}, rep: rep, undo: c.undo, once: c.once,
		repeated: c.repeated, fd: -1}
	if s.undo != nil { // else the copy would keep the file, and with it the container's memory, from being closed for good
		s.fd, c.fd = c.fd, -1
	}
	add := func(list *[]savedPart, addr uint64, b []byte) {
		if len(b) > 0 {
			*list = append(*list, savedPart{addr, bytes.Clone(b)})
		}
	}
	add(&s.before, c.outerAddr, c.before[0])
	add(&s.out, c.outerAddr, c.call.Outer)
	if len(c.call.Blocks) > 0 && len(c.call.Blocks[0].Data) > 0 {
		s.blocks = 1
	}
	for i, b := range c.call.Blocks {
		add(&s.before, b.Addr, c.before[i+1])
		add(&s.out, b.Addr, b.Data)
	}
	return s
}

// matches reports whether a notification is the saved call again.
func (s *savedCall) matches(notif *seccompNotif, tid int) bool {
	if s.args != [3]uint64{notif.Args[0], notif.Args[1], notif.Args[2]} {
		return false
	}
	for i, p := range s.before {
		now := make([]byte, len(p.data))
		if !readMemory(tid, p.addr, now) {
			return false
		}
		if !bytes.Equal(now, p.data) && !bytes.Equal(now, s.out[i].data) {
			return false
		}
	}
	return true
}

// parts lists the results to write, those that changed.
func (s *savedCall) parts() []memoryPart {
	var parts []memoryPart
	for i, p := range s.out {
		if !bytes.Equal(p.data, s.before[i].data) {
			parts = append(parts, memoryPart(p))
		}
	}
	return parts
}

// recordSaved remembers a saved call as answered: that answer may get lost like the first.
func (a *lastAnswer) recordSaved(s *savedCall) {
	if s.repeated {
		return
	}
	a.valid = s.once
	a.args = s.args
	a.outer, a.block = append(a.outer[:0], s.out[0].data...), a.block[:0]
	if s.blocks > 0 {
		a.block = append(a.block, s.out[1].data...)
	}
}

// discard gives up on a saved call: what it made is taken back.
func (s *savedCall) discard() {
	if s.undo != nil {
		s.undo()
	}
	s.release()
}

func (s *savedCall) release() {
	if s.onRelease != nil {
		s.onRelease()
		s.onRelease = nil
	}
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
		s.fd = -1
	}
}

// maxSaved bounds the bytes of all saved results of a container, savedCost of what each takes beside its own: its thread is remembered for
// it, with a descriptor.
const (
	maxSaved  = 8 << 20
	savedCost = 1 << 10
)

// undoAfter is how long a call that was carried out waits for its interrupted caller to come again before what it made
// is taken back. A restarted system call comes at once; one behind a stopped process may come later, and is then carried
// out anew.
const undoAfter = time.Second

// saveResult keeps the result of an executed call for its caller, who was interrupted. The task is locked.
func (g *Guard) saveResult(c *trappedCall, rep reply) {
	// A result must be kept even of a control, or a slow one never ends for a caller with a fast timer; but only so much, or
	// many threads with large ones would bloat the guard.
	size := savedCost + c.savedSize()
	if g.savedBytes.Add(int64(size)) > maxSaved && c.undo == nil {
		g.savedBytes.Add(-int64(size))
		return
	}
	s := c.save(rep)
	s.size = int64(size)
	s.onRelease = func() { g.savedBytes.Add(-s.size) }
	task := c.task
	task.saved = s
	if s.undo == nil {
		return // something was dropped: nothing to take back, so the result may wait as long as the thread lives
	}
	g.undos.Add(1)
	s.onRelease = func() {
		g.savedBytes.Add(-s.size)
		g.undos.Add(-1)
	}
	time.AfterFunc(undoAfter, func() {
		task.mu.Lock()
		defer task.mu.Unlock()
		if task.saved == s {
			g.chargeTime(s.discard)
			task.saved = nil
			g.stats.undone.Add(1)
			g.sweepSoon()
		}
	})
}
