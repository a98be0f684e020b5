// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestOldContextDMA: the old call is held to the rules of the class, and makes one object that ends with its memory.
func TestOldContextDMA(t *testing.T) {
	const host, dma = 0x81, 0x90
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	f.hostMemory(host, quota.MiB)
	ask := func(client, memory, class, flags uint32, limit uint64) uint32 {
		o := make([]byte, 56)
		for at, v := range map[int]uint32{rm.OldContextDMAClient: client, rm.OldContextDMAObject: dma, rm.OldContextDMAClass: class,
			rm.OldContextDMAFlags: flags, rm.OldContextDMAMemory: memory} {
			rm.PutU32(o, at, v)
		}
		rm.PutU64(o, rm.OldContextDMAOffset, 0x50)
		rm.PutU64(o, rm.OldContextDMALimit, limit)
		f.escape(rm.EscContextDMA, o)
		return rm.U32(o, 48)
	}
	for _, x := range []struct {
		name                        string
		client, memory, class, want uint32
		limit                       uint64
	}{
		{"as Vulkan does", fakeClient, host, 2, rm.StatusOK, 0xfaf},
		{"too much of it in the kernel", fakeClient, host, 2, rm.StatusNotSupported, uint64(maxKernelMap)},
		{"device memory", fakeClient, fakeMemory, 2, rm.StatusNotSupported, 0xfaf},
		{"another class", fakeClient, host, classVidmem, rm.StatusNotSupported, 0xfaf},
		{"another container's client", fakeClient + 1, host, 2, rm.StatusInvalidObjectHandle, 0xfaf},
		{"no memory", fakeClient, 0x7777, 2, rm.StatusInvalidObjectHandle, 0xfaf},
	} {
		var asked []byte
		d.reset(func(call *rm.Call) { asked = append(append(asked, call.Outer[:16]...), call.Blocks[0].Data...) })
		ok := x.want == rm.StatusOK
		if s := ask(x.client, x.memory, x.class, rm.ContextDMAFlagKernel, x.limit); s != x.want || (len(d.calls) == 1) != ok {
			t.Errorf("%s: %s, %d driver calls", x.name, rm.StatusName(s), len(d.calls))
		}
		if ok && (rm.U32(asked, rm.AllocClass) != 2 || rm.U32(asked, 16+rm.ContextDMAMemory) != x.memory ||
			rm.U64(asked, 16+rm.ContextDMAOffset) != 0x50) {
			t.Errorf("%s: asked %x", x.name, asked)
		}
	}
	if _, ok := g.account.lookup(fakeClient, dma); !ok {
		t.Fatal("no record of it")
	}
	d.reset(nil)
	if f.escape(rm.EscFree, fakeFree(host)); func() bool { _, ok := g.account.lookup(fakeClient, dma); return ok }() {
		t.Error("it has outlived its memory")
	}
}

// TestNoMemory: who asks for all registers, or for all memory, gets an object without any, and is told the vGPU's size.
func TestNoMemory(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	for _, x := range []struct {
		class, client, handle, want uint32
		limit                       uint64
	}{
		{classRegisters, fakeClient, 0x91, rm.StatusOK, 0xffffffff},
		{classVidmem, fakeClient, 0x91, rm.StatusOK, g.heapSize(fakeClient, fakeDevice) - 1},
		{classRegisters, fakeClient + 1, 0x91, rm.StatusInvalidClient, 7},
		{0x76, fakeClient, 0x91, rm.StatusNotSupported, 7}, // the console's
		// The driver makes one under a name of its own (_rmAllocMemorySystemDynamic passes the handle by value).
		{classRegisters, fakeClient, 0, rm.StatusInvalidObjectNew, 7},
		{classVidmem, fakeClient, 0, rm.StatusInvalidObjectNew, 7},
	} {
		var nr, class, fd uint32
		d.reset(func(call *rm.Call) {
			nr, class, fd = call.NR(), rm.U32(call.Outer, rm.AllocMemoryClass), rm.U32(call.Outer, rm.AllocMemoryFD)
		})
		o := make([]byte, rm.AllocMemorySize)
		for at, v := range map[int]uint32{rm.AllocMemoryRoot: x.client, rm.AllocMemoryParent: fakeDevice, rm.AllocMemoryObject: x.handle,
			rm.AllocMemoryClass: x.class, rm.AllocMemoryLimit: 7} {
			rm.PutU32(o, at, v)
		}
		f.escape(rm.EscAllocMemory, o)
		if got := rm.U32(o, rm.AllocMemoryClass); got != x.class {
			t.Errorf("the task is told of class %#x", got)
		}
		if s := rm.U32(o, rm.AllocMemoryStatus); s != x.want || rm.U64(o, rm.AllocMemoryLimit) != x.limit {
			t.Errorf("class %#x: %s, limit %#x", x.class, rm.StatusName(s), rm.U64(o, rm.AllocMemoryLimit))
		}
		if ok := x.want == rm.StatusOK; (len(d.calls) == 1) != ok || ok &&
			(nr != rm.EscAllocMemory || class != classNoMemory || fd != ^uint32(0)) {
			t.Errorf("class %#x: %d calls, the last for class %#x with file %d", x.class, len(d.calls), class, int32(fd))
		}
		d.reset(nil)
		f.escape(rm.EscFree, fakeFree(0x91))
	}
}
