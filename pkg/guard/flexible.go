// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// A memory pool that other processes can be given (cuMemPoolExportToShareableHandle) has flexible NVLink addresses on a GPU behind an
// NVSwitch: objects of 512 MiB without memory. libcuda attaches device memory as the pool grows, and detaches it before it is freed
// (580.159.04, two H200; test/gpu/workloads/pools.cu). Only another GPU would use them, and of addresses to which nothing is attached
// mem_fabric.c and cl00f8.h do not say whom an access hurts: so nobody maps them, and a pool is for one GPU.

const (
	// flexibleSize is the largest object: libcuda's. The driver writes an entry for each 2 MiB that is attached, under the GPU's lock.
	flexibleSize = fabricPageLarge
	// maxAttached bounds the pieces of memory that are attached on a GPU: memory that is attached everywhere is taken from all places when it
	// is freed, in one hold of the locks, 15 µs each. libcuda attaches 32 MiB at a time.
	maxAttached = 1 << 13
	// attachTime is paid for a piece that is attached and taken away again: 15 to 18 µs and 13 to 17 µs for 32 MiB (an H200, a trace of
	// workloads/pools.cu). attachEntry is for each 2 MiB of it besides, since a piece may be larger: a guess on the safe side, not measured.
	attachTime  = 30 * time.Microsecond
	attachEntry = time.Microsecond
	// flexibleSpare is how much a container may have beyond its limit: each pool begins an object.
	flexibleSpare = 16 * flexibleSize
)

// NV00F8_CTRL_ATTACH_MEM_PARAMS and NV00F8_CTRL_DETACH_MEM_PARAMS (ctrl00f8.h).
const (
	controlFlexibleAttach = 0xf80103

	flexibleMost        = 64 // NV00F8_MAX_ATTACHABLE_MEM_INFOS, NV00F8_MAX_DETACHABLE_OFFSETS
	flexibleInfoSize    = 32 // handle, then three u64
	flexibleLength      = 24 // of an info: mapLength
	flexibleAttachCount = flexibleMost * flexibleInfoSize
	flexibleDetachCount = flexibleMost * 8
	flexibleDone        = 8 // after either count: how many the driver has done, also where it fails
)

// isFlexible reports NVLink addresses that have no memory of their own.
func (ch *charge) isFlexible() bool { return ch != nil && ch.flexible > 0 }

// isFlexible is the same of what a handle stands for.
func (a *account) isFlexible(client, handle uint32) bool {
	o, _ := a.lookup(client, handle)
	if o.kind == rm.ClassContextDMA {
		o, _ = a.lookup(client, o.space)
	}
	return o.charge.isFlexible()
}

func (c *trappedCall) denyFlexible() reply {
	return c.deny(rm.StatusNotSupported, "flexiblemap", "denied a mapping of NVLink addresses that have no memory of their own")
}

// checkFlexible: NVLink addresses without memory.
func (g *Guard) checkFlexible(c *trappedCall, o object) plan {
	gpu, size := g.account.gpuOf(c.allocClient(), o.parent), quota.Bytes(rm.U64(c.params, rm.FabricSize))
	if _, ok := g.abi.Control(controlFlexibleAttach); !ok {
		return answer(c.status(rm.StatusNotSupported))
	}
	if gpu == noGPU || size == 0 || size > flexibleSize || rm.U32(c.params, g.abi.Fabric().Memory) != 0 {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	var ch *charge
	begin := func() bool { ch = g.account.beginFlexible(gpu, size); return ch != nil }
	if !begin() {
		g.sweepUntil(begin) // something may have been closed unnoticed
	}
	if ch == nil && !begin() {
		return answer(c.deny(rm.StatusInsufficientResources, "flexible", "denied NVLink addresses: the container's pools have too many"))
	}
	o.size, o.charge, o.flexible = size, ch, true
	p := g.planObject(c, o)
	alignment := rm.U64(c.params, rm.FabricAlignment)
	rm.PutU64(c.params, rm.FabricAlignment, fabricPageLarge)
	p.done = func() {
		rm.PutU64(c.params, rm.FabricAlignment, alignment)
		g.account.endFlexible(ch)
	}
	return p
}

// beginFlexible takes addresses for a call that makes some; nil: the container has too many.
func (a *account) beginFlexible(gpu int, size quota.Bytes) *charge {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := &a.gpus[gpu]
	if most := g.limit + flexibleSpare; !g.native && g.flexible+size > most {
		return nil
	}
	g.flexible += size
	return &charge{gpu: gpu, flexible: size, calls: 1}
}

// endFlexible ends the call. Handles keep the addresses, if there are any.
func (a *account) endFlexible(ch *charge) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.countReference(ch, &ch.calls, -1)
}

