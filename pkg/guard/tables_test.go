package guard

import (
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

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
		{"another of the container's", other, false, rm.StatusInvalidClient},
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

// mapDMA is RM_MAP_MEMORY_DMA of the driver that tests have; address is where the driver puts it.
func mapDMA(client, mapper, memory uint32, offset, length uint64) []byte {
	o := make([]byte, 64)
	rm.PutU32(o, rm.DMAClient, client)
	rm.PutU32(o, rm.DMADevice, fakeDevice)
	rm.PutU32(o, rm.DMAMapper, mapper)
	rm.PutU32(o, rm.DMAMemory, memory)
	rm.PutU64(o, rm.DMAMapOffset, offset)
	rm.PutU64(o, rm.DMAMapLength, length)
	return o
}

func unmapDMA(mapper uint32, address, length uint64) []byte {
	o := make([]byte, 48)
	rm.PutU32(o, rm.DMAClient, fakeClient)
	rm.PutU32(o, rm.DMADevice, fakeDevice)
	rm.PutU32(o, rm.DMAMapper, mapper)
	rm.PutU64(o, 24, address)
	rm.PutU64(o, 32, length)
	return o
}

// dmaGuard has a lazy range, and memory of 8 MiB that the driver maps at dmaBase.
const dmaBase = 1 << 40

func dmaGuard(t *testing.T) (*Guard, *fakeDriver, *fakeCall) {
	d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscMapDMA {
			rm.PutU64(call.Outer, 48, dmaBase)
		}
		return 0
	}}
	g := withClient(newFakeGuard(t, d))
	g.account.addObject(fakeClient, object{handle: fakeRange, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU},
		noGPU, 0, 0)
	o := g.account.clients[fakeClient].objects[fakeMemory]
	o.size = 8 * quota.MiB
	return g, d, newFakeCall(t, g, fakeControl)
}

// TestMapDMALength: what is longer than its memory never reaches the driver, which would take page tables for it.
func TestMapDMALength(t *testing.T) {
	for _, c := range []struct {
		name                   string
		client, mapper, memory uint32
		offset, length         uint64
		status                 uint32
	}{
		{"all of it", fakeClient, fakeRange, fakeMemory, 0, 8 << 20, 0},
		{"a part", fakeClient, fakeRange, fakeMemory, 4 << 20, 4 << 20, 0},
		{"a byte more", fakeClient, fakeRange, fakeMemory, 0, 8<<20 + 1, rm.StatusInvalidLimit},
		{"beyond the end", fakeClient, fakeRange, fakeMemory, 8 << 20, 4096, rm.StatusInvalidLimit},
		{"1 TiB", fakeClient, fakeRange, fakeMemory, 0, 1 << 40, rm.StatusInvalidLimit},
		{"wraps around", fakeClient, fakeRange, fakeMemory, 4096, ^uint64(0) - 4095, rm.StatusInvalidLimit},
		{"of the task's own making", fakeClient, fakeRange, 0x77, 0, 64 << 20, 0},
		{"of the task's own making, too long", fakeClient, fakeRange, 0x77, 0, 64<<30 + 1, rm.StatusInvalidLimit},
		{"into nothing", fakeClient, 0x99, fakeMemory, 0, 4096, rm.StatusInvalidObjectHandle},
		{"another container's client", 0xc1d00000, fakeRange, fakeMemory, 0, 4096, rm.StatusInvalidClient},
	} {
		g, d, f := dmaGuard(t)
		g.slowBucket = slowCalls()
		o := mapDMA(c.client, c.mapper, c.memory, c.offset, c.length)
		f.escape(rm.EscMapDMA, o)
		if s := rm.U32(o, 56); s != c.status || (len(d.calls) == 0) != (c.status != 0) {
			t.Errorf("%s: %s, %d driver calls", c.name, rm.StatusName(s), len(d.calls))
		}
		want := 8 * quota.MiB
		if c.status == 0 {
			want += quota.Bytes(rm.PageTables(c.length, false))
		}
		wantUsage(t, g.account, 0, want)
	}
	_, d, f := dmaGuard(t)
	if rep := f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, 4096)[:56]); rep.errno != unix.EINVAL || len(d.calls) != 0 {
		t.Errorf("another driver's size: %+v", rep)
	}
}

