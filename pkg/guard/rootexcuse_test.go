// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// TestRightsAreNoExcuse: a task that asks for rights which nobody like it gets (RS_ACCESS_NICE; rsAccessGrantRights) is refused by the
// driver, and what it makes of the call instead still counts against it.
func TestRightsAreNoExcuse(t *testing.T) {
	d, g := newFakeRM(t)
	plain := g.driver.(*fakeDriver).answer
	g.driver.(*fakeDriver).answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscAlloc && rm.U32(call.Outer, rm.AllocClass) == rmclient.ClassClient {
			for _, b := range call.Blocks {
				if b.Off == rm.AllocRights && len(b.Data) > 0 && rm.U32(b.Data, 0)&(1<<1) != 0 {
					rm.PutU32(call.Outer, 40, rm.StatusInsufficientPermissions)
					return 0
				}
			}
		}
		return plain(t, call)
	}
	c := newFakeCall(t, g, fakeControl)
	f, err := g.followFile(c.fd, c.node)
	if err != nil {
		t.Fatal(err)
	}
	g.account.addClient(d.made(c.fd), os.Getpid(), f)
	f.rooted, f.clients = true, 1
	rights := make([]byte, 4)
	rm.PutU32(rights, 0, 1<<1)
	keep := c.fd
	for i := range 50 {
		o := rootOuter()
		putPointer(o, rm.AllocRights, rights)
		if c.fd, err = unix.FcntlInt(uintptr(keep), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			t.Fatal(err)
		}
		c.root = nil
		rep := c.escape(rm.EscAlloc, o)
		if !rep.resume {
			t.Fatalf("%d: refused: %+v %s", i, rep, rm.StatusName(rm.U32(o, 40)))
		}
		p := f.pending
		g.rootAnswered(f, true)
		// here another thread makes it an RM_ALLOC of 0x40 below the client of this file; the driver says OK to that.
		if g.resolveRoot(f, p, 0, true); g.astrayAt.Load() != 0 {
			return
		}
	}
	t.Error("50 root allocs that went elsewhere, none noticed")
}

// TestErrnoIsNoExcuse: a call of the guard's own that the kernel interrupts, or has no memory for, says nothing of whether the driver would
// have made a client. The guard asks again.
func TestErrnoIsNoExcuse(t *testing.T) {
	d, g := newFakeRM(t)
	f, p := ask(t, g)
	plain := g.driver.(*fakeDriver).answer
	g.driver.(*fakeDriver).answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscAlloc {
			return unix.EINTR
		}
		return plain(t, call)
	}
	if g.resolveRoot(f, p, 0, true) || f.pending == nil {
		t.Error("settled while nobody knows what became of it")
	}
	g.driver.(*fakeDriver).answer = plain
	if !g.resolveRoot(f, p, 0, true) || g.astrayAt.Load() == 0 || len(d.clients) != 1 {
		t.Error("it went elsewhere, and was not noticed")
	}
}

// TestRegisterMeanwhile: a nvidiactl file takes no other file's identity while it has, or is given, a client.
func TestRegisterMeanwhile(t *testing.T) {
	for name, state := range map[string]func(*file){"a client is made": func(f *file) { f.pending = &pendingRoot{} },
		"it has one": func(f *file) { f.rooted, f.clients = true, 1 }} {
		d := &fakeDriver{}
		g := newFakeGuard(t, d)
		r, other := newFakeCall(t, g, fakeControl), newFakeCall(t, g, fakeControl)
		f, err := g.followFile(r.fd, r.node)
		if err != nil {
			t.Fatal(err)
		}
		state(f)
		o := make([]byte, rm.RegisterFDSize)
		rm.PutU32(o, rm.RegisterFDFD, uint32(other.fd))
		if rep := r.escape(rm.EscRegisterFD, o); rep.errno != unix.EINVAL || len(d.calls) != 0 || f.registered {
			t.Errorf("%s: %+v, %d calls", name, rep, len(d.calls))
		}
		f.pending = nil
	}
}
