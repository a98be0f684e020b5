// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/binary"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

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
			return answer(c.deny(rm.StatusNotSupported, "export", "denied the export of an object that is no memory",
				"class", rm.ClassName(o.class)))
		}
		if !c.roomForReferences(o.charge, 0) { // the same memory may be named again
			return answer(c.denyReferences())
		}
		held = append(held, export{true, o.charge, o.kind == rm.ClassFabric, o.size})
		if o.spilled || o.charge != nil && o.charge.spilled {
			return answer(g.refuseSpilled(c, "export"))
		}
		if h != 0 && c.isUncounted(c.target(), client, h) { // 0 empties a position
			return answer(c.denyUnseen())
		}
	}
	if !g.roomForExports(len(held)) {
		return answer(c.deny(rm.StatusInsufficientResources, "exports", "denied an export: the container has too many", "max", maxExported))
	}
	switch c.control.Kind {
	case rm.ControlImportFD, rm.ControlImportFDs:
		if c.isUnseen(c.target(), client, importParent(c)) {
			return answer(c.denyUnseen())
		}
		if !g.account.roomForObject(rm.ClassVidmem, noGPU, 0, 0) {
			return answer(c.status(rm.StatusInsufficientResources))
		}
		if !g.exportedHere(f) {
			// What an exporter in another container put there is charged to nobody here.
			return answer(c.deny(rm.StatusInsufficientPermissions, "import", "denied the import of memory that was not exported in this container"))
		}
		gpu, imported := g.account.gpuOf(client, importParent(c)), importedBy(c, f)
		for _, e := range imported {
			switch {
			case !e.fabric && e.charge.onOtherGPU(gpu):
				return answer(c.denyOtherGPU())
			case !c.roomForReferences(e.charge, 1):
				return answer(c.denyReferences())
			}
		}
	}
	p := plan{ask: true, commit: func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		g.books.note(f) // before what it held ends
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

// importedBy is what an import makes handles on.
func importedBy(c *trappedCall, f *file) (list []export) {
	first, count := 0, 1
	if c.control.Kind == rm.ControlImportFDs {
		first, count = int(rm.U16(c.params, importObjectsIndex)), int(rm.U16(c.params, importObjectsCount))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range min(count, importObjectsMax) {
		list = append(list, exportAt(f.exports, first+i))
	}
	return list
}

// importParent is below what an import makes its handles.
func importParent(c *trappedCall) uint32 {
	if c.control.Kind == rm.ControlImportFDs {
		return rm.U32(c.params, importObjectsParent)
	}
	return rm.U32(c.params, rm.ImportFDObject+rm.ExportObjectParent)
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

// export is what a file holds at a position: device memory, or NVLink addresses of some, which may be mapped by other GPUs. Without a
// charge it is something else.
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
