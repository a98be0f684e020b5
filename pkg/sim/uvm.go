// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"cmp"
	"slices"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// space is a UVM address space: one open nvidia-uvm file. What is mapped into it, and the contexts of channels that are registered
// with it, hold device memory past RM_FREE of every handle (uvm_map_external_allocation, nvGpuOpsRetainChannel).
type space struct {
	ranges   []mapping // of addresses; mappings are in these. A region's page tables are its own
	groups   uint64    // range groups that were made
	maps     []mapping
	vaspaces map[*gpu]*vaspace // that are registered
	channels map[channelName]retained
}

// retained is what a registered channel keeps.
type retained struct {
	gpu     *gpu
	context *memory // nil: its group has none
}

// mapping is a piece of addresses of one GPU, with memory behind it.
type mapping struct {
	gpu    *gpu
	base   uint64
	end    uint64
	memory *memory // nil: host memory, or sparse
	tables *memory // page tables; nil: out of what the driver has put aside
	page   uint64  // of the mapping: it can be cut at multiples of that only
}

type channelName struct{ client, channel uint32 }

// Of UVM_MAP_EXTERNAL_ALLOCATION_PARAMS: the attributes of each GPU, and how many are meant, which stands before rmCtrlFd.
const (
	uvmOffset         = 16
	uvmAttributes     = 24
	uvmAttributesSize = 36
	uvmCountBefore    = 8
	uvmPage           = 4096
)

// uvm carries out a call on nvidia-uvm; uvm_unlocked_ioctl compares whole numbers, and knows sizes by them.
func (r *request) uvm() syscall.Errno {
	form, ok := r.d.abi.UVM(r.call.Cmd)
	if !ok {
		return syscall.ENOTTY
	}
	done := func(rm.UVMForm) uint32 { return rm.StatusOK }
	run := map[uint32]func(rm.UVMForm) uint32{
		rm.UVMMapExternal: r.mapExternal, rm.UVMMapSparse: r.mapSparse, rm.UVMUnmapExternal: r.unmapExternal, rm.UVMFree: r.freeRange,
		rm.UVMInitialize: done, rm.UVMCleanUpZombies: done, // the driver has no managed memory
		rm.UVMCreateRangeGroup: r.createGroup, rm.UVMDestroyRangeGroup: done,
		rm.UVMCreateExternal: r.createExternal, rm.UVMMapDynamicRegion: r.mapRegion, rm.UVMAllocSemaphorePool: r.allocPool,
		rm.UVMRegisterGPU: r.registerGPU, rm.UVMRegisterGPUVASpace: r.registerVASpace, rm.UVMUnregisterVASpace: r.unregisterVASpace,
		rm.UVMUnregisterGPU:   r.unregisterGPU,
		rm.UVMRegisterChannel: r.registerChannel, rm.UVMUnregisterChannel: r.unregisterChannel,
	}[r.call.Cmd]
	if run == nil {
		return syscall.ENOTTY
	}
	if len(r.call.Outer) != form.Size {
		return syscall.EFAULT
	}
	rm.PutU32(r.call.Outer, form.Status, run(form))
	return 0
}

// uvmGPU finds the GPU of a UUID.
func (r *request) uvmGPU(off int) *gpu {
	for _, g := range r.d.gpus {
		if id, err := uuidBytes(g.UUID); err == nil && slices.Equal(id[:], r.call.Outer[off:off+len(id)]) && r.hasNode(g) {
			return g
		}
	}
	return nil
}

// uvmObject finds the object that a call refers to. UVM's own client dups it, if the object's policies let it
// (NV04_DUP_HANDLE_FLAGS_REJECT_KERNEL_DUP_PRIVILEGE).
func (r *request) uvmObject(client, handle uint32) (*object, uint32) {
	c := r.d.clients[client]
	if c == nil {
		return nil, rm.StatusInvalidClient
	}
	o := c.objects[handle]
	if o == nil {
		return nil, rm.StatusObjectNotFound
	}
	if o.rights(nil)&accessDup == 0 {
		return nil, rm.StatusInsufficientPermissions
	}
	return o, rm.StatusOK
}

