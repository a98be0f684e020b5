// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// holding has the driver count more device memory for each process than was allocated for it, and counts how often it was asked.
func (d *fakeRM) holding(g *Guard, more *atomic.Int64) (asked *atomic.Int64) {
	asked = new(atomic.Int64)
	fake := g.driver.(*fakeDriver)
	plain := fake.answer
	fake.answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo {
			asked.Add(1)
			rm.PutU64(call.Blocks[0].Data, rm.PidInfoList+rm.PidInfoPrivate, uint64(more.Load()))
			return 0
		}
		return plain(t, call)
	}
	return asked
}

// TestRootOfAnother: a client that somebody outside of the container has made on a file that was sent to him is no excuse for a root alloc
// that became an allocation of device memory: the memory is found, and the container's clients go.
func TestRootOfAnother(t *testing.T) {
	for name, held := range map[string]bool{"the thread has left the call": false, "it is held on the way back": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, g := newFakeRM(t)
			var more atomic.Int64
			d.holding(g, &more)
			c := newFakeCall(t, g, fakeControl)
			keep, err := unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 3)
			if err != nil {
				t.Fatal(err)
			}
			theirs := d.made(keep) // by a process without a guard, or by a swapped root alloc of another container's
			if rep := c.escape(rm.EscAlloc, rootOuter()); !rep.resume {
				t.Fatalf("%+v", rep)
			}
			f, p := c.root, c.root.pending
			if held {
				tid, args, end := stuckThread(t)
				defer end()
				p.task, p.args = &task{tid: tid, proc: p.task.proc}, args
			}
			g.rootAnswered(f, true)
			more.Store(int64(64 * quota.MiB)) // here another thread makes it an RM_ALLOC of device memory below another client
			if g.resolveRoot(f, p, theirs, !held); !g.account.ownsClient(theirs) {
				t.Fatal("the other's client does not pass for its own: this test says nothing")
			}
			if !g.looksAtRoots() {
				t.Error("a program that goes on in its place would not look")
			}
			for deadline := time.Now().Add(patience); g.account.ownsClient(theirs); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("what it has made elsewhere was not found")
				}
			}
		})
	}
}

// TestHonestRoots: a program that makes clients all the time costs a look now and then, and no audit.
func TestHonestRoots(t *testing.T) {
	d, g := newFakeRM(t)
	asked := d.holding(g, new(atomic.Int64))
	g.sentFDs.pids = func() []int { return []int{os.Getpid()} }
	begin := time.Now()
	for range 300 {
		f, p := ask(t, g)
		d.made(p.fd)
		if g.resolveRoot(f, p, 0, true); f.clients != 1 {
			t.Fatal("its client was not found")
		}
	}
	for deadline := time.Now().Add(patience); g.looksAtRoots(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it is looked at for ever")
		}
	}
	if most := 1 + int64(time.Since(begin)/settledEvery); asked.Load() == 0 || asked.Load() > most {
		t.Errorf("the driver was asked %d times, want 1 to %d", asked.Load(), most)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.auditing {
		t.Error("an audit")
	}
}

// TestRootRefusedLooks: a call of which the driver makes no client can have become anything too.
func TestRootRefusedLooks(t *testing.T) {
	d, g := newFakeRM(t)
	f, p := ask(t, g)
	d.mu.Lock()
	d.refuse = rm.StatusInsufficientResources
	d.mu.Unlock()
	if !g.resolveRoot(f, p, 0, true) || g.astrayAt.Load() != 0 {
		t.Fatal("it is not settled")
	}
	if !g.looksAtRoots() {
		t.Error("nobody looks what it has made")
	}
}

