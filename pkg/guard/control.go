package guard

import (
	"encoding/binary"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// controls are the rules of the kinds of RM_CONTROL that need more than the checks of onControl. ControlDeny and ControlDebugRead and …Write
// never come here (onControl).
var controls = map[rm.ControlKind]rule{
	rm.ControlSwallow:        {check: answerSwallowed},
	rm.ControlGPUQuery:       {check: (*Guard).checkGPUQuery},
	rm.ControlAttach:         {check: (*Guard).checkAttach},
	rm.ControlHide:           {check: answerHidden},
	rm.ControlPreemptionMode: {locks: true, check: (*Guard).checkPreemptionMode},
	rm.ControlStopChannel:    {check: (*Guard).checkStopChannel},
	rm.ControlThermal:        {check: (*Guard).checkThermal},
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
}

// onControl handles RM_CONTROL: known controls pass on a private copy, unknown ones are answered "not supported".
func (g *Guard) onControl(c *trappedCall) reply {
	o := c.call.Outer
	cmd := rm.U32(o, rm.ControlCmd)
	ctl, ok := g.abi.Control(cmd)
	if !ok && !g.driver.Native() {
		ctl, ok = simControl(cmd)
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
	if g.isUnseen(c.target(), c.controlClient(), c.controlObject()) {
		return c.denyUnseen()
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
			return c.deny(rm.StatusInvalidClient, "ctlclient"+ctl.Name, "denied a control that names another container's client", "control", ctl.Name)
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

// checkFileControl handles controls that name a descriptor of the task: the guard passes a copy of its own. Exports and
// imports of objects move references to memory, the others do not.
func (g *Guard) checkFileControl(c *trappedCall) plan {
	number := rm.U32(c.params, c.control.FDOff)
	fd, as, err := c.fileNamed(number, nodeControl)
	if err != nil {
		g.logOnce("ctlfd"+c.control.Name, "denied a control that names a file other than nvidiactl", "control", c.control.Name)
		return answer(c.status(rm.StatusInvalidArgument))
	}
	f, err := g.followFile(fd, node{kind: nodeControl})
	if err != nil {
		_ = unix.Close(fd)
		return answer(c.status(rm.StatusInsufficientResources))
	}
	f.uvm.Lock() // or two exports to one position could be noted in another order than the driver saw them
	rm.PutU32(c.params, c.control.FDOff, as)
	p := g.checkExport(c, f)
	p.done = func() {
		rm.PutU32(c.params, c.control.FDOff, number)
		f.uvm.Unlock()
		_ = unix.Close(fd)
	}
	return p
}

// checkExport keeps the charges right. An exported object stays alive with the file (RmExportObject makes a dup that the file owns), an
// imported one gets one more handle.
func (g *Guard) checkExport(c *trappedCall, f *file) plan {
	client := c.controlClient()
	objects, first, ok := exportedObjects(c)
	if !ok {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	// What the file will hold, from position first on; nil for what takes no device memory.
	var held []export
	for _, h := range objects {
		o, ok := c.acquireObject(client, h)
		if !ok {
			return answer(c.status(rm.StatusInvalidClient))
		}
		if o.handle != 0 && !o.isMemory() && o.kind != rm.ClassFabric {
			// It would live on in the file, and be counted no more.
			return answer(c.deny(rm.StatusNotSupported, "export", "denied the export of an object that is no memory", "class", rm.ClassName(o.class)))
		}
		held = append(held, export{true, o.charge, o.kind == rm.ClassFabric, o.size})
		if o.spilled || o.charge != nil && o.charge.spilled {
			return answer(g.refuseSpilled(c, "export"))
		}
		if g.isUnseen(c.target(), client, h) {
			return answer(c.denyUnseen())
		}
	}
	if !g.roomForExports(len(held)) {
		return answer(c.deny(rm.StatusInsufficientResources, "exports", "denied an export: the container has too many", "max", maxExported))
	}
	switch c.control.Kind {
	case rm.ControlImportFD, rm.ControlImportFDs:
		if !g.account.roomForObject(rm.ClassVidmem, noGPU, 0, 0) {
			return answer(c.status(rm.StatusInsufficientResources))
		}
		if g.driver.Native() && !g.exportedHere(f) {
			// What an exporter in another container put there is charged to nobody here.
			return answer(c.deny(rm.StatusInsufficientPermissions, "import", "denied the import of memory that was not exported in this container"))
		}
		if g.importsForOtherGPU(c, f) {
			return answer(c.denyOtherGPU())
		}
	}
	p := plan{ask: true, commit: func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.exports = g.setExports(f.exports, first, held)
		g.recordExport(c, f)
	}}
	done := 0 // what the file holds already when one is refused
	if len(objects) > 1 {
		p.exec = func() (e syscall.Errno) {
			done, e = g.exportEach(c, objects, first)
			return e
		}
	}
	p.cancel = func() {
		if held = held[:done]; done > 0 {
			p.commit()
		}
	}
	return p
}

// exportEach exports objects one by one. Where one of several is refused, the driver frees what its array of handles holds beyond that one,
// which it has not set (cliresCtrlCmdOsUnixExportObjectsToFd_IMPL): exports of others on the node. done is how many the file has then.
func (g *Guard) exportEach(c *trappedCall, objects []uint32, first int) (done int, e syscall.Errno) {
	list := c.params[exportObjectsList:][:4*len(objects)]
	whole := slices.Clone(c.params)
	defer func() { copy(c.params, whole) }()
	clear(list)
	binary.LittleEndian.PutUint16(c.params[exportObjectsCount:], 1)
	for done < len(objects) {
		rm.PutU32(list, 0, objects[done])
		binary.LittleEndian.PutUint16(c.params[exportObjectsIndex:], uint16(first+done))
		if e = g.driver.Exec(c.target(), &c.call); e != 0 || c.statusWord() != rm.StatusOK {
			return done, e
		}
		done++
	}
	return done, 0
}

// importsForOtherGPU reports that an import makes a handle on a GPU's memory below another one's device.
func (g *Guard) importsForOtherGPU(c *trappedCall, f *file) bool {
	parent, first, count := rm.U32(c.params, rm.ImportFDObject+rm.ExportObjectParent), 0, 1
	if c.control.Kind == rm.ControlImportFDs {
		parent, first, count = rm.U32(c.params, importObjectsParent), int(rm.U16(c.params, importObjectsIndex)), int(rm.U16(c.params, importObjectsCount))
	}
	gpu := g.account.gpuOf(c.controlClient(), parent)
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range count {
		if e := exportAt(f.exports, first+i); !e.fabric && e.charge.onOtherGPU(gpu) {
			return true
		}
	}
	return false
}

// exportedObjects lists the objects that a control puts into a file, and the position of the first.
func exportedObjects(c *trappedCall) (objects []uint32, first int, ok bool) {
	switch c.control.Kind {
	case rm.ControlExportFD:
		return []uint32{rm.U32(c.params, rm.ExportFDObject+rm.ExportObjectHandle)}, 0, true
	case rm.ControlExportFDs:
		count := int(rm.U16(c.params, exportObjectsCount))
		first = int(rm.U16(c.params, exportObjectsIndex))
		if count > exportObjectsMax || first+count > maxExports {
			return nil, 0, false
		}
		for i := range count {
			objects = append(objects, rm.U32(c.params, exportObjectsList+4*i))
		}
	}
	return objects, first, true
}

// recordExport records what the driver did with a file, which is locked.
func (g *Guard) recordExport(c *trappedCall, f *file) {
	client, params := c.controlClient(), c.params
	switch c.control.Kind {
	case rm.ControlCreateExportFD, rm.ControlExportFD, rm.ControlExportFDs:
		f.exporter = true
		f.rooted = true // it is an export file now, no client may be made on it
	case rm.ControlImportFD:
		g.account.importObject(client, rm.U32(params, rm.ImportFDObject+rm.ExportObjectParent),
			rm.U32(params, rm.ImportFDObject+rm.ExportObjectHandle), exportAt(f.exports, 0))
	case rm.ControlImportFDs:
		count, index := int(rm.U16(params, importObjectsCount)), int(rm.U16(params, importObjectsIndex))
		for i := range min(count, importObjectsMax) {
			// Of an empty position the driver leaves the handle as the task passed it, which may be that of something else.
			if params[importObjectsTypes+i] == importTypeNone {
				continue
			}
			g.account.importObject(client, rm.U32(params, importObjectsParent), rm.U32(params, importObjectsList+4*i), exportAt(f.exports, index+i))
		}
	}
}

// setExports notes what a file holds from a position on. What was there before the driver has let go
// (cliresCtrlCmdOsUnixExportObjectsToFd_IMPL).
func (g *Guard) setExports(list []export, first int, held []export) []export {
	for i, e := range held {
		g.account.addReference(e.charge)
		switch at := first + i; {
		case at < len(list):
			g.dropExport(list[at])
			list[at] = e
		default:
			list = append(list, make([]export, at+1-len(list))...)
			list[at] = e
		}
		g.exportedObjects.Add(1)
	}
	return list
}

// dropExport lets go of what a file held at a position.
func (g *Guard) dropExport(e export) {
	if e.there {
		g.account.dropReference(e.charge)
		g.exportedObjects.Add(-1)
	}
}

// roomForExports reports that the container may export n objects more. Some files may be closed unnoticed.
func (g *Guard) roomForExports(n int) bool {
	if n == 0 || g.exportedObjects.Load()+int64(n) <= maxExported {
		return true
	}
	g.sweep()
	return g.exportedObjects.Load()+int64(n) <= maxExported
}

// maxExports bounds the positions of a file that the guard remembers.
const maxExports = 1 << 14

// export is what a file holds at a position: device memory, or NVLink addresses of some, which may be mapped by other GPUs. Without a charge it
// is something else.
type export struct {
	there  bool
	charge *charge
	fabric bool
	size   quota.Bytes
}

func exportAt(list []export, i int) export {
	if i < 0 || i >= len(list) {
		return export{}
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
