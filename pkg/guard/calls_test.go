package guard

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
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
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) { flags = rm.U32(call.Blocks[0].Data, rm.ChannelFlags) })))
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

func TestHeap(t *testing.T) {
	vidmem, virtual, host := uint32(0), uint32(rm.MemoryFlagVirtual), uint32(rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift)
	for _, c := range []struct {
		name     string
		function uint32
		set      func(o []byte)
		want     quota.Bytes
		status   uint32
	}{
		{"size", rm.HeapFnAllocSize, func(o []byte) { rm.PutU64(o, rm.HeapAllocSize, 1<<20) }, quota.MiB, 0},
		{"size range", rm.HeapFnAllocSizeRange, func(o []byte) { rm.PutU64(o, rm.HeapAllocRangeSize, 3<<20) }, 3 * quota.MiB, 0},
		{"tiled", rm.HeapFnAllocTiled, func(o []byte) {
			rm.PutU32(o, rm.HeapTiledHeight, 1<<10)
			rm.PutU32(o, rm.HeapTiledPitch, 1<<12)
			rm.PutU64(o, rm.HeapAllocSize, 1) // the driver recomputes it, so it counts for nothing
		}, 4 * quota.MiB, 0},
		{"tiled, beyond 32 bits", rm.HeapFnAllocTiled, func(o []byte) {
			rm.PutU32(o, rm.HeapTiledHeight, ^uint32(0))
			rm.PutU32(o, rm.HeapTiledPitch, ^uint32(0))
		}, 0, rm.StatusNoMemory},
		{"too large", rm.HeapFnAllocSize, func(o []byte) { rm.PutU64(o, rm.HeapAllocSize, uint64(testLimit)) }, 0, rm.StatusNoMemory},
		{"wraps around", rm.HeapFnAllocSize, func(o []byte) { rm.PutU64(o, rm.HeapAllocSize, ^uint64(0)) }, 0, rm.StatusNoMemory},
		{"address space", rm.HeapFnAllocSize, func(o []byte) {
			rm.PutU64(o, rm.HeapAllocSize, 1<<40)
			rm.PutU32(o, rm.HeapAllocFlags, virtual|rm.MemoryFlagLazy)
		}, 0, 0},
		{"host memory", rm.HeapFnAllocSize, func(o []byte) {
			rm.PutU64(o, rm.HeapAllocSize, 1<<20)
			rm.PutU32(o, rm.HeapAllocAttr, host)
		}, 0, 0},
		{"device memory that calls itself host memory where function 6 has its height", rm.HeapFnAllocTiled, func(o []byte) {
			rm.PutU32(o, rm.HeapTiledHeight, host)
			rm.PutU32(o, rm.HeapTiledPitch, 1)
			rm.PutU32(o, rm.HeapTiledAttr, vidmem)
		}, quota.Bytes(host), 0},
		{"the caller's pages", rm.HeapFnAllocOSDescriptor, func([]byte) {}, 0, rm.StatusNotSupported},
		{"hardware resources", rm.HeapFnHWAlloc, func([]byte) {}, 0, rm.StatusNotSupported},
		{"unknown", 99, func([]byte) {}, 0, rm.StatusNotSupported},
		{"another container's client", rm.HeapFnAllocSize, func(o []byte) { rm.PutU32(o, rm.HeapRoot, 1) }, 0, rm.StatusInvalidClient},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
				switch o := call.Outer; rm.U32(o, rm.HeapFunction) {
				case rm.HeapFnAllocTiled:
					rm.PutU64(o, rm.HeapAllocSize, uint64(rm.U32(o, rm.HeapTiledHeight))*uint64(rm.U32(o, rm.HeapTiledPitch)))
				}
				if rm.U32(call.Outer, rm.HeapAllocMemory) == 0 {
					rm.PutU32(call.Outer, rm.HeapAllocMemory, 0xcaf00001)
				}
			})))
			f := newFakeCall(t, g, fakeControl)
			o := make([]byte, rm.HeapSize)
			rm.PutU32(o, rm.HeapRoot, fakeClient)
			rm.PutU32(o, rm.HeapParent, fakeDevice)
			rm.PutU32(o, rm.HeapFunction, c.function)
			c.set(o)
			if rep := f.escape(rm.EscVidHeapControl, o); rep != replyDone || rm.U32(o, rm.HeapStatus) != c.status {
				t.Fatalf("%+v, status %s", rep, rm.StatusName(rm.U32(o, rm.HeapStatus)))
			}
			wantUsage(t, g.account, 0, 8*quota.MiB+c.want)
			if c.want == 0 {
				return
			}
			o = make([]byte, rm.HeapSize)
			rm.PutU32(o, rm.HeapRoot, fakeClient)
			rm.PutU32(o, rm.HeapFunction, rm.HeapFnFree)
			rm.PutU32(o, rm.HeapFreeMemory, 0xcaf00001)
			f.escape(rm.EscVidHeapControl, o)
			wantUsage(t, g.account, 0, 8*quota.MiB)
		})
	}
}

