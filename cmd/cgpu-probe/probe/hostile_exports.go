// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// hostileExports exports lists in which one object is none: the driver then frees what it takes for handles of exports, also others'.
func hostileExports(c *client, _ hostileOptions) error {
	memory, _, err := c.memory(64 * quota.KiB)
	if err != nil {
		return err
	}
	var fds [2]int
	for i := range fds {
		if fds[i], err = syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("/dev/nvidiactl: %w", err)
		}
		defer syscall.Close(fds[i])
	}
	if err := c.export(fds[0], memory); err != nil {
		return err
	}
	list := func(objects ...uint32) error {
		const count = 512
		p := make([]byte, 2128)
		rm.PutU32(p, 0, uint32(fds[1]))
		rm.PutU32(p, 4, c.device)
		rm.PutU32(p, 8, count) // maxObjects
		for i, h := range objects {
			rm.PutU32(p, 76+4*i, h)
		}
		rm.PutU32(p, 2124, uint32(len(objects)))
		return c.control(c.handle, 0x3d0b, p)
	}
	if err := list(memory, memory); err != nil {
		return fmt.Errorf("two objects: %w", err)
	}
	bad := make([]uint32, 512)
	for i := range bad {
		bad[i] = memory
	}
	bad[1] = 0x7f000000
	for range 100 {
		if err := list(bad...); err == nil {
			return errors.New("an object was exported that there is not")
		}
	}
	_, err = c.imported(fds[0])
	return err
}
