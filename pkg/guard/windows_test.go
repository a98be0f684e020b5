// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// windowsAgree waits until the guard and the driver count the same of BAR1, and that is want.
func (r *rig) windowsAgree(want quota.Bytes) {
	r.t.Helper()
	var guard, driver quota.Bytes
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r.guard.sweep()
		if guard, driver = r.guard.account.usage(0).windows, r.sim.Snapshot().GPUs[0].BAR1; guard == want && driver == want {
			r.survives()
			return
		}
	}
	r.t.Fatalf("the guard counts %v of BAR1, the driver %v: want %v", guard, driver, want)
}

// TestWindows: what windows for the processor take of BAR1 is what the guard counts, whatever ends them, and no more than the container's
// share of it: a quarter, as of the card's memory.
func TestWindows(t *testing.T) {
	r := newRig(t)
	c := r.start()
	open := c.do("open")
	a := open[0]
	m := c.do("alloc", a, 48*mib)[0]
	small := c.do("alloc", a, 256<<10)[0]

	first := c.do("window", a, m, 0, 40*mib)[0]
	r.windowsAgree(40 * quota.MiB)
	c.do("window", a, m, mib, 4096) // a page of the memory
	c.do("window", a, small, 4096, 64<<10)
	r.windowsAgree(40*quota.MiB + 192*quota.KiB)
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "window", a, m, 2*mib, 40*mib)
	c.refused("NV_ERR_INVALID_LIMIT", "window", a, m, 47*mib, 4*mib)
	c.refused("NV_ERR_INVALID_LIMIT", "window", a, m, -4096, 8192)
	c.refused("NV_ERR_INVALID_ARGUMENT", "window", a, m, 0, 4096, 1) // a file of nvidiactl
	r.windowsAgree(40*quota.MiB + 192*quota.KiB)

	c.refused("NV_ERR_INVALID_OBJECT_HANDLE", "window", a, c.do("vaspace", a)[0], 0, 4096)

	// Under the address that the program has mapped it at.
	for _, h := range []int{m, small} {
		if o, _ := r.guard.account.lookup(uint32(open[1]), uint32(h)); r.guard.account.mapPage(o) != 0 {
			t.Error("page tables are charged for a first mapping by UVM")
		}
	}
	c.do("movewindow", a, m, first, 1<<40)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "unwindow", a, m, first)
	c.do("unwindow", a, m, 1<<40)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "unwindow", a, m, 1<<40)
	r.windowsAgree(192 * quota.KiB)

	c.do("free", a, small)
	r.windowsAgree(64 * quota.KiB)
	second := c.do("open")[0]
	d := c.do("dup", second, a, m)[0]
	c.do("window", second, d, 0, 48*mib)
	c.do("close", a)
	r.windowsAgree(48 * quota.MiB)
	r.agree(48 * quota.MiB)
	c.do("freeclient", second)
	r.windowsAgree(0)
	r.agree(0)

	third := c.do("open")[0]
	c.do("window", third, c.do("alloc", third, 48*mib)[0], 0, 48*mib)
	r.agree(48 * quota.MiB)
	c.kill()
	r.empty()
}

// TestWindowPages: a window takes whole pages of the memory, by whatever handle, and 64 KiB where BAR1 is small.
func TestWindowPages(t *testing.T) {
	const small, large = 256 * quota.MiB, 16 * quota.GiB
	for _, x := range []struct {
		attr, attr2    uint32
		bar1           quota.Bytes
		offset, length uint64
		want           quota.Bytes
	}{
		{2, 0, large, 4096, 4096, 64 * quota.KiB}, {3, 0, large, 4096, 4096, 2 * quota.MiB}, {3, 1, large, 2<<20 - 1, 2, 4 * quota.MiB},
		{3, 2, large, 4096, 4096, 512 * quota.MiB}, {3, 2, large, 512<<20 - 1, 2, quota.GiB}, {3, 3, large, 4096, 4096, 256 * quota.GiB},
		{3, 2, 0, 4096, 4096, 512 * quota.MiB}, {3, 0, small + 1, 4096, 4096, 2 * quota.MiB},
		{3, 0, small, 4096, 4096, 64 * quota.KiB}, {3, 2, small, 64<<10 - 1, 2, 128 * quota.KiB},
	} {
		attr, attr2 := x.attr<<rm.MemoryAttrPageShift, x.attr2<<20
		for name, alloc := range map[string]func(f *fakeCall){
			"RM_ALLOC": func(f *fakeCall) {
				p := make([]byte, 128)
				rm.PutU32(p, rm.MemoryAttr, attr)
				rm.PutU32(p, rm.MemoryAttr2, attr2)
				rm.PutU32(p, rm.MemoryOwner, 1)
				rm.PutU64(p, rm.MemorySize, 4096)
				f.escape(rm.EscAlloc, fakeAlloc(fakeDevice, 0x81, classVidmem, p), p)
			},
			"heap": func(f *fakeCall) {
				o := make([]byte, rm.HeapSize)
				putWords(o, 0, fakeClient, fakeDevice, rm.HeapFnAllocSize)
				rm.PutU32(o, rm.HeapAllocMemory, 0x81)
				rm.PutU32(o, rm.HeapAllocAttr, attr)
				rm.PutU32(o, rm.HeapAllocAttr2, attr2)
				rm.PutU64(o, rm.HeapAllocSize, 4096)
				f.escape(rm.EscVidHeapControl, o)
			},
		} {
			g := withClient(newFakeGuard(t, &fakeDriver{}))
			g.account.setLimits(0, 1024*quota.GiB, 0)
			a := g.account
			alloc(newFakeCall(t, g, fakeControl))
			a.dupOf(fakeClient, fakeDevice, 0x82, fakeClient, 0x81)
			a.importObject(fakeClient, fakeDevice, 0x83, export{charge: a.holdOf(fakeClient, 0x81)})
			for h := range uint32(3) {
				o, _ := a.lookup(fakeClient, 0x81+h)
				if got := o.windowSize(x.offset, x.length, x.bar1); got != x.want {
					t.Errorf("%+v by %s, handle %d: %v", x, name, h, got)
				}
			}
		}
	}
	unknown := memoryObject(1, 2)
	if got := unknown.windowSize(0, 1, large); got != 512*quota.MiB {
		t.Errorf("pages that are not known: %v", got)
	}
}

