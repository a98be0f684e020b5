package guard

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The root alloc makes an RM client. RM keeps the caller's process in the client and later compares it (mmap, dup), so
// this is the one allocation that must run in the task, with memory and a descriptor that other threads can swap under
// the kernel's hands. Two rules keep that from being a way around the limit (rm-abi 4.3, docs/adr/0004-fd-table-race.md):
//
//   - It may run only on a file without a live client, and nothing else runs on that file meanwhile. Swapped into another
//     allocation it then finds no client to make it under. Nsight Compute makes many clients on one file; where the node allows
//     profilers, the second rule has to do.
//   - Afterwards the guard asks RM whether the file has the client that the task says it got. If not, the call went
//     elsewhere: the guard compares the driver's own account of the container with its own and, if memory is held that
//     was never charged, frees all the container's clients (audit.go).

// pendingRoot is a root alloc under way in the task.
type pendingRoot struct {
	k     *task
	id    uint64 // of the notification
	fd    int    // the guard's copy of the file
	addr  uint64
	size  int
	since time.Time
}

// onRootAlloc lets the task make a client.
func (g *Guard) onRootAlloc(c *trappedCall) reply {
	if !g.driver.Native() {
		return g.rootAllocHere(c)
	}
	if c.wrapped || c.node.kind != nodeControl {
		return c.status(rm.StatusInvalidArgument)
	}
	if !g.openedHere(c.fd) {
		g.logOnce("rootelsewhere", "denied an RM client on a file that was not opened in this container's /dev")
		g.stats.denied.Add(1)
		return c.status(rm.StatusInsufficientPermissions)
	}
	if !g.roomForClient() {
		return c.status(rm.StatusInsufficientResources)
	}
	f, err := g.followFile(c.fd, c.node)
	if err != nil {
		g.log.Error("cannot follow a file", "err", err)
		return c.status(rm.StatusInsufficientResources)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rooted && !g.cfg.Settings.Profiling || f.registered || f.pending != nil {
		g.logOnce("root", "denied a second RM client on one file; Nsight Compute needs that, and profiling = true in cgpu.toml allows it")
		g.stats.denied.Add(1)
		return c.status(rm.StatusInsufficientResources)
	}
	f.pending = &pendingRoot{k: c.k, id: c.n.ID, fd: c.fd, addr: c.outerAddr, size: len(c.call.Outer), since: time.Now()}
	f.rooted = true
	c.fd = -1 // kept until the outcome is known
	c.root = f
	g.pendingRoots.Add(1)
	// Most programs make their next call at once, from the same thread, and that settles it. This is for the others.
	time.AfterFunc(rootPatience, func() { g.settleLater(f) })
	return replyResume
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
	g.logOnce("maxclients", "denied an RM client: the container has too many; max_clients in cgpu.toml is the bound", "max", g.cfg.Settings.MaxClients)
	g.stats.denied.Add(1)
	return false
}

// cancelRoot forgets a root alloc whose caller was gone before it could be let through: it did not happen, and comes again.
func (g *Guard) cancelRoot(f *file, id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := f.pending; p != nil && p.id == id {
		f.pending, f.rooted = nil, f.clients > 0 || f.unknown != 0
		g.pendingRoots.Add(-1)
		_ = unix.Close(p.fd)
	}
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
	}
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Dev == g.devDevice
}

// deviceOfDev tells the file system of a process' /dev, which each container has one of its own for; 0: it has no nvidiactl.
func deviceOfDev(pid int) uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/"+strconv.Itoa(living(pid))+"/root/dev/nvidiactl", &st) != nil {
		return 0
	}
	return st.Dev
}

// rootPatience is when the guard looks by itself what became of a root alloc.
const rootPatience = 2 * time.Millisecond

// rootAllocHere makes a client on the simulated driver, which is told for which process.
func (g *Guard) rootAllocHere(c *trappedCall) reply {
	if c.node.kind != nodeControl {
		return c.status(rm.StatusInvalidArgument)
	}
	if !g.roomForClient() {
		return c.status(rm.StatusInsufficientResources)
	}
	if _, ok := c.loadBlock(-1, rm.AllocParams, 4); !ok { // an optional handle
		return fail(unix.EFAULT)
	}
	c.file.mu.Lock()
	defer c.file.mu.Unlock()
	if c.file.rooted || c.file.registered {
		g.stats.denied.Add(1)
		return c.status(rm.StatusInsufficientResources)
	}
	if !c.valid() {
		return replyDone
	}
	status, e := c.execStatus()
	if e != 0 || status != rm.StatusOK {
		return fail(e)
	}
	handle := rm.U32(c.call.Outer, rm.AllocObject)
	c.file.rooted = true
	c.file.clients++
	made := g.account.addClient(handle, c.k.proc.tgid, c.file)
	g.clientMade()
	t := c.target() // now: c serves other calls by the time of an undo
	c.undo = func() {
		if s, e := g.free(t, handle, handle); e == 0 && s == rm.StatusOK {
			g.clientGone(made)
		}
	}
	return replyDone
}

