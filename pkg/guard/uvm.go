// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// UVM maps memory of an RM client into a UVM address space; the mapping holds the memory even after RM_FREE of its handle
// (uvm_map_external_allocation dups it into UVM's own client). If the mapping call ran in the task, a racing thread could
// make it name another object than the one the guard saw, free that object's handle, and keep uncharged memory. So the
// guard makes these calls itself: UVM takes the address space from the file, not from the caller (uvm.c, uvm_ioctl).
//
// RM lets UVM dup an object only for the process that owns it (cliresShareCallback_IMPL compares with the current process),
// which is not the guard; so the object is opened for the moment of the call (share.go).

// uvmUnmapGPU is the offset of the GPU in UVM_UNMAP_EXTERNAL_PARAMS (uvm_ioctl.h).
const uvmUnmapGPU = 16

// uvmCalls are the rules of calls on nvidia-uvm.
var uvmCalls = map[uint32]rule{
	rm.UVMRegisterGPU:        {check: (*Guard).checkRegisterGPU},
	rm.UVMRegisterGPUVASpace: {clients: uvmClient, locks: true, check: (*Guard).checkRegisterSpace},
	rm.UVMUnregisterVASpace:  {check: (*Guard).checkUVMDrop},
	rm.UVMRegisterChannel:    {clients: uvmClient, locks: true, check: (*Guard).checkRegisterChannel},
	rm.UVMUnregisterChannel:  {check: (*Guard).checkUVMDrop},
	rm.UVMUnregisterGPU:      {check: (*Guard).checkUVMDrop},
	rm.UVMMapExternal:        {clients: uvmClient, locks: true, check: (*Guard).checkMapExternal},
	rm.UVMMapSparse:          {check: (*Guard).checkSparse},
	rm.UVMCreateExternal:     {check: (*Guard).checkCreateExternal},
	rm.UVMMapDynamicRegion:   {check: (*Guard).checkDynamicRegion},
	rm.UVMAllocSemaphorePool: {check: (*Guard).checkSemaphorePool},
	rm.UVMCreateRangeGroup:   {check: (*Guard).checkRangeGroup},
	rm.UVMDestroyRangeGroup:  {check: (*Guard).checkUVMDrop},
	rm.UVMFree:               {check: (*Guard).checkUVMDrop},
	rm.UVMUnmapExternal:      {check: (*Guard).checkUVMDrop},
	rm.UVMAllocDeviceP2P:     {check: denyDeviceP2P},
}

// onUVM handles a UVM call that makes or drops a reference to what an RM client has.
func (g *Guard) onUVM(c *trappedCall, cmd uint32) reply {
	r, known := uvmCalls[cmd]
	form, ok := g.abi.UVM(cmd)
	if !ok || !known {
		return fail(unix.EINVAL)
	}
	if cmd == rm.UVMMapExternal {
		ok = c.loadMap(cmd, form)
	} else {
		ok = c.loadOuter(cmd, c.notif.Args[2], form.Size)
	}
	if !ok {
		return fail(unix.EFAULT)
	}
	return g.serveByRule(r, c)
}

