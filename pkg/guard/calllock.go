// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"
)

// callLock holds the calls of one or two clients.
type callLock [2]*client

// lockCalls keeps other calls away from the objects of two clients, which may be the same. False: one of them is gone.
func (a *account) lockCalls(x, y uint32) (callLock, bool) {
	x, y = min(x, y), max(x, y) // always in the same order
	a.mu.Lock()
	l := callLock{a.clients[x], a.clients[y]}
	a.mu.Unlock()
	if l[0] == nil || l[1] == nil {
		return callLock{}, false
	}
	l[0].calls.Lock()
	if l[1] != l[0] {
		l[1].calls.Lock()
	}
	a.mu.Lock()
	same := a.clients[x] == l[0] && a.clients[y] == l[1]
	a.mu.Unlock()
	if !same {
		l.unlock()
		return callLock{}, false
	}
	return l, true
}

// of is the one of the two with a handle.
func (l callLock) of(handle uint32) *client {
	if l[0].handle == handle {
		return l[0]
	}
	return l[1]
}

func (l callLock) unlock() {
	if l[1] != l[0] {
		l[1].calls.Unlock()
	}
	l[0].calls.Unlock()
}

// lockCallsSoon keeps the program from freeing the client's objects until unlock: a control of what is gone leaves a line in the kernel
// log. A call that takes long is not waited for, or a program could keep its timeslice by such calls.
func (c *client) lockCallsSoon() (unlock func()) {
	if c.tryLockCalls() {
		return c.calls.Unlock
	}
	return func() {}
}

// tryLockCalls locks a client's calls if they take no longer than about a millisecond.
func (c *client) tryLockCalls() bool {
	for range 20 {
		if c.calls.TryLock() {
			return true
		}
		time.Sleep(50 * time.Microsecond)
	}
	return false
}