// TestWindowIntoRegisters: the guard maps memory only, whatever stands in the account of a handle. What the task makes by itself can be all
// of the GPU's registers (RM_ALLOC_MEMORY of class 0x3f), and who was root when he made his client, as the guard was, may map those.
func TestWindowIntoRegisters(t *testing.T) {
	const noted, second = 0x71, 0x73
	for _, x := range []struct {
		class, want uint32
		mapped      int
	}{
		{classSystem, rm.StatusOK, 1}, {classOSDescriptor, rm.StatusOK, 1}, {classVidmem, rm.StatusOK, 1}, {0xc561, rm.StatusOK, 1},
		{classRegisters, rm.StatusInvalidObjectHandle, 0}, {0xc2, rm.StatusInvalidObjectHandle, 0}, {0, rm.StatusInvalidObjectHandle, 0},
	} {
		for name, handle := range map[string]uint32{"noted as host memory": noted, "another name of that": second} {
			var dups, frees, maps int
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			own, err := g.guardClient()
			if err != nil {
				t.Fatal(err)
			}
			f := newFakeCall(t, g, fakeControl)
			g.account.addObject(fakeClient, object{handle: noted, parent: fakeDevice, class: classSystem, kind: rm.ClassSysmem, gpu: noGPU,
				host: true, madeInTask: true, size: quota.MiB}, 0, 0, quota.MiB)
			dup := make([]byte, rm.DupSize)
			putWords(dup, 0, fakeClient, fakeDevice, second, fakeClient, noted)
			f.escape(rm.EscDupObject, dup)
			d.reset(func(call *rm.Call) {
				switch o := call.Outer; call.NR() {
				case rm.EscControl:
					if rm.U32(o, rm.ControlCmd) == controlHandleInfo && rm.U32(o, rm.ControlClient) == own.Handle() {
						rm.PutU32(call.Blocks[0].Data, handleInfoResult, x.class)
					}
				case rm.EscDupObject:
					dups++
				case rm.EscFree:
					frees++
				case rm.EscMapMemory:
					maps++
				}
			})
			file, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			o := make([]byte, rm.MapMemorySize)
			putWords(o, 0, fakeClient, fakeDevice, handle)
			rm.PutU64(o, rm.MapMemoryLength, 4096)
			rm.PutU32(o, rm.MapMemoryFD, uint32(file.Fd()))
			f.escape(rm.EscMapMemory, o)
			if s := rm.U32(o, rm.MapMemoryStatus); s != x.want || dups != 1 || maps != x.mapped || frees != 1-x.mapped {
				t.Errorf("class %#x, %s: %s, %d handles made, %d freed, %d mapped", x.class, name, rm.StatusName(s), dups, frees, maps)
			}
		}
	}
}

// TestWindowBehindRecord: under a handle that the account has for host memory, which the task was to make, may be the page that all users
// of the GPU share. The guard makes no handle on it, not even one that it frees: the driver counts that for good.
func TestWindowBehindRecord(t *testing.T) {
	u := &unseenObjects{classes: map[uint32]uint32{}}
	dups := 0
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscDupObject {
			dups++
		}
		return u.answer(t, call)
	}}))
	f := newFakeCall(t, g, fakeControl)
	if rep := noteMemory(f, classSystem, fakeDevice, theirs); !rep.resume {
		t.Fatalf("%+v", rep)
	}
	u.classes[theirs] = classUserShared
	file, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	o := make([]byte, rm.MapMemorySize)
	putWords(o, 0, fakeClient, fakeDevice, theirs)
	rm.PutU64(o, rm.MapMemoryLength, 4096)
	rm.PutU32(o, rm.MapMemoryFD, uint32(file.Fd()))
	f.escape(rm.EscMapMemory, o)
	if s := rm.U32(o, rm.MapMemoryStatus); s != rm.StatusInvalidObjectHandle || dups != 0 {
		t.Errorf("%s, %d handles made", rm.StatusName(s), dups)
	}
}

