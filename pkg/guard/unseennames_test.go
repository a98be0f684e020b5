// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// unseenObjects is a driver in which fakeClient has objects that its guard has not seen made, by handle; all others are what the guard's
// account says. A file of another client's is told nothing, as RM does.
type unseenObjects struct {
	classes map[uint32]uint32
	parents map[uint32]uint32
	on      int // the only file that is told; 0: each
}

func (u *unseenObjects) answer(t Target, call *rm.Call) syscall.Errno {
	if call.NR() != rm.EscControl || rm.U32(call.Outer, rm.ControlCmd) != controlHandleInfo ||
		rm.U32(call.Outer, rm.ControlClient) != fakeClient {
		return 0
	}
	if u.on != 0 && t.FD != u.on {
		rm.PutU32(call.Outer, rm.ControlStatus, rm.StatusInvalidClient)
		return 0
	}
	p := call.Blocks[0].Data
	class, ok := u.classes[rm.U32(p, 0)]
	switch {
	case !ok:
		rm.PutU32(call.Outer, rm.ControlStatus, rm.StatusObjectNotFound)
	case rm.U32(p, handleInfoIndex) == handleInfoClass:
		rm.PutU32(p, handleInfoResult, class)
	default:
		rm.PutU32(p, handleInfoResult, u.parents[rm.U32(p, 0)])
	}
	return 0
}

const (
	theirs = 0x5c0000f0 // what a root alloc has made that became another call
	ours   = 0x5c0000e0
)

func allocStatus(c *fakeCall, parent, class uint32, params []byte) uint32 {
	o := fakeAlloc(parent, ours, class, params)
	c.escape(rm.EscAlloc, o, params)
	return rm.U32(o, 40)
}

func noteMemory(c *fakeCall, class, parent, handle uint32) reply {
	return c.escape(rm.EscAllocMemory, memoryCallOf(class, parent, handle))
}

func memoryCallOf(class, parent, handle uint32) []byte {
	o := make([]byte, rm.AllocMemorySize)
	rm.PutU32(o, rm.AllocMemoryRoot, fakeClient)
	rm.PutU32(o, rm.AllocMemoryParent, parent)
	rm.PutU32(o, rm.AllocMemoryObject, handle)
	rm.PutU32(o, rm.AllocMemoryClass, class)
	rm.PutU64(o, rm.AllocMemoryLimit, 4095)
	return o
}

// TestUnseenBehindRecord: what the account knows of what a task makes itself is no proof that the handle is that. RM_ALLOC_MEMORY of pages
// that are not mapped is refused, and recorded.
func TestUnseenBehindRecord(t *testing.T) {
	for name, record := range map[string]func(c *fakeCall){
		"host memory that the driver has refused": func(c *fakeCall) {
			if rep := noteMemory(c, classOSDescriptor, fakeDevice, theirs); !rep.resume {
				t.Fatalf("%+v", rep)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			u := &unseenObjects{classes: map[uint32]uint32{}}
			g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
			c := newFakeCall(t, g, fakeControl)
			record(c)
			u.classes[theirs] = rmclient.ClassDevice
			// The device uses a neighbour's address space (hClientShare), and this would be a name of that.
			p := make([]byte, 56)
			rm.PutU32(p, rm.VASpaceIndex, rm.VASpaceDevice)
			if s := allocStatus(c, theirs, 0x90f1, p); s != rm.StatusInvalidObjectHandle {
				t.Errorf("an address space below it: %s", rm.StatusName(s))
			}
			for name, nr := range map[string]uint32{"mapping": rm.EscMapDMA, "unmapping": rm.EscUnmapDMA} {
				for _, x := range [][2]uint32{{theirs, ours}, {fakeDevice, theirs}} {
					u.classes[ours] = classVirtual
					g.account.addObject(fakeClient, object{handle: ours, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU},
						noGPU, 0, 0)
					o := make([]byte, map[uint32]int{rm.EscMapDMA: 64, rm.EscUnmapDMA: 48}[nr])
					putWords(o, rm.DMAClient, fakeClient, x[0], x[1], fakeMemory)
					off, _ := g.abi.StatusOff(nr, len(o))
					if mapped, ok := g.abi.MapDMA(len(o)); ok && nr == rm.EscMapDMA {
						rm.PutU64(o, mapped.Length, 4096)
					}
					c.escape(nr, o)
					if s := rm.U32(o, off); s != rm.StatusInvalidObjectHandle {
						t.Errorf("%s, device and range %#x: %s", name, x, rm.StatusName(s))
					}
				}
			}
			p = make([]byte, 4)
			o := fakeControlCall(theirs, controlNumSubdevices, p)
			c.escape(rm.EscControl, o, p)
			if s := rm.U32(o, rm.ControlStatus); s != rm.StatusInvalidObjectHandle {
				t.Errorf("a control: %s", rm.StatusName(s))
			}
		})
	}
}

