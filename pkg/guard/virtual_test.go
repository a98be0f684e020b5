// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

const (
	fakeRange   = 0x5c000010
	fakeVASpace = 0x5c000011
	virtualFlag = rm.MemoryFlagVirtual
)

func virtualParams(size uint64, flags, attr, attr2 uint32) []byte {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryFlags, virtualFlag|flags)
	rm.PutU32(p, rm.MemoryAttr, attr)
	rm.PutU32(p, rm.MemoryAttr2, attr2)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, size)
	return p
}

// TestVirtual: what a range of addresses is charged, by RM_ALLOC and by the heap call, and that its end gives it back.
func TestVirtual(t *testing.T) {
	const small, huge = 1 << rm.MemoryAttrPageShift, 3 << rm.MemoryAttrPageShift
	pool := func(size uint64, any bool) quota.Bytes { return quota.Bytes(rm.PagePool(size, any)) }
	for _, c := range []struct {
		name               string
		size               uint64
		flags, attr, attr2 uint32
		want               quota.Bytes
		refused            bool
	}{
		{"a small one", 2 << 20, 0, small, 0, 64 * quota.KiB, false},
		{"1 GiB", 1 << 30, 0, small, 0, pool(1<<30, false), false},
		{"for pages of any size", 1 << 30, 0, 0, 0, pool(1<<30, true), false},
		{"the largest", 64 << 30, 0, small, 0, pool(64<<30, false), false},
		{"larger", 64<<30 + 1, 0, small, 0, 0, true},
		{"1 TiB", 1 << 40, 0, small, 0, 0, true},
		{"2⁶⁴ − 1", ^uint64(0), 0, small, 0, 0, true},
		{"1 TiB, lazy", 1 << 40, rm.MemoryFlagLazy, small, 0, 0, false},
		{"1 TiB, managed elsewhere", 1 << 40, rm.MemoryFlagExternal, small, 0, 0, false},
		{"1 TiB, lazy and sparse", 1 << 40, rm.MemoryFlagLazy | rm.MemoryFlagSparse, small, 0, 0, true},
		{"1 GiB, managed elsewhere and sparse", 1 << 30, rm.MemoryFlagExternal | rm.MemoryFlagSparse, small, 0, pool(1<<30, false), false},
		{"a byte in pages of 512 MiB", 1, 0, huge, 2 << 20, pool(512<<20, false), false},
		{"a byte in pages of 256 GiB", 1, 0, huge, 3 << 20, 0, true},
	} {
		for _, heap := range []bool{false, true} {
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
				if call.NR() == rm.EscVidHeapControl && rm.U32(call.Outer, rm.HeapAllocMemory) == 0 {
					rm.PutU32(call.Outer, rm.HeapAllocMemory, fakeRange)
				}
				return 0
			}}
			g := withClient(newFakeGuard(t, d))
			f := newFakeCall(t, g, fakeControl)
			var status uint32
			if heap {
				o := make([]byte, rm.HeapSize)
				rm.PutU32(o, rm.HeapRoot, fakeClient)
				rm.PutU32(o, rm.HeapParent, fakeDevice)
				rm.PutU32(o, rm.HeapFunction, rm.HeapFnAllocSize)
				rm.PutU32(o, rm.HeapAllocFlags, virtualFlag|c.flags)
				rm.PutU32(o, rm.HeapAllocAttr, c.attr)
				rm.PutU32(o, rm.HeapAllocAttr2, c.attr2)
				rm.PutU64(o, rm.HeapAllocSize, c.size)
				f.escape(rm.EscVidHeapControl, o)
				status = rm.U32(o, rm.HeapStatus)
			} else {
				p := virtualParams(c.size, c.flags, c.attr, c.attr2)
				o := fakeAlloc(fakeDevice, fakeRange, classVirtual, p)
				f.escape(rm.EscAlloc, o, p)
				status = rm.U32(o, 40)
			}
			if refused := len(d.calls) == 0; refused != c.refused || refused && status != rm.StatusNoMemory || !refused && status != rm.StatusOK {
				t.Errorf("%s, heap %v: refused %v, %s", c.name, heap, refused, rm.StatusName(status))
			}
			wantUsage(t, g.account, 0, 8*quota.MiB+c.want)
			f.escape(rm.EscFree, fakeFree(fakeRange))
			wantUsage(t, g.account, 0, 8*quota.MiB)
		}
	}
}

