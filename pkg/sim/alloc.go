// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Classes that the driver treats specially; src/common/sdk/nvidia/inc/class. The others are plain objects.
const (
	classRoot          = 0x0    // NV01_ROOT
	classRootNonPriv   = 0x1    // NV01_ROOT_NON_PRIV
	classRootClient    = 0x41   // NV01_ROOT_CLIENT
	classMemorySystem  = 0x3e   // NV01_MEMORY_SYSTEM
	classRegisters     = 0x3f   // NV01_MEMORY_LOCAL_PRIVILEGED
	classMemoryLocal   = 0x40   // NV01_MEMORY_LOCAL_USER
	classNoMemory      = 0x70   // NV01_MEMORY_SYSTEM_DYNAMIC
	classOSDescriptor  = 0x71   // NV01_MEMORY_SYSTEM_OS_DESCRIPTOR
	classDevice        = 0x80   // NV01_DEVICE_0
	classSubdevice     = 0x2080 // NV20_SUBDEVICE_0
	classContextDMA    = 0x2    // NV01_CONTEXT_DMA
	classSemaphores    = 0xda   // NV_SEMAPHORE_SURFACE
	classUserShared    = 0xde   // RM_USER_SHARED_DATA
	classMemoryVirtual = 0x50a0 // NV50_MEMORY_VIRTUAL
	classContextShare  = 0x9067 // FERMI_CONTEXT_SHARE_A
	classVASpace       = 0x90f1 // FERMI_VASPACE_A
	classGroup         = 0xa06c // KEPLER_CHANNEL_GROUP_A
	classDebugger      = 0x83de // GT200_DEBUGGER
)

const userSharedSize = 2608 // of NV00DE_SHARED_DATA, as libcuda of 580.159.04 maps it

// isChannel reports a *_CHANNEL_GPFIFO class: 0xa06f of Kepler up to 0xca6f of Blackwell.
func isChannel(class uint32) bool { return class&0xff == 0x6f && class >= 0xa06f && class <= 0xcf6f }

// isEngineObject reports a compute class (0x..c0) or copy class (0x..b5), which sits below a channel.
func isEngineObject(class uint32) bool {
	return class >= 0xa000 && class <= 0xcfff && (class&0xff == 0xc0 || class&0xff == 0xb5)
}

// statusInvalidOwner is NV_ERR_INVALID_OWNER, what memory without an owner's mark is answered with (stdmemValidateParams).
const statusInvalidOwner = 0x39

// lastGraphics is NV2080_ENGINE_TYPE_GR7.
const lastGraphics = 8

// usesGraphics reports an object on the graphics engine: compute, 3D, 2D, inline to memory.
func usesGraphics(class uint32) bool {
	switch class & 0xff {
	case 0xc0, 0x97, 0x2d, 0x40:
		return class > 0xff
	}
	return false
}

// isCompute reports a compute class; a process that has one is a compute process in GET_PIDS.
func isCompute(class uint32) bool { return isEngineObject(class) && class&0xff == 0xc0 }

// isGraphics reports a class of objects by which a context draws: 2D, 3D.
func isGraphics(class uint32) bool {
	return class > 0xff && (class&0xff == 0x97 || class&0xff == 0x2d)
}

// special reports a class that the driver knows whatever a container is allowed.
func special(class uint32) bool {
	switch class {
	case classMemorySystem, classMemoryLocal, classDevice, classSubdevice, classMemoryVirtual, classContextShare, classGroup:
		return true
	}
	return isChannel(class) || isEngineObject(class)
}

