// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

const mib = int(quota.MiB)

// TestMemory is the life of memory: allocated, duplicated, freed in any order, within the limit and shown as such.
func TestMemory(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	b := c.do("open")[0]
	h := c.do("alloc", a, 100*mib)[0]
	r.agree(100 * quota.MiB)
	d := c.do("dup", b, a, h)[0]
	r.agree(100 * quota.MiB)
	c.do("free", a, h)
	r.agree(100 * quota.MiB)
	c.do("free", b, d)
	r.agree(0)

	h = c.do("alloc", a, 1000*mib)[0]
	c.refused("NV_ERR_NO_MEMORY", "alloc", a, 25*mib)
	c.do("alloc", b, 24*mib)
	r.agree(testLimit)
	if got := c.do("info", b); got[0] != int(testLimit/quota.KiB) || got[1] != 0 {
		t.Errorf("a full vGPU shows %d KiB, %d free", got[0], got[1])
	}
	c.do("free", a, h)
	if got := c.do("info", a); got[1] != 1000<<10 {
		t.Errorf("%d KiB free", got[1])
	}
	if n := r.guard.account.usage(0).denied; n != 1 {
		t.Errorf("%d denials", n)
	}
	c.do("context", a)
	r.agree(24*quota.MiB + sim.DefaultContextCost)
	c.do("xfer", a, 3*mib)
	r.agree(28*quota.MiB + sim.DefaultContextCost) // a multiple of the page
	c.do("freeclient", b)
	r.agree(4*quota.MiB + sim.DefaultContextCost)
	c.do("close", a)
	r.agree(0)
	c.kill()
	r.empty()
}

// TestPageTables: what the simulated driver takes for page tables is what the guard charges, to the byte, whatever ends it.
func TestPageTables(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	const lazy, gib = rm.MemoryFlagLazy, 1 << 30
	pool, vas := quota.Bytes(rm.PagePool(gib, false)), quota.Bytes(vaSpaceSize)
	tables := quota.Bytes(rm.PageTables(uint64(4*mib), false))
	space := c.do("vaspace", a)[0]
	c.do("virtual", a, gib, 0, space)
	lazily := c.do("virtual", a, gib, lazy, space)[0]
	x := c.do("alloc", a, 8*mib)[0]
	c.do("mapdma", a, lazily, x, 4*mib)
	r.agree(vas + pool + 8*quota.MiB + tables)
	c.do("free", a, space) // with which its ranges end, and what is mapped there
	r.agree(8 * quota.MiB)
	c.do("free", a, x)
	c.do("vaspace", a)
	full := c.do("virtual", a, gib, 0)[0]
	r.agree(vas + pool)
	c.refused("NV_ERR_NO_MEMORY", "virtual", a, 65*gib, 0)
	c.refused("NV_ERR_NO_MEMORY", "virtual", a, 65*gib, rm.MemoryFlagSparse|lazy)
	space = c.do("virtual", a, 1024*gib, lazy)[0]
	r.agree(vas + pool)
	m := c.do("alloc", a, 8*mib)[0]
	base := vas + pool + 8*quota.MiB
	c.do("mapdma", a, full, m, 4*mib)
	r.agree(base)
	first := c.do("mapdma", a, space, m, 4*mib)[0]
	c.do("mapdma", a, space, m, 4*mib)
	r.agree(base + 2*tables)
	for range 3 { // the driver would keep the tables of each
		c.refused("NV_ERR_INVALID_LIMIT", "mapdma", a, space, m, 512*gib)
		c.refused("NV_ERR_INVALID_LIMIT", "mapdma", a, space, m, 8*mib+1)
	}
	r.agree(base + 2*tables)
	c.do("unmapdma", a, space, first)
	r.agree(base + tables)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "unmapdma", a, space, first)
	within := c.do("mapdma", a, m, m, 4*mib)[0] // memory in the place of a range, which has tables: it has none
	r.agree(base + 2*tables)
	c.do("unmapdma", a, m, within)
	r.agree(base + tables)
	c.do("free", a, m)
	r.agree(vas + pool)
	for i := range 8 {
		c.do("event", a, i)
	}
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "event", a, 3)
	c.do("close", a)
	r.agree(0)
	if n := r.sim.Snapshot().Events; n != 0 {
		t.Errorf("%d OS events are left", n)
	}
	c.kill()
	r.empty()
}

