package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// onHeap handles RM_VID_HEAP_CONTROL, the old way to allocate, still used by graphics libraries. RM turns functions 2, 6
// and 14 into RM_ALLOC of class 0x40, 0x3e or 0x50a0 by their flags and attributes (_rmVidHeapControlAllocCommon).
func (g *Guard) onHeap(c *trappedCall) reply {
	o := c.call.Outer
	client := rm.U32(o, rm.HeapRoot)
	if !g.owns(c, client) {
		return c.status(rm.StatusInvalidClient)
	}
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	switch rm.U32(o, rm.HeapFunction) {
	case rm.HeapFnAllocSize:
		return g.heapAlloc(c, client, rm.U64(o, rm.HeapAllocSize), rm.HeapAllocSize, rm.HeapAllocAttr)
	case rm.HeapFnAllocSizeRange:
		return g.heapAlloc(c, client, rm.U64(o, rm.HeapAllocRangeSize), rm.HeapAllocRangeSize, rm.HeapAllocAttr)
	case rm.HeapFnAllocTiled:
		// RM recomputes the size from both, 32 bits each.
		size := uint64(rm.U32(o, rm.HeapTiledHeight)) * uint64(rm.U32(o, rm.HeapTiledPitch))
		return g.heapAlloc(c, client, size, rm.HeapAllocSize, rm.HeapTiledAttr)
	case rm.HeapFnFree:
		handle := rm.U32(o, rm.HeapFreeMemory)
		if !c.valid() {
			return replyDone
		}
		status, e := c.execStatus()
		if e == 0 && status == rm.StatusOK {
			g.freed(lock[0], handle)
		}
		return fail(e)
	case rm.HeapFnInfo:
		if !c.valid() {
			return replyDone
		}
		status, e := c.execStatus()
		if e == 0 && status == rm.StatusOK {
			g.rewriteHeapInfo(c, client)
		}
		return fail(e)
	case rm.HeapFnReacquireCompr, rm.HeapFnReleaseCompr, rm.HeapFnGetMemAlignment:
		if !c.valid() {
			return replyDone
		}
		return fail(c.exec())
	}
	g.logOnce("heapfn", "denied a heap function", "function", rm.U32(o, rm.HeapFunction))
	g.stats.denied.Add(1)
	return c.status(rm.StatusNotSupported)
}

func (g *Guard) heapAlloc(c *trappedCall, client uint32, size uint64, sizeOff, attrOff int) reply {
	o := c.call.Outer
	if !g.account.room(rm.ClassPlain, 0, 0) {
		return c.status(rm.StatusInsufficientResources)
	}
	parent := rm.U32(o, rm.HeapParent)
	rec := object{parent: parent, class: classVidmem, kind: rm.ClassVidmem, gpu: noGPU}
	virtual := rm.U32(o, rm.HeapAllocFlags)&rm.MemoryFlagVirtual != 0
	location := rm.U32(o, attrOff) >> rm.MemoryAttrLocationShift & rm.MemoryAttrLocationMask
	gpu, want := noGPU, quota.Bytes(0)
	if !virtual && location == rm.MemoryLocationVidmem {
		if fixedAddress(rm.U32(o, rm.HeapAllocFlags)) {
			return c.status(rm.StatusInvalidArgument)
		}
		var rep reply
		var ok bool
		if gpu, rep, ok = g.gpuFor(c, client, parent); !ok {
			return rep
		}
		if want, ok = roundUp(size, pageHuge); !ok || !g.reserve(gpu, want) {
			return c.status(rm.StatusNoMemory)
		}
	} else {
		rec.class, rec.kind = classSystem, rm.ClassPlain
		if virtual {
			rec.class = classVirtual
		}
	}
	cancel := func() {
		if gpu != noGPU {
			g.account.unreserve(gpu, want)
		}
	}
	if !c.valid() {
		cancel()
		return replyDone
	}
	status, e := c.execStatus()
	if e != 0 || status != rm.StatusOK {
		cancel()
		return fail(e)
	}
	rec.handle = rm.U32(o, rm.HeapAllocMemory)
	took := quota.Bytes(0)
	if gpu != noGPU {
		took = grantedSize(rm.U64(o, sizeOff), rm.U32(o, attrOff))
		rec.length = quota.Bytes(rm.U64(o, sizeOff))
		if !g.settleUp(gpu, &want, took) {
			if s, e := g.free(c.target(), client, rec.handle); e == 0 && s == rm.StatusOK {
				cancel()
				c.takeBack()
				return c.status(rm.StatusNoMemory)
			}
		}
	}
	g.account.addObject(client, rec, gpu, want, took)
	c.undo = g.undoObject(c.target(), client, rec.handle)
	return replyDone
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