// TestKnownIsNotAsked: a call on an object that the guard has made does not depend on what the driver says of its handle. On an H200 each
// CUDA context was refused when it did (c93be0e8).
func TestKnownIsNotAsked(t *testing.T) {
	u := &unseenObjects{classes: map[uint32]uint32{}}
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
	c := newFakeCall(t, g, fakeControl)
	const channel, compute = 0x5c000010, 0x5c000011
	g.account.addObject(fakeClient, object{handle: channel, parent: fakeDevice, class: 0xc86f, kind: rm.ClassChannel, gpu: noGPU}, noGPU, 0, 0)
	g.account.addObject(fakeClient, object{handle: compute, parent: channel, class: 0xcbc0, gpu: noGPU}, noGPU, 0, 0)
	for _, object := range []uint32{channel, compute} {
		if c.isUnseen(c.target(), fakeClient, object) {
			t.Errorf("%#x is taken for one that the guard has not seen made", object)
		}
	}
}

// TestUnseenInParameters: an object that names an address space, or memory, by its parameters uses it as well as one below it.
func TestUnseenInParameters(t *testing.T) {
	u := &unseenObjects{classes: map[uint32]uint32{theirs: 0x90f1}}
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
	c := newFakeCall(t, g, fakeControl)
	const group = 0x5c000010
	g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, class: classChannelGroup, kind: rm.ClassTSG, gpu: noGPU,
		group: &channelGroup{graphics: true}}, noGPU, 0, 0)
	u.classes[group] = classChannelGroup
	for _, x := range []struct {
		name   string
		parent uint32
		class  uint32
		off    int
	}{
		{"a channel group's address space", fakeDevice, classChannelGroup, 8},
		{"a channel's address space", group, 0xc86f, rm.ChannelVASpace},
		{"a channel's context share", group, 0xc86f, rm.ChannelContextShare},
		{"a channel's USERD", group, 0xc86f, rm.ChannelUserdMemory},
		{"a context share's address space", group, 0x9067, 0},
		{"a range's address space", fakeDevice, classVirtual, rm.MemoryVASpace},
		{"all of an address space as memory", fakeDevice, classNoMemory, 16},
		{"peers", fakeClient, 0x503b, 0},
		{"peers, the second", fakeClient, 0x503b, 4},
	} {
		class, ok := g.abi.Class(x.class)
		if !ok {
			t.Fatal(x.name)
		}
		p := make([]byte, class.ParamsSize)
		if x.class == classVirtual {
			rm.PutU64(p, rm.MemorySize, 2<<20)
		}
		if s := allocStatus(c, x.parent, x.class, p); s != rm.StatusOK {
			t.Errorf("%s: %s without it", x.name, rm.StatusName(s))
		}
		g.account.freeObject(fakeClient, ours)
		rm.PutU32(p, x.off, theirs)
		if s := allocStatus(c, x.parent, x.class, p); s != rm.StatusInvalidObjectHandle {
			t.Errorf("%s: %s", x.name, rm.StatusName(s))
		}
		g.account.freeObject(fakeClient, ours)
	}
	o := make([]byte, rm.HeapSize)
	rm.PutU32(o, rm.HeapRoot, fakeClient)
	rm.PutU32(o, rm.HeapParent, fakeDevice)
	rm.PutU32(o, rm.HeapFunction, rm.HeapFnAllocSize)
	rm.PutU32(o, rm.HeapAllocFlags, rm.MemoryFlagVirtual)
	rm.PutU64(o, rm.HeapAllocSize, 2<<20)
	rm.PutU32(o, rm.HeapVASpace, theirs)
	c.escape(rm.EscVidHeapControl, o)
	if s := rm.U32(o, rm.HeapStatus); s != rm.StatusInvalidObjectHandle {
		t.Errorf("a range of the heap's: %s", rm.StatusName(s))
	}
}

