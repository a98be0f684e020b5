package guard

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// slowCalls bounds the calls by which libcuda and its debugger deal with a kernel that has failed (rm.Control.Slow). They hold the driver's
// locks, under which all containers' calls wait, for 4 ms (RESET_CHANNEL), 34 ms (CLEAR_ALL_SM_ERROR_STATES) or 250 ms (EXEC_REG_OPS;
// all on an H200). A failed kernel takes 0.4 s of them, so eight processes can fail at once; after that they take a tenth of the time.
func slowCalls() bucket { return bucket{perSecond: 0.1, burst: 3} }

// maxWait is how long a call that waits for something goes without a look whether its caller is still there.
const maxWait = 100 * time.Millisecond

// awaitSlow waits until the container may make another slow call. False: the caller is gone.
func (g *Guard) awaitSlow(l *listener, c *trappedCall) bool {
	for {
		wait := g.slow.spend(time.Now(), 0)
		if wait == 0 {
			return true
		}
		time.Sleep(min(wait, maxWait))
		if !c.valid(l) {
			return false
		}
	}
}

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
	return fail(c.exec())
}

// onRegOps carries out EXEC_REG_OPS on registers of a channel's own context, which libcuda writes to be able to dump a core
// (CUDA_ENABLE_COREDUMP_ON_EXCEPTION). Operations of any other type reach registers that all contexts share, and a route a MIG partition.
func (g *Guard) onRegOps(l *listener, c *trappedCall, params []byte) reply {
	client, channel := rm.U32(params, rm.RegOpsClient), rm.U32(params, rm.RegOpsChannel)
	ops := c.call.Blocks[1].Data
	_, own := g.account.engineOf(client, channel)
	own = own && len(ops) > 0 && rm.U64(params, rm.RegOpsRoute) == 0 && rm.U64(params, rm.RegOpsRoute+8) == 0
	for ; own && len(ops) > 0; ops = ops[rm.RegOpSize:] {
		own = ops[rm.RegOpType] == rm.RegOpTypeGRCtx
	}
	if !own {
		g.logOnce("regops", "denied access to registers of the GPU that are not of the container's own context")
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	if !c.valid(l) {
		return replyDone
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

// chunk is how much of a debugger's read or write the guard carries out at a time: cuda-gdb asks for 16 MiB at once.
const chunk = 256 << 10

// onDebugMemory carries out DEBUG_READ_MEMORY and DEBUG_WRITE_MEMORY on memory of the debugger object's own client, in pieces. The driver
// takes any object that has an address (_nv83deCtrlCmdDebugAccessMemory); registers and address spaces are not memory here.
func (g *Guard) onDebugMemory(l *listener, c *trappedCall, ctl rm.Control, client uint32) reply {
	write := ctl.Kind == rm.ControlDebugWrite
	params := c.call.Blocks[0].Data
	if o, ok := g.account.lookup(client, rm.U32(params, rm.DebugMemoryHandle)); ok && o.kind != rm.ClassVidmem && o.class != classSystem &&
		o.class != classOSDescriptor {
		return c.status(rm.StatusInvalidObject)
	}
	length, offset, addr := rm.U32(params, rm.DebugMemoryLength), rm.U64(params, rm.DebugMemoryOffset), rm.U64(params, rm.DebugMemoryBuffer)
	if length == 0 || int(length) > ctl.Pointers[0].MaxBytes || addr > ^uint64(0)-uint64(length) || offset > ^uint64(0)-uint64(length) {
		return c.status(rm.StatusInvalidArgument)
	}
	b := c.mem.take(min(chunk, int(length)))
	defer func() { // the driver changes nothing in the parameters
		copy(params, c.before[1])
		c.call.Blocks = c.call.Blocks[:1]
	}()
	for done := uint32(0); done < length; {
		piece := b[:min(len(b), int(length-done))]
		if write && !readMemory(c.k.tid, addr+uint64(done), piece) {
			return fail(unix.EFAULT)
		}
		rm.PutU32(params, rm.DebugMemoryLength, uint32(len(piece)))
		rm.PutU64(params, rm.DebugMemoryOffset, offset+uint64(done))
		c.call.Blocks = append(c.call.Blocks[:1], rm.Block{In: 0, Off: rm.DebugMemoryBuffer, Addr: addr + uint64(done), Data: piece})
		if !c.valid(l) {
			return replyDone
		}
		if status, e := c.execStatus(); e != 0 || status != rm.StatusOK {
			return fail(e)
		}
		if !write && !writeMemory(c.k.tid, []memoryPart{{addr + uint64(done), piece}}) {
			return fail(unix.EFAULT)
		}
		done += uint32(len(piece))
	}
	return replyDone
}
