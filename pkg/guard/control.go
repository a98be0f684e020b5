// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// controls are the rules of the kinds of RM_CONTROL that need more than the checks of onControl. ControlDeny and ControlDebugRead and
// …Write never come here (onControl).
var controls = map[rm.ControlKind]rule{
	rm.ControlSwallow:        {check: answerSwallowed},
	rm.ControlGPUQuery:       {check: (*Guard).checkGPUQuery},
	rm.ControlAttach:         {check: (*Guard).checkAttach},
	rm.ControlHide:           {check: answerHidden},
	rm.ControlPreemptionMode: {locks: true, check: (*Guard).checkPreemptionMode},
	rm.ControlDisable:        {locks: true, check: (*Guard).checkDisable},
	rm.ControlPreempt:        {locks: true, check: (*Guard).checkPreempt},
	rm.ControlStopChannel:    {check: (*Guard).checkStopChannel},
	rm.ControlThermal:        {check: (*Guard).checkThermal},
	rm.ControlBoost:          {check: (*Guard).checkBoost},
	rm.ControlCacheFlush:     {check: (*Guard).checkCacheFlush},
	rm.ControlPidInfo:        {check: (*Guard).checkPidInfo},
	rm.ControlPeerMemory:     {check: (*Guard).checkPeerMemory},
	rm.ControlFD:             {locks: true, check: (*Guard).checkFileControl},
	rm.ControlCreateExportFD: {locks: true, check: (*Guard).checkFileControl},
	rm.ControlExportFD:       {locks: true, check: (*Guard).checkFileControl},
	rm.ControlExportFDs:      {locks: true, check: (*Guard).checkFileControl},
	rm.ControlImportFD:       {locks: true, check: (*Guard).checkFileControl},
	rm.ControlImportFDs:      {locks: true, check: (*Guard).checkFileControl},
	rm.ControlSharePolicy:    {locks: true, check: (*Guard).checkSharePolicy},
	rm.ControlSchedule:       {check: (*Guard).checkSchedule},
	rm.ControlOwnChannel:     {locks: true, check: (*Guard).checkOwnChannel},
	rm.ControlResetChannel:   {locks: true, check: (*Guard).checkReset},
	rm.ControlRegOps:         {clients: regOpsClients, locks: true, check: (*Guard).checkRegOps},
	rm.ControlStreamAlloc:    {locks: true, check: (*Guard).checkStream},
	rm.ControlStreamFree:     {locks: true, check: (*Guard).checkStream},
	rm.ControlStreamBind:     {locks: true, check: (*Guard).checkStream},
	rm.ControlFlexibleAttach: {locks: true, check: (*Guard).checkFlexibleAttach},
	rm.ControlFlexibleDetach: {locks: true, check: (*Guard).checkFlexibleDetach},
}

