// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

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
		return g.serveByRule(rule{inTask: true, check: (*Guard).checkRootAlloc}, c)
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
	return g.serveAlloc(c)
}

// serveAlloc serves an RM_ALLOC of which all has been copied.
func (g *Guard) serveAlloc(c *trappedCall) reply {
	c.clearParams()
	if locks := g.abi.FreeHoldsLocks(c.class.Kind); locks > 0 && !g.waitToPay(c, locks) {
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
	rm.ClassGraphics:   (*Guard).checkGraphics,
	rm.ClassPlain:      (*Guard).checkEngineObject,
	rm.ClassProfiler:   (*Guard).checkProfiler,
	rm.ClassFabric:     (*Guard).checkFabric,
	rm.ClassContextDMA: (*Guard).checkContextDMA,
	rm.ClassSemaphores: (*Guard).checkSemaphoreSurface,
	rm.ClassMapper:     (*Guard).checkMapper,
	rm.ClassDevice:     (*Guard).checkDevice,
	rm.ClassDebugger:   (*Guard).checkDebugger,
	rm.ClassInTask:     (*Guard).checkInTask,
	rm.ClassP2P:        (*Guard).checkP2P,
	rm.ClassEncoder:    (*Guard).checkEncoder,
}

// checkAlloc is for all classes.
func (g *Guard) checkAlloc(c *trappedCall) plan {
	if c.isUnseen(c.target(), c.allocClient(), c.allocParent()) || c.namesUnseen() {
		return answer(c.denyUnseen())
	}
	for _, off := range c.class.ClientHandles {
		if h := rm.U32(c.params, off); h != 0 && !g.account.ownsClient(h) {
			return answer(c.deny(rm.StatusInvalidClient, "clienthandle", "denied an object that names another container's client",
				"class", c.class.Name))
		}
	}
	if !g.roomForObject(c.class.Kind, g.account.gpuOf(c.allocClient(), c.allocParent())) {
		return answer(c.deny(rm.StatusInsufficientResources, "room"+c.class.Name, "denied an object: the container has too many",
			"class", c.class.Name))
	}
	if c.class.ID == classPeerMemory && !g.roomForPeerMemory() {
		return answer(c.deny(rm.StatusInsufficientResources, "room"+c.class.Name, "denied an object: the container has too many",
			"class", c.class.Name))
	}
	if g.isMember() && !g.account.roomBelowLent(c.allocClient(), c.allocParent(), c.class) {
		return answer(c.deny(rm.StatusInsufficientResources, "belowlent", "denied a CUDA context: a member of a trust domain may have so many, "+
			"of the 64 that an MPS server has for all", "contexts", maxLentShares, "channels", maxLentChannels))
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

// roomForObject reports that the container may have another object of a kind on a GPU. Some may be gone unnoticed. Of a device it is not
// known yet which GPU it is for: then there must be room on each.
func (g *Guard) roomForObject(kind rm.ClassKind, gpu int) bool {
	tsgs, channels := g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels
	if g.account.roomForObject(kind, gpu, tsgs, channels) {
		return true
	}
	g.sweep()
	return g.account.roomForObject(kind, gpu, tsgs, channels)
}

// classPeerMemory is NV50_THIRD_PARTY_P2P. libcuda has one for each context, and registers each allocation with it (0x503c0104). The driver
// keeps some 200 bytes of the host's memory for each pair of such an object and memory, which no cgroup counts.
const classPeerMemory = 0x503c

// roomForPeerMemory reports that the container may have another: as many as it may have channel groups, of which a context has four.
func (g *Guard) roomForPeerMemory() bool {
	most := g.cfg.Settings.MaxTSGs * len(g.cfg.GPUs)
	if g.account.countPeerMemory() < most {
		return true
	}
	g.sweep()
	return g.account.countPeerMemory() < most
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

// planCharged is the plan of an object that takes memory: reserve, ask, correct to what it took. made tells of the object and of the
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

// checkDevice: each device has an address space of its own for what names none, whatever its maker asks for. 0 would be the one that all of
// the GPU's users share, the host's too. Another client's is found only when it is first used, and by then its handle may be a neighbour's
// (deviceInitClientShare). Graphics libraries ask for that of the client with which they share the file.
func (g *Guard) checkDevice(c *trappedCall) plan {
	client := c.allocClient()
	if share := rm.U32(c.params, rm.DeviceClientShare); share != 0 && !g.account.ownsClient(share) {
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
		keepFromKernel(c.params, rm.MemoryType, rm.U64(c.params, rm.MemorySize))
	}
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

// undoObject frees an object whose maker was gone before it could be told the handle.
func (g *Guard) undoObject(t Target, client, handle uint32) func() {
	return func() {
		lock, ok := g.account.lockCalls(client, client)
		if !ok {
			return
		}
		defer lock.unlock()
		free := func() (uint32, unix.Errno) { return g.rmFree(t, client, handle) }
		if s, e := g.freeWhole(t, client, handle, free); e == 0 && s == rm.StatusOK {
			g.objectFreed(t, client, handle)
		}
	}
}
