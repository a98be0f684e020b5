// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// checkHeap handles RM_VID_HEAP_CONTROL, the old way to allocate, still used by graphics libraries. RM turns functions 2, 6
// and 14 into RM_ALLOC of class 0x40, 0x3e or 0x50a0 by their flags and attributes (_rmVidHeapControlAllocCommon).
func (g *Guard) checkHeap(c *trappedCall) plan {
	o := c.call.Outer
	switch fn := rm.U32(o, rm.HeapFunction); fn {
	case rm.HeapFnAllocSize:
		return g.checkHeapAlloc(c, rm.U64(o, rm.HeapAllocSize), heapForm{rm.HeapAllocSize, rm.HeapAllocAttr, rm.HeapAllocAttr2})
	case rm.HeapFnAllocSizeRange:
		return g.checkHeapAlloc(c, rm.U64(o, rm.HeapAllocRangeSize), heapForm{rm.HeapAllocRangeSize, rm.HeapAllocAttr, rm.HeapAllocRangeAttr2})
	case rm.HeapFnAllocTiled:
		// RM recomputes the size from both, 32 bits each.
		size := uint64(rm.U32(o, rm.HeapTiledHeight)) * uint64(rm.U32(o, rm.HeapTiledPitch))
		return g.checkHeapAlloc(c, size, heapForm{rm.HeapAllocSize, rm.HeapTiledAttr, rm.HeapAllocAttr2})
	case rm.HeapFnFree:
		return g.planFree(c, rm.U32(o, rm.HeapFreeMemory))
	case rm.HeapFnInfo:
		return plan{ask: true, commit: func() { g.rewriteHeapInfo(c, rm.U32(o, rm.HeapRoot)) }}
	case rm.HeapFnReacquireCompr, rm.HeapFnReleaseCompr, rm.HeapFnGetMemAlignment:
		return pass()
	default:
		return answer(c.deny(rm.StatusNotSupported, "heapfn", "denied a heap function", "function", fn))
	}
}

// heapForm is where an allocating function has what it asks for.
type heapForm struct{ size, attr, attr2 int }

// heapClass is what RM makes of an allocation, and what the guard takes that for.
func heapClass(flags, attr uint32) (class uint32, kind rm.ClassKind) {
	switch {
	case flags&rm.MemoryFlagVirtual != 0:
		return classVirtual, rm.ClassVirtual
	case attr>>rm.MemoryAttrLocationShift&rm.MemoryAttrLocationMask == rm.MemoryLocationVidmem:
		return classVidmem, rm.ClassVidmem
	}
	return classSystem, rm.ClassSysmem
}

func (g *Guard) checkHeapAlloc(c *trappedCall, size uint64, form heapForm) plan {
	o := c.call.Outer
	if !g.account.roomForObject(rm.ClassVidmem, noGPU, 0, 0) {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	client, flags := rm.U32(o, rm.HeapRoot), rm.U32(o, rm.HeapAllocFlags)
	if c.isUnseen(c.target(), client, rm.U32(o, rm.HeapParent)) {
		return answer(c.denyUnseen())
	}
	if flags&rm.MemoryFlagVirtual != 0 && c.isUnseen(c.target(), client, rm.U32(o, rm.HeapVASpace)) {
		return answer(c.denyUnseen())
	}
	rec := object{parent: rm.U32(o, rm.HeapParent), gpu: noGPU}
	rm.PutU32(o, form.attr2, rm.U32(o, form.attr2)&^rm.MemoryAttr2Register)
	keepFromKernel(o, rm.HeapAllocType, size)
	rec.class, rec.kind = heapClass(flags, rm.U32(o, form.attr))
	made := func(rec *object) quota.Bytes {
		rec.handle = rm.U32(o, rm.HeapAllocMemory)
		return quota.Bytes(rm.U64(o, form.size))
	}
	if rec.kind == rm.ClassSysmem {
		return g.planHostMemory(c, client, size, rec, made)
	}
	gpu, ok := g.gpuFor(client, rec.parent)
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	if rec.kind == rm.ClassVirtual {
		rec.space = rm.U32(o, rm.HeapVASpace)
		return g.planVirtual(c, client, gpu, flags, func() (object, uint64, uint32, uint32) {
			rec.handle = rm.U32(o, rm.HeapAllocMemory)
			if c.executed {
				size = rm.U64(o, form.size)
			}
			return rec, size, rm.U32(o, form.attr), rm.U32(o, form.attr2)
		})
	}
	if fixedAddress(flags) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	want, ok := roundUp(size, pageHuge)
	if !ok {
		return answer(c.status(rm.StatusNoMemory))
	}
	return g.planCharged(c, client, cost{gpu: gpu, size: want}, func() (object, quota.Bytes) {
		rec.length = made(&rec)
		attr, attr2 := rm.U32(o, form.attr), rm.U32(o, form.attr2)
		rec.size, rec.page = rec.length, grantedPage(attr, attr2)
		return rec, grantedSize(uint64(rec.length), attr, attr2)
	})
}

// rewriteHeapInfo presents the limit in bytes.
func (g *Guard) rewriteHeapInfo(c *trappedCall, client uint32) {
	o := c.call.Outer
	u, ok := g.limitOf(client, rm.U32(o, rm.HeapParent))
	if !ok {
		return
	}
	free := u.free()
	rm.PutU64(o, rm.HeapTotal, uint64(u.total()))
	rm.PutU64(o, rm.HeapFree, uint64(free))
	rm.PutU64(o, rm.HeapInfoSize, min(rm.U64(o, rm.HeapInfoSize), uint64(free)))
}
