// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The driver takes page tables out of a GPU's memory that no allocation shows: for a range of addresses (NV50_MEMORY_VIRTUAL) when it is
// made, as for pages of 4 KiB, whatever is mapped there later. What that comes to is in package rm, pagetables.go.

// vaSpaceSize is charged for an address space: three pages of directories that RM keeps ready, or what UVM has for an empty one.
const vaSpaceSize = 16 * quota.KiB

// vaSpacesPerTSG bounds address spaces, with the bound of channel groups. A CUDA context has two, and four groups.
const vaSpacesPerTSG = 4

// tableSlack is how far page tables may pass a container's limit. A program that has filled its limit can then still map host memory, as on
// a whole card, where the driver has put some memory aside.
const tableSlack = 16 * quota.MiB

// checkVASpace: a new one, or the device's own. The driver gives the GPU's, which all share, to whoever asks (vaspaceapiConstruct_IMPL),
// and who dups a range of one with the FLA flag gets the GPU's FLA space with it (_virtmemCopyConstruct).
func (g *Guard) checkVASpace(c *trappedCall) plan {
	index, flags := rm.U32(c.params, rm.VASpaceIndex), rm.U32(c.params, rm.VASpaceFlags)
	if index != rm.VASpaceNew && index != rm.VASpaceDevice || flags&rm.VASpaceFlagFLA != 0 {
		return answer(c.deny(rm.StatusNotSupported, "sharedspace", "denied an address space that all users of the GPU share",
			"index", index, "flags", flags))
	}
	// Else the driver takes tables that do not fit on the GPU from the host, uncounted (gvaspaceReserveMempool_IMPL), or from the little
	// that it has put aside for itself.
	rm.PutU32(c.params, rm.VASpaceFlags, flags&^(rm.VASpaceFlagRetryHost|rm.VASpaceFlagHeapManaged))
	gpu, ok := g.gpuFor(c.allocClient(), c.allocParent())
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	o := c.newObject()
	return g.planCharged(c, c.allocClient(), cost{gpu: gpu, size: vaSpaceSize, slack: tableSlack}, func() (object, quota.Bytes) {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		return o, vaSpaceSize
	})
}

func (g *Guard) checkVirtual(c *trappedCall) plan {
	gpu, ok := g.gpuFor(c.allocClient(), c.allocParent())
	if !ok {
		return answer(c.status(rm.StatusInvalidObjectParent))
	}
	o := c.newObject()
	o.space = rm.U32(c.params, rm.MemoryVASpace)
	return g.planVirtual(c, c.allocClient(), gpu, rm.U32(c.params, rm.MemoryFlags), func() (object, uint64, uint32, uint32) {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		return o, rm.U64(c.params, rm.MemorySize), rm.U32(c.params, rm.MemoryAttr), rm.U32(c.params, rm.MemoryAttr2)
	})
}

// tablesAtOnce reports that the driver makes a range's tables when it makes the range. A sparse one has them at once, whatever else is
// asked (stdmemValidateParams, gvaspaceAlloc_IMPL).
func tablesAtOnce(flags uint32) bool {
	return flags&rm.MemoryFlagSparse != 0 || flags&(rm.MemoryFlagLazy|rm.MemoryFlagExternal) == 0
}

// planVirtual is the plan of a range of GPU addresses. what reads the object, its size and its attributes: as asked, and then as granted.
func (g *Guard) planVirtual(c *trappedCall, client uint32, gpu int, flags uint32,
	what func() (o object, size uint64, attr, attr2 uint32)) plan {
	_, size, attr, attr2 := what()
	granted, any, ok := rm.VirtualSize(size, attr, attr2)
	want := cost{gpu: gpu, slack: tableSlack}
	if tablesAtOnce(flags) {
		if !ok || granted > rm.MaxVirtual {
			return answer(c.deny(rm.StatusNoMemory, "virtual",
				"denied a range of GPU addresses: it is too large to have all its page tables at once",
				"size", quota.Bytes(size), "max", quota.Bytes(rm.MaxVirtual)))
		}
		if !g.payForRange(c, granted) {
			return answer(fail(unix.EINTR))
		}
		want.size = quota.Bytes(rm.PagePool(granted, any))
	}
	return g.planCharged(c, client, want, func() (object, quota.Bytes) {
		o, size, _, _ := what()
		if want.size == 0 {
			return o, 0
		}
		return o, max(want.size, quota.Bytes(rm.PagePool(size, any)))
	})
}
