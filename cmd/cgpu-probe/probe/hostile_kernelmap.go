// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Cases around memory that the driver maps into the kernel.

const (
	classContextDMA = 0x2
	classSemaphores = 0xda
)

// hostMemory makes host memory, cached and in pages of 4 KiB.
func (c *client) hostMemory(size uint64) (uint32, error) {
	p := memoryParams(size)
	rm.PutU32(p, rm.MemoryAttr, rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift|1<<27|1<<rm.MemoryAttrPageShift)
	return c.alloc(c.device, c.newHandle(), classSystem, p)
}

// hostileSemaphores makes semaphore surfaces: the driver keeps their memory, whatever becomes of its handle, and writes all of it with its
// locks held.
func hostileSemaphores(c *client, _ hostileOptions) error {
	surface := func(memory uint32) error {
		p := make([]byte, 16)
		rm.PutU32(p, rm.SemaphoreMemory, memory)
		_, err := c.alloc(c.subdevice, c.newHandle(), classSemaphores, p)
		return err
	}
	small, err1 := c.hostMemory(64 << 10)
	large, err2 := c.hostMemory(64 << 20)
	device, _, err3 := c.memory(64 * quota.KiB)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	print("small=%s", describe(surface(small))) // not every GPU needs but one memory
	return errors.Join(mustAnswer("large", surface(large), rm.StatusInvalidArgument),
		mustAnswer("device", surface(device), rm.StatusInvalidArgument))
}

// hostileKernelMaps has device memory mapped into the kernel again and again: each time takes addresses of BAR1, which all
// containers share. Afterwards there must be some left. Of host memory the kernel's own addresses would be used up.
func hostileKernelMaps(c *client, _ hostileOptions) error {
	const size, maps = 2 << 20, 1024
	contextDMA := func(memory uint32, length uint64) error {
		p := make([]byte, 32)
		rm.PutU32(p, rm.ContextDMAFlags, rm.ContextDMAFlagKernel|rm.ContextDMAFlagNoHash)
		rm.PutU32(p, rm.ContextDMAMemory, memory)
		rm.PutU64(p, rm.ContextDMALimit, length-1)
		_, err := c.alloc(c.device, c.newHandle(), classContextDMA, p)
		return err
	}
	memory, _, err1 := c.memory(size)
	host, err2 := c.hostMemory(size)
	addresses, err3 := c.virtual(0, 2*maps*size, rm.MemoryFlagLazy)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	print("notifier=%s", describe(contextDMA(host, 32)))
	if err := errors.Join(mustAnswer("device", contextDMA(memory, 32), rm.StatusNotSupported),
		mustAnswer("host", contextDMA(host, size), rm.StatusNotSupported)); err != nil {
		return err
	}
	for i := range uint64(maps) {
		for k, h := range []uint32{memory, host} {
			if err := c.mapDMABy(addresses, h, (2*i+uint64(k))*size, size, rm.DMAFlagKernel); err != nil {
				return fmt.Errorf("mapping %d of %#x: %w", i, h, err)
			}
		}
	}
	_, _, err := c.mapMemory(memory, 0, size)
	return err
}
