// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// classVidmem is NV01_MEMORY_LOCAL_USER.
const classVidmem = 0x40

const (
	// pageSmall is the smallest piece of device memory that the physical allocator hands out, pageHuge the page of large
	// allocations (video_mem.c, _vidmemPmaAllocate).
	pageSmall = 64 * quota.KiB
	pageHuge  = 2 * quota.MiB

	attrPageHuge = 3 // NVOS32_ATTR_PAGE_SIZE_HUGE
)

// roundUp rounds to a page; false if that does not fit into 64 bits.
func roundUp(n uint64, page quota.Bytes) (quota.Bytes, bool) {
	p := uint64(page)
	if n > ^uint64(0)-(p-1) {
		return 0, false
	}
	return quota.Bytes((n + p - 1) / p * p), true
}

// grantedSize is what an allocation really takes, from what the driver wrote back.
func grantedSize(size uint64, attr, attr2 uint32) quota.Bytes {
	n, _ := roundUp(size, grantedPage(attr, attr2))
	return n
}

func grantedPage(attr, attr2 uint32) quota.Bytes {
	if attr>>rm.MemoryAttrPageShift&rm.MemoryAttrPageMask == attrPageHuge {
		return quota.Bytes(rm.HugePage(attr2))
	}
	return pageSmall
}

// checkVidmem: device memory, within the limit.
func (g *Guard) checkVidmem(c *trappedCall) plan {
	if len(c.params) == 0 || fixedAddress(rm.U32(c.params, rm.MemoryFlags)) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	want, ok := roundUp(rm.U64(c.params, rm.MemorySize), pageHuge)
	if !ok {
		return answer(c.status(rm.StatusNoMemory))
	}
	gpu, ok := g.gpuFor(c.allocClient(), c.allocParent())
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	if g.spills(gpu, want) {
		return g.planSpilled(c, gpu, want)
	}
	o := c.newObject()
	p := g.planCharged(c, c.allocClient(), cost{gpu: gpu, size: want}, func() (object, quota.Bytes) {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		o.length = quota.Bytes(rm.U64(c.params, rm.MemorySize))
		attr, attr2 := rm.U32(c.params, rm.MemoryAttr), rm.U32(c.params, rm.MemoryAttr2)
		o.size, o.page = o.length, grantedPage(attr, attr2)
		return o, grantedSize(rm.U64(c.params, rm.MemorySize), attr, attr2)
	})
	if !p.ask && g.spills(gpu, want) { // another thread has taken the room since
		c.restoreParams()
		return g.planSpilled(c, gpu, want)
	}
	p.retry = func(status uint32) (plan, bool) {
		// A card has a little less than its size to give: within the limit, and yet there is nothing left.
		if status != rm.StatusNoMemory || g.account.usage(gpu).spill == 0 {
			return plan{}, false
		}
		c.restoreParams()
		return g.planSpilled(c, gpu, want), true
	}
	return p
}

// fixedAddress reports that device memory is asked for at a physical address. The driver then takes as much as the
// alignment that the caller names, whatever the size (_vidmemPmaAllocate), and says nothing of it.
func fixedAddress(flags uint32) bool { return flags&rm.MemoryFlagFixed != 0 }
