// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// escapes are the rules of calls on nvidiactl or a GPU's node, but for those of RM_ALLOC (by class), of RM_CONTROL (by control), and of
// calls that stand for an RM_ALLOC (oldallocs.go). What is not here is denied, whatever it holds: legacy allocation, I2C, idle-channels
// (blocks under the GPU locks), registry, the binding of context DMAs, interrupt query, dma-buf export (keeps memory alive outside any
// client).
var escapes = map[uint32]rule{
	rm.EscFree:           {clients: outerClient(rm.FreeRoot), locks: true, check: (*Guard).checkFree},
	rm.EscDupObject:      {clients: dupClients, locks: true, check: (*Guard).checkDup},
	rm.EscShare:          {clients: outerClient(rm.ShareClient), locks: true, check: (*Guard).checkShare},
	rm.EscVidHeapControl: {clients: outerClient(rm.HeapRoot), locks: true, check: (*Guard).checkHeap},
	rm.EscMapMemory:      {clients: outerClient(rm.MapMemoryClient), locks: true, check: (*Guard).checkMapMemory},
	rm.EscUnmapMemory:    {clients: outerClient(rm.UnmapMemoryClient), locks: true, inTask: true, check: (*Guard).checkUnmapMemory},
	rm.EscUpdateMapping:  {clients: outerClient(rm.UpdateMappingClient), locks: true, inTask: true, check: (*Guard).checkUpdateMapping},
	rm.EscMapDMA:         {clients: outerClient(rm.DMAClient), locks: true, check: (*Guard).checkMapDMA},
	rm.EscUnmapDMA:       {clients: outerClient(rm.DMAClient), locks: true, check: (*Guard).checkUnmapDMA},
	rm.EscAllocOSEvent:   {clients: outerClient(rm.OSEventClient), locks: true, check: (*Guard).checkAllocEvent},
	rm.EscFreeOSEvent:    {clients: outerClient(rm.OSEventClient), locks: true, check: (*Guard).checkFreeEvent},
	rm.EscRegisterFD:     {check: (*Guard).checkRegisterFD},
	rm.EscCardInfo:       {check: (*Guard).checkCardInfo},
	rm.EscStatusCode:     {check: (*Guard).checkStatusCode},
	rm.EscCheckVersion:   {check: (*Guard).checkVersion},
	rm.EscAttachGPUs:     {check: (*Guard).checkAttachGPUs},
}

// outerClient reads the one client that a call names.
func outerClient(off int) func(*trappedCall) (dst, src uint32) {
	return func(c *trappedCall) (dst, src uint32) {
		h := rm.U32(c.call.Outer, off)
		return h, h
	}
}

// denyOtherGPU refuses a call that names memory of a GPU for another.
func (c *trappedCall) denyOtherGPU() reply {
	return c.deny(rm.StatusInvalidDevice, "elsewhere", "denied the use of a GPU's memory as another's")
}

// onEscape handles a call on nvidiactl or on a GPU's node.
func (g *Guard) onEscape(c *trappedCall) reply {
	switch nr := c.call.NR(); nr {
	case rm.EscAlloc:
		return g.onAlloc(c)
	case rm.EscControl:
		return g.onControl(c)
	case rm.EscContextDMA:
		return g.onContextDMA(c)
	case rm.EscAllocMemory:
		return g.onAllocMemory(c)
	default:
		if r, ok := escapes[nr]; ok {
			return g.serveByRule(r, c)
		}
		return c.deny(rm.StatusNotSupported, "esc"+rm.EscapeName(nr), "denied an escape", "escape", rm.EscapeName(nr))
	}
}

// checkFree: of an object, its descendants, or a client.
func (g *Guard) checkFree(c *trappedCall) plan {
	return g.planFree(c, rm.U32(c.call.Outer, rm.FreeObject))
}