// TestMapDMAEnds: the tables' charge ends with the mapping, the memory, the range, the device or the client, and with a refusal.
func TestMapDMAEnds(t *testing.T) {
	const length = 4 << 20
	tables := quota.Bytes(rm.PageTables(length, false))
	for name, end := range map[string]func(f *fakeCall) quota.Bytes{
		"unmapped": func(f *fakeCall) quota.Bytes {
			f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase, 0))
			return 8 * quota.MiB
		},
		"elsewhere": func(f *fakeCall) quota.Bytes {
			f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase+4096, 0))
			return 8*quota.MiB + tables
		},
		"memory freed": func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeMemory)); return 0 },
		"range freed":  func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeRange)); return 8 * quota.MiB },
		"device freed": func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeDevice)); return 0 },
		"client freed": func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeClient)); return 0 },
		"taken back":   func(f *fakeCall) quota.Bytes { f.undo(); return 8 * quota.MiB },
	} {
		g, _, f := dmaGuard(t)
		f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
		wantUsage(t, g.account, 0, 8*quota.MiB+tables)
		want := end(f)
		if used := g.account.usage(0).used; used != want {
			t.Errorf("%s: %v charged, want %v", name, used, want)
		}
		if n := g.account.dmaMaps; (n == 0) == (name == "elsewhere") {
			t.Errorf("%s: %d mappings remembered", name, n)
		}
	}
	g, d, f := dmaGuard(t)
	d.answer = func(_ Target, call *rm.Call) syscall.Errno { rm.PutU32(call.Outer, 56, rm.StatusNoMemory); return 0 }
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
	wantUsage(t, g.account, 0, 8*quota.MiB)
	// Memory that the guard has not seen made ends the mapping as well.
	g, _, f = dmaGuard(t)
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, 0x77, 0, length))
	wantUsage(t, g.account, 0, 8*quota.MiB+tables)
	f.escape(rm.EscFree, fakeFree(0x77))
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

// TestMapDMACharged: a range that was charged as a whole has its tables.
func TestMapDMACharged(t *testing.T) {
	g, _, f := dmaGuard(t)
	g.account.addObject(fakeClient, object{handle: fakeRange + 1, parent: fakeDevice, kind: rm.ClassVirtual, gpu: noGPU}, 0, 0, 3*quota.MiB)
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange+1, fakeMemory, 0, 4<<20))
	wantUsage(t, g.account, 0, 11*quota.MiB)
	if g.account.dmaMaps != 1 {
		t.Error("the mapping is not counted")
	}
}

// TestUnmapDMAParts: pieces of a mapping end one by one, whatever their order, and the last takes the rest of the charge along.
func TestUnmapDMAParts(t *testing.T) {
	const length, piece = 8 << 20, 1 << 20
	for seed := range uint64(50) {
		g, _, f := dmaGuard(t)
		f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
		before := g.account.usage(0).used
		order := rand.New(rand.NewPCG(seed, 0)).Perm(length / piece)
		for _, i := range order {
			f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase+uint64(i)*piece, piece))
			if now := g.account.usage(0).used; now > before {
				t.Fatalf("seed %d: charged %v after %v", seed, now, before)
			} else {
				before = now
			}
		}
		wantUsage(t, g.account, 0, 8*quota.MiB)
		if g.account.dmaMaps != 0 {
			t.Errorf("seed %d: %d mappings left", seed, g.account.dmaMaps)
		}
	}
	// One that covers several at once, and a piece of nothing.
	g, _, f := dmaGuard(t)
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
	f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase+2*piece, piece))
	f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, 0, 4096))
	f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase-piece, 20*piece))
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

func TestMapDMACount(t *testing.T) {
	g, d, f := dmaGuard(t)
	g.account.dmaMaps = maxDMAMaps
	o := mapDMA(fakeClient, fakeRange, fakeMemory, 0, 4096)
	if f.escape(rm.EscMapDMA, o); rm.U32(o, 56) != rm.StatusInsufficientResources || len(d.calls) != 0 {
		t.Errorf("one too many: %s", rm.StatusName(rm.U32(o, 56)))
	}
}

// TestFirmwareObjects: objects that the GPU's firmware has too are fewer than others.
func TestFirmwareObjects(t *testing.T) {
	g := withTwoGPUs(newFakeGuard(t, answering(0, nil)))
	f := newFakeCall(t, g, fakeControl)
	n := 0
	for ; n < 2*maxFirmware; n++ {
		o := fakeAlloc(fakeDevice, uint32(0x5d000000+n), 0x2081, make([]byte, 4))
		if f.escape(rm.EscAlloc, o); rm.U32(o, 40) != rm.StatusOK {
			break
		}
	}
	if n != maxFirmware-1 { // and the device
		t.Errorf("%d objects", n)
	}
	if o := fakeAlloc(secondDevice, 0x5d000000-2, 0x2081, make([]byte, 4)); f.escape(rm.EscAlloc, o) != replyDone ||
		rm.U32(o, 40) != rm.StatusOK {
		t.Errorf("one of another GPU's firmware: %s", rm.StatusName(rm.U32(o, 40)))
	}
	o := make([]byte, rm.DupSize) // a second handle counts where it is
	putWords(o, 0, fakeClient, fakeDevice, 0x5d000000-3, fakeClient, 0x5d000000-2)
	if f.escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != rm.StatusInsufficientResources {
		t.Errorf("a second handle of it: %s", rm.StatusName(rm.U32(o, rm.DupStatus)))
	}
	f.escape(rm.EscFree, fakeFree(secondDevice))
	p := make([]byte, 128)
	rm.PutU64(p, rm.MemorySize, 4096)
	o = fakeAlloc(fakeDevice, 0x5e000000, classSystem, p)
	if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
		t.Errorf("another object: %s", rm.StatusName(rm.U32(o, 40)))
	}
	f.escape(rm.EscFree, fakeFree(fakeDevice))
	if g.account.usage(0).firmware != 0 || g.account.objects != 0 {
		t.Errorf("%d and %d objects left", g.account.usage(0).firmware, g.account.objects)
	}
}

