// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// What a UVM address space takes of RM clients beside memory: RM's address spaces (UVM_REGISTER_GPU_VASPACE) and channels
// (UVM_REGISTER_CHANNEL). UVM ignores the control file that should vouch for the client: it takes whatever address space RM lets it dup,
// which is what the owner has opened to whoever asks (nvGpuOpsDupAddressSpace), and of a channel it asks only whether it is in such an
// address space (nvGpuOpsVerifyChannel). So the guard looks whose they are. Of a handle that is not the container's the answer is the same
// whether there is one or not.
//
// In a UVM address space of more than one process (UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE) UVM takes the caller's memory for the
// process', which is the guard's here. It needs it for nothing: such an address space has no HMM, and one that uses ATS (Grace) is
// refused (create_gpu_va_space, uvm_va_space_pageable_mem_access_enabled). Of any other it takes the memory of the process that made it.
//
// A registered channel keeps its number on the runlist and its group's context when both are freed, until it is unregistered
// (nvGpuOpsRetainChannel).

// channelName is how UVM knows a channel: by handles, also when they are another object's by now.
type channelName struct{ client, handle uint32 }

// uvmChannel is a registered channel.
type uvmChannel struct {
	gpu  gpuUUID
	kept *retained
}

// retained is what UVM keeps of a channel.
type retained struct {
	entry
	calls    int     // that registered it
	context  *charge // of its group; nil: it has none
	channel  *object // nil: freed
	runlist  runlist // of a freed one
	countsOn int     // of a freed one: the GPU that it counts on
}

// retainChannel takes note that UVM is to keep a channel. Nil: there is no such channel.
func (a *account) retainChannel(name channelName) *retained {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[name.client]
	if c == nil || c.channels[name.handle] == nil {
		return nil
	}
	o := c.channels[name.handle]
	if o.retained == nil {
		o.retained = &retained{channel: o}
	}
	r := o.retained
	r.calls++
	a.books.note(o)
	a.books.note(r)
	if group := c.objects[o.parent]; r.context == nil && group != nil && group.kind == rm.ClassTSG && group.charge != nil {
		r.context = group.charge
		a.countReference(r.context, &r.context.references, 1)
	}
	return r
}

// dupedWith lists what UVM dups of a channel, and must be let dup.
func (a *account) dupedWith(name channelName) (rights []openRight) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[name.client]
	if c == nil || c.channels[name.handle] == nil {
		return nil
	}
	o := c.channels[name.handle]
	for _, h := range []uint32{o.parent, o.contextShare} {
		if x := c.objects[h]; x != nil && (x.kind == rm.ClassTSG || h == o.contextShare) {
			rights = append(rights, openRight{h, accessDup})
		}
	}
	return rights
}

// releaseChannel undoes retainChannel.
func (a *account) releaseChannel(r *retained) {
	a.mu.Lock()
	r.calls--
	last := r.calls == 0
	if last {
		a.books.end(r)
	} else {
		a.books.note(r)
	}
	if last && r.channel == nil {
		a.countKept(r.countsOn, -1)
		a.countChannel(r.runlist, -1)
	} else if last {
		r.channel.retained = nil
		a.books.note(r.channel)
	}
	a.mu.Unlock()
	if last {
		a.dropReference(r.context)
	}
}

// checkRegisterSpace: an RM address space of the container's becomes that of a GPU in UVM's.
func (g *Guard) checkRegisterSpace(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	if obj, ok := g.account.lookup(rm.U32(o, form.Client), rm.U32(o, form.Object)); !ok || obj.kind != rm.ClassVASpace {
		return answer(c.deny(rm.StatusInvalidObjectHandle, "uvmspace", "denied UVM an address space that the container has not made"))
	}
	f, p := c.planUVMCall(nil, 0)
	if f == nil {
		return p
	}
	if c.isUnseen(p.opened.target, rm.U32(o, form.Client), rm.U32(o, form.Object)) {
		p.ask, p.answer = false, c.denyUnseen()
		return p
	}
	p.commit = func() {
		f.mu.Lock()
		f.spaces[gpuUUID(o[rm.UVMGPU:])] = true
		g.books.note(f)
		f.mu.Unlock()
	}
	return p
}

