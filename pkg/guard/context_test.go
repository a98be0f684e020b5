// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestContextCost: whatever way leads to a context on the graphics engine, it is charged once.
func TestContextCost(t *testing.T) {
	const group, channel, engine, second = 0x100, 0x101, 0x102, 0x103
	type step struct {
		parent, handle, class uint32
		engineType            uint32 // of a group
	}
	for _, c := range []struct {
		name  string
		steps []step
		freed uint32 // which gives it back
		costs int
	}{
		{"as CUDA does", []step{{fakeDevice, group, 0xa06c, 1}, {group, channel, 0xc86f, 0}, {channel, engine, 0xcbc0, 0}}, group, 1},
		{"a group that names no engine", []step{{fakeDevice, group, 0xa06c, 0}, {group, channel, 0xc86f, 0}, {channel, engine, 0xcbc0, 0}},
			group, 1},
		{"a group that says copies", []step{{fakeDevice, group, 0xa06c, 9}, {group, channel, 0xc86f, 0}, {channel, engine, 0xcbc0, 0}}, group, 1},
		{"copies", []step{{fakeDevice, group, 0xa06c, 9}, {group, channel, 0xc86f, 0}, {channel, engine, 0xc8b5, 0}}, group, 0},
		{"two objects", []step{{fakeDevice, group, 0xa06c, 9}, {group, channel, 0xc86f, 0}, {channel, engine, 0xcbc0, 0},
			{channel, second, 0xa140, 0}}, group, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := withClient(newFakeGuard(t, answering(0, nil)))
			g.cfg.Settings.ContextOverhead = 13 * quota.MiB
			g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels = 8, 8
			f := newFakeCall(t, g, fakeControl)
			base := g.account.usage(0).used
			for _, s := range c.steps {
				p := make([]byte, 368)
				rm.PutU32(p, rm.TSGEngineType, s.engineType)
				o := fakeAlloc(s.parent, s.handle, s.class, p)
				if rep := f.escape(rm.EscAlloc, o, p); rep != replyDone || rm.U32(o, 40) != rm.StatusOK {
					t.Fatalf("%#x: %v %s", s.class, rep, rm.StatusName(rm.U32(o, 40)))
				}
			}
			wantUsage(t, g.account, 0, base+quota.Bytes(c.costs)*13*quota.MiB)
			f.escape(rm.EscFree, fakeFree(engine))
			wantUsage(t, g.account, 0, base+quota.Bytes(c.costs)*13*quota.MiB)
			f.escape(rm.EscFree, fakeFree(c.freed))
			wantUsage(t, g.account, 0, base)
		})
	}
	t.Run("no room", func(t *testing.T) {
		d := answering(0, nil)
		g := withClient(newFakeGuard(t, d))
		g.cfg.Settings.ContextOverhead = testLimit
		g.cfg.Settings.MaxChannels = 8
		f := newFakeCall(t, g, fakeControl)
		p := make([]byte, 368)
		rm.PutU32(p, rm.TSGEngineType, 9)
		g.cfg.Settings.MaxTSGs = 8
		f.escape(rm.EscAlloc, fakeAlloc(fakeDevice, group, 0xa06c, p), p)
		f.escape(rm.EscAlloc, fakeAlloc(group, channel, 0xc86f, p), p)
		g.contextMemory(0) // asks for sizes, once
		asked := len(d.calls)
		o := fakeAlloc(channel, engine, 0xcbc0, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusNoMemory || len(d.calls) != asked {
			t.Errorf("status %s", rm.StatusName(rm.U32(o, 40)))
		}
		wantUsage(t, g.account, 0, 8*quota.MiB)
	})
}

// TestLoneChannel: what runs on the graphics engine is in a group, or it would have a timeslice that nobody can set.
func TestLoneChannel(t *testing.T) {
	const channel = 0x101
	for engineType, want := range map[uint32]uint32{0: rm.StatusNotSupported, 1: rm.StatusNotSupported,
		8: rm.StatusNotSupported, 9: rm.StatusOK} {
		g := withClient(newFakeGuard(t, answering(0, nil)))
		f := newFakeCall(t, g, fakeControl)
		p := make([]byte, 368)
		rm.PutU32(p, rm.ChannelEngineType, engineType)
		o := fakeAlloc(fakeDevice, channel, 0xc86f, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != want {
			t.Errorf("engine %d: %s", engineType, rm.StatusName(rm.U32(o, 40)))
		}
		if want != rm.StatusOK {
			continue
		}
		o = fakeAlloc(channel, 0x102, 0xcbc0, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusNotSupported {
			t.Errorf("a compute object on a copy channel: %s", rm.StatusName(rm.U32(o, 40)))
		}
	}
}

// TestLargePages: the driver rounds up to pages of 512 MiB, which may be more than the limit allows.
func TestLargePages(t *testing.T) {
	freed := 0
	d := answering(0, func(call *rm.Call) {
		switch call.NR() {
		case rm.EscAlloc:
			rm.PutU64(call.Blocks[0].Data, rm.MemorySize, uint64(testLimit))
		case rm.EscVidHeapControl:
			rm.PutU64(call.Outer, rm.HeapAllocSize, uint64(testLimit))
		case rm.EscFree:
			freed++
		}
	})
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 4096)
	o := fakeAlloc(fakeDevice, 0x77, classVidmem, p)
	f.escape(rm.EscAlloc, o, p)
	if s := rm.U32(o, 40); s != rm.StatusNoMemory || rm.U64(p, rm.MemorySize) != 4096 || freed != 1 {
		t.Errorf("status %s, size %d, %d freed", rm.StatusName(s), rm.U64(p, rm.MemorySize), freed)
	}
	wantUsage(t, g.account, 0, 8*quota.MiB)

	h := make([]byte, rm.HeapSize)
	rm.PutU32(h, rm.HeapRoot, fakeClient)
	rm.PutU32(h, rm.HeapParent, fakeDevice)
	rm.PutU32(h, rm.HeapFunction, rm.HeapFnAllocSize)
	rm.PutU32(h, rm.HeapAllocMemory, 0x78)
	rm.PutU64(h, rm.HeapAllocSize, 4096)
	f.escape(rm.EscVidHeapControl, h)
	if s := rm.U32(h, rm.HeapStatus); s != rm.StatusNoMemory || rm.U64(h, rm.HeapAllocSize) != 4096 || freed != 2 {
		t.Errorf("heap: status %s, size %d, %d freed", rm.StatusName(s), rm.U64(h, rm.HeapAllocSize), freed)
	}
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

// TestFixedAddress: at a physical address the driver takes as much as the alignment, and says nothing of it.
func TestFixedAddress(t *testing.T) {
	d := answering(0, nil)
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 4096)
	rm.PutU32(p, rm.MemoryFlags, 0x10)
	o := fakeAlloc(fakeDevice, 0x77, classVidmem, p)
	if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusInvalidArgument || len(d.calls) > 0 {
		t.Errorf("status %s", rm.StatusName(rm.U32(o, 40)))
	}
	o = fakeAlloc(fakeDevice, 0x77, 0x50a0, p) // an address space has addresses
	if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
		t.Errorf("0x50a0: status %s", rm.StatusName(rm.U32(o, 40)))
	}
}
