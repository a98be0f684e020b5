// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const (
	fakeSpilled = 0x5c000077
	testSpill   = 64 * quota.MiB
)

// spillGuard is a guard whose container has used all of its limit but some MiB, and may spill. It has 8 MiB of it as
// fakeMemory, the rest is nobody's.
func spillGuard(t testing.TB, d Driver, left quota.Bytes) *Guard {
	t.Helper()
	g := withClient(newFakeGuard(t, d))
	g.account.setLimits(0, testLimit, testSpill)
	if !g.account.reserve(cost{gpu: 0, size: testLimit - 8*quota.MiB - left}, false) {
		t.Fatal("no room")
	}
	return g
}

func wantSpilled(t *testing.T, g *Guard, left, spilled quota.Bytes) {
	t.Helper()
	if u := g.account.usage(0); u.used != testLimit-left || u.spilled != spilled {
		t.Errorf("%v left and %v spilled, want %v and %v", testLimit-u.used, u.spilled, left, spilled)
	}
}

// spilled makes spilled memory on a guard that has no room left.
func spilled(t *testing.T, f *fakeCall, handle uint32, size quota.Bytes) {
	t.Helper()
	before := f.guard.account.usage(0).spilled
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, uint64(size))
	o := fakeAlloc(fakeDevice, handle, classVidmem, p)
	if rep := f.escape(rm.EscAlloc, o, p); rep != replyDone || rm.U32(o, 40) != rm.StatusOK {
		t.Fatalf("%+v %s", rep, rm.StatusName(rm.U32(o, 40)))
	}
	if got := f.guard.account.usage(0).spilled - before; got != size {
		t.Fatalf("%v spilled, want %v", got, size)
	}
}

