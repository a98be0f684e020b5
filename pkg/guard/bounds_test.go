// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestBounds: of what the driver has in lists for all of a GPU's users, or in its firmware, a container has only so many.
func TestBounds(t *testing.T) {
	const subdevice = 0x5c0000aa
	for _, tt := range []struct {
		name   string
		class  uint32
		params []uint32
		most   int
	}{
		{"notifications at interrupts", 0x79, []uint32{fakeClient, subdevice, 0x79, 35 | 0x08000000, 0, 0}, maxNotifications},
		{"objects in firmware", 0x90e6, nil, maxFirmware},
		{"sessions of an encoder", 0xa0bc, []uint32{0, 1, 1, 1, fakeMemory}, maxEncoders},
		{"semaphore surfaces", 0xda, make([]uint32, 4), maxSurfaces},
	} {
		g := withClient(newFakeGuard(t, &fakeDriver{}))
		g.account.addObject(fakeClient, object{handle: subdevice, parent: fakeDevice, kind: rm.ClassSubdevice, gpu: noGPU}, noGPU, 0, 0)
		f := newFakeCall(t, g, fakeControl)
		p := make([]byte, 4*len(tt.params))
		putWords(p, 0, tt.params...)
		n := 0
		for ; n < 2*tt.most; n++ {
			o := fakeAlloc(subdevice, uint32(0x5d000000+n), tt.class, p)
			if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
				break
			}
		}
		if n > tt.most || n < tt.most-2 {
			t.Errorf("%s: %d", tt.name, n)
		}
	}
}

// TestExported: what a container has in files for others is bounded too, and comes back when a file holds something else.
func TestExported(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	f := newFakeCall(t, g, fakeControl)
	full := 0
	export := func(fd, at int) bool {
		list := make([]uint32, 512)
		for i := range list {
			list[i] = addMemory(g, uint32(full+i)%64) // one piece has so many references only
		}
		p := exportCall(fd, at, list...)
		o := fakeControlCall(fakeClient, 0x3d0b, p)
		return f.escape(rm.EscControl, o, p) == replyDone && rm.U32(o, rm.ControlStatus) == rm.StatusOK
	}
	for range 3 {
		fd, _ := exportFile(t)
		for at := 0; at+512 <= maxExports; at += 512 {
			if export(fd, at) {
				full += 512
				if !export(fd, at) && full+512 <= maxExported {
					t.Errorf("position %d cannot be used again", at)
				}
			}
		}
	}
	if full != maxExported || g.exportedObjects.Load() != maxExported {
		t.Errorf("%d exports, counted %d", full, g.exportedObjects.Load())
	}
}

// addMemory makes a piece of device memory known, if it is not, and returns its handle.
func addMemory(g *Guard, i uint32) uint32 {
	h := 0x5e000000 + i
	if _, ok := g.account.lookup(fakeClient, h); !ok {
		g.account.addObject(fakeClient, object{handle: h, parent: fakeDevice, class: classVidmem, kind: rm.ClassVidmem}, 0, 0, 4096)
	}
	return h
}

// TestReferences: the driver counts handles and mappings of memory, and files with it, in a byte; no more come to be than that holds.
func TestReferences(t *testing.T) {
	duplicate := func(f *fakeCall, i uint32) bool {
		o := make([]byte, rm.DupSize)
		putWords(o, 0, fakeClient, fakeDevice, 0x5d000000+i, fakeClient, fakeMemory)
		f.escape(rm.EscDupObject, o)
		return rm.U32(o, rm.DupStatus) == rm.StatusOK
	}
	export := func(f *fakeCall, _ uint32) bool {
		fd, _ := exportFile(t)
		o := fakeControlCall(fakeClient, 0x3d0b, exportCall(fd, 0, fakeMemory))
		return f.escape(rm.EscControl, o, exportCall(fd, 0, fakeMemory)) == replyDone && rm.U32(o, rm.ControlStatus) == rm.StatusOK
	}
	for name, more := range map[string]func(*fakeCall, uint32) bool{"handles": duplicate, "files": export} {
		g := withClient(newFakeGuard(t, &fakeDriver{}))
		f := newFakeCall(t, g, fakeControl)
		n := uint32(0)
		for more(f, n) && n < 300 {
			n++
		}
		if n+1 != maxReferences { // the memory's own handle
			t.Errorf("%s: %d", name, n)
		}
		if name == "handles" {
			if f.escape(rm.EscFree, fakeFree(0x5d000000)); !more(f, 0) {
				t.Error("none comes back")
			}
		}
	}
}