// TestVirtualLimit: tables count against the limit, and pass it by a constant at most.
func TestVirtualLimit(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, nil)))
	f := newFakeCall(t, g, fakeControl)
	for i := range uint32(1000) {
		p := virtualParams(32<<30, 0, 1<<rm.MemoryAttrPageShift, 0)
		o := fakeAlloc(fakeDevice, fakeRange+i, classVirtual, p)
		g.slowBucket.tokens = 1
		f.escape(rm.EscAlloc, o, p)
		if rm.U32(o, 40) != rm.StatusOK {
			break
		}
	}
	if used := g.account.usage(0).used; used > testLimit+tableSlack || used < testLimit-64*quota.MiB {
		t.Errorf("%v of a limit of %v", used, testLimit)
	}
}

// TestDupOfVASpace: a second handle on an address space keeps it alive, and is an object of the firmware's: it counts as one.
func TestDupOfVASpace(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	g.cfg.Settings.MaxTSGs = 1
	a := g.account
	used, firmware := a.usage(0).used, a.usage(0).firmware
	space := object{handle: fakeVASpace, parent: fakeDevice, class: 0x90f1, kind: rm.ClassVASpace, gpu: noGPU}
	a.addObject(fakeClient, space, 0, 0, vaSpaceSize)
	n := uint32(1)
	for ; n < 100; n++ {
		o := make([]byte, rm.DupSize)
		putWords(o, 0, fakeClient, fakeDevice, fakeVASpace+n, fakeClient, fakeVASpace+n-1)
		if newFakeCall(t, g, fakeControl).escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != rm.StatusOK {
			break
		}
	}
	if n != vaSpacesPerTSG || a.usage(0).firmware-firmware != vaSpacesPerTSG {
		t.Errorf("%d handles, %d objects of the firmware's; want %d", n, a.usage(0).firmware-firmware, vaSpacesPerTSG)
	}
	for h := range n {
		wantUsage(t, a, 0, used+vaSpaceSize)
		a.freeObject(fakeClient, fakeVASpace+h)
	}
	wantUsage(t, a, 0, used)
	if a.usage(0).vaSpaces != 0 || a.usage(0).firmware != firmware {
		t.Errorf("%d address spaces left", a.usage(0).vaSpaces)
	}
}

// TestDeviceSpace: a device has an address space of its own, whatever it says, with no tables on the host, and its maker is not told.
func TestDeviceSpace(t *testing.T) {
	const other = fakeClient + 1 // of this container too
	for _, x := range []struct {
		name   string
		share  uint32
		none   bool // no parameters
		status uint32
	}{
		{"all who have none", 0, false, rm.StatusOK},
		{"its own", fakeClient, false, rm.StatusOK},
		{"another of the container's", other, false, rm.StatusOK},
		{"another container's", 0xc1d00001, false, rm.StatusInvalidClient},
		{"no parameters", 0, true, rm.StatusInvalidArgument},
	} {
		var seen, flags uint32
		d := answering(0, func(call *rm.Call) {
			seen, flags = rm.U32(call.Blocks[0].Data, rm.DeviceClientShare), rm.U32(call.Blocks[0].Data, rm.DeviceFlags)
		})
		g := withClient(newFakeGuard(t, d))
		g.account.addClient(other, os.Getpid(), nil)
		g.instances[0] = 0
		p := make([]byte, 56)
		rm.PutU32(p, rm.DeviceClientShare, x.share)
		rm.PutU32(p, rm.DeviceFlags, rm.DeviceFlagRetryHost|1<<3)
		o := fakeAlloc(fakeClient, 0x77, rmclient.ClassDevice, p)
		if x.none {
			rm.PutU64(o, rm.AllocParams, 0)
		}
		f := newFakeCall(t, g, fakeControl)
		f.escape(rm.EscAlloc, o, p)
		if s := rm.U32(o, 40); s != x.status || len(d.calls) > 0 && (s != rm.StatusOK || seen != fakeClient || flags != 1<<3) {
			t.Errorf("%s: %s, %d driver calls, the last with %#x, flags %#x", x.name, rm.StatusName(s), len(d.calls), seen, flags)
		}
		if got := rm.U32(p, rm.DeviceClientShare); got != x.share || rm.U32(p, rm.DeviceFlags) != rm.DeviceFlagRetryHost|1<<3 {
			t.Errorf("%s: the task is told %#x, flags %#x", x.name, got, rm.U32(p, rm.DeviceFlags))
		}
	}
}