// allocEscape is RM_ALLOC in the form that its size says.
func (r *request) allocEscape() syscall.Errno {
	out := r.call.Outer
	form, ok := r.d.abi.AllocForm(len(out))
	if !ok {
		return syscall.EINVAL
	}
	// Everything but events is for nvidiactl (RmIoctl, NV_CTL_DEVICE_ONLY).
	class := rm.U32(out, rm.AllocClass)
	if r.f.kind != Control && class != 0x5 && class != 0x79 {
		return syscall.EINVAL
	}
	if form.FlagsOff >= 0 && rm.U32(out, form.FlagsOff) != 0 {
		rm.PutU32(out, form.StatusOff, rm.StatusInvalidArgument) // serialised parameters (rmapi_finn.c) are not modelled
		return 0
	}
	rm.PutU32(out, form.StatusOff, r.alloc(class))
	return 0
}

func (r *request) alloc(class uint32) uint32 {
	out := r.call.Outer
	_, params := r.block(-1, rm.AllocParams)
	switch class {
	case classRoot, classRootNonPriv, classRootClient:
		rm.PutU32(out, rm.AllocClass, classRootClient) // as escape.c does
		return r.allocRoot(params)
	}
	if _, ok := r.d.abi.Class(class); !ok && !special(class) {
		return rm.StatusInvalidClass
	}
	c, st := r.client(rm.U32(out, rm.AllocRoot))
	if st != rm.StatusOK {
		return st
	}
	parent := c.objects[rm.U32(out, rm.AllocParent)]
	if parent == nil {
		return rm.StatusObjectNotFound
	}
	if !parentFits(class, parent) {
		return rm.StatusInvalidObjectParent
	}
	if parent.lost() {
		return rm.StatusGPUIsLost
	}
	if isGraphics(class) && parent.channel != nil && parent.channel.group != nil && parent.channel.group.group.cilp {
		return rm.StatusInvalidObject
	}
	o := &object{handle: rm.U32(out, rm.AllocObject), class: class}
	if o.handle != 0 && c.objects[o.handle] != nil {
		return rm.StatusInsertDuplicateName // before anything is taken from a card
	}
	if st := r.fill(o, parent, params); st != rm.StatusOK {
		return st
	}
	return r.finish(c, parent, o, rm.AllocObject)
}

// finish places o and writes its handle to the outer structure, or gives back what fill took.
func (r *request) finish(c *client, parent, o *object, handleOff int) uint32 {
	st := r.d.place(c, parent, o)
	if st != rm.StatusOK {
		if o.memory != nil {
			r.d.unref(o.memory)
		}
		if o.group != nil && len(o.group.handles) == 0 && o.group.context != nil {
			r.d.unref(o.group.context)
		}
		if o.tables != nil {
			r.d.unref(o.tables)
		}
		return st
	}
	if o.class == classMemorySystem && o.pages == nil { // a dup has those of its source
		o.pages = &hostPages{o.size}
	}
	if s := o.space; s != nil {
		if s.ranges == nil {
			s.ranges = map[*object]bool{}
		}
		s.ranges[o] = true
	}
	if s := o.within; s != nil {
		if s.fixed == nil {
			s.fixed = map[*object]bool{}
		}
		s.fixed[o] = true
	}
	if o.group != nil {
		if o.group.handles == nil {
			o.group.handles = map[*object]bool{}
		}
		o.group.handles[o] = true
	}
	switch {
	case o.group != nil && o.group.tsg == nil && onGraphics(o.group.engineType):
		o.group.tsg = o.gpu.engine.add(c.pid, o.handle)
	case o.channel != nil && parent.group != nil:
		repause(parent)
	case (isCompute(o.class) || isGraphics(o.class)) && parent.channel != nil && parent.channel.group != nil:
		makeContext(parent.channel.group.group, o.class)
	}
	rm.PutU32(r.call.Outer, handleOff, o.handle)
	return st
}

// onGraphics reports an engine type of the graphics runlist; 0 is what groups before Ampere say.
func onGraphics(engineType uint32) bool { return engineType <= rm.ChannelEngineTypeGR }

