// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// memoryCalls are the RM_ALLOC_MEMORY that tasks were let make, until their threads are known to have left them. The driver makes the
// object in such a call, maps it, and frees it if it cannot map it: three steps, each by the object's handle (_rmAllocMemorySystem). Where
// a call through the guard frees the object in between, the next step is about what is made under that handle then. So nothing is until no
// thread is inside (freedNames).
type memoryCalls struct {
	n       atomic.Int32
	awaited atomic.Int32 // calls that wait until no thread is inside
	looking sync.Mutex   // held while /proc is looked at, which takes time: others' calls need mu
	mu      sync.Mutex
	inside  map[int]*memoryCall // by thread, which makes one at a time
	number  int64               // of the last one
	quietAt atomic.Int64        // which was the last one when no thread was inside
}

type memoryCall struct {
	args  [3]uint64
	began *cpuTime
}

const (
	// maxMemoryCalls bounds them. Nobody honest has as many threads in that call at once.
	maxMemoryCalls = 4096
	// memoryLooks is how many threads are looked for at once.
	memoryLooks = 64
	// memoryPatience is for how long a call waits until they are over.
	memoryPatience = 10 * time.Second
)

// let notes that a thread is let make one. False: there are too many.
func (m *memoryCalls) let(c *trappedCall) bool {
	m.mu.Lock()
	full := len(m.inside) >= maxMemoryCalls
	m.mu.Unlock()
	if full {
		m.look()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.inside) >= maxMemoryCalls {
		return false
	}
	if m.inside == nil {
		m.inside = map[int]*memoryCall{}
	}
	m.number++
	m.inside[c.task.tid] = &memoryCall{args: [3]uint64(c.notif.Args[:3])}
	m.n.Store(int32(len(m.inside)))
	return true
}

// left is told that a thread makes a call: it has left the one before. If the call is no more, the thread may be in one after it.
func (m *memoryCalls) left(c *trappedCall) {
	if m.n.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inside[c.task.tid] != nil && c.valid() {
		m.forget(c.task.tid)
	}
}

// forget is for who holds mu.
func (m *memoryCalls) forget(tid int) {
	if delete(m.inside, tid); len(m.inside) == 0 {
		m.quietAt.Store(m.number)
	}
	m.n.Store(int32(len(m.inside)))
}

// look forgets threads that have left.
func (m *memoryCalls) look() {
	m.looking.Lock()
	defer m.looking.Unlock()
	m.mu.Lock()
	some := make(map[int]*memoryCall, memoryLooks)
	for tid, x := range m.inside {
		if some[tid] = x; len(some) == memoryLooks {
			break
		}
	}
	m.mu.Unlock()
	for tid, x := range some {
		if !isLeaving(tid) && threadIn(tid, x.args, &x.began, cpuTime.leftMemoryCall) != threadOutside {
			continue
		}
		m.mu.Lock()
		if m.inside[tid] == x {
			m.forget(tid)
		}
		m.mu.Unlock()
	}
}

// quietSince reports that at a moment since call n no thread was inside. That those up to n are over would not do: what one of them frees
// by its handle may be what a later one has made.
func (m *memoryCalls) quietSince(n int64) bool {
	if m.quietAt.Load() < n {
		m.look()
	}
	return m.quietAt.Load() >= n
}

// last is the number of the last one.
func (m *memoryCalls) last() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.number
}

// await polls until something is so. False: it is not, until then, or the caller is away, or a hand-over begins.
func (c *trappedCall) await(until time.Time, is func() bool) bool {
	for pause := 50 * time.Microsecond; !is(); pause = min(2*pause, 4*time.Millisecond) {
		if !c.valid() || c.isHalted() || time.Now().After(until) {
			return false
		}
		time.Sleep(pause)
	}
	return true
}

// isHalted reports that no calls are taken up: what waits only holds up who has halted them.
func (c *trappedCall) isHalted() bool { return c.listener != nil && c.listener.halted.Load() }

// giveWay has one wait for those who wait until no thread is inside, or many threads would keep them waiting by turns.
func (m *memoryCalls) giveWay(c *trappedCall) {
	g := c.guard
	if m.awaited.Load() == 0 {
		return
	}
	defer g.waiters.Add(-1)
	if g.waiters.Add(1) <= maxWaiters {
		c.await(time.Now().Add(g.memoryPatience), func() bool { return m.awaited.Load() == 0 })
	}
}

// freedNames are the handles of a client that were freed while threads were in RM_ALLOC_MEMORY, with the last such call then.
type freedNames struct {
	names map[uint32]int64
	all   int64
}

