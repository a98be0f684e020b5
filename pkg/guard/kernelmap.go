package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Memory of a container that the driver maps into the kernel, because it was asked to. Each mapping takes addresses of the kernel's and
// page tables for them, of device memory a new piece of BAR1, and nobody counts any of it.

// maxSemaphores is how large the memory of a semaphore surface may be. The driver writes each slot of 32 bytes with all GPUs locked.
const maxSemaphores = quota.MiB

// checkSemaphoreSurface: the driver dups both memories into a client of its own, where they outlive their handles, and maps them whole
// (semsurfConstruct_IMPL). What the task makes of host memory itself may be larger than it said.
func (g *Guard) checkSemaphoreSurface(c *trappedCall) plan {
	client, o := c.allocClient(), c.newObject()
	o.of, o.with = rm.U32(c.params, rm.SemaphoreMemory), rm.U32(c.params, rm.SemaphoreMaxMemory)
	for _, handle := range [...]uint32{o.of, o.with} {
		if m, _ := g.account.lookup(client, handle); handle != 0 && (!m.host || m.inTask || m.size == 0 || m.size > maxSemaphores) {
			return answer(c.deny(rm.StatusInvalidArgument, "semaphores",
				"denied a semaphore surface: its memory is not host memory made by RM_ALLOC, or is too large", "size", m.size, "max", maxSemaphores))
		}
	}
	return g.makeObject(c, o)
}
