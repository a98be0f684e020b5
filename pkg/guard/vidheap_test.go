// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func TestHeap(t *testing.T) {
	vidmem, virtual, host := uint32(0), uint32(rm.MemoryFlagVirtual), uint32(rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift)
	for _, c := range []struct {
		name     string
		function uint32
		set      func(o []byte)
		want     quota.Bytes
		status   uint32
	}{
		{"size", rm.HeapFnAllocSize, func(o []byte) { rm.PutU64(o, rm.HeapAllocSize, 1<<20) }, quota.MiB, 0},
		{"size range", rm.HeapFnAllocSizeRange, func(o []byte) { rm.PutU64(o, rm.HeapAllocRangeSize, 3<<20) }, 3 * quota.MiB, 0},
		{"tiled", rm.HeapFnAllocTiled, func(o []byte) {
			rm.PutU32(o, rm.HeapTiledHeight, 1<<10)
			rm.PutU32(o, rm.HeapTiledPitch, 1<<12)
			rm.PutU64(o, rm.HeapAllocSize, 1) // the driver recomputes it, so it counts for nothing
		}, 4 * quota.MiB, 0},
		{"tiled, beyond 32 bits", rm.HeapFnAllocTiled, func(o []byte) {
			rm.PutU32(o, rm.HeapTiledHeight, ^uint32(0))
			rm.PutU32(o, rm.HeapTiledPitch, ^uint32(0))
		}, 0, rm.StatusNoMemory},
		{"too large", rm.HeapFnAllocSize, func(o []byte) { rm.PutU64(o, rm.HeapAllocSize, uint64(testLimit)) }, 0, rm.StatusNoMemory},
		{"wraps around", rm.HeapFnAllocSize, func(o []byte) { rm.PutU64(o, rm.HeapAllocSize, ^uint64(0)) }, 0, rm.StatusNoMemory},
		{"address space", rm.HeapFnAllocSize, func(o []byte) {
			rm.PutU64(o, rm.HeapAllocSize, 1<<40)
			rm.PutU32(o, rm.HeapAllocFlags, virtual|rm.MemoryFlagLazy)
		}, 0, 0},
		{"host memory", rm.HeapFnAllocSize, func(o []byte) {
			rm.PutU64(o, rm.HeapAllocSize, 1<<20)
			rm.PutU32(o, rm.HeapAllocAttr, host)
		}, 0, 0},
		{"device memory that calls itself host memory where function 6 has its height", rm.HeapFnAllocTiled, func(o []byte) {
			rm.PutU32(o, rm.HeapTiledHeight, host)
			rm.PutU32(o, rm.HeapTiledPitch, 1)
			rm.PutU32(o, rm.HeapTiledAttr, vidmem)
		}, quota.Bytes(host), 0},
		{"the caller's pages", rm.HeapFnAllocOSDescriptor, func([]byte) {}, 0, rm.StatusNotSupported},
		{"hardware resources", rm.HeapFnHWAlloc, func([]byte) {}, 0, rm.StatusNotSupported},
		{"unknown", 99, func([]byte) {}, 0, rm.StatusNotSupported},
		{"another container's client", rm.HeapFnAllocSize, func(o []byte) { rm.PutU32(o, rm.HeapRoot, 1) }, 0, rm.StatusInvalidClient},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
				switch o := call.Outer; rm.U32(o, rm.HeapFunction) {
				case rm.HeapFnAllocTiled:
					rm.PutU64(o, rm.HeapAllocSize, uint64(rm.U32(o, rm.HeapTiledHeight))*uint64(rm.U32(o, rm.HeapTiledPitch)))
				}
				if rm.U32(call.Outer, rm.HeapAllocMemory) == 0 {
					rm.PutU32(call.Outer, rm.HeapAllocMemory, 0xcaf00001)
				}
			})))
			f := newFakeCall(t, g, fakeControl)
			o := make([]byte, rm.HeapSize)
			rm.PutU32(o, rm.HeapRoot, fakeClient)
			rm.PutU32(o, rm.HeapParent, fakeDevice)
			rm.PutU32(o, rm.HeapFunction, c.function)
			c.set(o)
			if rep := f.escape(rm.EscVidHeapControl, o); rep != replyDone || rm.U32(o, rm.HeapStatus) != c.status {
				t.Fatalf("%+v, status %s", rep, rm.StatusName(rm.U32(o, rm.HeapStatus)))
			}
			wantUsage(t, g.account, 0, 8*quota.MiB+c.want)
			if c.want == 0 {
				return
			}
			o = make([]byte, rm.HeapSize)
			rm.PutU32(o, rm.HeapRoot, fakeClient)
			rm.PutU32(o, rm.HeapFunction, rm.HeapFnFree)
			rm.PutU32(o, rm.HeapFreeMemory, 0xcaf00001)
			f.escape(rm.EscVidHeapControl, o)
			wantUsage(t, g.account, 0, 8*quota.MiB)
		})
	}
}

func TestHeapInfo(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
		rm.PutU64(call.Outer, rm.HeapTotal, 80<<30)
		rm.PutU64(call.Outer, rm.HeapFree, 70<<30)
		rm.PutU64(call.Outer, rm.HeapInfoSize, 60<<30)
	})))
	o := make([]byte, rm.HeapSize)
	rm.PutU32(o, rm.HeapRoot, fakeClient)
	rm.PutU32(o, rm.HeapParent, fakeDevice)
	rm.PutU32(o, rm.HeapFunction, rm.HeapFnInfo)
	newFakeCall(t, g, fakeControl).escape(rm.EscVidHeapControl, o)
	free := uint64(testLimit - 8*quota.MiB)
	want := []uint64{uint64(testLimit), free, free}
	if got := []uint64{rm.U64(o, rm.HeapTotal), rm.U64(o, rm.HeapFree), rm.U64(o, rm.HeapInfoSize)}; !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