// TestSpill: when memory goes to the host, how much of it, and what the driver and the task see.
func TestSpill(t *testing.T) {
	const flags, attr, attr2, align = 0x1c101, 0x11800000, 0x5, 2 << 20
	for _, c := range []struct {
		name    string
		left    quota.Bytes // of the limit
		size    uint64
		status  uint32
		errno   syscall.Errno
		host    bool // made as host memory
		asked   bool
		spilled quota.Bytes
		want    uint32
	}{
		{"it fits", 8 * quota.MiB, 8 << 20, 0, 0, false, true, 0, 0},
		{"not whole", 6 * quota.MiB, 8 << 20, 0, 0, true, true, 8 * quota.MiB, 0},
		{"a byte more than fits", 8 * quota.MiB, 8<<20 + 1, 0, 0, true, true, 10 * quota.MiB, 0},
		{"a byte", 0, 1, 0, 0, true, true, 2 * quota.MiB, 0},
		{"nothing", 0, 0, 0, 0, false, true, 0, 0},
		{"all of the spill", 0, uint64(testSpill), 0, 0, true, true, testSpill, 0},
		{"a byte more", 0, uint64(testSpill) + 1, 0, 0, false, false, 0, rm.StatusNoMemory},
		{"more than both", 8 * quota.MiB, uint64(testSpill) + 8<<20, 0, 0, false, false, 0, rm.StatusNoMemory},
		{"2⁶⁴ − 1", 0, ^uint64(0), 0, 0, false, false, 0, rm.StatusNoMemory},
		{"2⁶⁴ less a page", 0, ^uint64(0) - 2<<20 + 1, 0, 0, false, false, 0, rm.StatusNoMemory},
		{"the host has none", 0, 8 << 20, rm.StatusInsufficientResources, 0, true, true, 0, rm.StatusInsufficientResources},
		{"the driver fails", 0, 8 << 20, 0, unix.EIO, true, true, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var seen []byte
			var class uint32
			d := &fakeDriver{}
			d.answer = func(_ Target, call *rm.Call) syscall.Errno {
				if call.NR() == rm.EscFree {
					return 0
				}
				p := call.Blocks[0].Data
				class, seen = rm.U32(call.Outer, rm.AllocClass), bytes.Clone(p)
				rm.PutU32(call.Outer, 40, c.status)
				rm.PutU32(call.Outer, rm.AllocObject, fakeSpilled)
				rm.PutU32(p, rm.MemoryAttr, rm.U32(p, rm.MemoryAttr)|1<<23) // it tells what it has chosen
				rm.PutU64(p, rm.MemoryAlignment, 4096)
				return c.errno
			}
			g := spillGuard(t, d, c.left)
			f := newFakeCall(t, g, fakeControl)
			p := bytes.Repeat([]byte{0xa5}, 128)
			rm.PutU32(p, rm.MemoryFlags, flags)
			rm.PutU32(p, rm.MemoryAttr, attr)
			rm.PutU32(p, rm.MemoryAttr2, attr2)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, c.size)
			rm.PutU64(p, rm.MemoryAlignment, align)
			rm.PutU64(p, rm.MemoryAddress, 0) // else the guard clears it
			o := fakeAlloc(fakeDevice, 0, classVidmem, p)
			passed, passedOuter := bytes.Clone(p), bytes.Clone(o)
			rep := f.escape(rm.EscAlloc, o, p)
			if rep.errno != c.errno || rep.resume || c.errno == 0 && rm.U32(o, 40) != c.want {
				t.Fatalf("%+v, status %s", rep, rm.StatusName(rm.U32(o, 40)))
			}
			if asked := len(d.calls) > 0; asked != c.asked {
				t.Fatalf("the driver was asked: %v", asked)
			}
			if !c.asked {
				wantSpilled(t, g, c.left, 0)
				if u := g.account.usage(0); u.denied != 1 && c.size <= ^uint64(0)-2<<20+1 {
					t.Errorf("%d denied", u.denied)
				}
				return
			}
			if !c.host {
				if class != classVidmem || rm.U32(seen, rm.MemoryAttr) != attr {
					t.Errorf("class %#x, attr %#x", class, rm.U32(seen, rm.MemoryAttr))
				}
				if u := g.account.usage(0); u.spilled != 0 {
					t.Errorf("%v spilled", u.spilled)
				}
				return
			}
			if class != classSystem || rm.U32(seen, rm.MemoryFlags) != spillFlags || rm.U32(seen, rm.MemoryAttr) != spillAttr ||
				rm.U32(seen, rm.MemoryAttr2) != spillAttr2 || rm.U64(seen, rm.MemoryAlignment) != 0 || rm.U64(seen, rm.MemorySize)%(2<<20) != 0 {
				t.Errorf("the driver saw class %#x and % x", class, seen)
			}
			wantSpilled(t, g, c.left, c.spilled)
			// The task sees what it passed, but for the size, the handle and the status.
			if c.spilled > 0 {
				rm.PutU32(passed, rm.MemoryOwner, 1)
				rm.PutU64(passed, rm.MemorySize, uint64(c.spilled))
				rm.PutU32(passedOuter, rm.AllocObject, fakeSpilled)
			}
			rm.PutU32(passedOuter, 40, rm.U32(o, 40))
			if !bytes.Equal(p, passed) || !bytes.Equal(o, passedOuter) {
				t.Errorf("the task sees\n% x\n% x, want\n% x\n% x", o, p, passedOuter, passed)
			}
			if c.spilled == 0 {
				if f.undo != nil || g.account.isSpilled(fakeClient, fakeSpilled) {
					t.Error("there is something to take back")
				}
				return
			}
			x, ok := g.account.lookup(fakeClient, fakeSpilled)
			if !ok || !x.spilled || x.class != classVidmem || x.parent != fakeDevice || x.charge.size != c.spilled || g.stats.spills.Load() != 1 {
				t.Errorf("%+v, %d spills", x, g.stats.spills.Load())
			}
			if sum := g.account.expectedLengths(g.account.clientPIDs())[0]; sum != 0 {
				t.Errorf("the audit expects %v more on the GPU", sum)
			}
			if used := g.account.byProcess()[f.task.proc.tgid].used[0]; used != 8*quota.MiB {
				t.Errorf("the process is charged %v of the GPU", used)
			}
			f.undo() // its caller was interrupted
			wantSpilled(t, g, c.left, 0)
			if g.account.isSpilled(fakeClient, fakeSpilled) {
				t.Error("still there")
			}
		})
	}
}

