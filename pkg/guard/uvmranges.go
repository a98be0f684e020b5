// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"maps"
	"slices"
	"sync"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// What UVM keeps for a container in the host's memory, it takes from the kernel without __GFP_ACCOUNT (NV_UVM_GFP_FLAGS in uvm_linux.h), so
// no cgroup counts it. What calls make by the million is charged here, as host memory that the driver makes (hostmemory.go): ranges of
// addresses, which live until UVM_FREE or the end of their file, and range groups. Two kinds of ranges have page tables too, at addresses
// of the program's choice.

const (
	// externalHost is what UVM has for an external range: a tree for each of 256 GPUs (struct uvm_va_range_external_struct).
	externalHost = 16 * quota.KiB
	// rangeHost is that for a range of another kind, groupHost for a range group.
	rangeHost = 4 * quota.KiB
	groupHost = 512
	// maxPool bounds a semaphore pool. CUDA's have 2 MiB.
	maxPool = quota.GiB
)

// uvmRange is a range of addresses that a call has made.
type uvmRange struct {
	entry
	on *file // set when it is recorded
	addresses
	host   quota.Bytes
	gpu    gpuUUID   // with whose RM address space the tables end; none: with the range
	tables []*charge // page tables, but those of what is mapped in the range
}

// checkCreateExternal: a range for external mappings.
func (g *Guard) checkCreateExternal(c *trappedCall) plan {
	return g.planRange(c, &uvmRange{addresses: rangeOf(c.call.Outer, c.form()), host: externalHost}, nil)
}

// checkDynamicRegion: a page that the GPU's scheduler uses (UVM_MAP_DYNAMIC_PARALLELISM_REGION). It has no memory, only page tables.
func (g *Guard) checkDynamicRegion(c *trappedCall) plan {
	r := &uvmRange{addresses: rangeOf(c.call.Outer, c.form()), host: rangeHost, gpu: gpuUUID(c.call.Outer[uvmSparseGPU:])}
	gpu, _ := g.gpuByUUID(r.gpu) // UVM refuses others
	return g.planRange(c, r, []cost{{gpu: gpu, size: rm.UVMPageTables, slack: tableSlack}})
}

// checkSemaphorePool: host memory that UVM makes and maps on every GPU that the address space has, or will have (UVM_ALLOC_SEMAPHORE_POOL).
func (g *Guard) checkSemaphorePool(c *trappedCall) plan {
	length := quota.Bytes(rm.U64(c.call.Outer, c.form().Length))
	if length > maxPool {
		return answer(c.deny(rm.StatusNoMemory, "uvmpool", "denied UVM a semaphore pool that is too large", "length", length, "max", maxPool))
	}
	var tables []cost
	for i := range g.cfg.GPUs {
		size := quota.Bytes(rm.UVMTables(uint64(length), uint64(pageHost))) + rm.UVMPageTables
		tables = append(tables, cost{gpu: i, size: size, slack: tableSlack})
	}
	return g.planRange(c, &uvmRange{addresses: rangeOf(c.call.Outer, c.form()), host: length + externalHost}, tables)
}

// planRange is the plan of a call that makes a range with page tables of its own.
func (g *Guard) planRange(c *trappedCall, r *uvmRange, tables []cost) plan {
	f, status := g.chargeRange(c, r, tables)
	if f == nil {
		g.dropRange(r)
		return answer(c.status(status))
	}
	return plan{ask: true, done: f.uvm.Unlock, cancel: func() { g.dropRange(r) }, commit: func() {
		g.dropRange(f.recordRange(r)) // UVM has let go of one there, or it would have refused
		g.books.note(r)
	}}
}

// chargeRange charges what a range costs, and then locks its address space. Nil: it may not be made.
func (g *Guard) chargeRange(c *trappedCall, r *uvmRange, tables []cost) (*file, uint32) {
	host := r.host
	if r.host = 0; !g.reserveUVMHost(host) {
		return nil, rm.StatusNoMemory
	}
	r.host = host
	for _, t := range tables {
		if !g.reserve(t) {
			return nil, rm.StatusNoMemory
		}
		r.tables = append(r.tables, &charge{gpu: t.gpu, size: t.size, references: 1, tables: true})
	}
	f, err := c.lockUVM()
	if err != nil {
		g.logOnce("uvmfile", "cannot follow a UVM address space", "err", err)
		return nil, rm.StatusInsufficientResources
	}
	return f, rm.StatusOK
}