func TestHeapInfo(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
		rm.PutU64(call.Outer, rm.HeapTotal, 80<<30)
		rm.PutU64(call.Outer, rm.HeapFree, 70<<30)
		rm.PutU64(call.Outer, rm.HeapInfoSize, 60<<30)
	})))
	o := make([]byte, rm.HeapSize)
	rm.PutU32(o, rm.HeapRoot, fakeClient)
	rm.PutU32(o, rm.HeapParent, fakeDevice)
	rm.PutU32(o, rm.HeapFunction, rm.HeapFnInfo)
	newFakeCall(t, g, fakeControl).escape(rm.EscVidHeapControl, o)
	free := uint64(testLimit - 8*quota.MiB)
	want := []uint64{uint64(testLimit), free, free}
	if got := []uint64{rm.U64(o, rm.HeapTotal), rm.U64(o, rm.HeapFree), rm.U64(o, rm.HeapInfoSize)}; !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

// uvmCall makes a UVM call with the addresses and names that it takes.
func uvmCall(g *Guard, cmd uint32, base, length uint64, ctl int) ([]byte, rm.UVMForm) {
	form, _ := g.abi.UVM(cmd)
	o := make([]byte, form.Size)
	rm.PutU64(o, form.Base, base)
	if form.Length >= 0 {
		rm.PutU64(o, form.Length, length)
	}
	if form.Object >= 0 {
		rm.PutU32(o, form.FD, uint32(ctl))
		rm.PutU32(o, form.Client, fakeClient)
		rm.PutU32(o, form.Object, fakeMemory)
	}
	if cmd == rm.UVMMapExternal { // one GPU
		rm.PutU64(o, form.FD-8, 1)
	}
	return o, form
}

// TestUVM: a mapping holds memory past its handle, and the object is open to UVM only for the moment of the call.
func TestUVM(t *testing.T) {
	var open, wasOpen, refuse bool
	var fds []uint32
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	d.answer = func(tgt Target, call *rm.Call) syscall.Errno {
		if rm.UVMShaped(call.Cmd) {
			wasOpen = wasOpen || open
			form, _ := g.abi.UVM(call.Cmd)
			if form.FD >= 0 {
				fds = append(fds, rm.U32(call.Outer, form.FD))
			}
			if refuse {
				rm.PutU32(call.Outer, form.Status, rm.StatusInvalidAddress)
			}
		} else if call.NR() == rm.EscShare {
			action := call.Outer[rm.SharePolicy+rm.SharePolicyAction]
			if open = action&shareActionRevoke == 0; action&shareActionCompose == 0 {
				t.Error("what the program itself has shared is forgotten")
			}
		}
		return 0
	}
	c, ctl := newFakeUVMCall(t, g)

	refuse = true
	o, form := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
	c.do(rm.UVMMapExternal, o)
	if rm.U32(o, form.Status) != rm.StatusInvalidAddress || open || !wasOpen {
		t.Errorf("refused mapping: %s, open %v, was %v", rm.StatusName(rm.U32(o, form.Status)), open, wasOpen)
	}
	refuse = false
	o, form = uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
	if rep := c.do(rm.UVMMapExternal, o); rep != replyDone || rm.U32(o, form.Status) != 0 || open {
		t.Fatalf("%+v, %s, open %v", rep, rm.StatusName(rm.U32(o, form.Status)), open)
	}
	if rm.U32(o, form.FD) != uint32(ctl) || fds[1] == uint32(ctl) {
		t.Errorf("descriptors: the task sees %d, UVM saw %d, want the guard's own copy of %d", rm.U32(o, form.FD), fds[1], ctl)
	}
	g.account.freeObject(fakeClient, fakeMemory)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	if !g.account.hasZombies() {
		t.Error("no zombie")
	}
	o, _ = uvmCall(g, rm.UVMUnmapExternal, 1<<32, 4<<20, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 8*quota.MiB) // half of it still holds the memory
	refuse = true
	o, _ = uvmCall(g, rm.UVMUnmapExternal, 1<<32, 8<<20, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 8*quota.MiB) // UVM said no
	refuse = false
	o, _ = uvmCall(g, rm.UVMUnmapExternal, 1<<32, 8<<20, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 0)
	if g.account.hasZombies() {
		t.Error("a zombie")
	}
}

