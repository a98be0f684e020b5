// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Host memory that the driver makes for a container (class 0x3e: cudaMallocHost, and a context's own buffers) is counted for no cgroup: the
// driver asks the kernel for it without __GFP_ACCOUNT (NV_GFP_KERNEL in nv-linux.h). So the guard counts it, and bounds it by
// max_host_memory. Memory of the caller's own that the driver pins (class 0x71) is in the caller's cgroup already, but not the driver's
// lists of its pages, 32 bytes a page together: 8 of user_pages (os_lock_user_pages in os-mlock.c), 16 of page_table (nvidia_pte_t, nv.c),
// 8 of RM's own (PteArray of its memory descriptor). A page may be pinned many times.

// hostFree is what a container gets without a look at what the host has left: a CUDA context needs some of it.
const hostFree = 256 * quota.MiB

const pageHost = 4 * quota.KiB

func (g *Guard) checkHostMemory(c *trappedCall) plan {
	return g.planHostMemory(c, c.allocClient(), rm.U64(c.params, rm.MemorySize), c.newObject(), func(o *object) quota.Bytes {
		o.handle = rm.U32(c.call.Outer, rm.AllocObject)
		return quota.Bytes(rm.U64(c.params, rm.MemorySize))
	})
}

// planHostMemory is the plan of host memory. granted reads the handle into o and the size, once the driver has answered.
func (g *Guard) planHostMemory(c *trappedCall, client uint32, size uint64, o object, granted func(*object) quota.Bytes) plan {
	want, ok := roundUp(size, pageHost)
	if !ok {
		return answer(c.status(rm.StatusNoMemory))
	}
	o.host = true
	return g.planCharged(c, client, cost{host: true, size: want}, func() (object, quota.Bytes) {
		o.size = max(want, granted(&o))
		return o, o.size
	})
}

// pinned is what the driver takes to pin memory, as a part of that.
const pinned = 128

// noteHostMemory is the plan of host memory by RM_ALLOC_MEMORY. The driver's own may be mapped at once (rm_create_mmap_context compares the
// process), the caller's is pinned, and so the call runs in the task. It counts as if it succeeded, until its handle is freed, and what it
// may have mapped is gone.
func (g *Guard) noteHostMemory(c *trappedCall, class uint32) plan {
	o := c.call.Outer
	if rm.U32(o, rm.AllocMemoryFlags)&rm.AllocMemoryRegister != 0 { // nobody honest has been seen to; clearParams says what it does
		return answer(c.status(rm.StatusNotSupported))
	}
	if !c.valid() { // the thread has been interrupted, and may be in another one: this one would leave a record for good
		return answer(replyDone)
	}
	client, handle := rm.U32(o, rm.AllocMemoryRoot), rm.U32(o, rm.AllocMemoryObject)
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return answer(c.status(rm.StatusInvalidClient))
	}
	defer lock.unlock()
	if handle == 0 { // the driver would choose one that the guard does not learn
		return answer(c.status(rm.StatusInvalidObjectNew))
	}
	if status := g.account.memoryParent(client, rm.U32(o, rm.AllocMemoryParent)); status != rm.StatusOK {
		return answer(c.status(status))
	}
	limit := rm.U64(o, rm.AllocMemoryLimit) // the size less 1
	size, ok := roundUp(limit+1, pageHost)
	takes := size
	if class == classOSDescriptor {
		takes = size / pinned
	}
	x := object{handle: handle, parent: rm.U32(o, rm.AllocMemoryParent), class: class, kind: rm.ClassSysmem, gpu: noGPU,
		host: true, madeInTask: true, size: size}
	old, taken := g.account.lookup(client, handle)
	switch {
	case taken && !old.madeInTask:
		return answer(c.status(rm.StatusInsertDuplicateName))
	case !taken || old.parent != x.parent: // what is there would be taken for what this call makes; a call may have been refused before
		if status := c.clearName(client, handle); status != rm.StatusOK {
			return answer(c.status(status))
		}
		old, taken = object{}, false
	}
	if old.charge != nil { // a call comes again when it was interrupted, or refused. If it was carried out the driver says so
		takes -= min(takes, old.charge.size)
	}
	w, as, err := g.windowOfTask(c, class, client, handle)
	if err != nil {
		return answer(c.deny(rm.StatusInsufficientResources, "hostwindow", "cannot follow the file of host memory that is mapped", "err", err))
	}
	defer func() { g.dropTaskWindow(w) }()
	if !ok || limit == ^uint64(0) || !g.account.roomForObject(rm.ClassSysmem, noGPU, 0, 0) || !g.reserveHost(takes) {
		return answer(c.status(rm.StatusNoMemory))
	}
	if !g.memoryCalls.let(c) {
		g.account.unreserve(cost{host: true, size: takes})
		return answer(c.deny(rm.StatusInsufficientResources, "memorycalls",
			"denied RM_ALLOC_MEMORY: too many threads are in it; pin by fewer at once", "max", maxMemoryCalls))
	}
	if taken {
		g.account.growHost(client, handle, size, takes)
	} else {
		g.account.addObject(client, x, 0, takes, takes)
	}
	if g.account.addTaskWindow(client, handle, w) {
		w = nil
	}
	return passOnFile(o, as)
}