// parentFits is the part of the class tree (src/nvidia/src/kernel/rmapi/resource_list.h) that matters here.
func parentFits(class uint32, parent *object) bool {
	switch {
	case class == classDevice:
		return parent.class == classRootClient
	case class == classSubdevice:
		return parent.class == classDevice
	case class == classUserShared:
		return parent.class == classSubdevice
	case class == classVASpace:
		return parent.class == classDevice
	case class == classMemoryLocal, class == classMemorySystem, class == classMemoryVirtual:
		return parent.class == classDevice || parent.class == classSubdevice
	case class == classGroup:
		return parent.class == classDevice
	case class == classVASpace:
		return parent.class == classDevice
	case isChannel(class):
		return parent.class == classGroup || parent.class == classDevice
	case class == classContextShare:
		return parent.class == classGroup
	case isEngineObject(class):
		return parent.channel != nil
	}
	return true
}

// fill makes what is special about a class and takes it from the card.
func (r *request) fill(o, parent *object, params []byte) uint32 {
	switch {
	case o.class == classDevice:
		instance := rm.U32(params, rm.DeviceID) // without parameters: device 0
		if instance >= uint32(len(r.d.gpus)) {
			return rm.StatusInvalidDevice
		}
		g := r.d.gpus[instance]
		if !r.hasNode(g) {
			return rm.StatusInsufficientPermissions // deviceInit_IMPL, osIsGpuAccessible
		}
		o.gpu, o.spaceOf = g, rm.U32(params, rm.DeviceClientShare)
	case o.class == classSubdevice:
		for _, sibling := range parent.children {
			if sibling.class == classSubdevice {
				return rm.StatusInsufficientResources // one per device (seen on 580.159.04)
			}
		}
	case o.class == classMemoryLocal:
		if len(params) < rm.MemoryVASpace+4 {
			return rm.StatusInvalidArgument
		}
		attr, flags := rm.U32(params, rm.MemoryAttr), rm.U32(params, rm.MemoryFlags)
		if attr>>rm.MemoryAttrLocationShift&rm.MemoryAttrLocationMask != rm.MemoryLocationVidmem || flags&rm.MemoryFlagVirtual != 0 {
			return rm.StatusInvalidArgument // stdmemValidateParams
		}
		if rm.U32(params, rm.MemoryOwner) == 0 {
			return statusInvalidOwner
		}
		m, st := newMemory(parent, rm.U64(params, rm.MemorySize))
		if st != rm.StatusOK {
			return st
		}
		o.memory, o.size = m, m.size
		rm.PutU64(params, rm.MemorySize, uint64(m.size))
		rm.PutU64(params, rm.MemoryLimit, uint64(m.size)-1)
		m.tellPage(params, rm.MemoryAttr, rm.MemoryAttr2)
	case o.class == classUserShared:
		o.size = userSharedSize
	case o.class == classMemorySystem:
		if rm.U64(params, rm.MemorySize) == 0 || rm.U32(params,
			rm.MemoryAttr)>>rm.MemoryAttrLocationShift&rm.MemoryAttrLocationMask == rm.MemoryLocationVidmem {
			return rm.StatusInvalidArgument
		}
		if rm.U32(params, rm.MemoryOwner) == 0 {
			return statusInvalidOwner
		}
		rm.PutU64(params, rm.MemoryLimit, rm.U64(params, rm.MemorySize)-1)
		o.size = quota.Bytes(rm.U64(params, rm.MemorySize))
	case o.class == classContextDMA: // ctxdmaConstruct_IMPL
		if o.space = parent.client.objects[rm.U32(params, rm.ContextDMAMemory)]; o.space == nil {
			return rm.StatusObjectNotFound
		}
		if o.space.parent != parent {
			return rm.StatusInvalidObjectParent
		}
		if rm.U32(params, rm.ContextDMAFlags)&rm.ContextDMAFlagNoHash == 0 {
			return rm.StatusInvalidFlags
		}
		if rm.U32(params, rm.ContextDMAFlags)&rm.ContextDMAFlagKernel != 0 {
			w, st := o.space.kernelWindow(rm.U64(params, rm.ContextDMALimit) + 1)
			if st != rm.StatusOK {
				return st
			}
			o.windows = append(o.windows, w)
		}
	case o.class == classSemaphores: // semsurfConstruct_IMPL
		switch m := parent.client.objects[rm.U32(params, rm.SemaphoreMemory)]; {
		case m == nil:
			return rm.StatusObjectNotFound
		case m.class != classMemorySystem:
			return rm.StatusInvalidParameter
		}
	case o.class == classMemoryVirtual:
		return r.d.makeRange(o, parent, rangeWanted{space: rm.U32(params, rm.MemoryVASpace), flags: rm.U32(params, rm.MemoryFlags),
			attr: rm.U32(params, rm.MemoryAttr), attr2: rm.U32(params, rm.MemoryAttr2),
			size: rm.U64(params, rm.MemorySize), at: rm.U64(params, rm.MemoryOffset)})
	case o.class == classVASpace:
		return r.d.makeVASpace(o, parent, rm.U32(params, rm.VASpaceIndex))
	case o.class == classGroup:
		engine := rm.U32(params, rm.TSGEngineType)
		o.group = &group{engineType: engine, timesliceUs: DefaultTimesliceUs, vaspace: parent.client.vaspace(rm.U32(params, groupVASpace)),
			notifier: rm.U32(params, rm.TSGNotifiers[0])}
		if engine <= lastGraphics {
			return r.takeContext(o.group, parent.gpu)
		}
	case o.class == classDebugger:
		return r.debugger(parent.client, params)
	case isChannel(o.class):
		r.d.channels++
		o.channel = &channel{engineType: rm.U32(params, rm.ChannelEngineType), id: r.d.channels}
		o.channel.vaspace = parent.client.vaspace(rm.U32(params, rm.ChannelVASpace))
		if parent.group != nil && o.channel.vaspace == nil {
			o.channel.vaspace = parent.group.vaspace
		}
		if parent.group != nil {
			o.channel.engineType, o.channel.group = parent.group.engineType, parent
		}
		return o.channel.setNotifier(parent, rm.U32(params, rm.ChannelNotifiers[0]))
	case usesGraphics(o.class) && parent.channel != nil && parent.channel.group != nil:
		return r.takeContext(parent.channel.group.group, parent.gpu)
	}
	return rm.StatusOK
}