// TestPinned: the lists of the pages that the driver pins for a container are charged, as often as they are pinned.
func TestPinned(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	f := newFakeCall(t, g, fakeControl)
	pin := func(handle uint32, size uint64, flags uint32) reply {
		o := make([]byte, 56)
		putWords(o, 0, fakeClient, fakeDevice, handle, classOSDescriptor, flags)
		rm.PutU64(o, rm.AllocMemoryLimit, size-1)
		return f.escape(rm.EscAllocMemory, o)
	}
	if !pin(0x5d000000, 1<<30, 0).resume || g.account.hostUsed != 8<<20 {
		t.Errorf("a GiB costs %v", g.account.hostUsed)
	}
	if !pin(0x5d000000, 1<<30, 0).resume || g.account.hostUsed != 8<<20 {
		t.Errorf("the call came again, and costs %v", g.account.hostUsed)
	}
	if pin(0x5d000001, 4096, rm.AllocMemoryRegister).resume || pin(0, 4096, 0).resume {
		t.Error("a list of pages for firmware, and a handle that the guard does not learn, are let through")
	}
	if pin(0x5d000001, 1<<62, 0).resume {
		t.Error("more pages than there is memory for")
	}
	f.escape(rm.EscFree, fakeFree(0x5d000000))
	if g.account.hostUsed != 0 {
		t.Errorf("%v are left", g.account.hostUsed)
	}
}

// TestUnseenByDriver: some of what a caller may say in an allocation the driver is not told.
func TestUnseenByDriver(t *testing.T) {
	var seen []byte
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
		seen = bytes.Clone(call.Outer)
		if len(call.Blocks) > 0 {
			seen = bytes.Clone(call.Blocks[0].Data)
		}
	})))
	f := newFakeCall(t, g, fakeControl)
	memory := make([]byte, 128)
	rm.PutU64(memory, rm.MemorySize, 2<<20)
	rm.PutU32(memory, rm.MemoryAttr2, rm.MemoryAttr2Register|1)
	peer, session := make([]byte, 72), make([]byte, 20)
	putWords(peer, 0, 1, 2, 1<<31, 1<<31, 5, 5, 5, 1, 1<<31, 1<<31)
	putWords(session, 0, 1, 2, 3, 1, fakeMemory)
	for _, tt := range []struct {
		class, parent uint32
		params        []byte
		at            []int // of words that are to be 0
	}{
		{classSystem, fakeDevice, memory, nil},
		{classVidmem, fakeDevice, memory, nil},
		{0x503b, fakeClient, peer, []int{8, 12, 16, 20, 24, 32, 36}},
		{0xa0bc, fakeDevice, session, []int{12, 16}},
	} {
		p := append([]byte(nil), tt.params...)
		f.escape(rm.EscAlloc, fakeAlloc(tt.parent, 0x5d000000+tt.class, tt.class, p), p)
		if tt.at == nil && rm.U32(seen, rm.MemoryAttr2) != 1 {
			t.Errorf("class %#x: the driver sees attr2 %#x", tt.class, rm.U32(seen, rm.MemoryAttr2))
		}
		for _, at := range tt.at {
			if rm.U32(seen, at) != 0 {
				t.Errorf("class %#x: the driver sees %#x at %d", tt.class, rm.U32(seen, at), at)
			}
		}
	}
	o := make([]byte, 168)
	putWords(o, 0, fakeClient, fakeDevice, rm.HeapFnAllocSize)
	rm.PutU64(o, rm.HeapAllocSize, 4096)
	rm.PutU32(o, rm.HeapAllocAttr2, rm.MemoryAttr2Register)
	f.escape(rm.EscVidHeapControl, o)
	if rm.U32(seen, rm.HeapAllocAttr2)&rm.MemoryAttr2Register != 0 {
		t.Error("by the heap call the driver is told to register the memory with firmware")
	}
}
