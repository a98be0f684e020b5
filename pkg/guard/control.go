package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// onControl handles RM_CONTROL: known controls pass on a private copy, unknown ones are answered "not supported".
func (g *Guard) onControl(c *trappedCall) reply {
	o := c.call.Outer
	cmd := rm.U32(o, rm.ControlCmd)
	ctl, ok := g.abi.Control(cmd)
	if !ok && !g.driver.Native() {
		ctl, ok = simControl(cmd)
	}
	if !ok || ctl.Kind == rm.ControlDeny {
		g.logOnce("control"+rm.ControlName(cmd), "denied a control", "control", rm.ControlName(cmd))
		g.stats.denied.Add(1)
		return c.status(rm.StatusNotSupported)
	}
	if g.deniesProfiler(ctl.Profiling, ctl.Name) {
		return c.status(rm.StatusInsufficientPermissions)
	}
	// Bit 2 says that the parameters are serialised, bits 0 and 1 ask for raised IRQL and lock bypass.
	if rm.U32(o, rm.ControlFlags) != 0 {
		return c.status(rm.StatusInvalidArgument)
	}
	client := rm.U32(o, rm.ControlClient)
	if !g.owns(c, client) {
		return c.status(rm.StatusInvalidClient)
	}
	size := rm.U32(o, rm.ControlParamsSize)
	if size > rm.MaxControlParams || ctl.Size != 0 && int(size) != ctl.Size {
		return c.status(rm.StatusInvalidParamStruct)
	}
	params, ok := c.loadBlock(-1, rm.ControlParams, int(size))
	if !ok {
		return fail(unix.EFAULT)
	}
	if len(params) == 0 && (ctl.Size != 0 || len(ctl.Pointers) > 0) {
		return c.status(rm.StatusInvalidArgument)
	}
	for _, off := range ctl.Clear {
		rm.PutU64(params, off, 0)
	}
	if ctl.Kind == rm.ControlDebugRead || ctl.Kind == rm.ControlDebugWrite {
		return g.onDebugMemory(c, ctl, client)
	}
	if ctl.HoldsLocks > 0 && !g.payFor(c, ctl.HoldsLocks) {
		return fail(unix.EINTR)
	}
	for _, p := range ctl.Pointers {
		n, ok := p.Bytes(params)
		if !ok {
			return c.status(rm.StatusInvalidArgument)
		}
		if _, ok := c.loadBlock(0, p.Off, n); !ok {
			return fail(unix.EFAULT)
		}
	}
	for _, off := range ctl.ClientHandles {
		if h := rm.U32(params, off); h != 0 && !g.account.ownsClient(h) {
			g.logOnce("ctlclient"+ctl.Name, "denied a control that names another container's client", "control", ctl.Name)
			g.stats.denied.Add(1)
			return c.status(rm.StatusInvalidClient)
		}
	}
	if rep, ok := g.checkControl(c, ctl, params); !ok {
		return rep
	}
	if ctl.Kind == rm.ControlSwallow {
		return c.status(rm.StatusOK)
	}
	if ctl.Kind == rm.ControlPeerMemory && g.account.isSpilled(client, rm.U32(params, rm.PeerMemoryHandle)) {
		// libcuda registers every allocation for other devices' direct access. That takes device memory; nobody can use what is
		// not registered, and so nothing is lost but that.
		return c.status(rm.StatusOK)
	}
	if ctl.FDOff >= 0 {
		return g.onControlWithFile(c, ctl, params)
	}
	switch ctl.Kind {
	case rm.ControlSchedule:
		return g.onSchedule(c, client, params)
	case rm.ControlOwnChannel, rm.ControlResetChannel:
		return g.onFailed(c, ctl, client, params)
	case rm.ControlRegOps:
		return g.onRegOps(c, params)
	case rm.ControlStreamAlloc, rm.ControlStreamFree, rm.ControlStreamBind:
		return g.onStream(c, ctl, client, params)
	}
	if !c.valid() {
		return replyDone
	}
	status, e := c.execStatus()
	if e == 0 && status == rm.StatusOK {
		g.present(c, ctl, params)
	} else if ctl.Kind == rm.ControlPidInfo {
		copy(params, c.before[1]) // the host's process numbers stay here
	}
	return fail(e)
}