// Host memory that the task made itself is mapped too: the guard opens the handle that the call names.
func TestUVMMapsWhatItHasNotSeen(t *testing.T) {
	const unseen = 0x5c0000ff
	shared, mapped := []uint32{}, false
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	d.answer = func(tgt Target, call *rm.Call) syscall.Errno {
		if rm.UVMShaped(call.Cmd) {
			mapped = true
		} else if call.NR() == rm.EscShare {
			shared = append(shared, rm.U32(call.Outer, rm.ShareObject))
		}
		return 0
	}
	c, ctl := newFakeUVMCall(t, g)
	o, form := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
	rm.PutU32(o, form.Object, unseen)
	c.do(rm.UVMMapExternal, o)
	if !mapped || !slices.Equal(shared, []uint32{unseen, unseen}) || rm.U32(o, form.Status) != rm.StatusOK {
		t.Errorf("mapped %v, shared %#x, status %#x; want the handle that was named opened and closed", mapped, shared, rm.U32(o, form.Status))
	}
}

// TestUVMMaps: what is mapped and unmapped over other mappings, on one GPU, is credited as UVM lets go of it: a piece that is left holds
// all.
func TestUVMMaps(t *testing.T) {
	const base, mib = 1 << 32, 1 << 20
	one, two := gpuUUID{1}, gpuUUID{2}
	type step struct {
		gpu      gpuUUID
		from, to uint64      // in MiB behind base
		memory   quota.Bytes // in MiB, that is mapped; 0: unmapped
		used     quota.Bytes // MiB, after it
	}
	for name, steps := range map[string][]step{
		"again":                    {{one, 0, 8, 8, 8}, {one, 0, 8, 1, 1}, {one, 0, 8, 0, 0}},
		"over the beginning":       {{one, 0, 8, 8, 8}, {one, 0, 1, 1, 9}, {one, 1, 8, 0, 1}, {one, 0, 1, 0, 0}},
		"over the end":             {{one, 0, 8, 8, 8}, {one, 7, 8, 1, 9}, {one, 0, 7, 0, 1}, {one, 7, 8, 0, 0}},
		"over the middle":          {{one, 0, 8, 8, 8}, {one, 3, 4, 1, 9}, {one, 0, 3, 0, 9}, {one, 4, 8, 0, 1}, {one, 0, 8, 0, 0}},
		"over several":             {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 6, 8, 8, 14}, {one, 1, 7, 1, 11}, {one, 0, 8, 0, 0}},
		"a union":                  {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 6, 8, 8, 14}, {one, 0, 8, 0, 0}},
		"a union, the end in part": {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 4, 8, 8, 14}, {one, 0, 5, 0, 8}, {one, 5, 8, 0, 0}},
		"a union, the beginning":   {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 1, 8, 0, 2}, {one, 0, 1, 0, 0}},
		"in two halves":            {{one, 0, 8, 8, 8}, {one, 0, 4, 0, 8}, {one, 4, 8, 0, 0}},
		"two holes": {{one, 0, 8, 8, 8}, {one, 2, 3, 0, 8}, {one, 5, 6, 0, 8}, {one, 3, 5, 0, 8},
			{one, 0, 2, 0, 8}, {one, 6, 8, 0, 0}},
		"where nothing is":             {{one, 2, 4, 8, 8}, {one, 0, 2, 0, 8}, {one, 4, 9, 0, 8}, {one, 2, 4, 0, 0}},
		"on another GPU":               {{one, 0, 8, 8, 8}, {two, 0, 8, 1, 9}, {one, 0, 8, 0, 1}, {two, 0, 8, 0, 0}},
		"a union beside another GPU's": {{one, 0, 4, 4, 4}, {two, 2, 6, 8, 12}, {one, 4, 8, 2, 14}, {one, 0, 8, 0, 8}, {two, 0, 8, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			g := withClient(newFakeGuard(t, &fakeDriver{}))
			g.account.freeObject(fakeClient, fakeMemory)
			f := followedUVM(t, g)
			for i, s := range steps {
				x := addresses{base + s.from*mib, base + s.to*mib}
				if s.memory > 0 {
					memory := uint32(0x5c000700 + i)
					g.account.addObject(fakeClient, memoryObject(memory, fakeDevice), 0, 0, s.memory*quota.MiB)
					g.recordMapping(f, uvmMap{gpu: s.gpu, addresses: x, charge: g.account.holdOf(fakeClient, memory)})
					g.account.freeObject(fakeClient, memory)
				} else {
					g.recordUnmapping(f, x, s.gpu)
				}
				if used := g.account.usage(0).used; used != s.used*quota.MiB {
					t.Errorf("step %d: used %v, want %d MiB", i, used, s.used)
				}
			}
			if g.uvmMaps.Load() != 0 || len(f.maps) != 0 || g.account.hasZombies() {
				t.Errorf("%d mappings are left, zombies %v", g.uvmMaps.Load(), g.account.hasZombies())
			}
		})
	}
}

