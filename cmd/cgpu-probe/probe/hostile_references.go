// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The driver counts who refers to memory in a byte (MEMORY_DESCRIPTOR.Allocated). What has come around to 0 it takes for freed: it is
// mapped for nobody any more, and never given back.

// aroundTheByte is more than that holds.
const aroundTheByte = 300

// hostileSharedPage maps the page that all users of a GPU share (RM_USER_SHARED_DATA), as each CUDA program does, more often than the
// driver can count handles on it, which it never takes off again. One handle too many, and no CUDA program starts on that GPU.
func hostileSharedPage(hostileOptions) error {
	return withGPU(func(c *client) error {
		page, err := c.alloc(c.subdevice, 0, 0xde, make([]byte, 8)) // NV00DE_ALLOC_PARAMETERS
		if err != nil {
			return err
		}
		for i := range aroundTheByte {
			fd, _, err := c.mapOn("/dev/nvidiactl", page, 0, 256, mapReadOnly) // libcuda of 580 maps 2608 bytes
			if err != nil {
				return fmt.Errorf("mapping %d: %w", i+1, err)
			}
			syscall.Close(fd)
		}
		if _, err := c.dup(c.handle, page); err == nil {
			return fmt.Errorf("a second handle on the page that all share")
		}
		if err := c.free(page); err != nil {
			return err
		}
		print("mapped=%d", aroundTheByte)
		return nil
	})
}

// hostileReferences has more handles on memory than the driver can count, and frees them all.
func hostileReferences(hostileOptions) error {
	return withGPU(func(c *client) error {
		_, before, err := c.usage()
		if err != nil {
			return err
		}
		h, size, err := c.memory(2 * quota.MiB)
		if err != nil {
			return err
		}
		handles, refused := []uint32{h}, error(nil)
		for refused == nil && len(handles) < aroundTheByte {
			var second uint32
			if second, refused = c.dup(c.handle, h); refused == nil {
				handles = append(handles, second)
			}
		}
		print("handles=%d\nrefused=%s", len(handles), describe(refused))
		if refused == nil {
			return fmt.Errorf("%d handles on memory", len(handles))
		}
		for _, h := range handles {
			if err := c.free(h); err != nil {
				return err
			}
		}
		if free, err := c.waitFree(before); err != nil || free < before {
			return fmt.Errorf("%v are free, %v before: %v are lost (%v)", free, before, size, err)
		}
		return nil
	})
}

// belowTheByte is as many handles beside the first as harm nothing, whoever counts.
const belowTheByte = 250

// memoryRaces is how often a race is tried.
const memoryRaces = 40

// aboveTheLimit is what nobody has of counted memory: the guard lets it have 192 handles.
const aboveTheLimit = 200

// hostileTOCTOUMemory changes RM_ALLOC_MEMORY, which runs in the task, after the guard has looked at it: what the driver makes is under
// another handle, or below another device, than the guard knows. Of that there may be no handle more: they would be counted for nothing.
func hostileTOCTOUMemory(c *client, o hostileOptions) error {
	second, _, err := c.newDevice(0)
	if err != nil {
		return err
	}
	for _, x := range []struct {
		what   string
		field  int
		values func(handle uint32) (uint32, uint32)
	}{
		{"handle", rm.AllocMemoryObject, func(handle uint32) (uint32, uint32) { return handle, handle + 1 }},
		{"parent", rm.AllocMemoryParent, func(uint32) (uint32, uint32) { return c.device, second }},
	} {
		var made, single int
		for i := range o.attempts() {
			if i == memoryRaces { // each makes some 200 handles; one in four is won
				break
			}
			handle := c.newHandle()
			c.newHandle()
			this, other := x.values(handle)
			c.raceMemory(handle, x.field, this, other)
			for _, h := range []uint32{handle, handle + 1} {
				n, there, err := c.handlesOn(h)
				if err != nil {
					return fmt.Errorf("%s: %w", x.what, err)
				}
				if there {
					made++
				}
				if there && n == 0 {
					single++
				}
			}
		}
		print("%s_made=%d\n%s_single=%d", x.what, made, x.what, single)
		if made == 0 {
			return fmt.Errorf("%s: no host memory was made", x.what)
		}
	}
	return c.free(second)
}

// raceMemory is RM_ALLOC_MEMORY of a page, of which a thread changes a field meanwhile.
func (c *client) raceMemory(handle uint32, field int, this, other uint32) {
	b := make([]byte, rm.AllocMemorySize)
	rm.PutU32(b, rm.AllocMemoryRoot, c.handle)
	rm.PutU32(b, rm.AllocMemoryParent, c.device)
	rm.PutU32(b, rm.AllocMemoryObject, handle)
	rm.PutU32(b, rm.AllocMemoryClass, classSystem)
	rm.PutU32(b, rm.AllocMemoryFlags, scatteredCached|noMap)
	rm.PutU64(b, rm.AllocMemoryLimit, 4095)
	rm.PutU32(b, rm.AllocMemoryFD, 0xffffffff)
	stop := flip(word(b, field), this, other)
	_ = c.call.escape(c.gpuFDs[0], rm.EscAllocMemory, b)
	stop()
}

// handlesOn makes as many handles on an object as it gets, and frees all; there is false where the driver has none.
func (c *client) handlesOn(h uint32) (n int, there bool, err error) {
	var handles []uint32
	for len(handles) < belowTheByte {
		second, err := c.dup(c.handle, h)
		if err != nil {
			break
		}
		handles = append(handles, second)
	}
	for _, second := range handles {
		if err := c.free(second); err != nil {
			return 0, false, err
		}
	}
	there = c.free(h) == nil
	if len(handles) > aboveTheLimit {
		return 0, there, fmt.Errorf("%d handles on host memory that the guard does not count", len(handles))
	}
	return len(handles), there, nil
}
