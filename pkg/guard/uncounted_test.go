// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// keepers are the calls that make the driver keep more of an object. Each returns the call's status.
func keepers(t *testing.T, g *Guard) map[string]func(handle uint32) uint32 {
	f := newFakeCall(t, g, fakeControl)
	uvm, ctl := newFakeUVMCall(t, g)
	const other = fakeClient + 1
	file, err := g.followFile(f.fd, f.node)
	if err != nil {
		t.Fatal(err)
	}
	g.account.clients[fakeClient].file = file
	g.account.addClient(other, os.Getpid(), nil)
	g.account.addObject(other, object{handle: fakeDevice, parent: other, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	g.account.addObject(fakeClient, object{handle: fakeRange, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU},
		noGPU, 0, 0)
	const group = 0x5c000010
	g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, class: classChannelGroup, kind: rm.ClassTSG, gpu: noGPU,
		group: &channelGroup{graphics: true}}, noGPU, 0, 0)
	dup := func(into uint32) func(uint32) uint32 {
		return func(handle uint32) uint32 {
			o := make([]byte, rm.DupSize)
			putWords(o, 0, into, fakeDevice, ours, fakeClient, handle)
			f.escape(rm.EscDupObject, o)
			return rm.U32(o, rm.DupStatus)
		}
	}
	channel := func(off int) func(uint32) uint32 {
		return func(handle uint32) uint32 {
			p := make([]byte, 368)
			rm.PutU32(p, off, handle)
			return allocStatus(f, group, 0xc86f, p)
		}
	}
	control := func(cmd uint32, p []byte) uint32 {
		o := fakeControlCall(fakeClient, cmd, p)
		f.escape(rm.EscControl, o, p)
		return rm.U32(o, rm.ControlStatus)
	}
	return map[string]func(handle uint32) uint32{
		"dup":                     dup(fakeClient),
		"dup into another client": dup(other),
		"export": func(handle uint32) uint32 {
			info, _ := g.abi.Control(0x3d05)
			p := make([]byte, info.Size)
			fd, _ := exportFile(t)
			rm.PutU32(p, info.FDOff, uint32(fd))
			rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectHandle, handle)
			return control(0x3d05, p)
		},
		"export of a list": func(handle uint32) uint32 {
			fd, _ := exportFile(t)
			return control(0x3d0b, exportCall(fd, 0, fakeMemory, handle))
		},
		"UVM mapping": func(handle uint32) uint32 {
			o, form := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
			rm.PutU32(o, form.Object, handle)
			uvm.do(rm.UVMMapExternal, o)
			return rm.U32(o, form.Status)
		},
		"window": func(handle uint32) uint32 {
			fd, _ := exportFile(t)
			o := make([]byte, rm.MapMemorySize)
			putWords(o, 0, fakeClient, fakeDevice, handle)
			rm.PutU64(o, rm.MapMemoryLength, 4096)
			rm.PutU32(o, rm.MapMemoryFD, uint32(fd))
			f.escape(rm.EscMapMemory, o)
			return rm.U32(o, rm.MapMemoryStatus)
		},
		"RM_MAP_MEMORY_DMA": func(handle uint32) uint32 {
			o := mapDMA(fakeClient, fakeRange, handle, 0, 4096)
			f.escape(rm.EscMapDMA, o)
			return rm.U32(o, 56)
		},
		"context DMA": func(handle uint32) uint32 {
			p := make([]byte, rm.ContextDMASize)
			rm.PutU32(p, rm.ContextDMAMemory, handle)
			rm.PutU64(p, rm.ContextDMALimit, 63)
			return allocStatus(f, fakeDevice, classContextDMA, p)
		},
		"error notifier": channel(rm.ChannelNotifiers[0]),
		"USERD":          channel(rm.ChannelUserdMemory),
	}
}

