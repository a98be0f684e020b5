// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"syscall"
	"time"

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

// memoryRaces is how often a race is tried, memoryRaceTime for how long at most: a machine may let it have few calls a second.
const (
	memoryRaces    = 40
	memoryRaceTime = 10 * time.Second
)

// aboveTheLimit is what nobody has of counted memory: the guard lets it have 192 handles.
const aboveTheLimit = 200

// hostileTOCTOUMemory changes RM_ALLOC_MEMORY, which runs in the task, after the guard has looked at it: what the driver makes is under
// another handle, or below another device, than the guard knows. Of that there may be no handle more: they would be counted for nothing.
// A race was won where there is memory of which there is none (single).
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
		begin := time.Now()
		for i := range o.attempts() {
			if i == memoryRaces || time.Since(begin) > memoryRaceTime { // each makes some 200 handles; one in four is won
				break
			}
			handle := c.newHandle()
			c.newHandle()
			this, other := x.values(handle)
			c.raceMemory(handle, x.field, this, other)
			for _, h := range []uint32{handle, handle + 1} {
				there, alone, err := c.handlesOn(h)
				if err != nil {
					return fmt.Errorf("%s: %w", x.what, err)
				}
				if there {
					made++
				}
				if alone {
					single++
				}
			}
		}
		print("%s_made=%d\n%s_single=%d", x.what, made, x.what, single)
		switch {
		case made == 0:
			return fmt.Errorf("%s: no host memory was made", x.what)
		case single == 0:
			print("%s_won=no: each call made what the guard had seen, so nothing is shown", x.what)
		}
	}
	return c.free(second)
}

// raceMemory is RM_ALLOC_MEMORY of a page, of which a thread changes a field meanwhile.
func (c *client) raceMemory(handle uint32, field int, this, other uint32) {
	b := c.pageCall(handle, c.device)
	stop := flip(word(b, field), this, other)
	_ = c.call.escape(c.gpuFDs[0], rm.EscAllocMemory, b)
	stop()
}

// pageCall is RM_ALLOC_MEMORY of a page.
func (c *client) pageCall(handle, parent uint32) []byte {
	return c.oldCall(handle, parent, classSystem, scatteredCached|noMap, 0, 4*quota.KiB, -1)
}

// handlesOn makes as many handles on host memory as it gets, and frees all; there is false where the driver has nothing under its handle.
// alone is what may have no second handle: not when a call names it that the driver refuses as it is there, either.
func (c *client) handlesOn(h uint32) (there, alone bool, err error) {
	parent, there, err := c.parentOf(h) // of what is not there the driver says that it is freed
	if err != nil {
		return false, false, err
	}
	n, err := c.dups(h)
	switch {
	case err != nil:
		return false, false, err
	case !there && n > 0:
		return false, false, fmt.Errorf("%d handles on what is not there", n)
	case !there:
		return false, false, nil
	case n > aboveTheLimit:
		return true, false, fmt.Errorf("%d handles on host memory that the guard does not count", n)
	case n == 0:
		if err := c.nameAgain(h, parent); err != nil {
			return true, true, err
		}
	}
	if err := c.free(h); err != nil {
		return true, n == 0, err
	}
	if _, there, err = c.parentOf(h); there {
		return true, n == 0, fmt.Errorf("host memory is there when it has been freed")
	}
	return true, n == 0, err
}

// nameAgain calls for a page under a name that is taken, as if that were what has been made.
func (c *client) nameAgain(h, parent uint32) error {
	b := c.pageCall(h, parent)
	if errno := c.call.escape(c.gpuFDs[0], rm.EscAllocMemory, b); errno == 0 && rm.U32(b, rm.AllocMemoryStatus) == rm.StatusOK {
		return fmt.Errorf("a name was given twice")
	}
	n, err := c.dups(h)
	if n > 0 {
		return fmt.Errorf("%d handles on host memory that the guard had not seen made, when a call had named it", n)
	}
	return err
}

// dups makes as many handles on an object as it gets, and frees those.
func (c *client) dups(h uint32) (n int, err error) {
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
			return 0, err
		}
	}
	return len(handles), nil
}

// parentOf asks the driver what an object is below; false: there is none.
func (c *client) parentOf(h uint32) (parent uint32, there bool, err error) {
	p := make([]byte, 16) // NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS
	rm.PutU32(p, 0, h)
	rm.PutU32(p, 4, 1) // …_INDEX_PARENT
	err = c.control(c.handle, 0xd02, p)
	if refused := (*rmError)(nil); errors.As(err, &refused) && refused.errno == 0 && refused.status == rm.StatusObjectNotFound {
		return 0, false, nil
	}
	return rm.U32(p, 8), err == nil, err
}