func (r *request) mapExternal(form rm.UVMForm) uint32 {
	out := r.call.Outer
	base, length := rm.U64(out, form.Base), rm.U64(out, form.Length)
	if length == 0 || base%uvmPage != 0 || length%uvmPage != 0 || base+length < base {
		return rm.StatusInvalidArgument
	}
	// The control file must be the client's.
	ctl, client := r.d.files[FileID(rm.U32(out, form.FD))], r.d.clients[rm.U32(out, form.Client)]
	if ctl == nil || ctl.kind != Control || ctl.session != r.s.id || client == nil || client.file != ctl.owner() {
		return rm.StatusInvalidClient
	}
	o, st := r.uvmObject(client.handle, rm.U32(out, form.Object))
	if st != rm.StatusOK {
		return st
	}
	offset := rm.U64(out, uvmOffset)
	switch {
	case o.class == classUserShared:
		o.gpu.userShared.ref() // as by any other dup
	case o.memory == nil && o.class != classMemorySystem && o.class != classOSDescriptor:
		return rm.StatusInvalidArgument
	case o.memory != nil && (offset > uint64(o.memory.size) || length > uint64(o.memory.size)-offset):
		return rm.StatusInvalidArgument
	}
	count := rm.U64(out, form.FD-uvmCountBefore)
	if count == 0 || count > uint64((form.FD-uvmCountBefore-uvmAttributes)/uvmAttributesSize) {
		return rm.StatusInvalidArgument
	}
	var gpus []*gpu
	for i := range int(count) {
		g := r.uvmGPU(uvmAttributes + i*uvmAttributesSize)
		if g == nil || slices.Contains(gpus, g) {
			return rm.StatusInvalidDevice
		}
		gpus = append(gpus, g)
	}
	if !r.f.rangeFor(base, base+length) {
		return rm.StatusInvalidAddress
	}
	page := o.mapPage(base, length, offset)
	for _, g := range gpus {
		tables, ok := g.uvmTables(length, page)
		if !ok {
			return rm.StatusNoMemory
		}
		m := mapping{g, base, base + length, o.memory, tables, o.ptePage(base, length, offset)}
		m.hold() // before what was there goes: it may be the same
		if st := r.d.unmap(&r.f.space, g, base, base+length); st != rm.StatusOK {
			r.d.drop(m)
			return st
		}
		r.f.maps = append(r.f.maps, m)
	}
	return rm.StatusOK
}

func (r *request) createGroup(form rm.UVMForm) uint32 {
	r.f.groups++
	rm.PutU64(r.call.Outer, form.Base, r.f.groups)
	return rm.StatusOK
}

// newRange makes a range of addresses, with page tables for a page on each of some GPUs.
func (r *request) newRange(form rm.UVMForm, gpus ...*gpu) uint32 {
	base, length := rm.U64(r.call.Outer, form.Base), rm.U64(r.call.Outer, form.Length)
	if base == 0 || length == 0 || base%uvmPage != 0 || length%uvmPage != 0 || base+length < base {
		return rm.StatusInvalidAddress
	}
	if slices.ContainsFunc(r.f.ranges, func(m mapping) bool { return base < m.end && base+length > m.base }) {
		return rm.StatusAddressInUse
	}
	ranges := []mapping{{base: base, end: base + length}}
	for i, g := range gpus {
		t := &memory{gpu: g, size: rm.UVMPageTables, hidden: true}
		if !g.reserveHidden(t.size) {
			for _, m := range ranges {
				r.d.drop(m)
			}
			return rm.StatusNoMemory
		}
		if i > 0 {
			ranges = append(ranges, ranges[0])
		}
		ranges[i].gpu, ranges[i].tables = g, t
		ranges[i].hold()
	}
	r.f.ranges = append(r.f.ranges, ranges...)
	return rm.StatusOK
}

func (r *request) createExternal(form rm.UVMForm) uint32 { return r.newRange(form) }

// mapRegion is UVM_MAP_DYNAMIC_PARALLELISM_REGION.
func (r *request) mapRegion(form rm.UVMForm) uint32 {
	g := r.uvmGPU(uvmOffset)
	if g == nil {
		return rm.StatusInvalidDevice
	}
	if length := rm.U64(r.call.Outer, form.Length); length != uvmPage && length != smallPage && length != bigPage {
		return rm.StatusInvalidAddress
	}
	return r.newRange(form, g)
}

