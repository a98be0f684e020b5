// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync"
	"sync/atomic"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// memoryCalls are the RM_ALLOC_MEMORY that tasks were let make, until their threads are known to have left them. The driver itself frees
// what such a call has made, if it cannot map that (_rmAllocMemorySystem), by a handle that may be another object's by then: where a call
// through the guard has freed the first one meanwhile. So what is made under such circumstances is not believed to be there (doubtful).
type memoryCalls struct {
	n      atomic.Int32
	mu     sync.Mutex
	inside map[int]*memoryCall // by thread, which makes one at a time
	number int64               // of the last one
}

type memoryCall struct {
	args   [3]uint64
	began  *cpuTime
	number int64
}

// maxMemoryCalls bounds them. Nobody honest has as many threads in that call at once.
const maxMemoryCalls = 4096

// let notes that a thread is let make one. False: there are too many.
func (m *memoryCalls) let(c *trappedCall) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.inside) >= maxMemoryCalls {
		for tid, x := range m.inside {
			m.forgetOver(tid, x)
		}
		if len(m.inside) >= maxMemoryCalls {
			return false
		}
	}
	if m.inside == nil {
		m.inside = map[int]*memoryCall{}
	}
	m.number++
	m.inside[c.task.tid] = &memoryCall{args: [3]uint64(c.notif.Args[:3]), number: m.number}
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
		delete(m.inside, c.task.tid)
		m.n.Store(int32(len(m.inside)))
	}
}

func (m *memoryCalls) forgetOver(tid int, x *memoryCall) (over bool) {
	if over = threadIn(tid, x.args, &x.began, cpuTime.leftCall) == threadOutside; over {
		delete(m.inside, tid)
		m.n.Store(int32(len(m.inside)))
	}
	return over
}

// quiet reports that no thread is in one, and the number of the last.
func (m *memoryCalls) quiet() (quiet bool, last int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for tid, x := range m.inside {
		if !m.forgetOver(tid, x) {
			return false, m.number
		}
	}
	return true, m.number
}

// last is the number of the last one.
func (m *memoryCalls) last() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.number
}

// over reports that no thread is in one of those up to a number any more.
func (m *memoryCalls) over(number int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for tid, x := range m.inside {
		if x.number <= number && !m.forgetOver(tid, x) {
			return false
		}
	}
	return true
}

// doubtNames is told that a call frees an object. If a task may have made that, or what is below it, while such calls are under way, they
// may free by its handle what is made next: what is, before they are over, is doubtful. The caller holds the client's calls.
func (g *Guard) doubtNames(client, handle uint32) {
	c := g.account.client(client)
	o, known := g.account.lookup(client, handle)
	if c == nil || known && o.isThere() && o.kind != rm.ClassDevice {
		return
	}
	if quiet, last := g.memoryCalls.quiet(); !quiet {
		c.doubts.Store(last)
	}
}

// settleDoubts is for clients whose calls are locked, before they make anything.
func (g *Guard) settleDoubts(clients callLock) {
	for _, c := range clients {
		if n := c.doubts.Load(); n != 0 && g.memoryCalls.over(n) {
			c.doubts.Store(0)
		}
	}
}

// believe ends the doubt about an object that was there when no thread was in such a call: one that was let through since cannot have made
// it, and so does not free it.
func (g *Guard) believe(client, handle uint32, since int64) {
	a := g.account
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if o := c.object(handle); o != nil && c.doubts.Load() == 0 && g.memoryCalls.last() == since {
		o.doubtful = false
		a.books.note(o)
	}
}

// isStill reports that what the driver says of a doubtful object is what the account has of it. The driver may call memory by another
// class than the guard, which spills it and imports it, and an event by that of another event.
func (g *Guard) isStill(t Target, client uint32, o object, class uint32) bool {
	if form, ok := g.abi.Class(class); class != o.class {
		switch {
		case !ok:
			return false
		case o.isMemory() || o.class == 0:
			if form.Kind != rm.ClassVidmem && form.Kind != rm.ClassSysmem && form.Kind != rm.ClassInTask {
				return false
			}
		case o.kind != rm.ClassEvent || form.Kind != rm.ClassEvent:
			return false
		}
	}
	parent, s, e := g.handleInfo(t, client, o.handle, handleInfoParent)
	return e == 0 && s == rm.StatusOK && parent == o.parent
}
