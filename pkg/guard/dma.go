// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// RM_MAP_MEMORY_DMA maps memory of a client into a range of GPU addresses. The driver takes page tables for the length that the caller
// names before it compares that with the memory (serverInterMap_Prologue), and what it took for a call that fails stays in the GPU's pool.
// So the guard compares first, and charges the tables to whoever maps.

// maxDMAMaps bounds the mappings of one container: each takes some of the host's kernel memory. A CUDA context has about 25.
const maxDMAMaps = 1 << 16

// dmaMap is memory mapped into a range of GPU addresses by RM_MAP_MEMORY_DMA. It is gone with either object.
type dmaMap struct {
	entry
	mapper, memory *object
	at             dmaPlace
	length         uint64
	gpu            int
	tables         quota.Bytes // charged; 0 in a range whose tables were charged when it was made
}

// dmaPlace is where a mapping is: the driver tells mappings apart by the device that was named, too.
type dmaPlace struct {
	device  uint32
	address uint64
}

// checkMapDMA: memory is mapped into a range of GPU addresses.
func (g *Guard) checkMapDMA(c *trappedCall) plan {
	o := c.call.Outer
	form, ok := g.abi.MapDMA(len(o))
	if !ok {
		return answer(fail(unix.EINVAL))
	}
	client, device, memory, length := rm.U32(o, rm.DMAClient), rm.U32(o, rm.DMADevice), rm.U32(o, rm.DMAMemory), rm.U64(o, form.Length)
	mapper, ok := g.account.lookup(client, rm.U32(o, rm.DMAMapper))
	gpu := g.account.gpuOf(client, device)
	if !ok || gpu == noGPU {
		return answer(c.status(rm.StatusInvalidObjectHandle))
	}
	// Where a range names no address space it is that of the device.
	if t := c.target(); c.isUncounted(t, client, memory) || c.isUnseen(t, client, device) || c.isUnseen(t, client, mapper.handle) {
		return answer(c.denyUnseen())
	}
	// Peers map each other's memory by UVM. By this call they could with NVOS46_FLAGS_P2P, which CUDA does not use.
	if g.account.onOtherGPU(client, memory, gpu) || g.account.gpuOf(client, mapper.handle) != gpu {
		return answer(c.denyOtherGPU())
	}
	if g.account.isFlexible(client, memory) {
		return answer(c.denyFlexible())
	}
	if !g.mapFits(client, memory, rm.U64(o, rm.DMAMapOffset), length) {
		return answer(c.deny(rm.StatusInvalidLimit, "dmalength", "denied a mapping that is longer than its memory",
			"length", quota.Bytes(length)))
	}
	flags := rm.U32(o, rm.DMAFlags)
	if flags&rm.DMAFlagKernel != 0 && !g.account.fitsKernel(client, memory, length-1) {
		// Programs that ask for it by the way do without. One that names the addresses for errors gets no channel.
		g.logOnce("dmakernel", "made a mapping without the kernel's own, which is for small host memory", "length", quota.Bytes(length))
		rm.PutU32(o, rm.DMAFlags, flags&^rm.DMAFlagKernel)
	}
	if !g.account.roomForDMA() {
		return answer(c.deny(rm.StatusInsufficientResources, "dmacount", "denied a mapping: the container has too many", "max", maxDMAMaps))
	}
	if !g.payForTables(c, length) {
		return answer(fail(unix.EINTR))
	}
	want := cost{gpu: gpu, slack: tableSlack}
	if mapper.charge == nil || mapper.isMemory() { // else it is a range that was charged as a whole
		want.size = quota.Bytes(rm.PageTables(length, false))
	}
	if !g.reserve(want) {
		return answer(c.status(rm.StatusNoMemory))
	}
	done := func() { rm.PutU32(o, rm.DMAFlags, flags) }
	return plan{ask: true, done: done, cancel: func() { g.account.unreserve(want) }, commit: func() {
		at := dmaPlace{device, rm.U64(o, form.Address)}
		g.account.addDMA(client, mapper.handle, memory, dmaMap{at: at, length: length, gpu: gpu, tables: want.size})
		t := c.target() // now: c serves other calls by the time of an undo
		c.undo = func() { g.unmapDMA(t, client, mapper.handle, at) }
	}}
}

// checkUnmapDMA: a mapping is taken away, or a part of it.
func (g *Guard) checkUnmapDMA(c *trappedCall) plan {
	o := c.call.Outer
	form, ok := g.abi.UnmapDMA(len(o))
	if !ok {
		return answer(fail(unix.EINVAL))
	}
	for _, handle := range []uint32{rm.U32(o, rm.DMADevice), rm.U32(o, rm.DMAMapper)} {
		if c.isUnseen(c.target(), rm.U32(o, rm.DMAClient), handle) {
			return answer(c.denyUnseen())
		}
	}
	// Of flexible NVLink addresses this would detach all that is attached there.
	if x, _ := g.account.lookup(rm.U32(o, rm.DMAClient), rm.U32(o, rm.DMAMapper)); x.kind == rm.ClassFabric {
		return answer(c.status(rm.StatusInvalidObjectHandle))
	}
	if rm.U64(o, form.Length) != 0 && !g.account.roomForDMA() { // a part: one mapping becomes two
		return answer(c.status(rm.StatusInsufficientResources))
	}
	return plan{ask: true, commit: func() {
		at := dmaPlace{rm.U32(o, rm.DMADevice), rm.U64(o, form.Address)}
		g.account.removeDMA(rm.U32(o, rm.DMAClient), rm.U32(o, rm.DMAMapper), at, rm.U64(o, form.Length))
	}}
}