// TestUnseenParent: what is made below an object that the guard does not know of ends with it unseen, also while a channel writes errors
// there.
func TestUnseenParent(t *testing.T) {
	const memory = 0x5c0000e2
	u := &unseenObjects{classes: map[uint32]uint32{theirs: rmclient.ClassDevice, memory: classSystem}}
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
	c := newFakeCall(t, g, fakeControl)
	g.account.addObject(fakeClient, object{handle: memory, parent: fakeDevice, class: classSystem, kind: rm.ClassSysmem,
		gpu: noGPU, host: true,
		size: 4096}, 0, 0, 4096)
	o := make([]byte, rm.DupSize)
	rm.PutU32(o, rm.DupClient, fakeClient)
	rm.PutU32(o, rm.DupParent, theirs)
	rm.PutU32(o, rm.DupObject, ours)
	rm.PutU32(o, rm.DupClientSrc, fakeClient)
	rm.PutU32(o, rm.DupObjectSrc, memory)
	c.escape(rm.EscDupObject, o)
	if s := rm.U32(o, rm.DupStatus); s != rm.StatusInvalidObjectHandle {
		t.Errorf("a dup: %s", rm.StatusName(s))
	}
	for _, cmd := range []uint32{0x3d06, 0x3d0c} {
		ctl, _ := g.abi.Control(cmd)
		p := make([]byte, ctl.Size)
		fd := dupFD(t, c.fd)
		f, err := g.followFile(fd, node{kind: nodeControl})
		if err != nil {
			t.Fatal(err)
		}
		f.exporter = true
		rm.PutU32(p, ctl.FDOff, uint32(fd))
		rm.PutU32(p, importObjectsParent, theirs)
		if cmd == 0x3d06 {
			rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectParent, theirs)
		}
		o = fakeControlCall(fakeClient, cmd, p)
		c.escape(rm.EscControl, o, p)
		if s := rm.U32(o, rm.ControlStatus); s != rm.StatusInvalidObjectHandle {
			t.Errorf("%#x: %s", cmd, rm.StatusName(s))
		}
	}
}

// TestUnseenOnAnotherFile: the source of a dup may be a client on another file, where alone the driver tells of its objects.
func TestUnseenOnAnotherFile(t *testing.T) {
	const second = fakeClient + 1
	u := &unseenObjects{classes: map[uint32]uint32{theirs: 0x90f1}}
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true}))
	src, dst := newFakeCall(t, g, fakeControl), newFakeCall(t, g, fakeControl)
	f, err := g.followFile(src.fd, src.node)
	if err != nil {
		t.Fatal(err)
	}
	g.account.clients[fakeClient].file = f
	g.account.addClient(second, dst.task.proc.tgid, nil)
	g.account.addObject(second, object{handle: fakeDevice, parent: second, class: rmclient.ClassDevice, kind: rm.ClassDevice, gpu: 0}, noGPU,
		0, 0)
	g.driver.(*fakeDriver).answer = func(t Target, call *rm.Call) syscall.Errno {
		if order := kcmpSame(g.files.self, t.FD, src.fd); t.FD >= 0 && order {
			u.on = t.FD
		} else {
			u.on = -1
		}
		return u.answer(t, call)
	}
	o := make([]byte, rm.DupSize)
	rm.PutU32(o, rm.DupClient, second)
	rm.PutU32(o, rm.DupParent, fakeDevice)
	rm.PutU32(o, rm.DupObject, ours)
	rm.PutU32(o, rm.DupClientSrc, fakeClient)
	rm.PutU32(o, rm.DupObjectSrc, theirs)
	dst.escape(rm.EscDupObject, o)
	if s := rm.U32(o, rm.DupStatus); s != rm.StatusInvalidObjectHandle {
		t.Errorf("%s", rm.StatusName(s))
	}
}