// TestUVMFree: a range that is freed gives back all that is mapped in it on any GPU, and nothing behind it. Since 590 the call does not say
// where the range ends; the guard knows what it has made.
func TestUVMFree(t *testing.T) {
	for _, version := range []string{"580.159.04", "590.48.01"} {
		t.Run(version, func(t *testing.T) {
			abi, err := rm.ForDriver(version, true)
			if err != nil {
				t.Fatal(err)
			}
			g := withClient(newFakeGuard(t, &fakeDriver{}))
			g.abi = abi
			g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
			g.account.freeObject(fakeClient, fakeMemory)
			c, _ := newFakeUVMCall(t, g)
			o, _ := uvmCall(g, rm.UVMCreateExternal, 1<<32, 8<<20, 0)
			c.do(rm.UVMCreateExternal, o)
			for i, m := range []uvmMap{
				{gpu: gpuUUID{1}, addresses: addresses{1 << 32, 1<<32 + 4<<20}},
				{gpu: gpuUUID{1}, addresses: addresses{1<<32 + 6<<20, 1<<32 + 8<<20}},
				{gpu: gpuUUID{1}, addresses: addresses{1<<32 + 8<<20, 1<<32 + 9<<20}}, // the next range
				{gpu: gpuUUID{2}, addresses: addresses{1<<32 + 2<<20, 1<<32 + 4<<20}},
				{gpu: gpuUUID{2}, addresses: addresses{1<<32 - 2<<20, 1 << 32}}, // the one before
			} {
				memory := uint32(0x5c000700 + i)
				g.account.addObject(fakeClient, memoryObject(memory, fakeDevice), 0, 0, quota.MiB<<i)
				m.charge = g.account.holdOf(fakeClient, memory)
				g.recordMapping(c.file, m)
				g.account.freeObject(fakeClient, memory)
			}
			wantUsage(t, g.account, 0, 31*quota.MiB)
			o, _ = uvmCall(g, rm.UVMFree, 1<<32, 8<<20, 0)
			c.do(rm.UVMFree, o)
			wantUsage(t, g.account, 0, (4+16)*quota.MiB)
		})
	}
}

// TestFullMaps: an address space of which no more mappings can be remembered has none cut in two, and those that it has can be unmapped.
func TestFullMaps(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	c, _ := newFakeUVMCall(t, g)
	g.recordMapping(c.file, uvmMap{addresses: addresses{1 << 32, 1<<32 + 8<<20}, charge: g.account.holdOf(fakeClient, fakeMemory)})
	g.uvmMaps.Add(g.account.mostUVMMaps() - 1)
	unmap := func(base, length uint64) string {
		o, form := uvmCall(g, rm.UVMUnmapExternal, base, length, 0)
		c.do(rm.UVMUnmapExternal, o)
		return rm.StatusName(rm.U32(o, form.Status))
	}
	if s := unmap(1<<32+1<<20, 1<<20); s != "NV_ERR_INSUFFICIENT_RESOURCES" {
		t.Error("a mapping is cut in two: ", s)
	}
	for _, base := range []uint64{1 << 32, 1<<32 + 4<<20} {
		if s := unmap(base, 4<<20); s != "NV_OK" {
			t.Error("half of a mapping: ", s)
		}
	}
	if len(c.file.maps) != 0 {
		t.Error("something is left")
	}
}

// TestManyMaps: UVM has a handle of the node's for each mapping, so a container may have so many in all its address spaces together.
func TestManyMaps(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	most := g.account.mostUVMMaps()
	if want := int64(someUVMMaps + testLimit/quota.MiB); most != want {
		t.Fatalf("%d mappings, want %d", most, want)
	}
	one, ctl := newFakeUVMCall(t, g)
	two, _ := newFakeUVMCall(t, g)
	two.file = followedUVM(t, g)
	mapAt := func(c *fakeCall, base uint64) uint32 {
		o, form := uvmCall(g, rm.UVMMapExternal, base, 2<<20, ctl)
		c.do(rm.UVMMapExternal, o)
		return rm.U32(o, form.Status)
	}
	for i := range most / 2 {
		if s := mapAt(one, uint64(1+i)<<32) | mapAt(two, uint64(1+i)<<32); s != rm.StatusOK {
			t.Fatalf("mapping %d: %s", i, rm.StatusName(s))
		}
	}
	mapAt(two, uint64(1+most)<<32) // where the bound is odd
	if s := mapAt(one, uint64(2+most)<<32); s != rm.StatusInsufficientResources {
		t.Errorf("one too many: %s", rm.StatusName(s))
	}
	g.endUVM(one.file)
	if n := g.uvmMaps.Load(); n != most/2+most%2 {
		t.Errorf("%d mappings are left, want the other's %d", n, most/2+most%2)
	}
	if s := mapAt(two, uint64(2+most)<<32); s != rm.StatusOK {
		t.Errorf("again: %s", rm.StatusName(s))
	}
	g.account.gpus[0].limit = 1 << 50
	if most := g.account.mostUVMMaps(); most != maxUVMMaps {
		t.Errorf("a large card: %d", most)
	}
}

