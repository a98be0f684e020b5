// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Page tables come out of a card's memory and no allocation shows them. As in RM a range of addresses has them when it is made, unless it
// is lazy, and a mapping takes them before its length is compared with the memory.

// vaSpaceTables is what an address space takes.
const vaSpaceTables = 16 * quota.KiB

// dmaMapping is memory in a range of addresses (RM_MAP_MEMORY_DMA).
type dmaMapping struct {
	mapper, memory *object
	address        uint64
	tables         quota.Bytes
	kernel         *window // the kernel's own; nil: none
}

func (m *dmaMapping) drop() {
	delete(m.mapper.maps, m.address)
	delete(m.memory.mapped, m)
	if m.kernel != nil {
		m.kernel.end()
	}
	m.mapper.gpu.release(m.tables + m.mapper.gpu.pool) // freed tables let the pool go too (rmMemPoolTrim)
	m.mapper.gpu.pool = 0
}

// rangeWanted is what a program says of a range of addresses.
type rangeWanted struct {
	space, flags, attr, attr2 uint32
	size, at                  uint64
}

// makeRange gives a range of addresses its place and its tables (virtmemConstruct_IMPL).
func (d *Driver) makeRange(o, parent *object, want rangeWanted) uint32 {
	granted, any, ok := rm.VirtualSize(want.size, want.attr, want.attr2)
	if want.size == 0 || !ok {
		return rm.StatusInvalidArgument
	}
	o.size, o.space = quota.Bytes(granted), parent.client.objects[want.space]
	if o.space == nil && want.space != 0 {
		return rm.StatusObjectNotFound
	}
	if want.flags&rm.MemoryFlagFixed != 0 {
		if st := d.placeAt(o, parent, want.at); st != rm.StatusOK {
			return st
		}
	}
	if want.flags&rm.MemoryFlagSparse == 0 && want.flags&(rm.MemoryFlagLazy|rm.MemoryFlagExternal) != 0 {
		return rm.StatusOK
	}
	return o.takeTables(parent.gpu, quota.Bytes(rm.PagePool(granted, any)))
}

// placeAt finds a range its place, unless another is there (eheapAlloc).
func (d *Driver) placeAt(o, parent *object, at uint64) uint32 {
	var s *vaspace
	if o.space != nil {
		s = o.space.vaspace
	} else {
		device := parent
		for device.class != classDevice {
			device = device.parent
		}
		var st uint32
		if s, st = d.deviceSpace(device); st != rm.StatusOK {
			return st
		}
	}
	if s == nil {
		return rm.StatusInvalidObjectHandle
	}
	for x := range s.fixed {
		if at < x.address+uint64(x.size) && x.address < at+uint64(o.size) {
			return rm.StatusNoMemory
		}
	}
	o.within, o.address = s, at
	return rm.StatusOK
}

// takeTables gives an object page tables. They live as long as it has a handle.
func (o *object) takeTables(g *gpu, size quota.Bytes) uint32 {
	if !g.reserveHidden(size) {
		return rm.StatusNoMemory
	}
	o.tables = &memory{gpu: g, size: size, refs: 1, hidden: true}
	return rm.StatusOK
}

// mapDMA is RM_MAP_MEMORY_DMA.
func (r *request) mapDMA() syscall.Errno {
	out := r.call.Outer
	form, ok := r.d.abi.MapDMA(len(out))
	if !ok || r.f.kind != Control {
		return syscall.EINVAL
	}
	address, st := r.addMapping(rm.U64(out, rm.DMAMapOffset), rm.U64(out, form.Length))
	rm.PutU64(out, form.Address, address)
	rm.PutU32(out, form.Status, st)
	return 0
}