// unmapDMA takes a mapping away for the guard's own reasons.
func (g *Guard) unmapDMA(t Target, client, mapper uint32, at dmaPlace) {
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return
	}
	defer lock.unlock()
	outer := make([]byte, 48)
	form, ok := g.abi.UnmapDMA(len(outer))
	if !ok {
		outer = outer[:40]
		form, _ = g.abi.UnmapDMA(len(outer))
	}
	rm.PutU32(outer, rm.DMAClient, client)
	rm.PutU32(outer, rm.DMADevice, at.device)
	rm.PutU32(outer, rm.DMAMapper, mapper)
	rm.PutU64(outer, form.Address, at.address)
	call := rm.Call{Cmd: 3<<30 | uint32(len(outer))<<16 | 'F'<<8 | rm.EscUnmapDMA, Outer: outer}
	if e := g.driver.Exec(t, &call); e == 0 && rm.U32(outer, form.Status) == rm.StatusOK {
		g.account.removeDMA(client, mapper, at, 0)
	}
}

// mapFits reports that a mapping stays within its memory. Host memory of RM_ALLOC_MEMORY, which runs in the task, has no size that the
// guard knows: it gets no more than a bound.
func (g *Guard) mapFits(client, memory uint32, offset, length uint64) bool {
	size := uint64(rm.MaxVirtual)
	if length > size { // what stands in the account of such memory is what the task has asked for
		return false
	}
	if o, ok := g.account.lookup(client, memory); ok && o.size > 0 {
		rounded, ok := roundUp(uint64(o.size), pageHuge) // the driver may have rounded up itself
		if !ok {
			return false
		}
		size = uint64(rounded)
	} else {
		return true
	}
	return offset <= size && length <= size-offset
}

func (a *account) roomForDMA() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dmaMaps < maxDMAMaps
}

// addDMA records a mapping.
func (a *account) addDMA(clientHandle, mapper, memory uint32, m dmaMap) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil || c.objects[mapper] == nil || c.objects[memory] == nil {
		a.gpus[m.gpu].subUsed(m.tables)
		return
	}
	m.mapper, m.memory = c.objects[mapper], c.objects[memory]
	a.linkDMA(&m)
}

func (a *account) linkDMA(m *dmaMap) {
	if m.mapper.dmaMaps == nil {
		m.mapper.dmaMaps = map[dmaPlace][]*dmaMap{}
	}
	if m.memory.mappedBy == nil {
		m.memory.mappedBy = map[*dmaMap]bool{}
	}
	m.mapper.dmaMaps[m.at] = append(m.mapper.dmaMaps[m.at], m)
	m.memory.mappedBy[m] = true
	a.dmaMaps++
	a.books.note(m)
}

// unlinkDMA forgets a mapping, without what was charged for it.
func (a *account) unlinkDMA(m *dmaMap) {
	list := m.mapper.dmaMaps[m.at]
	if i := slices.Index(list, m); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	if m.mapper.dmaMaps[m.at] = list; len(list) == 0 {
		delete(m.mapper.dmaMaps, m.at)
	}
	delete(m.memory.mappedBy, m)
	a.dmaMaps--
	a.books.end(m)
}

// dropDMA ends a mapping.
func (a *account) dropDMA(m *dmaMap) {
	a.unlinkDMA(m)
	a.gpus[m.gpu].subUsed(m.tables)
}

// dropMaps ends the mappings in a range of addresses, or of memory.
func (a *account) dropMaps(o *object) {
	for _, list := range o.dmaMaps {
		for _, m := range slices.Clone(list) {
			a.dropDMA(m)
		}
	}
	for m := range o.mappedBy {
		a.dropDMA(m)
	}
}

// removeDMA takes mappings away as RM_UNMAP_MEMORY_DMA does (serverInterUnmapInternal): the one that begins at an address or, with a
// length, what lies in that piece of the addresses.
func (a *account) removeDMA(clientHandle, mapper uint32, at dmaPlace, length uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil || c.objects[mapper] == nil {
		return
	}
	o := c.objects[mapper]
	if length == 0 {
		if list := o.dmaMaps[at]; len(list) > 0 {
			a.dropDMA(list[0])
		}
		return
	}
	var hit []*dmaMap
	for place, list := range o.dmaMaps {
		for _, m := range list {
			if place.device == at.device && place.address < at.address+length && at.address < place.address+m.length {
				hit = append(hit, m)
			}
		}
	}
	for _, m := range hit {
		a.cutDMA(m, at.address, at.address+length)
	}
}

// cutDMA takes the addresses from start to end out of a mapping. What is left of it keeps what its tables need of the charge.
func (a *account) cutDMA(m *dmaMap, start, end uint64) {
	first, last := m.at.address, m.at.address+m.length
	a.unlinkDMA(m)
	charged := m.tables
	for _, part := range [2][2]uint64{{first, start}, {end, last}} {
		if part[0] < first || part[1] > last || part[0] >= part[1] {
			continue
		}
		rest := &dmaMap{mapper: m.mapper, memory: m.memory, at: dmaPlace{m.at.device, part[0]}, length: part[1] - part[0], gpu: m.gpu}
		rest.tables = min(charged, quota.Bytes(rm.PageTables(rest.length, false)))
		charged -= rest.tables
		a.linkDMA(rest)
	}
	a.gpus[m.gpu].subUsed(charged)
}