// TestSpillAfterTheDriver: what the card cannot give within the limit is spilled, asked for anew with what the task passed but
// without the pointers that no driver may see.
func TestSpillAfterTheDriver(t *testing.T) {
	var classes []uint32
	d := &fakeDriver{}
	g := spillGuard(t, d, 64*quota.MiB)
	d.answer = func(_ Target, call *rm.Call) syscall.Errno {
		if err := pointersCovered(g.abi, call); err != nil {
			t.Error(err)
		}
		p := call.Blocks[0].Data
		classes = append(classes, rm.U32(call.Outer, rm.AllocClass))
		status := uint32(rm.StatusOK)
		if len(classes) == 1 {
			status = rm.StatusNoMemory
			rm.PutU32(call.Outer, rm.AllocObject, 0xbad)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, 1)
			rm.PutU32(p, 0, 0xbad)
		} else if rm.U32(p, 0) == 0xbad || rm.U32(call.Outer, rm.AllocObject) != fakeSpilled {
			t.Error("the driver sees what it has answered before")
		}
		rm.PutU32(call.Outer, 40, status)
		return 0
	}
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 8<<20)
	rm.PutU64(p, rm.MemoryAddress, 0x1234)
	o := fakeAlloc(fakeDevice, fakeSpilled, classVidmem, p)
	newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o, p)
	if rm.U32(o, 40) != rm.StatusOK || len(classes) != 2 || classes[1] != classSystem {
		t.Errorf("%s, classes %#x", rm.StatusName(rm.U32(o, 40)), classes)
	}
	wantSpilled(t, g, 64*quota.MiB, 8*quota.MiB)
}

// TestSpillOff: without a spill, and on a native card, nothing goes to the host.
func TestSpillOff(t *testing.T) {
	for name, prepare := range map[string]func(u *gpuAccount){
		"no spill":      func(u *gpuAccount) { u.spill = 0 },
		"a native card": func(u *gpuAccount) { u.native = true },
	} {
		t.Run(name, func(t *testing.T) {
			g := spillGuard(t, answering(0, nil), 0)
			prepare(&g.account.gpus[0])
			if g.spills(0, quota.MiB) {
				t.Error("spilled")
			}
		})
	}
}

