package sim

import (
	"slices"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// space is a UVM address space: one open nvidia-uvm file. What is mapped into it, and the contexts of channels that are registered
// with it, hold device memory past RM_FREE of every handle (uvm_map_external_allocation, nvGpuOpsRetainChannel).
type space struct {
	maps     []mapping
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

// UVM_UNREGISTER_CHANNEL_PARAMS (uvm_ioctl.h before 595).
const (
	uvmChannelSize   = 28 // UVM_UNREGISTER_CHANNEL_PARAMS
	uvmChannelClient = 16
	uvmChannelHandle = 20
	uvmChannelStatus = 24
)

// uvm carries out a call on nvidia-uvm; uvm_unlocked_ioctl compares whole numbers, and knows sizes by them.
func (r *request) uvm() syscall.Errno {
	if r.call.Cmd == rm.UVMUnregisterVASpace {
		return r.uvmStatus(rm.UVMUnregisterSize, rm.UVMUnregisterStatus, r.unregisterVASpace)
	}
	if r.call.Cmd == rm.UVMUnregisterChannel {
		return r.uvmStatus(uvmChannelSize, uvmChannelStatus, r.unregisterChannel)
	}
	form, ok := r.d.abi.UVM(r.call.Cmd)
	if !ok {
		return syscall.ENOTTY
	}
	run := map[uint32]func(rm.UVMForm) uint32{
		rm.UVMMapExternal: r.mapExternal, rm.UVMMapSparse: r.mapSparse, rm.UVMUnmapExternal: r.unmapExternal, rm.UVMFree: r.freeRange,
		rm.UVMRegisterGPUVASpace: r.registerVASpace, rm.UVMRegisterChannel: r.registerChannel,
	}[r.call.Cmd]
	if run == nil {
		return syscall.ENOTTY
	}
	return r.uvmStatus(form.Size, form.Status, func() uint32 { return run(form) })
}

func (r *request) uvmStatus(size, status int, run func() uint32) syscall.Errno {
	if len(r.call.Outer) != size {
		return syscall.EFAULT
	}
	rm.PutU32(r.call.Outer, status, run())
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

// uvmObject finds the object that a call refers to. UVM's own client dups it: for the process that owns it, or if that has opened it
// to everybody (cliresShareCallback_IMPL). The executor is a guard, so the first is never so.
func (r *request) uvmObject(client, handle uint32) (*object, uint32) {
	c := r.d.clients[client]
	if c == nil {
		return nil, rm.StatusInvalidClient
	}
	o := c.objects[handle]
	if o == nil {
		return nil, rm.StatusObjectNotFound
	}
	p := o.shares
	if len(p) == 0 {
		p = c.shares
	}
	if !slices.ContainsFunc(p, func(q policy) bool { return q.kind == shareAll || q.kind == shareToken }) {
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
	o, st := r.uvmObject(client.handle, rm.U32(out, form.Memory))
	if st != rm.StatusOK {
		return st
	}
	offset := rm.U64(out, uvmOffset)
	switch {
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
	page := o.mapPage()
	for _, g := range gpus {
		tables, ok := g.uvmTables(length, page)
		if !ok {
			return rm.StatusNoMemory
		}
		m := mapping{g, base, base + length, o.memory, tables}
		m.hold() // before what was there goes: it may be the same
		r.d.unmap(&r.f.space, g, base, base+length)
		r.f.maps = append(r.f.maps, m)
	}
	return rm.StatusOK
}

// mapPage is the size of the pages that a mapping needs tables for; 0 for the first of device memory, whose tables come out of what the driver
// has put aside.
func (o *object) mapPage() uint64 {
	switch m := o.memory; {
	case m == nil:
		return uvmPage
	case m.mapped == 0:
		return 0
	case m.attr == attrPageHuge:
		return bigPage
	}
	return smallPage
}

// uvmTables takes the page tables of a mapping from a card.
func (g *gpu) uvmTables(length, page uint64) (*memory, bool) {
	if page == 0 {
		return nil, true
	}
	t := &memory{gpu: g, size: quota.Bytes(rm.UVMTables(length, page)), hidden: true}
	return t, g.hide(t.size)
}

// hold and drop count a mapping as a reference on what it has.
func (m mapping) hold() {
	if m.memory != nil {
		m.memory.refs++
		m.memory.mapped++
	}
	if m.tables != nil {
		m.tables.refs++
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
	case length == 0 || base%smallPage != 0 || length%smallPage != 0 || base+length < base,
		slices.ContainsFunc(r.f.maps, func(m mapping) bool { return m.gpu == g && m.base < base+length && base < m.end }):
		return rm.StatusInvalidArgument
	}
	tables, ok := g.uvmTables(length, smallPage)
	if !ok {
		return rm.StatusNoMemory
	}
	m := mapping{g, base, base + length, nil, tables}
	m.hold()
	r.f.maps = append(r.f.maps, m)
	return rm.StatusOK
}

func (r *request) unmapExternal(form rm.UVMForm) uint32 {
	base, length := rm.U64(r.call.Outer, form.Base), rm.U64(r.call.Outer, form.Length)
	g := r.uvmGPU(uvmOffset)
	if g == nil {
		return rm.StatusInvalidDevice
	}
	if length == 0 || base%uvmPage != 0 || length%uvmPage != 0 || base+length < base {
		return rm.StatusInvalidArgument
	}
	if r.d.unmap(&r.f.space, g, base, base+length) == 0 {
		return rm.StatusInvalidArgument // uvm_unmap_external_in_range: there is no range
	}
	return rm.StatusOK
}

// freeRange frees what begins at an address, on all GPUs. Ranges themselves (UVM_CREATE_EXTERNAL_RANGE) are not modelled.
func (r *request) freeRange(form rm.UVMForm) uint32 {
	base, found := rm.U64(r.call.Outer, form.Base), false
	for _, m := range slices.Clone(r.f.maps) {
		if m.base == base {
			r.d.unmap(&r.f.space, m.gpu, m.base, m.end)
			found = true
		}
	}
	if !found {
		return rm.StatusInvalidArgument
	}
	return rm.StatusOK
}

// unmap takes the addresses from base to end from a GPU's mappings and counts those that it touched. What sticks out stays, and
// each piece holds the memory (uvm_ext_gpu_map_split).
func (d *Driver) unmap(s *space, g *gpu, base, end uint64) int {
	touched := 0
	var left []mapping
	for _, m := range s.maps {
		if m.gpu != g || m.end <= base || m.base >= end {
			left = append(left, m)
			continue
		}
		touched++
		d.pull(m.memory)
		for _, rest := range []mapping{{g, m.base, min(m.end, base), m.memory, m.tables}, {g, max(m.base, end), m.end, m.memory, m.tables}} {
			if rest.base < rest.end {
				rest.hold()
				left = append(left, rest)
			}
		}
		d.drop(m)
	}
	s.maps = left
	return touched
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

func (r *request) registerVASpace(form rm.UVMForm) uint32 {
	if r.uvmGPU(0) == nil {
		return rm.StatusInvalidDevice
	}
	o, st := r.uvmObject(rm.U32(r.call.Outer, form.Client), rm.U32(r.call.Outer, form.Client+4))
	if st == rm.StatusOK && o.class != classVASpace {
		st = rm.StatusInvalidArgument
	}
	return st
}

// unregisterVASpace ends an address space on a GPU: its channels, then all that is mapped there.
func (r *request) unregisterVASpace() uint32 {
	g := r.uvmGPU(rm.UVMUnregisterGPU)
	if g == nil {
		return rm.StatusInvalidDevice
	}
	r.d.stopSpace(&r.f.space, g)
	r.d.unmap(&r.f.space, g, 0, ^uint64(0))
	r.d.releaseChannels(&r.f.space, g)
	return rm.StatusOK
}

// registerChannel retains a channel. The driver does not look whose it is (nvGpuOpsRetainChannel).
func (r *request) registerChannel(form rm.UVMForm) uint32 {
	name := channelName{rm.U32(r.call.Outer, form.Client), rm.U32(r.call.Outer, form.Client+4)}
	g, c := r.uvmGPU(0), r.d.clients[name.client]
	switch {
	case g == nil:
		return rm.StatusInvalidDevice
	case c == nil:
		return rm.StatusInvalidClient
	}
	o := c.objects[name.channel]
	if o == nil || o.channel == nil || o.gpu != g {
		return rm.StatusObjectNotFound
	}
	if _, ok := r.f.channels[name]; ok {
		return rm.StatusInvalidArgument
	}
	var context *memory
	if o.channel.group != nil {
		context = o.channel.group.group.context
	}
	if context != nil {
		context.refs++
	}
	if r.f.channels == nil {
		r.f.channels = map[channelName]retained{}
	}
	r.f.channels[name] = retained{g, context}
	return rm.StatusOK
}

func (r *request) unregisterChannel() uint32 {
	name := channelName{rm.U32(r.call.Outer, uvmChannelClient), rm.U32(r.call.Outer, uvmChannelHandle)}
	ch, ok := r.f.channels[name]
	if !ok {
		return rm.StatusObjectNotFound
	}
	delete(r.f.channels, name)
	if ch.context != nil {
		r.d.unref(ch.context)
	}
	return rm.StatusOK
}

// releaseChannels lets go of the channels that are registered on a GPU; on all if it is nil.
func (d *Driver) releaseChannels(s *space, g *gpu) {
	for name, ch := range s.channels {
		if g != nil && ch.gpu != g {
			continue
		}
		if ch.context != nil {
			d.unref(ch.context)
		}
		delete(s.channels, name)
	}
}

// endSpace is the last close of the file.
func (d *Driver) endSpace(s *space) {
	for _, g := range d.gpus {
		d.stopSpace(s, g)
		d.unmap(s, g, 0, ^uint64(0))
	}
	d.releaseChannels(s, nil)
}