// TestGraphicsPreemption: what the simulated driver takes for graphics preemption is what the guard charges.
func TestGraphicsPreemption(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	const gfxp = 13*quota.MiB + 2*64*quota.KiB
	group := c.do("gfxp", a)[0]
	r.agree(sim.DefaultContextCost + gfxp)
	c.do("free", a, group)
	r.agree(0)
	c.do("alloc", a, 1000*mib)
	c.refused("NV_ERR_NO_MEMORY", "gfxp", a) // a context fits, that does not
	r.agree(1000*quota.MiB + sim.DefaultContextCost)
	c.do("close", a)
	c.kill()
	r.empty()
}

// TestSparseTables: as TestPageTables, for sparse mappings of UVM's.
func TestSparseTables(t *testing.T) {
	r := newRig(t)
	c := r.start()
	const gib = 1 << 30
	u := c.do("openuvm")[0]
	tables := quota.Bytes(rm.UVMTables(64*gib, 64<<10))
	c.do("sparse", u, 1<<40, 64*gib)
	c.do("sparse", u, 2<<40, 64*gib)
	r.agree(2 * tables)
	c.refused("NV_ERR_INVALID_LIMIT", "sparse", u, 8<<40, 2<<40)
	c.do("sparse", u, 2<<40, 64*gib) // in its own place
	r.agree(2 * tables)
	small := quota.Bytes(rm.UVMTables(gib, 64<<10))
	c.do("sparse", u, 2<<40+8*gib, gib)
	c.do("sparse", u, 2<<40+16*gib, gib)
	r.agree(2*tables + 2*small)
	c.refused("NV_ERR_INVALID_ADDRESS", "uvmunmap", u, 2<<40, 64*gib+1<<16) // beyond the range
	c.refused("NV_ERR_INVALID_ADDRESS", "uvmunmap", u, 2<<40, 16*gib+4096)  // a cut within a page; what is before is unmapped
	c.do("uvmunmap", u, 2<<40, 17*gib)
	r.agree(2 * tables)
	c.do("sparse", u, 2<<40, gib)
	c.do("uvmunmap", u, 2<<40, 64*gib)
	r.agree(tables)
	c.do("sparse", u, 1<<40+gib, gib)
	c.refused("NV_ERR_INVALID_ADDRESS", "uvmfree", u, 1<<40, 63*gib)
	r.agree(tables + small)
	c.do("uvmfree", u, 1<<40, 64*gib)
	r.agree(0)
	c.do("sparse", u, 3<<40, gib)
	c.do("closefd", u)
	r.agree(0)
	c.kill()
	r.empty()
}

// TestExportedMemory lives until the descriptor and all handles are gone.
func TestExportedMemory(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a, b := c.do("open")[0], c.do("open")[0]
	h := c.do("alloc", a, 8*mib)[0]
	fd := c.do("export", a, h)[0]
	c.do("close", a)
	for deadline := time.Now().Add(patience); !r.guard.account.hasZombies(); time.Sleep(time.Millisecond) {
		if r.guard.sweep(); time.Now().After(deadline) {
			t.Fatal("exported memory without a handle is not seen as such")
		}
	}
	r.agree(8 * quota.MiB)
	i := c.do("import", b, fd)[0]
	c.do("closefd", fd)
	r.agree(8 * quota.MiB)
	c.do("free", b, i)
	r.agree(0)
	c.kill()
	r.empty()
}

