package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// onEscape handles a call on nvidiactl or on a GPU's node.
func (g *Guard) onEscape(c *trappedCall) reply {
	switch c.call.NR() {
	case rm.EscAlloc:
		return g.onAlloc(c)
	case rm.EscControl:
		return g.onControl(c)
	case rm.EscFree:
		return g.onFree(c)
	case rm.EscDupObject:
		return g.onDup(c)
	case rm.EscShare:
		return g.onShare(c)
	case rm.EscVidHeapControl:
		return g.onHeap(c)
	case rm.EscAllocMemory:
		return g.onAllocMemory(c)
	case rm.EscRegisterFD:
		return g.onRegisterFD(c)
	case rm.EscCardInfo:
		return g.onCardInfo(c)
	case rm.EscStatusCode:
		return g.onStatusCode(c)
	case rm.EscAttachGPUs:
		return g.onAttachGPUs(c)
	}
	// Denied whatever they hold: legacy allocation, I2C, idle-channels (blocks under the GPU locks), registry, interrupt
	// query, dma-buf export (keeps memory alive outside any client).
	g.logOnce("esc"+rm.EscapeName(c.call.NR()), "denied an escape", "escape", rm.EscapeName(c.call.NR()))
	g.stats.denied.Add(1)
	return c.status(rm.StatusNotSupported)
}

// onFree frees an object, its descendants, or a client.
func (g *Guard) onFree(c *trappedCall) reply {
	root, handle := rm.U32(c.call.Outer, rm.FreeRoot), rm.U32(c.call.Outer, rm.FreeObject)
	if !g.owns(c, root) {
		return c.status(rm.StatusInvalidClient)
	}
	lock, ok := g.account.lockCalls(root, root)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	if !c.valid() {
		return replyDone
	}
	status, e := c.execStatus()
	if e == 0 && status == rm.StatusOK {
		g.freed(lock[0], handle)
	}
	return fail(e)
}

// freed takes a freed object out of the account.
func (g *Guard) freed(c *client, handle uint32) {
	if c.handle == handle {
		g.clientGone(c)
	} else {
		g.account.freeObject(c.handle, handle)
	}
	if g.account.hasZombies() {
		g.sweepSoon()
	}
}

