// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// UVM takes page tables for what it maps out of the GPU's memory, by itself, and no allocation of the program's shows them. A mapping of
// device memory costs at most 1/8192 of it and is counted from the second one of the same memory on; one of host memory, in pages of 4 KiB,
// 1/512, and a sparse one 1/8192 of nothing at all.

// maxSparse bounds one sparse mapping: UVM writes an entry for each 64 KiB of it while others wait for its address space.
const maxSparse = 1 << 40

// checkSparse: a mapping of nothing (UVM_MAP_EXTERNAL_SPARSE), where reads give zeros.
func (g *Guard) checkSparse(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	m := uvmMap{gpu: gpuUUID(o[uvmSparseGPU:]), addresses: rangeOf(o, form)}
	if length := rm.U64(o, form.Length); length > maxSparse {
		return answer(c.deny(rm.StatusInvalidLimit, "sparse", "denied a sparse mapping that is too large",
			"length", quota.Bytes(length), "max", quota.Bytes(maxSparse)))
	}
	maps := []uvmMap{m}
	f, status := g.lockToMap(c, maps, pageSmall)
	if f == nil {
		return answer(c.status(status))
	}
	return plan{ask: true, done: f.uvm.Unlock, cancel: func() { g.dropTables(maps) }, commit: func() {
		g.recordMapping(f, maps[0])
	}}
}

// uvmSparseGPU is the offset of the GPU in UVM_MAP_EXTERNAL_SPARSE_PARAMS (uvm_ioctl.h).
const uvmSparseGPU = 16

// lockToMap is lockUVM for a call that maps something, whose page tables it charges before: that may wait for another address space's end.
// Nil: they do not fit, it cannot be followed, or there are too many mappings; then the status says so.
func (g *Guard) lockToMap(c *trappedCall, maps []uvmMap, page quota.Bytes) (*file, uint32) {
	if !g.chargeTables(maps, page) {
		return nil, rm.StatusNoMemory
	}
	f, err := c.lockUVM()
	if err != nil {
		g.dropTables(maps)
		g.logOnce("uvmfile", "cannot follow a UVM address space", "err", err)
		return nil, rm.StatusInsufficientResources
	}
	if g.uvmFull() {
		f.uvm.Unlock()
		g.dropTables(maps)
		return nil, rm.StatusInsufficientResources
	}
	return f, rm.StatusOK
}

// mapPage is the size of the pages that a mapping of an object has tables for; 0 where they are not charged.
func (a *account) mapPage(o object) quota.Bytes {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case o.kind != rm.ClassVidmem:
		return pageHost
	case o.charge != nil && o.charge.references == o.charge.windows:
		return 0
	case o.spilled:
		return pageHost
	case o.charge != nil && o.charge.page > 0:
		return o.charge.page
	}
	return pageSmall
}

// mapPageAt is the size of the pages that UVM really uses: the program chooses where the mapping begins, and what is not aligned to a page
// is mapped in smaller ones (uvm_map_external_allocation_on_gpu takes the lowest bit of them all). page is that of the memory; small
// mappings are not free of charge, since tables come in whole pieces.
func mapPageAt(page quota.Bytes, base, length, offset uint64) quota.Bytes {
	low := base | length | offset
	low &= -low
	switch {
	case low != 0 && low < uint64(pageSmall):
		return pageHost
	case page == 0 && length < uint64(pageHuge), page > pageSmall && low < uint64(pageHuge):
		return pageSmall
	}
	return page
}

// chargeTables charges each mapping's page tables to its GPU. False: they do not fit, and nothing is charged.
func (g *Guard) chargeTables(maps []uvmMap, page quota.Bytes) bool {
	if page == 0 {
		return true
	}
	for i := range maps {
		m := &maps[i]
		size := quota.Bytes(rm.UVMTables(m.length(), uint64(page)))
		gpu, _ := g.gpuByUUID(m.gpu) // UVM refuses others, so it does not matter what they are charged to
		if !g.reserve(cost{gpu: gpu, size: size, slack: tableSlack}) {
			g.dropTables(maps)
			return false
		}
		if size > 0 {
			m.tables = &charge{gpu: gpu, size: size, references: 1, tables: true}
		}
	}
	return true
}

// dropTables gives back what chargeTables took.
func (g *Guard) dropTables(maps []uvmMap) {
	for i := range maps {
		g.account.dropReference(maps[i].tables)
		maps[i].tables = nil
	}
}