// TestRefusals are calls that must have no effect.
func TestRefusals(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	c.refused("NV_ERR_INVALID_CLIENT", "foreign", a)
	c.refused("bad address", "wild", a)
	if e := c.do("badfd")[0]; e != int(unix.EBADF) {
		t.Errorf("a descriptor that is not open: %v", syscall.Errno(e))
	}
	alloc := int(testCmd(rm.EscAlloc, 48))
	for _, x := range []struct {
		name string
		cmd  int
		file int
		want syscall.Errno
	}{
		{"another size runs natively", int(testCmd(rm.EscAlloc, 12)), 1, unix.EINVAL}, // random_ioctl's answer
		{"an allocation on a file that is not NVIDIA's", alloc, 0, unix.ENOTTY},
		{"with another type", alloc&^0xff00 | 'x'<<8, 0, unix.ENOTTY},
		{"with a direction of its own", alloc &^ (3 << 30), 0, unix.ENOTTY},
		{"a UVM number on nvidiactl", rm.UVMMapExternal, 1, unix.EINVAL},
		{"a UVM number elsewhere", rm.UVMMapExternal, 0, unix.ENOTTY},
		{"an XFER of nothing", int(testCmd(rm.EscXferCmd, rm.XferSize)), 1, unix.EINVAL},
	} {
		if e := syscall.Errno(c.do("raw", x.cmd, x.file)[0]); e != x.want {
			t.Errorf("%s: %v, want %v", x.name, e, x.want)
		}
	}
	r.agree(0)
	c.refused("bad address", "readonly", a, 4*mib)
	r.agree(4 * quota.MiB) // as with the driver itself: the object is there, its name is lost
	c.kill()
	r.empty()
}

// TestSignals: every call happens exactly once, however often a timer takes its caller away, and there is progress although
// the timer is faster than the driver: the child does not answer before it has made some calls.
func TestSignals(t *testing.T) {
	for _, killable := range []string{"", "1"} {
		t.Run("killable="+killable, func(t *testing.T) {
			r := newRig(t)
			c := r.start(withEnv(killingEnv + "=" + killable))
			a := c.do("open")[0]
			objects := r.sim.Snapshot().Objects
			r.sim.SetDelay(sim.Delay{Alloc: 5 * time.Millisecond, Free: 5 * time.Millisecond})
			got := c.do("signals", a, 4000, 3000)
			s := r.guard.Status().Calls
			t.Logf("%d calls, %d EINTR, %+v", got[0], got[1], s)
			if killable == "" && (s.Interrupted == 0 || s.Replayed == 0 || got[1] == 0) {
				t.Error("nothing was interrupted: the test tests nothing")
			}
			if n := r.sim.Snapshot().Objects; n != objects {
				t.Errorf("%d objects, want %d: a call was lost or made twice", n, objects)
			}
			if s.Undone != 0 {
				t.Errorf("%d calls were taken back", s.Undone)
			}
			r.agree(0)
			c.kill()
			r.empty()
		})
	}
}

// TestFastSignals has no delay, so that signals hit every part of a call, the answer too.
func TestFastSignals(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	objects := r.sim.Snapshot().Objects
	got := c.do("signals", a, 150, 3000)
	t.Logf("%d calls, %d EINTR, %+v", got[0], got[1], r.guard.Status().Calls)
	if n := r.sim.Snapshot().Objects; n != objects {
		t.Errorf("%d objects, want %d: a call was lost or made twice", n, objects)
	}
	r.agree(0)
}

// TestAbandonedAllocation: a signal handler that jumps away leaves no memory behind.
func TestAbandonedAllocation(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	r.sim.SetDelay(sim.Delay{Alloc: 60 * time.Millisecond})
	c.do("longjmp", a, 16*mib, 30)
	// The allocation may still run while the other call waits for it; it is taken back before that is served.
	if s := r.guard.Status().Calls; s.Interrupted == 0 {
		t.Errorf("%+v", s)
	}
	r.agree(0)
	c.kill()
	r.empty()
}

// TestKilled: death in the middle of a call, at any moment of it, gives everything back.
func TestKilled(t *testing.T) {
	for _, x := range []struct {
		name  string
		delay sim.Delay
		order []any
	}{
		{"allocation", sim.Delay{Alloc: 40 * time.Millisecond}, []any{"alloc", 0, 16 * mib}},
		{"free", sim.Delay{Free: 40 * time.Millisecond}, []any{"free", 0, 1}},
		{"control", sim.Delay{Control: 40 * time.Millisecond}, []any{"info", 0}},
		{"client", sim.Delay{Other: 40 * time.Millisecond}, []any{"open"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := newRig(t)
			c := r.start()
			c.do("open")
			c.do("alloc", 0, 8*mib)
			r.sim.SetDelay(x.delay)
			c.send(x.order...)
			time.Sleep(20 * time.Millisecond)
			c.kill()
			r.empty()
		})
	}
}

