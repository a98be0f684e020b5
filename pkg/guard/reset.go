package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// faultCalls counts the calls by which libcuda deals with a kernel that has stopped at a hardware exception. They are slow and hold the
// driver's locks meanwhile, so a channel has as many as libcuda needs (one of each, measured on 580.159.04), and one more.
type faultCalls struct{ resets, regOps int }

const (
	maxResets = 2 // 4 ms each
	maxRegOps = 2 // 0.25 s each
)

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
	if !g.account.countFault(client, handle, func(n *faultCalls) *int { return &n.resets }, maxResets) {
		return c.status(rm.StatusOK) // it is dead already
	}
	return fail(c.exec())
}

// onRegOps carries out EXEC_REG_OPS on registers of a channel's own context, which libcuda writes to be able to dump a core
// (CUDA_ENABLE_COREDUMP_ON_EXCEPTION). Operations of any other type reach registers that all contexts share.
func (g *Guard) onRegOps(l *listener, c *trappedCall, params []byte) reply {
	client, channel := rm.U32(params, rm.RegOpsClient), rm.U32(params, rm.RegOpsChannel)
	own := false
	if _, ok := g.account.engineOf(client, channel); ok && len(c.call.Blocks) > 1 {
		own = len(c.call.Blocks[1].Data) > 0
		for ops := c.call.Blocks[1].Data; len(ops) > 0; ops = ops[rm.RegOpSize:] {
			own = own && ops[rm.RegOpType] == rm.RegOpTypeGRCtx
		}
	}
	if !own {
		g.logOnce("regops", "denied access to registers of the GPU that are not of the container's own context")
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	if !c.valid(l) {
		return replyDone
	}
	if !g.account.countFault(client, channel, func(n *faultCalls) *int { return &n.regOps }, maxRegOps) {
		return c.status(rm.StatusInsufficientResources)
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

// countFault counts a call on a channel; false if the channel has had its share.
func (a *account) countFault(client, handle uint32, counter func(*faultCalls) *int, most int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil || c.channels[handle] == nil {
		return false
	}
	n := counter(&c.channels[handle].faulted)
	if *n >= most {
		return false
	}
	*n++
	return true
}