// recordFree takes an object that a call has freed out of the account.
func (g *Guard) recordFree(c *trappedCall, handle uint32) {
	if of := c.locked[0]; of.handle == handle {
		g.clientGone(of)
	} else {
		g.objectFreed(c.target(), of.handle, handle)
		g.endWindows()
	}
	if g.account.hasZombies() {
		g.sweepSoon()
	}
}

func dupClients(c *trappedCall) (dst, src uint32) {
	return rm.U32(c.call.Outer, rm.DupClient), rm.U32(c.call.Outer, rm.DupClientSrc)
}

// checkDup: a second handle on an object of a client of the same container. RM's own check is by process, and by what the owner has opened
// to others, of which it was not told all (share.go).
func (g *Guard) checkDup(c *trappedCall) plan {
	o := c.call.Outer
	dst, src := dupClients(c)
	object := rm.U32(o, rm.DupObjectSrc)
	x, ok := c.acquireObject(src, object)
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	if x.kind == rm.ClassChannel || x.class == classContextShare || x.group != nil {
		// Under a second name it could be scheduled, or filled, unseen. And a second handle on a group or a context share does not keep the
		// address space, of which the driver makes channels below it all the same, when it is gone (kctxshareapiCopyConstruct_IMPL,
		// kchangrpapiCopyConstruct_IMPL). Of groups MPS wants it, of its server's alone (lend.go); UVM takes such handles by itself.
		return answer(c.deny(rm.StatusNotSupported, "dupchannel", "denied a second handle on a channel, a channel group or a context share"))
	}
	if x.kind == rm.ClassUserShared {
		return answer(c.denyUserShared())
	}
	if !c.roomForReferences(x.charge, 0) {
		return answer(c.denyReferences())
	}
	if src == dst && c.isUncounted(c.target(), src, object) || src != dst && c.isUncountedOf(src, object) ||
		c.isUnseen(c.target(), dst, rm.U32(o, rm.DupParent)) {
		return answer(c.denyUnseen())
	}
	// The driver would count memory out of the other GPU's BAR1 when it is freed (vidmemDestruct_IMPL). NVLink addresses are for others.
	if x.kind != rm.ClassFabric && x.charge.onOtherGPU(g.account.gpuOf(dst, rm.U32(o, rm.DupParent))) {
		return answer(c.denyOtherGPU())
	}
	if !g.roomForObject(x.kind, g.account.gpuOf(dst, rm.U32(o, rm.DupParent))) {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	p := plan{ask: true, commit: func() {
		h := rm.U32(o, rm.DupObject)
		g.account.dupObject(dst, rm.U32(o, rm.DupParent), h, x)
		c.undo = g.undoObject(c.target(), dst, h)
	}}
	p.opened, p.done = g.openForPolicies(c.locked.of(src), object, c.locked.of(dst), accessDup)
	return p
}

// onAllocMemory handles the old memory call.
func (g *Guard) onAllocMemory(c *trappedCall) reply {
	switch class := rm.U32(c.call.Outer, rm.AllocMemoryClass); class {
	case classSystem, classOSDescriptor:
		return g.serveByRule(rule{inTask: true, check: (*Guard).checkAllocMemory}, c)
	case classRegisters, classVidmem:
		return g.serveByRule(rule{clients: outerClient(rm.AllocMemoryRoot), locks: true, check: (*Guard).checkNoMemory}, c)
	default:
		return c.deny(rm.StatusNotSupported, "0x27", "denied RM_ALLOC_MEMORY of a class other than host memory", "class", class)
	}
}

// checkAllocMemory: of host memory it pins the caller's pages, so it runs in the task; without CAP_SYS_ADMIN no content of it yields device
// memory (rm-abi 1.3), whatever a racing thread makes of it.
func (g *Guard) checkAllocMemory(c *trappedCall) plan {
	if c.wrapped { // it would not run, and must leave no record
		return answer(fail(unix.EINVAL))
	}
	g.memoryCalls.giveWay(c)
	return g.noteHostMemory(c, rm.U32(c.call.Outer, rm.AllocMemoryClass))
}

const (
	classSystem       = 0x3e   // NV01_MEMORY_SYSTEM
	classVirtual      = 0x50a0 // NV50_MEMORY_VIRTUAL
	classOSDescriptor = 0x71   // NV01_MEMORY_SYSTEM_OS_DESCRIPTOR
)

// checkRegisterFD: a nvidiactl file lends its identity to another file. RM looks at the two files only (NV_ESC_REGISTER_FD in
// escape.c), so the guard makes the call, on the files that it has looked at: a nvidiactl file that has borrowed an identity
// must not do a root alloc (see rootalloc.go), and one that did so unseen would break that rule.
func (g *Guard) checkRegisterFD(c *trappedCall) plan {
	if c.node.kind == nodeControl {
		f, err := g.followFile(c.fd, c.node)
		if err != nil {
			return answer(fail(unix.ENOMEM))
		}
		f.mu.Lock()
		mayLend := f.pending == nil && !f.rooted // else a client would be made, or be, on another file than the guard looks at
		f.registered = f.registered || mayLend
		g.books.note(f)
		f.mu.Unlock()
		if !mayLend {
			g.logOnce("register", "denied REGISTER_FD of a nvidiactl file that has an RM client, or is being given one")
			g.stats.denied.Add(1)
			return answer(fail(unix.EINVAL))
		}
	}
	own := rm.U32(c.call.Outer, rm.RegisterFDFD)
	fd, as, err := c.fileNamed(own, nodeControl)
	if err != nil {
		return answer(fail(unix.EINVAL))
	}
	rm.PutU32(c.call.Outer, rm.RegisterFDFD, as)
	return plan{ask: true, done: func() {
		rm.PutU32(c.call.Outer, rm.RegisterFDFD, own)
		_ = unix.Close(fd)
	}}
}

// fileNamed copies a file of some kinds that a call names by its number in the task. as is what the driver knows it by.
func (c *trappedCall) fileNamed(number uint32, kinds ...nodeKind) (fd int, as uint32, err error) {
	if fd, err = c.task.getFile(int(int32(number))); err != nil {
		return -1, 0, err
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	n, _, err := c.guard.nodes.classify(fd)
	if err == nil && !slices.Contains(kinds, n.kind) {
		err = unix.EINVAL
	}
	if err == nil {
		as, err = c.guard.driver.Number(fd)
	}
	return fd, as, err
}

// checkCardInfo: of the list of the machine's GPUs, others than the container's own are blanked.
func (g *Guard) checkCardInfo(c *trappedCall) plan {
	return plan{ask: true, commit: func() {
		o := c.call.Outer
		n := 0
		for off := 0; off+rm.CardInfoSize <= len(o); off += rm.CardInfoSize {
			if o[off+rm.CardInfoValid] == 0 || !g.ownsMinor(int(rm.U32(o, off+rm.CardInfoMinor))) {
				continue
			}
			if n != off {
				copy(o[n:n+rm.CardInfoSize], o[off:])
			}
			n += rm.CardInfoSize
		}
		clear(o[n:])
	}}
}

// checkStatusCode: the state of a GPU, by bus address.
func (g *Guard) checkStatusCode(c *trappedCall) plan {
	o := c.call.Outer
	if !g.ownsBus(rm.U32(o, rm.StatusCodeDomain), uint32(o[rm.StatusCodeBus]), uint32(o[rm.StatusCodeSlot])) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	return pass()
}

// checkAttachGPUs: a file takes a reference on GPUs, by id.
func (g *Guard) checkAttachGPUs(c *trappedCall) plan {
	for off := 0; off+4 <= len(c.call.Outer); off += 4 {
		if id := rm.U32(c.call.Outer, off); id != 0 && !g.ownsGPUID(id) {
			return answer(fail(unix.EINVAL))
		}
	}
	return pass()
}
