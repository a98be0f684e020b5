// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// rootGuard is a guard with a root alloc under way in this process.
func rootGuard(t *testing.T, d *fakeDriver) (*Guard, *file) {
	t.Helper()
	g := newFakeGuard(t, d)
	c := newFakeCall(t, g, fakeControl)
	if rep := c.escape(rm.EscAlloc, rootOuter()); rep != replyResume {
		t.Fatalf("%+v", rep)
	}
	f := c.root
	if f == nil || g.pendingRoots.Load() != 1 || !f.rooted {
		t.Fatal("no root alloc is under way")
	}
	g.rootAnswered(f, true)
	t.Cleanup(func() { f.close(nil) })
	return g, f
}

func rootOuter() []byte {
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocClass, rmclient.ClassClient)
	return o
}

func TestRootAlloc(t *testing.T) {
	var live atomic.Uint32 // the client that RM says the file has
	confirm := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		const own = fakeClient + 2
		if c := rm.U32(call.Outer, 0); call.NR() == rm.EscFree && c != live.Load() && c != own {
			rm.PutU32(call.Outer, rm.FreeStatus, rm.StatusInvalidClient)
		}
		if call.NR() == rm.EscAlloc {
			rm.PutU32(call.Outer, rm.AllocObject, own)
		}
		return 0
	}}
	t.Run("verified", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		live.Store(fakeClient)
		g.resolveRoot(f, f.pending, 0, true)
		if !g.account.ownsClient(fakeClient) || f.clients != 1 || g.pendingRoots.Load() != 0 {
			t.Fatal("the client is not recorded")
		}
		// One live client to a file.
		c := newFakeCall(t, g, fakeControl)
		unix.Close(c.fd)
		c.fd = dupFD(t, 0)
		g.account.freeObject(fakeClient, 0)
		g.account.mu.Lock()
		cl := g.account.clients[fakeClient]
		g.account.mu.Unlock()
		g.clientGone(cl)
		if f.rooted || f.clients != 0 || g.account.ownsClient(fakeClient) {
			t.Error("a freed client bars its file")
		}
		g.clientGone(cl) // twice is once
		if f.clients != 0 {
			t.Error("counted twice")
		}
	})
	t.Run("a handle that RM does not know", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		live.Store(0)
		g.resolveRoot(f, f.pending, 0xc1d00077, true)
		if g.account.ownsClient(0xc1d00077) || g.astrayAt.Load() == 0 {
			t.Error("a client that RM does not confirm is trusted")
		}
	})
	t.Run("named by the next call", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		live.Store(fakeClient)
		g.resolveRoot(f, f.pending, fakeClient, false)
		if !g.account.ownsClient(fakeClient) {
			t.Error("not found")
		}
	})
	t.Run("the caller was gone", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		p := f.pending
		p.since = time.Time{}
		// It runs a signal's handler, while other threads make calls.
		p.task = &task{tid: 1 << 22, proc: p.task.proc}
		if g.resolveRoot(f, p, 0, false) || g.astrayAt.Load() != 0 {
			t.Error("a root alloc that nobody was let make counts against the program")
		}
		g.rootAnswered(f, false)
		if f.rooted || f.pending != nil || g.pendingRoots.Load() != 0 {
			t.Error("a root alloc that did not run bars its file")
		}
		g.resolveRoot(f, p, 0, true) // the timer that is still set
		if g.pendingRoots.Load() != 0 {
			t.Error("settled twice")
		}
	})
	t.Run("barred", func(t *testing.T) {
		for _, bar := range []func(f *file){func(f *file) { f.rooted = true }, func(f *file) { f.registered = true },
			func(f *file) { f.pending = &pendingRoot{} }, func(f *file) { f.clients, f.rooted, f.exporter = 1, true, true }} {
			g := newFakeGuard(t, confirm)
			c := newFakeCall(t, g, fakeControl)
			f, err := g.followFile(c.fd, c.node)
			if err != nil {
				t.Fatal(err)
			}
			bar(f)
			o := rootOuter()
			if rep := c.escape(rm.EscAlloc, o); rep != replyDone || rm.U32(o, 40) != rm.StatusInsufficientResources {
				t.Errorf("%+v %s", rep, rm.StatusName(rm.U32(o, 40)))
			}
			f.pending = nil
		}
	})
	t.Run("a second one", func(t *testing.T) {
		g := newFakeGuard(t, confirm)
		c := newFakeCall(t, g, fakeControl)
		f, err := g.followFile(c.fd, c.node)
		if err != nil {
			t.Fatal(err)
		}
		f.clients, f.rooted = 1, true
		if rep := c.escape(rm.EscAlloc, rootOuter()); rep != replyResume {
			t.Fatalf("%+v", rep)
		}
		if g.rootAnswered(c.root, false); !f.rooted {
			t.Error("the first client is forgotten")
		}
	})
	t.Run("in an XFER, or on a GPU's node", func(t *testing.T) {
		g := newFakeGuard(t, confirm)
		o := rootOuter()
		c := newFakeCall(t, g, "/dev/zero")
		if rep := c.escape(rm.EscAlloc, o); rep.resume {
			t.Error("let through on a GPU's node")
		}
		c = newFakeCall(t, g, fakeControl)
		c.loadOuter(uint32(testCmd(rm.EscAlloc, 48)), 0, 0)
		c.call.Outer, c.wrapped = rootOuter(), true
		if p := g.checkRootAlloc(&c.trappedCall); p.ask {
			t.Error("let through inside an XFER, whose content may change")
		}
	})
	t.Run("too many", func(t *testing.T) {
		g := newFakeGuard(t, confirm)
		g.cfg.Settings.MaxClients = 1
		g.account.addClient(1, 1, nil)
		o := rootOuter()
		if rep := newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o); rep != replyDone || rm.U32(o, 40) != rm.StatusInsufficientResources {
			t.Errorf("%+v", rep)
		}
	})
}

