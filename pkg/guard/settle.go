// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// What came of a call that a guard had under way when it was killed (rise.go). The driver may have carried it out; nothing is read of the
// task's memory to find out, which may hold another call by now, but the copy that the driver was given. Few calls are settled, those that
// programs make all the time: memory that is allocated, mapped, unmapped and freed, and questions. Whoever makes another one is ended.

// outcome is what is known of a call.
type outcome uint8

const (
	unknown  outcome = iota // nobody can tell
	undone                  // nothing has come of it, so it is served from its beginning
	answered                // it has come to what its flight says
)

// settle finds out about a call, or sees to it that it has come to nothing.
func (g *Guard) settle(x *flight) outcome {
	c, ok := x.call()
	if !ok {
		return unknown
	}
	t := Target{FD: int(x.fd), TID: int(x.notif.PID), PID: tgidOf(int(x.notif.PID))}
	if rm.UVMShaped(c.Cmd) {
		return g.settleUVM(t, x, c)
	}
	switch c.NR() {
	case rm.EscCardInfo, rm.EscStatusCode, rm.EscCheckVersion, rm.EscAttachGPUs:
		return undone
	case rm.EscControl:
		ctl, _ := g.abi.Control(rm.U32(c.Outer, rm.ControlCmd))
		if slices.Contains(repeatable, ctl.Kind) && ctl.Name != "" {
			return undone
		}
	case rm.EscFree:
		return g.settleFree(t, x, c)
	case rm.EscAlloc, rm.EscDupObject, rm.EscVidHeapControl:
		return g.undoMade(t, x, c)
	}
	return unknown
}

// repeatable are the kinds of controls that change nothing, or nothing twice, and nothing that the guard keeps.
var repeatable = []rm.ControlKind{rm.ControlFlat, rm.ControlGPUQuery, rm.ControlAttach, rm.ControlThermal, rm.ControlBoost,
	rm.ControlCacheFlush, rm.ControlPidInfo, rm.ControlPeerMemory}

// madeBy is the object that a call makes. Handle 0: the driver chooses one.
func madeBy(call *rm.Call) (client, handle uint32, ok bool) {
	o := call.Outer
	if rm.UVMShaped(call.Cmd) {
		return 0, 0, false
	}
	switch call.NR() {
	case rm.EscAlloc:
		return rm.U32(o, rm.AllocRoot), rm.U32(o, rm.AllocObject), true
	case rm.EscDupObject:
		return rm.U32(o, rm.DupClient), rm.U32(o, rm.DupObject), true
	case rm.EscVidHeapControl:
		switch rm.U32(o, rm.HeapFunction) {
		case rm.HeapFnAllocSize, rm.HeapFnAllocSizeRange, rm.HeapFnAllocTiled:
			return rm.U32(o, rm.HeapRoot), rm.U32(o, rm.HeapAllocMemory), true
		}
	}
	return 0, 0, false
}

// undoMade frees the object that a call may have made under a name that was free before.
func (g *Guard) undoMade(t Target, x *flight, c *rm.Call) outcome {
	client, _, ok := madeBy(c)
	if !ok || client == 0 || x.made == 0 || x.made == client || g.account.isWritten(client, x.made) {
		return unknown
	}
	if s, e := g.rmFree(t, client, x.made); e != 0 || s != rm.StatusOK && s != rm.StatusObjectNotFound {
		return unknown
	}
	if _, known := g.account.lookup(client, x.made); known { // another thread may have made something with it already
		g.objectFreed(t, client, x.made)
	}
	return undone
}

// isWritten reports that a channel which lives on writes errors to an object, or to what ends with it. The guard that was killed may not
// have kept that (keepNotifiersOver).
func (a *account) isWritten(client, handle uint32) bool {
	list := a.notifiersBelow(client, handle)
	for _, n := range list {
		a.releaseObject(n.memory)
	}
	return len(list) > 0
}

// settleFree makes the call once more. What is not there has been freed.
func (g *Guard) settleFree(t Target, x *flight, c *rm.Call) outcome {
	client, handle := rm.U32(c.Outer, rm.FreeRoot), rm.U32(c.Outer, rm.FreeObject)
	if handle == client || g.account.isWritten(client, handle) { // that a client is not there the driver says of any other file, too
		return unknown
	}
	off, ok := g.abi.StatusOff(c.NR(), c.Size())
	if e := g.driver.Exec(t, c); !ok || e != 0 {
		return unknown
	}
	switch rm.U32(c.Outer, off) {
	case rm.StatusOK, rm.StatusObjectNotFound:
		g.objectFreed(t, client, handle)
		x.answer(off, rm.StatusOK)
		return answered
	}
	return unknown
}

