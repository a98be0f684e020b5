// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// bar1Size is the window of addresses into a card, through which the processor reaches its memory: small, as a T4's, so that all is mapped
// in pages of 64 KiB (kbusDetermineBar1Force64KBMapping_IMPL). BAR1 is not static
// (kbusEnableStaticBar1Mapping_TU102 needs one that is larger than the memory).
const bar1Size = 256 * quota.MiB

// window is memory mapped for the processor (RsCpuMapping). Each takes addresses of its own, in small pages.
type window struct {
	address uint64
	pid     int32 // of the caller
	gpu     *gpu
	size    quota.Bytes // of BAR1
	ended   bool
}

// end gives the addresses back. Whoever has mapped the file keeps the mapping, and sees what is at them next (osUnmapPciMemoryUser is
// empty).
// Nobody can map anything here: a file that is open stands for one that is mapped.
func (w *window) end() {
	w.gpu.bar1 -= w.size
	w.ended = true
}

// kernelWindow maps memory into the kernel: device memory through addresses of BAR1 of its own, each time.
func (o *object) kernelWindow(length uint64) (*window, uint32) {
	w := &window{gpu: o.gpu}
	if o.memory != nil {
		w.size = quota.Bytes(length)
	}
	if w.size > bar1Size-o.gpu.bar1 {
		return nil, rm.StatusInsufficientResources
	}
	o.gpu.bar1 += w.size
	return w, rm.StatusOK
}

// stale is how many files show what is not theirs.
func (d *Driver) stale() (n int) {
	for _, f := range d.files {
		if f.window != nil && f.window.ended {
			n++
		}
	}
	return n
}

// mapMemory is RM_MAP_MEMORY, of memory of a client of the calling process, for a file that has no mapping yet: a GPU's for device memory.
func (r *request) mapMemory() uint32 {
	out := r.call.Outer
	c, st := r.client(rm.U32(out, rm.MapMemoryClient))
	if st != rm.StatusOK {
		return st
	}
	o, device := c.objects[rm.U32(out, rm.MapMemoryMemory)], c.objects[rm.U32(out, rm.MapMemoryDevice)]
	if o == nil || device == nil {
		return rm.StatusObjectNotFound
	}
	switch o.class {
	case classMemoryLocal, classMemorySystem:
	case classUserShared:
		if o.gpu.userShared.lost {
			return rm.StatusObjectNotFound // RmGetAllocPrivate
		}
	default:
		return rm.StatusInvalidObjectParent
	}
	if device.class != classDevice && device.class != classSubdevice {
		return rm.StatusInvalidObjectParent
	}
	offset, length := rm.U64(out, rm.MapMemoryOffset), rm.U64(out, rm.MapMemoryLength)
	if size := uint64(o.size); offset >= size || length == 0 || length > size-offset {
		return rm.StatusInvalidLimit
	}
	w := &window{pid: r.pid, gpu: device.gpu}
	kind := Control
	if o.memory != nil {
		kind = GPUNode
		const page = uint64(smallPage)
		w.size = quota.Bytes((offset+length+page-1)/page*page - offset/page*page)
	}
	if w.size > bar1Size-w.gpu.bar1 {
		return rm.StatusInsufficientResources
	}
	f := r.d.files[FileID(rm.U32(out, rm.MapMemoryFD))]
	switch { // rm_create_mmap_context, nv_add_mapping_context_to_file
	case c.pid != r.pid:
		return rm.StatusInvalidClient
	case f == nil || f.session != r.s.id || f.kind != kind || kind == GPUNode && f.minor != w.gpu.Minor:
		return rm.StatusInvalidArgument
	case f.window != nil:
		return rm.StatusInUse
	}
	f.window, f.pages = w, o.pages
	w.gpu.bar1 += w.size
	w.address = r.d.nextAddress
	r.d.nextAddress += (length + 1<<21) &^ (1<<21 - 1)
	o.windows = append(o.windows, w)
	rm.PutU64(out, rm.MapMemoryAddress, w.address)
	return rm.StatusOK
}

// mapPages prepares a file to be mapped for host memory that was just made. Where it cannot the driver has the ioctl fail, and keeps the
// memory.
func (r *request) mapPages(c *client, o *object, id FileID) {
	if f := r.d.files[id]; c.pid == r.pid && f != nil && f.session == r.s.id && f.kind == Control && f.window == nil {
		f.window, f.pages = &window{pid: r.pid, gpu: o.gpu}, o.pages
	}
}

// hostPages is what there is of host memory by handles and files that show it. What UVM address spaces and exports keep is not in it.
func (d *Driver) hostPages() (sum quota.Bytes) {
	there := map[*hostPages]bool{}
	for _, c := range d.clients {
		for _, o := range c.objects {
			there[o.pages] = true
		}
	}
	for _, f := range d.files {
		there[f.pages] = true
	}
	delete(there, nil)
	for p := range there {
		sum += p.size
	}
	return sum
}

// windowAt finds a mapping of the calling process (serverutilMappingFilterCurrentUserProc); -1: there is none.
func (r *request) windowAt(client, memory uint32, address uint64) (o *object, i int, status uint32) {
	c, st := r.client(client)
	if st != rm.StatusOK {
		return nil, -1, st
	}
	if o = c.objects[memory]; o == nil {
		return nil, -1, rm.StatusObjectNotFound
	}
	if i = slices.IndexFunc(o.windows, func(w *window) bool { return w.address == address && w.pid == r.pid }); i < 0 {
		return nil, -1, rm.StatusObjectNotFound
	}
	return o, i, rm.StatusOK
}

func (r *request) unmapMemory() uint32 {
	out := r.call.Outer
	o, i, st := r.windowAt(rm.U32(out, rm.UnmapMemoryClient), rm.U32(out, rm.UnmapMemoryMemory), rm.U64(out, rm.UnmapMemoryAddress))
	if st == rm.StatusOK {
		o.windows[i].end()
		o.windows = slices.Delete(o.windows, i, i+1)
	}
	return st
}

func (r *request) updateMapping() uint32 {
	out := r.call.Outer
	o, i, st := r.windowAt(rm.U32(out, rm.UpdateMappingClient), rm.U32(out, rm.UpdateMappingMemory), rm.U64(out, rm.UpdateMappingOld))
	if st == rm.StatusOK {
		o.windows[i].address = rm.U64(out, rm.UpdateMappingNew)
	}
	return st
}