// TestSpillGoesBack: however spilled memory ends, it goes back to the spill, and nothing of it to the limit.
func TestSpillGoesBack(t *testing.T) {
	const second = fakeClient + 1
	mapping := func(t *testing.T, g *Guard) (*fakeCall, func(cmd uint32)) {
		c, ctl := newFakeUVMCall(t, g)
		return c, func(cmd uint32) {
			t.Helper()
			o, form := uvmCall(g, cmd, 1<<32, 8<<20, ctl)
			if form.Object >= 0 {
				rm.PutU32(o, form.Object, fakeSpilled)
			}
			if rep := c.do(cmd, o); rep != replyDone || rm.U32(o, form.Status) != 0 {
				t.Fatalf("%+v %s", rep, rm.StatusName(rm.U32(o, form.Status)))
			}
		}
	}
	held := func(t *testing.T, g *Guard) {
		t.Helper()
		wantSpilled(t, g, 0, 8*quota.MiB)
	}
	for _, c := range []struct {
		name string
		end  func(t *testing.T, g *Guard, f *fakeCall)
		left quota.Bytes // of the limit, afterwards
	}{
		{"free", func(t *testing.T, g *Guard, f *fakeCall) { f.escape(rm.EscFree, fakeFree(fakeSpilled)) }, 0},
		{"free of the device", func(t *testing.T, g *Guard, f *fakeCall) { f.escape(rm.EscFree, fakeFree(fakeDevice)) }, 8 * quota.MiB},
		{"free of the client", func(t *testing.T, g *Guard, f *fakeCall) { f.escape(rm.EscFree, fakeFree(fakeClient)) }, 8 * quota.MiB},
		{"the client's file is closed", func(t *testing.T, g *Guard, f *fakeCall) { g.account.dropFile(nil) }, 8 * quota.MiB},
		{"the heap's free", func(t *testing.T, g *Guard, f *fakeCall) {
			o := make([]byte, rm.HeapSize)
			rm.PutU32(o, rm.HeapRoot, fakeClient)
			rm.PutU32(o, rm.HeapFunction, rm.HeapFnFree)
			rm.PutU32(o, rm.HeapFreeMemory, fakeSpilled)
			f.escape(rm.EscVidHeapControl, o)
		}, 0},
		{"dup", func(t *testing.T, g *Guard, f *fakeCall) {
			g.account.addClient(second, 1, &file{})
			o := make([]byte, rm.DupSize)
			for off, v := range map[int]uint32{rm.DupClient: second, rm.DupParent: second, rm.DupObject: 9, rm.DupClientSrc: fakeClient,
				rm.DupObjectSrc: fakeSpilled} {
				rm.PutU32(o, off, v)
			}
			if f.escape(rm.EscDupObject, o); !g.account.isSpilled(second, 9) {
				t.Error("the dup is not known to be spilled")
			}
			held(t, g)
			f.escape(rm.EscFree, fakeFree(fakeSpilled))
			held(t, g)
			g.account.freeObject(second, 9)
		}, 0},
		{"UVM mapping", func(t *testing.T, g *Guard, f *fakeCall) {
			_, call := mapping(t, g)
			call(rm.UVMMapExternal)
			f.escape(rm.EscFree, fakeFree(fakeSpilled))
			held(t, g)
			if !g.account.hasZombies() {
				t.Error("no zombie")
			}
			call(rm.UVMUnmapExternal)
		}, 0},
		{"a channel that has its USERD in it", func(t *testing.T, g *Guard, f *fakeCall) {
			m, _ := g.account.lookup(fakeClient, fakeSpilled)
			o := object{handle: 10, parent: fakeDevice, kind: rm.ClassChannel, gpu: noGPU, charge: m.charge}
			g.account.addObject(fakeClient, o, noGPU, 0, 0)
			f.escape(rm.EscFree, fakeFree(fakeSpilled))
			held(t, g)
			f.escape(rm.EscFree, fakeFree(10))
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := spillGuard(t, answering(0, nil), 0)
			f := newFakeCall(t, g, fakeControl)
			spilled(t, f, fakeSpilled, 8*quota.MiB)
			c.end(t, g, f)
			wantSpilled(t, g, c.left, 0)
			if g.account.hasZombies() {
				t.Error("a zombie")
			}
		})
	}
}