// onControl handles RM_CONTROL: known controls pass on a private copy, unknown ones are answered "not supported".
func (g *Guard) onControl(c *trappedCall) reply {
	o := c.call.Outer
	cmd := rm.U32(o, rm.ControlCmd)
	ctl, ok := g.abi.Control(cmd)
	if !ok {
		ctl, ok = g.driver.Control(cmd)
	}
	if !ok || ctl.Kind == rm.ControlDeny {
		return c.deny(rm.StatusNotSupported, "control"+rm.ControlName(cmd), "denied a control", "control", rm.ControlName(cmd))
	}
	if g.deniesProfiler(ctl.Profiling, ctl.Name) {
		return c.status(rm.StatusInsufficientPermissions)
	}
	// Bit 2 says that the parameters are serialised, bits 0 and 1 ask for raised IRQL and lock bypass.
	if rm.U32(o, rm.ControlFlags) != 0 {
		return c.status(rm.StatusInvalidArgument)
	}
	if !g.account.ownsClient(c.controlClient()) {
		return c.status(rm.StatusInvalidClient)
	}
	if c.isUnseen(c.target(), c.controlClient(), c.controlObject()) {
		return c.denyUnseen()
	}
	// A member may preempt what it computes in, as libcuda does with each context that it destroys (checkPreempt).
	if g.isMember() && (ctl.Context || ctl.Kind != rm.ControlPreempt && g.account.isLent(c.controlClient(), c.controlObject())) {
		return c.deny(rm.StatusNotSupported, "lent"+ctl.Name, "denied a control of the channel group, or the context, that all members of the "+
			"trust domain have", "control", ctl.Name)
	}
	c.control = ctl
	size := rm.U32(o, rm.ControlParamsSize)
	if size > rm.MaxControlParams || ctl.Size != 0 && int(size) != ctl.Size {
		return c.status(rm.StatusInvalidParamStruct)
	}
	if c.params, ok = c.loadBlock(-1, rm.ControlParams, int(size)); !ok {
		return fail(unix.EFAULT)
	}
	if len(c.params) == 0 && (ctl.Size != 0 || len(ctl.Pointers) > 0) {
		return c.status(rm.StatusInvalidArgument)
	}
	for _, off := range ctl.Clear {
		rm.PutU64(c.params, off, 0)
	}
	if ctl.Kind == rm.ControlDebugRead || ctl.Kind == rm.ControlDebugWrite {
		return g.onDebugMemory(c)
	}
	if ctl.HoldsLocks > 0 && !g.waitToPay(c, ctl.HoldsLocks) {
		return fail(unix.EINTR)
	}
	for _, p := range ctl.Pointers {
		n, ok := p.Bytes(c.params)
		if !ok {
			return c.status(rm.StatusInvalidArgument)
		}
		if _, ok := c.loadBlock(0, p.Off, n); !ok {
			return fail(unix.EFAULT)
		}
	}
	for _, off := range ctl.ClientHandles {
		if h := rm.U32(c.params, off); h != 0 && !g.account.ownsClient(h) {
			return c.deny(rm.StatusInvalidClient, "ctlclient"+ctl.Name,
				"denied a control that names another container's client", "control", ctl.Name)
		}
	}
	r := controls[ctl.Kind]
	if r.check == nil {
		r.check = (*Guard).checkFlat
	}
	if r.clients == nil {
		r.clients = outerClient(rm.ControlClient)
	}
	return g.serveByRule(r, c)
}

func (c *trappedCall) controlClient() uint32 { return rm.U32(c.call.Outer, rm.ControlClient) }
func (c *trappedCall) controlObject() uint32 { return rm.U32(c.call.Outer, rm.ControlObject) }

// checkFlat: the driver's answer is rewritten to what the container may see.
func (g *Guard) checkFlat(c *trappedCall) plan {
	return plan{ask: true, commit: func() { g.rewriteAnswer(c, c.control, c.params) }}
}

func answerSwallowed(_ *Guard, c *trappedCall) plan { return answer(c.status(c.control.Answer)) }

func answerHidden(_ *Guard, c *trappedCall) plan {
	clear(c.params)
	return answer(c.status(rm.StatusOK))
}

func (g *Guard) checkGPUQuery(c *trappedCall) plan {
	if !g.ownsGPUID(rm.U32(c.params, 0)) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	return pass()
}

func (g *Guard) checkAttach(c *trappedCall) plan {
	g.rewriteAttach(c.params)
	return pass()
}

// checkStopChannel: else the driver waits with its locks held until the channel is idle, for seconds (ctrla06fgpfifo.h).
func (g *Guard) checkStopChannel(c *trappedCall) plan {
	c.params[rm.StopImmediate] = 1
	return plan{ask: true, done: func() { copy(c.params, c.before[1]) }}
}

// checkPreempt: libcuda takes the groups of a context off the GPU before it ends it (cuCtxDestroy). Kernels are stopped in the middle, so
// that takes less than a millisecond; a context that draws would be waited for with the driver's locks held. It waits for as long as is
// paid for: the driver lets callers choose up to a second, and without a wait a second one has undefined results (ctrla06c.h).
func (g *Guard) checkPreempt(c *trappedCall) plan {
	client, group := c.controlClient(), c.controlObject()
	if x := g.account.preemptionOf(client, group); !g.account.isGroup(client, group) || x.context && x.runs && !x.preempts {
		return answer(c.deny(rm.StatusNotSupported, "preempt", "denied NVA06C_CTRL_CMD_PREEMPT of a group that draws, or of what is no group"))
	}
	c.params[rm.PreemptGroupWait], c.params[rm.PreemptGroupManual] = 1, 1
	rm.PutU32(c.params, rm.PreemptGroupTimeout, uint32(c.control.HoldsLocks.Microseconds()))
	return plan{ask: true, done: func() { copy(c.params, c.before[1]) }}
}

