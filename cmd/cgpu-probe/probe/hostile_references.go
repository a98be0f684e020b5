// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
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
