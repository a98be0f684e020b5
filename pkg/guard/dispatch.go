// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// serve answers one notification. It is the guard's main way; read it from top to bottom.
func (w *worker) serve(notif *seccompNotif) {
	g := w.guard
	cmd := uint32(notif.Args[1]) // the kernel truncates to 32 bits too (SYSCALL_DEFINE3(ioctl))

	// What may run natively is decided by the registers alone. Memory and even the descriptor table can change between
	// this check and the system call, the registers cannot: a number that no driver call has is safe whatever file it
	// reaches in the end.
	if !rm.UVMShaped(cmd) && !g.abi.RMShaped(cmd) && !fromLimiter(cmd) {
		w.listener.answer(notif.ID, replyResume)
		return
	}
	g.stats.calls.Add(1)
	for range 2 {
		task, err := g.tasks.acquire(int(notif.PID))
		if err != nil {
			if w.listener.valid(notif.ID) {
				g.log.Warn("cannot look at a task", "tid", notif.PID, "err", err)
				w.listener.answer(notif.ID, fail(unix.ENODEV))
			}
			return
		}
		again := w.serveTask(notif, task)
		task.release()
		if !again {
			return
		}
	}
	w.listener.answer(notif.ID, fail(unix.ENODEV))
}

// serveTask answers a notification of a known thread. It returns true if the thread turned out to be a dead one whose
// number is in use again: then nothing was done and the caller tries anew.
func (w *worker) serveTask(notif *seccompNotif, task *task) (again bool) {
	g := w.guard
	if !task.mu.TryLock() { // a second notification of a thread waits for the first, whose caller is away by then
		task.mu.Lock()
		if !w.listener.valid(notif.ID) {
			task.mu.Unlock()
			return false
		}
	}
	defer task.mu.Unlock()

	if s := task.saved; s != nil {
		match := s.matches(notif, task.tid)
		if !w.listener.valid(notif.ID) {
			return false // a stale notification, whose caller is already in its next one
		}
		if match {
			writeMemory(task.tid, s.parts())
			if w.listener.answer(notif.ID, s.rep) {
				g.stats.replayed.Add(1)
				task.lastAnswer.recordSaved(s)
				s.release()
				task.saved = nil
			}
			return false
		}
		s.discard()
		task.saved = nil
	}

	if !task.exact && !task.sharesFiles() {
		// Without PIDFD_THREAD the guard sees the descriptors of the process, which are not those of this thread.
		g.logOnce("files", "refused a call of a thread with a descriptor table of its own; that needs Linux 6.9", "tid", task.tid)
		w.listener.answer(notif.ID, fail(unix.EPERM))
		return false
	}
	fd, err := task.getFile(int(int32(notif.Args[0])))
	if err != nil {
		switch {
		case errors.Is(err, unix.ESRCH):
			g.tasks.dropTask(task)
			return w.listener.valid(notif.ID)
		case errors.Is(err, unix.EBADF):
			w.listener.answer(notif.ID, fail(unix.EBADF))
		default:
			g.logOnce("getfd", "cannot copy a descriptor of the container; is CAP_SYS_PTRACE blocked by a security module?", "err", err)
			w.listener.answer(notif.ID, fail(unix.ENODEV))
		}
		return false
	}
	w.mem.reset()
	c := &w.call
	*c = trappedCall{guard: g, listener: w.listener, start: w.start, notif: notif, task: task, mem: w.mem, fd: fd,
		flight: w.flight, call: rm.Call{Blocks: c.call.Blocks[:0]}, before: c.before[:0]}
	rep := w.handle(c)
	if task.lastAnswer.replayOrForget(c, func() bool { return c.refuses(rep) }, func() bool { return w.listener.valid(notif.ID) }) {
		rep = replyDone
		g.stats.replayed.Add(1)
	}
	w.succeeded, w.inDriver = c.executed && !c.failed(rep), c.inDriver
	w.sendAnswer(c, rep)
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
	}
	if task.proc.gone.Load() { // since the answer: whoever looked then found the file still open, by the guard's own copy
		g.sweepSoon()
	}
	return false
}

// handle decides on a call and carries it out.
func (w *worker) handle(c *trappedCall) reply {
	g, notif := c.guard, c.notif
	g.memoryCalls.left(c)
	cmd := uint32(notif.Args[1])
	var foreign bool
	var err error
	if c.node, foreign, err = g.nodes.classify(c.fd); err != nil {
		return fail(unix.ENODEV)
	}
	switch {
	case foreign:
		g.logOnce("foreign", "a call on the node of a GPU that the container was not given", "tid", notif.PID)
		return fail(unix.ENODEV)
	case c.node.kind == nodeOther:
		return g.onOtherFile(c, cmd)
	case c.isForeign():
		// 32-bit callers of a driver with 64-bit structures do not exist; what comes this way is an attempt.
		g.logOnce("arch", "an NVIDIA call through a foreign system call table", "arch", notif.Arch, "nr", notif.NR)
		return fail(unix.ENOSYS)
	}
	if fromLimiter(cmd) {
		if c.node.kind != nodeUVM {
			return fail(unix.ENOTTY)
		}
		return g.onManaged(c, cmd)
	}
	if c.node.kind == nodeUVM {
		if !rm.UVMShaped(cmd) {
			// What uvm.c would say. Natively another thread could put a nvidiactl file in the descriptor's place meanwhile.
			return fail(unix.EINVAL)
		}
		return g.onUVM(c, cmd)
	}
	if rm.UVMShaped(cmd) {
		return fail(unix.EINVAL) // a bare small number on an RM node: nv.c refuses it, and so do we
	}
	if !c.loadOuter(cmd, notif.Args[2], c.sizeOf(cmd)) {
		return fail(unix.EFAULT)
	}
	if cmd&0xff == rm.EscXferCmd {
		if e := c.unwrap(); e != 0 {
			return fail(e)
		}
	}
	if g.pendingRoots.Load() > 0 {
		if rep, ok := g.awaitPendingRoots(c); !ok {
			return rep
		}
	}
	return g.onEscape(c)
}