// TestMadeBetween: a call that names what there is not is not made if a root alloc was let through since: that can have made it.
func TestMadeBetween(t *testing.T) {
	u := &unseenObjects{classes: map[uint32]uint32{}}
	d := &fakeDriver{unseen: true}
	g := withClient(newFakeGuard(t, d))
	c := newFakeCall(t, g, fakeControl)
	asked := false
	d.answer = func(tt Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlNumSubdevices {
			asked = true
		}
		e := u.answer(tt, call)
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlHandleInfo && u.classes[theirs] == 0 {
			// Another thread's root alloc begins now, makes it, and is over: its client is there, as somebody else has made it.
			fd, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			other := newFakeCall(t, g, fakeControl)
			unix.Close(fd)
			if rep := other.escape(rm.EscAlloc, rootOuter()); !rep.resume {
				t.Fatalf("%+v", rep)
			}
			g.rootAnswered(other.root, true)
			u.classes[theirs] = rmclient.ClassDevice
			f := other.root
			f.mu.Lock()
			g.settleRoot(f, fakeClient+7)
			f.mu.Unlock()
		}
		return e
	}
	p := make([]byte, 4)
	o := fakeControlCall(theirs, controlNumSubdevices, p)
	c.escape(rm.EscControl, o, p)
	if s := rm.U32(o, rm.ControlStatus); asked || s != rm.StatusInvalidObjectHandle {
		t.Errorf("asked %v: %s", asked, rm.StatusName(s))
	}
}

// TestNotifierElsewhere: RM_ALLOC_MEMORY is made by the task, below whatever device it likes. Memory that ends with another device than the
// guard knows would be freed while a channel writes errors to it.
func TestNotifierElsewhere(t *testing.T) {
	const group, memory, dma, second = 0x5c000010, 0x5c0000e2, 0x5c0000e3, 0x5c000003
	for name, x := range map[string]struct {
		parent uint32
		want   uint32
	}{"below the device that was said": {fakeDevice, rm.StatusOK}, "below another": {second, rm.StatusInvalidObjectHandle}} {
		u := &unseenObjects{classes: map[uint32]uint32{group: classChannelGroup},
			parents: map[uint32]uint32{memory: x.parent}}
		g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
		g.account.addObject(fakeClient, object{handle: second, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
		g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, class: classChannelGroup, kind: rm.ClassTSG, gpu: noGPU,
			group: &channelGroup{graphics: true}}, noGPU, 0, 0)
		g.cfg.Settings.MaxHostMemory.Bytes = quota.MiB
		c := newFakeCall(t, g, fakeControl)
		if rep := noteMemory(c, classSystem, fakeDevice, memory); !rep.resume {
			t.Fatalf("%+v", rep)
		}
		u.classes[memory] = classSystem
		class, _ := g.abi.Class(0xc86f)
		p := make([]byte, class.ParamsSize)
		rm.PutU32(p, rm.ChannelNotifiers[0], memory)
		if s := allocStatus(c, group, 0xc86f, p); s != x.want {
			t.Errorf("%s: %s", name, rm.StatusName(s))
		}
		p = make([]byte, rm.ContextDMASize)
		rm.PutU32(p, rm.ContextDMAMemory, memory)
		rm.PutU64(p, rm.ContextDMALimit, 4095)
		o := fakeAlloc(fakeDevice, dma, classContextDMA, p)
		c.escape(rm.EscAlloc, o, p)
		if s := rm.U32(o, 40); s != x.want {
			t.Errorf("%s, a context DMA: %s", name, rm.StatusName(s))
		}
	}
}

