package main

import (
	"errors"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Cases around memory that the driver maps into the kernel.

const classSemaphores = 0xda

// hostMemory makes host memory, cached and in pages of 4 KiB.
func (c *client) hostMemory(size uint64) (uint32, error) {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryFlags, 0x1|0x4000|0x8000)
	rm.PutU32(p, rm.MemoryAttr, rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift|1<<27|1<<rm.MemoryAttrPageShift)
	rm.PutU64(p, rm.MemorySize, size)
	return c.alloc(c.device, c.newHandle(), classSystem, p)
}

// hostileSemaphores makes semaphore surfaces: the driver keeps their memory, whatever becomes of its handle, and writes all of it with its
// locks held.
func hostileSemaphores(hostileOptions) error {
	return withGPU(func(c *client) error {
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
	})
}