// settleUVM: what was taken away is taken away once more, what was made is undone, if nothing was in its place.
func (g *Guard) settleUVM(t Target, x *flight, c *rm.Call) outcome {
	form, ok := g.abi.UVM(c.Cmd)
	f := g.files.find(t.FD, nodeUVM)
	if !ok || f == nil {
		return unknown
	}
	switch c.Cmd {
	case rm.UVMUnmapExternal, rm.UVMFree:
		e := g.driver.Exec(t, c)
		if status := rm.U32(c.Outer, form.Status); e != 0 || status != rm.StatusOK && !f.wasFreed(c, form, status) {
			return unknown
		}
		g.recordDrop(f, c.Cmd, form, c.Outer)
		x.answer(form.Status, rm.StatusOK)
		return answered
	case rm.UVMCreateExternal, rm.UVMMapDynamicRegion, rm.UVMAllocSemaphorePool: // of which other processes may have the file, too
		return g.undoRange(t, f, rangeOf(c.Outer, form))
	case rm.UVMMapExternal:
		return g.undoMapping(t, f, c, form)
	}
	return unknown
}

// wasFreed reports that UVM refuses to free a range because it is not there: it is known, just as the call names it. Otherwise UVM may have
// refused for something else, and still have it.
func (f *file) wasFreed(c *rm.Call, form rm.UVMForm, status uint32) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.ranges[rm.U64(c.Outer, form.Base)]
	return c.Cmd == rm.UVMFree && status == rm.StatusInvalidAddress && r != nil && (form.Length < 0 || rangeOf(c.Outer, form) == r.addresses)
}

func (g *Guard) undoRange(t Target, f *file, r addresses) outcome {
	f.mu.Lock()
	known := f.ranges[r.base] != nil
	f.mu.Unlock()
	if known {
		return unknown
	}
	form, _ := g.abi.UVM(rm.UVMFree)
	o := make([]byte, form.Size)
	rm.PutU64(o, form.Base, r.base)
	if form.Length >= 0 {
		rm.PutU64(o, form.Length, r.length())
	}
	if e := g.driver.Exec(t, &rm.Call{Cmd: rm.UVMFree, Outer: o}); e != 0 {
		return unknown
	}
	switch rm.U32(o, form.Status) {
	case rm.StatusOK, rm.StatusInvalidAddress: // or there is none
		return undone
	}
	return unknown
}

func (g *Guard) undoMapping(t Target, f *file, c *rm.Call, form rm.UVMForm) outcome {
	x := rangeOf(c.Outer, form)
	unmap, _ := g.abi.UVM(rm.UVMUnmapExternal)
	for i := range int(min(rm.U64(c.Outer, form.FD-uvmMapCount), uvmMapMaxGPUs)) {
		gpu := gpuUUID(c.Outer[uvmMapAttributes+i*uvmMapAttributesSize:])
		if f.isMapped(x, gpu) { // UVM has put the mapping in the place of that, or has refused
			return unknown
		}
		o := make([]byte, unmap.Size)
		rm.PutU64(o, unmap.Base, x.base)
		rm.PutU64(o, unmap.Length, x.length())
		copy(o[uvmUnmapGPU:], gpu[:])
		if e := g.driver.Exec(t, &rm.Call{Cmd: rm.UVMUnmapExternal, Outer: o}); e != 0 {
			return unknown
		}
	}
	return undone
}

// isMapped reports that something is mapped in a range.
func (f *file) isMapped(x addresses, gpu gpuUUID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.maps[gpu], func(m *uvmMap) bool { return m.base < x.end && x.base < m.end })
}

// answer has a call that is settled answered with a status.
func (x *flight) answer(off int, status uint32) {
	at := flightPart{addr: x.outer + uint64(off), at: x.at.at + uint32(off), len: 4}
	rm.PutU32(x.body(), int(at.at), status)
	x.errno, x.resume, x.partN, x.parts[0] = 0, 0, 1, at
}