// maxFreedNames bounds them; beyond, all handles of the client are among them.
const maxFreedNames = 64

// noteFreed is told that a call has freed an object. What the guard has made no such call is about. What a task may have made is below a
// device, and of what ends with an object that is not known nothing is known. The caller holds the client's calls.
func (g *Guard) noteFreed(client, handle uint32) {
	m, c := &g.memoryCalls, g.account.client(client)
	o, known := g.account.lookup(client, handle)
	if m.n.Load() == 0 || c == nil || known && o.isThere() && o.kind != rm.ClassDevice {
		return
	}
	n := m.last()
	if m.quietSince(n) {
		return
	}
	f := &c.freed
	maps.DeleteFunc(f.names, func(_ uint32, at int64) bool { return at <= m.quietAt.Load() })
	switch {
	case !known || o.kind == rm.ClassDevice || len(f.names) >= maxFreedNames:
		f.all = n
	case f.names == nil:
		f.names = map[uint32]int64{handle: n}
	default:
		f.names[handle] = n
	}
}

// until is the call since which there must have been a quiet moment before something is made under some handles; 0: none. The driver's
// choice (0) may be any, since it counts up (clientGenResourceHandle_IMPL), so that others can have it before.
func (f *freedNames) until(handles []uint32) (n int64) {
	if len(handles) > 0 {
		n = f.all
	}
	for name, at := range f.names {
		if slices.Contains(handles, name) || slices.Contains(handles, 0) {
			n = max(n, at)
		}
	}
	return n
}

// lock locks the calls of the clients that the call names, once it may make objects in the first under the handles that it names. It holds
// none while it waits: a thread in RM_ALLOC_MEMORY may wait for a page that another thread of its program brings, by such calls.
func (c *trappedCall) lock(dst, src uint32) (reply, bool) {
	for until := time.Now().Add(c.guard.memoryPatience); ; {
		lock, ok := c.guard.account.lockCalls(dst, src)
		if !ok {
			return c.status(rm.StatusInvalidClient), false
		}
		n := c.madeNotBefore(lock.of(dst))
		if n == 0 {
			c.locked = lock
			return reply{}, true
		}
		lock.unlock()
		if rep, ok := c.awaitQuiet(n, until); !ok {
			return rep, false
		}
	}
}

// madeNotBefore is the call since which there must have been a quiet moment; 0: it may be made.
func (c *trappedCall) madeNotBefore(in *client) int64 {
	f := &in.freed
	if f.all == 0 && len(f.names) == 0 {
		return 0
	}
	if n := f.until(c.newHandles()); n > c.guard.memoryCalls.quietAt.Load() {
		return n
	}
	return 0
}

func (c *trappedCall) awaitQuiet(n int64, until time.Time) (reply, bool) {
	g, m := c.guard, &c.guard.memoryCalls
	defer g.waiters.Add(-1)
	if g.waiters.Add(1) > maxWaiters {
		return fail(syscall.EINTR), false // it comes again
	}
	m.awaited.Add(1)
	defer m.awaited.Add(-1)
	switch {
	case c.await(until, func() bool { return m.quietSince(n) }):
		return reply{}, true
	case !c.valid():
		return replyDone, false
	case c.isHalted():
		return fail(syscall.EINTR), false
	}
	// Not NV_ERR_INSERT_DUPLICATE_NAME: there is no such object.
	return c.deny(rm.StatusBusyRetry, "freedname", "denied an object under a handle that was freed while another thread was in "+
		"RM_ALLOC_MEMORY, and still is: the driver may take the one for the other; let that call end first",
		"call", rm.EscapeName(c.call.NR())), false
}

// newHandles are the handles by which a call makes objects. 0: the driver chooses.
func (c *trappedCall) newHandles() (list []uint32) {
	if _, h, ok := madeBy(&c.call); ok {
		return []uint32{h}
	}
	switch c.call.NR() {
	case rm.EscAllocMemory:
		list = []uint32{rm.U32(c.call.Outer, rm.AllocMemoryObject)}
	case rm.EscControl:
		switch c.control.Kind {
		case rm.ControlImportFD:
			list = []uint32{rm.U32(c.params, rm.ImportFDObject+rm.ExportObjectHandle)}
		case rm.ControlImportFDs:
			for i := range min(int(rm.U16(c.params, importObjectsCount)), importObjectsMax) {
				list = append(list, rm.U32(c.params, importObjectsList+4*i))
			}
		}
	}
	return list
}
