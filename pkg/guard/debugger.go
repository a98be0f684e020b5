// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// A kernel that executes trap or a breakpoint, or overflows its stack, stops at a hardware exception. libcuda's debugger object takes
// those, and then the driver leaves all to libcuda (ctrl83dedebug.h, NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK), which reads what happened
// and ends the channel. These are the calls that it makes for that, and those of CUDA's core dumps and of cuda-gdb.

// checkOwnChannel: a call on the container's own channel (CLEAR_ALL_SM_ERROR_STATES).
func (g *Guard) checkOwnChannel(c *trappedCall) plan {
	if _, ok := g.account.engineOf(c.controlClient(), rm.U32(c.params, 0)); !ok {
		return answer(c.status(rm.StatusInvalidObject))
	}
	return pass()
}

// checkReset: RESET_CHANNEL ends a channel. The driver does not check the engine that it names (kernel_channel.c,
// kchannelCtrlCmdResetChannel_IMPL), and its firmware resets that; so it must be the channel's own.
func (g *Guard) checkReset(c *trappedCall) plan {
	own, ok := g.account.engineOf(c.controlClient(), c.controlObject())
	if !ok {
		return answer(c.status(rm.StatusInvalidObject))
	}
	engine := rm.U32(c.params, rm.ResetEngine)
	if own == 0 || engine != own || rm.U32(c.params, rm.ResetSubdevice) != 0 || rm.U32(c.params, rm.ResetReason) > rm.ResetReasonLast {
		return answer(c.deny(rm.StatusInvalidArgument, "reset", "denied the reset of an engine that is not the channel's own",
			"engine", engine, "own", own))
	}
	return pass()
}

// dumpOp is the one register that CUDA's core dumps write (CUDA_ENABLE_COREDUMP_ON_EXCEPTION): a bit of the channel's own context, as an
// NV2080_CTRL_GPU_REG_OP. Seen on an H200 with 580.159.04. Others stop the SMs, which neighbours need, or are of the GPU as a whole.
func dumpOp() []byte {
	b := make([]byte, rm.RegOpSize)
	b[0], b[1] = 1, 1          // WRITE_32, of type GR_CTX
	rm.PutU32(b, 12, 0x4208b0) // register
	rm.PutU32(b, 20, 1<<16)    // value
	rm.PutU32(b, 28, 1<<16)    // of these bits
	return b
}

// checkRegOps: EXEC_REG_OPS of a core dump, on a channel of the container's, and nothing else.
func (g *Guard) checkRegOps(c *trappedCall) plan {
	if !bytes.Equal(c.call.Blocks[1].Data, dumpOp()) || rm.U64(c.params, rm.RegOpsRoute) != 0 || rm.U64(c.params, rm.RegOpsRoute+8) != 0 {
		return answer(c.deny(rm.StatusNotSupported, "regops", "denied access to the GPU's registers"))
	}
	_, client := regOpsClients(c)
	if _, ok := g.account.engineOf(client, rm.U32(c.params, rm.RegOpsChannel)); !ok {
		return answer(c.status(rm.StatusInvalidObject))
	}
	return pass()
}

func regOpsClients(c *trappedCall) (dst, src uint32) {
	return c.controlClient(), rm.U32(c.params, rm.RegOpsClient)
}

// chunk is how much of a debugger's read or write the guard carries out at a time: cuda-gdb asks for 16 MiB at once.
const chunk = 256 << 10

// onDebugMemory carries out DEBUG_READ_MEMORY and DEBUG_WRITE_MEMORY on memory of the debugger object's own client, in pieces.
func (g *Guard) onDebugMemory(c *trappedCall) reply {
	params := c.params
	length, offset, addr := rm.U32(params, rm.DebugMemoryLength), rm.U64(params, rm.DebugMemoryOffset), rm.U64(params, rm.DebugMemoryBuffer)
	if length == 0 || int(length) > c.control.Pointers[0].MaxBytes || addr == 0 || addr > ^uint64(0)-uint64(length) ||
		offset > ^uint64(0)-uint64(length) {
		return c.status(rm.StatusInvalidArgument)
	}
	b := c.mem.alloc(min(chunk, int(length)))
	defer func() { // the driver changes nothing in the parameters
		copy(params, c.before[1])
		c.call.Blocks = c.call.Blocks[:1]
	}()
	for done := uint32(0); done < length; {
		piece := b[:min(len(b), int(length-done))]
		rm.PutU32(params, rm.DebugMemoryLength, uint32(len(piece)))
		rm.PutU64(params, rm.DebugMemoryOffset, offset+uint64(done))
		c.call.Blocks = append(c.call.Blocks[:1], rm.Block{In: 0, Off: rm.DebugMemoryBuffer, Addr: addr + uint64(done), Data: piece})
		if rep, ok := g.debugPiece(c, memoryPart{addr + uint64(done), piece}); !ok {
			return rep
		}
		done += uint32(len(piece))
	}
	return replyDone
}

// debugPiece carries out one piece. False: it is the last, and the reply the call's.
func (g *Guard) debugPiece(c *trappedCall, piece memoryPart) (reply, bool) {
	write := c.control.Kind == rm.ControlDebugWrite
	if write && !readMemory(c.task.tid, piece.addr, piece.data) {
		return fail(unix.EFAULT), false
	}
	if !g.waitToPay(c, c.control.HoldsLocks) {
		return fail(unix.EINTR), false
	}
	rep := g.serveByRule(rule{clients: outerClient(rm.ControlClient), locks: true, check: (*Guard).checkDebugPiece}, c)
	if rep.errno != 0 || c.failed(rep) {
		return rep, false
	}
	// A caller that is away gets no part of an answer: the call comes again, and then begins anew. And its number may be another's.
	if !c.valid() {
		c.executed = false
		return replyDone, false
	}
	if !write && !writeMemory(c.task.tid, []memoryPart{piece}) {
		return fail(unix.EFAULT), false
	}
	return replyDone, true
}

// checkDebugPiece: the driver takes any object that has an address (_nv83deCtrlCmdDebugAccessMemory): of a range of virtual addresses it
// would read the host's memory at the numbers that the container chose. So only what is known to be memory passes.
func (g *Guard) checkDebugPiece(c *trappedCall) plan {
	o, ok := g.account.lookup(c.controlClient(), rm.U32(c.params, rm.DebugMemoryHandle))
	if !ok || o.class != classSystem && (o.kind != rm.ClassVidmem || o.charge == nil) {
		return answer(c.status(rm.StatusInvalidObject))
	}
	if g.isSecretlyUserShared(c.target(), c.controlClient(), o) { // the driver has a handle of its own on it meanwhile
		return answer(c.denyUserShared())
	}
	return pass()
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
	case group.engine == 0 && group.group != nil && group.group.graphics:
		return engineGR, true
	}
	return group.engine, true
}
