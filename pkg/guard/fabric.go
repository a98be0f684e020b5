package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Fabric objects (class 0xf8) are NVLink addresses of device memory, by which other GPUs behind an NVSwitch reach it. libcuda makes one for
// each cudaMalloc of 512 MiB and more on such a GPU, and fails without (seen on two H200, 580.159.04). All who use a GPU share its NVLink
// addresses, so a container has them for memory of its own, once for each.

// fabricPage is the largest page of NVLink addresses that CUDA asks for (NV_MEMORY_FABRIC_PAGE_SIZE_512M).
const fabricPage = 512 << 20

func (g *Guard) checkFabric(c *trappedCall) plan {
	o, form := c.newObject(), g.abi.Fabric()
	if rm.U32(c.params, form.Flags)&rm.FabricFlexible != 0 {
		return answer(c.deny(rm.StatusNotSupported, "flexible", "denied NVLink addresses without memory"))
	}
	memory := rm.U32(c.params, form.Memory)
	m, ok := c.refer(c.allocClient(), memory)
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	if m.kind != rm.ClassVidmem || m.charge == nil {
		return answer(c.deny(rm.StatusInvalidObjectHandle, "fabric", "denied NVLink addresses of what is no device memory of the container's"))
	}
	if g.account.elsewhere(c.allocClient(), memory, g.account.gpuOf(c.allocClient(), o.parent)) {
		return answer(c.denyElsewhere())
	}
	if m.spilled && !g.fitsFabric(c, m) {
		return answer(g.refuseSpilled(c, "fabric"))
	}
	if !g.account.takeFabric(m.charge) {
		return answer(c.deny(rm.StatusInsufficientResources, "fabricagain", "denied NVLink addresses of memory that has some"))
	}
	o.charge = m.charge // which it keeps, as a channel does
	p := g.makeObject(c, o)
	p.cancel = func() { g.account.giveFabric(m.charge) }
	if m.spilled {
		p.done = makeFlexible(c.params, form)
	}
	return p
}

// fitsFabric reports whether spilled memory may have NVLink addresses in name. The driver has none of host memory, so they have no memory behind
// them: nobody may be there to use them, and they must not be more than real ones would be.
func (g *Guard) fitsFabric(c *trappedCall, m object) bool {
	size := quota.Bytes(rm.U64(c.params, rm.FabricSize))
	return len(g.gpus) == 1 && size < m.charge.size+fabricPage
}

// makeFlexible has the driver make addresses without memory. The result puts back what the task has asked for.
func makeFlexible(params []byte, form rm.FabricForm) func() {
	flags, offset, memory := rm.U32(params, form.Flags), rm.U64(params, form.Offset), rm.U32(params, form.Memory)
	rm.PutU32(params, form.Flags, flags|rm.FabricFlexible)
	rm.PutU64(params, form.Offset, 0)
	rm.PutU32(params, form.Memory, 0)
	return func() {
		rm.PutU32(params, form.Flags, flags)
		rm.PutU64(params, form.Offset, offset)
		rm.PutU32(params, form.Memory, memory)
	}
}

// takeFabric notes that memory has NVLink addresses. They can outlive their handle, in a mapping or a file, so the memory has no others as long
// as it is charged. False: it has some.
func (a *account) takeFabric(ch *charge) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ch.fabric {
		return false
	}
	ch.fabric = true
	return true
}

// giveFabric: the driver has made none.
func (a *account) giveFabric(ch *charge) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch.fabric = false
}
