// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// alloc makes an object below the first device.
func (f *fakeCall) alloc(handle, class uint32, params []byte) uint32 {
	o := fakeAlloc(fakeDevice, handle, class, params)
	f.escape(rm.EscAlloc, o, params)
	return rm.U32(o, 40)
}

func (f *fakeCall) hostMemory(handle uint32, size quota.Bytes) {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, uint64(size))
	f.alloc(handle, classSystem, p)
}

// taskMemory is host memory by RM_ALLOC_MEMORY.
func (f *fakeCall) taskMemory(handle uint32, size quota.Bytes) {
	o := make([]byte, rm.AllocMemorySize)
	putWords(o, rm.AllocMemoryRoot, fakeClient, fakeDevice, handle, classSystem)
	rm.PutU64(o, rm.AllocMemoryLimit, uint64(size)-1)
	f.escape(rm.EscAllocMemory, o)
}

// TestSemaphoreSurface: it is small, of host memory whose size is known, and keeps that.
func TestSemaphoreSurface(t *testing.T) {
	const class, surface, again = 0xda, 0x90, 0x91
	const small, second, large, task, taskDup = 0x81, 0x82, 0x83, 0x84, 0x85
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxHostMemory.Bytes = 64 * quota.MiB
	f := newFakeCall(t, g, fakeControl)
	f.hostMemory(small, maxSemaphores)
	f.hostMemory(second, 4096)
	f.hostMemory(large, maxSemaphores+1)
	f.taskMemory(task, 4096)
	g.account.dupOf(fakeClient, fakeDevice, taskDup, fakeClient, task)
	before := g.account.hostUsed
	surfaceOf := func(memory, maxMemory uint32) uint32 {
		p := make([]byte, 16)
		rm.PutU32(p, rm.SemaphoreMemory, memory)
		rm.PutU32(p, rm.SemaphoreMaxMemory, maxMemory)
		return f.alloc(surface, class, p)
	}
	for _, x := range [][2]uint32{{large, 0}, {small, large}, {fakeMemory, 0}, {small, fakeMemory}, {task, 0}, {taskDup, 0}, {0x99, 0}} {
		d.reset(nil)
		if s := surfaceOf(x[0], x[1]); s != rm.StatusInvalidArgument || len(d.calls) != 0 {
			t.Errorf("of %#x: %s, %d driver calls", x, rm.StatusName(s), len(d.calls))
		}
	}
	for _, x := range [][2]uint32{{small, 0}, {small, small}, {small, second}} {
		if s := surfaceOf(x[0], x[1]); s != rm.StatusOK {
			t.Fatalf("of %#x: %s", x, rm.StatusName(s))
		}
		g.account.dupOf(fakeClient, fakeDevice, again, fakeClient, surface)
		for _, h := range []uint32{x[0], x[1], surface} {
			f.escape(rm.EscFree, fakeFree(h))
			if g.account.hostUsed != before {
				t.Errorf("of %#x: %v of host memory after the free of %#x, want %v", x, g.account.hostUsed, h, before)
			}
		}
		f.escape(rm.EscFree, fakeFree(again))
		if g.account.hostUsed == before {
			t.Errorf("of %#x: %v of host memory after the last free", x, g.account.hostUsed)
		}
		f.hostMemory(small, maxSemaphores)
		f.escape(rm.EscFree, fakeFree(second))
		f.hostMemory(second, 4096)
		if g.account.hostUsed != before {
			t.Errorf("of %#x: %v of host memory, want %v", x, g.account.hostUsed, before)
		}
	}
}

// TestSurfacesOfOneMemory: the driver has a handle of its own on the memory of each semaphore surface, and counts them in a byte.
func TestSurfacesOfOneMemory(t *testing.T) {
	const class, memory, other, first = 0xda, 0x81, 0x82, 0x1000
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	f := newFakeCall(t, g, fakeControl)
	f.hostMemory(memory, 4096)
	f.hostMemory(other, 4096)
	made := func(memory uint32, n int) uint32 {
		p := make([]byte, 16)
		rm.PutU32(p, rm.SemaphoreMemory, memory)
		return f.alloc(first+uint32(n), class, p)
	}
	n := 0
	for n < maxSurfaces && made(memory, n) == rm.StatusOK {
		n++
	}
	if n+1 != maxReferences { // the memory's own handle
		t.Errorf("%d surfaces", n)
	}
	if s := made(other, n); s != rm.StatusOK {
		t.Errorf("of other memory: %s", rm.StatusName(s))
	}
}