// TestSharedSpaces: those address spaces of a GPU's that all its users share are nobody's to have.
func TestSharedSpaces(t *testing.T) {
	for _, x := range []struct {
		index, flags uint32
		refused      bool
	}{{rm.VASpaceNew, 0, false}, {rm.VASpaceDevice, 0, false}, {rm.VASpaceNew, rm.VASpaceFlagFLA, true}, {1, 0, true},
		{rm.VASpaceGlobal, 0, true}, {4, 0, true}, {5, 0, true}, {^uint32(0), 0, true}} {
		d := answering(0, nil)
		g := withClient(newFakeGuard(t, d))
		p := make([]byte, 56)
		rm.PutU32(p, rm.VASpaceIndex, x.index)
		rm.PutU32(p, rm.VASpaceFlags, x.flags)
		o := fakeAlloc(fakeDevice, fakeVASpace, 0x90f1, p)
		newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o, p)
		if refused := rm.U32(o, 40) == rm.StatusNotSupported; refused != x.refused || refused != (len(d.calls) == 0) {
			t.Errorf("%+v: %s, %d driver calls", x, rm.StatusName(rm.U32(o, 40)), len(d.calls))
		}
	}
}

// TestVASpaces: each is charged, there are only so many, and none has its tables on the host or in what the driver keeps for itself.
func TestVASpaces(t *testing.T) {
	var flags uint32
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscAlloc {
			flags |= rm.U32(call.Blocks[0].Data, rm.VASpaceFlags)
		}
	})))
	g.cfg.Settings.MaxTSGs = 2
	f := newFakeCall(t, g, fakeControl)
	n := uint32(0)
	for ; n < 100; n++ {
		p := make([]byte, 56)
		rm.PutU32(p, rm.VASpaceFlags, rm.VASpaceFlagRetryHost|rm.VASpaceFlagHeapManaged|1<<3)
		o := fakeAlloc(fakeDevice, fakeVASpace+n, 0x90f1, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
			break
		}
	}
	if n != 2*vaSpacesPerTSG || flags != 1<<3 {
		t.Errorf("%d address spaces, flags %#x", n, flags)
	}
	wantUsage(t, g.account, 0, 8*quota.MiB+quota.Bytes(n)*vaSpaceSize)
	f.escape(rm.EscFree, fakeFree(fakeDevice))
	wantUsage(t, g.account, 0, 0)
}

// TestRangesArePaid: a range that has its tables at once holds the driver's locks when it is made and when it is freed, for longer the
// larger it is. Many smaller ones are paid for as one that is as large.
func TestRangesArePaid(t *testing.T) {
	for _, x := range []struct {
		size  uint64
		flags uint32
		want  time.Duration
	}{{64 << 30, 0, 1100 * time.Millisecond}, {512 << 20, 0, 8 * time.Millisecond}, {512 << 20, rm.MemoryFlagLazy, 0}, {2 << 20, 0, 0}} {
		g := withClient(newFakeGuard(t, answering(0, nil)))
		g.slowBucket = bucket{perSecond: 1e-9, burst: 3}
		p := virtualParams(x.size, x.flags, 1<<rm.MemoryAttrPageShift, 0)
		o := fakeAlloc(fakeDevice, fakeRange, classVirtual, p)
		if newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
			t.Fatalf("%d: %s", x.size, rm.StatusName(rm.U32(o, 40)))
		}
		paid := time.Duration(0)
		if !g.slowBucket.last.IsZero() {
			paid = time.Duration((3 - g.slowBucket.tokens) * float64(time.Second))
		}
		if paid < x.want || paid > x.want+x.want/10 {
			t.Errorf("%d MiB, flags %#x: %v is paid, want %v", x.size>>20, x.flags, paid, x.want)
		}
	}
}
