// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The driver has 2048 channel ids for each runlist of a GPU (an engine's queue), for everybody. Half of them is divided among the
// containers that a GPU may have: so many each can make whatever others do, which is six CUDA contexts with 20 containers (eight channels
// each on the graphics engine). Beyond that it takes what the other half has left. The guards tell each other how many they have.
const commonChannels = 1024

// runlist is an engine of one of the container's GPUs.
type runlist struct {
	gpu    int
	engine uint32
}

// roomForChannel reports that the GPU has a channel id for the container.
func (g *Guard) roomForChannel(r runlist) bool {
	n := g.account.channelsIn(r) + 1
	if n <= commonChannels/max(1, g.cfg.Settings.MaxInst) {
		return true
	}
	others, ok := g.gpuTime.OtherChannels(r.gpu)
	return !ok || n+others <= commonChannels // where nobody knows, max_channels has to do
}

// runlistOf is where a channel goes: to the engine of its group, or to its own. Channels of a GPU that is not known count nowhere.
func (a *account) runlistOf(client, parent, engine uint32) runlist {
	r := runlist{a.gpuOf(client, parent), engine}
	if group, ok := a.lookup(client, parent); ok && group.kind == rm.ClassTSG {
		if group.engine != 0 || engine == 0 {
			r.engine = group.engine
		}
	}
	r.engine = max(r.engine, engineGR) // 0 on cards before Ampere
	return r
}

func (a *account) channelsIn(r runlist) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runlists[r]
}

// countChannel counts a channel, or one less. The account is locked.
func (a *account) countChannel(r runlist, n int) {
	if r.gpu == noGPU {
		return
	}
	if a.runlists[r] += n; a.runlists[r] <= 0 {
		delete(a.runlists, r)
	}
	a.reportChannels(r.gpu)
}

// reportChannels passes on how many channels there are on a GPU. The account is locked.
func (a *account) reportChannels(gpu int) {
	if a.onChannels == nil {
		return
	}
	most := 0
	for x, n := range a.runlists {
		if x.gpu == gpu {
			most = max(most, n)
		}
	}
	a.onChannels(gpu, most)
}

const (
	engineGR = 1 // NV2080_ENGINE_TYPE_GRAPHICS
	// engineGRLast is NV2080_ENGINE_TYPE_GR7. 0, no engine, leaves it to the channels, which drivers of cards before Ampere
	// allow (kchangrpapiConstruct_IMPL).
	engineGRLast = 8
)

// checkTSG: a channel group. One on the graphics engine gets a context, which takes device memory.
func (g *Guard) checkTSG(c *trappedCall) plan {
	o := c.newObject()
	o.notifiers = notifiersIn(c.params, rm.TSGNotifiers)
	o.group = &channelGroup{graphics: o.engine <= engineGRLast}
	if !o.group.graphics {
		return g.planObject(c, o)
	}
	if g.isMember() && o.engine != 0 { // what is on no engine yet may be for copies (before Ampere)
		return g.denyOwnContext(c)
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
	commit := p.commit
	p.commit = func() {
		commit()
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
	page := rm.U32(p, rm.ChannelUserdMemory)
	if page != 0 && c.isUncounted(c.target(), c.allocClient(), page) { // the guard takes handles on it (openUserPage)
		return answer(c.denyUnseen())
	}
	if m, known := g.account.lookup(c.allocClient(), page); known && !m.isMemory() {
		return answer(c.deny(rm.StatusInvalidObjectHandle, "userdmemory", "denied a channel whose USERD is no memory",
			"class", rm.ClassName(m.class)))
	}
	if g.account.onOtherGPU(c.allocClient(), page, g.account.gpuOf(c.allocClient(), o.parent)) {
		return answer(c.denyOtherGPU())
	}
	if refusal, ok := g.checkNotifiers(c, &o); !ok {
		return answer(refusal)
	}
	o.runlist = g.account.runlistOf(c.allocClient(), o.parent, o.engine)
	if o.runlist.gpu != noGPU && !g.roomForChannel(o.runlist) {
		return answer(c.deny(rm.StatusInsufficientResources, "channels", "denied a channel: the GPU has no more ids than others may need",
			"max", commonChannels))
	}
	o.contextShare = rm.U32(p, rm.ChannelContextShare)
	if !g.account.mayHaveChannel(c.allocClient(), o.parent, o.contextShare) {
		return answer(c.deny(rm.StatusNotSupported, "legacychannel",
			"denied a channel without a context share of its own in a group that several clients have"))
	}
	if len(p) > rm.ChannelUserdOffset+8 {
		o.userd = userd{page, rm.U64(p, rm.ChannelUserdOffset)}
		memory, ok := c.acquireObject(c.allocClient(), page)
		if !ok {
			return answer(c.status(rm.StatusInvalidClient))
		}
		o.charge = memory.charge // the channel keeps it, whatever becomes of its handle
	}
	made := g.planObject(c, o)
	commit := made.commit
	made.commit = func() {
		commit()
		g.noteChannelID(c.allocClient(), rm.U32(c.call.Outer, rm.AllocObject))
	}
	return made
}

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
		return answer(c.deny(rm.StatusNotSupported, "loneobject",
			"denied an object of the graphics engine on a channel that is in no channel group"))
	}
	if g.isMember() && !g.account.isLent(client, owner) {
		return g.denyOwnContext(c)
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
	commit := p.commit
	p.commit = func() {
		commit()
		if context.gpu != noGPU && !g.account.chargeContext(client, owner, context.gpu, context.size) {
			g.account.unreserve(context)
		}
		if g.account.markGraphics(client, owner) {
			g.gpuTime.Made(g.account.gpuOf(client, owner))
		}
	}
	return g.planPreemption(c, client, owner, p)
}