// TestSpillReserve: the host keeps what spill_reserve says.
func TestSpillReserve(t *testing.T) {
	available, err := availableMemory()
	if err != nil || available < 64*quota.MiB || available > 1<<50 {
		t.Fatalf("%v, %v", available, err)
	}
	for _, c := range []struct {
		name    string
		reserve device.Part
		host    quota.Bytes
		want    bool
	}{
		{"none", device.Part{}, 0, true},
		{"little", device.Part{Bytes: quota.MiB}, 0, true},
		{"all that there is", device.Part{Bytes: available + available/2}, 0, false},
		{"everything", device.Part{Bytes: ^quota.Bytes(0)}, 0, false},
		{"a part", device.Part{Percent: 1}, available, true},
		{"the whole", device.Part{Percent: 100}, 2 * available, false},
		{"a part of what nobody knows", device.Part{Percent: 1}, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := answering(0, nil)
			g := spillGuard(t, d, 0)
			g.cfg.Settings.SpillReserve, g.cfg.HostMemory = c.reserve, c.host
			p := make([]byte, 128)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, 8<<20)
			o := fakeAlloc(fakeDevice, fakeSpilled, classVidmem, p)
			newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o, p)
			if ok := rm.U32(o, 40) == rm.StatusOK; ok != c.want || ok != (len(d.calls) > 0) || !ok && rm.U32(o, 40) != rm.StatusNoMemory {
				t.Errorf("%s, %d calls", rm.StatusName(rm.U32(o, 40)), len(d.calls))
			}
			wantSpilled(t, g, 0, map[bool]quota.Bytes{true: 8 * quota.MiB}[c.want])
		})
	}
	g := newFakeGuard(t, answering(0, nil))
	if g.hostHasRoom(^quota.Bytes(0)) {
		t.Error("room for everything")
	}
}

// TestSpilledIsRefused what gives memory to others, and it is not registered for peers.
func TestSpilledIsRefused(t *testing.T) {
	fd, _ := exportFile(t)
	exportOne := func(handle uint32) []byte {
		p := make([]byte, 24)
		rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectType, 1)
		rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectHandle, handle)
		rm.PutU32(p, rm.ExportFDFD, uint32(fd))
		return p
	}
	named := func(size int) func(handle uint32) []byte {
		return func(handle uint32) []byte {
			p := make([]byte, size)
			rm.PutU32(p, rm.PeerMemoryHandle, handle)
			return p
		}
	}
	control := func(cmd uint32, params func(handle uint32) []byte) func(f *fakeCall, handle uint32) uint32 {
		return func(f *fakeCall, handle uint32) uint32 {
			p := params(handle)
			o := fakeControlCall(fakeClient, cmd, p)
			f.escape(rm.EscControl, o, p)
			return rm.U32(o, rm.ControlStatus)
		}
	}
	for _, c := range []struct {
		name   string
		call   func(f *fakeCall, handle uint32) uint32
		status uint32
	}{
		{"export", control(0x3d05, exportOne), rm.StatusNotSupported},
		{"export of a list", control(0x3d0b, func(h uint32) []byte { return exportCall(fd, 0, fakeMemory, h) }), rm.StatusNotSupported},
		{"export of a list, last of many", control(0x3d0b, func(h uint32) []byte {
			list := make([]uint32, maxReferences/2)
			for i := range list {
				list[i] = fakeMemory
				if i >= maxReferences-3 { // of one piece of memory there may be no more
					list[i] = 0
				}
			}
			list[len(list)-1] = h
			return exportCall(fd, 0, list...)
		}), rm.StatusNotSupported},
		{"share", func(f *fakeCall, handle uint32) uint32 {
			o := make([]byte, rm.ShareSize)
			rm.PutU32(o, rm.ShareClient, fakeClient)
			rm.PutU32(o, rm.ShareObject, handle)
			o[rm.SharePolicy+rm.SharePolicyType] = shareTypeAll
			f.escape(rm.EscShare, o)
			return rm.U32(o, rm.ShareStatus)
		}, rm.StatusNotSupported},
		{"registered for peers", control(0x503c0104, named(32)), rm.StatusOK},
		{"and no longer", control(0x503c0105, named(4)), rm.StatusOK},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := answering(0, nil)
			g := spillGuard(t, d, 0)
			f := newFakeCall(t, g, fakeControl)
			spilled(t, f, fakeSpilled, 8*quota.MiB)
			d.calls = nil
			if status := c.call(f, fakeSpilled); status != c.status || len(d.calls) > 0 {
				t.Errorf("spilled memory: %s, %d calls", rm.StatusName(status), len(d.calls))
			}
			if ch := g.account.clients[fakeClient].objects[fakeSpilled].charge; ch.references != 0 || ch.handles != 1 {
				t.Errorf("held: %+v", ch)
			}
			if status := c.call(f, fakeMemory); status != rm.StatusOK || len(d.calls) == 0 {
				t.Errorf("memory on the GPU: %s, %d calls", rm.StatusName(status), len(d.calls))
			}
		})
	}
}