func (r *request) addMapping(offset, length uint64) (address uint64, status uint32) {
	c, st := r.client(rm.U32(r.call.Outer, rm.DMAClient))
	if st != rm.StatusOK {
		return 0, st
	}
	mapper, memory := c.objects[rm.U32(r.call.Outer, rm.DMAMapper)], c.objects[rm.U32(r.call.Outer, rm.DMAMemory)]
	device := c.objects[rm.U32(r.call.Outer, rm.DMADevice)]
	if mapper == nil || memory == nil || device == nil || device.gpu == nil {
		return 0, rm.StatusObjectNotFound
	}
	m := &dmaMapping{mapper: mapper, memory: memory, address: r.d.nextAddress}
	if mapper.tables == nil {
		m.tables = quota.Bytes(rm.PageTables(length, false))
	}
	g := mapper.gpu
	if !g.reserveHidden(m.tables) {
		return 0, rm.StatusNoMemory
	}
	if size := uint64(memory.size); offset > size || length > size-offset || length == 0 {
		g.pool += m.tables // which stay
		return 0, rm.StatusInvalidLimit
	}
	if rm.U32(r.call.Outer, rm.DMAFlags)&rm.DMAFlagKernel != 0 { // _virtmemAllocKernelMapping
		if m.kernel, st = memory.kernelWindow(length); st != rm.StatusOK {
			g.release(m.tables)
			return 0, st
		}
	}
	r.d.nextAddress += (length + 1<<21) &^ (1<<21 - 1)
	if mapper.maps == nil {
		mapper.maps = map[uint64]*dmaMapping{}
	}
	if memory.mapped == nil {
		memory.mapped = map[*dmaMapping]bool{}
	}
	mapper.maps[m.address], memory.mapped[m] = m, true
	return m.address, rm.StatusOK
}

// unmapDMA is RM_UNMAP_MEMORY_DMA, of whole mappings.
func (r *request) unmapDMA() syscall.Errno {
	out := r.call.Outer
	form, ok := r.d.abi.UnmapDMA(len(out))
	if !ok || r.f.kind != Control {
		return syscall.EINVAL
	}
	rm.PutU32(out, form.Status, rm.StatusObjectNotFound)
	c, st := r.client(rm.U32(out, rm.DMAClient))
	if st != rm.StatusOK {
		rm.PutU32(out, form.Status, st)
		return 0
	}
	if o := c.objects[rm.U32(out, rm.DMAMapper)]; o != nil && o.maps[rm.U64(out, form.Address)] != nil {
		o.maps[rm.U64(out, form.Address)].drop()
		rm.PutU32(out, form.Status, rm.StatusOK)
	}
	return 0
}

// osEvent joins a client and the number of a descriptor. The driver checks neither (allocate_os_event in osapi.c).
type osEvent struct {
	client, number uint32
	file           *file
}

func (r *request) allocOSEvent() syscall.Errno {
	out := r.call.Outer
	if len(out) != rm.OSEventSize {
		return syscall.EINVAL
	}
	e := osEvent{rm.U32(out, rm.OSEventClient), rm.U32(out, rm.OSEventFD), r.f}
	rm.PutU32(out, rm.OSEventStatus, rm.StatusOK)
	for _, x := range r.d.events {
		if x.client == e.client && x.number == e.number {
			rm.PutU32(out, rm.OSEventStatus, rm.StatusInsufficientResources)
			return 0
		}
	}
	r.d.events = append(r.d.events, e)
	return 0
}

func (r *request) freeOSEvent() syscall.Errno {
	out := r.call.Outer
	if len(out) != rm.OSEventSize {
		return syscall.EINVAL
	}
	rm.PutU32(out, rm.OSEventStatus, rm.StatusInvalidArgument)
	for i, x := range r.d.events {
		if x.client == rm.U32(out, rm.OSEventClient) && x.number == rm.U32(out, rm.OSEventFD) {
			r.d.events = append(r.d.events[:i], r.d.events[i+1:]...)
			rm.PutU32(out, rm.OSEventStatus, rm.StatusOK)
			break
		}
	}
	return 0
}
