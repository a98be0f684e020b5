// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"math/bits"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// RM_MAP_MEMORY gives the processor a window into memory. One into device memory takes addresses of BAR1, which all containers on the GPU
// share, and each piece takes others, so one allocation can use them up (docs/adr/0010-windows.md). The driver prepares the mmap of a file
// only for the process of the RM client (rm_create_mmap_context), and a call that runs in the task can be swapped. So the guard maps: it
// has a second handle on the memory in a client of its own, with which the window lives and ends, and the task mmaps its own file. The
// driver does not take away what is mapped when memory is freed, or a window ends, and gives memory and addresses to others. So the guard's
// handle outlives the file, which is there for as long as it is mapped anywhere.

const (
	// maxWindows bounds the windows of one container: each takes some of the host's kernel memory.
	maxWindows = 1 << 14
	// leastWindows is what a container may have of BAR1 however small its share of the card is.
	leastWindows = 16 * quota.MiB
	// smallBAR1 is one in which the driver maps everything in pages of 64 KiB.
	smallBAR1 = 256 * quota.MiB
	// pageLargest is taken for the page of memory whose page is not known.
	pageLargest = 512 * quota.MiB
	// windowLook is how often files of windows that are over are looked at.
	windowLook = time.Second
)

// window is memory mapped for the processor. It is over with the memory's handle, too, and gone with the file. One that is kept is a handle
// only, on memory that a channel writes to, and is over with that (notifiers.go). One that the task has made has none (taskwindows.go).
type window struct {
	entry
	address uint64 // by which the program knows it
	handle  uint32 // the guard's, on the memory; 0: it has none
	gpu     int
	size    quota.Bytes      // of BAR1
	charge  *charge          // kept by the guard's handle; nil: the memory has none
	own     *rmclient.Client // whose that is
	kept    bool             // there is no file
	file    weakRef          // by which the task maps it
	gone    bool             // that is; of who holds windowsMu
}

// checkMapMemory: a window, made by the guard.
func (g *Guard) checkMapMemory(c *trappedCall) plan {
	o := c.call.Outer
	client, memory, length := rm.U32(o, rm.MapMemoryClient), rm.U32(o, rm.MapMemoryMemory), rm.U64(o, rm.MapMemoryLength)
	m, ok := c.acquireObject(client, memory)
	parent, _ := g.account.lookup(client, m.parent)
	device, found := g.account.lookup(client, rm.U32(o, rm.MapMemoryDevice))
	gpu := g.account.gpuOf(client, device.handle)
	if !ok || !m.mappable() || !found || gpu == noGPU || device.kind != rm.ClassDevice && device.kind != rm.ClassSubdevice {
		return answer(c.status(rm.StatusInvalidObjectHandle))
	}
	if g.account.onOtherGPU(client, memory, gpu) || m.kind == rm.ClassUserShared && g.account.gpuOf(client, memory) != gpu {
		return answer(c.denyOtherGPU())
	}
	if !c.roomForReferences(m.charge, 0) {
		return answer(c.denyReferences())
	}
	if c.isUncounted(c.target(), client, memory) {
		return answer(c.denyUnseen())
	}
	if !g.mapFits(client, memory, rm.U64(o, rm.MapMemoryOffset), length) {
		return answer(c.status(rm.StatusInvalidLimit))
	}
	own, err := g.guardClient()
	if err != nil {
		g.logOnce("windowclient", "cannot map memory", "err", err)
		return answer(c.status(rm.StatusInsufficientResources))
	}
	w := &window{handle: own.NewHandle(), gpu: gpu, size: m.windowSize(rm.U64(o, rm.MapMemoryOffset), length, g.bar1[gpu]), own: own}
	if !g.reserveWindow(w, g.windowLimit(gpu)) {
		return answer(c.deny(rm.StatusInsufficientResources, "windows", "denied a mapping: the container has its share of the GPU's BAR1",
			"length", quota.Bytes(length)))
	}
	fd, as, err := c.fileNamed(rm.U32(o, rm.MapMemoryFD), nodeControl, nodeGPU)
	if err != nil {
		g.account.unreserveWindow(w)
		return answer(c.status(rm.StatusInvalidArgument))
	}
	if w.file, err = newWeakRef(fd); err != nil {
		_ = unix.Close(fd)
		g.account.unreserveWindow(w)
		return answer(c.deny(rm.StatusInsufficientResources, "windowfile", "cannot follow the file of a mapping", "err", err))
	}
	return plan{
		ask:    true,
		opened: &opening{c.target(), client, []openRight{{memory, accessDup}}},
		exec: func() unix.Errno {
			g.announceWindow(w, m.charge)
			return g.makeWindow(c, w, m.kind, ownParent(own, gpu, parent.kind), ownParent(own, gpu, device.kind), as)
		},
		cancel: func() {
			g.books.end(w)
			w.charge = nil // nobody has counted it
			w.file.close(g.books)
			g.account.unreserveWindow(w)
		},
		commit: func() {
			if !g.account.addWindow(client, memory, m.charge, w) {
				g.endWindows()
			}
			c.undo = func() { g.endWindow(client, memory, w.address) }
		},
		done: func() { _ = unix.Close(fd) },
	}
}

