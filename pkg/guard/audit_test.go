// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestAudit: a process that holds what was never charged loses its clients.
func TestAudit(t *testing.T) {
	const more = 64 * quota.KiB
	for _, x := range []struct {
		name   string
		more   func(look int) quota.Bytes // than was charged
		killed uint64
	}{
		{"as charged", func(int) quota.Bytes { return 0 }, 0},
		{"more", func(int) quota.Bytes { return more }, 1},
		{"more for most of a second, while a call is under way", func(look int) quota.Bytes {
			if look < auditExcess {
				return more
			}
			return 0
		}, 0},
		{"more, and hides it now and then", func(look int) quota.Bytes {
			if look%3 == 0 {
				return 0
			}
			return more
		}, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			looks := 0
			var freed []uint32
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
				switch call.NR() {
				case rm.EscControl:
					if rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo {
						p := call.Blocks[0].Data
						looks++
						rm.PutU64(p, rm.PidInfoList+rm.PidInfoPrivate, uint64(4*quota.MiB+x.more(looks)))
						// 4 MiB have a second handle, and UVM, of which nothing is told, is the owner.
						rm.PutU64(p, rm.PidInfoList+rm.PidInfoSharedDuped, uint64(2*4*quota.MiB))
					}
				case rm.EscFree:
					freed = append(freed, rm.U32(call.Outer, rm.FreeObject))
				}
				return 0
			}}
			g := newFakeGuard(t, d)
			c := newFakeCall(t, g, fakeControl)
			f, err := g.followFile(c.fd, c.node)
			if err != nil {
				t.Fatal(err)
			}
			g.account.addClient(fakeClient, os.Getpid(), f)
			g.account.addObject(fakeClient, object{handle: fakeDevice, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
			for i := range uint32(2) {
				held := memoryObject(fakeMemory+i, fakeDevice)
				held.length = 4 * quota.MiB
				g.account.addObject(fakeClient, held, 0, 0, held.length)
			}
			g.account.dupOf(fakeClient, fakeDevice, fakeMemory+2, fakeClient, fakeMemory)
			f.clients, f.rooted = 1, true
			g.audit()
			if x.killed == 0 && (len(freed) > 0 || !g.account.ownsClient(fakeClient)) {
				t.Errorf("an honest process lost %#x", freed)
			}
			if x.killed > 0 && (!slices.Equal(freed, []uint32{fakeClient}) || g.account.ownsClient(fakeClient)) {
				t.Errorf("the process kept what it holds; freed %#x", freed)
			}
			if n := g.stats.killed.Load(); n != x.killed {
				t.Errorf("%d killed", n)
			}
		})
	}
}

// TestLengths: each handle of device memory counts where the driver counts it.
func TestLengths(t *testing.T) {
	cfg := testConfig("/dev")
	cfg.GPUs = append(cfg.GPUs, cfg.GPUs[0])
	a := newAccount(cfg.GPUs)
	a.addClient(fakeClient, 1, nil)
	for i := range 2 {
		a.addObject(fakeClient, object{handle: fakeDevice + uint32(i)<<8, parent: fakeClient, kind: rm.ClassDevice, gpu: i}, noGPU, 0, 0)
	}
	m := memoryObject(fakeMemory, fakeDevice)
	m.length = 3 * quota.MiB
	a.addObject(fakeClient, m, 0, 0, 4*quota.MiB)
	want := func(want quota.Bytes) {
		t.Helper()
		if got := a.expectedLengths(map[int]bool{1: true}); got[0] != want || got[1] != 0 {
			t.Errorf("%v, want %v of the first GPU", got, want)
		}
	}
	want(3 * quota.MiB)
	ch := a.clients[fakeClient].objects[fakeMemory].charge
	a.addObject(fakeClient, object{handle: 1, parent: fakeDevice, kind: rm.ClassChannel, gpu: noGPU, charge: ch}, noGPU, 0, 0)
	a.dupOf(fakeClient, fakeDevice+1<<8, 2, fakeClient, fakeMemory)
	want(3 * quota.MiB)
	a.dupOf(fakeClient, fakeDevice, 3, fakeClient, fakeMemory)
	want(6 * quota.MiB)
	a.freeObject(fakeClient, fakeMemory)
	want(3 * quota.MiB)
}