// TestUVMRefusals never reach the driver.
func TestUVMRefusals(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	c, ctl := newFakeUVMCall(t, g)
	null, _ := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	defer unix.Close(null)
	for _, x := range []struct {
		name   string
		cmd    uint32
		fd     int
		client uint32
	}{
		{"another container's client", rm.UVMMapExternal, ctl, 0xc1d00000},
		{"a descriptor that is not nvidiactl", rm.UVMMapExternal, null, fakeClient},
		{"a descriptor that is not open", rm.UVMMapExternal, 9999, fakeClient},
		{"a window into the memory", rm.UVMAllocDeviceP2P, ctl, fakeClient},
	} {
		o, form := uvmCall(g, x.cmd, 1<<32, 8<<20, x.fd)
		rm.PutU32(o, form.Client, x.client)
		if rep := c.do(x.cmd, o); rep != replyDone || rm.U32(o, form.Status) == 0 || len(d.calls) != 0 {
			t.Errorf("%s: %+v, status %s, %d driver calls", x.name, rep, rm.StatusName(rm.U32(o, form.Status)), len(d.calls))
		}
	}
}

// TestEndUVM frees what is mapped in an address space that no process has any more, and only that. On each GPU the channels are stopped
// before anything is unmapped, which UVM_UNREGISTER_GPU_VASPACE does; only where that fails is each mapping taken away.
func TestEndUVM(t *testing.T) {
	for _, x := range []struct {
		name    string
		refuses bool
		want    []uint32
	}{
		{"stopped and unmapped by UVM", false, []uint32{rm.UVMUnregisterVASpace, rm.UVMUnregisterVASpace}},
		{"no longer registered", true, []uint32{rm.UVMUnregisterVASpace, rm.UVMUnmapExternal, rm.UVMUnmapExternal,
			rm.UVMUnregisterVASpace, rm.UVMUnmapExternal}},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
				if call.Cmd == rm.UVMUnregisterVASpace && x.refuses {
					rm.PutU32(call.Outer, rm.UVMUnregisterStatus, rm.StatusInvalidDevice)
				}
				return 0
			}}
			g := withClient(newFakeGuard(t, d))
			c, ctl := newFakeUVMCall(t, g)
			c.file = followedUVM(t, g)
			for i, gpu := range []byte{1, 1, 2} {
				o, _ := uvmCall(g, rm.UVMMapExternal, uint64(i+1)<<33, 8<<20, ctl)
				o[uvmMapAttributes] = gpu
				c.do(rm.UVMMapExternal, o)
			}
			g.account.freeObject(fakeClient, fakeMemory)
			wantUsage(t, g.account, 0, 8*quota.MiB+2*quota.Bytes(rm.UVMTables(8<<20, 64<<10))) // page tables, from the second mapping on
			d.calls = nil
			g.endUVM(c.file)
			wantUsage(t, g.account, 0, 0)
			stop, unmap := slices.Index(d.calls, rm.UVMUnregisterVASpace), slices.Index(d.calls, rm.UVMUnmapExternal)
			if unmap >= 0 && unmap < stop {
				t.Error("unmapped before the channels were stopped")
			}
			slices.Sort(d.calls) // the order of the mappings is not given
			slices.Sort(x.want)
			if !slices.Equal(d.calls, x.want) || g.files.count() != 0 || g.account.hasZombies() {
				t.Errorf("calls %d, want %d; %d files", d.calls, x.want, g.files.count())
			}
		})
	}
}

