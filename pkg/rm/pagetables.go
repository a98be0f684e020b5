// SPDX-License-Identifier: Apache-2.0

package rm

// What the driver takes of a GPU's memory for page tables, which no allocation of a program's shows. The figures are those of Hopper's and
// Blackwell's MMU (kern_gmmu_fmt_gh10x.c); that of Pascal to Ada has one level less, 4 KiB.

const (
	pageTable      = 4096    // a table of 4 KiB pages, and the pages that directories are made of
	bigPageTable   = 256     // a table of 64 KiB pages, which a range for pages of any size has beside the other
	tableCovers    = 2 << 20 // addresses below one table
	tableEntry     = 8
	smallPage      = 4096
	poolChunk      = 64 << 10 // pages of tables come from a pool in chunks of this size (pool_alloc.c, POOL_CONFIG_GMMU_FMT_2)
	directoryLevel = 21       // log2 of what an entry of the lowest directory covers
)

// directories are the levels above the tables, the lowest last: log2 of the addresses below an entry, and its size.
var directories = [...]struct{ covers, entry int }{{56, 8}, {47, 8}, {38, 8}, {29, 8}, {directoryLevel, 16}}

// PageTables is what RM takes for the tables of a range of addresses: always as for pages of 4 KiB (gvaspaceReserveMempool_IMPL,
// kgmmuGetSizeOfPageTables_IMPL, kgmmuGetSizeOfPageDirs_IMPL). any says that the range is for pages of any size.
func PageTables(size uint64, any bool) uint64 {
	if size == 0 {
		return 0
	}
	limit := size - 1
	var sum uint64
	if limit < tableCovers {
		sum = limit/smallPage*tableEntry + tableEntry
	} else {
		sum = (above(limit, directoryLevel) + 1) * pageTable
	}
	if any {
		sum += (above(limit, directoryLevel) + 1) * bigPageTable
	}
	for _, d := range directories {
		sum += up((above(limit, d.covers)+1)*uint64(d.entry), pageTable)
	}
	return up(sum, pageTable)
}

// PagePool is what RM takes for PageTables when it makes a range: whole chunks of its pool.
func PagePool(size uint64, any bool) uint64 { return up(PageTables(size, any), poolChunk) }

// UVMTables is what UVM takes for the tables of a mapping: entries of 8 bytes, one for each page; for pages of 2 MiB of 16 bytes
// (uvm_hopper_mmu.c, allocation_size_hopper). A piece of each level that the mapping has for itself is as much as a page.
func UVMTables(length, page uint64) uint64 {
	switch {
	case length == 0:
		return 0
	case page >= tableCovers:
		return up(above(length, directoryLevel)*16, pageTable)
	case page > smallPage: // 64 KiB
		return up(above(length, directoryLevel)*(bigPageTable+16), pageTable)
	}
	return above(length, directoryLevel)*pageTable + up(above(length, directoryLevel)*16, pageTable)
}

// UVMPageTables is what UVM takes for a page that is far from all others: a table at each level below the root's.
const UVMPageTables = 4 * pageTable

// MaxVirtual bounds a range of addresses that the driver makes tables for at once, and a mapping of memory whose size is not known. It
// takes 7 to 8 ms a GiB to make them, and to free them, and all of the GPU waits meanwhile.
const MaxVirtual = 64 << 30

// above is n divided by 2^shift, rounded up.
func above(n uint64, shift int) uint64 {
	q := n >> shift
	if n&(1<<shift-1) != 0 {
		q++
	}
	return q
}

// up rounds to a page; what does not fit into 64 bits becomes the largest number.
func up(n, page uint64) uint64 {
	if n > ^uint64(0)-(page-1) {
		return ^uint64(0)
	}
	return (n + page - 1) / page * page
}

// VirtualSize is how much of the address space NV50_MEMORY_VIRTUAL gets for a size that is asked for, rounded to the page that its
// attributes name, and whether pages of any size can be mapped there (gvaspaceApplyDefaultAlignment_IMPL). False: more than 64 bits.
func VirtualSize(size uint64, attr, attr2 uint32) (granted uint64, any, ok bool) {
	page := uint64(smallPage)
	switch attr >> MemoryAttrPageShift & MemoryAttrPageMask {
	case 0: // any
		any, page = true, 128<<10
	case 2: // 64 KiB, of old GPUs 128
		page = 128 << 10
	case 3:
		page = HugePage(attr2)
	}
	granted = up(size, page)
	return granted, any, granted >= size && granted != ^uint64(0)
}

// HugePage is which of the huge pages attributes name, NVOS32_ATTR2_PAGE_SIZE_HUGE.
func HugePage(attr2 uint32) uint64 {
	switch attr2 >> MemoryAttr2HugeShift & 3 {
	case 2:
		return 512 << 20
	case 3:
		return 256 << 30
	}
	return 2 << 20
}

// MemoryAttr2HugeShift: see nvos.h.
const MemoryAttr2HugeShift = 20

// DMAForm is where the fields of RM_MAP_MEMORY_DMA and RM_UNMAP_MEMORY_DMA sit that moved; -1 where the call has no such field.
type DMAForm struct {
	Address int // u64, dmaOffset
	Length  int // u64; of an unmapping 0 means all of the mapping that starts at the address
	Status  int
}

// MapDMA is the form of RM_MAP_MEMORY_DMA, for an outer structure of this size.
func (a *ABI) MapDMA(size int) (DMAForm, bool) {
	if a.branch < 580 {
		return DMAForm{40, DMAMapLength, 48}, size == 56
	}
	return DMAForm{48, DMAMapLength, 56}, size == 64
}

// UnmapDMA is the form of RM_UNMAP_MEMORY_DMA.
func (a *ABI) UnmapDMA(size int) (DMAForm, bool) {
	if a.branch < 550 {
		return DMAForm{24, -1, 32}, size == 40
	}
	return DMAForm{24, 32, 40}, size == 48
}