// onDup gives a client a second handle on an object of a client of the same container. RM's own check is by process or
// by what the owner opened; CUDA opens what it exports to everyone, so the container is checked here.
func (g *Guard) onDup(c *trappedCall) reply {
	o := c.call.Outer
	dst, src, object := rm.U32(o, rm.DupClient), rm.U32(o, rm.DupClientSrc), rm.U32(o, rm.DupObjectSrc)
	if !g.owns(c, dst) || !g.account.ownsClient(src) {
		g.logOnce("dup", "denied a dup of an object of another container's client", "client", src)
		g.stats.denied.Add(1)
		return c.status(rm.StatusInvalidClient)
	}
	lock, ok := g.account.lockCalls(dst, src)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	if o, ok := g.account.lookup(src, object); ok && (o.kind == rm.ClassChannel || o.kind == rm.ClassTSG) {
		// Under a second name it could be scheduled, or filled, unseen. Nobody has been seen to want that.
		g.logOnce("dupchannel", "denied a second handle on a channel or a channel group")
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	if !g.account.room(rm.ClassPlain, 0, 0) {
		return c.status(rm.StatusInsufficientResources)
	}
	if !c.valid() {
		return replyDone
	}
	status, e := c.execStatus()
	if e == 0 && status == rm.StatusOK {
		h := rm.U32(o, rm.DupObject)
		g.account.dupObject(dst, rm.U32(o, rm.DupParent), h, src, object)
		c.undo = g.undoObject(c.target(), dst, h)
	}
	return fail(e)
}

// onShare opens an object to other clients. It is harmless as long as every dup and every UVM mapping passes a guard.
func (g *Guard) onShare(c *trappedCall) reply {
	o := c.call.Outer
	client, object := rm.U32(o, rm.ShareClient), rm.U32(o, rm.ShareObject)
	if !g.owns(c, client) {
		return c.status(rm.StatusInvalidClient)
	}
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	if g.account.isSpilled(client, object) {
		return g.refuseSpilled(c, "share")
	}
	if !c.valid() {
		return replyDone
	}
	status, e := c.execStatus()
	if e == 0 && status == rm.StatusOK && rm.U16(o, rm.SharePolicy+rm.SharePolicyType) == shareTypeAll {
		g.account.setShared(client, object, o[rm.SharePolicy+rm.SharePolicyAction]&shareActionRevoke == 0)
	}
	return fail(e)
}

// onAllocMemory is the old memory call: host memory only. It pins the caller's pages, so it runs in the task; without
// CAP_SYS_ADMIN no content of it yields device memory (rm-abi 1.3), whatever a racing thread makes of it.
func (g *Guard) onAllocMemory(c *trappedCall) reply {
	class := rm.U32(c.call.Outer, rm.AllocMemoryClass)
	if class != classSystem && class != classOSDescriptor {
		g.logOnce("0x27", "denied RM_ALLOC_MEMORY of a class other than host memory", "class", class)
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	return g.native(c)
}

const (
	classSystem       = 0x3e   // NV01_MEMORY_SYSTEM
	classVirtual      = 0x50a0 // NV50_MEMORY_VIRTUAL
	classOSDescriptor = 0x71   // NV01_MEMORY_SYSTEM_OS_DESCRIPTOR
)

// native lets the task make a call itself; with a simulated driver, which has no kernel behind the node, the guard does.
func (g *Guard) native(c *trappedCall) reply {
	if g.driver.Native() {
		if c.wrapped {
			return fail(unix.EINVAL) // nobody wraps these; and natively the wrapper could hold anything
		}
		return replyResume
	}
	if !c.valid() {
		return replyDone
	}
	return fail(c.exec())
}

// onRegisterFD lends the identity of a nvidiactl file to another file. RM looks at the two files only (NV_ESC_REGISTER_FD in
// escape.c), so the guard makes the call, on the files that it has looked at: a nvidiactl file that has borrowed an identity
// must not do a root alloc (see root.go), and one that did so unseen would break that rule.
func (g *Guard) onRegisterFD(c *trappedCall) reply {
	if c.node.kind == nodeControl {
		f, err := g.followFile(c.fd, c.node)
		if err != nil {
			return fail(unix.ENOMEM)
		}
		f.mu.Lock()
		f.registered = true
		f.mu.Unlock()
	}
	own := rm.U32(c.call.Outer, rm.RegisterFDFD)
	fd, err := c.k.getFile(int(int32(own)))
	if err != nil {
		return fail(unix.EINVAL)
	}
	defer unix.Close(fd)
	n, _, err := g.nodes.classify(fd)
	if err != nil || n.kind != nodeControl {
		return fail(unix.EINVAL)
	}
	as := uint32(fd)
	if !g.driver.Native() {
		f, err := g.followFile(fd, n)
		if err != nil {
			return fail(unix.ENOMEM)
		}
		as = uint32(f.sim)
	}
	if !c.valid() {
		return replyDone
	}
	rm.PutU32(c.call.Outer, rm.RegisterFDFD, as)
	e := c.exec()
	rm.PutU32(c.call.Outer, rm.RegisterFDFD, own)
	return fail(e)
}

// onCardInfo lists the machine's GPUs: others than the container's own are blanked.
func (g *Guard) onCardInfo(c *trappedCall) reply {
	if !c.valid() {
		return replyDone
	}
	e := c.exec()
	if e == 0 {
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
	}
	return fail(e)
}

// onStatusCode asks for the state of a GPU by bus address.
func (g *Guard) onStatusCode(c *trappedCall) reply {
	o := c.call.Outer
	if !g.ownsBus(rm.U32(o, rm.StatusCodeDomain), uint32(o[rm.StatusCodeBus]), uint32(o[rm.StatusCodeSlot])) {
		return c.status(rm.StatusInvalidArgument)
	}
	if !c.valid() {
		return replyDone
	}
	return fail(c.exec())
}

// onAttachGPUs takes a reference on GPUs for a file, by id.
func (g *Guard) onAttachGPUs(c *trappedCall) reply {
	for off := 0; off+4 <= len(c.call.Outer); off += 4 {
		if id := rm.U32(c.call.Outer, off); id != 0 && !g.ownsGPUID(id) {
			return fail(unix.EINVAL)
		}
	}
	if !c.valid() {
		return replyDone
	}
	return fail(c.exec())
}