// holdBack settles root allocs that may still be under way before another call is served. It returns false, with the
// answer to give, if one on the same file does not end.
func (g *Guard) holdBack(c *trappedCall) (reply, bool) {
	for _, f := range g.files.snapshot() {
		f.mu.Lock()
		p := f.pending
		f.mu.Unlock()
		if p == nil {
			continue
		}
		// The client that this call names is the likely one, if it is on the same file: every escape that names a client
		// has it first.
		candidate := uint32(0)
		same := kcmpSame(g.files.self, c.fd, p.fd)
		if same {
			candidate = rm.U32(c.call.Outer, 0)
		}
		// A thread that makes another call has left the earlier one.
		if p.k == c.k || g.leftCall(p) {
			g.settleRoot(f, candidate, false)
			continue
		}
		if same {
			for deadline := time.Now().Add(time.Second); !g.leftCall(p); time.Sleep(50 * time.Microsecond) {
				if time.Now().After(deadline) {
					return fail(unix.EBUSY), false
				}
			}
			g.settleRoot(f, candidate, false)
		}
	}
	return replyDone, true
}

// leftCall reports that a thread is no longer inside the ioctl that it was allowed to make.
func (g *Guard) leftCall(p *pendingRoot) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.k.tid) + "/syscall")
	switch {
	case errors.Is(err, fs.ErrPermission):
		// Another user's thread: the file is its owner's alone. An RM call of this kind takes some microseconds.
		return time.Since(p.since) > 20*time.Millisecond
	case err != nil:
		return true // the thread is gone
	}
	// "running", or the number and the arguments: "16 0x3 0xc030462b 0x7ffd…".
	if bytes.HasPrefix(b, []byte("running")) {
		// It may be on its way in or out. A thread that waits for RM's locks sleeps, so one that runs for this long is out.
		return time.Since(p.since) > 20*time.Millisecond
	}
	return !bytes.HasPrefix(b, fmt.Appendf(nil, "%d ", unix.SYS_IOCTL)) || !bytes.Contains(b, fmt.Appendf(nil, " %#x ", p.addr))
}

func (g *Guard) settleLater(f *file) { g.onBill(func() { g.settleRoot(f, 0, true) }) }

// settleRoot finds out what became of a root alloc. candidate is a client handle that a later call named, 0 if there was
// none. later: called from a timer, so the thread may still be inside.
func (g *Guard) settleRoot(f *file, candidate uint32, later bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pending
	if p == nil {
		return
	}
	if later && !g.leftCall(p) && time.Since(p.since) < time.Minute {
		time.AfterFunc(min(time.Second, 2*time.Since(p.since)), func() { g.settleLater(f) })
		return
	}
	f.pending = nil
	g.pendingRoots.Add(-1)
	defer unix.Close(p.fd)

	t := Target{FD: p.fd, PID: p.k.proc.tgid, TID: p.k.tid}
	if candidate != 0 && g.clientLives(t, candidate) {
		g.clientFound(f, candidate, p.k.proc.tgid)
		return
	}
	// The answer is still in the task's memory, unless the program has used that piece of its stack again.
	outer := make([]byte, p.size)
	if form, ok := g.abi.AllocForm(p.size); ok && readMemory(p.k.tid, p.addr, outer) && rm.U32(outer, form.StatusOff) == rm.StatusOK {
		if h := rm.U32(outer, rm.AllocObject); h != 0 && h != candidate && g.clientLives(t, h) {
			g.clientFound(f, h, p.k.proc.tgid)
			return
		}
	}
	// No client that we can see: its first use will show it, or the call failed, or it went elsewhere. The last is what the
	// audit is for. The file stays barred from another root alloc.
	f.unknown = p.k.proc.tgid
	g.suspect()
}

// clientFound records a client that RM has confirmed. The file is locked.
func (g *Guard) clientFound(f *file, handle uint32, tgid int) {
	f.clients++
	f.unknown = 0
	g.account.addClient(handle, tgid, f)
	g.clientMade()
}

// owns reports that a client that a call is made for is the container's. One that is seen for the first time is confirmed
// with RM, if its file may have a client that the guard does not know.
func (g *Guard) owns(c *trappedCall, handle uint32) bool {
	if g.account.ownsClient(handle) {
		return true
	}
	if !g.driver.Native() || handle == 0 {
		return false
	}
	f := g.files.find(c.fd, c.node.kind)
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unknown == 0 || !g.clientLives(c.target(), handle) {
		return false
	}
	g.clientFound(f, handle, f.unknown)
	return true
}

// clientLives asks RM whether a file owns a client: RM refuses any other (rmclientValidate_IMPL).
func (g *Guard) clientLives(t Target, client uint32) bool {
	var ids [attachedSize]byte
	s, e := g.control(t, client, client, controlGetAttached, ids[:])
	return e == 0 && s == rm.StatusOK
}

// clientGone takes a freed client out of the account; its file may have another one then.
func (g *Guard) clientGone(c *client) {
	if !g.account.removeClient(c) {
		return
	}
	if f := c.file; f != nil {
		f.mu.Lock()
		if f.clients--; f.clients <= 0 {
			f.clients, f.rooted = 0, false
		}
		f.mu.Unlock()
	}
}
