// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

const heldHandle = 0x5d000001

// hostAgrees waits until the guard and the driver count the same of host memory, and that is want.
func (r *rig) hostAgrees(want quota.Bytes) {
	r.t.Helper()
	var guard, driver quota.Bytes
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r.guard.sweep()
		r.guard.account.mu.Lock()
		guard = r.guard.account.hostUsed
		r.guard.account.mu.Unlock()
		if driver = r.sim.Snapshot().Host; guard == want && driver == want {
			r.survives()
			return
		}
	}
	r.t.Fatalf("the guard counts %v of host memory, the driver %v: want %v", guard, driver, want)
}

// newHostRig is one whose container may have 64 MiB of host memory.
func newHostRig(t *testing.T) *rig {
	r := newRig(t)
	r.guard.cfg.Settings.MaxHostMemory.Bytes = 64 * quota.MiB
	return r
}

// TestHostMemoryOutlivesHandle: host memory that RM_ALLOC_MEMORY has mapped is charged for as long as the file is there, whatever ended its
// handle, and comes back with it.
func TestHostMemoryOutlivesHandle(t *testing.T) {
	for _, end := range []string{"free", "freeclient", "close"} {
		t.Run(end, func(t *testing.T) {
			r := newHostRig(t)
			c := r.start()
			a, other := c.do("open")[0], c.do("open")[0]
			fd := c.do("hostmap", a, 48*mib, heldHandle)[0]
			r.hostAgrees(48 * quota.MiB)
			if end == "free" {
				c.do("free", a, heldHandle)
			} else {
				c.do(end, a)
			}
			for range 3 {
				r.hostAgrees(48 * quota.MiB)
			}
			c.refused("NV_ERR_NO_MEMORY", "hostmap", other, 32*mib, heldHandle)
			c.do("closefd", fd)
			second := c.do("hostmap", other, 64*mib, heldHandle)[0] // nobody was told that it is closed
			c.do("closefd", second)
			r.hostAgrees(64 * quota.MiB)
			c.do("free", other, heldHandle)
			r.hostAgrees(0)
			c.kill()
			r.empty()
		})
	}
}

// TestHostMemoryAgainAndAgain: who frees what he has mapped, again and again, has no more than the bound. Who closes the files has no
// limit.
func TestHostMemoryAgainAndAgain(t *testing.T) {
	r := newHostRig(t)
	c := r.start()
	a := c.do("open")[0]
	for i := range 32 {
		fd := c.do("hostmap", a, 16*mib, heldHandle+i)[0]
		if i%2 == 0 {
			c.do("closefd", fd)
			c.do("free", a, heldHandle+i)
		} else {
			c.do("free", a, heldHandle+i)
			c.do("closefd", fd)
		}
	}
	r.hostAgrees(0)
	for i := range 4 {
		c.do("hostmap", a, 16*mib, heldHandle+i)
		c.do("free", a, heldHandle+i)
	}
	c.refused("NV_ERR_NO_MEMORY", "hostmap", a, 4096, heldHandle)
	r.hostAgrees(64 * quota.MiB)
	c.kill()
	r.empty()
}

// TestHostMemoryMappedTwice: a call that comes again has its window already; with another file it has one more, since nobody knows which of
// the calls is carried out. A file has room for one mapping, and one that is no nvidiactl file for none.
func TestHostMemoryMappedTwice(t *testing.T) {
	r := newHostRig(t)
	c := r.start()
	a := c.do("open")[0]
	windows := func() int {
		r.guard.account.mu.Lock()
		defer r.guard.account.mu.Unlock()
		return r.guard.account.windows
	}
	fd := c.do("hostmap", a, 16*mib, heldHandle)[0]
	for range 3 {
		c.refused("NV_ERR_INSERT_DUPLICATE_NAME", "hostmapon", a, 16*mib, heldHandle, fd)
	}
	if n := windows(); n != 1 {
		t.Errorf("%d windows: want the one of the call that came again", n)
	}
	c.refused("NV_ERR_INSERT_DUPLICATE_NAME", "hostmap", a, 16*mib, heldHandle)
	if n := windows(); n != 2 {
		t.Errorf("%d windows, on two files", n)
	}
	c.do("hostmapon", a, 16*mib, heldHandle+1, -1)
	c.do("hostmapon", a, 16*mib, heldHandle+2, 0)
	if n := windows(); n != 2 {
		t.Errorf("%d windows, two on no file", n-2)
	}
	for i := range 3 {
		c.do("free", a, heldHandle+i)
	}
	r.hostAgrees(16 * quota.MiB)
	c.kill()
	r.empty()
}

// TestHostMemoryNotUnmapped: a mapping that the task has made has no address by which it could be ended.
func TestHostMemoryNotUnmapped(t *testing.T) {
	r := newHostRig(t)
	c := r.start()
	a := c.do("open")[0]
	c.do("hostmap", a, 16*mib, heldHandle)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "unwindow", a, heldHandle, 0)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "movewindow", a, heldHandle, 0, 1<<40)
	c.do("free", a, heldHandle)
	r.hostAgrees(16 * quota.MiB)
}

// TestHostMemoryHandedOver: the next guard goes on to follow the files, also where the one before has no RM client of its own, by the state
// that is handed over or by the books.
func TestHostMemoryHandedOver(t *testing.T) {
	r := newHostRig(t)
	c := r.start()
	a := c.do("open")[0]
	freed := c.do("hostmap", a, 16*mib, heldHandle)[0]
	c.do("free", a, heldHandle)
	held := c.do("hostmap", a, 32*mib, heldHandle+1)[0]
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	r.hostAgrees(48 * quota.MiB)
	c.refused("NV_ERR_NO_MEMORY", "hostmap", a, 17*mib, heldHandle+2)
	c.do("closefd", freed)
	r.hostAgrees(32 * quota.MiB)
	r.guard.sweepMu.Lock() // nobody changes anything when books are begun
	books := r.keepBooks(1)
	r.guard.sweepMu.Unlock()
	if err := books.compare(); err != nil {
		t.Error(err)
	}
	c.do("free", a, heldHandle+1)
	if err := books.compare(); err != nil {
		t.Error(err)
	}
	r.hostAgrees(32 * quota.MiB)
	c.do("closefd", held)
	r.hostAgrees(0)
	c.kill()
	r.empty()
}

// TestTooManyMappings: the guard has a descriptor for each, and no more than it may. What is refused leaves nothing behind.
func TestTooManyMappings(t *testing.T) {
	r := newHostRig(t)
	c := r.start()
	a := c.do("open")[0]
	windows := func(by int) int {
		r.guard.account.mu.Lock()
		defer r.guard.account.mu.Unlock()
		r.guard.account.windows += by
		return r.guard.account.windows
	}
	windows(maxWindows)
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "hostmap", a, mib, heldHandle)
	windows(-maxWindows)
	c.refused("NV_ERR_NO_MEMORY", "hostmap", a, 65*mib, heldHandle)
	if n := windows(0); n != 0 {
		t.Errorf("%d windows are left of what was refused", n)
	}
	c.do("hostmap", a, mib, heldHandle)
	for range maxReferences - 1 { // the handle is one
		c.refused("NV_ERR_INSERT_DUPLICATE_NAME", "hostmap", a, mib, heldHandle)
	}
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "hostmap", a, mib, heldHandle)
	c.kill()
	r.empty()
}
