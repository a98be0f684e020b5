// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// answering makes a driver that answers every call with a status, after f has seen it.
func answering(status uint32, f func(call *rm.Call)) *fakeDriver {
	return &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		if f != nil {
			f(call)
		}
		switch call.NR() {
		case rm.EscAlloc:
			rm.PutU32(call.Outer, 40, status)
		case rm.EscControl:
			rm.PutU32(call.Outer, rm.ControlStatus, status)
		case rm.EscFree:
			rm.PutU32(call.Outer, rm.FreeStatus, status)
		case rm.EscVidHeapControl:
			rm.PutU32(call.Outer, rm.HeapStatus, status)
		}
		return 0
	}}
}

// TestAllocSizes: what is reserved, what is charged in the end, and what a refusal leaves.
func TestAllocSizes(t *testing.T) {
	for _, c := range []struct {
		name    string
		size    uint64
		granted uint64 // what the driver writes back
		attr    uint32
		status  uint32
		want    quota.Bytes // charged
		refused bool        // without asking the driver
	}{
		{"small pages", 70 << 10, 128 << 10, 2 << rm.MemoryAttrPageShift, 0, 128 * quota.KiB, false},
		{"an odd answer is rounded up", 70 << 10, 70 << 10, 2 << rm.MemoryAttrPageShift, 0, 128 * quota.KiB, false},
		{"huge pages", 3 << 20, 3 << 20, 3 << rm.MemoryAttrPageShift, 0, 4 * quota.MiB, false},
		{"the driver has none", 3 << 20, 3 << 20, 0, rm.StatusNoMemory, 0, false},
		{"all that is left", uint64(testLimit) - 8<<20, uint64(testLimit) - 8<<20, 3 << rm.MemoryAttrPageShift, 0,
			testLimit - 8*quota.MiB, false},
		{"a byte more", uint64(testLimit) - 8<<20 + 1, 0, 0, 0, 0, true},
		{"2⁶⁴ − 1", ^uint64(0), 0, 0, 0, 0, true},
		{"2⁶⁴ less a page", ^uint64(0) - 2<<20 + 1, 0, 0, 0, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := answering(c.status, func(call *rm.Call) {
				if call.NR() != rm.EscAlloc {
					return
				}
				p := call.Blocks[0].Data
				rm.PutU32(p, rm.MemoryOwner, 1)
				rm.PutU64(p, rm.MemorySize, c.granted)
				rm.PutU32(p, rm.MemoryAttr, c.attr)
			})
			g := withClient(newFakeGuard(t, d))
			f := newFakeCall(t, g, fakeControl)
			p := make([]byte, 128)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, c.size)
			o := fakeAlloc(fakeDevice, 0x77, classVidmem, p)
			if rep := f.escape(rm.EscAlloc, o, p); rep != replyDone {
				t.Fatal(rep)
			}
			if asked := len(d.calls) > 0; asked == c.refused {
				t.Errorf("the driver was asked: %v", asked)
			}
			wantStatus := c.status
			if c.refused {
				wantStatus = rm.StatusNoMemory
			}
			if s := rm.U32(o, 40); s != wantStatus {
				t.Errorf("status %s", rm.StatusName(s))
			}
			wantUsage(t, g.account, 0, 8*quota.MiB+c.want)
			if f.undo != nil {
				f.undo()
				wantUsage(t, g.account, 0, 8*quota.MiB)
			}
		})
	}
}