// checkRegisterGPU: UVM asks nobody whether the caller may use a GPU; it opens whichever the UUID names (nvidia_dev_get_uuid). Client and
// partition count with MIG only, and the control file never.
func (g *Guard) checkRegisterGPU(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	if _, ok := g.gpuByUUID(gpuUUID(o[rm.UVMGPU:])); !ok {
		return answer(c.deny(rm.StatusGPUNotFound, "uvmgpu", "denied UVM a GPU that the container was not given"))
	}
	f, err := c.lockUVM()
	if err != nil {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	named := [uvmGPUNamed]byte(o[form.FD:])
	clear(o[form.FD : form.FD+uvmGPUNamed])
	done := func() {
		copy(o[form.FD:], named[:])
		f.uvm.Unlock()
	}
	return plan{ask: true, done: done, commit: func() {
		f.zombies.Store(g.isMultiProcess(c.target()))
		g.books.note(f)
	}}
}

// uvmGPUNamed is the size of control file, client and partition in UVM_REGISTER_GPU_PARAMS, which follow each other.
const uvmGPUNamed = 12

// form is the layout of a UVM call.
func (c *trappedCall) form() rm.UVMForm {
	f, _ := c.guard.abi.UVM(c.call.Cmd)
	return f
}

// denyDeviceP2P: a BAR1 window that holds memory too. Nothing that a container needs.
func denyDeviceP2P(_ *Guard, c *trappedCall) plan {
	return answer(c.deny(rm.StatusNotSupported, "uvmp2p", "denied UVM_ALLOC_DEVICE_P2P"))
}

// checkUVMDrop: a call that drops what an address space holds.
func (g *Guard) checkUVMDrop(c *trappedCall) plan {
	// An address space in which nothing was registered or mapped is not followed: then the call drops nothing that is charged.
	f := c.file
	if f == nil {
		f = g.files.find(c.fd, nodeUVM)
	}
	if f == nil {
		return pass()
	}
	f.uvm.Lock()
	if c.call.Cmd == rm.UVMUnmapExternal && g.uvmFull() && f.splits(rangeOf(c.call.Outer, c.form()), gpuUUID(c.call.Outer[uvmUnmapGPU:])) {
		f.uvm.Unlock()
		return answer(c.status(rm.StatusInsufficientResources))
	}
	ended := g.unbindDropped(f, c.call.Cmd, c.form(), c.call.Outer)
	return plan{ask: true, done: f.uvm.Unlock, cancel: func() { g.rebind(ended) }, commit: func() {
		g.recordDrop(f, c.call.Cmd, c.form(), c.call.Outer)
	}}
}

// unbindDropped notes which channels a call ends.
func (g *Guard) unbindDropped(f *file, cmd uint32, form rm.UVMForm, o []byte) []*retained {
	switch cmd {
	case rm.UVMUnregisterChannel:
		dropped := channelName{rm.U32(o, form.Client), rm.U32(o, form.Object)}
		return g.unbind(f, func(name channelName, _ uvmChannel) bool { return name == dropped })
	case rm.UVMUnregisterVASpace, rm.UVMUnregisterGPU:
		gpu := gpuUUID(o[rm.UVMGPU:])
		return g.unbind(f, func(_ channelName, ch uvmChannel) bool { return ch.gpu == gpu })
	}
	return nil
}

// recordDrop takes out of the account what a call has dropped.
func (g *Guard) recordDrop(f *file, cmd uint32, form rm.UVMForm, o []byte) {
	switch cmd {
	case rm.UVMUnregisterChannel:
		g.dropUVMChannel(f, channelName{rm.U32(o, form.Client), rm.U32(o, form.Object)})
	case rm.UVMUnregisterVASpace, rm.UVMUnregisterGPU:
		g.dropUVMGPU(f, gpuUUID(o[rm.UVMGPU:]))
	case rm.UVMUnmapExternal:
		g.recordUnmapping(f, rangeOf(o, form), gpuUUID(o[uvmUnmapGPU:]))
	case rm.UVMFree:
		g.recordUVMFree(f, o, form)
	case rm.UVMDestroyRangeGroup:
		g.dropRangeGroup(f, rm.U64(o, form.Base))
	}
}

// Of UVM_MAP_EXTERNAL_ALLOCATION_PARAMS: base, length and offset are followed by room for the attributes of 256 GPUs, of
// which gpuAttributesCount, before rmCtrlFd, are meant (uvm_ioctl.h, UvmGpuMappingAttributes).
const (
	uvmMapOffset         = 16
	uvmMapAttributes     = 24
	uvmMapAttributesSize = 36
	uvmMapFewGPUs        = 8
	uvmMapMaxGPUs        = 32 // UVM_MAX_GPUS of the branches with the short form; no machine has more
	uvmMapCount          = 8  // bytes before rmCtrlFd
)

// loadMap copies the parameters of a mapping. Nearly all of their nine KiB is room for more GPUs than a machine has, so
// only the ends are copied. UVM does not look at the rest.
func (c *trappedCall) loadMap(cmd uint32, form rm.UVMForm) bool {
	b := c.mem.alloc(form.Size)
	if b == nil {
		return false
	}
	addr, tail := c.notif.Args[2], form.FD-uvmMapCount
	if addr > ^uint64(0)-uint64(form.Size) ||
		!readTwo(c.task.tid, addr, b[:uvmMapAttributes+uvmMapFewGPUs*uvmMapAttributesSize], addr+uint64(tail), b[tail:]) {
		return false
	}
	if rm.U64(b, tail) > uvmMapFewGPUs && !readMemory(c.task.tid, addr, b) {
		return false
	}
	c.call.Cmd, c.call.Outer, c.outerAddr, c.statusOnly = cmd, b, addr, form.Status
	return true
}

func uvmClient(c *trappedCall) (dst, src uint32) {
	h := rm.U32(c.call.Outer, c.form().Client)
	return h, h
}

// planUVMCall is the plan of a call that names a client, and a control file that must be the client's: what it names is open to the guard
// meanwhile, and UVM sees the guard's copy of the file. What it maps, in pages of a size, is charged for page tables. Nil: the plan is an
// answer.
func (c *trappedCall) planUVMCall(maps []uvmMap, page quota.Bytes) (*file, plan) {
	o, form := c.call.Outer, c.form()
	number := rm.U32(o, form.FD)
	fd, as, err := c.fileNamed(number, nodeControl)
	if err != nil {
		return nil, answer(c.status(rm.StatusInvalidArgument))
	}
	f, status := c.guard.lockToMap(c, maps, page)
	if f == nil {
		_ = unix.Close(fd)
		return nil, answer(c.status(status))
	}
	rm.PutU32(o, form.FD, as)
	// The owner of the control file vouches for the client: RM refuses a client that is not that file's.
	ctl := Target{FD: fd, File: as, PID: c.task.proc.tgid, TID: c.task.tid}
	return f, plan{ask: true, opened: &opening{ctl, rm.U32(o, form.Client), []openRight{{rm.U32(o, form.Object), accessDup}}}, done: func() {
		rm.PutU32(o, form.FD, number)
		f.uvm.Unlock()
		_ = unix.Close(fd)
	}}
}

// checkMapExternal: an object of one of the container's clients is mapped.
func (g *Guard) checkMapExternal(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	gpus := rm.U64(o, form.FD-uvmMapCount)
	if gpus > uvmMapMaxGPUs {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	maps := make([]uvmMap, max(1, int(gpus)))
	for i := range maps {
		maps[i] = uvmMap{gpu: gpuUUID(o[uvmMapAttributes+i*uvmMapAttributesSize:]), addresses: rangeOf(o, form)}
	}
	client, memory := rm.U32(o, form.Client), rm.U32(o, form.Object)
	m, ok := c.acquireObject(client, memory)
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	if m.kind == rm.ClassFabric && m.charge != nil && m.charge.spilled {
		return answer(g.refuseSpilled(c, "mapping"))
	}
	if m.kind == rm.ClassUserShared {
		return answer(c.denyUserShared())
	}
	if !c.roomForReferences(m.charge, len(maps)-1) {
		return answer(c.denyReferences())
	}
	if m.charge.isFlexible() {
		return answer(c.denyFlexible())
	}
	page := mapPageAt(g.account.mapPage(m), rm.U64(o, form.Base), rm.U64(o, form.Length), rm.U64(o, uvmMapOffset))
	f, p := c.planUVMCall(maps, page)
	if f == nil {
		return p
	}
	if c.isUncounted(p.opened.target, client, memory) {
		g.dropTables(maps)
		p.ask, p.answer = false, c.denyUnseen()
		return p
	}
	p.cancel = func() { g.dropTables(maps) }
	p.commit = func() {
		for _, x := range maps {
			x.charge = g.account.addReference(m.charge)
			g.recordMapping(f, x)
		}
	}
	return p
}

// lockUVM follows the call's address space and keeps it from being changed or ended meanwhile. One that has been torn down, since no
// process had it (it was in a socket), is followed anew.
func (c *trappedCall) lockUVM() (*file, error) {
	for {
		if c.file == nil {
			if err := c.followFile(); err != nil {
				return nil, err
			}
		}
		c.file.uvm.Lock()
		if !c.file.ended {
			return c.file, nil
		}
		c.file.uvm.Unlock()
		c.file = nil
	}
}
