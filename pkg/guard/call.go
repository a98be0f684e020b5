package guard

import (
	"bytes"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

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
	// lost is set when the call dropped something, so that it would fail if it were made again.
	lost bool
	// root is the file of a root alloc that is let through.
	root *file
	// wrapped marks a call out of an XFER: it must not run natively, since what sits in the XFER may change.
	wrapped bool
	// executed is set once the driver has been asked; such a call must not be asked again.
	executed bool
	// locked are the clients whose calls wait for this one.
	locked callLock
	// referred is what the call refers to, whose charges stay until it has ended.
	acquired []object
	// What the call is, where the escape alone does not tell.
	control  rm.Control
	class    rm.Class
	params   []byte        // of RM_CONTROL and RM_ALLOC
	start    time.Time     // of its worker, see there
	inDriver time.Duration // that it took
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
	t := Target{FD: c.fd, PID: c.task.proc.tgid, TID: c.task.tid}
	if c.file != nil {
		t.File = uint32(c.file.sim)
	}
	return t
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

// savedCall is a call that was carried out but whose caller was interrupted by a signal before the answer. The kernel
// restarts the system call (or the library repeats it on EINTR), so it comes again with the same registers and either the
// same memory or, since results are written before the answer is sent, with the results in it.
type savedCall struct {
	args   [3]uint64
	out    []savedPart
	before []savedPart // as out, before the results
	rep    reply
	undo   func()
	lost   bool
	// repeated is the call's own. What the thread's last call was is then noted already.
	repeated bool
	blocks   int // 1 if out[1] is the first block
	fd       int // kept for undo
	// onRelease is called when the result is no longer kept.
	onRelease func()
}

type savedPart struct {
	addr uint64
	data []byte
}

// lastAnswer is the last call of a thread that made or dropped something, after its answer was sent. That the answer was
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
	a.valid = c.undo != nil || c.lost
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
	if !a.valid || len(c.before) == 0 || a.args != [3]uint64{c.notif.Args[0], c.notif.Args[1], c.notif.Args[2]} || !bytes.Equal(a.outer, c.before[0]) {
		return false
	}
	if len(c.call.Blocks) > 0 {
		return bytes.Equal(a.block, c.before[1])
	}
	return len(a.block) == 0
}

// replayOrForget is called when a call was handled, and reports that the first answer stands, whose results are then the call's. Otherwise that
// is forgotten; but not for a notification whose caller is away already, and which changed nothing: the call comes again.
func (a *lastAnswer) replayOrForget(c *trappedCall, failed, waits func() bool) bool {
	if a.repeats(c) && failed() {
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
	s := &savedCall{args: [3]uint64{c.notif.Args[0], c.notif.Args[1], c.notif.Args[2]}, rep: rep, undo: c.undo, lost: c.lost, repeated: c.repeated, fd: -1}
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
	a.valid = s.undo != nil || s.lost
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
