package guard

import (
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
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
func grantedSize(size uint64, attr uint32) quota.Bytes {
	page := pageSmall
	if attr>>rm.MemoryAttrPageShift&rm.MemoryAttrPageMask == attrPageHuge {
		page = pageHuge
	}
	n, _ := roundUp(size, page)
	return n
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
		g.logOnce("class"+rm.ClassName(id), "denied an object class", "class", rm.ClassName(id))
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	if g.deniesProfiler(class.Profiling, class.Name) {
		return c.status(rm.StatusInsufficientPermissions)
	}
	// Bit 0 says that the parameters are serialised: a size hidden that way would pass the checks below.
	if form.FlagsOff >= 0 && rm.U32(o, form.FlagsOff) != 0 {
		return c.status(rm.StatusInvalidArgument)
	}
	if class.Kind == rm.ClassRoot {
		return g.onRootAlloc(c)
	}
	// Real libraries send paramsSize 0; any other value must be the size we know, since that is what we copy.
	if form.ParamsSizeOff >= 0 {
		if n := rm.U32(o, form.ParamsSizeOff); n != 0 && int(n) != class.ParamsSize {
			return c.status(rm.StatusInvalidArgument)
		}
	}
	client := rm.U32(o, rm.AllocRoot)
	if !g.owns(c, client) {
		return c.status(rm.StatusInvalidClient)
	}
	params, ok := c.loadBlock(-1, rm.AllocParams, class.ParamsSize)
	if !ok {
		return fail(unix.EFAULT)
	}
	if form.RightsOff >= 0 {
		if _, ok := c.loadBlock(-1, form.RightsOff, rm.RightsSize); !ok {
			return fail(unix.EFAULT)
		}
	}
	for _, off := range class.Clear {
		rm.PutU64(params, off, 0)
	}
	for _, off := range class.ClientHandles {
		if h := rm.U32(params, off); h != 0 && len(params) > 0 && !g.account.ownsClient(h) {
			g.logOnce("clienthandle", "denied an object that names another container's client", "class", class.Name)
			g.stats.denied.Add(1)
			return c.status(rm.StatusInvalidClient)
		}
	}
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	if !g.account.room(class.Kind, g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels) {
		g.logOnce("room"+class.Name, "denied an object: the container has too many", "class", class.Name)
		g.stats.denied.Add(1)
		return c.status(rm.StatusInsufficientResources)
	}
	switch class.Kind {
	case rm.ClassVidmem:
		return g.allocMemory(c, client, class, params)
	case rm.ClassTSG:
		if rm.U32(params, rm.TSGEngineType) <= engineGRLast {
			return g.allocCharged(c, client, class, g.cfg.Settings.ContextOverhead, func() quota.Bytes {
				return g.cfg.Settings.ContextOverhead
			})
		}
	case rm.ClassChannel:
		// Forced on by RM for a caller with CAP_SYS_ADMIN, which the guard does not have; asked for by nobody honest.
		rm.PutU32(params, rm.ChannelFlags, rm.U32(params, rm.ChannelFlags)&^rm.ChannelFlagPrivileged)
		if rm.U32(params, rm.ChannelEngineType) <= engineGRLast && !g.account.isGroup(client, rm.U32(o, rm.AllocParent)) {
			// The driver makes a group for it that has no handle, and so no timeslice that could be set.
			g.logOnce("lonechannel", "denied a channel on the graphics engine that is in no channel group")
			g.stats.denied.Add(1)
			return c.status(rm.StatusNotSupported)
		}
	case rm.ClassCompute, rm.ClassPlain:
		if usesGraphics(class) {
			return g.allocContext(c, client, class, params)
		}
	case rm.ClassInTask:
		g.logOnce("intask", "denied an object class that pins the caller's pages", "class", class.Name)
		return c.status(rm.StatusNotSupported)
	}
	return g.allocObject(c, client, class, params)
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

// allocMemory makes device memory, within the limit.
func (g *Guard) allocMemory(c *trappedCall, client uint32, class rm.Class, params []byte) reply {
	if len(params) == 0 || fixedAddress(rm.U32(params, rm.MemoryFlags)) {
		return c.status(rm.StatusInvalidArgument)
	}
	want, ok := roundUp(rm.U64(params, rm.MemorySize), pageHuge)
	if !ok {
		return c.status(rm.StatusNoMemory)
	}
	gpu, rep, ok := g.gpuFor(c, client, rm.U32(c.call.Outer, rm.AllocParent))
	if !ok {
		return rep
	}
	if g.spills(gpu, want) {
		return g.allocSpilled(c, client, gpu, want, params)
	}
	rep = g.allocCharged(c, client, class, want, func() quota.Bytes {
		return grantedSize(rm.U64(params, rm.MemorySize), rm.U32(params, rm.MemoryAttr))
	})
	if rep.errno == 0 && c.failedWith(rm.StatusNoMemory) && g.account.usage(gpu).spill > 0 && (c.executed || g.spills(gpu, want)) {
		// A card has a little less than its size to give: within the limit, and yet there is nothing left. Or the driver was not
		// asked, because another thread has taken the room since.
		c.takeBack()
		for _, off := range class.Clear { // which was taken back too
			rm.PutU64(params, off, 0)
		}
		return g.allocSpilled(c, client, gpu, want, params)
	}
	return rep
}

// allocCharged makes an object that takes device memory: reserve, execute, settle to what it took.
func (g *Guard) allocCharged(c *trappedCall, client uint32, class rm.Class, want quota.Bytes, took func() quota.Bytes) reply {
	gpu, rep, ok := g.gpuFor(c, client, rm.U32(c.call.Outer, rm.AllocParent))
	if !ok {
		return rep
	}
	if !g.reserve(gpu, want) {
		return c.status(rm.StatusNoMemory)
	}
	if !c.valid() {
		g.account.unreserve(gpu, want)
		return replyDone
	}
	status, e := c.execStatus()
	if e != 0 || status != rm.StatusOK {
		g.account.unreserve(gpu, want)
		return fail(e)
	}
	handle := rm.U32(c.call.Outer, rm.AllocObject)
	o := object{handle: handle, parent: rm.U32(c.call.Outer, rm.AllocParent), class: class.ID, kind: class.Kind, gpu: noGPU}
	o.graphics = class.Kind == rm.ClassTSG
	o.engine = engineType(class, c.call.Blocks[0].Data)
	if class.Kind == rm.ClassVidmem {
		o.length = quota.Bytes(rm.U64(c.call.Blocks[0].Data, rm.MemorySize))
	}
	size := took()
	if !g.settleUp(gpu, &want, size) {
		if s, e := g.free(c.target(), client, handle); e == 0 && s == rm.StatusOK {
			g.account.unreserve(gpu, want)
			c.takeBack()
			return c.status(rm.StatusNoMemory)
		}
	}
	g.account.addObject(client, o, gpu, want, size)
	if o.graphics {
		g.compute.made(gpu)
	}
	c.undo = g.undoObject(c.target(), client, handle)
	return replyDone
}

// settleUp reserves what the driver took beyond want: a caller may ask for pages of 512 MiB, and the driver rounds up to
// them (memmgrAllocDetermineAlignment_GM107). False: the limit does not allow that.
func (g *Guard) settleUp(gpu int, want *quota.Bytes, size quota.Bytes) bool {
	if size <= *want {
		return true
	}
	if !g.account.reserve(gpu, size-*want, true) {
		return false
	}
	*want = size
	return true
}

// takeBack makes the call's structures what the task passed.
func (c *trappedCall) takeBack() {
	copy(c.call.Outer, c.before[0])
	for i, b := range c.call.Blocks {
		copy(b.Data, c.before[i+1])
	}
}

// fixedAddress reports that device memory is asked for at a physical address. The driver then takes as much as the
// alignment that the caller names, whatever the size (_vidmemPmaAllocate), and says nothing of it.
func fixedAddress(flags uint32) bool { return flags&0x10 != 0 } // NVOS32_ALLOC_FLAGS_FIXED_ADDRESS_ALLOCATE

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

// allocContext makes an object on the graphics engine. Where its channel is in a group that has not been charged for that (one
// that named another engine), it is now.
func (g *Guard) allocContext(c *trappedCall, client uint32, class rm.Class, params []byte) reply {
	parent := rm.U32(c.call.Outer, rm.AllocParent)
	owner, charged := g.account.contextOwner(client, parent)
	if !g.account.isGroup(client, owner) {
		g.logOnce("loneobject", "denied an object of the graphics engine on a channel that is in no channel group")
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	cost := g.cfg.Settings.ContextOverhead
	defer func() {
		if c.undo != nil && g.account.markGraphics(client, owner) {
			g.compute.made(g.account.gpuOf(client, owner))
		}
	}()
	if charged || cost == 0 {
		return g.allocObject(c, client, class, params)
	}
	gpu, rep, ok := g.gpuFor(c, client, parent)
	if !ok {
		return rep
	}
	if !g.reserve(gpu, cost) {
		return c.status(rm.StatusNoMemory)
	}
	rep = g.allocObject(c, client, class, params)
	if c.undo == nil || !g.account.chargeContext(client, owner, gpu, cost) {
		g.account.unreserve(gpu, cost)
	}
	return rep
}

// reserve takes memory from a GPU's limit. Before it refuses it looks whether something was closed unnoticed.
func (g *Guard) reserve(gpu int, size quota.Bytes) bool {
	if g.account.reserve(gpu, size, false) {
		return true
	}
	g.sweep()
	return g.account.reserve(gpu, size, true)
}

// gpuFor finds the GPU that memory below a parent handle is charged to.
func (g *Guard) gpuFor(c *trappedCall, client, parent uint32) (gpu int, rep reply, ok bool) {
	if gpu = g.account.gpuOf(client, parent); gpu != noGPU {
		return gpu, replyDone, true
	}
	// Not below a device that the guard has seen: RM would refuse it, so the guard does.
	return noGPU, c.status(rm.StatusInvalidObjectParent), false
}

// allocObject makes an object that takes no device memory worth counting.
func (g *Guard) allocObject(c *trappedCall, client uint32, class rm.Class, params []byte) reply {
	o := object{parent: rm.U32(c.call.Outer, rm.AllocParent), class: class.ID, kind: class.Kind, gpu: noGPU, engine: engineType(class, params)}
	if class.Kind == rm.ClassChannel && len(params) > rm.ChannelUserdOffset+8 {
		o.userd = userd{rm.U32(params, rm.ChannelUserdMemory), rm.U64(params, rm.ChannelUserdOffset)}
		o.of = o.userd.memory // the channel keeps it, whatever becomes of its handle
	}
	if class.Kind == rm.ClassProfiler {
		o.streams = &streams{}
	}
	if class.Kind == rm.ClassFabric { // an NVLink address of memory of this client (peer access between the container's GPUs)
		o.of = rm.U32(params, g.abi.FabricVidmemOff())
		if g.account.isSpilled(client, o.of) {
			return g.refuseSpilled(c, "fabric")
		}
	}
	if class.Kind == rm.ClassDevice {
		gpu, ok := g.deviceGPU(c, client, params)
		if !ok {
			return c.status(rm.StatusInvalidDevice)
		}
		o.gpu = gpu
	}
	if !c.valid() {
		return replyDone
	}
	status, e := c.execStatus()
	if e != 0 || status != rm.StatusOK {
		return fail(e)
	}
	o.handle = rm.U32(c.call.Outer, rm.AllocObject)
	g.account.addObject(client, o, noGPU, 0, 0)
	c.undo = g.undoObject(c.target(), client, o.handle)
	return replyDone
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
		var p [idInfoSize]byte
		rm.PutU32(p[:], 0, x.id)
		if s, e := g.control(c.target(), client, client, controlGetIDInfoV2, p[:]); e != 0 || s != rm.StatusOK {
			continue
		}
		n := rm.U32(p[:], idInfoInstance)
		g.mu.Lock()
		g.instances[n] = i
		g.mu.Unlock()
		if n == instance {
			gpu, ok = i, true
		}
	}
	return gpu, ok
}

const (
	controlGetIDInfoV2 = 0x205 // NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2
	controlGetAttached = 0x201 // NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS
	idInfoSize         = 32
	idInfoInstance     = 8
	attachedSize       = 128
	controlTypeCode    = 3<<30 | rm.ControlSize<<16 | 'F'<<8 | rm.EscControl
	freeTypeCode       = 3<<30 | rm.FreeSize<<16 | 'F'<<8 | rm.EscFree
	shareTypeCode      = 3<<30 | rm.ShareSize<<16 | 'F'<<8 | rm.EscShare
	shareTypeAll       = 1 // RS_SHARE_TYPE_ALL
	shareActionRevoke  = 1 // RS_SHARE_ACTION_FLAG_REVOKE
	shareActionCompose = 4 // RS_SHARE_ACTION_FLAG_COMPOSE
	accessDup          = 1 // RS_ACCESS_DUP_OBJECT as a mask
)

// control makes a flat control of the guard's own on a file of the task.
func (g *Guard) control(t Target, client, object, cmd uint32, params []byte) (uint32, syscall.Errno) {
	outer := make([]byte, rm.ControlSize)
	rm.PutU32(outer, rm.ControlClient, client)
	rm.PutU32(outer, rm.ControlObject, object)
	rm.PutU32(outer, rm.ControlCmd, cmd)
	rm.PutU32(outer, rm.ControlParamsSize, uint32(len(params)))
	call := rm.Call{Cmd: controlTypeCode, Outer: outer, Blocks: []rm.Block{{In: -1, Off: rm.ControlParams, Data: params}}}
	e := g.driver.Exec(t, &call)
	return rm.U32(outer, rm.ControlStatus), e
}

// free frees an object or a client for the guard's own reasons.
func (g *Guard) free(t Target, client, handle uint32) (uint32, syscall.Errno) {
	outer := make([]byte, rm.FreeSize)
	rm.PutU32(outer, rm.FreeRoot, client)
	rm.PutU32(outer, rm.FreeObject, handle)
	e := g.driver.Exec(t, &rm.Call{Cmd: freeTypeCode, Outer: outer})
	return rm.U32(outer, rm.FreeStatus), e
}

// undoObject frees an object whose maker was gone before it could be told the handle.
func (g *Guard) undoObject(t Target, client, handle uint32) func() {
	return func() {
		lock, ok := g.account.lockCalls(client, client)
		if !ok {
			return
		}
		defer lock.unlock()
		if s, e := g.free(t, client, handle); e == 0 && s == rm.StatusOK {
			g.account.freeObject(client, handle)
		}
	}
}