// allocPool is UVM_ALLOC_SEMAPHORE_POOL: host memory, mapped on all GPUs. That a mapping needs a registered GPU is not modelled.
func (r *request) allocPool(form rm.UVMForm) uint32 {
	var gpus []*gpu
	for _, g := range r.d.gpus {
		if r.hasNode(g) {
			gpus = append(gpus, g)
		}
	}
	return r.newRange(form, gpus...)
}

// rangeFor finds the range around some addresses. A program makes it first (UVM_CREATE_EXTERNAL_RANGE); where it has not, the first mapping
// does. False: they are in none as a whole.
func (s *space) rangeFor(base, end uint64) bool {
	for _, r := range s.ranges {
		if base < r.end && end > r.base {
			return base >= r.base && end <= r.end
		}
	}
	s.ranges = append(s.ranges, mapping{base: base, end: end})
	return true
}

// mapPage is the size of the pages that a mapping needs tables for; 0 for the first of device memory, whose tables come out of what the
// driver has put aside. What is not aligned to a page is mapped in smaller ones.
func (o *object) mapPage(base, length, offset uint64) uint64 {
	low := base | length | offset
	low &= -low
	switch m := o.memory; {
	case low < smallPage:
		return uvmPage
	case m != nil && (m.mapped == 0 && length < bigPage || m.mapped > 0 && low < bigPage):
		return smallPage
	case m == nil:
		return uvmPage
	case m.mapped == 0:
		return 0
	case m.attr == attrPageHuge:
		return bigPage
	}
	return smallPage
}

// ptePage is the size of the pages of a mapping: what all of it is aligned to, and no larger than the memory's.
func (o *object) ptePage(base, length, offset uint64) uint64 {
	page := uint64(uvmPage)
	if o.memory != nil {
		if page = smallPage; o.memory.attr == attrPageHuge {
			page = bigPage
		}
	}
	low := base | length | offset | page
	return max(low&-low, uvmPage)
}

// uvmTables takes the page tables of a mapping from a card.
func (g *gpu) uvmTables(length, page uint64) (*memory, bool) {
	if page == 0 {
		return nil, true
	}
	t := &memory{gpu: g, size: quota.Bytes(rm.UVMTables(length, page)), hidden: true}
	return t, g.reserveHidden(t.size)
}

// hold and drop count a mapping as a reference on what it has.
func (m mapping) hold() {
	if m.memory != nil {
		m.memory.ref()
		m.memory.mapped++
	}
	if m.tables != nil {
		m.tables.ref()
	}
}

func (d *Driver) drop(m mapping) {
	if m.memory != nil {
		m.memory.mapped--
		d.unref(m.memory)
	}
	if m.tables != nil {
		d.unref(m.tables)
	}
}

// mapSparse is UVM_MAP_EXTERNAL_SPARSE: page tables in pages of 64 KiB, and nothing behind them.
func (r *request) mapSparse(form rm.UVMForm) uint32 {
	base, length := rm.U64(r.call.Outer, form.Base), rm.U64(r.call.Outer, form.Length)
	g := r.uvmGPU(uvmOffset)
	switch {
	case g == nil:
		return rm.StatusInvalidDevice
	case length == 0 || base%smallPage != 0 || length%smallPage != 0 || base+length < base:
		return rm.StatusInvalidAddress
	}
	if !r.f.rangeFor(base, base+length) {
		return rm.StatusInvalidAddress
	}
	tables, ok := g.uvmTables(length, smallPage)
	if !ok {
		return rm.StatusNoMemory
	}
	m := mapping{g, base, base + length, nil, tables, smallPage}
	m.hold()
	if st := r.d.unmap(&r.f.space, g, base, base+length); st != rm.StatusOK {
		r.d.drop(m)
		return st
	}
	r.f.maps = append(r.f.maps, m)
	return rm.StatusOK
}

func (r *request) unmapExternal(form rm.UVMForm) uint32 {
	base, length := rm.U64(r.call.Outer, form.Base), rm.U64(r.call.Outer, form.Length)
	if length == 0 || base%uvmPage != 0 || length%uvmPage != 0 || base+length < base {
		return rm.StatusInvalidAddress
	}
	if !slices.ContainsFunc(r.f.ranges, func(m mapping) bool { return base >= m.base && base+length <= m.end }) {
		return rm.StatusInvalidAddress
	}
	g := r.uvmGPU(uvmOffset)
	if g == nil {
		return rm.StatusInvalidDevice
	}
	return r.d.unmap(&r.f.space, g, base, base+length)
}