// TestSpillPresented: the container sees a card of its limit and its spill together.
func TestSpillPresented(t *testing.T) {
	g := spillGuard(t, &fakeDriver{}, 4*quota.MiB)
	d := g.driver.(*fakeDriver)
	d.reset(nil)
	spilled(t, newFakeCall(t, g, fakeControl), fakeSpilled, 16*quota.MiB)
	total, free := testLimit+testSpill, 4*quota.MiB+testSpill-16*quota.MiB
	check := func(total, free quota.Bytes) {
		t.Helper()
		p := make([]byte, 1028)
		rm.PutU32(p, rm.FBInfoCount, 2)
		presented(t, g, d, fakeDevice, controlFBInfoV2, p, func(call *rm.Call) {
			putWords(call.Blocks[0].Data, rm.FBInfoList, rm.FBIndexTotalRAMSize, 80<<20, rm.FBIndexHeapFree, 70<<20)
		})
		if got := words(p, rm.FBInfoList, 4); quota.Bytes(got[1])*quota.KiB != total || quota.Bytes(got[3])*quota.KiB != free {
			t.Errorf("FB_GET_INFO: %d and %d KiB, want %v and %v", got[1], got[3], total, free)
		}
		o := make([]byte, rm.HeapSize)
		rm.PutU32(o, rm.HeapRoot, fakeClient)
		rm.PutU32(o, rm.HeapParent, fakeDevice)
		rm.PutU32(o, rm.HeapFunction, rm.HeapFnInfo)
		d.reset(nil)
		newFakeCall(t, g, fakeControl).escape(rm.EscVidHeapControl, o)
		if quota.Bytes(rm.U64(o, rm.HeapTotal)) != total || quota.Bytes(rm.U64(o, rm.HeapFree)) != free {
			t.Errorf("heap info: %d and %d, want %v and %v", rm.U64(o, rm.HeapTotal), rm.U64(o, rm.HeapFree), total, free)
		}
	}
	check(total, free)
	// Less than what is used, of either.
	g.account.setLimits(0, testLimit/2, 8*quota.MiB)
	check(testLimit/2+8*quota.MiB, 0)
	g.account.setLimits(0, testLimit, 8*quota.MiB)
	check(testLimit+8*quota.MiB, 4*quota.MiB)
}