// mappable reports that an object is memory, or registers that are mapped like it: a second handle on anything else means more.
func (o *object) mappable() bool {
	switch o.kind {
	case rm.ClassVidmem, rm.ClassSysmem, rm.ClassUserShared:
		return true
	}
	return o.host || o.class&0xff == classUsermode&0xff
}

const classUsermode = 0xc361 // VOLTA_USERMODE_A; those of later GPUs end in the same byte: where channels are told of work

// windowSize is what a window into an object takes of BAR1, which is mapped in the memory's own pages, but for a small one
// (kbusDetermineBar1Force64KBMapping_IMPL). Host memory takes none.
func (o *object) windowSize(offset, length uint64, bar1 quota.Bytes) quota.Bytes {
	if o.kind == rm.ClassSysmem || o.kind == rm.ClassUserShared || o.host || o.spilled {
		return 0
	}
	page := pageSmall
	if o.kind == rm.ClassVidmem && (bar1 == 0 || bar1 > smallBAR1) {
		page = pageLargest
		if o.charge != nil && o.charge.page > 0 {
			page = o.charge.page
		}
	}
	end, ok := roundUp(offset+length, page)
	if !ok || offset+length < offset {
		return ^quota.Bytes(0)
	}
	return end - quota.Bytes(offset)/page*page
}

// makeWindow makes the guard's handle, below a parent, and maps it into the task's file. The answer goes to the task's call.
func (g *Guard) makeWindow(c *trappedCall, w *window, kind rm.ClassKind, parent, device, fd uint32) unix.Errno {
	o, own := c.call.Outer, w.own
	var status uint32
	var e unix.Errno
	if kind == rm.ClassUserShared {
		status = g.allocUserShared(own, w.handle, parent)
	} else {
		status, e = g.dupToMap(own, w.handle, parent, rm.U32(o, rm.MapMemoryClient), rm.U32(o, rm.MapMemoryMemory))
	}
	if e != 0 || status != rm.StatusOK {
		c.status(status)
		return e
	}
	call := cloneCall(&c.call)
	rm.PutU32(call.Outer, rm.MapMemoryClient, own.Handle())
	rm.PutU32(call.Outer, rm.MapMemoryDevice, device)
	rm.PutU32(call.Outer, rm.MapMemoryMemory, w.handle)
	rm.PutU32(call.Outer, rm.MapMemoryFD, fd)
	e = g.driver.Exec(own.File(), &call)
	copy(o[rm.MapMemoryAddress:rm.MapMemoryFD], call.Outer[rm.MapMemoryAddress:]) // address, status and flags
	if e != 0 || c.statusWord() != rm.StatusOK {
		_, _ = own.Free(w.handle)
		return e
	}
	w.address = rm.U64(o, rm.MapMemoryAddress)
	return 0
}