// TestNoAddressSpace: OpenGL's memory without addresses names none, by a number that is no handle. It is made also while a root alloc is
// under way.
func TestNoAddressSpace(t *testing.T) {
	u := &unseenObjects{}
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
	c := newFakeCall(t, g, fakeControl)
	g.pendingRoots.Store(1)
	p := make([]byte, 24)
	rm.PutU32(p, rm.AllMemoryVASpace, rm.NoAddressSpace)
	if s := allocStatus(c, fakeDevice, classNoMemory, p); s != rm.StatusOK {
		t.Error(rm.StatusName(s))
	}
}

// TestInsideHandedOver: the program that goes on knows of the threads that are inside root allocs.
func TestInsideHandedOver(t *testing.T) {
	r := newRig(t)
	tid, args, end := stuckThread(t)
	defer end()
	p := &pendingRoot{task: &task{tid: tid}, args: args, since: time.Now()}
	r.guard.settledRoots.inside = map[*task]*pendingRoot{p.task: p}
	b, err := stateOf(r.guard, nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := handover.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	next, err := Restore(s, r.guard.driver.(*inProcess).another(), r.guard.log)
	if err != nil {
		t.Fatal(err)
	}
	if !next.insideSettledRoot() {
		t.Error("a call may name what the thread makes next")
	}
}

// TestUnseenOnGPUNode: OS events, and memory without memory, are made on a GPU's node, where the driver tells nothing of a client's
// objects.
func TestUnseenOnGPUNode(t *testing.T) {
	u := &unseenObjects{classes: map[uint32]uint32{theirs: rmclient.ClassDevice}}
	g := withClient(newFakeGuard(t, &fakeDriver{unseen: true}))
	control, c := newFakeCall(t, g, fakeControl), newFakeCall(t, g, fakeControl)
	f, err := g.followFile(control.fd, control.node)
	if err != nil {
		t.Fatal(err)
	}
	g.account.clients[fakeClient].file = f
	c.node = node{kind: nodeGPU}
	g.driver.(*fakeDriver).answer = func(t Target, call *rm.Call) syscall.Errno {
		u.on = -1
		if t.FD >= 0 && kcmpSame(g.files.self, t.FD, control.fd) {
			u.on = t.FD
		}
		return u.answer(t, call)
	}
	event := func(parent uint32) uint32 {
		class, _ := g.abi.Class(0x79)
		p := make([]byte, class.ParamsSize)
		rm.PutU32(p, 0, fakeClient)
		rm.PutU32(p, 8, 0x79)
		defer g.account.freeObject(fakeClient, ours)
		return allocStatus(c, parent, 0x79, p)
	}
	if s := event(fakeDevice); s != rm.StatusOK {
		t.Errorf("below a known device: %s", rm.StatusName(s))
	}
	if s := event(theirs); s != rm.StatusInvalidObjectHandle {
		t.Errorf("below another: %s", rm.StatusName(s))
	}
	c.node.kind = nodeGPU
	noteMemory(c, classVidmem, theirs, ours)
	if _, known := g.account.lookup(fakeClient, ours); known {
		t.Error("memory without memory is made below another device")
	}
	p := make([]byte, 4)
	o := fakeControlCall(theirs, controlNumSubdevices, p)
	if c.escape(rm.EscControl, o, p); rm.U32(o, rm.ControlStatus) != rm.StatusInvalidObjectHandle {
		t.Errorf("a control there: %s", rm.StatusName(rm.U32(o, rm.ControlStatus)))
	}
}