// TestContextDMA: only little host memory is mapped into the kernel by one, and it ends with its memory.
func TestContextDMA(t *testing.T) {
	const host, task, dma = 0x81, 0x82, 0x90
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxHostMemory.Bytes = 64 * quota.MiB
	f := newFakeCall(t, g, fakeControl)
	f.hostMemory(host, quota.MiB)
	f.taskMemory(task, quota.MiB)
	g.account.addObject(fakeClient, object{handle: 0x84, parent: fakeDevice, kind: rm.ClassFabric,
		charge: g.account.clients[fakeClient].objects[fakeMemory].charge, gpu: noGPU}, noGPU, 0, 0)
	for _, x := range []struct {
		memory  uint32
		flags   uint32
		limit   uint64
		refused bool
	}{
		{host, rm.ContextDMAFlagKernel, uint64(maxKernelMap) - 1, false},
		{task, rm.ContextDMAFlagKernel, 63, false},
		{host, rm.ContextDMAFlagKernel, uint64(maxKernelMap), true},
		{task, rm.ContextDMAFlagKernel, uint64(maxKernelMap), true},
		{host, rm.ContextDMAFlagKernel, ^uint64(0), true},
		{host, 0, 1<<20 - 1, false},
		{fakeMemory, 0, 1<<20 - 1, false},
		{fakeMemory, rm.ContextDMAFlagKernel, 63, true},
		{fakeMemory, 3 * rm.ContextDMAFlagKernel, 63, true},
		{0x84, rm.ContextDMAFlagKernel, 63, true},
	} {
		d.reset(nil)
		p := make([]byte, 32)
		rm.PutU32(p, rm.ContextDMAFlags, x.flags)
		rm.PutU32(p, rm.ContextDMAMemory, x.memory)
		rm.PutU64(p, rm.ContextDMALimit, x.limit)
		if s := f.alloc(dma, 0x2, p); (s == rm.StatusNotSupported) != x.refused || (len(d.calls) == 0) != x.refused {
			t.Errorf("%+v: %s, %d driver calls", x, rm.StatusName(s), len(d.calls))
		}
	}
	p := make([]byte, 32)
	rm.PutU32(p, rm.ContextDMAMemory, host)
	f.alloc(dma, 0x2, p)
	f.escape(rm.EscFree, fakeFree(host))
	if _, ok := g.account.lookup(fakeClient, dma); ok {
		t.Error("a context DMA has outlived its memory")
	}
}

// TestMapDMAKernel: a mapping has one in the kernel only of little host memory, and the program reads its own flags.
func TestMapDMAKernel(t *testing.T) {
	const host = 0x81
	_, d, f := dmaGuard(t)
	f.hostMemory(host, quota.MiB)
	f.taskMemory(host+1, quota.MiB)
	for _, x := range []struct {
		memory uint32
		length uint64
		kernel bool
	}{{host, 64 << 10, true}, {host, 64<<10 + 1, false}, {host, 0, false}, {fakeMemory, 4096, false}, {host + 1, 4096, true}} {
		kernel := false
		d.answer = func(_ Target, call *rm.Call) syscall.Errno {
			kernel = rm.U32(call.Outer, rm.DMAFlags)&rm.DMAFlagKernel != 0
			return 0
		}
		o := mapDMA(fakeClient, fakeRange, x.memory, 0, x.length)
		flags := uint32(1<<15 | rm.DMAFlagKernel)
		rm.PutU32(o, rm.DMAFlags, flags)
		f.escape(rm.EscMapDMA, o)
		if s := rm.U32(o, 56); s != rm.StatusOK || kernel != x.kernel || rm.U32(o, rm.DMAFlags) != flags {
			t.Errorf("%+v: %s, mapped into the kernel: %v, flags %#x", x, rm.StatusName(s), kernel, rm.U32(o, rm.DMAFlags))
		}
	}
}

