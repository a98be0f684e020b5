// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// request is one call under the driver's lock.
type request struct {
	s        *Session
	d        *Driver
	f        *file
	pid, tid int32
	call     *rm.Call
}

// block is the memory behind the pointer at off in the outer structure (in = -1) or in an earlier block; -1 and nil if
// the caller passed none.
func (r *request) block(in, off int) (int, []byte) {
	for i, b := range r.call.Blocks {
		if b.In == in && b.Off == off {
			return i, b.Data
		}
	}
	return -1, nil
}

// escape is how the driver treats one escape number. Upstream: RmIoctl in src/nvidia/arch/nvalloc/unix/src/escape.c and
// nvidia_ioctl in kernel-open/nvidia/nv.c.
type escape struct {
	size      int // of the outer structure; 0 if run checks it
	gpuOnly   bool
	statusOff int
	// run does the call and returns what goes to statusOff.
	run func(*request) uint32
	// raw replaces run for escapes without a status word.
	raw func(*request) syscall.Errno
}

func notSupported(*request) uint32 { return rm.StatusNotSupported }

// escapes, by number. XFER is missing: the guard takes it apart, and a nested one is an unknown number to RM too.
var escapes = map[uint32]escape{
	rm.EscAllocMemory:    {size: rm.AllocMemorySize, gpuOnly: true, statusOff: rm.AllocMemoryStatus, run: (*request).allocMemory},
	rm.EscAllocObject:    {size: rm.AllocObjectSize, statusOff: rm.AllocObjectStatus, run: notSupported},
	rm.EscFree:           {size: rm.FreeSize, statusOff: rm.FreeStatus, run: (*request).free},
	rm.EscControl:        {size: rm.ControlSize, statusOff: rm.ControlStatus, run: (*request).control},
	rm.EscAlloc:          {raw: (*request).allocEscape},
	rm.EscDupObject:      {size: rm.DupSize, statusOff: rm.DupStatus, run: (*request).dup},
	rm.EscShare:          {size: rm.ShareSize, statusOff: rm.ShareStatus, run: (*request).share},
	rm.EscI2CAccess:      {size: 32, gpuOnly: true, statusOff: 24, run: notSupported},
	rm.EscIdleChannels:   {size: 56, statusOff: 48, run: notSupported},
	rm.EscVidHeapControl: {size: rm.HeapSize, statusOff: rm.HeapStatus, run: (*request).heap},
	rm.EscAccessRegistry: {size: 72, statusOff: 64, run: notSupported},
	rm.EscMapMemory:      {size: rm.MapMemorySize, statusOff: rm.MapMemoryStatus, run: (*request).mapMemory},
	rm.EscUnmapMemory:    {size: rm.UnmapMemorySize, statusOff: rm.UnmapMemoryStatus, run: (*request).unmapMemory},
	rm.EscUpdateMapping:  {size: rm.UpdateMappingSize, statusOff: rm.UpdateMappingStatus, run: (*request).updateMapping},
	rm.EscMapDMA:         {raw: (*request).mapDMA},
	rm.EscUnmapDMA:       {raw: (*request).unmapDMA},
	rm.EscAllocOSEvent:   {raw: (*request).allocOSEvent},
	rm.EscFreeOSEvent:    {raw: (*request).freeOSEvent},
	rm.EscCardInfo:       {raw: (*request).cardInfo},
	rm.EscRegisterFD:     {raw: (*request).registerFD},
	rm.EscStatusCode:     {raw: (*request).statusCode},
	rm.EscAttachGPUs:     {raw: (*request).attachGPUs},
}

// dispatch looks at the number and the size of a call only, as nvidia_ioctl does.
func (d *Driver) dispatch(r *request) syscall.Errno {
	if r.f.kind == UVM {
		return r.uvm()
	}
	e, ok := escapes[r.call.NR()]
	if !ok || len(r.call.Outer) != r.call.Size() {
		return syscall.EINVAL
	}
	if e.raw != nil {
		return e.raw(r)
	}
	if len(r.call.Outer) != e.size || e.gpuOnly != (r.f.kind == GPUNode) {
		return syscall.EINVAL
	}
	rm.PutU32(r.call.Outer, e.statusOff, e.run(r))
	return 0
}

// delayOf is the configured delay of a call.
func (d *Driver) delayOf(c *rm.Call) time.Duration {
	switch c.NR() {
	case rm.EscAlloc:
		if rm.U32(c.Outer, rm.AllocClass) == classMemoryLocal {
			return d.delay.Alloc
		}
	case rm.EscVidHeapControl:
		switch rm.U32(c.Outer, rm.HeapFunction) {
		case rm.HeapFnAllocSize, rm.HeapFnAllocTiled, rm.HeapFnAllocSizeRange:
			return d.delay.Alloc
		}
	case rm.EscFree:
		return d.delay.Free
	case rm.EscControl:
		return d.delay.Control
	}
	return d.delay.Other
}