// classUserShared is RM_USER_SHARED_DATA (class/cl00de.h): a page of the GPU's that all its users map, to read. The driver counts each
// further handle on an object of this class for good (memCopyConstruct_IMPL adds to MEMORY_DESCRIPTOR.Allocated, a byte, and
// gpushareddataDestruct_IMPL takes nothing off): after 255 nobody on the machine can map the page any more, and no CUDA program starts on
// that GPU until the driver is loaded anew. So nobody has such a handle, and for a window the guard makes an object of its own, for which
// the driver measures nothing.
const classUserShared = 0xde

func (g *Guard) allocUserShared(own *rmclient.Client, handle, parent uint32) (status uint32) {
	class, _ := g.abi.Class(classUserShared)
	if _, err := own.AllocAs(handle, parent, classUserShared, make([]byte, class.ParamsSize)); err != nil {
		g.logOnce("usershared", "cannot map the page that all users of the GPU share", "err", err)
		return rm.StatusInsufficientResources
	}
	return rm.StatusOK
}

// dupToMap makes a handle of the guard's own on memory that it is about to map. What a handle of the container's is on only the driver
// knows where the task has made it, or somebody that the guard does not know of: by RM_ALLOC_MEMORY everybody may have an object for all of
// the GPU's registers (class 0x3f), which the driver maps for whom was root when he made his client (memMap_IMPL), as the guard was.
func (g *Guard) dupToMap(own *rmclient.Client, handle, parent, client, memory uint32) (status uint32, e unix.Errno) {
	if status, e = own.DupAs(handle, parent, client, memory); e != 0 || status != rm.StatusOK {
		return status, e
	}
	id := g.classOf(own.File(), own.Handle(), handle)
	class, _ := g.abi.Class(id)
	if is := (&object{class: id, kind: class.Kind, host: id == classOSDescriptor}); !is.mappable() {
		g.logOnce("notmemory", "denied a mapping of what is no memory", "class", rm.ClassName(id))
		g.stats.denied.Add(1)
		_, _ = own.Free(handle)
		return rm.StatusInvalidObjectHandle, 0
	}
	return status, 0
}

// announceWindow has the books know of a window before the driver does: the file shows the memory from then on, whoever is told. The next
// guard has it as one whose memory's handle is gone.
func (g *Guard) announceWindow(w *window, ch *charge) {
	if g.books == nil {
		return
	}
	w.charge = ch // addWindow counts it
	g.books.note(w)
	g.books.commit(nil)
}

// ownParent is the guard's device of a GPU, or the subdevice.
func ownParent(own *rmclient.Client, gpu int, kind rm.ClassKind) uint32 {
	if kind == rm.ClassSubdevice {
		return own.Subdevice(gpu)
	}
	return own.Device(gpu)
}

// windowLimit is the container's share of a GPU's BAR1: that of the card's memory.
func (g *Guard) windowLimit(gpu int) quota.Bytes {
	u, memory := g.account.usage(gpu), g.cfg.GPUs[gpu].Memory
	if u.native || memory == 0 {
		return ^quota.Bytes(0)
	}
	hi, lo := bits.Mul64(uint64(g.bar1[gpu]), uint64(min(u.limit, memory)))
	share, _ := bits.Div64(hi, lo, uint64(memory))
	return max(quota.Bytes(share), leastWindows)
}

const controlFBInfoV2 = 0x20801303 // NV2080_CTRL_CMD_FB_GET_INFO_V2