// simControl knows the controls that only the simulated driver has (sim.CtrlSubmit, sim.CtrlWork), by which a test puts work on a
// channel group. A real GPU gets its work through memory. The numbers stand here again because a guard does not import its driver.
func simControl(cmd uint32) (rm.Control, bool) {
	switch cmd {
	case 0xa06c01f0:
		return rm.Control{Name: "SIM_SUBMIT", Size: 24, FDOff: -1, Kind: rm.ControlFlat}, true
	case 0xa06c01f1:
		return rm.Control{Name: "SIM_WORK", Size: 40, FDOff: -1, Kind: rm.ControlFlat}, true
	}
	return rm.Control{}, false
}

// checkControl refuses what a control must not ask, and translates what it asks into the host's terms. False: answer with
// the reply.
func (g *Guard) checkControl(c *trappedCall, ctl rm.Control, params []byte) (reply, bool) {
	switch ctl.Kind {
	case rm.ControlGPUQuery:
		if !g.ownsGPUID(rm.U32(params, 0)) {
			return c.status(rm.StatusInvalidArgument), false
		}
	case rm.ControlAttach:
		g.rewriteAttach(params)
	case rm.ControlPreemptionMode:
		// Without compute preemption (CILP) a long kernel cannot be stopped at the end of its timeslice.
		if rm.U32(params, rm.PreemptFlags)&1 != 0 && rm.U32(params, rm.PreemptCILP) != rm.PreemptModeCILP {
			g.logOnce("cilp", "denied a compute preemption mode other than CILP")
			return c.status(rm.StatusNotSupported), false
		}
	case rm.ControlCacheFlush:
		// Lines that a neighbour has written go to memory; they are never just dropped.
		if flags := rm.U32(params, rm.CacheFlushFlags); flags&rm.CacheFlushInvalidate != 0 {
			rm.PutU32(params, rm.CacheFlushFlags, flags|rm.CacheFlushWriteBack)
		}
	case rm.ControlPidInfo:
		if !g.translatePidInfo(params) {
			return c.status(rm.StatusInvalidArgument), false
		}
	}
	return replyDone, true
}