// TestSpillLive: limit and spill change while the container runs, and the vGPU page follows.
func TestSpillLive(t *testing.T) {
	path := page.File(t.TempDir(), "n")
	if err := page.Create(path, page.Header{Flags: page.FlagGuard}, []page.VGPU{{Limit: uint64(testLimit)}}); err != nil {
		t.Fatal(err)
	}
	p, err := page.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	g := withClient(newFakeGuard(t, answering(0, nil)))
	g.account.publishTo(p)
	f := newFakeCall(t, g, fakeControl)
	shows := func(limit, used, spill, spilled, managed quota.Bytes) {
		t.Helper()
		got, err := page.Read(filepath.Clean(path))
		if err != nil {
			t.Fatal(err)
		}
		want := page.VGPU{Limit: uint64(limit), Used: uint64(used), Spill: uint64(spill), Spilled: uint64(spilled), Managed: uint64(managed)}
		if *got.VGPU(0) != want {
			t.Errorf("the page shows %+v, want %+v", *got.VGPU(0), want)
		}
	}
	refused := func(size quota.Bytes) {
		t.Helper()
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, uint64(size))
		o := fakeAlloc(fakeDevice, fakeSpilled+1, classVidmem, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusNoMemory {
			t.Errorf("%v: %s", size, rm.StatusName(rm.U32(o, 40)))
		}
	}
	shows(testLimit, 8*quota.MiB, 0, 0, 0)
	refused(testLimit)
	g.account.setLimits(0, 16*quota.MiB, 32*quota.MiB)
	shows(16*quota.MiB, 8*quota.MiB, 32*quota.MiB, 0, 0)
	spilled(t, f, fakeSpilled, 10*quota.MiB)
	shows(16*quota.MiB, 8*quota.MiB, 32*quota.MiB, 10*quota.MiB, 0)
	g.account.forceManaged(quota.MiB)
	shows(16*quota.MiB, 9*quota.MiB, 32*quota.MiB, 10*quota.MiB, quota.MiB)
	g.account.releaseManaged(quota.MiB)
	g.account.setLimits(0, 16*quota.MiB, 4*quota.MiB) // less than what is used
	shows(16*quota.MiB, 8*quota.MiB, 4*quota.MiB, 10*quota.MiB, 0)
	refused(10 * quota.MiB)
	g.account.setLimits(0, 0, 0) // a record of before
	shows(16*quota.MiB, 8*quota.MiB, 4*quota.MiB, 10*quota.MiB, 0)
	f.escape(rm.EscFree, fakeFree(fakeSpilled))
	shows(16*quota.MiB, 8*quota.MiB, 4*quota.MiB, 0, 0)
	refused(10 * quota.MiB)
	spilled(t, f, fakeSpilled, 0) // as nothing: it was put on the GPU
	g.account.setLimits(0, 4*quota.MiB, 4*quota.MiB)
	spilled(t, f, fakeSpilled+2, 4*quota.MiB)
	shows(4*quota.MiB, 8*quota.MiB, 4*quota.MiB, 4*quota.MiB, 0)
	g.account.freeObject(fakeClient, fakeClient)
	shows(4*quota.MiB, 0, 4*quota.MiB, 0, 0)
	runtime.KeepAlive(unsafe.Pointer(p))
}

// TestSpillRace: allocations of several threads that fit one by one but not together go to the host, they are not refused.
func TestSpillRace(t *testing.T) {
	const threads = 4
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2 * threads)) // so that they get into each other's way
	g := newFakeGuard(t, silentDriver{})
	var calls []*fakeCall
	for range threads {
		calls = append(calls, newFakeCall(t, g, fakeControl))
	}
	for round := range 3000 {
		g.account = newAccount(g.cfg.GPUs)
		g.account.setLimits(0, 8*quota.MiB, (threads-1)*8*quota.MiB)
		results := make(chan uint32, threads)
		start := make(chan struct{})
		for i, f := range calls {
			client := fakeClient + uint32(i)
			g.account.addClient(client, 1, nil)
			g.account.addObject(client, object{handle: fakeDevice, parent: client, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
			go func() {
				p := make([]byte, 128)
				rm.PutU32(p, rm.MemoryOwner, 1)
				rm.PutU64(p, rm.MemorySize, 8<<20)
				rm.PutU32(p, rm.MemoryAttr, attrPageHuge<<rm.MemoryAttrPageShift)
				o := fakeAlloc(fakeDevice, fakeSpilled, classVidmem, p)
				rm.PutU32(o, rm.AllocRoot, client)
				<-start
				f.escape(rm.EscAlloc, o, p)
				results <- rm.U32(o, 40)
			}()
		}
		close(start)
		refused := 0
		for range threads {
			if <-results != rm.StatusOK {
				refused++
			}
		}
		if u := g.account.usage(0); refused > 0 || u.used != u.limit || u.spilled != u.spill {
			t.Fatalf("round %d: %d refused, used %v, spilled %v", round, refused, u.used, u.spilled)
		}
	}
}