// bar1Size asks the driver how large a GPU's BAR1 is; 0: it does not say.
func (g *Guard) bar1Size(own *rmclient.Client, sub uint32) quota.Bytes {
	info, ok := g.abi.Control(controlFBInfoV2)
	if !ok {
		return 0
	}
	p := make([]byte, info.Size)
	rm.PutU32(p, rm.FBInfoCount, 1)
	rm.PutU32(p, rm.FBInfoList, rm.FBIndexBAR1Size)
	if s, e := own.Control(sub, controlFBInfoV2, p); e != 0 || s != rm.StatusOK {
		return 0
	}
	return quota.Bytes(rm.U32(p, rm.FBInfoList+4)) * quota.KiB
}

// checkUnmapMemory: one of the guard's windows ends; another, which came with RM_ALLOC_MEMORY, the task has made (taskwindows.go).
func (g *Guard) checkUnmapMemory(c *trappedCall) plan {
	o := c.call.Outer
	client, memory, address := rm.U32(o, rm.UnmapMemoryClient), rm.U32(o, rm.UnmapMemoryMemory), rm.U64(o, rm.UnmapMemoryAddress)
	if !g.account.hasWindow(client, memory, address) {
		return pass()
	}
	return plan{ask: true, exec: func() unix.Errno {
		g.endWindow(client, memory, address)
		c.status(rm.StatusOK)
		return 0
	}}
}

// checkUpdateMapping: libcuda tells where it has mapped a window, which is that address from then on.
func (g *Guard) checkUpdateMapping(c *trappedCall) plan {
	o := c.call.Outer
	client, memory, address := rm.U32(o, rm.UpdateMappingClient), rm.U32(o, rm.UpdateMappingMemory), rm.U64(o, rm.UpdateMappingOld)
	if !g.account.hasWindow(client, memory, address) {
		return pass()
	}
	return plan{ask: true, exec: func() unix.Errno {
		g.account.moveWindow(client, memory, address, rm.U64(o, rm.UpdateMappingNew))
		c.status(rm.StatusOK)
		return 0
	}}
}

// endWindow: a window is over.
func (g *Guard) endWindow(client, memory uint32, address uint64) {
	g.account.dropWindow(client, memory, address)
	g.endWindows()
}

// endWindows frees the guard's handles of windows that are over and that nobody can see any more: not as long as the file is open or mapped
// anywhere. Until then it looks again and again. What cannot be freed stays counted.
func (g *Guard) endWindows() {
	g.windowsMu.Lock() // who needs what another thread is freeing waits for it
	defer g.windowsMu.Unlock()
	var freed []*window
	for _, w := range g.account.looseWindows() {
		if w.gone = w.kept || !w.file.alive(g.files.self); !w.gone {
			continue
		}
		if s, e := w.free(); e != 0 || s != rm.StatusOK && s != rm.StatusObjectNotFound { // a guard that was killed has freed it
			g.logOnce("endwindow", "cannot end a mapping", "status", rm.StatusName(s), "errno", e)
			continue
		}
		freed = append(freed, w)
	}
	if g.account.removeGoneWindows() > 0 {
		g.endWindowsLater()
	}
	for _, w := range freed { // when the books have them no more: they name the charge
		g.account.unreserveWindow(w)
		g.account.dropReference(w.charge)
	}
	g.endOldClients()
}

// free frees the guard's handle.
func (w *window) free() (status uint32, e unix.Errno) {
	if w.handle == 0 {
		return rm.StatusOK, 0
	}
	return w.own.Free(w.handle)
}

// endWindowsLater has windows that are over looked at in a while. It takes no lock: the account calls it with its own held.
func (g *Guard) endWindowsLater() {
	if g.windowsPending.CompareAndSwap(false, true) {
		time.AfterFunc(max(windowLook, time.Duration(g.windowsRest.Load())), g.endWindowsAgain)
	}
}

// endWindowsAgain ends windows whose files are closed by now, and rests for longer where there are many.
func (g *Guard) endWindowsAgain() {
	g.windowsPending.Store(false)
	g.windowsRest.Store(int64(backgroundShare * g.chargeTime(g.endWindows)))
}