// freeRange frees the range that begins at an address, with all that is mapped there. Before 590 the caller must know where it ends.
func (r *request) freeRange(form rm.UVMForm) uint32 {
	base := rm.U64(r.call.Outer, form.Base)
	i := slices.IndexFunc(r.f.ranges, func(m mapping) bool { return m.base == base })
	if i < 0 {
		return rm.StatusInvalidAddress
	}
	end := r.f.ranges[i].end
	if form.Length >= 0 && base+rm.U64(r.call.Outer, form.Length) != end {
		return rm.StatusInvalidAddress
	}
	r.f.ranges = slices.DeleteFunc(r.f.ranges, func(m mapping) bool {
		if m.base == base {
			r.d.drop(m)
		}
		return m.base == base
	})
	for _, g := range r.d.gpus {
		_ = r.d.unmap(&r.f.space, g, base, end) // mappings do not reach beyond their range, so none is cut
	}
	return rm.StatusOK
}

// unmap takes the addresses from base to end from a GPU's mappings, in their order. What sticks out stays, and each piece holds the memory
// (uvm_ext_gpu_map_split). A mapping that cannot be cut there ends it; what was unmapped by then is.
func (d *Driver) unmap(s *space, g *gpu, base, end uint64) uint32 {
	slices.SortFunc(s.maps, func(x, y mapping) int { return cmp.Compare(x.base, y.base) })
	status := uint32(rm.StatusOK)
	var left []mapping
	for _, m := range s.maps {
		before, after := m, m
		before.end, after.base = min(m.end, base), max(m.base, end)
		cut := before.base < before.end && base%m.page != 0 || after.base < after.end && end%m.page != 0
		switch {
		case m.gpu != g || m.end <= base || m.base >= end || status != rm.StatusOK:
			left = append(left, m)
			continue
		case cut:
			status = rm.StatusInvalidAddress
			left = append(left, m)
			continue
		}
		d.pull(m.memory)
		for _, rest := range []mapping{before, after} {
			if rest.base < rest.end {
				rest.hold()
				left = append(left, rest)
			}
		}
		d.drop(m)
	}
	s.maps = left
	return status
}

// pull is told that memory loses a mapping. Every kernel of the process that allocated it uses all that it has: if one runs, that is an MMU
// fault, which ends its group's work.
func (d *Driver) pull(m *memory) {
	if m == nil {
		return
	}
	for t := range m.gpu.engine.groups {
		if t.PID() == int(m.pid) && t.Pending() && !t.Paused() {
			d.faults++
			t.Stop()
		}
	}
}

// stopSpace stops the channels of those whose memory is mapped, as UVM does before it ends an address space.
func (d *Driver) stopSpace(s *space, g *gpu) {
	for _, m := range s.maps {
		for t := range g.engine.groups {
			if m.gpu == g && m.memory != nil && t.PID() == int(m.memory.pid) {
				t.Stop()
			}
		}
	}
}

// registerGPU takes any GPU of the node: UVM does not look whether the caller may open it.
func (r *request) registerGPU(rm.UVMForm) uint32 {
	id := r.call.Outer[rm.UVMGPU : rm.UVMGPU+16]
	if !slices.ContainsFunc(r.d.gpus, func(g *gpu) bool { u, err := uuidBytes(g.UUID); return err == nil && slices.Equal(u[:], id) }) {
		return rm.StatusGPUNotFound
	}
	return rm.StatusOK
}

// registerVASpace takes an RM address space for a GPU. UVM looks for neither the control file nor the process that names it: handles that
// do not exist are told from those that are not open to it (nvGpuOpsDupAddressSpace).
func (r *request) registerVASpace(form rm.UVMForm) uint32 {
	g := r.uvmGPU(rm.UVMGPU)
	if g == nil || r.f.vaspaces[g] != nil {
		return rm.StatusInvalidDevice
	}
	o, st := r.uvmObject(rm.U32(r.call.Outer, form.Client), rm.U32(r.call.Outer, form.Object))
	switch {
	case st != rm.StatusOK:
		return st
	case o.class != classVASpace:
		return rm.StatusInvalidObject
	case o.gpu != g:
		return statusOtherDevice
	case o.vaspace.taken:
		return rm.StatusNotSupported // nvGpuOpsSetPageDirectory
	}
	o.vaspace.taken = true
	if r.f.vaspaces == nil {
		r.f.vaspaces = map[*gpu]*vaspace{}
	}
	r.f.vaspaces[g] = o.vaspace
	return rm.StatusOK
}