// TestUncounted: nothing keeps more of host memory whose references the guard cannot count: another thread has changed RM_ALLOC_MEMORY
// while that ran in the task. A container could have it lost for good (maxReferences).
func TestUncounted(t *testing.T) {
	const memory, second = 0x5c0000f1, 0x5c000003
	for name, x := range map[string]struct {
		noted  bool   // the guard has seen an RM_ALLOC_MEMORY of the handle below fakeDevice
		class  uint32 // what the driver has under it; 0: nothing
		parent uint32 // below what
		during bool   // it has that from the moment on when it has been asked
		want   uint32
	}{
		"as it was said":                   {true, classSystem, fakeDevice, false, rm.StatusOK},
		"the caller's own, as it was said": {true, classOSDescriptor, fakeDevice, false, rm.StatusOK},
		"under another handle":             {false, classSystem, fakeDevice, false, rm.StatusInvalidObjectHandle},
		"the caller's own, under another":  {false, classOSDescriptor, fakeDevice, false, rm.StatusInvalidObjectHandle},
		"below another parent":             {true, classSystem, second, false, rm.StatusInvalidObjectHandle},
		"of another class":                 {true, rmclient.ClassDevice, fakeDevice, false, rm.StatusInvalidObjectHandle},
		"refused":                          {true, 0, 0, false, rm.StatusInvalidObjectHandle},
		"nothing":                          {false, 0, 0, false, rm.StatusObjectNotFound},
		"made meanwhile":                   {false, classSystem, fakeDevice, true, rm.StatusObjectNotFound},
	} {
		u := &unseenObjects{}
		d := &fakeDriver{unseen: true, answer: u.answer}
		g := withClient(newFakeGuard(t, d))
		g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
		ways := keepers(t, g)
		if x.noted {
			if rep := noteMemory(newFakeCall(t, g, fakeControl), classOSDescriptor, fakeDevice, memory); !rep.resume {
				t.Fatalf("%+v", rep)
			}
		}
		for way, keep := range ways {
			u.classes = map[uint32]uint32{fakeDevice: rmclient.ClassDevice}
			there := func() { u.classes[memory], u.parents = x.class, map[uint32]uint32{memory: x.parent} }
			if x.class != 0 && !x.during {
				there()
			}
			kept := false
			d.answer = func(tgt Target, call *rm.Call) syscall.Errno {
				e := u.answer(tgt, call)
				switch nr := call.NR(); {
				case rm.UVMShaped(call.Cmd), nr == rm.EscDupObject, nr == rm.EscMapDMA, nr == rm.EscAlloc,
					nr == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd)>>8 == 0x3d:
					kept = true
				case nr == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlHandleInfo && x.during:
					there()
				}
				return e
			}
			want := x.want
			if way == "window" && want == rm.StatusObjectNotFound {
				want = rm.StatusInvalidObjectHandle
			}
			if s := keep(memory); s != want || kept != (want == rm.StatusOK) {
				t.Errorf("%s, %s: %s, the driver was asked: %v", name, way, rm.StatusName(s), kept)
			}
		}
		said := false
		for msg := range g.logged {
			said = said || strings.Contains(msg, "below another device")
		}
		if said != (name == "below another parent") {
			t.Errorf("%s: the log says that it is below another device: %v", name, said)
		}
	}
}

// TestUncountedBeforeUpgrade: of records without a charge that a guard before an upgrade made of what it had not seen nothing is kept.
func TestUncountedBeforeUpgrade(t *testing.T) {
	const imported, mapped = 0x5c0000f1, 0x5c0000f2
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	ways := keepers(t, g)
	g.account.addObject(fakeClient, object{handle: imported, parent: fakeDevice, kind: rm.ClassPlain, gpu: noGPU}, noGPU, 0, 0)
	g.account.addObject(fakeClient, object{handle: mapped, parent: fakeDevice, class: classSystem, kind: rm.ClassSysmem, gpu: noGPU,
		host: true, madeInTask: true}, noGPU, 0, 0)
	for way, keep := range ways {
		for _, handle := range []uint32{imported, mapped} {
			if s := keep(handle); s == rm.StatusOK {
				t.Errorf("%s of %#x", way, handle)
			}
		}
	}
}

// countingDriver has host memory of tasks, and counts as the driver does who refers to it: handles, UVM mappings.
type countingDriver struct {
	fakeDriver
	objects map[uint32]counted
	refers  map[int]int // by memory
	most    int
	next    int
	// between, if not nil, is called when the driver has told of an object: another thread's RM_ALLOC_MEMORY gets in.
	between func()
}

func newCountingDriver() *countingDriver {
	d := &countingDriver{objects: map[uint32]counted{}, refers: map[int]int{}}
	d.unseen, d.answer = true, d.exec
	return d
}

type counted struct {
	parent uint32
	memory int
}

// allocMemory is the driver's part of RM_ALLOC_MEMORY, whatever the guard has seen.
func (d *countingDriver) allocMemory(handle, parent uint32) {
	if status := d.mayAlloc(handle, parent); status != rm.StatusOK {
		return
	}
	d.next++
	d.objects[handle] = counted{parent, d.next}
	d.refers[d.next] = 1
}

func (d *countingDriver) mayAlloc(handle, parent uint32) (status uint32) {
	if _, there := d.objects[parent]; !there {
		return rm.StatusObjectNotFound
	}
	if _, taken := d.objects[handle]; taken {
		return rm.StatusInsertDuplicateName
	}
	return rm.StatusOK
}

