// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"sort"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// What is mapped in a UVM address space, as UVM keeps it: for each GPU pieces that do not overlap. Addresses that are unmapped, or mapped
// anew, are cut out of all pieces that they touch; what is left of a piece, on one side or on both, holds the memory
// (uvm_unmap_external_in_range, uvm_ext_gpu_map_split).

// addresses are those from base to end, which is the first that is not one of them.
type addresses struct{ base, end uint64 }

func (x addresses) length() uint64 { return x.end - x.base }

// everywhere is a whole address space.
var everywhere = addresses{0, ^uint64(0)}

// rangeOf is what a UVM call is about. UVM refuses what wraps (uvm_api_range_invalid_4k).
func rangeOf(o []byte, form rm.UVMForm) addresses {
	base := rm.U64(o, form.Base)
	return addresses{base, base + rm.U64(o, form.Length)}
}

// uvmMap is an external mapping on one GPU that holds memory, or is sparse, or what is left of one.
type uvmMap struct {
	entry
	on *file // set when it is recorded
	addresses
	gpu    gpuUUID
	charge *charge // of what is mapped; nil: nothing that is charged
	tables *charge // of the page tables, of which a part keeps the whole; nil: not charged
}

// part is what is left of a mapping.
func (m *uvmMap) part(base, end uint64) *uvmMap {
	return &uvmMap{on: m.on, addresses: addresses{base, end}, gpu: m.gpu, charge: m.charge, tables: m.tables}
}

// UVM has a handle on what each mapping is of, and for all of the node it has 0x80000 of them (RS_UNIQUE_HANDLE_RANGE): its RM client is
// one. So a container may have some mappings, and two for each 2 MiB that it may allocate, which is how libcuda maps it at the finest;
// never more than half.
const (
	someUVMMaps = 1 << 14
	maxUVMMaps  = 1 << 18
)

// uvmFull reports that the container may map nothing more, nor cut a mapping in two.
func (g *Guard) uvmFull() bool { return g.uvmMaps.Load() >= g.account.mostUVMMaps() }

// mostUVMMaps is how many mappings the container may have.
func (a *account) mostUVMMaps() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := quota.Bytes(someUVMMaps)
	for _, g := range a.gpus {
		if g.native {
			return maxUVMMaps
		}
		n += g.total() / quota.MiB
	}
	return int64(min(n, maxUVMMaps))
}

// overlapping are the mappings of a GPU that addresses are part of. The file is locked.
func (f *file) overlapping(x addresses, gpu gpuUUID) (from, to int) {
	list := f.maps[gpu]
	from = sort.Search(len(list), func(i int) bool { return list[i].end > x.base })
	to = from + sort.Search(len(list)-from, func(i int) bool { return list[from+i].base >= x.end })
	return from, to
}

// splits reports that to unmap addresses leaves more pieces than there are.
func (f *file) splits(x addresses, gpu gpuUUID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	from, to := f.overlapping(x, gpu)
	return to-from == 1 && f.maps[gpu][from].base < x.base && f.maps[gpu][from].end > x.end
}

// replaceRange cuts addresses out of a GPU's mappings, and puts those of with there instead. It returns those that were cut, and what is
// left of them. The file is locked.
func (f *file) replaceRange(x addresses, gpu gpuUUID, with ...*uvmMap) (gone, rest []*uvmMap) {
	from, to := f.overlapping(x, gpu)
	gone = slices.Clone(f.maps[gpu][from:to])
	var before, after []*uvmMap
	for _, m := range gone {
		if m.base < x.base {
			before = append(before, m.part(m.base, x.base))
		}
		if m.end > x.end {
			after = append(after, m.part(x.end, m.end))
		}
	}
	f.maps[gpu] = slices.Replace(f.maps[gpu], from, to, slices.Concat(before, with, after)...)
	rest = append(before, after...)
	if len(f.maps[gpu]) == 0 {
		delete(f.maps, gpu)
	}
	return gone, rest
}

// recordMapping records a mapping, which takes the place of what that GPU had there (uvm_map_external_allocation_on_gpu).
func (g *Guard) recordMapping(f *file, m uvmMap) {
	f.mu.Lock()
	var with []*uvmMap
	if m.on = f; m.charge != nil || m.tables != nil {
		with = append(with, &m)
	}
	gone, rest := f.replaceRange(m.addresses, m.gpu, with...)
	g.noteMaps(gone, append(with, rest...))
	f.mu.Unlock()
	g.uvmMaps.Add(int64(len(with)))
	g.recordMaps(gone, rest)
}

// recordUnmapping drops what a GPU had mapped at some addresses.
func (g *Guard) recordUnmapping(f *file, x addresses, gpu gpuUUID) {
	f.mu.Lock()
	gone, rest := f.replaceRange(x, gpu)
	g.noteMaps(gone, rest)
	f.mu.Unlock()
	g.recordMaps(gone, rest)
}

// noteMaps has the books say that some mappings are gone, and that others are there instead. The file is locked, as for an image: so a
// commit has all of this, or nothing.
func (g *Guard) noteMaps(gone, instead []*uvmMap) {
	for _, m := range instead { // first: who commits waits for their images
		g.books.note(m)
	}
	for _, m := range gone {
		g.books.end(m)
	}
}

// recordMaps: some mappings are gone, but for the rest of them.
func (g *Guard) recordMaps(gone, rest []*uvmMap) {
	g.uvmMaps.Add(int64(len(rest)))
	for _, m := range rest { // first: each holds what one of gone does
		g.account.addReference(m.charge)
		g.account.addReference(m.tables)
	}
	for _, m := range gone {
		g.dropMapping(m)
	}
}

// dropMapping lets go of what a mapping held.
func (g *Guard) dropMapping(m *uvmMap) {
	g.uvmMaps.Add(-1)
	g.books.end(m)
	g.account.dropReference(m.charge)
	g.account.dropReference(m.tables)
}

// recordUVMFree drops a range that UVM_FREE has destroyed, and what was mapped in it. The call names its end, which UVM compares; since 590
// it does not, but the guard knows the range.
func (g *Guard) recordUVMFree(f *file, o []byte, form rm.UVMForm) {
	x := addresses{base: rm.U64(o, form.Base)}
	r := f.removeRange(x.base)
	switch {
	case form.Length >= 0:
		x = rangeOf(o, form)
	case r != nil:
		x = r.addresses
	}
	for _, gpu := range f.mappedOn() {
		g.recordUnmapping(f, x, gpu)
	}
	g.dropRange(r)
}

// mappedOn lists the GPUs that have something mapped.
func (f *file) mappedOn() (list []gpuUUID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for gpu := range f.maps {
		list = append(list, gpu)
	}
	return list
}
