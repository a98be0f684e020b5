package guard

import (
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

const (
	// pageSmall is the smallest piece of device memory that the physical allocator hands out, pageHuge the page of large
	// allocations (video_mem.c, _vidmemPmaAllocate).
	pageSmall = 64 * quota.KiB
	pageHuge  = 2 * quota.MiB

	attrPageHuge = 3 // NVOS32_ATTR_PAGE_SIZE_HUGE

	engineGR = 1 // NV2080_ENGINE_TYPE_GRAPHICS
	// engineGRLast is NV2080_ENGINE_TYPE_GR7. 0, no engine, leaves it to the channels, which drivers of cards before Ampere
	// allow (kchangrpapiConstruct_IMPL).
	engineGRLast = 8
)

// roundUp rounds to a page; false if that does not fit into 64 bits.
func roundUp(n uint64, page quota.Bytes) (quota.Bytes, bool) {
	p := uint64(page)
	if n > ^uint64(0)-(p-1) {
		return 0, false
	}
	return quota.Bytes((n + p - 1) / p * p), true
}

// grantedSize is what an allocation really takes, from what the driver wrote back.
func grantedSize(size uint64, attr, attr2 uint32) quota.Bytes {
	n, _ := roundUp(size, grantedPage(attr, attr2))
	return n
}

func grantedPage(attr, attr2 uint32) quota.Bytes {
	if attr>>rm.MemoryAttrPageShift&rm.MemoryAttrPageMask == attrPageHuge {
		return quota.Bytes(rm.HugePage(attr2))
	}
	return pageSmall
}

// onAlloc makes an object.
func (g *Guard) onAlloc(c *trappedCall) reply {
	o := c.call.Outer
	form, ok := g.abi.AllocForm(len(o))
	if !ok {
		return fail(unix.EINVAL)
	}
	id := rm.U32(o, rm.AllocClass)
	class, ok := g.abi.Class(id)
	if !ok || deniedKind(class.Kind) {
		return c.deny(rm.StatusNotSupported, "class"+rm.ClassName(id), "denied an object class", "class", rm.ClassName(id))
	}
	if g.deniesProfiler(class.Profiling, class.Name) {
		return c.status(rm.StatusInsufficientPermissions)
	}
	// Bit 0 says that the parameters are serialised: a size hidden that way would pass the checks below.
	if form.FlagsOff >= 0 && rm.U32(o, form.FlagsOff) != 0 {
		return c.status(rm.StatusInvalidArgument)
	}
	c.class = class
	if class.Kind == rm.ClassRoot {
		return g.onRootAlloc(c)
	}
	// Real libraries send paramsSize 0; any other value must be the size we know, since that is what we copy.
	if form.ParamsSizeOff >= 0 {
		if n := rm.U32(o, form.ParamsSizeOff); n != 0 && int(n) != class.ParamsSize {
			return c.status(rm.StatusInvalidArgument)
		}
	}
	if c.params, ok = c.loadBlock(-1, rm.AllocParams, class.ParamsSize); !ok {
		return fail(unix.EFAULT)
	}
	if form.RightsOff >= 0 {
		if _, ok := c.loadBlock(-1, form.RightsOff, rm.RightsSize); !ok {
			return fail(unix.EFAULT)
		}
	}
	c.clearParams()
	if locks := g.abi.FreeHoldsLocks(class.Kind); locks > 0 && !g.waitToPay(c, locks) {
		return fail(unix.EINTR)
	}
	return g.serveByRule(rule{clients: allocClients, locks: true, check: (*Guard).checkAlloc}, c)
}

// allocs are the checks of the kinds of classes that take more than an object.
var allocs = map[rm.ClassKind]func(*Guard, *trappedCall) plan{
	rm.ClassVidmem:     (*Guard).checkVidmem,
	rm.ClassSysmem:     (*Guard).checkHostMemory,
	rm.ClassVirtual:    (*Guard).checkVirtual,
	rm.ClassVASpace:    (*Guard).checkVASpace,
	rm.ClassUserShared: (*Guard).checkUserShared,
	rm.ClassTSG:        (*Guard).checkTSG,
	rm.ClassChannel:    (*Guard).checkChannel,
	rm.ClassCompute:    (*Guard).checkEngineObject,
	rm.ClassPlain:      (*Guard).checkEngineObject,
	rm.ClassProfiler:   (*Guard).checkProfiler,
	rm.ClassFabric:     (*Guard).checkFabric,
	rm.ClassContextDMA: (*Guard).checkContextDMA,
	rm.ClassSemaphores: (*Guard).checkSemaphoreSurface,
	rm.ClassDevice:     (*Guard).checkDevice,
	rm.ClassDebugger:   (*Guard).checkDebugger,
	rm.ClassInTask:     (*Guard).checkInTask,
	rm.ClassP2P:        (*Guard).checkP2P,
	rm.ClassEncoder:    (*Guard).checkEncoder,
}

// checkAlloc is for all classes.
func (g *Guard) checkAlloc(c *trappedCall) plan {
	if g.isUnseen(c.target(), c.allocClient(), c.allocParent()) {
		return answer(c.denyUnseen())
	}
	for _, off := range c.class.ClientHandles {
		if h := rm.U32(c.params, off); h != 0 && !g.account.ownsClient(h) {
			return answer(c.deny(rm.StatusInvalidClient, "clienthandle", "denied an object that names another container's client", "class", c.class.Name))
		}
	}
	if !g.roomForObject(c.class.Kind, g.account.gpuOf(c.allocClient(), c.allocParent())) {
		return answer(c.deny(rm.StatusInsufficientResources, "room"+c.class.Name, "denied an object: the container has too many", "class", c.class.Name))
	}
	if check := allocs[c.class.Kind]; check != nil {
		return check(g, c)
	}
	return g.planObject(c, c.newObject())
}

// allocClients: a debugger object is made for an object of another client, too.
func allocClients(c *trappedCall) (dst, src uint32) {
	dst, src = c.allocClient(), c.allocClient()
	if h := rm.U32(c.params, rm.DebuggerAppClient); c.class.Kind == rm.ClassDebugger && h != 0 {
		src = h
	}
	return dst, src
}

// roomForObject reports that the container may have another object of a kind on a GPU. Some may be gone unnoticed. Of a device it is not known yet
// which GPU it is for: then there must be room on each.
func (g *Guard) roomForObject(kind rm.ClassKind, gpu int) bool {
	tsgs, channels := g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels
	if g.account.roomForObject(kind, gpu, tsgs, channels) {
		return true
	}
	g.sweep()
	return g.account.roomForObject(kind, gpu, tsgs, channels)
}

// newObject is the record of the object that a RM_ALLOC would make.
func (c *trappedCall) newObject() object {
	return object{parent: c.allocParent(), class: c.class.ID, kind: c.class.Kind, gpu: noGPU, engine: engineType(c.class, c.params)}
}

func (c *trappedCall) allocClient() uint32 { return rm.U32(c.call.Outer, rm.AllocRoot) }
func (c *trappedCall) allocParent() uint32 { return rm.U32(c.call.Outer, rm.AllocParent) }

// planObject is the plan of an object that takes no device memory worth counting.
func (g *Guard) planObject(c *trappedCall, o object) plan {
	return plan{ask: true, commit: func() {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		g.account.addObject(c.allocClient(), o, noGPU, 0, 0)
		c.undo = g.undoObject(c.target(), c.allocClient(), o.handle)
	}}
}

// cost is what an object takes before the driver is asked for it: memory of a GPU, or of the host.
type cost struct {
	gpu   int
	size  quota.Bytes
	slack quota.Bytes // by which it may pass the limit
	host  bool
}

// planCharged is the plan of an object that takes memory: reserve, ask, settle to what it took. made tells of the object and of the
// size, once the driver has answered.
func (g *Guard) planCharged(c *trappedCall, client uint32, want cost, made func() (object, quota.Bytes)) plan {
	if !g.reserve(want) {
		return answer(c.status(rm.StatusNoMemory))
	}
	cancel := func() { g.account.unreserve(want) }
	return plan{ask: true, cancel: cancel, commit: func() {
		o, took := made()
		if !g.reserveMore(&want, took) {
			if s, e := g.rmFree(c.target(), client, o.handle); e == 0 && s == rm.StatusOK {
				cancel()
				c.restoreInput()
				c.status(rm.StatusNoMemory)
				return
			}
		}
		g.account.addObject(client, o, want.gpu, want.size, took)
		c.undo = g.undoObject(c.target(), client, o.handle)
	}}
}

// reserveMore reserves what the driver took beyond want: a caller may ask for pages of 512 MiB, and the driver rounds up to
// them (memmgrAllocDetermineAlignment_GM107). False: the limit does not allow that.
func (g *Guard) reserveMore(want *cost, size quota.Bytes) bool {
	if size <= want.size {
		return true
	}
	more := *want
	more.size = size - want.size
	if !g.reserve(more) {
		return false
	}
	want.size = size
	return true
}

// checkTSG: a channel group. One on the graphics engine gets a context, which takes device memory.
func (g *Guard) checkTSG(c *trappedCall) plan {
	o := c.newObject()
	o.notifiers = notifiersIn(c.params, rm.TSGNotifiers)
	o.graphics = true
	if o.engine > engineGRLast {
		o.graphics = false
		return g.planObject(c, o)
	}
	gpu, ok := g.gpuFor(c.allocClient(), o.parent)
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	size := g.contextMemory(gpu)
	p := g.planCharged(c, c.allocClient(), cost{gpu: gpu, size: size}, func() (object, quota.Bytes) {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		return o, size
	})
	settle := p.commit
	p.commit = func() {
		settle()
		g.gpuTime.Made(gpu)
	}
	return p
}

func (g *Guard) checkChannel(c *trappedCall) plan {
	p, o := c.params, c.newObject()
	// Forced on by RM for a caller with CAP_SYS_ADMIN, which the guard does not have; asked for by nobody honest.
	rm.PutU32(p, rm.ChannelFlags, rm.U32(p, rm.ChannelFlags)&^rm.ChannelFlagPrivileged)
	if o.engine <= engineGRLast && !g.account.isGroup(c.allocClient(), o.parent) {
		// The driver makes a group for it that has no handle, and so no timeslice that could be set.
		return answer(c.deny(rm.StatusNotSupported, "lonechannel", "denied a channel on the graphics engine that is in no channel group"))
	}
	if m, known := g.account.lookup(c.allocClient(), rm.U32(p, rm.ChannelUserdMemory)); known && !m.isMemory() {
		return answer(c.deny(rm.StatusInvalidObjectHandle, "userdmemory", "denied a channel whose USERD is no memory", "class", rm.ClassName(m.class)))
	}
	if g.account.onOtherGPU(c.allocClient(), rm.U32(p, rm.ChannelUserdMemory), g.account.gpuOf(c.allocClient(), o.parent)) {
		return answer(c.denyOtherGPU())
	}
	if refusal, ok := g.checkNotifiers(c, &o); !ok {
		return answer(refusal)
	}
	o.runlist = g.account.runlistOf(c.allocClient(), o.parent, o.engine)
	if o.runlist.gpu != noGPU && !g.roomForChannel(o.runlist) {
		return answer(c.deny(rm.StatusInsufficientResources, "channels", "denied a channel: the GPU has no more ids than others may need", "max", commonChannels))
	}
	o.contextShare = rm.U32(p, rm.ChannelContextShare)
	if len(p) > rm.ChannelUserdOffset+8 {
		o.userd = userd{rm.U32(p, rm.ChannelUserdMemory), rm.U64(p, rm.ChannelUserdOffset)}
		page, ok := c.acquireObject(c.allocClient(), o.userd.memory)
		if !ok {
			return answer(c.status(rm.StatusInvalidClient))
		}
		o.charge = page.charge // the channel keeps it, whatever becomes of its handle
	}
	return g.planObject(c, o)
}

// checkP2P: which numbers two GPUs have for each other, and where their mailboxes are, RM chooses. Of a caller's choice it does not look
// whether another pair has that number, nor, for NVLink, whether there is such a number (kbusCreateP2PMappingForNvlink_GP100).
func (g *Guard) checkP2P(c *trappedCall) plan {
	for _, off := range rm.P2PChoices {
		if off+4 <= len(c.params) {
			rm.PutU32(c.params, off, 0)
		}
	}
	return g.planObject(c, c.newObject())
}

// checkEncoder: version 1 names memory with statistics for other programs. The driver maps it into the kernel and keeps no reference
// (nvencsessionConstruct_IMPL); version 0 names none.
func (g *Guard) checkEncoder(c *trappedCall) plan {
	rm.PutU32(c.params, rm.EncoderVersion, 0)
	rm.PutU32(c.params, rm.EncoderMemory, 0)
	p := g.planObject(c, c.newObject())
	p.done = func() { copy(c.params, c.before[1]) }
	return p
}

func (g *Guard) checkProfiler(c *trappedCall) plan {
	o := c.newObject()
	o.streams = &streams{}
	return g.planObject(c, o)
}

// checkDevice: each device has an address space of its own for what names none. 0 would be the one that all of the GPU's users share, the
// host's too. Another client's is found only when it is first used, and by then its handle may be a neighbour's (deviceInitClientShare).
func (g *Guard) checkDevice(c *trappedCall) plan {
	client := c.allocClient()
	if share := rm.U32(c.params, rm.DeviceClientShare); share != 0 && share != client {
		return answer(c.deny(rm.StatusInvalidClient, "clientshare", "denied a device that would use another client's address space"))
	}
	if len(c.params) == 0 { // the driver would take that for 0
		return answer(c.status(rm.StatusInvalidArgument))
	}
	gpu, ok := g.deviceGPU(c, client, c.params)
	if !ok {
		return answer(c.status(rm.StatusInvalidDevice))
	}
	o := c.newObject()
	o.gpu = gpu
	rm.PutU32(c.params, rm.DeviceClientShare, client)
	// As for other address spaces: else tables that do not fit on the GPU come from the host, uncounted.
	rm.PutU32(c.params, rm.DeviceFlags, rm.U32(c.params, rm.DeviceFlags)&^rm.DeviceFlagRetryHost)
	p := g.planObject(c, o)
	p.done = func() { copy(c.params, c.before[1]) }
	return p
}

// checkDebugger: the driver asks whether the client that is debugged has given the right (ksmdbgssnConstruct_IMPL), and says so in the
// kernel log where it has not.
func (g *Guard) checkDebugger(c *trappedCall) plan {
	dst, src := allocClients(c)
	p := g.planObject(c, c.newObject())
	p.opened, p.done = g.openForPolicies(c.locked.of(src), rm.U32(c.params, rm.DebuggerObject), c.locked.of(dst), accessDebug)
	return p
}

func (g *Guard) checkInTask(c *trappedCall) plan {
	g.logOnce("intask", "denied an object class that pins the caller's pages", "class", c.class.Name)
	return answer(c.status(rm.StatusNotSupported))
}

// deniedKind lists kinds of classes that hold what the guard does not follow: descriptors, and references to memory that
// live outside a client (NVLink multicast, MIG).
func deniedKind(k rm.ClassKind) bool {
	switch k {
	case rm.ClassDeny, rm.ClassMulticast, rm.ClassFD:
		return true
	}
	return false
}

// checkVidmem: device memory, within the limit.
func (g *Guard) checkVidmem(c *trappedCall) plan {
	if len(c.params) == 0 || fixedAddress(rm.U32(c.params, rm.MemoryFlags)) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	want, ok := roundUp(rm.U64(c.params, rm.MemorySize), pageHuge)
	if !ok {
		return answer(c.status(rm.StatusNoMemory))
	}
	gpu, ok := g.gpuFor(c.allocClient(), c.allocParent())
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	if g.spills(gpu, want) {
		return g.planSpilled(c, gpu, want)
	}
	o := c.newObject()
	p := g.planCharged(c, c.allocClient(), cost{gpu: gpu, size: want}, func() (object, quota.Bytes) {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		o.length = quota.Bytes(rm.U64(c.params, rm.MemorySize))
		attr, attr2 := rm.U32(c.params, rm.MemoryAttr), rm.U32(c.params, rm.MemoryAttr2)
		o.size, o.page = o.length, grantedPage(attr, attr2)
		return o, grantedSize(rm.U64(c.params, rm.MemorySize), attr, attr2)
	})
	if !p.ask && g.spills(gpu, want) { // another thread has taken the room since
		c.restoreParams()
		return g.planSpilled(c, gpu, want)
	}
	p.retry = func(status uint32) (plan, bool) {
		// A card has a little less than its size to give: within the limit, and yet there is nothing left.
		if status != rm.StatusNoMemory || g.account.usage(gpu).spill == 0 {
			return plan{}, false
		}
		c.restoreParams()
		return g.planSpilled(c, gpu, want), true
	}
	return p
}

// restoreInput makes the call's structures what the task passed.
func (c *trappedCall) restoreInput() {
	copy(c.call.Outer, c.before[0])
	for i, b := range c.call.Blocks {
		copy(b.Data, c.before[i+1])
	}
}

// restoreParams is restoreInput for a RM_ALLOC that is made again.
func (c *trappedCall) restoreParams() {
	c.restoreInput()
	c.clearParams()
}

// clearParams takes out of the parameters of a RM_ALLOC what the driver is not to see: pointers that mean nothing to it, and the wish
// that the GPU's firmware has a list of all of the memory's pages (memRegisterWithGsp_IMPL), in memory of its own that all share.
func (c *trappedCall) clearParams() {
	for _, off := range c.class.Clear {
		rm.PutU64(c.params, off, 0)
	}
	if kind := c.class.Kind; len(c.params) > 0 && (kind == rm.ClassVidmem || kind == rm.ClassSysmem) {
		rm.PutU32(c.params, rm.MemoryAttr2, rm.U32(c.params, rm.MemoryAttr2)&^rm.MemoryAttr2Register)
	}
}

// fixedAddress reports that device memory is asked for at a physical address. The driver then takes as much as the
// alignment that the caller names, whatever the size (_vidmemPmaAllocate), and says nothing of it.
func fixedAddress(flags uint32) bool { return flags&rm.MemoryFlagFixed != 0 }

// engineType is the engine that a new channel group or channel is for; 0 where it is said elsewhere.
func engineType(class rm.Class, params []byte) uint32 {
	switch class.Kind {
	case rm.ClassTSG:
		return rm.U32(params, rm.TSGEngineType)
	case rm.ClassChannel:
		return rm.U32(params, rm.ChannelEngineType)
	}
	return 0
}

// usesGraphics reports that an object of a class makes the driver give its channel's group a context on the graphics
// engine, which takes device memory.
func usesGraphics(class rm.Class) bool {
	if class.Kind == rm.ClassCompute {
		return true
	}
	switch class.ID & 0xff {
	case 0x97, 0x2d, 0x40: // 3D, 2D, inline to memory
		return class.ID > 0xff
	}
	return false
}

// checkEngineObject: where an object is on the graphics engine, and its channel in a group that has not been charged for that (one
// that named another engine), it is now.
func (g *Guard) checkEngineObject(c *trappedCall) plan {
	p := g.planObject(c, c.newObject())
	if !usesGraphics(c.class) {
		return p
	}
	client := c.allocClient()
	owner, charged := g.account.contextOwner(client, c.allocParent())
	if !g.account.isGroup(client, owner) {
		return answer(c.deny(rm.StatusNotSupported, "loneobject", "denied an object of the graphics engine on a channel that is in no channel group"))
	}
	context := cost{gpu: noGPU}
	if !charged && g.cfg.Settings.ContextOverhead > 0 {
		var ok bool
		if context.gpu, ok = g.gpuFor(client, c.allocParent()); !ok {
			return answer(c.status(rm.StatusInvalidObjectParent))
		}
		if context.size = g.contextMemory(context.gpu); !g.reserve(context) {
			return answer(c.status(rm.StatusNoMemory))
		}
		p.cancel = func() { g.account.unreserve(context) }
	}
	settle := p.commit
	p.commit = func() {
		settle()
		if context.gpu != noGPU && !g.account.chargeContext(client, owner, context.gpu, context.size) {
			g.account.unreserve(context)
		}
		if g.account.markGraphics(client, owner) {
			g.gpuTime.Made(g.account.gpuOf(client, owner))
		}
	}
	return g.planPreemption(c, client, owner, p)
}

// checkUserShared: what firmware measures is the union of what all clients of the GPU ask for, which the driver goes through at each
// change. It is asked for by 0xde0001, which is paid for; from 590 on each end of such an object changes it, too (FreeHoldsLocks).
func (g *Guard) checkUserShared(c *trappedCall) plan {
	clear(c.params)
	p := g.planObject(c, c.newObject())
	p.done = func() { copy(c.params, c.before[1]) }
	return p
}

// reserve takes what an object needs out of the container's limits. Before it refuses it looks whether something was closed unnoticed.
func (g *Guard) reserve(want cost) bool {
	if want.host {
		return g.reserveHost(want.size)
	}
	got := want.size == 0 || g.account.reserve(want, false)
	if !got {
		g.sweepUntil(func() bool { got = g.account.reserve(want, false); return got })
	}
	return got || g.account.reserve(want, true)
}

// gpuFor finds the GPU that memory below a parent handle is charged to. False: it is not below a device that the guard has seen. RM would
// refuse that, so the guard does.
func (g *Guard) gpuFor(client, parent uint32) (gpu int, ok bool) {
	gpu = g.account.gpuOf(client, parent)
	return gpu, gpu != noGPU
}

// deviceGPU tells which of the container's GPUs a device object would be on. The parameters name it by RM's device
// instance, which the guard asks RM for (NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2) through the task's own client.
func (g *Guard) deviceGPU(c *trappedCall, client uint32, params []byte) (int, bool) {
	instance := rm.U32(params, rm.DeviceID)
	g.mu.Lock()
	gpu, ok := g.instances[instance]
	g.mu.Unlock()
	if ok {
		return gpu, true
	}
	for i, x := range g.gpus {
		var p [rmclient.IDInfoSize]byte
		rm.PutU32(p[:], 0, x.ID())
		if s, e := g.rmControl(c.target(), client, client, rmclient.ControlGetIDInfoV2, p[:]); e != 0 || s != rm.StatusOK {
			continue
		}
		n := rm.U32(p[:], rmclient.IDInfoInstance)
		g.mu.Lock()
		g.instances[n] = i
		g.mu.Unlock()
		if n == instance {
			gpu, ok = i, true
		}
	}
	return gpu, ok
}

const shareTypeCode = 3<<30 | rm.ShareSize<<16 | 'F'<<8 | rm.EscShare

// rmControl makes a flat control of the guard's own on a file of the task.
func (g *Guard) rmControl(t Target, client, object, cmd uint32, params []byte) (uint32, syscall.Errno) {
	return rmclient.Control(g.driver, t, client, object, cmd, params)
}

// rmFree frees an object or a client for the guard's own reasons.
func (g *Guard) rmFree(t Target, client, handle uint32) (uint32, syscall.Errno) {
	return rmclient.Free(g.driver, t, client, handle)
}

// undoObject frees an object whose maker was gone before it could be told the handle.
func (g *Guard) undoObject(t Target, client, handle uint32) func() {
	return func() {
		lock, ok := g.account.lockCalls(client, client)
		if !ok {
			return
		}
		defer lock.unlock()
		if s, e := g.keepNotifiersOver(t, client, handle, func() (uint32, unix.Errno) { return g.rmFree(t, client, handle) }); e == 0 && s == rm.StatusOK {
			g.account.freeObject(client, handle)
		}
	}
}