// unregisterVASpace ends an address space on a GPU: its channels, then all that is mapped there. That a mapping needs a registered address
// space is not modelled.
func (r *request) unregisterVASpace(rm.UVMForm) uint32 {
	g := r.uvmGPU(rm.UVMGPU)
	if g == nil || r.f.vaspaces[g] == nil && !slices.ContainsFunc(r.f.maps, func(m mapping) bool { return m.gpu == g }) {
		return rm.StatusInvalidDevice
	}
	r.d.endVASpace(&r.f.space, g)
	return rm.StatusOK
}

// unregisterGPU does that too, where there is one. That a GPU must be registered first is not modelled.
func (r *request) unregisterGPU(rm.UVMForm) uint32 {
	g := r.uvmGPU(rm.UVMGPU)
	if g == nil {
		return rm.StatusInvalidDevice
	}
	r.d.endVASpace(&r.f.space, g)
	return rm.StatusOK
}

func (d *Driver) endVASpace(s *space, g *gpu) {
	d.stopSpace(s, g)
	_ = d.unmap(s, g, 0, ^uint64(0)) // none is cut
	d.releaseChannels(s, g)
	for i, m := range s.ranges { // the range stays
		if m.gpu == g {
			d.drop(m)
			s.ranges[i].tables = nil
		}
	}
	if v := s.vaspaces[g]; v != nil {
		v.taken = false
		delete(s.vaspaces, g)
	}
}

// registerChannel retains a channel of the address space. The driver does not look whose it is (nvGpuOpsRetainChannel).
func (r *request) registerChannel(form rm.UVMForm) uint32 {
	name := channelName{rm.U32(r.call.Outer, form.Client), rm.U32(r.call.Outer, form.Object)}
	g, c := r.uvmGPU(rm.UVMGPU), r.d.clients[name.client]
	switch {
	case g == nil || r.f.vaspaces[g] == nil:
		return rm.StatusInvalidDevice
	case c == nil:
		return rm.StatusInvalidClient
	}
	o := c.objects[name.channel]
	if o == nil || o.channel == nil {
		return rm.StatusInvalidObjectHandle
	}
	if _, ok := r.f.channels[name]; ok || o.channel.vaspace != r.f.vaspaces[g] {
		return statusInvalidChannel
	}
	kept := retained{gpu: g}
	if o.channel.group != nil {
		if o.channel.group.rights(nil)&accessDup == 0 { // UVM dups it (nvGpuOpsGetChannelTsgInfo)
			return rm.StatusInsufficientPermissions
		}
		kept.context = o.channel.group.group.context
	}
	if kept.context != nil {
		kept.context.ref()
	}
	g.kept++
	if r.f.channels == nil {
		r.f.channels = map[channelName]retained{}
	}
	r.f.channels[name] = kept
	return rm.StatusOK
}

func (r *request) unregisterChannel(form rm.UVMForm) uint32 {
	name := channelName{rm.U32(r.call.Outer, form.Client), rm.U32(r.call.Outer, form.Object)}
	kept, ok := r.f.channels[name]
	if !ok {
		return statusInvalidChannel
	}
	delete(r.f.channels, name)
	r.d.release(kept)
	return rm.StatusOK
}

func (d *Driver) release(kept retained) {
	kept.gpu.kept--
	if kept.context != nil {
		d.unref(kept.context)
	}
}

// releaseChannels lets go of the channels that are registered on a GPU.
func (d *Driver) releaseChannels(s *space, g *gpu) {
	for name, kept := range s.channels {
		if kept.gpu == g {
			delete(s.channels, name)
			d.release(kept)
		}
	}
}

// endSpace is the last close of the file.
func (d *Driver) endSpace(s *space) {
	for _, g := range d.gpus {
		d.endVASpace(s, g)
	}
}

// statusOtherDevice is NV_ERR_OTHER_DEVICE_FOUND.
const statusOtherDevice = 0x5a