// setNotifier finds what a channel writes errors to, or that of its group (kchannelGetNotifierInfo).
func (ch *channel) setNotifier(parent *object, handle uint32) uint32 {
	if handle == 0 && parent.group != nil {
		handle = parent.group.notifier
	}
	if handle == 0 {
		return rm.StatusOK
	}
	m := parent.client.objects[handle]
	if m == nil {
		return rm.StatusInvalidState
	}
	ch.notifier = m.memory
	return rm.StatusOK
}

// groupVASpace is where NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS names an address space.
const groupVASpace = 8

// vaspace finds an address space of a client; nil if there is none.
func (c *client) vaspace(handle uint32) *vaspace {
	if o := c.objects[handle]; o != nil && o.class == classVASpace {
		return o.vaspace
	}
	return nil
}

// makeVASpace makes an address space, or another handle of one that is there. Nobody asks who wants the GPU's (vaspaceapiConstruct_IMPL).
func (d *Driver) makeVASpace(o, device *object, index uint32) (status uint32) {
	switch index {
	case rm.VASpaceNew:
		o.vaspace = &vaspace{}
	case rm.VASpaceGlobal:
		o.vaspace = &device.gpu.global
	case rm.VASpaceDevice:
		if o.vaspace, status = d.deviceSpace(device); status != rm.StatusOK {
			return status
		}
	default:
		return rm.StatusInvalidArgument
	}
	return o.takeTables(device.gpu, vaSpaceTables)
}

