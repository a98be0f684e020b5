// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// What a call that was under way may have made is taken back, before it is served again (rise.go). Calls that make nothing, or the same
// again, are just repeated; those that take something away have done so, if the driver does not find it now (doneBefore).

// takeBack takes back what a call may have made. False: it cannot be told what that is.
func (g *Guard) takeBack(x *flight, waits bool) bool {
	c, ok := x.call()
	if !ok {
		return false
	}
	t, ok := g.flightTarget(x)
	if !ok {
		return false
	}
	if rm.UVMShaped(c.Cmd) {
		return g.takeBackUVM(t, x, c)
	}
	switch nr := c.NR(); nr {
	case rm.EscAlloc, rm.EscDupObject, rm.EscAllocMemory, rm.EscVidHeapControl:
		client, handle, makes := madeBy(c, 0)
		return !makes || g.takeBackObject(t, x, client, handle) && !(nr == rm.EscAlloc && g.makesClient(c))
	case rm.EscControl:
		return g.takeBackControl(t, x, c, waits)
	case rm.EscAllocOSEvent:
		client, number := rm.U32(c.Outer, rm.OSEventClient), rm.U32(c.Outer, rm.OSEventFD)
		if !g.account.hasEvent(client, number, g.files.self) {
			free := rm.Call{Cmd: 3<<30 | rm.OSEventSize<<16 | 'F'<<8 | rm.EscFreeOSEvent, Outer: slices.Clone(c.Outer)}
			_ = g.driver.Exec(t, &free)
		}
		return true
	case rm.EscMapDMA:
		// One whose address the driver has chosen, and nobody was told, ends with its memory.
		form, ok := g.abi.MapDMA(len(c.Outer))
		client, mapper := rm.U32(c.Outer, rm.DMAClient), rm.U32(c.Outer, rm.DMAMapper)
		at := dmaPlace{rm.U32(c.Outer, rm.DMADevice), rm.U64(c.Outer, form.Address)}
		if ok && at.address != 0 && !g.account.isMapped(client, mapper, at) {
			g.unmapDMA(t, client, mapper, at)
		}
		return ok
	}
	return true
}

// flightTarget is the file of a call.
func (g *Guard) flightTarget(x *flight) (Target, bool) {
	t := Target{FD: int(x.fd), TID: int(x.notif.PID), PID: tgidOf(int(x.notif.PID))}
	if g.driver.Native() {
		return t, true
	}
	n, _, err := g.nodes.classify(int(x.fd))
	if err != nil {
		return t, false
	}
	f := g.files.find(int(x.fd), n.kind)
	if f == nil {
		return t, false
	}
	t.File = uint32(f.sim)
	return t, t.File != 0
}

// makesClient: a client that nobody has been told of is found by no one.
func (g *Guard) makesClient(c *rm.Call) bool {
	class, ok := g.abi.Class(rm.U32(c.Outer, rm.AllocClass))
	return !ok || class.Kind == rm.ClassRoot
}

// takeBackObject frees an object that a call may have made. NVIDIA's driver has written its handle where we see it, if it has made one.
func (g *Guard) takeBackObject(t Target, x *flight, client, handle uint32) bool {
	switch {
	case x.known != 0 && handle != 0: // the driver has refused
		return true
	case handle == 0:
		return g.driver.Native()
	}
	if s, e := g.rmFree(t, client, handle); e != 0 || s != rm.StatusOK && s != rm.StatusObjectNotFound {
		return false
	}
	g.account.freeObject(client, handle)
	return true
}

// takeBackControl: nearly all controls can be made again. Exports are announced (announceExport).
func (g *Guard) takeBackControl(t Target, x *flight, c *rm.Call, waits bool) bool {
	ctl, ok := g.abi.Control(rm.U32(c.Outer, rm.ControlCmd))
	if !ok && !g.driver.Native() {
		ctl, ok = simControl(rm.U32(c.Outer, rm.ControlCmd))
	}
	switch {
	case !ok:
		return false
	case ctl.Kind == rm.ControlImportFDs, ctl.Kind == rm.ControlStreamAlloc:
		return false
	case !waits && (ctl.Kind == rm.ControlSchedule || ctl.Kind == rm.ControlSharePolicy): // nobody makes it again
		return false
	}
	client, handle, makes := madeBy(c, ctl.Kind)
	return !makes || g.takeBackObject(t, x, client, handle)
}

