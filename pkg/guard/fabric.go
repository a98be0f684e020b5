// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Fabric objects (class 0xf8) are NVLink addresses of device memory, by which other GPUs behind an NVSwitch reach it. libcuda makes one for
// each cudaMalloc of 512 MiB and more on such a GPU, and fails without (seen on two H200, 580.159.04): in pages of 512 MiB, and if that is
// refused of 2 MiB, as much as the memory, aligned to a page. All who use a GPU share its NVLink addresses, so a container has just these,
// for memory of its own, once for each.

const classFabric = 0xf8 // NV_MEMORY_FABRIC

// NV_MEMORY_FABRIC_PAGE_SIZE_2M and _512M (class/cl00f8.h). There is one of 256 GiB, which nobody has been seen to ask for.
const (
	fabricPage      = 2 << 20
	fabricPageLarge = 512 << 20
)

// checkFabric: the driver looks at size and alignment only after it has taken addresses, page by page if that is asked for, under all
// locks.
func (g *Guard) checkFabric(c *trappedCall) plan {
	o, form := c.newObject(), g.abi.Fabric()
	flags, page := rm.U32(c.params, form.Flags), g.abi.FabricPage(c.params)
	if flags == rm.FabricFlexible && page == fabricPageLarge {
		return g.checkFlexible(c, o)
	}
	if flags&^rm.FabricContiguous != 0 || page != fabricPage && page != fabricPageLarge {
		return answer(c.deny(rm.StatusNotSupported, "fabricflags", "denied NVLink addresses of another kind than CUDA's",
			"flags", flags, "page", page))
	}
	memory := rm.U32(c.params, form.Memory)
	m, ok := c.acquireObject(c.allocClient(), memory)
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	if m.kind != rm.ClassVidmem || m.charge == nil || m.charge.host {
		return answer(c.deny(rm.StatusInvalidObjectHandle, "fabric", "denied NVLink addresses of what is no device memory of the container's"))
	}
	if g.account.onOtherGPU(c.allocClient(), memory, g.account.gpuOf(c.allocClient(), o.parent)) {
		return answer(c.denyOtherGPU())
	}
	if o.size = quota.Bytes(rm.U64(c.params, rm.FabricSize)); o.size > m.charge.size {
		return answer(c.status(rm.StatusInvalidArgument)) // as the driver, later
	}
	if m.spilled && len(g.gpus) > 1 {
		return answer(g.refuseSpilled(c, "fabric"))
	}
	if !g.account.beginFabric(m.charge) {
		return answer(c.deny(rm.StatusInsufficientResources, "fabricagain", "denied NVLink addresses of memory that has some"))
	}
	o.charge = m.charge // which it keeps, as a channel does
	p := g.planObject(c, o)
	asked := slices.Clone(c.params)
	rm.PutU64(c.params, rm.FabricAlignment, page)
	if m.spilled {
		makeFlexible(c.params, form)
	}
	made := p.commit
	p.commit = func() {
		made()
		g.account.madeFabric(m.charge)
	}
	p.done = func() {
		copy(c.params, asked)
		g.account.endFabric(m.charge)
	}
	return p
}

// makeFlexible has the driver make addresses without memory, of which it has none for memory of the host. Only another GPU would use them.
func makeFlexible(params []byte, form rm.FabricForm) {
	rm.PutU32(params, form.Flags, rm.U32(params, form.Flags)|rm.FabricFlexible)
	rm.PutU64(params, form.Offset, 0)
	rm.PutU32(params, form.Memory, 0)
}

// beginFabric begins a call that makes NVLink addresses of memory. False: it has some, by a handle, or perhaps in a mapping or a file,
// where they outlive it.
func (a *account) beginFabric(ch *charge) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ch.fabrics > 0 || ch.fabric && ch.references > 0 {
		return false
	}
	ch.fabrics++
	return true
}

func (a *account) madeFabric(ch *charge) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch.fabric = true
	a.books.note(ch)
}

// endFabric ends the call. A handle counts by itself.
func (a *account) endFabric(ch *charge) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch.fabrics--
}

// countFabric notes a handle on NVLink addresses, or its end. The account is locked.
func (o *object) countFabric(by int) {
	if o.kind == rm.ClassFabric && o.charge != nil {
		o.charge.fabrics += by
	}
}