// osEvent is the structure of ALLOC_OS_EVENT and FREE_OS_EVENT.
func osEvent(client, number uint32) []byte {
	o := make([]byte, rm.OSEventSize)
	rm.PutU32(o, rm.OSEventClient, client)
	rm.PutU32(o, rm.OSEventFD, number)
	return o
}

func TestOSEvents(t *testing.T) {
	d := &fakeDriver{}
	g := withTwoGPUs(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	ask := func(f *fakeCall, nr, client, number uint32) uint32 {
		d.calls = nil
		o := osEvent(client, number)
		f.escape(nr, o)
		return rm.U32(o, rm.OSEventStatus)
	}
	if s := ask(f, rm.EscAllocOSEvent, 0xc1d00000, 3); s != rm.StatusInvalidClient || len(d.calls) != 0 {
		t.Errorf("another container's client: %s, %d driver calls", rm.StatusName(s), len(d.calls))
	}
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 3); s != rm.StatusOK || len(d.calls) != 1 {
		t.Errorf("the first: %s", rm.StatusName(s))
	}
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 3); s != rm.StatusInsufficientResources || len(d.calls) != 0 {
		t.Errorf("a duplicate: %s, %d driver calls; the driver would write a line to the kernel log", rm.StatusName(s), len(d.calls))
	}
	ask(f, rm.EscFreeOSEvent, fakeClient, 3)
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 3); s != rm.StatusOK || g.account.osEvents != 1 {
		t.Errorf("after FREE_OS_EVENT: %s, %d events", rm.StatusName(s), g.account.osEvents)
	}
	f.undo()
	if g.account.osEvents != 0 {
		t.Error("one that nobody was told of stays")
	}
	// An event ends with its file, and the number can be used again.
	other := newFakeCall(t, g, fakeControl)
	ask(other, rm.EscAllocOSEvent, fakeClient, 7)
	unix.Close(other.fd)
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 7); s != rm.StatusOK || g.account.osEvents != 1 {
		t.Errorf("the number of a closed file: %s, %d events", rm.StatusName(s), g.account.osEvents)
	}
	before, most := len(openFDs(t)), uint32(maxEvents*len(g.cfg.GPUs))
	for i := range most + 10 {
		s, want := ask(f, rm.EscAllocOSEvent, fakeClient, 100+i), uint32(rm.StatusOK)
		if i >= most-1 {
			want = rm.StatusInsufficientResources
		}
		if s != want {
			t.Fatalf("event %d: %s", i, rm.StatusName(s))
		}
	}
	f.escape(rm.EscFree, fakeFree(fakeClient))
	if g.account.osEvents != 0 || len(openFDs(t)) > before {
		t.Errorf("after the client's end: %d events, %d descriptors, before %d", g.account.osEvents, len(openFDs(t)), before)
	}
}

