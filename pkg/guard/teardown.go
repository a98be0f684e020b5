// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"maps"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/proc"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// How what the container had on a GPU ends. What is unmapped or freed below a channel that runs is an MMU fault: the engine is reset, and
// every neighbour waits for 150 to 180 ms (Xid 31, H200). So channels end first, then mappings, then memory.

// stopChannels takes the channels of some clients off the GPUs for good, before the guard ends those clients or their processes: on return
// none is on the hardware, and what was queued is dropped, so that neither UVM nor anybody else who lets them run again has work run.
func (g *Guard) stopChannels(which func(*client) bool) {
	g.gpuTime.Lock()
	defer g.gpuTime.Unlock()
	if !g.account.markEnding(which) {
		return
	}
	for gpu := range g.cfg.GPUs {
		g.gpuTime.Stop(gpu, g.account.endingChannels(gpu))
	}
}

// markEnding notes that some clients end, so that none of their channels is let run again. False: there are none.
func (a *account) markEnding(which func(*client) bool) (some bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.clients {
		if which(c) {
			c.ending, some = true, true
			a.books.note(c)
		}
	}
	return some
}

func (a *account) isEnding(client uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	return c != nil && c.ending
}

// haveEnding reports that one of some channels is of a client that ends: to let its group run would let that run.
func (a *account) haveEnding(channels []gpusched.Channel) bool {
	return slices.ContainsFunc(channels, func(ch gpusched.Channel) bool { return a.isEnding(ch.Client) })
}

// endingChannels lists the channels of clients that end.
func (a *account) endingChannels(gpu int) []gpusched.Channel {
	goOn := a.notEnding()
	return slices.DeleteFunc(a.channelsOn(gpu, true), func(ch gpusched.Channel) bool { return goOn[ch.Client] })
}

// notEnding lists the clients that do not end.
func (a *account) notEnding() map[uint32]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := map[uint32]bool{}
	for handle, c := range a.clients {
		list[handle] = !c.ending
	}
	return list
}

// mayRun leaves out the channels that UVM has ended (unbind), and those of clients that end.
func (a *account) mayRun(channels []gpusched.Channel) []gpusched.Channel {
	goOn := a.notEnding()
	return slices.DeleteFunc(a.leaveOutUnbound(channels), func(ch gpusched.Channel) bool { return !goOn[ch.Client] })
}

// endUVM tears an address space down that no process has any more: the guard's own descriptor is the last one, unless one
// is in flight in a socket, so its mappings are freed before it is let go.
//
// Its channels may still run: the process can have closed it and go on, or its RM client be in other hands. UVM_UNREGISTER_GPU_VASPACE
// stops a GPU's channels and then frees all that is mapped there (uvm_va_space_unregister_gpu_va_space), as the release of the file does;
// UVM_UNMAP_EXTERNAL stops nothing. Of processes that are over the channels are off before: UVM would wait for what they have queued. It
// returns the CPU time that UVM took.
func (g *Guard) endUVM(f *file) (inUVM time.Duration) {
	g.teardownMu.Lock()
	defer g.teardownMu.Unlock()
	over := map[int]bool{}
	for _, tgid := range f.ownerPIDs() {
		over[tgid] = proc.Exiting(tgid)
	}
	g.stopChannels(func(c *client) bool { return over[c.tgid] })
	f.uvm.Lock()
	defer f.uvm.Unlock()
	f.ended = true
	f.mu.Lock()
	mapped, spaces := f.maps, slices.Collect(maps.Keys(f.spaces))
	f.maps = map[gpuUUID][]*uvmMap{}
	f.mu.Unlock()
	ended := map[gpuUUID]bool{}
	end := func(gpu gpuUUID) bool {
		ended[gpu] = g.endVASpace(f, gpu)
		return ended[gpu]
	}
	for _, gpu := range spaces {
		inUVM += timeIfDone(func() bool { return end(gpu) })
		g.dropUVMGPU(f, gpu)
	}
	for gpu, list := range mapped {
		if _, tried := ended[gpu]; !tried {
			inUVM += timeIfDone(func() bool { return end(gpu) })
		}
		for _, m := range list {
			if !ended[gpu] {
				inUVM += timeIfDone(func() bool { return g.unmapExternal(f, m) })
			}
			g.dropMapping(m)
		}
	}
	inUVM += timeIfDone(func() bool { return g.endRanges(f) })
	if f.zombies.Load() {
		g.forgetGPUs(f)
	}
	if f.sim != 0 {
		g.driver.CloseFile(uint32(f.sim))
	}
	g.files.remove(f)
	return inUVM
}

// target is a file that the guard holds.
func (f *file) target() Target { return Target{FD: f.strong} }

// endVASpace stops the channels of an address space on a GPU and frees what is mapped there.
func (g *Guard) endVASpace(f *file, gpu gpuUUID) bool {
	g.unbind(f, func(_ channelName, ch uvmChannel) bool { return ch.gpu == gpu })
	outer := make([]byte, rm.UVMUnregisterSize)
	copy(outer[rm.UVMGPU:], gpu[:])
	e := g.driver.Exec(f.target(), &rm.Call{Cmd: rm.UVMUnregisterVASpace, Outer: outer})
	return e == 0 && rm.U32(outer, rm.UVMUnregisterStatus) == rm.StatusOK
}

// unmapExternal frees one mapping where the address space as a whole could not be ended: the program has unregistered it before, and
// then has no channels there, or the driver refuses.
func (g *Guard) unmapExternal(f *file, m *uvmMap) bool {
	// It fails for what is gone already: the range was destroyed, or the GPU unregistered.
	form, _ := g.abi.UVM(rm.UVMUnmapExternal)
	outer := make([]byte, form.Size)
	rm.PutU64(outer, form.Base, m.base)
	rm.PutU64(outer, form.Length, m.length())
	copy(outer[uvmUnmapGPU:], m.gpu[:])
	e := g.driver.Exec(f.target(), &rm.Call{Cmd: rm.UVMUnmapExternal, Outer: outer})
	status := rm.U32(outer, form.Status)
	done := e == 0 && status == rm.StatusOK
	if !done {
		g.logOnce("enduvm", "cannot unmap memory of a process that is gone", "errno", e, "status", rm.StatusName(status))
	}
	return done
}