// deviceSpace is the address space of what is below a device and names none (deviceInitClientShare). Whose client the device has named, and
// whether that is still the same, nobody asks.
func (d *Driver) deviceSpace(device *object) (*vaspace, uint32) {
	from := device
	for hops := 0; from.vaspace == nil && from.spaceOf != 0 && from.spaceOf != from.client.handle; hops++ {
		c := d.clients[from.spaceOf]
		switch {
		case hops > len(d.clients):
			return nil, rm.StatusInvalidState // clients that name each other: RM calls itself until the kernel's stack is full
		case c == nil:
			return nil, rm.StatusInvalidClient
		}
		if from = c.device(device.gpu); from == nil {
			return nil, rm.StatusObjectNotFound
		}
	}
	switch {
	case from.vaspace == nil && from.spaceOf == 0:
		from.vaspace = &from.gpu.global
	case from.vaspace == nil:
		from.vaspace = &vaspace{}
	}
	device.vaspace = from.vaspace
	return device.vaspace, rm.StatusOK
}

// device is a client's device of a GPU; nil if it has none.
func (c *client) device(g *gpu) *object {
	for _, o := range c.root.children {
		if o.class == classDevice && o.gpu == g {
			return o
		}
	}
	return nil
}

// debugger is the check of a debugger object (ksmdbgssnConstruct_IMPL): another client must have given the right.
func (r *request) debugger(c *client, params []byte) uint32 {
	app := c
	if h := rm.U32(params, rm.DebuggerAppClient); h != 0 {
		if app = r.d.clients[h]; app == nil {
			return rm.StatusInvalidClient
		}
	}
	o := app.objects[rm.U32(params, rm.DebuggerObject)]
	if o == nil {
		return rm.StatusInvalidObjectParent
	}
	if app != c && o.rights(c)&accessDebug == 0 {
		return rm.StatusInsufficientPermissions
	}
	return rm.StatusOK
}

// takeContext gives a channel group the memory of a context on the graphics engine, if it has none. The group keeps it.
func (r *request) takeContext(to *group, g *gpu) uint32 {
	switch {
	case to.context != nil:
		return rm.StatusOK
	case !g.reserveHidden(r.d.contextCost):
		return rm.StatusNoMemory
	}
	to.context = &memory{gpu: g, size: r.d.contextCost, refs: 1, hidden: true}
	return rm.StatusOK
}

// hasNode reports whether the executor has the GPU's node.
func (r *request) hasNode(g *gpu) bool {
	for _, m := range r.s.minors {
		if m == g.Minor {
			return true
		}
	}
	return false
}

// newMemory allocates device memory with one reference, accounted to the process of the client (not to the executor).
func newMemory(parent *object, size uint64) (*memory, uint32) {
	g := parent.gpu
	if g == nil {
		return nil, rm.StatusInvalidObjectParent
	}
	if size == 0 {
		return nil, rm.StatusInvalidArgument
	}
	granted, attr, ok := granularity(size)
	if !ok || !g.reserve(granted) {
		return nil, rm.StatusNoMemory
	}
	g.allocated += granted
	return &memory{gpu: g, size: granted, refs: 1, pid: parent.client.pid, attr: attr}, rm.StatusOK
}

// Pages of device memory: 64 KiB, and 2 MiB for what is at least as large (_vidmemPmaAllocate in video_mem.c).
const (
	smallPage = 64 << 10
	bigPage   = 2 << 20
)

// Values of NVOS32_ATTR_PAGE_SIZE.
const (
	attrPageBig  = 2 << rm.MemoryAttrPageShift // 64 KiB
	attrPageHuge = 3 << rm.MemoryAttrPageShift // 2 MiB
)

