// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Spilling gives a container more memory than its part of the GPU: when that part is full, what it asks for as device memory
// (class 0x40) is made as host memory (class 0x3e) that the GPU reaches over the bus. CUDA maps and uses either in the same
// way, and the program cannot tell but by the speed (docs/measurements.md).
//
// The kernel counts this memory for no cgroup, since the driver allocates it, so the guard does: a container has its spill, the
// ledger bounds the sum of all, and an allocation that would leave the host less than its reserve is refused.

// How RM is asked for the memory: as libcuda asks for host memory of its own, in pages of 4 KiB that need not be neighbours
// (nvos.h: NVOS32_ALLOC_FLAGS_IGNORE_BANK_PLACEMENT, MEMORY_HANDLE_PROVIDED, MAP_NOT_REQUIRED; NVOS32_ATTR_LOCATION PCI,
// PHYSICALITY NONCONTIGUOUS, COHERENCY CACHED, PAGE_SIZE 4KB; NVOS32_ATTR2_GPU_CACHEABLE NO, ZBC PREFER_NO_ZBC).
const (
	spillFlags = 0xc001
	spillAttr  = 0x2a800000
	spillAttr2 = 0x9
)

// spills decides where new device memory goes: true for the host's. That is when it does not fit into the limit any more, and
// so what was allocated first stays on the GPU (docs/measurements.md, "What to spill").
func (g *Guard) spills(gpu int, want quota.Bytes) bool {
	if u := g.account.usage(gpu); u.native || u.spill == 0 || u.fits(want) {
		return false
	}
	fits := func() bool { u := g.account.usage(gpu); return u.fits(want) }
	g.sweepUntil(fits) // something may have been closed unnoticed
	return !fits()
}

// planSpilled is the plan of host memory in place of device memory.
func (g *Guard) planSpilled(c *trappedCall, gpu int, want quota.Bytes) plan {
	if !g.account.reserveSpill(gpu, want) {
		return answer(c.status(rm.StatusNoMemory))
	}
	if !g.hostHasRoom(want) {
		g.account.unreserveSpill(gpu, want)
		return answer(c.status(rm.StatusNoMemory))
	}
	o, params, client := c.call.Outer, c.params, c.allocClient()
	before := [3]uint32{rm.U32(params, rm.MemoryFlags), rm.U32(params, rm.MemoryAttr), rm.U32(params, rm.MemoryAttr2)}
	rm.PutU32(o, rm.AllocClass, classSystem)
	rm.PutU32(params, rm.MemoryFlags, spillFlags)
	rm.PutU32(params, rm.MemoryAttr, spillAttr)
	rm.PutU32(params, rm.MemoryAttr2, spillAttr2)
	rm.PutU64(params, rm.MemoryAlignment, 0) // of a physical address, which this memory has none of
	rm.PutU64(params, rm.MemorySize, uint64(want))
	return plan{ask: true, cancel: func() {
		g.account.unreserveSpill(gpu, want)
		status := c.statusWord()
		c.restoreInput()
		if c.executed {
			c.status(status)
		}
	}, commit: func() {
		granted := quota.Bytes(rm.U64(params, rm.MemorySize))
		rm.PutU32(o, rm.AllocClass, classVidmem)
		rm.PutU32(params, rm.MemoryFlags, before[0])
		rm.PutU32(params, rm.MemoryAttr, before[1])
		rm.PutU32(params, rm.MemoryAttr2, before[2])
		copy(params[rm.MemoryAlignment:rm.MemoryAlignment+8], c.before[1][rm.MemoryAlignment:])
		handle := rm.U32(o, rm.AllocObject)
		g.account.addObject(client, object{handle: handle, parent: c.allocParent(), class: classVidmem, kind: rm.ClassVidmem,
			gpu: noGPU, spilled: true, size: max(want, granted)}, gpu, want, max(want, granted))
		c.undo = g.undoObject(c.target(), client, handle)
		g.stats.spills.Add(1)
	}}
}

// hostHasRoom reports that the host can give size and keep its reserve.
func (g *Guard) hostHasRoom(size quota.Bytes) bool {
	available, err := availableMemory()
	if err != nil {
		g.logOnce("meminfo", "cannot tell how much memory the host has left; nothing is spilled", "err", err)
		return false
	}
	part := g.cfg.Settings.SpillReserve
	if part.Percent > 0 && g.cfg.HostMemory == 0 { // a percentage of nothing would keep nothing
		g.logOnce("hostmemory", "the host's memory is not known, of which spill_reserve is a part; "+
			"nothing is spilled: give spill_reserve in cgpu.toml as a size", "percent", part.Percent)
		return false
	}
	reserve := part.Of(g.cfg.HostMemory)
	if available < reserve || size > available-reserve {
		g.events.Note(event.Event{Kind: event.Denied,
			Text: fmt.Sprintf("%v of host memory: the host has %v left, of which spill_reserve keeps %v", size, available, reserve)})
		g.logOnce("hostroom", "refused host memory: the host would have less left than spill_reserve",
			"size", size, "available", available, "reserve", reserve)
		return false
	}
	return true
}

// availableMemory is what the kernel could give without swapping (MemAvailable of /proc/meminfo).
func availableMemory() (quota.Bytes, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	_, rest, _ := bytes.Cut(b, []byte("MemAvailable:"))
	fields := bytes.Fields(rest[:min(len(rest), 64)])
	if len(fields) == 0 {
		return 0, os.ErrNotExist
	}
	kib, err := strconv.ParseUint(string(fields[0]), 10, 54)
	return quota.Bytes(kib) * quota.KiB, err
}

// reserveSpill takes size from a GPU's spill before the driver is asked. False: it does not fit, which counts as a denial.
func (a *account) reserveSpill(gpu int, size quota.Bytes) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := &a.gpus[gpu]
	if g.spilled > g.spill || size > g.spill-g.spilled {
		a.deny(gpu, size, true)
		return false
	}
	g.charge(size, true)
	return true
}

func (a *account) unreserveSpill(gpu int, size quota.Bytes) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gpus[gpu].refund(size, true)
}

// isSpilled reports that a handle is of memory that was spilled.
func (a *account) isSpilled(client, handle uint32) bool {
	o, ok := a.lookup(client, handle)
	return ok && o.spilled
}

// refuseSpilled answers what cannot be done with spilled memory, such as giving it to other processes: NOT_SUPPORTED, which CUDA
// reports as such (cudaErrorNotSupported for an export, on the H200).
func (g *Guard) refuseSpilled(c *trappedCall, what string) reply {
	g.logOnce("spilled"+what, "refused for memory that was spilled to the host", "what", what)
	g.stats.denied.Add(1)
	return c.status(rm.StatusNotSupported)
}