func openFDs(t *testing.T) []os.DirEntry {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestDeniedContextDMA: the old calls for context DMA, which nobody uses, never reach the driver.
func TestDeniedContextDMA(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	for nr, size := range map[uint32]int{rm.EscContextDMA: 56, rm.EscBindContextDMA: 16} {
		o := make([]byte, size)
		rm.PutU32(o, 0, fakeClient)
		f.escape(nr, o)
		off, _ := g.abi.StatusOff(nr, size)
		if rm.U32(o, off) != rm.StatusNotSupported || len(d.calls) != 0 {
			t.Errorf("%s: %s, %d driver calls", rm.EscapeName(nr), rm.StatusName(rm.U32(o, off)), len(d.calls))
		}
	}
}

// TestSparse: page tables of sparse UVM mappings are charged until the mapping or its address space ends.
func TestSparse(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	c, _ := newFakeUVMCall(t, g)
	var uuid gpuUUID
	uuid[15] = 1 // GPU-…-000000000001
	sparse := func(base, length uint64) (uint32, []byte) {
		d.calls = nil
		form, _ := g.abi.UVM(rm.UVMMapSparse)
		o := make([]byte, form.Size)
		rm.PutU64(o, form.Base, base)
		rm.PutU64(o, form.Length, length)
		copy(o[uvmSparseGPU:], uuid[:])
		c.do(rm.UVMMapSparse, o)
		return rm.U32(o, form.Status), o
	}
	tables := func(length uint64) quota.Bytes { return quota.Bytes(rm.UVMTables(length, 64<<10)) }
	if s, _ := sparse(1<<40, 1<<40); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	wantUsage(t, g.account, 0, 8*quota.MiB+tables(1<<40))
	for _, length := range []uint64{1<<40 + 1, ^uint64(0)} {
		if s, _ := sparse(1<<41, length); s != rm.StatusInvalidLimit || len(d.calls) != 0 {
			t.Errorf("%#x: %s", length, rm.StatusName(s))
		}
	}
	for base := uint64(2 << 40); ; base += 1 << 40 {
		if s, _ := sparse(base, 1<<40); s != rm.StatusOK {
			if s != rm.StatusNoMemory || len(d.calls) != 0 {
				t.Errorf("full: %s", rm.StatusName(s))
			}
			break
		}
	}
	if used := g.account.usage(0).used; used > testLimit+tableSlack {
		t.Errorf("%v of %v", used, testLimit)
	}
	full := g.account.usage(0).used
	o, _ := uvmCall(g, rm.UVMFree, 2<<40, 1<<40, 0)
	c.do(rm.UVMFree, o)
	wantUsage(t, g.account, 0, full-tables(1<<40))
	d.answer = func(_ Target, call *rm.Call) syscall.Errno {
		if form, ok := g.abi.UVM(call.Cmd); ok && call.Cmd == rm.UVMMapSparse {
			rm.PutU32(call.Outer, form.Status, rm.StatusInvalidAddress)
		}
		return 0
	}
	sparse(2<<40, 1<<40)
	wantUsage(t, g.account, 0, full-tables(1<<40)) // refused, and nothing is charged
	g.endUVM(c.file)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	if g.account.hasZombies() || g.account.zombies != 0 {
		t.Error("zombies")
	}
}

// TestMapTables: mappings of host memory are charged their page tables, those of device memory from the second on.
func TestMapTables(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	c, ctl := newFakeUVMCall(t, g)
	const host, length = 0x5c0000ff, 8 << 20
	do := func(memory uint32, base uint64) {
		t.Helper()
		o, form := uvmCall(g, rm.UVMMapExternal, base, length, ctl)
		rm.PutU32(o, form.Object, memory)
		if c.do(rm.UVMMapExternal, o); rm.U32(o, form.Status) != rm.StatusOK {
			t.Fatal(rm.StatusName(rm.U32(o, form.Status)))
		}
	}
	big, small := quota.Bytes(rm.UVMTables(length, 64<<10)), quota.Bytes(rm.UVMTables(length, 4096))
	do(fakeMemory, 1<<32)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	do(fakeMemory, 2<<32)
	wantUsage(t, g.account, 0, 8*quota.MiB+big)
	do(host, 3<<32)
	wantUsage(t, g.account, 0, 8*quota.MiB+big+small)
	do(host, 3<<32) // in its own place
	wantUsage(t, g.account, 0, 8*quota.MiB+big+small)
	o, _ := uvmCall(g, rm.UVMUnmapExternal, 3<<32, length, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 8*quota.MiB+big)
	g.endUVM(c.file)
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

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
	parent = fakeMemory
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

// TestMapPage: UVM maps what is not aligned in smaller pages, whatever the memory's are.
func TestMapPage(t *testing.T) {
	const big = uint64(pageHuge)
	for _, x := range []struct {
		page                 quota.Bytes
		base, length, offset uint64
		want                 quota.Bytes
	}{
		{pageHuge, 1 << 32, 4 * big, 0, pageHuge}, {pageHuge, 1<<32 | 1<<16, 4 * big, 0, pageSmall},
		{pageHuge, 1<<32 | 4096, 4 * big, 0, pageHost},
		{pageHuge, 1 << 32, 4 * big, 4096, pageHost}, {pageSmall, 1<<32 | 4096, big, 0, pageHost}, {0, 1 << 32, big, 0, 0},
		{0, 1<<32 | 1<<16, big, 0, 0}, {0, 1<<32 | 4096, big, 0, pageHost}, {0, 1 << 32, 1 << 16, 0, pageSmall},
		{pageHost, 1 << 32, big, 0, pageHost},
	} {
		if got := mapPageAt(x.page, x.base, x.length, x.offset); got != x.want {
			t.Errorf("%+v: %v", x, got)
		}
	}
}