// dropRange gives back what a range, if there is one, costs beside what is mapped in it.
func (g *Guard) dropRange(r *uvmRange) {
	if r == nil {
		return
	}
	g.books.end(r)
	for _, t := range r.tables {
		g.account.dropReference(t)
	}
	g.releaseUVMHost(r.host)
}

// recordRange records a range. It returns the one that it takes the place of.
func (f *file) recordRange(r *uvmRange) (old *uvmRange) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ranges == nil {
		f.ranges = map[uint64]*uvmRange{}
	}
	old = f.ranges[r.base]
	f.ranges[r.base], r.on = r, f
	return old
}

// removeRange takes a range out of the records; nil: there is none.
func (f *file) removeRange(base uint64) *uvmRange {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.ranges[base]
	delete(f.ranges, base)
	return r
}

// dropRegionTables: the address space has lost a GPU, and with it the page tables of regions there. Their ranges stay
// (uvm_va_range_remove_gpu_va_space).
func (g *Guard) dropRegionTables(f *file, gpu gpuUUID) {
	f.mu.Lock()
	var tables []*charge
	for _, r := range f.ranges {
		if r.gpu == gpu {
			tables = append(tables, r.tables...)
			r.tables = nil
			g.books.note(r)
		}
	}
	f.mu.Unlock()
	for _, t := range tables {
		g.account.dropReference(t)
	}
}

// checkRangeGroup: a group of ranges of managed memory, which are moved together. UVM chooses its number.
func (g *Guard) checkRangeGroup(c *trappedCall) plan {
	if !g.reserveUVMHost(groupHost) {
		return answer(c.status(rm.StatusNoMemory))
	}
	f, err := c.lockUVM()
	if err != nil {
		g.releaseUVMHost(groupHost)
		return answer(c.status(rm.StatusInsufficientResources))
	}
	return plan{ask: true, done: f.uvm.Unlock, cancel: func() { g.releaseUVMHost(groupHost) }, commit: func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.groups == nil {
			f.groups = map[uint64]bool{}
		}
		f.groups[rm.U64(c.call.Outer, c.form().Base)] = true
		g.books.note(f)
	}}
}

func (g *Guard) dropRangeGroup(f *file, group uint64) {
	f.mu.Lock()
	known := f.groups[group]
	delete(f.groups, group)
	g.books.note(f)
	f.mu.Unlock()
	if known {
		g.releaseUVMHost(groupHost)
	}
}

// endRanges ends the ranges and groups of an address space that is torn down, after what is mapped there: the file may be in a socket and
// come back. False: there were none.
func (g *Guard) endRanges(f *file) bool {
	f.mu.Lock()
	ranges, groups := f.ranges, slices.Collect(maps.Keys(f.groups))
	f.ranges = nil
	f.mu.Unlock()
	end := func(cmd uint32, x addresses) {
		form, _ := g.abi.UVM(cmd)
		o := make([]byte, form.Size)
		rm.PutU64(o, form.Base, x.base)
		if form.Length >= 0 {
			rm.PutU64(o, form.Length, x.length())
		}
		_ = g.driver.Exec(f.target(), &rm.Call{Cmd: cmd, Outer: o}) // it may be gone already
	}
	for _, r := range ranges {
		end(rm.UVMFree, r.addresses)
		g.dropRange(r)
	}
	for _, id := range groups {
		end(rm.UVMDestroyRangeGroup, addresses{base: id})
		g.dropRangeGroup(f, id)
	}
	return len(ranges)+len(groups) > 0
}

// hostPool is host memory that is charged to the container in large pieces, since each costs a look at what the host has left.
type hostPool struct {
	mu          sync.Mutex
	used, taken quota.Bytes
}

const hostPiece = quota.MiB

// reserveUVMHost charges some of the host's memory. False: the container may not have more.
func (g *Guard) reserveUVMHost(size quota.Bytes) bool {
	p := &g.uvmHost
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.taken-p.used < size {
		more := (size - (p.taken - p.used) + hostPiece - 1) / hostPiece * hostPiece
		p.mu.Unlock() // it may wait for the end of an address space, which gives some back
		ok := g.reserveHost(more)
		p.mu.Lock()
		if !ok {
			return false
		}
		p.taken += more
	}
	p.used += size
	return true
}

// releaseUVMHost gives some back. A piece is kept for what comes next.
func (g *Guard) releaseUVMHost(size quota.Bytes) {
	p := &g.uvmHost
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used -= size
	if spare := (p.taken - p.used) / hostPiece * hostPiece; spare > hostPiece || p.used == 0 && spare > 0 {
		if p.used > 0 {
			spare -= hostPiece
		}
		p.taken -= spare
		g.account.unreserve(cost{host: true, size: spare})
	}
}