// fromLimiter reports that a number is none of the driver's but what the limiter says to the guard.
func fromLimiter(cmd uint32) bool { return cmd == page.ReserveManaged || cmd == page.ReleaseManaged }

func (c *trappedCall) sizeOf(cmd uint32) int { return int(cmd>>16) & 0x3fff }

// isForeign reports a call through a table of system calls that is not the machine's own: i386's, or x32's.
func (c *trappedCall) isForeign() bool {
	return c.notif.Arch != nativeArch || uint32(c.notif.NR)&x32Bit != 0
}

// onOtherFile answers an RM-shaped number on a file that is not NVIDIA's. It must not run natively if RM would act on it:
// another thread could put an nvidiactl file in the descriptor's place meanwhile (docs/adr/0004-fd-table-race.md). The
// numbers listed do no harm there.
func (g *Guard) onOtherFile(c *trappedCall, cmd uint32) reply {
	if !rm.UVMShaped(cmd) {
		switch cmd & 0xff {
		case rm.EscAllocMemory: // by the registers of a foreign call nobody sees that a thread is inside
			if !c.isForeign() && c.valid() && g.memoryCalls.let(c) {
				return replyResume
			}
			return fail(unix.ENOTTY)
		case rm.EscUnmapMemory, rm.EscUpdateMapping, rm.EscCardInfo, rm.EscStatusCode, rm.EscAttachGPUs:
			return replyResume
		}
	}
	g.logOnce("other"+rm.EscapeName(cmd&0xff), "refused an ioctl on another device whose number and size are those of an NVIDIA call",
		"cmd", cmd)
	return fail(unix.ENOTTY)
}

// followFile finds or makes the record of the call's file.
func (c *trappedCall) followFile() (err error) {
	c.file, err = c.guard.followFile(c.fd, c.node)
	if err == nil && c.node.kind == nodeUVM {
		c.file.mu.Lock()
		if !c.file.owners[c.task.proc.tgid] {
			c.file.owners[c.task.proc.tgid] = true
			c.guard.books.note(c.file)
		}
		c.file.mu.Unlock()
	}
	return err
}

// sendAnswer writes the results and sends the answer; a caller that is gone is remembered.
func (w *worker) sendAnswer(c *trappedCall, rep reply) {
	g := w.guard
	if !c.executed {
		var parts []memoryPart
		if !rep.resume && rep.errno == 0 && c.call.Outer != nil {
			parts = c.changedParts(w.parts[:0])
		}
		c.answered(rep, parts)
		if parts != nil {
			if !w.listener.valid(c.notif.ID) {
				return
			}
			if !writeMemory(c.task.tid, parts) {
				rep = fail(unix.EFAULT)
			}
		}
		if through := w.listener.answer(c.notif.ID, rep); c.root != nil {
			g.rootAnswered(c.root, through)
		}
		return
	}
	parts := c.changedParts(w.parts[:0])
	if rep.errno != 0 {
		parts = nil
	}
	c.answered(rep, parts)
	// A call can take long, and the thread's number be another's afterwards.
	if w.listener.valid(c.notif.ID) {
		if !writeMemory(c.task.tid, parts) {
			rep = fail(unix.EFAULT) // as copy_to_user in nvidia_ioctl: the object stays
		}
		if w.listener.answer(c.notif.ID, rep) {
			c.task.lastAnswer.record(c)
			return
		}
	}
	g.stats.interrupted.Add(1)
	if c.statusOnly == 0 { // a UVM mapping is just made again, in place of itself
		g.saveResult(c, rep)
	}
}

// failed reports that a call was refused, by an errno or in its status word.
func (c *trappedCall) failed(rep reply) bool {
	if rep.errno != 0 {
		return true
	}
	return c.statusWord() != rm.StatusOK
}

// unwrap replaces an XFER by the call inside it. The driver compares the inner number as a full word and does not unwrap
// twice (nvidia_ioctl).
func (c *trappedCall) unwrap() unix.Errno {
	nr, size, addr := rm.U32(c.call.Outer, rm.XferCmd), rm.U32(c.call.Outer, rm.XferLength), rm.U64(c.call.Outer, rm.XferPtr)
	if nr > 0xff || nr == rm.EscXferCmd || size == 0 || size >= rm.XferMax {
		return unix.EINVAL
	}
	inner := 3<<30 | size<<16 | 'F'<<8 | nr
	if !c.guard.abi.RMShaped(inner) {
		return unix.EINVAL
	}
	c.mem.reset()
	if !c.loadOuter(inner, addr, int(size)) {
		return unix.EFAULT
	}
	c.wrapped = true
	return 0
}
