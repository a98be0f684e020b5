// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"maps"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

func (c *controlCall) setTimeslice() uint32 {
	g := c.object.group
	g.timesliceUs = rm.U64(c.p, 0) // every value is accepted, 0 too (measured)
	if g.tsg != nil {
		g.tsg.SetTimeslice(time.Duration(min(g.timesliceUs, uint64(runlist.MaxTimeslice/time.Microsecond))) * time.Microsecond)
	}
	return rm.StatusOK
}

func (c *controlCall) getTimeslice() uint32 {
	rm.PutU64(c.p, 0, c.object.group.timesliceUs)
	return rm.StatusOK
}

func (c *controlCall) preempt() uint32 {
	c.object.group.preempts++
	if t := c.object.group.tsg; t != nil {
		t.Preempt()
	}
	return rm.StatusOK
}

// makeContext is what the first object of the graphics engine does to a group: a context in which kernels run to their end. That of one by
// which it draws stays so, and one that has been made to preempt gets none of those (measured on an H200 with 580.159.04).
func makeContext(g *group, class uint32) {
	if g.tsg == nil {
		return
	}
	if !g.objects {
		g.objects = true
		g.tsg.SetPreemptible(false)
	}
	g.draws = g.draws || isGraphics(class)
}

// endContext is what the end of an object of the graphics engine does to a group: with the last one its context goes, and the mode. (What
// the driver's firmware does nobody knows; this is the worse.)
func endContext(g *group) {
	for handle := range g.handles {
		for _, channel := range handle.children {
			for _, o := range channel.children {
				if isCompute(o.class) || isGraphics(o.class) {
					return
				}
			}
		}
	}
	g.objects, g.cilp = false, false
}

// setPreemption is GR_SET_CTXSW_PREEMPTION_MODE, of a group or a channel of the calling client.
func (c *controlCall) setPreemption() uint32 {
	o := c.client.objects[rm.U32(c.p, rm.PreemptChannel)]
	if o != nil && o.channel != nil {
		o = o.channel.group
	}
	if o == nil || o.group == nil || !o.group.objects {
		return rm.StatusNotSupported
	}
	cilp := rm.U32(c.p, rm.PreemptCILP) == rm.PreemptModeCILP
	if rm.U32(c.p, rm.PreemptFlags)&1 != 0 && cilp && o.group.draws {
		return rm.StatusInvalidRequest
	}
	if rm.U32(c.p, rm.PreemptFlags)&2 != 0 && rm.U32(c.p, rm.PreemptGFXP) == rm.PreemptModeGFXP && o.group.gfxp == nil {
		sum, _ := rm.GFXPMemory(bufferSize)
		if !o.gpu.reserveHidden(quota.Bytes(sum)) {
			return rm.StatusNoMemory
		}
		o.group.gfxp = &memory{gpu: o.gpu, size: quota.Bytes(sum), refs: 1, hidden: true}
	}
	if rm.U32(c.p, rm.PreemptFlags)&1 != 0 {
		o.group.cilp = cilp
		o.group.tsg.SetPreemptible(cilp)
	}
	return rm.StatusOK
}

// contextBuffer is FIFO_GET_ENGINE_CONTEXT_PROPERTIES.
func (c *controlCall) contextBuffer() uint32 {
	size, ok := bufferSize(rm.U32(c.p, rm.ContextBufferEngine))
	if !ok {
		return rm.StatusNotSupported
	}
	rm.PutU32(c.p, rm.ContextBufferBytes, uint32(size))
	return rm.StatusOK
}

// bufferSize is the size of a context buffer. Those of a context come to less than DefaultContextCost.
func bufferSize(buffer uint32) (uint64, bool) {
	size, ok := map[uint32]uint64{0x0: 3 << 20, 0x9: 300 << 10, 0x10: 200 << 10, 0xb: 9 << 20, 0xc: 1 << 20, 0xd: 40 << 10, 0xe: 2 << 20,
		0xf: 1 << 20, 0x19: 4 << 10}[buffer]
	return size, ok
}

// schedule is GPFIFO_SCHEDULE; it enables the channels and undoes a pause.
func (c *controlCall) schedule() uint32 {
	enable := c.p[0] != 0
	set := func(o *object) {
		if o.channel != nil {
			o.channel.enabled = enable
			if enable {
				o.channel.disabled = false
			}
		}
	}
	if group := c.object; group.group != nil {
		for o := range group.group.below {
			set(o)
		}
		repause(group)
		return rm.StatusOK
	}
	set(c.object)
	if group := c.object.channel.group; group != nil {
		repause(group)
	}
	return rm.StatusOK
}

func (c *controlCall) submitToken() uint32 {
	if len(c.object.children) == 0 && !c.object.channel.enabled {
		return rm.StatusInvalidState // kchannelIsRunlistSet: neither an engine's object nor a schedule has given it one
	}
	if n := c.object.channel.notifier; n != nil && n.refs == 0 { // kchannelNotifyWorkSubmitToken writes there
		c.d.stray++
	}
	rm.PutU32(c.p, 0, c.object.handle)
	return rm.StatusOK
}

// NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS.
const (
	disableFlag     = 0 // u8
	disableCount    = 4
	disableRewind   = 9  // u8: of channels that are stopped, what is queued is dropped
	disableEvent    = 16 // pointer, kernel callers only
	disableClients  = 24
	disableChannels = 280
	disableMax      = 64
)

// statusInvalidChannel is NV_ERR_INVALID_CHANNEL, what 580.159.04 says to a list with a handle that is none.
const statusInvalidChannel = 0x21

// disableChannels stops or restarts channels of any client: the driver does not ask whose they are. If one of them does
// not exist the call fails as a whole.
func (c *controlCall) disableChannels() uint32 {
	n := rm.U32(c.p, disableCount)
	if n > disableMax || rm.U64(c.p, disableEvent) != 0 {
		return rm.StatusInvalidArgument
	}
	var list []*channel
	for i := range int(n) {
		cl := c.d.clients[rm.U32(c.p, disableClients+4*i)]
		if cl == nil {
			return statusInvalidChannel
		}
		o := cl.objects[rm.U32(c.p, disableChannels+4*i)]
		if o == nil || o.channel == nil {
			return statusInvalidChannel
		}
		list = append(list, o.channel)
	}
	for _, ch := range list {
		ch.disabled = c.p[disableFlag] != 0
		if ch.group == nil {
			continue
		}
		if t := ch.group.group.tsg; t != nil && ch.disabled && c.p[disableRewind] != 0 {
			t.Stop()
		}
		repause(ch.group)
	}
	return rm.StatusOK
}

// groupChannels tells the numbers of a group's channels, or that of a channel, whoever's they are.
func (c *controlCall) groupChannels() uint32 {
	var o *object
	if cl := c.d.clients[rm.U32(c.p, rm.GroupChannelsClient)]; cl != nil {
		o = cl.objects[rm.U32(c.p, rm.GroupChannelsObject)]
	}
	if o == nil || o.group == nil && o.channel == nil {
		return rm.StatusObjectNotFound
	}
	n := 0
	for _, x := range append(slices.Collect(maps.Values(o.children)), o) {
		if x.channel != nil && n < rm.GroupChannelsMax {
			rm.PutU32(c.p, rm.GroupChannelsIDs+4*n, x.channel.id)
			n++
		}
	}
	rm.PutU32(c.p, rm.GroupChannelsCount, uint32(n))
	return rm.StatusOK
}
