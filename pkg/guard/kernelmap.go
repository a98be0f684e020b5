// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Memory of a container that the driver maps into the kernel, because it was asked to. Each mapping takes addresses of the kernel's and
// page tables for them, of device memory a new piece of BAR1, and nobody counts any of it.

// maxKernelMap is how much of a container's memory one object or mapping has in the kernel's addresses: some notifiers.
const maxKernelMap = 64 * quota.KiB

// keepFromKernel takes from memory that is more than some notifiers the type by which the driver maps all of it into the kernel, where it
// is the host's, for as long as it lives (sysmemConstruct_IMPL). Otherwise that type is as good as that of any memory. b has it at off.
func keepFromKernel(b []byte, off int, size uint64) {
	if size > uint64(maxKernelMap) && rm.U32(b, off) == rm.MemoryTypeNotifier {
		rm.PutU32(b, off, rm.MemoryTypeImage)
	}
}

// fitsKernel reports that memory may be mapped into the kernel up to a limit (the last byte), as notifiers are that it writes: little of
// the host's.
func (a *account) fitsKernel(client, memory uint32, limit uint64) bool {
	o, _ := a.lookup(client, memory)
	return !o.charge.isDeviceMemory() && limit < uint64(maxKernelMap)
}

// checkContextDMA: a name of memory, which graphics and video libraries use for notifiers. It ends with the memory's handle.
func (g *Guard) checkContextDMA(c *trappedCall) plan {
	client, p, o := c.allocClient(), c.params, c.newObject()
	memory, limit := rm.U32(p, rm.ContextDMAMemory), rm.U64(p, rm.ContextDMALimit)
	if c.isUncounted(c.target(), client, memory) {
		return answer(c.denyUnseen())
	}
	gpu, subdevice := g.account.gpuOf(client, o.parent), rm.U32(p, rm.ContextDMASubdevice)
	if g.account.onOtherGPU(client, memory, gpu) || subdevice != 0 && g.account.gpuOf(client, subdevice) != gpu {
		return answer(c.denyOtherGPU())
	}
	if rm.U32(p, rm.ContextDMAFlags)&rm.ContextDMAFlagKernel != 0 && !g.account.fitsKernel(client, memory, limit) {
		return answer(c.deny(rm.StatusNotSupported, "contextdma",
			"denied a context DMA that the kernel maps: only of little host memory", "limit", limit, "max", maxKernelMap))
	}
	o.space = memory
	return g.planObject(c, o)
}

// maxSemaphores is how large the memory of a semaphore surface may be. The driver writes each slot of 32 bytes with all GPUs locked.
const maxSemaphores = quota.MiB

// checkSemaphoreSurface: the driver dups both memories into a client of its own, where they outlive their handles, and maps them whole
// (semsurfConstruct_IMPL). What the task makes of host memory itself may be larger than it said.
func (g *Guard) checkSemaphoreSurface(c *trappedCall) plan {
	o := c.newObject()
	for at, kept := range map[int]**charge{rm.SemaphoreMemory: &o.charge, rm.SemaphoreMaxMemory: &o.secondCharge} {
		handle := rm.U32(c.params, at)
		m, ok := c.acquireObject(c.allocClient(), handle)
		if !ok {
			return answer(c.status(rm.StatusInvalidClient))
		}
		if handle != 0 && (!m.host || m.madeInTask || m.size == 0 || m.size > maxSemaphores) {
			return answer(c.deny(rm.StatusInvalidArgument, "semaphores",
				"denied a semaphore surface: its memory is not host memory made by RM_ALLOC, or is too large", "size", m.size, "max", maxSemaphores))
		}
		if !c.roomForReferences(m.charge, 0) {
			return answer(c.denyReferences())
		}
		*kept = m.charge
	}
	return g.planObject(c, o)
}

// checkMapper: what would map and unmap memory later, when semaphores say so. Graphics libraries make one with each device and hand it work
// for sparse resources alone; the control for that is denied. So it never writes its notification, and needs one place in its queue, which
// lies in the kernel (memmapperConstruct_IMPL). It maps the notification's memory, with which it ends, and keeps the semaphore surface.
func (g *Guard) checkMapper(c *trappedCall) plan {
	if len(c.params) != rm.MapperSize {
		return answer(c.deny(rm.StatusNotSupported, "mapper", "denied a memory mapper: its parameters are known from driver 555 on"))
	}
	o := c.newObject()
	surface, ok := c.acquireObject(c.allocClient(), rm.U32(c.params, rm.MapperSurface))
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	o.space = rm.U32(c.params, rm.MapperNotification)
	m, ok := c.acquireObject(c.allocClient(), o.space)
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	const notification = 4 // bytes
	if surface.kind != rm.ClassSemaphores || !m.host || m.madeInTask || m.size < notification || m.size > maxSemaphores ||
		rm.U64(c.params, rm.MapperOffset) > uint64(m.size-notification) {
		return answer(c.deny(rm.StatusInvalidArgument, "mapper",
			"denied a memory mapper: it has no semaphore surface, or its notification does not "+
				"lie in host memory made by RM_ALLOC, or that is too large", "size", m.size, "max", maxSemaphores))
	}
	o.charge, o.secondCharge = surface.charge, surface.secondCharge
	rm.PutU32(c.params, rm.MapperQueue, min(rm.U32(c.params, rm.MapperQueue), 1))
	return g.planObject(c, o)
}
