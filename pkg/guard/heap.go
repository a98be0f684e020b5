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
		return g.checkHeapAlloc(c, rm.U64(o, rm.HeapAllocSize), rm.HeapAllocSize, rm.HeapAllocAttr)
	case rm.HeapFnAllocSizeRange:
		return g.checkHeapAlloc(c, rm.U64(o, rm.HeapAllocRangeSize), rm.HeapAllocRangeSize, rm.HeapAllocAttr)
	case rm.HeapFnAllocTiled:
		// RM recomputes the size from both, 32 bits each.
		size := uint64(rm.U32(o, rm.HeapTiledHeight)) * uint64(rm.U32(o, rm.HeapTiledPitch))
		return g.checkHeapAlloc(c, size, rm.HeapAllocSize, rm.HeapTiledAttr)
	case rm.HeapFnFree:
		handle := rm.U32(o, rm.HeapFreeMemory)
		return plan{ask: true, settle: func() { g.freed(c.locked[0], handle) }}
	case rm.HeapFnInfo:
		return plan{ask: true, settle: func() { g.rewriteHeapInfo(c, rm.U32(o, rm.HeapRoot)) }}
	case rm.HeapFnReacquireCompr, rm.HeapFnReleaseCompr, rm.HeapFnGetMemAlignment:
		return pass()
	default:
		return answer(c.deny(rm.StatusNotSupported, "heapfn", "denied a heap function", "function", fn))
	}
}

func (g *Guard) checkHeapAlloc(c *trappedCall, size uint64, sizeOff, attrOff int) plan {
	o := c.call.Outer
	if !g.account.room(rm.ClassPlain, 0, 0) {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	client := rm.U32(o, rm.HeapRoot)
	if g.unseen(c, client, rm.U32(o, rm.HeapParent)) {
		return answer(c.denyUnseen())
	}
	rec := object{parent: rm.U32(o, rm.HeapParent), class: classVidmem, kind: rm.ClassVidmem, gpu: noGPU}
	virtual := rm.U32(o, rm.HeapAllocFlags)&rm.MemoryFlagVirtual != 0
	location := rm.U32(o, attrOff) >> rm.MemoryAttrLocationShift & rm.MemoryAttrLocationMask
	if virtual || location != rm.MemoryLocationVidmem {
		rec.class, rec.kind = classSystem, rm.ClassPlain
		if virtual {
			rec.class = classVirtual
		}
		return plan{ask: true, settle: func() {
			rec.handle = rm.U32(o, rm.HeapAllocMemory)
			g.account.addObject(client, rec, noGPU, 0, 0)
			c.undo = g.undoObject(c.target(), client, rec.handle)
		}}
	}
	if fixedAddress(rm.U32(o, rm.HeapAllocFlags)) {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	gpu, ok := g.gpuFor(client, rec.parent)
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	want, ok := roundUp(size, pageHuge)
	if !ok {
		return answer(c.status(rm.StatusNoMemory))
	}
	return g.makeCharged(c, client, gpu, want, func() (object, quota.Bytes) {
		rec.handle = rm.U32(o, rm.HeapAllocMemory)
		rec.length = quota.Bytes(rm.U64(o, sizeOff))
		return rec, grantedSize(rm.U64(o, sizeOff), rm.U32(o, attrOff))
	})
}

// rewriteHeapInfo presents the limit in bytes.
func (g *Guard) rewriteHeapInfo(c *trappedCall, client uint32) {
	o := c.call.Outer
	gpu := g.account.gpuOf(client, rm.U32(o, rm.HeapParent))
	if gpu == noGPU {
		if len(g.gpus) != 1 {
			return
		}
		gpu = 0
	}
	u := g.account.usage(gpu)
	if u.native {
		return
	}
	free := u.free()
	rm.PutU64(o, rm.HeapTotal, uint64(u.total()))
	rm.PutU64(o, rm.HeapFree, uint64(free))
	rm.PutU64(o, rm.HeapInfoSize, min(rm.U64(o, rm.HeapInfoSize), uint64(free)))
}