// reserveWindow takes what a window needs. Before it refuses that it looks whether some are gone unnoticed.
func (g *Guard) reserveWindow(w *window, most quota.Bytes) bool {
	if g.account.reserveWindow(w, most) {
		return true
	}
	g.endWindows()
	return g.account.reserveWindow(w, most)
}

// reserveWindow takes what a window needs. False: it is more than the container may have.
func (a *account) reserveWindow(w *window, most quota.Bytes) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	used := &a.gpus[w.gpu].windows
	if a.windows >= maxWindows || *used > most || w.size > most-*used || *used+w.size < *used {
		return false
	}
	a.windows++
	*used += w.size
	return true
}

func (a *account) unreserveWindow(w *window) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.windows--
	a.gpus[w.gpu].windows -= w.size
	if w.charge != nil {
		w.charge.windows--
	}
}

// addWindow records a window of a memory, which keeps its charge. False: its handle is gone meanwhile, so the window is over.
func (a *account) addWindow(client, memory uint32, ch *charge, w *window) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.chargeWindow(w, ch)
	a.books.note(w) // its address is known by now
	c := a.clients[client]
	if c == nil || c.objects[memory] == nil {
		a.loose = append(a.loose, w)
		return false
	}
	o := c.objects[memory]
	o.windows = append(o.windows, w)
	a.books.note(o)
	return true
}

// keepWindowCharge lets a window of the guard's keep the charge of its memory.
func (a *account) keepWindowCharge(w *window, ch *charge) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.chargeWindow(w, ch)
}

// chargeWindow is keepWindowCharge with the account locked.
func (a *account) chargeWindow(w *window, ch *charge) {
	if w.charge = ch; ch != nil {
		a.countReference(ch, &ch.references, 1)
		ch.windows++
	}
}

// findWindow finds a window by the address that the program knows; -1: it is none of the guard's. The caller holds mu.
func (a *account) findWindow(client, memory uint32, address uint64) (*object, int) {
	c := a.clients[client]
	if c == nil || c.objects[memory] == nil {
		return nil, -1
	}
	o := c.objects[memory]
	return o, slices.IndexFunc(o.windows, func(w *window) bool { return w.handle != 0 && w.address == address })
}

func (a *account) hasWindow(client, memory uint32, address uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, i := a.findWindow(client, memory, address)
	return i >= 0
}

func (a *account) moveWindow(client, memory uint32, from, to uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if o, i := a.findWindow(client, memory, from); i >= 0 {
		o.windows[i].address = to
		a.books.note(o.windows[i])
	}
}

func (a *account) dropWindow(client, memory uint32, address uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if o, i := a.findWindow(client, memory, address); i >= 0 {
		a.loose = append(a.loose, o.windows[i])
		o.windows = slices.Delete(o.windows, i, i+1)
		a.books.note(o)
	}
}

// looseWindows are those that are over and not gone.
func (a *account) looseWindows() []*window {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.loose)
}

// removeGoneWindows returns how many are left.
func (a *account) removeGoneWindows() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.loose = slices.DeleteFunc(a.loose, func(w *window) bool {
		if w.gone {
			a.books.end(w) // before its descriptor is closed
		}
		if w.gone && !w.kept {
			w.file.close(a.books)
		}
		return w.gone
	})
	return len(a.loose)
}

// hasLooseWindowOn says whether a window that is over, and not gone, is on a file of the guard.
func (a *account) hasLooseWindowOn(self, fd int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return hasWindowOn(a.loose, self, fd)
}

func hasWindowOn(list []*window, self, fd int) bool {
	return slices.ContainsFunc(list, func(w *window) bool {
		if w.kept {
			return false
		}
		order, e := w.file.compare(self, fd)
		return e == 0 && order == kcmpEqual
	})
}