// TestOpenedHere: the container's /dev is known also when the first process has no first thread any more, and when it has ended.
func TestOpenedHere(t *testing.T) {
	testenv.NeedsRoot(t, "chroot")
	root := t.TempDir()
	node := filepath.Join(root, "dev", "nvidiactl")
	if err := os.Mkdir(filepath.Dir(node), 0o755); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(node)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	inRoot := func() *child {
		c := startPlain(t, func(c *exec.Cmd) { c.Env = append(c.Env, "CGPU_TEST_ROOT="+root) })
		c.do("chroot")
		return c
	}
	c := inRoot()
	start, err := ledger.ProcStart(c.pid())
	if err != nil {
		t.Fatal(err)
	}
	g := newFakeGuard(t, answering(0, nil))
	g.initPID, g.initStart, g.devFirst = c.pid(), start, deviceOfDev(c.pid())
	for _, end := range []func(){c.headless, c.kill} {
		end()
		g.devDevice = 0
		if !g.openedHere(int(file.Fd())) {
			t.Errorf("its file counts as another's (%d, first %d)", g.devDevice, g.devFirst)
		}
	}
	g.initPID, g.initStart, g.devFirst, g.devDevice = inRoot().pid(), 1, 0, 0 // another process has its number
	if g.openedHere(int(file.Fd())) || g.devDevice != 0 {
		t.Error("the /dev of a process that is not the container's counts")
	}
}

// TestForeignRoot: a file that was opened on another container's /dev may have a client that this guard does not know.
func TestForeignRoot(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	g.devDevice++
	c := newFakeCall(t, g, fakeControl)
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocClass, rmclient.ClassClient)
	if rep := c.escape(rm.EscAlloc, o); rep.resume || rm.U32(o, 40) != rm.StatusInsufficientPermissions {
		t.Errorf("%+v, %s", rep, rm.StatusName(rm.U32(o, 40)))
	}
}