// followedUVM is a file that stands for nvidia-uvm, which only the guard has open.
func followedUVM(t *testing.T, g *Guard) *file {
	t.Helper()
	fd, err := unix.Open(filepath.Join(t.TempDir(), "uvm"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	f, err := g.files.follow(fd, nodeUVM, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// rootGuard is a guard with a root alloc under way in this process.
func rootGuard(t *testing.T, d *fakeDriver) (*Guard, *file) {
	t.Helper()
	g := newFakeGuard(t, d)
	c := newFakeCall(t, g, fakeControl)
	if rep := c.escape(rm.EscAlloc, rootOuter()); rep != replyResume {
		t.Fatalf("%+v", rep)
	}
	f := c.root
	if f == nil || g.pendingRoots.Load() != 1 || !f.rooted {
		t.Fatal("no root alloc is under way")
	}
	g.rootAnswered(f, true)
	t.Cleanup(f.close)
	return g, f
}

func rootOuter() []byte {
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocClass, rmclient.ClassClient)
	return o
}

func TestRootAlloc(t *testing.T) {
	var live atomic.Uint32 // the client that RM says the file has
	confirm := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		const own = fakeClient + 2
		if c := rm.U32(call.Outer, 0); call.NR() == rm.EscFree && c != live.Load() && c != own {
			rm.PutU32(call.Outer, rm.FreeStatus, rm.StatusInvalidClient)
		}
		if call.NR() == rm.EscAlloc {
			rm.PutU32(call.Outer, rm.AllocObject, own)
		}
		return 0
	}}
	t.Run("verified", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		live.Store(fakeClient)
		g.resolveRoot(f, f.pending, 0, true)
		if !g.account.ownsClient(fakeClient) || f.clients != 1 || g.pendingRoots.Load() != 0 {
			t.Fatal("the client is not recorded")
		}
		// One live client to a file.
		c := newFakeCall(t, g, fakeControl)
		unix.Close(c.fd)
		c.fd = dupFD(t, 0)
		g.account.freeObject(fakeClient, 0)
		g.account.mu.Lock()
		cl := g.account.clients[fakeClient]
		g.account.mu.Unlock()
		g.clientGone(cl)
		if f.rooted || f.clients != 0 || g.account.ownsClient(fakeClient) {
			t.Error("a freed client bars its file")
		}
		g.clientGone(cl) // twice is once
		if f.clients != 0 {
			t.Error("counted twice")
		}
	})
	t.Run("a handle that RM does not know", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		live.Store(0)
		g.resolveRoot(f, f.pending, 0xc1d00077, true)
		if g.account.ownsClient(0xc1d00077) || g.astrayAt.Load() == 0 {
			t.Error("a client that RM does not confirm is trusted")
		}
	})
	t.Run("named by the next call", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		live.Store(fakeClient)
		g.resolveRoot(f, f.pending, fakeClient, false)
		if !g.account.ownsClient(fakeClient) {
			t.Error("not found")
		}
	})
	t.Run("the caller was gone", func(t *testing.T) {
		g, f := rootGuard(t, confirm)
		p := f.pending
		p.since = time.Time{}
		// It runs a signal's handler, while other threads make calls.
		p.task = &task{tid: 1 << 22, proc: p.task.proc}
		if g.resolveRoot(f, p, 0, false) || g.astrayAt.Load() != 0 {
			t.Error("a root alloc that nobody was let make counts against the program")
		}
		g.rootAnswered(f, false)
		if f.rooted || f.pending != nil || g.pendingRoots.Load() != 0 {
			t.Error("a root alloc that did not run bars its file")
		}
		g.resolveRoot(f, p, 0, true) // the timer that is still set
		if g.pendingRoots.Load() != 0 {
			t.Error("settled twice")
		}
	})
	t.Run("barred", func(t *testing.T) {
		for _, bar := range []func(f *file){func(f *file) { f.rooted = true }, func(f *file) { f.registered = true },
			func(f *file) { f.pending = &pendingRoot{} }} {
			g := newFakeGuard(t, confirm)
			c := newFakeCall(t, g, fakeControl)
			f, err := g.followFile(c.fd, c.node)
			if err != nil {
				t.Fatal(err)
			}
			bar(f)
			o := rootOuter()
			if rep := c.escape(rm.EscAlloc, o); rep != replyDone || rm.U32(o, 40) != rm.StatusInsufficientResources {
				t.Errorf("%+v %s", rep, rm.StatusName(rm.U32(o, 40)))
			}
			f.pending = nil
		}
	})
	t.Run("a second one, where profilers are allowed", func(t *testing.T) {
		g := newFakeGuard(t, confirm)
		g.cfg.Settings.Profiling = true
		c := newFakeCall(t, g, fakeControl)
		f, err := g.followFile(c.fd, c.node)
		if err != nil {
			t.Fatal(err)
		}
		f.clients, f.rooted = 1, true
		if rep := c.escape(rm.EscAlloc, rootOuter()); rep != replyResume {
			t.Fatalf("%+v", rep)
		}
		if g.rootAnswered(c.root, false); !f.rooted {
			t.Error("the first client is forgotten")
		}
	})
	t.Run("in an XFER, or on a GPU's node", func(t *testing.T) {
		g := newFakeGuard(t, confirm)
		o := rootOuter()
		c := newFakeCall(t, g, "/dev/zero")
		if rep := c.escape(rm.EscAlloc, o); rep.resume {
			t.Error("let through on a GPU's node")
		}
		c = newFakeCall(t, g, fakeControl)
		c.loadOuter(uint32(testCmd(rm.EscAlloc, 48)), 0, 0)
		c.call.Outer, c.wrapped = rootOuter(), true
		if rep := g.onRootAlloc(&c.trappedCall); rep.resume {
			t.Error("let through inside an XFER, whose content may change")
		}
	})
	t.Run("too many", func(t *testing.T) {
		g := newFakeGuard(t, confirm)
		g.cfg.Settings.MaxClients = 1
		g.account.addClient(1, 1, nil)
		o := rootOuter()
		if rep := newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o); rep != replyDone || rm.U32(o, 40) != rm.StatusInsufficientResources {
			t.Errorf("%+v", rep)
		}
	})
}

