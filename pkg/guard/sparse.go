package guard

import (
	"encoding/hex"
	"strings"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// UVM takes page tables for what it maps out of the GPU's memory, by itself, and no allocation of the program's shows them. A mapping of device
// memory costs at most 1/8192 of it and is counted from the second one of the same memory on; one of host memory, in pages of 4 KiB, 1/512, and
// a sparse one 1/8192 of nothing at all.

// maxSparse bounds one sparse mapping: UVM writes an entry for each 64 KiB of it while others wait for its address space.
const maxSparse = 1 << 40

// checkSparse: a mapping of nothing (UVM_MAP_EXTERNAL_SPARSE), where reads give zeros.
func (g *Guard) checkSparse(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	m := uvmMap{length: rm.U64(o, form.Length)}
	copy(m.gpu[:], o[uvmSparseGPU:])
	if m.length > maxSparse {
		return answer(c.deny(rm.StatusInvalidLimit, "sparse", "denied a sparse mapping that is too large", "length", quota.Bytes(m.length), "max", quota.Bytes(maxSparse)))
	}
	f := c.uvmSpace()
	if f == nil {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	maps := []uvmMap{m}
	if !g.chargeTables(maps, pageSmall) {
		return answer(c.status(rm.StatusNoMemory))
	}
	f.uvm.Lock()
	return plan{ask: true, done: f.uvm.Unlock, cancel: func() { g.dropTables(maps) }, settle: func() {
		g.uvmMapped(f, rm.U64(o, form.Base), maps[0])
		c.lost = true // the range is taken now: another call would fail
	}}
}

// uvmSparseGPU is the offset of the GPU in UVM_MAP_EXTERNAL_SPARSE_PARAMS (uvm_ioctl.h).
const uvmSparseGPU = 16

// uvmSpace follows the UVM address space that a call is for. Nil: it cannot, or there are too many mappings.
func (c *trappedCall) uvmSpace() *file {
	if c.file == nil {
		if err := c.followFile(); err != nil {
			c.g.logOnce("uvmfile", "cannot follow a UVM address space", "err", err)
			return nil
		}
	}
	c.file.mu.Lock()
	defer c.file.mu.Unlock()
	if c.file.mapped >= maxUVMMaps {
		return nil
	}
	return c.file
}

// mapPage is the size of the pages that a mapping of memory has tables for; 0 where they are not charged.
func (a *account) mapPage(client, handle uint32) quota.Bytes {
	a.mu.Lock()
	defer a.mu.Unlock()
	var o *object
	if c := a.clients[client]; c != nil {
		o = c.objects[handle]
	}
	switch {
	case o == nil || o.kind != rm.ClassVidmem:
		return pageHost
	case o.charge != nil && o.charge.others == 0:
		return 0
	case o.spilled:
		return pageHost
	case o.charge != nil && o.charge.page > 0:
		return o.charge.page
	}
	return pageSmall
}

// chargeTables charges each mapping's page tables to its GPU. False: they do not fit, and nothing is charged.
func (g *Guard) chargeTables(maps []uvmMap, page quota.Bytes) bool {
	if page == 0 {
		return true
	}
	for i := range maps {
		m := &maps[i]
		size, gpu := quota.Bytes(rm.UVMTables(m.length, uint64(page))), g.gpuByUUID(m.gpu)
		if !g.reserve(cost{gpu: gpu, size: size, slack: tableSlack}) {
			g.dropTables(maps)
			return false
		}
		if size > 0 {
			m.tables = &charge{gpu: gpu, size: size, others: 1, tables: true}
		}
	}
	return true
}

// dropTables gives back what chargeTables took.
func (g *Guard) dropTables(maps []uvmMap) {
	for i := range maps {
		g.account.unhold(maps[i].tables)
		maps[i].tables = nil
	}
}

// gpuByUUID finds a GPU of the container. UVM refuses others, so it does not matter what they are charged to.
func (g *Guard) gpuByUUID(uuid gpuUUID) int {
	for i, x := range g.cfg.GPUs {
		b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(x.UUID, "GPU-"), "-", ""))
		if err == nil && len(b) == len(uuid) && gpuUUID(b) == uuid {
			return i
		}
	}
	return 0
}