// rewriteAttach turns "all GPUs" into the container's own, and drops others from a list (NV0000_CTRL_CMD_GPU_ATTACH_IDS).
func (g *Guard) rewriteAttach(params []byte) {
	if rm.U32(params, 0) == rm.GPUIDAttach {
		for i := range rm.GPUIDListLen {
			id := uint32(rm.GPUIDUnused)
			if i < len(g.gpus) {
				id = g.gpus[i].id
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

// onControlWithFile handles controls that name a descriptor of the task: the guard passes a copy of its own. Exports and
// imports of objects move references to memory, the others do not.
func (g *Guard) onControlWithFile(c *trappedCall, ctl rm.Control, params []byte) reply {
	number := rm.U32(params, ctl.FDOff)
	fd, err := c.k.getFile(int(int32(number)))
	if err != nil {
		return c.status(rm.StatusInvalidArgument)
	}
	defer unix.Close(fd)
	n, _, err := g.nodes.classify(fd)
	if err != nil || n.kind != nodeControl {
		g.logOnce("ctlfd"+ctl.Name, "denied a control that names a file other than nvidiactl", "control", ctl.Name)
		return c.status(rm.StatusInvalidArgument)
	}
	f, err := g.followFile(fd, n)
	if err != nil {
		return c.status(rm.StatusInsufficientResources)
	}
	if g.driver.Native() {
		rm.PutU32(params, ctl.FDOff, uint32(fd))
	} else {
		rm.PutU32(params, ctl.FDOff, uint32(f.sim))
	}
	rep := g.execExport(c, ctl, params, f)
	rm.PutU32(params, ctl.FDOff, number)
	return rep
}

// execExport carries out a control with a file and keeps the charges right. An exported object stays alive with the file
// (RmExportObject makes a dup that the file owns), an imported one gets one more handle.
func (g *Guard) execExport(c *trappedCall, ctl rm.Control, params []byte, f *file) reply {
	client := rm.U32(c.call.Outer, rm.ControlClient)
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	// What the file will hold, from position first on; nil for what takes no device memory.
	var held []*charge
	first := 0
	release := func() {
		for _, ch := range held {
			g.account.unhold(ch)
		}
	}
	if g.exportsSpilled(client, ctl, params) {
		return g.refuseSpilled(c, "export")
	}
	switch ctl.Kind {
	case rm.ControlExportFD:
		held = append(held, g.account.hold(client, rm.U32(params, rm.ExportFDObject+rm.ExportObjectHandle)))
	case rm.ControlExportFDs:
		count := int(rm.U16(params, exportObjectsCount))
		first = int(rm.U16(params, exportObjectsIndex))
		if count > exportObjectsMax || first+count > maxExports {
			return c.status(rm.StatusInvalidArgument)
		}
		for i := range count {
			held = append(held, g.account.hold(client, rm.U32(params, exportObjectsList+4*i)))
		}
	case rm.ControlImportFD, rm.ControlImportFDs:
		if !g.account.room(rm.ClassPlain, 0, 0) {
			return c.status(rm.StatusInsufficientResources)
		}
		if g.driver.Native() && !g.exportedHere(f) {
			// What an exporter in another container put there is charged to nobody here.
			g.logOnce("import", "denied the import of memory that was not exported in this container")
			g.stats.denied.Add(1)
			return c.status(rm.StatusInsufficientPermissions)
		}
	}
	f.uvm.Lock() // or two exports to one position could be noted in another order than the driver saw them
	defer f.uvm.Unlock()
	if !c.valid() {
		release()
		return replyDone
	}
	status, e := c.execStatus()
	if e != 0 || status != rm.StatusOK {
		release()
		return fail(e)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.exports = g.setExports(f.exports, first, held)
	switch ctl.Kind {
	case rm.ControlCreateExportFD, rm.ControlExportFD, rm.ControlExportFDs:
		f.exporter = true
		f.rooted = true // it is an export file now, no client may be made on it
	case rm.ControlImportFD:
		g.account.adopt(client, rm.U32(params, rm.ImportFDObject+rm.ExportObjectParent),
			rm.U32(params, rm.ImportFDObject+rm.ExportObjectHandle), chargeAt(f.exports, 0))
	case rm.ControlImportFDs:
		count, index := int(rm.U16(params, importObjectsCount)), int(rm.U16(params, importObjectsIndex))
		for i := range min(count, importObjectsMax) {
			// Of an empty position the driver leaves the handle as the task passed it, which may be that of something else.
			if params[importObjectsTypes+i] == importTypeNone {
				continue
			}
			g.account.adopt(client, rm.U32(params, importObjectsParent), rm.U32(params, importObjectsList+4*i), chargeAt(f.exports, index+i))
		}
	}
	return replyDone
}

// exportsSpilled reports that an export names memory that was spilled.
func (g *Guard) exportsSpilled(client uint32, ctl rm.Control, params []byte) bool {
	switch ctl.Kind {
	case rm.ControlExportFD:
		return g.account.isSpilled(client, rm.U32(params, rm.ExportFDObject+rm.ExportObjectHandle))
	case rm.ControlExportFDs:
		for i := range min(int(rm.U16(params, exportObjectsCount)), exportObjectsMax) {
			if g.account.isSpilled(client, rm.U32(params, exportObjectsList+4*i)) {
				return true
			}
		}
	}
	return false
}

// setExports notes what a file holds from a position on. What was there before the driver has let go
// (cliresCtrlCmdOsUnixExportObjectsToFd_IMPL).
func (g *Guard) setExports(list []*charge, first int, held []*charge) []*charge {
	for i, ch := range held {
		switch at := first + i; {
		case at < len(list):
			g.account.unhold(list[at])
			list[at] = ch
		case ch != nil:
			list = append(list, make([]*charge, at+1-len(list))...)
			list[at] = ch
		}
	}
	return list
}

// maxExports bounds the positions of a file that the guard remembers.
const maxExports = 1 << 14

// chargeAt is the charge of what a file holds at a position.
func chargeAt(list []*charge, i int) *charge {
	if i < 0 || i >= len(list) {
		return nil
	}
	return list[i]
}

func (g *Guard) exportedHere(f *file) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.exporter
}

// Offsets in NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_PARAMS and …IMPORT_OBJECTS_FROM_FD_PARAMS (ctrl0000unix.h; rm-abi.csv).
const (
	exportObjectsList  = 76
	exportObjectsMax   = 512
	exportObjectsCount = 2124
	exportObjectsIndex = 2126

	importObjectsParent = 4
	importObjectsList   = 8
	importObjectsMax    = 128
	importObjectsTypes  = 520 // a byte each
	importTypeNone      = 0   // NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_NONE
	importObjectsCount  = 648
	importObjectsIndex  = 650
)