// checkRegisterChannel: a channel of the container's is to run in an address space of UVM's. UVM dups its group, and its context share if
// it has one (nvGpuOpsGetChannelTsgInfo, nvGpuOpsGetChannelSubctxInfo).
func (g *Guard) checkRegisterChannel(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	name := channelName{rm.U32(o, form.Client), rm.U32(o, form.Object)}
	f, p := c.planUVMCall(nil, 0)
	if f == nil {
		return p
	}
	if c.isUnseen(p.opened.target, name.client, name.handle) {
		p.ask, p.answer = false, c.denyUnseen()
		return p
	}
	kept := g.account.retainChannel(name)
	p.opened.rights = g.account.dupedWith(name)
	if kept == nil {
		p.ask, p.answer = false, c.deny(rm.StatusInvalidObjectHandle, "uvmchannel", "denied UVM a channel that the container has not made")
		return p
	}
	p.cancel = func() { g.account.releaseChannel(kept) }
	p.commit = func() {
		g.dropUVMChannel(f, name) // UVM has let go of one with this name unseen, or it would have refused
		f.mu.Lock()
		f.channels[name] = uvmChannel{gpuUUID(o[rm.UVMGPU:]), kept}
		g.books.note(f)
		f.mu.Unlock()
		g.account.setUnbound([]*retained{kept}, false)
	}
	return p
}

// unbind is called before UVM ends channels of an address space. It takes their contexts off them (nvGpuOpsStopChannel clears
// bIsContextBound), which FIFO_DISABLE_CHANNELS does not look at, and then frees what they use: who lets such a channel run at the end of a
// pause makes a fault. So nobody does from now on, the rescuer neither.
func (g *Guard) unbind(f *file, which func(channelName, uvmChannel) bool) (list []*retained) {
	g.gpuTime.Lock() // who lets channels run now has done so before UVM stops them
	defer g.gpuTime.Unlock()
	f.mu.Lock()
	for name, ch := range f.channels {
		if which(name, ch) {
			list = append(list, ch.kept)
		}
	}
	f.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	g.account.setUnbound(list, true)
	g.gpuTime.Forget()
	return list
}

// rebind undoes unbind where UVM has not ended the channels, because the call was not made, or is refused before UVM stops anything. What a
// pause that ended meanwhile has left off runs, and what is off is resumed with the others.
func (g *Guard) rebind(list []*retained) {
	if len(list) == 0 {
		return
	}
	g.gpuTime.Lock()
	defer g.gpuTime.Unlock()
	again := g.account.setUnbound(list, false)
	for gpu := range g.cfg.GPUs {
		channels := slices.DeleteFunc(g.account.channelsOn(gpu, true), func(ch gpusched.Channel) bool { return !again[objectOf(ch)] })
		g.gpuTime.LetRun(gpu, channels)
	}
}

// setUnbound notes whether UVM ends channels, and returns those that are not freed.
func (a *account) setUnbound(list []*retained, unbound bool) map[*object]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	channels := map[*object]bool{}
	for _, r := range list {
		if r.channel != nil {
			r.channel.unbound = unbound
			a.books.note(r.channel)
			channels[r.channel] = true
		}
	}
	return channels
}

// leaveOutUnbound leaves out channels that UVM ends, or has ended.
func (a *account) leaveOutUnbound(channels []gpusched.Channel) (list []gpusched.Channel) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, ch := range channels {
		if !objectOf(ch).unbound {
			list = append(list, ch)
		}
	}
	return list
}

// dropUVMChannel drops a registered channel.
func (g *Guard) dropUVMChannel(f *file, name channelName) {
	f.mu.Lock()
	ch, ok := f.channels[name]
	delete(f.channels, name)
	g.books.note(f)
	f.mu.Unlock()
	if ok {
		g.account.releaseChannel(ch.kept)
	}
}

// dropUVMGPU drops all that an address space had on a GPU: UVM has stopped its channels there and freed what was mapped.
func (g *Guard) dropUVMGPU(f *file, gpu gpuUUID) {
	g.recordUnmapping(f, everywhere, gpu)
	g.dropRegionTables(f, gpu)
	f.mu.Lock()
	var channels []channelName
	for name, ch := range f.channels {
		if ch.gpu == gpu {
			channels = append(channels, name)
		}
	}
	f.mu.Unlock()
	for _, name := range channels {
		g.dropUVMChannel(f, name)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.spaces, gpu) // last: who ends the address space finds all the rest by it (endUVM)
	g.books.note(f)
}