// makeDevice is what RM_ALLOC of a device comes to, in the driver and in the account.
func (d *countingDriver) makeDevice(handle uint32) {
	d.objects[handle] = counted{parent: fakeClient}
	d.guard.account.addObject(fakeClient, object{handle: handle, parent: fakeClient, class: rmclient.ClassDevice, kind: rm.ClassDevice},
		noGPU, 0, 0)
}

func (d *countingDriver) refer(memory int) {
	d.refers[memory]++
	d.most = max(d.most, d.refers[memory])
}

func (d *countingDriver) free(handle uint32) {
	delete(d.objects, handle)
	for h, o := range d.objects {
		if o.parent == handle {
			delete(d.objects, h)
			d.refers[o.memory]--
		}
	}
}

func (d *countingDriver) exec(_ Target, call *rm.Call) syscall.Errno {
	o := call.Outer
	switch nr := call.NR(); {
	case rm.UVMShaped(call.Cmd):
		form, _ := d.guard.abi.UVM(call.Cmd)
		x, ok := d.objects[rm.U32(o, form.Object)]
		if !ok {
			rm.PutU32(o, form.Status, rm.StatusObjectNotFound)
			return 0
		}
		d.refer(x.memory)
	case nr == rm.EscDupObject:
		x, ok := d.objects[rm.U32(o, rm.DupObjectSrc)]
		_, taken := d.objects[rm.U32(o, rm.DupObject)]
		if !ok || taken {
			rm.PutU32(o, rm.DupStatus, rm.StatusObjectNotFound)
			return 0
		}
		d.objects[rm.U32(o, rm.DupObject)] = counted{rm.U32(o, rm.DupParent), x.memory}
		d.refer(x.memory)
	case nr == rm.EscAlloc: // of memory
		handle, parent := rm.U32(o, rm.AllocObject), rm.U32(o, rm.AllocParent)
		rm.PutU32(o, 40, d.mayAlloc(handle, parent))
		d.allocMemory(handle, parent)
	case nr == rm.EscFree: // the driver says OK of what is not there, too (RS_COMPATABILITY_MODE)
		handle := rm.U32(o, rm.FreeObject)
		if x, ok := d.objects[handle]; ok {
			d.refers[x.memory]--
			d.free(handle)
		}
	case nr == rm.EscControl && rm.U32(o, rm.ControlCmd) == controlHandleInfo:
		p := call.Blocks[0].Data
		x, ok := d.objects[rm.U32(p, 0)]
		switch {
		case !ok:
			rm.PutU32(o, rm.ControlStatus, rm.StatusObjectNotFound)
		case rm.U32(p, handleInfoIndex) == handleInfoParent:
			rm.PutU32(p, handleInfoResult, x.parent)
		case x.memory == 0:
			rm.PutU32(p, handleInfoResult, rmclient.ClassDevice)
		default:
			rm.PutU32(p, handleInfoResult, classSystem)
		}
		if d.between != nil {
			d.between()
		}
	}
	return 0
}

// TestUncountedWalk: whatever threads make of RM_ALLOC_MEMORY, and when, memory is never referred to as often as the driver cannot count.
func TestUncountedWalk(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 1))
	most := 0
	for range 50 {
		d := newCountingDriver()
		most = max(most, uncountedWalk(t, r, d, 120))
	}
	if most > maxReferences || most < 100 {
		t.Errorf("seed %d: memory was referred to %d times", seed, most)
	}
}