// TestAudit: a process that holds what was never charged loses its clients.
func TestAudit(t *testing.T) {
	const more = 64 * quota.KiB
	for _, x := range []struct {
		name   string
		more   func(look int) quota.Bytes // than was charged
		killed uint64
	}{
		{"as charged", func(int) quota.Bytes { return 0 }, 0},
		{"more", func(int) quota.Bytes { return more }, 1},
		{"more for most of a second, while a call is under way", func(look int) quota.Bytes {
			if look < auditExcess {
				return more
			}
			return 0
		}, 0},
		{"more, and hides it now and then", func(look int) quota.Bytes {
			if look%3 == 0 {
				return 0
			}
			return more
		}, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			looks := 0
			var freed []uint32
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
				switch call.NR() {
				case rm.EscControl:
					if rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo {
						p := call.Blocks[0].Data
						looks++
						rm.PutU64(p, rm.PidInfoList+rm.PidInfoPrivate, uint64(4*quota.MiB+x.more(looks)))
						// 4 MiB have a second handle, and UVM, of which nothing is told, is the owner.
						rm.PutU64(p, rm.PidInfoList+rm.PidInfoSharedDuped, uint64(2*4*quota.MiB))
					}
				case rm.EscFree:
					freed = append(freed, rm.U32(call.Outer, rm.FreeObject))
				}
				return 0
			}}
			g := newFakeGuard(t, d)
			c := newFakeCall(t, g, fakeControl)
			f, err := g.followFile(c.fd, c.node)
			if err != nil {
				t.Fatal(err)
			}
			g.account.addClient(fakeClient, os.Getpid(), f)
			g.account.addObject(fakeClient, object{handle: fakeDevice, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
			for i := range uint32(2) {
				held := memoryObject(fakeMemory+i, fakeDevice)
				held.length = 4 * quota.MiB
				g.account.addObject(fakeClient, held, 0, 0, held.length)
			}
			g.account.dupOf(fakeClient, fakeDevice, fakeMemory+2, fakeClient, fakeMemory)
			f.clients, f.rooted = 1, true
			g.audit()
			if x.killed == 0 && (len(freed) > 0 || !g.account.ownsClient(fakeClient)) {
				t.Errorf("an honest process lost %#x", freed)
			}
			if x.killed > 0 && (!slices.Equal(freed, []uint32{fakeClient}) || g.account.ownsClient(fakeClient)) {
				t.Errorf("the process kept what it holds; freed %#x", freed)
			}
			if n := g.stats.killed.Load(); n != x.killed {
				t.Errorf("%d killed", n)
			}
		})
	}
}

// TestLengths: each handle of device memory counts where the driver counts it.
func TestLengths(t *testing.T) {
	cfg := testConfig("/dev")
	cfg.GPUs = append(cfg.GPUs, cfg.GPUs[0])
	a := newAccount(cfg.GPUs)
	a.addClient(fakeClient, 1, nil)
	for i := range 2 {
		a.addObject(fakeClient, object{handle: fakeDevice + uint32(i)<<8, parent: fakeClient, kind: rm.ClassDevice, gpu: i}, noGPU, 0, 0)
	}
	m := memoryObject(fakeMemory, fakeDevice)
	m.length = 3 * quota.MiB
	a.addObject(fakeClient, m, 0, 0, 4*quota.MiB)
	want := func(want quota.Bytes) {
		t.Helper()
		if got := a.expectedLengths(); got[0] != want || got[1] != 0 {
			t.Errorf("%v, want %v of the first GPU", got, want)
		}
	}
	want(3 * quota.MiB)
	ch := a.clients[fakeClient].objects[fakeMemory].charge
	a.addObject(fakeClient, object{handle: 1, parent: fakeDevice, kind: rm.ClassChannel, gpu: noGPU, charge: ch}, noGPU, 0, 0)
	a.dupOf(fakeClient, fakeDevice+1<<8, 2, fakeClient, fakeMemory)
	want(3 * quota.MiB)
	a.dupOf(fakeClient, fakeDevice, 3, fakeClient, fakeMemory)
	want(6 * quota.MiB)
	a.freeObject(fakeClient, fakeMemory)
	want(3 * quota.MiB)
}

