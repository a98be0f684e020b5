// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math/bits"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// heap is RM_VID_HEAP_CONTROL, the old way to allocate (rmapi_deprecated_vidheapctrl.c). Unlike RM_ALLOC the attributes
// decide here whether the result is device memory.
func (r *request) heap() uint32 {
	out := r.call.Outer
	c, st := r.client(rm.U32(out, rm.HeapRoot))
	if st != rm.StatusOK {
		return st
	}
	parent := c.objects[rm.U32(out, rm.HeapParent)]
	if parent == nil {
		return rm.StatusObjectNotFound
	}
	if parent.gpu == nil {
		return rm.StatusInvalidObjectParent
	}
	switch rm.U32(out, rm.HeapFunction) {
	case rm.HeapFnAllocSize:
		st = r.heapAlloc(c, parent, rm.HeapAllocAttr, rm.HeapAllocSize, rm.U64(out, rm.HeapAllocSize))
	case rm.HeapFnAllocSizeRange:
		st = r.heapAlloc(c, parent, rm.HeapAllocAttr, rm.HeapAllocRangeSize, rm.U64(out, rm.HeapAllocRangeSize))
	case rm.HeapFnAllocTiled:
		hi, lo := bits.Mul64(uint64(rm.U32(out, rm.HeapTiledHeight)), uint64(rm.U32(out, rm.HeapTiledPitch)))
		if hi != 0 {
			return rm.StatusInvalidArgument
		}
		st = r.heapAlloc(c, parent, rm.HeapTiledAttr, rm.HeapAllocSize, lo)
	case rm.HeapFnFree:
		o := c.objects[rm.U32(out, rm.HeapFreeMemory)]
		if o == nil || o == c.root {
			return rm.StatusObjectNotFound
		}
		r.d.freeObject(o)
	case rm.HeapFnInfo:
		free := uint64(parent.gpu.Memory - parent.gpu.used)
		rm.PutU64(out, rm.HeapInfoOffset, 0)
		rm.PutU64(out, rm.HeapInfoBase, 0)
		rm.PutU64(out, rm.HeapInfoSize, free)
	default:
		return rm.StatusNotSupported
	}
	rm.PutU64(out, rm.HeapTotal, uint64(parent.gpu.Memory))
	rm.PutU64(out, rm.HeapFree, uint64(parent.gpu.Memory-parent.gpu.used))
	return st
}

// heapHandleGiven is NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED.
const heapHandleGiven = 1 << 14

func (r *request) heapAlloc(c *client, parent *object, attrOff, sizeOff int, size uint64) uint32 {
	out := r.call.Outer
	flags, attr := rm.U32(out, rm.HeapAllocFlags), rm.U32(out, attrOff)
	attr2Off := rm.HeapAllocAttr2
	if sizeOff == rm.HeapAllocRangeSize {
		attr2Off = rm.HeapAllocRangeAttr2
	}
	o := &object{class: classMemoryLocal}
	if flags&heapHandleGiven != 0 {
		o.handle = rm.U32(out, rm.HeapAllocMemory)
	}
	if o.handle != 0 && c.objects[o.handle] != nil {
		return rm.StatusInsertDuplicateName
	}
	switch {
	case flags&rm.MemoryFlagVirtual != 0:
		o.class = classMemoryVirtual
		want := rangeWanted{space: rm.U32(out, rm.HeapVASpace), flags: flags &^ rm.MemoryFlagFixed, attr: attr,
			attr2: rm.U32(out, attr2Off), size: size}
		if st := r.d.makeRange(o, parent, want); st != rm.StatusOK {
			return st
		}
	case attr>>rm.MemoryAttrLocationShift&rm.MemoryAttrLocationMask != rm.MemoryLocationVidmem:
		o.class, o.size = classMemorySystem, quota.Bytes(size)
	default:
		m, st := newMemory(parent, size)
		if st != rm.StatusOK {
			return st
		}
		o.memory, o.size = m, m.size
		rm.PutU64(out, sizeOff, uint64(m.size))
		m.tellPage(out, attrOff, attr2Off)
	}
	return r.finish(c, parent, o, rm.HeapAllocMemory)
}