func uncountedWalk(t *testing.T, r *rand.Rand, d *countingDriver, steps int) (most int) {
	const devices = 0x5d000000
	g := withClient(newFakeGuard(t, d))
	d.guard = g
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	f := newFakeCall(t, g, fakeControl)
	uvm, ctl := newFakeUVMCall(t, g)
	device := func() uint32 { return devices + r.Uint32N(2) }
	memory := func() uint32 { return theirs + r.Uint32N(3) }
	place := uint64(1)
	tid, args, end := stuckThread(t)
	defer end()
	inside := func(is bool) { g.insideMemoryCall(tid, args, is) }
	for i := range uint32(2) {
		d.makeDevice(devices + i)
	}
	d.between = func() {
		if r.IntN(50) == 0 {
			d.allocMemory(memory(), device())
		}
	}
	for range steps {
		switch r.IntN(12) {
		case 0: // as it was said
			h, p := memory(), device()
			if noteMemory(f, classSystem, p, h).resume {
				d.allocMemory(h, p)
			}
		case 1: // changed
			noteMemory(f, classSystem, device(), memory())
			d.allocMemory(memory(), device())
		case 2: // refused
			noteMemory(f, classSystem, device(), memory())
		case 3:
			d.allocMemory(memory(), device())
		case 4, 5: // many handles
			source, below := memory(), device()
			for range 100 {
				o := make([]byte, rm.DupSize)
				place++
				putWords(o, 0, fakeClient, below, uint32(0x60000000+place), fakeClient, source)
				f.escape(rm.EscDupObject, o)
			}
		case 6: // many mappings
			source := memory()
			for range 100 {
				place++
				o, form := uvmCall(g, rm.UVMMapExternal, place<<32, 1<<20, ctl)
				rm.PutU32(o, form.Object, source)
				uvm.do(rm.UVMMapExternal, o)
			}
		case 7:
			f.escape(rm.EscFree, fakeFree(memory()))
		case 8: // with all below it
			f.escape(rm.EscFree, fakeFree(device()))
		case 9:
			if h := device(); d.mayAlloc(h, h) == rm.StatusObjectNotFound {
				d.makeDevice(h)
			}
		case 10: // by the guard
			d.ownMemory(f, device(), memory())
		case 11: // made, not mapped, and freed, while others make calls
			h, p := memory(), device()
			if d.mayAlloc(h, p) != rm.StatusOK || !noteMemory(f, classSystem, p, h).resume {
				continue
			}
			d.allocMemory(h, p)
			inside(true)
			f.escape(rm.EscFree, fakeFree([]uint32{h, p}[r.IntN(2)]))
			d.ownMemory(f, device(), h)
			d.freeByTask(h)
			inside(false)
		}
	}
	return d.most
}

// TestUncountedBelowAbsent: calls for host memory below a device that is not there yet, which the driver refuses, leave nothing that is
// taken for what another thread makes later.
func TestUncountedBelowAbsent(t *testing.T) {
	const one, two, orphan, host, other = 0x5d000001, 0x5d000002, 0x5c0000e0, 0x5c0000e1, 0x5c0000e2
	d := newCountingDriver()
	g := withClient(newFakeGuard(t, d))
	d.guard = g
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	f := newFakeCall(t, g, fakeControl)
	next := uint32(0x60000000)
	dups := func() {
		for range 300 {
			o := make([]byte, rm.DupSize)
			next++
			putWords(o, 0, fakeClient, two, next, fakeClient, host)
			f.escape(rm.EscDupObject, o)
		}
	}
	let := func(parent, handle uint32) bool { return noteMemory(f, classSystem, parent, handle).resume }
	let(one, orphan)
	d.makeDevice(one)
	d.makeDevice(two)
	if let(one, orphan) { // now it is made, and freed
		d.allocMemory(orphan, one)
	}
	f.escape(rm.EscFree, fakeFree(orphan))
	d.ownMemory(f, one, host)
	f.escape(rm.EscFree, fakeFree(one))
	d.makeDevice(one)
	for _, h := range []uint32{other, other + 1} { // so that the device has some below it again
		if let(one, h) {
			d.allocMemory(h, one)
		}
	}
	let(two, other+2)
	d.allocMemory(host, two) // the race that is won
	dups()
	f.escape(rm.EscFree, fakeFree(one))
	let(two, host) // the driver refuses it: it has that
	dups()
	if d.most > maxReferences {
		t.Errorf("memory was referred to %d times", d.most)
	}
}

// ownMemory has the guard make host memory.
func (d *countingDriver) ownMemory(f *fakeCall, parent, handle uint32) (status uint32) {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 4096)
	o := fakeAlloc(parent, handle, classSystem, p)
	f.escape(rm.EscAlloc, o, p)
	return rm.U32(o, 40)
}

// TestNotAdopted: what a swapped call has made becomes no record's by a call under its name, which the driver refuses as it has that name.
func TestNotAdopted(t *testing.T) {
	const asked, made = 0x5c0000e1, 0x5c0000e2
	d := newCountingDriver()
	g := withClient(newFakeGuard(t, d))
	d.guard = g
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	f := newFakeCall(t, g, fakeControl)
	d.objects[fakeDevice] = counted{parent: fakeClient}
	noteMemory(f, classOSDescriptor, fakeDevice, asked)
	d.allocMemory(made, fakeDevice)
	if rep := noteMemory(f, classOSDescriptor, fakeDevice, made); rep.resume || f.statusWord() != rm.StatusInsertDuplicateName {
		t.Errorf("its name: %s", rm.StatusName(f.statusWord()))
	}
	o := make([]byte, rm.DupSize)
	putWords(o, 0, fakeClient, fakeDevice, ours, fakeClient, made)
	if f.escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) == rm.StatusOK {
		t.Error("it has a second handle")
	}
}