// TestAuditMeanwhile: what is freed while the driver is asked is nothing that was never charged.
func TestAuditMeanwhile(t *testing.T) {
	g := withClient(newFakeGuard(t, nil))
	m := memoryObject(fakeMemory+7, fakeDevice)
	m.length = 4 * quota.MiB
	g.account.addObject(fakeClient, m, 0, 0, m.length)
	g.driver = &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlGetPidInfo {
			rm.PutU64(call.Blocks[0].Data, rm.PidInfoList+rm.PidInfoPrivate, uint64(g.account.expectedLengths()[0]))
			g.account.freeObject(fakeClient, m.handle)
		}
		return 0
	}}
	newFakeCall(t, g, fakeControl)
	a, err := g.guardClient()
	if err != nil {
		t.Fatal(err)
	}
	if len(g.tasks.processes()) == 0 || g.holdsUncharged(a) {
		t.Error("what was freed meanwhile counts")
	}
}

// TestGPUUsers: the driver is asked of processes that can hold device memory, and of no others.
func TestGPUUsers(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	newFakeCall(t, g, fakeControl)
	var named []int
	g.sentFDs.pids = func() []int { return named }
	if n := len(g.gpuUsers()); n != 0 || len(g.tasks.processes()) != 1 {
		t.Errorf("%d of no use are asked for", n)
	}
	named = []int{1, os.Getpid(), os.Getpid()}
	if n := len(g.gpuUsers()); n != 1 {
		t.Errorf("%d, want the one that the driver names and whose clients are not known", n)
	}
	named = nil
	if n := len(withClient(g).gpuUsers()); n != 1 {
		t.Errorf("%d, want the one that has a client", n)
	}
}

// TestOpenedHere: the container's /dev is known also when the first process has no first thread any more, and when it has ended.
func TestOpenedHere(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root for chroot")
	}
	root := t.TempDir()
	node := filepath.Join(root, "dev", "nvidiactl")
	if err := os.Mkdir(filepath.Dir(node), 0o755); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(node)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	inRoot := func() *child {
		c := startPlain(t, func(c *exec.Cmd) { c.Env = append(c.Env, "CGPU_TEST_ROOT="+root) })
		c.do("chroot")
		return c
	}
	c := inRoot()
	start, err := ledger.ProcStart(c.pid())
	if err != nil {
		t.Fatal(err)
	}
	g := newFakeGuard(t, answering(0, nil))
	g.initPID, g.initStart, g.devFirst = c.pid(), start, deviceOfDev(c.pid())
	for _, end := range []func(){c.headless, c.kill} {
		end()
		g.devDevice = 0
		if !g.openedHere(int(file.Fd())) {
			t.Errorf("its file counts as another's (%d, first %d)", g.devDevice, g.devFirst)
		}
	}
	g.initPID, g.initStart, g.devFirst, g.devDevice = inRoot().pid(), 1, 0, 0 // another process has its number
	if g.openedHere(int(file.Fd())) || g.devDevice != 0 {
		t.Error("the /dev of a process that is not the container's counts")
	}
}

// TestAuditHidden: the guard waits for a client that it has to free and whose file is only in a socket.
func TestAuditHidden(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	fd, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := g.followFile(fd, node{nodeControl, 0})
	if err != nil {
		t.Fatal(err)
	}
	g.account.addClient(fakeClient, 1<<30, f) // whose process is gone
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(fd)
	if g.audit(); !g.account.ownsClient(fakeClient) || time.Until(g.auditUntil) < auditTime/2 {
		t.Errorf("the audit ends in %v", time.Until(g.auditUntil))
	}
}

// TestForeignRoot: a file that was opened on another container's /dev may have a client that this guard does not know.
func TestForeignRoot(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	g.devDevice++
	c := newFakeCall(t, g, fakeControl)
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocClass, rmclient.ClassClient)
	if rep := c.escape(rm.EscAlloc, o); rep.resume || rm.U32(o, 40) != rm.StatusInsufficientPermissions {
		t.Errorf("%+v, %s", rep, rm.StatusName(rm.U32(o, 40)))
	}
}

// TestRMOnUVM: nothing that RM would act on may run natively on a UVM file, whose place a nvidiactl file could take.
func TestRMOnUVM(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	c := newFakeCall(t, g, fakeUVM)
	for _, cmd := range []uint32{0xc030462b, 0xc020462a, 0xc01046d3, 0xc00446c9} {
		w := &worker{guard: g, mem: c.mem}
		notif := &seccompNotif{Arch: nativeArch, Args: [6]uint64{0, uint64(cmd)}}
		if rep := w.handle(&trappedCall{guard: g, notif: notif, task: c.task, mem: c.mem, fd: c.fd}); rep.resume || rep.errno == 0 {
			t.Errorf("%#x: %+v", cmd, rep)
		}
	}
}