// checkThermal lets instructions pass that ctrl2080thermal.h has: they ask for sensors and what those read.
func (g *Guard) checkThermal(c *trappedCall) plan {
	n := int(rm.U32(c.params, rm.ThermalCount))
	known := n <= rm.ThermalMax && rm.U32(c.params, rm.ThermalSizeOf) == rm.ThermalEntry
	for i := 0; known && i < n; i++ {
		switch rm.U32(c.params, rm.ThermalList+i*rm.ThermalEntry+rm.ThermalOpcode) {
		case 0x100, 0x101, 0x301, 0x500, 0x510, 0x520, 0x540, 0x1500:
		default:
			known = false
		}
	}
	if !known {
		return answer(c.deny(rm.StatusNotSupported, "thermal", "denied a thermal instruction that no header has"))
	}
	return pass()
}

// checkBoost lets the flags pass that ctrl2080perf.h has. libcuda boosts with each context; without that the clocks of a GPU that is not
// always busy fall to those of an idle one, a sixth (H200, docs/measurements.md), whatever runs then. Boosts of different clients are
// tracked independently (ctrl2080perf.h), so nobody takes a neighbour's away. What firmware does with many of them nobody outside can
// read: each is paid for as a slow call.
func (g *Guard) checkBoost(c *trappedCall) plan {
	flags := rm.U32(c.params, rm.BoostFlags)
	if flags&^rm.BoostKnown != 0 || flags&rm.BoostCommand > rm.BoostToMax {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	return pass()
}

// checkCacheFlush: lines that a neighbour has written go to memory; they are never just dropped.
func (g *Guard) checkCacheFlush(c *trappedCall) plan {
	if flags := rm.U32(c.params, rm.CacheFlushFlags); flags&rm.CacheFlushInvalidate != 0 {
		rm.PutU32(c.params, rm.CacheFlushFlags, flags|rm.CacheFlushWriteBack)
	}
	return pass()
}

func (g *Guard) checkPidInfo(c *trappedCall) plan {
	if !g.translatePidInfo(c.params) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	p := g.checkFlat(c)
	p.cancel = func() { copy(c.params, c.before[1]) } // the host's process numbers stay here
	return p
}

// checkPeerMemory: libcuda registers every allocation for other devices' direct access. That takes device memory; nobody can use what is
// not registered, and so nothing is lost but that.
func (g *Guard) checkPeerMemory(c *trappedCall) plan {
	if g.account.isSpilled(c.controlClient(), rm.U32(c.params, rm.PeerMemoryHandle)) {
		return answer(c.status(rm.StatusOK))
	}
	return pass()
}

// rewriteAttach turns "all GPUs" into the container's own, and drops others from a list (NV0000_CTRL_CMD_GPU_ATTACH_IDS).
func (g *Guard) rewriteAttach(params []byte) {
	if rm.U32(params, 0) == rm.GPUIDAttach {
		for i := range rm.GPUIDListLen {
			id := uint32(rm.GPUIDUnused)
			if i < len(g.gpus) {
				id = g.gpus[i].ID()
			}
			rm.PutU32(params, 4*i, id)
		}
		return
	}
	g.filterIDs(params, 0)
}

// filterIDs removes hidden GPUs from a list of ids.
func (g *Guard) filterIDs(params []byte, off int) {
	n := 0
	for i := range rm.GPUIDListLen {
		if id := rm.U32(params, off+4*i); id != rm.GPUIDUnused && g.ownsGPUID(id) {
			rm.PutU32(params, off+4*n, id)
			n++
		}
	}
	for ; n < rm.GPUIDListLen; n++ {
		rm.PutU32(params, off+4*n, rm.GPUIDUnused)
	}
}