// checkFlexibleAttach: device memory of the addresses' GPU is attached, all of it the container's. What is attached ends with the memory
// or with the handle by which it was attached, since 570: before, the driver dups it into a client of its own, so nothing is attached
// there. By another handle on the same addresses the driver would take it out of a list in which it is not (_memoryFabricDetachMem), so
// there is one that may.
func (g *Guard) checkFlexibleAttach(c *trappedCall) plan {
	client := c.controlClient()
	o, ok := g.account.lookup(client, c.controlObject())
	if !ok || !o.flexible {
		return answer(c.denyAttach())
	}
	n := int(rm.U16(c.params, flexibleAttachCount))
	if n == 0 || n > flexibleMost {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	locks := time.Duration(n) * attachTime
	for i := range n {
		info := c.params[i*flexibleInfoSize:]
		memory := rm.U32(info, 0)
		m, ok := c.acquireObject(client, memory)
		switch {
		case !ok:
			return answer(c.status(rm.StatusInvalidClient))
		case m.kind != rm.ClassVidmem || m.charge == nil || m.charge.host:
			return answer(c.denyAttach())
		case m.charge.spilled:
			return answer(g.refuseSpilled(c, "fabric"))
		case g.account.onOtherGPU(client, memory, o.charge.gpu):
			return answer(c.denyOtherGPU())
		}
		locks += time.Duration(min(rm.U64(info, flexibleLength), flexibleSize)/fabricPage) * attachEntry
	}
	if !g.waitToPay(c, locks) {
		return answer(fail(unix.EINTR))
	}
	if !g.account.attach(o.charge, n) {
		return answer(c.deny(rm.StatusInsufficientResources, "attached",
			"denied memory to NVLink addresses: the container's have too many pieces",
			"max", maxAttached))
	}
	rm.PutU32(c.params, flexibleAttachCount+flexibleDone, 0)
	settle := func() { g.account.attach(o.charge, int(rm.U16(c.params, flexibleAttachCount+flexibleDone))-n) }
	return plan{ask: true, commit: settle, cancel: settle}
}

// attach counts pieces of memory that are attached, or taken away. False: there are too many.
func (a *account) attach(ch *charge, n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := &a.gpus[ch.gpu]
	if n > 0 && !g.native && g.attached+n > maxAttached {
		return false
	}
	n = max(n, -ch.attached)
	ch.attached += n
	g.attached = max(0, g.attached+n)
	return true
}

// checkFlexibleDetach: what is taken away has been paid for.
func (g *Guard) checkFlexibleDetach(c *trappedCall) plan {
	o, ok := g.account.lookup(c.controlClient(), c.controlObject())
	if !ok || !o.flexible {
		return answer(c.denyAttach())
	}
	if n := rm.U16(c.params, flexibleDetachCount); n == 0 || n > flexibleMost {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	rm.PutU32(c.params, flexibleDetachCount+flexibleDone, 0)
	settle := func() { g.account.attach(o.charge, -int(rm.U16(c.params, flexibleDetachCount+flexibleDone))) }
	return plan{ask: true, commit: settle, cancel: settle}
}

func (c *trappedCall) denyAttach() reply {
	return c.deny(rm.StatusInvalidObjectHandle, "attach", "denied to attach or detach what is no device memory, or at what is no flexible "+
		"NVLink addresses of the container's own")
}