// TestAuditMeanwhile: what is freed while the driver is asked is nothing that was never charged.
func TestAuditMeanwhile(t *testing.T) {
	g := withClient(newFakeGuard(t, nil))
	m := memoryObject(fakeMemory+7, fakeDevice)
	m.length = 4 * quota.MiB
	g.account.addObject(fakeClient, m, 0, 0, m.length)
	g.driver = &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo {
			rm.PutU64(call.Blocks[0].Data, rm.PidInfoList+rm.PidInfoPrivate, uint64(g.account.expectedLengths(map[int]bool{os.Getpid(): true})[0]))
			g.account.freeObject(fakeClient, m.handle)
		}
		return 0
	}}
	newFakeCall(t, g, fakeControl)
	a, err := g.guardClient()
	if err != nil {
		t.Fatal(err)
	}
	if u, _ := g.holdsUncharged(a); len(g.tasks.processes()) == 0 || u != (uncharged{}) {
		t.Error("what was freed meanwhile counts")
	}
}

// TestGPUUsers: the driver is asked of processes that can hold device memory, and of no others.
func TestGPUUsers(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	newFakeCall(t, g, fakeControl)
	var named []int
	g.sentFDs.pids = func() []int { return named }
	if n := len(g.gpuUsers()); n != 0 || len(g.tasks.processes()) != 1 {
		t.Errorf("%d of no use are asked for", n)
	}
	named = []int{1, os.Getpid(), os.Getpid()}
	if n := len(g.gpuUsers()); n != 1 {
		t.Errorf("%d, want the one that the driver names and whose clients are not known", n)
	}
	named = nil
	if n := len(withClient(g).gpuUsers()); n != 1 {
		t.Errorf("%d, want the one that has a client", n)
	}
}

// TestAuditHidden: the guard waits for a client that it has to free and whose file is only in a socket.
func TestAuditHidden(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	fd, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := g.followFile(fd, node{nodeControl, 0})
	if err != nil {
		t.Fatal(err)
	}
	g.account.addClient(fakeClient, 1<<30, f) // whose process is gone
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(fd)
	g.auditSuspects = suspects
	if g.audit(); !g.account.ownsClient(fakeClient) || time.Until(g.auditUntil) < auditTime/2 {
		t.Errorf("the audit ends in %v", time.Until(g.auditUntil))
	}
}

// TestDaemonKeepsClients: a daemon that has used NVML before it forked has clients of a process that has ended. That accounts cannot be
// compared in a quiet moment, as others of its container allocate all the time, is no reason to free them. That a root alloc went elsewhere
// is one.
func TestDaemonKeepsClients(t *testing.T) {
	d, g := newFakeRM(t)
	g.sentFDs.pids = func() []int { return []int{os.Getpid()} }
	c := newFakeCall(t, g, fakeControl)
	f, err := g.followFile(c.fd, c.node)
	if err != nil {
		t.Fatal(err)
	}
	f.clients, f.rooted = 1, true
	const busy = fakeClient
	daemons := d.made(c.fd)
	g.account.addClient(daemons, 1<<22+1, f) // no process
	withClient(g)
	m := memoryObject(fakeMemory+7, fakeDevice)
	d.holding(g, new(atomic.Int64))
	fake := g.driver.(*fakeDriver)
	plain := fake.answer
	fake.answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo { // it comes and goes
			g.account.addObject(busy, m, 0, 0, 0)
			g.account.freeObject(busy, m.handle)
		}
		return plain(t, call)
	}
	if g.lookAtSettledRoots(); g.audits() != unsure {
		t.Error("suspects")
	}
	if g.audit(); !g.account.ownsClient(daemons) {
		t.Error("the daemon's client is freed")
	}
	g.startAudit(suspects)
	for deadline := time.Now().Add(patience); g.account.ownsClient(daemons); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it is never freed")
		}
	}
}

// audits tells why an audit is under way.
func (g *Guard) audits() suspicion {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.auditSuspects
}
