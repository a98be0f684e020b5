package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// maxResets is how often the driver resets one channel. libcuda asks once (measured: trap, breakpoint, stack overflow on 580.159.04);
// each reset takes 4 ms under the driver's locks, and resets the engine that neighbours run on as well.
const maxResets = 2

// onReset carries out RESET_CHANNEL, by which libcuda ends a channel whose kernel has stopped at a hardware exception: while its debugger
// object takes exceptions, the driver leaves that to it (ctrl83dedebug.h, NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK), and a program
// whose channel is not reset waits for ever. The driver does not check the engine that the call names
// (kernel_channel.c, kchannelCtrlCmdResetChannel_IMPL), and its firmware resets it; so it must be the channel's own.
func (g *Guard) onReset(l *listener, c *trappedCall, client uint32, params []byte) reply {
	handle := rm.U32(c.call.Outer, rm.ControlObject)
	engine, ok := g.account.engineOf(client, handle)
	if !ok {
		return c.status(rm.StatusInvalidObject)
	}
	if engine == 0 || rm.U32(params, rm.ResetEngine) != engine || rm.U32(params, rm.ResetSubdevice) != 0 ||
		rm.U32(params, rm.ResetReason) > rm.ResetReasonLast {
		g.logOnce("reset", "denied the reset of an engine that is not the channel's own", "engine", rm.U32(params, rm.ResetEngine), "own", engine)
		g.stats.denied.Add(1)
		return c.status(rm.StatusInvalidArgument)
	}
	if !c.valid(l) {
		return replyDone
	}
	if !g.account.countReset(client, handle) {
		return c.status(rm.StatusOK) // it is dead already
	}
	return fail(c.exec())
}

// engineOf is the engine of a channel: its group's or, where that does not say, its own; 0 if neither does. False: it is no channel.
func (a *account) engineOf(client, handle uint32) (engine uint32, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil || c.channels[handle] == nil {
		return 0, false
	}
	o := c.channels[handle]
	group := c.objects[o.parent]
	switch {
	case group == nil || group.engine == 0 && o.engine != 0:
		return o.engine, true
	case group.engine == 0 && group.graphics:
		return engineGR, true
	}
	return group.engine, true
}

// countReset counts a reset of a channel; false if it has had its share.
func (a *account) countReset(client, handle uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil || c.channels[handle] == nil || c.channels[handle].resets >= maxResets {
		return false
	}
	c.channels[handle].resets++
	return true
}