// TestDeniedAllocs never reach the driver.
func TestDeniedAllocs(t *testing.T) {
	for _, c := range []struct {
		name   string
		class  uint32
		change func(o, p []byte)
		status uint32
	}{
		{"all of video memory", 0xc2, nil, rm.StatusNotSupported},
		{"deferred API", 0x5080, nil, rm.StatusNotSupported},
		{"event buffer", 0x90cd, nil, rm.StatusNotSupported},
		{"multicast", 0xfd, nil, rm.StatusNotSupported},
		{"multicast", 0xfd, nil, rm.StatusNotSupported},
		{"the caller's pages", 0x71, nil, rm.StatusNotSupported},
		{"unknown", 0xdead, nil, rm.StatusNotSupported},
		{"another container's client", classVidmem, func(o, _ []byte) { rm.PutU32(o, rm.AllocRoot, 0xc1d00000) }, rm.StatusInvalidClient},
		{"another container's client in an event", 0x79, func(_, p []byte) { rm.PutU32(p, rm.EventParentClient, 0xc1d00000) },
			rm.StatusInvalidClient},
		{"serialised parameters", classVidmem, func(o, _ []byte) { rm.PutU32(o, 36, 1) }, rm.StatusInvalidArgument},
		{"a size of the caller's own", classVidmem, func(o, _ []byte) { rm.PutU32(o, 32, 64) }, rm.StatusInvalidArgument},
		{"memory without parameters", classVidmem, func(o, _ []byte) { rm.PutU64(o, rm.AllocParams, 0) }, rm.StatusInvalidArgument},
		{"memory below nothing", classVidmem, func(o, _ []byte) { rm.PutU32(o, rm.AllocParent, 0x1234) }, rm.StatusInvalidObjectParent},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := answering(0, nil)
			g := withClient(newFakeGuard(t, d))
			p := make([]byte, 512)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, 1<<20)
			o := fakeAlloc(fakeDevice, 0, c.class, p)
			if c.change != nil {
				c.change(o, p)
			}
			rep := newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o, p)
			if s := rm.U32(o, 40); rep != replyDone || s != c.status || len(d.calls) != 0 {
				t.Errorf("%+v, status %s, %d driver calls; want %s and none", rep, rm.StatusName(s), len(d.calls), rm.StatusName(c.status))
			}
			wantUsage(t, g.account, 0, 8*quota.MiB)
		})
	}
}

// TestForeignDup: both clients must be the container's, whatever the driver would say.
func TestForeignDup(t *testing.T) {
	for _, c := range []struct{ dst, src, status uint32 }{
		{fakeClient, fakeClient, 0}, {fakeClient, 0xc1d00000, rm.StatusInvalidClient}, {0xc1d00000, fakeClient, rm.StatusInvalidClient}} {
		d := &fakeDriver{}
		g := withClient(newFakeGuard(t, d))
		o := make([]byte, rm.DupSize)
		rm.PutU32(o, rm.DupClient, c.dst)
		rm.PutU32(o, rm.DupParent, fakeDevice)
		rm.PutU32(o, rm.DupObject, 0x77)
		rm.PutU32(o, rm.DupClientSrc, c.src)
		rm.PutU32(o, rm.DupObjectSrc, fakeMemory)
		newFakeCall(t, g, fakeControl).escape(rm.EscDupObject, o)
		if s := rm.U32(o, rm.DupStatus); s != c.status || (len(d.calls) > 0) != (c.status == 0) {
			t.Errorf("%#x from %#x: %s, %d driver calls", c.dst, c.src, rm.StatusName(s), len(d.calls))
		}
		wantUsage(t, g.account, 0, 8*quota.MiB)
	}
}

// TestPrivilegedChannel: the flag that would let a channel address all of the memory is taken out.
func TestPrivilegedChannel(t *testing.T) {
	var flags uint32
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscAlloc && rm.U32(call.Outer, rm.AllocClass) == 0xc86f {
			flags = rm.U32(call.Blocks[0].Data, rm.ChannelFlags)
		}
	})))
	const group = 0x5c000015
	g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
	p := make([]byte, 368)
	rm.PutU32(p, rm.ChannelFlags, rm.ChannelFlagPrivileged|1)
	newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, fakeAlloc(group, 0, 0xc86f, p), p)
	if flags != 1 {
		t.Errorf("flags %#x", flags)
	}
}

// TestCounts bounds channel groups and channels.
func TestCounts(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, nil)))
	g.cfg.Settings.MaxTSGs = 2
	f := newFakeCall(t, g, fakeControl)
	for i, want := range []uint32{0, 0, rm.StatusInsufficientResources} {
		p := make([]byte, 20)
		o := fakeAlloc(fakeDevice, uint32(100+i), 0xa06c, p)
		f.escape(rm.EscAlloc, o, p)
		if s := rm.U32(o, 40); s != want {
			t.Errorf("group %d: %s", i, rm.StatusName(s))
		}
	}
	f.escape(rm.EscFree, fakeFree(100))
	o := fakeAlloc(fakeDevice, 103, 0xa06c, nil)
	if f.escape(rm.EscAlloc, o); rm.U32(o, 40) != 0 {
		t.Error("a freed group still counts")
	}
}