// TestWindowsOutliveMemory: what was mapped can be seen for as long as the file is open or mapped anywhere, whatever ended the window. So
// long the driver gives neither the memory nor the addresses to anybody, and the container is charged for both.
func TestWindowsOutliveMemory(t *testing.T) {
	for _, end := range []string{"free", "freeclient", "close", "unwindow and free"} {
		t.Run(end, func(t *testing.T) {
			r := newRig(t)
			c := r.start()
			a, other := c.do("open")[0], c.do("open")[0]
			m := c.do("alloc", a, 48*mib)[0]
			kept := c.do("keepwindow", a, m, 0, 48*mib)
			switch end {
			case "free":
				c.do("free", a, m)
			case "unwindow and free":
				c.do("unwindow", a, m, kept[0])
				c.do("free", a, m)
			default:
				c.do(end, a)
			}
			for range 3 {
				r.agree(48 * quota.MiB)
				r.windowsAgree(48 * quota.MiB)
			}
			if n := r.sim.Snapshot().Stale; n != 0 {
				t.Errorf("%d files show memory that is free", n)
			}
			c.refused("NV_ERR_NO_MEMORY", "alloc", other, int(testLimit)-32*mib)
			c.do("closefd", kept[1])
			c.do("alloc", other, int(testLimit)) // nobody was told that it is closed
			r.windowsAgree(0)
		})
	}
}

// TestWindowGoneUnnoticed: what nobody asks for is back, too.
func TestWindowGoneUnnoticed(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	m := c.do("alloc", a, 48*mib)[0]
	kept := c.do("keepwindow", a, m, 0, 48*mib)
	c.do("unwindow", a, m, kept[0])
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "window", a, m, 0, 40*mib)
	c.do("closefd", kept[1])
	second := c.do("window", a, m, 0, 40*mib) // who needs it does not wait
	c.do("unwindow", a, m, second[0])
	kept = c.do("keepwindow", a, m, 0, 48*mib)
	c.do("unwindow", a, m, kept[0])
	c.do("closefd", kept[1])
	for deadline := time.Now().Add(patience); r.sim.Snapshot().GPUs[0].BAR1 > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a window that is over and whose file is closed is still there")
		}
	}
}

// TestWindowOfLostObject: a window is gone, too, when its object was dropped by what does not look for windows.
func TestWindowOfLostObject(t *testing.T) {
	r := newRig(t)
	c := r.start()
	open := c.do("open")
	m := c.do("alloc", open[0], 48*mib)[0]
	c.do("window", open[0], m, 0, 48*mib)
	r.guard.account.freeObject(uint32(open[1]), uint32(m))
	for deadline := time.Now().Add(patience); r.sim.Snapshot().GPUs[0].BAR1 > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the window of an object that was dropped is still there")
		}
	}
}

// TestWindowAfterTheContainer: the guard stays for as long as somebody may see the container's memory, and who has the file is found.
func TestWindowAfterTheContainer(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	kept := c.do("keepwindow", a, c.do("alloc", a, 48*mib)[0], 0, 48*mib)
	pidfd, err := unix.PidfdOpen(c.cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, kept[1], 0)
	if err != nil {
		t.Fatal(err)
	}
	r.guard.files.remove(r.guard.files.find(fd, nodeGPU)) // of a real driver's GPUs the files are not followed
	c.kill()
	r.agree(48 * quota.MiB)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		r.guard.awaitMemory()
	}()
	select {
	case <-gone:
		t.Error("the guard goes while the memory is mapped")
	case <-time.After(200 * time.Millisecond):
	}
	n := node{kind: nodeGPU}
	if r.guard.isContainersFile(fd, n, &belongings{}) || !r.guard.isContainersFile(fd, n, &belongings{over: true}) {
		t.Error("a file of a window is found while the container runs, or is not when it is over")
	}
	unix.Close(fd)
	<-gone
	r.windowsAgree(0)
}

// TestWeakRefOfMapping: a mapping keeps a file. Of the files that can be polled a socket can be mapped
// by anybody.
func TestWeakRefOfMapping(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWeakRef(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close(nil)
	b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	unix.Close(fd)
	if err != nil {
		t.Fatal("map a socket: ", err)
	}
	if !w.alive(os.Getpid()) {
		t.Error("a file that is mapped is taken for closed")
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	if w.alive(os.Getpid()) {
		t.Error("a file that is neither open nor mapped is taken for open")
	}
}