// takeBackUVM: ranges and channels are not made a second time, and what is mapped a second time takes page tables as what was there before.
func (g *Guard) takeBackUVM(t Target, x *flight, c *rm.Call) bool {
	form, ok := g.abi.UVM(c.Cmd)
	if !ok {
		return false
	}
	f := g.files.find(int(x.fd), nodeUVM)
	switch c.Cmd {
	case rm.UVMMapExternal, rm.UVMMapSparse:
		g.takeBackMapping(t, f, c, rangeOf(c.Outer, form), form)
	case rm.UVMRegisterGPUVASpace:
		gpu := gpuUUID(c.Outer[rm.UVMGPU:])
		if f == nil || !f.hasSpace(gpu) {
			o := make([]byte, rm.UVMUnregisterSize)
			copy(o[rm.UVMGPU:], gpu[:])
			_ = g.driver.Exec(t, &rm.Call{Cmd: rm.UVMUnregisterVASpace, Outer: o})
		}
	case rm.UVMCreateExternal, rm.UVMMapDynamicRegion, rm.UVMAllocSemaphorePool:
		r := rangeOf(c.Outer, form)
		if f != nil && !f.hasRange(r.base) {
			free, _ := g.abi.UVM(rm.UVMFree)
			o := make([]byte, free.Size)
			rm.PutU64(o, free.Base, r.base)
			if free.Length >= 0 {
				rm.PutU64(o, free.Length, r.length())
			}
			_ = g.driver.Exec(t, &rm.Call{Cmd: rm.UVMFree, Outer: o})
		}
	case rm.UVMRegisterChannel:
		name := channelName{rm.U32(c.Outer, form.Client), rm.U32(c.Outer, form.Object)}
		if f != nil && !f.hasChannel(name) {
			end, _ := g.abi.UVM(rm.UVMUnregisterChannel)
			o := make([]byte, end.Size)
			rm.PutU32(o, end.Client, name.client)
			rm.PutU32(o, end.Object, name.handle)
			_ = g.driver.Exec(t, &rm.Call{Cmd: rm.UVMUnregisterChannel, Outer: o})
		}
	}
	return true
}

// drops reports a UVM call that takes something away, and no more.
func drops(cmd uint32) bool {
	switch cmd {
	case rm.UVMUnmapExternal, rm.UVMFree, rm.UVMUnregisterVASpace, rm.UVMUnregisterGPU, rm.UVMUnregisterChannel, rm.UVMDestroyRangeGroup:
		return true
	}
	return false
}

// settleDrop makes a call that takes something away once more, from the copy that was made then: the task's memory may be another call by
// now. It answers as that call was answered, or would have been. Where the driver refuses it, it was carried out before only if it named
// exactly what the account has.
func (g *Guard) settleDrop(x *flight) (ok bool) {
	c, ok := x.call()
	if !ok {
		return false
	}
	t, ok := g.flightTarget(x)
	form, known := g.abi.UVM(c.Cmd)
	if !ok || !known {
		return false
	}
	e := g.driver.Exec(t, c)
	status := rm.U32(c.Outer, form.Status)
	f := g.files.find(int(x.fd), nodeUVM)
	if f != nil && e == 0 && (status == rm.StatusOK || f.isGone(c, form, status)) {
		status = rm.StatusOK
		g.recordDrop(f, c.Cmd, form, c.Outer)
	}
	at := flightPart{addr: x.outer + uint64(form.Status), at: x.at.at + uint32(form.Status), len: 4}
	rm.PutU32(x.body(), int(at.at), status)
	x.errno, x.partN, x.parts[0] = int32(e), 1, at
	return true
}

// statusInvalidChannel is NV_ERR_INVALID_CHANNEL (nvstatuscodes.h).
const statusInvalidChannel = 0x21