// TestKernelMappedMemory: host memory is mapped into the kernel for as long as it lives where it is of a notifier's type. It may be little.
func TestKernelMappedMemory(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	for _, x := range []struct {
		size       quota.Bytes
		asked, got uint32
	}{
		{maxKernelMap, rm.MemoryTypeNotifier, rm.MemoryTypeNotifier}, {maxKernelMap + 1, rm.MemoryTypeNotifier, rm.MemoryTypeImage},
		{quota.MiB, 2, 2},
	} {
		p := make([]byte, 128)
		putWords(p, 0, 1, x.asked)
		rm.PutU64(p, rm.MemorySize, uint64(x.size))
		o := make([]byte, rm.HeapSize)
		putWords(o, 0, fakeClient, fakeDevice, rm.HeapFnAllocSize)
		putWords(o, rm.HeapAllocMemory, 0x92, x.asked)
		rm.PutU32(o, rm.HeapAllocAttr, rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift)
		rm.PutU64(o, rm.HeapAllocSize, uint64(x.size))
		for way, ask := range map[string]func(){"RM_ALLOC": func() { f.alloc(0x91, classSystem, p) },
			"heap": func() { f.escape(rm.EscVidHeapControl, o) }} {
			seen := ^uint32(0)
			d.reset(func(call *rm.Call) {
				if seen = rm.U32(call.Outer, rm.HeapAllocType); call.NR() == rm.EscAlloc {
					seen = rm.U32(call.Blocks[0].Data, rm.MemoryType)
				}
			})
			if ask(); seen != x.got {
				t.Errorf("%s of %v: the driver is told of type %d, want %d", way, x.size, seen, x.got)
			}
			d.reset(nil)
			f.escape(rm.EscFree, fakeFree(0x91))
			f.escape(rm.EscFree, fakeFree(0x92))
		}
	}
}

// TestMapper: a memory mapper keeps its semaphore surface's memory, ends with its notification's, and has no queue to speak of in the
// kernel; what it would do is denied.
func TestMapper(t *testing.T) {
	const class, surface, mapper = 0xfe, 0x90, 0x92
	const semaphores, notification, large, task = 0x81, 0x82, 0x83, 0x84
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxHostMemory.Bytes = 64 * quota.MiB
	f := newFakeCall(t, g, fakeControl)
	f.hostMemory(semaphores, 4096)
	f.hostMemory(notification, 4096)
	f.hostMemory(large, maxSemaphores+1)
	f.taskMemory(task, 4096)
	before := g.account.hostUsed
	p := make([]byte, 16)
	rm.PutU32(p, rm.SemaphoreMemory, semaphores)
	if s := f.alloc(surface, 0xda, p); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	mapperOf := func(surface, memory uint32, offset uint64) (status, queue uint32) {
		d.reset(func(call *rm.Call) { queue = rm.U32(call.Blocks[0].Data, rm.MapperQueue) })
		p := make([]byte, rm.MapperSize)
		rm.PutU32(p, rm.MapperSurface, surface)
		rm.PutU32(p, rm.MapperQueue, 1<<31)
		rm.PutU32(p, rm.MapperNotification, memory)
		rm.PutU64(p, rm.MapperOffset, offset)
		status = f.alloc(mapper, class, p)
		return status, queue
	}
	for _, x := range []struct {
		surface, memory uint32
		offset          uint64
	}{{0x99, notification, 0}, {semaphores, notification, 0}, {surface, 0x99, 0}, {surface, large, 0}, {surface, task, 0},
		{surface, fakeMemory, 0},
		{surface, notification, 4093}, {surface, notification, 1<<64 - 1}} {
		if s, _ := mapperOf(x.surface, x.memory, x.offset); s != rm.StatusInvalidArgument || len(d.calls) != 0 {
			t.Errorf("%#x: %s, %d driver calls", x, rm.StatusName(s), len(d.calls))
		}
	}
	if s, queue := mapperOf(surface, notification, 4092); s != rm.StatusOK || queue != 1 {
		t.Fatalf("%s, %d places", rm.StatusName(s), queue)
	}
	d.reset(nil)
	for _, cmd := range []uint32{0xfe0101, 0xfe0102} { // SUBMIT_OPERATIONS, RESIZE_QUEUE
		if o := fakeControlCall(fakeClient, cmd, make([]byte, 4)); f.escape(rm.EscControl, o, make([]byte, 4)) != replyDone ||
			rm.U32(o, rm.ControlStatus) != rm.StatusNotSupported {
			t.Errorf("%#x: %s", cmd, rm.StatusName(rm.U32(o, rm.ControlStatus)))
		}
	}
	f.escape(rm.EscFree, fakeFree(semaphores))
	f.escape(rm.EscFree, fakeFree(surface))
	if g.account.hostUsed != before {
		t.Errorf("%v of host memory while there is a mapper, want %v", g.account.hostUsed, before)
	}
	f.escape(rm.EscFree, fakeFree(notification))
	if _, ok := g.account.lookup(fakeClient, mapper); ok || g.account.hostUsed != before-2*4096 {
		t.Errorf("the mapper is there: %v; %v of host memory, want %v", ok, g.account.hostUsed, before-2*4096)
	}
}