// TestGoneHidesNothing: what a client holds whose process has ended, its file being a child's, the driver does not tell. So it is no room
// for what was never charged.
func TestGoneHidesNothing(t *testing.T) {
	const length = 64 * quota.MiB
	d, g := newFakeRM(t)
	var more atomic.Int64
	d.holding(g, &more)
	newFakeCall(t, g, fakeControl) // this process lives
	g.sentFDs.pids = func() []int { return []int{os.Getpid()} }
	withClient(g)
	m := memoryObject(fakeMemory+7, fakeDevice)
	m.length = length
	g.account.addObject(fakeClient, m, 0, 0, length)
	own, err := g.guardClient()
	if err != nil {
		t.Fatal(err)
	}
	more.Store(int64(length))
	g.account.clients[fakeClient].tgid = os.Getpid()
	if u, _ := g.holdsUncharged(own); u != (uncharged{}) {
		t.Errorf("%+v: what a living process was charged for counts", u)
	}
	g.account.clients[fakeClient].tgid = 1<<22 + 1 // no process
	if u, _ := g.holdsUncharged(own); u != (uncharged{driver: length}) {
		t.Errorf("%+v: a client without a process hides it", u)
	}
}

// TestUnseenWhileInside: what does not exist may be made at any moment while a thread is in a root alloc, also when the file has a client
// already: somebody outside can have made that.
func TestUnseenWhileInside(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	c := newFakeCall(t, g, fakeControl)
	const gone = 0x5c0000f2
	if c.isUnseen(c.target(), fakeClient, gone) {
		t.Error("the driver refuses what there is not by itself")
	}
	tid, args, end := stuckThread(t)
	p := &pendingRoot{task: &task{tid: tid}, args: args, since: time.Now()}
	g.settledRoots.inside = map[*task]*pendingRoot{p.task: p}
	if !c.isUnseen(c.target(), fakeClient, gone) {
		t.Error("a call may name what the thread makes next")
	}
	end()
	for deadline := time.Now().Add(patience); c.isUnseen(c.target(), fakeClient, gone); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("refused after the thread has left")
		}
	}
}

// TestClosedHidesNothing: what was on a file that is closed the driver has freed. Until the guard notices it were room for what was never
// charged, and it would notice when the look is over.
func TestClosedHidesNothing(t *testing.T) {
	const length = 64 * quota.MiB
	d, g := newFakeRM(t)
	var more atomic.Int64
	d.holding(g, &more)
	g.sentFDs.pids = func() []int { return []int{os.Getpid()} }
	c := newFakeCall(t, g, fakeControl)
	fd, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := g.followFile(fd, c.node)
	if err != nil {
		t.Fatal(err)
	}
	g.account.addClient(fakeClient, os.Getpid(), f)
	g.account.addObject(fakeClient, object{handle: fakeDevice, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	m := memoryObject(fakeMemory, fakeDevice)
	m.length = length
	g.account.addObject(fakeClient, m, 0, 0, length)
	own, err := g.guardClient()
	if err != nil {
		t.Fatal(err)
	}
	more.Store(int64(length))
	if u, _ := g.holdsUncharged(own); u != (uncharged{}) {
		t.Errorf("%+v: what was charged for counts", u)
	}
	g.account.addClient(fakeClient+1, os.Getpid(), nil) // with which it has as much that nobody has seen
	unix.Close(fd)
	if u, _ := g.holdsUncharged(own); u != (uncharged{driver: length}) {
		t.Errorf("%+v: a closed file hides it", u)
	}
}

// TestComesAndGoes: who allocates and frees all the time is not cleared by a look in which both accounts agree.
func TestComesAndGoes(t *testing.T) {
	const length = 64 * quota.MiB
	d, g := newFakeRM(t)
	g.sentFDs.pids = func() []int { return []int{os.Getpid()} }
	newFakeCall(t, g, fakeControl)
	withClient(g)
	m := memoryObject(fakeMemory+7, fakeDevice)
	m.length = length
	var more atomic.Int64
	d.holding(g, &more)
	fake := g.driver.(*fakeDriver)
	plain := fake.answer
	fake.answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo { // it is freed just now
			g.account.freeObject(fakeClient, m.handle)
			e := plain(t, call)
			g.account.addObject(fakeClient, m, 0, 0, length)
			return e
		}
		return plain(t, call)
	}
	g.account.addObject(fakeClient, m, 0, 0, length)
	more.Store(int64(length)) // as much that was never charged
	g.lookAtSettledRoots()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.auditing {
		t.Error("nobody looks any longer")
	}
}
