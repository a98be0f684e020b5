// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestHostMemory: what the driver makes for the container on the host is bounded, whichever call asks for it, and its end gives it back.
func TestHostMemory(t *testing.T) {
	const most = 64 * quota.MiB
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxHostMemory.Bytes = most
	f := newFakeCall(t, g, fakeControl)
	alloc := func(handle uint32, size uint64) uint32 {
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, size)
		o := fakeAlloc(fakeDevice, handle, classSystem, p)
		f.escape(rm.EscAlloc, o, p)
		return rm.U32(o, 40)
	}
	heap := func(handle uint32, size uint64) uint32 {
		o := make([]byte, rm.HeapSize)
		rm.PutU32(o, rm.HeapRoot, fakeClient)
		rm.PutU32(o, rm.HeapParent, fakeDevice)
		rm.PutU32(o, rm.HeapFunction, rm.HeapFnAllocSize)
		rm.PutU32(o, rm.HeapAllocMemory, handle)
		rm.PutU32(o, rm.HeapAllocAttr, rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift)
		rm.PutU64(o, rm.HeapAllocSize, size)
		f.escape(rm.EscVidHeapControl, o)
		return rm.U32(o, rm.HeapStatus)
	}
	parent := uint32(fakeDevice)
	old := func(handle uint32, size uint64) uint32 {
		o := make([]byte, rm.AllocMemorySize)
		rm.PutU32(o, rm.AllocMemoryRoot, fakeClient)
		rm.PutU32(o, rm.AllocMemoryParent, parent)
		rm.PutU32(o, rm.AllocMemoryObject, handle)
		rm.PutU32(o, rm.AllocMemoryClass, classSystem)
		rm.PutU64(o, rm.AllocMemoryLimit, size-1)
		if rep := f.escape(rm.EscAllocMemory, o); rep.resume {
			return rm.StatusOK
		}
		return rm.U32(o, rm.AllocMemoryStatus)
	}
	for name, make := range map[string]func(uint32, uint64) uint32{"RM_ALLOC": alloc, "heap": heap, "RM_ALLOC_MEMORY": old} {
		for _, size := range []uint64{uint64(most) + 1, 1 << 50, ^uint64(0), ^uint64(0) - 4095} {
			if s := make(0x80, size); s != rm.StatusNoMemory {
				t.Errorf("%s of %#x: %s", name, size, rm.StatusName(s))
			}
		}
		if s := make(0x81, uint64(most)-4096); s != rm.StatusOK {
			t.Errorf("%s: %s", name, rm.StatusName(s))
		}
		if s := make(0x82, 8192); s != rm.StatusNoMemory {
			t.Errorf("%s beyond the bound: %s", name, rm.StatusName(s))
		}
		if s := make(0x82, 4096); s != rm.StatusOK {
			t.Errorf("%s up to the bound: %s", name, rm.StatusName(s))
		}
		wantUsage(t, g.account, 0, 8*quota.MiB) // no device memory
		if sum := g.account.byProcess()[os.Getpid()].used; sum[0] != 8*quota.MiB {
			t.Errorf("%s: the process is shown %v", name, sum[0])
		}
		f.escape(rm.EscFree, fakeFree(0x81))
		f.escape(rm.EscFree, fakeFree(0x82))
		if g.account.hostUsed != 0 {
			t.Errorf("%s: %v after the last free", name, g.account.hostUsed)
		}
	}
	// A name that is taken may not lose its record.
	if s := old(fakeMemory, 4096); s != rm.StatusInsertDuplicateName {
		t.Errorf("the handle of device memory: %s", rm.StatusName(s))
	}
	wantUsage(t, g.account, 0, 8*quota.MiB)
	// A call comes again after a signal. Which of those with one name is carried out nobody knows, so the largest counts.
	for _, size := range []uint64{8192, 4096, 8192, 12288} {
		if s := old(0x85, size); s != rm.StatusOK {
			t.Errorf("the same call again: %s", rm.StatusName(s))
		}
		if want := max(quota.Bytes(size), 8192); g.account.hostUsed != want {
			t.Errorf("%v are counted, want %v", g.account.hostUsed, want)
		}
	}
	if s := old(0x85, uint64(most)+4096); s != rm.StatusNoMemory || g.account.hostUsed != 12288 {
		t.Errorf("%s, %v are counted", rm.StatusName(s), g.account.hostUsed)
	}
	// Below another parent it would outlive its record; and what is surely there has the size that it has.
	parent = fakeDevice + 0x100
	g.account.addObject(fakeClient, object{handle: parent, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	if s := old(0x85, 4096); s != rm.StatusInsertDuplicateName {
		t.Errorf("below another parent: %s", rm.StatusName(s))
	}
	parent = fakeDevice
	f.escape(rm.EscFree, fakeFree(0x85))
	alloc(0x86, 4096)
	if s := old(0x86, 8192); s != rm.StatusInsertDuplicateName {
		t.Errorf("the name of what RM_ALLOC has made: %s", rm.StatusName(s))
	}
	f.escape(rm.EscFree, fakeFree(0x86))
	if g.account.hostUsed != 0 {
		t.Errorf("%v after the free", g.account.hostUsed)
	}
	alloc(0x83, 4096)
	g.account.dupOf(fakeClient, fakeDevice, 0x84, fakeClient, 0x83)
	g.account.freeObject(fakeClient, 0x83)
	if g.account.hostUsed != 4096 {
		t.Errorf("%v with a second handle", g.account.hostUsed)
	}
	f.escape(rm.EscFree, fakeFree(fakeClient))
	if g.account.hostUsed != 0 {
		t.Errorf("%v after the client's end", g.account.hostUsed)
	}
}

// TestHostMemoryNamedAgain: a call for host memory that the driver has refused keeps its name from nobody, and of one the driver is asked
// once whether that is free; not again when it comes again after a signal.
func TestHostMemoryNamedAgain(t *testing.T) {
	const second, memory = 0x5c000003, 0x5c0000e1
	asked := 0
	status := uint32(rm.StatusObjectNotFound)
	d := &fakeDriver{unseen: true, answer: func(_ Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlHandleInfo {
			asked++
			rm.PutU32(call.Outer, rm.ControlStatus, status)
		}
		return 0
	}}
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	g.account.addObject(fakeClient, object{handle: second, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	for i, x := range []struct {
		parent, driver uint32
		asked          int
		want           uint32
	}{
		{fakeDevice, rm.StatusObjectNotFound, 1, rm.StatusOK},
		{fakeDevice, rm.StatusOK, 1, rm.StatusOK}, // it comes again
		{second, rm.StatusOK, 2, rm.StatusInsertDuplicateName},
		{second, rm.StatusInvalidClient, 3, rm.StatusInvalidClient},
		{second, rm.StatusObjectNotFound, 4, rm.StatusOK}, // the driver had refused it
	} {
		status = x.driver
		if rep := noteMemory(f, classOSDescriptor, x.parent, memory); f.statusWord() != x.want || rep.resume != (x.want == rm.StatusOK) ||
			asked != x.asked {
			t.Errorf("call %d: %s, the driver was asked %d times", i+1, rm.StatusName(f.statusWord()), asked)
		}
	}
	if o, _ := g.account.lookup(fakeClient, memory); o.parent != second || g.account.hostUsed != pageHost/pinned {
		t.Errorf("recorded below %#x, %v are counted", o.parent, g.account.hostUsed)
	}
}

// TestHostMemoryOnNode: RM_ALLOC_MEMORY comes on a GPU's node, where the driver tells nothing of a client. The search for the file that the
// client is on is the call's, whatever the guard's own searches have cost.
func TestHostMemoryOnNode(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	control, c := newFakeCall(t, g, fakeControl), newFakeCall(t, g, "/dev/zero")
	f, err := g.followFile(control.fd, control.node)
	if err != nil {
		t.Fatal(err)
	}
	g.account.clients[fakeClient].file = f
	g.bill.searches.spend(time.Now(), 10)
	if rep := noteMemory(c, classSystem, fakeDevice, 0x77); !rep.resume {
		t.Errorf("%+v", rep)
	}
}

// TestClientSeen: a client's file is looked for where it was made, first.
func TestClientSeen(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	f := newFakeCall(t, g, fakeControl)
	file, err := g.followFile(f.fd, f.node)
	if err != nil {
		t.Fatal(err)
	}
	file.mu.Lock()
	made := g.clientFound(file, fakeClient, os.Getpid(), uint64(f.fd))
	file.mu.Unlock()
	g.bill.searches.spend(time.Now(), 10) // none is allowed
	at, ok := g.fileOf(made)
	if !ok {
		t.Fatal("it is not found without a search")
	}
	at.Done()
}

// TestMemoryCallStale: a call whose thread has been interrupted is not made any more. It leaves no record, and hides no other call that its
// thread may be in. One by i386's table is not let through: where its thread is cannot be seen.
func TestMemoryCallStale(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	f := newFakeCall(t, g, fakeControl)
	f.call.Outer, f.listener = memoryCallOf(classSystem, fakeDevice, 0x77), &listener{fd: -1} // which knows no call
	if p := g.noteHostMemory(&f.trappedCall, classSystem); p.ask || p.answer.resume {
		t.Errorf("let through: %+v", p.answer)
	}
	if _, known := g.account.lookup(fakeClient, 0x77); known || g.account.hostUsed != 0 {
		t.Errorf("known %t, %v charged", known, g.account.hostUsed)
	}
	cmd := uint32(testCmd(rm.EscAllocMemory, rm.AllocMemorySize))
	if rep := g.onOtherFile(&f.trappedCall, cmd); rep.resume || g.memoryCalls.n.Load() != 0 {
		t.Errorf("on another file: %+v, %d noted", rep, g.memoryCalls.n.Load())
	}
	f.listener = nil
	for arch, resume := range map[uint32]bool{0x40000003: false, nativeArch: true} {
		f.notif.Arch = arch
		if rep := g.onOtherFile(&f.trappedCall, cmd); rep.resume != resume {
			t.Errorf("architecture %#x on another file: %+v", arch, rep)
		}
	}
}