// isGone reports that a call which takes away something that the account has is refused because the driver does not have it.
func (f *file) isGone(c *rm.Call, form rm.UVMForm, status uint32) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch o := c.Outer; c.Cmd {
	case rm.UVMFree:
		base := rm.U64(o, form.Base)
		r := f.ranges[base]
		return status == rm.StatusInvalidAddress && r != nil && (form.Length < 0 || rangeOf(o, form) == r.addresses)
	case rm.UVMUnregisterVASpace, rm.UVMUnregisterGPU:
		return status == rm.StatusInvalidDevice && f.spaces[gpuUUID(o[rm.UVMGPU:])]
	case rm.UVMUnregisterChannel:
		ch, known := f.channels[channelName{rm.U32(o, form.Client), rm.U32(o, form.Object)}]
		return status == statusInvalidChannel && known && f.spaces[ch.gpu]
	case rm.UVMDestroyRangeGroup:
		return status == rm.StatusObjectNotFound && f.groups[rm.U64(o, form.Base)]
	}
	return false
}

// takeBackMapping unmaps what a call may have mapped, and with it what was mapped there before.
func (g *Guard) takeBackMapping(t Target, f *file, c *rm.Call, x addresses, form rm.UVMForm) {
	first, count := uvmSparseGPU, uint64(1)
	if c.Cmd == rm.UVMMapExternal {
		first, count = uvmMapAttributes, min(rm.U64(c.Outer, form.FD-uvmMapCount), uvmMapMaxGPUs)
	}
	unmap, _ := g.abi.UVM(rm.UVMUnmapExternal)
	for i := range int(count) {
		gpu := gpuUUID(c.Outer[first+i*uvmMapAttributesSize:])
		o := make([]byte, unmap.Size)
		rm.PutU64(o, unmap.Base, x.base)
		rm.PutU64(o, unmap.Length, x.length())
		copy(o[uvmUnmapGPU:], gpu[:])
		e := g.driver.Exec(t, &rm.Call{Cmd: rm.UVMUnmapExternal, Outer: o})
		if f != nil && e == 0 && rm.U32(o, unmap.Status) == rm.StatusOK {
			g.recordUnmapping(f, x, gpu)
		}
	}
}

func (f *file) hasSpace(gpu gpuUUID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.spaces[gpu]
}

func (f *file) hasRange(base uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ranges[base] != nil
}

func (f *file) hasChannel(name channelName) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.channels[name]
	return ok
}

func (a *account) isMapped(client, mapper uint32, at dmaPlace) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	return c != nil && c.objects[mapper] != nil && len(c.objects[mapper].dmaMaps[at]) > 0
}

// orDoneBefore is what a call that is made again comes to. A file that has a client's identity is refused a second one by errno; nothing of
// the account hangs on which of the two calls has given it.
func (c *trappedCall) orDoneBefore(status uint32, e syscall.Errno) (uint32, syscall.Errno) {
	isRM := !rm.UVMShaped(c.call.Cmd)
	switch {
	case isRM && c.call.NR() == rm.EscRegisterFD && e == syscall.EINVAL:
		return rm.StatusOK, 0
	case e == 0 && c.doneBefore(status):
		c.status(rm.StatusOK)
		return rm.StatusOK, 0
	}
	return status, e
}

// doneBefore reports that RM_FREE, made again, is refused because what it frees is not there: of no other call does the refusal say so.
func (c *trappedCall) doneBefore(status uint32) bool {
	if rm.UVMShaped(c.call.Cmd) || c.call.NR() != rm.EscFree {
		return false
	}
	return status == rm.StatusObjectNotFound || status == rm.StatusInvalidClient && c.guard.clientWasFreed(c)
}

// clientWasFreed reports that a call which frees a client has done so before. The driver says the same of a client on another file.
func (g *Guard) clientWasFreed(c *trappedCall) bool {
	of := c.locked[0]
	if rm.U32(c.call.Outer, rm.FreeObject) != of.handle {
		return false
	}
	t, ok := g.fileOf(of)
	if !ok {
		return false
	}
	defer t.Done()
	return !g.clientLives(t, of.handle)
}