// passOnFile has a call of RM_ALLOC_MEMORY made. Where the guard makes it, it names the file as the driver does.
func passOnFile(o []byte, as uint32) plan {
	named := rm.U32(o, rm.AllocMemoryFD)
	rm.PutU32(o, rm.AllocMemoryFD, as)
	p := pass()
	p.done = func() { rm.PutU32(o, rm.AllocMemoryFD, named) }
	return p
}

// memoryParent is what the driver answers to a call for host memory below an object. What it refuses must leave no record: that would seem
// to be below what is made under the name of its parent later.
func (a *account) memoryParent(client, parent uint32) (status uint32) {
	switch o, known := a.lookup(client, parent); {
	case !known:
		return rm.StatusObjectNotFound
	case o.kind != rm.ClassDevice:
		return rm.StatusInvalidObjectParent
	}
	return rm.StatusOK
}

// reserveHost takes host memory from what the container may have of it.
func (g *Guard) reserveHost(size quota.Bytes) bool {
	most := g.hostLimit()
	used, ok := g.account.reserveHost(size, most)
	if !ok {
		g.sweep()
		if used, ok = g.account.reserveHost(size, most); !ok {
			g.logOnce("hostmemory",
				"denied host memory: the driver has made all for the container that it may; max_host_memory in cgpu.toml is the bound",
				"size", size, "max", most)
			g.stats.denied.Add(1)
			return false
		}
	}
	if used > hostFree && !g.hostHasRoom(size) {
		g.account.unreserve(cost{host: true, size: size})
		return false
	}
	return true
}

// hostLimit is how much host memory the driver may make for the container.
func (g *Guard) hostLimit() quota.Bytes {
	part := g.cfg.Settings.MaxHostMemory
	if part.Percent > 0 && g.cfg.HostMemory == 0 {
		return hostFree // a part of what is not known: what a context needs
	}
	return part.Of(g.cfg.HostMemory)
}

// growHost adds what reserveHost took to what a handle of host memory is charged, which is of a size then at least.
func (a *account) growHost(client, handle uint32, size, more quota.Bytes) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil && c.objects[handle] != nil && c.objects[handle].charge != nil {
		o := c.objects[handle]
		o.size = max(o.size, size)
		o.charge.size += more
		a.books.note(o)
		a.books.note(o.charge)
		return
	}
	a.refund(&charge{size: more, host: true})
}

// reserveHost tells what is used then.
func (a *account) reserveHost(size, most quota.Bytes) (used quota.Bytes, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hostUsed > most || size > most-a.hostUsed {
		return a.hostUsed, false
	}
	a.hostUsed += size
	return a.hostUsed, true
}