// tellPage sets the page size in attributes (memmgrDeterminePageSize_IMPL).
func (m *memory) tellPage(b []byte, attr, attr2 int) {
	rm.PutU32(b, attr, m.attr|rm.U32(b, attr)&^(rm.MemoryAttrPageMask<<rm.MemoryAttrPageShift))
	if m.attr == attrPageHuge {
		rm.PutU32(b, attr2, 1<<rm.MemoryAttr2HugeShift|rm.U32(b, attr2)&^(3<<rm.MemoryAttr2HugeShift)) // 2 MiB
	}
}

// granularity is what the allocator takes for a request, and the page size as it reports it in attr.
func granularity(size uint64) (quota.Bytes, uint32, bool) {
	page, attr := uint64(smallPage), uint32(attrPageBig)
	if size >= bigPage {
		page, attr = bigPage, attrPageHuge
	}
	if size > math.MaxUint64-page {
		return 0, 0, false
	}
	return quota.Bytes((size + page - 1) / page * page), attr, true
}

// allocRoot makes a client on the calling file.
func (r *request) allocRoot(params []byte) uint32 {
	d, out := r.d, r.call.Outer
	if r.f.kind != Control {
		return rm.StatusInvalidArgument
	}
	h := rm.U32(out, rm.AllocObject)
	if h == 0 {
		for d.clients[d.nextClient] != nil {
			d.advanceClient()
		}
		h = d.nextClient
		d.advanceClient()
	} else if d.clients[h] != nil {
		return rm.StatusInsertDuplicateName
	}
	owner := r.f.owner()
	c := &client{handle: h, file: owner, pid: r.pid, objects: map[uint32]*object{}, next: firstObject}
	c.root = &object{handle: h, class: classRootClient}
	if st := d.place(c, nil, c.root); st != rm.StatusOK {
		return st
	}
	d.clients[h] = c
	owner.clients = append(owner.clients, c)
	rm.PutU32(out, rm.AllocRoot, h)
	rm.PutU32(out, rm.AllocObject, h)
	rm.PutU32(params, 0, h)
	return rm.StatusOK
}

func (d *Driver) advanceClient() {
	if d.nextClient++; d.nextClient > lastClient {
		d.nextClient = firstClient
	}
}

// allocMemory is the old RM_ALLOC_MEMORY (rmapi_deprecated_allocmemory.c): host memory; for class 0x40 an unprivileged
// caller gets a dummy and the size of the heap in limit. Who leaves the name to the driver is not told it.
func (r *request) allocMemory() uint32 {
	out := r.call.Outer
	c, st := r.client(rm.U32(out, rm.AllocMemoryRoot))
	if st != rm.StatusOK {
		return st
	}
	parent := c.objects[rm.U32(out, rm.AllocMemoryParent)]
	if parent == nil {
		return rm.StatusObjectNotFound
	}
	if parent.gpu == nil {
		return rm.StatusInvalidObjectParent
	}
	class := rm.U32(out, rm.AllocMemoryClass)
	named := rm.U32(out, rm.AllocMemoryObject)
	o := &object{handle: named, class: class}
	switch class {
	case classOSDescriptor, classNoMemory:
	case classMemorySystem:
		o.size = quota.Bytes(rm.U64(out, rm.AllocMemoryLimit) + 1)
	case classMemoryLocal:
		o.class = classNoMemory
		rm.PutU64(out, rm.AllocMemoryLimit, uint64(parent.gpu.Memory)-1)
	case classRegisters:
		rm.PutU64(out, rm.AllocMemoryLimit, math.MaxUint32)
	default:
		return rm.StatusInvalidClass
	}
	st = r.finish(c, parent, o, rm.AllocMemoryObject)
	rm.PutU32(out, rm.AllocMemoryObject, named)
	if st == rm.StatusOK && class == classMemorySystem && rm.AllocMemoryMaps(rm.U32(out, rm.AllocMemoryFlags)) {
		r.mapPages(c, o, FileID(rm.U32(out, rm.AllocMemoryFD)))
	}
	return st
}