// TestSlowCallsBlockNobodyElse: allocations beside a slow control are done before it.
func TestSlowCallsBlockNobodyElse(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a, b := c.do("open")[0], c.do("open")[0]
	r.sim.SetDelay(sim.Delay{Control: 700 * time.Millisecond})
	var err error
	for range 10 { // on a busy machine something else may have kept them
		if _, err = c.try("beside", a, b); err == nil {
			return
		}
	}
	t.Error(err)
}

// TestThreads runs many clients at once.
func TestThreads(t *testing.T) {
	r := newRig(t)
	c := r.start()
	c.do("threads", 12)
	s := r.sim.Snapshot().GPUs[0]
	r.agree(s.Used)
	c.kill()
	r.empty()
}

// TestExec: what the old program had open goes with it, the filter stays.
func TestExec(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	c.do("alloc", a, 16*mib)
	c.do("exec")
	r.agree(0)
	a = c.do("open")[0]
	c.do("alloc", a, 32*mib)
	r.agree(32 * quota.MiB)
	c.kill()
	r.empty()
}

// TestInheritedFile: a client lives as long as any process has its file.
func TestInheritedFile(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	c.do("alloc", a, 16*mib)
	pid := c.do("fork", a)[0]
	c.kill()
	time.Sleep(50 * time.Millisecond)
	r.agree(16 * quota.MiB)
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.empty()
}

// TestFileInFlight: a file that is in a socket only is still open.
func TestFileInFlight(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	c.do("alloc", a, 16*mib)
	socket := c.do("pass", a)
	time.Sleep(20 * time.Millisecond)
	r.agree(16 * quota.MiB)
	c.do("closefd", socket[0])
	c.do("closefd", socket[1])
	r.agree(0)
}

// TestTwoFilters: each exec into a container brings one, and the account is one.
func TestTwoFilters(t *testing.T) {
	r := newRig(t)
	c, e := r.start(), r.start()
	c.do("open")
	e.do("open")
	c.do("alloc", 0, 600*mib)
	e.refused("NV_ERR_NO_MEMORY", "alloc", 0, 600*mib)
	c.kill()
	r.agree(0)
	e.do("alloc", 0, 600*mib)
	select {
	case <-r.guard.done:
		t.Error("the guard ended although a filter is left")
	default:
	}
	e.kill()
	select {
	case <-r.guard.done:
	case <-time.After(patience):
		t.Error("the guard did not end with the last filter")
	}
}

// TestPidNamespace translates process numbers.
func TestPidNamespace(t *testing.T) {
	r := newRig(t)
	c := r.start(func(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID} })
	if got := c.do("pid")[0]; got != 1 {
		testenv.Lacks(t, "no pid namespace: %v", got)
	}
	a := c.do("open")[0]
	c.do("alloc", a, 2*mib)
	s := r.guard.Status()
	if len(s.Processes) != 1 || s.Processes[0].NSPID != 1 || s.Processes[0].PID != c.cmd.Process.Pid || s.Processes[0].Used[0] != 2*quota.MiB {
		t.Errorf("%+v", s.Processes)
	}
	if p := r.guard.tasks.byNSPid(1); p == nil || p.tgid != c.cmd.Process.Pid {
		t.Errorf("process 1 of the container: %+v", p)
	}
}

// TestRacingHandles: the account follows the driver also where threads free and make the same handle at once. If it saw
// them in another order, memory could be held that is charged to nobody.
func TestRacingHandles(t *testing.T) {
	for range 4 {
		r := newRig(t)
		c := r.start()
		a := c.do("open")[0]
		r.jitter.Store(int64(300 * time.Microsecond))
		c.do("race", a, 700)
		r.agree(r.sim.Snapshot().GPUs[0].Used)
		c.kill()
		r.empty()
	}
}
