package main

import (
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// bar1Slack is what a container may map beyond its limit: each piece of its memory once, and some of it again.
const bar1Slack = 2 * quota.GiB

// hostileBAR1 maps one allocation again and again. Each mapping takes its length of the GPU's BAR1, a range of addresses that all
// containers share; when it is used up nobody on the GPU can map anything. The driver gives the mapping again that a piece has
// already (mapping_reuse.c, reusemappingdbMap), so each piece here is another one.
func hostileBAR1(hostileOptions) error {
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1 << 14, Max: 1 << 14})
	return withGPU(func(c *client) error {
		total, free, err := c.usage()
		if err != nil {
			return err
		}
		h, size, err := c.memory(min(quota.GiB, free/4) &^ (2*quota.MiB - 1))
		if err != nil {
			return err
		}
		before, err := c.fb(rm.FBIndexBAR1Avail)
		if err != nil {
			return err
		}
		const step = 64 * quota.KiB
		most := total + bar1Slack
		mapped, refused := quota.Bytes(0), error(nil)
		for skipped := step * (most/size + 8); mapped <= most && refused == nil; skipped -= step {
			if refused = c.mapMemory(h, skipped, size-skipped); refused == nil {
				mapped += size - skipped
			}
		}
		after, err := c.fb(rm.FBIndexBAR1Avail)
		if err != nil {
			return err
		}
		taken := before[0] - min(before[0], after[0])
		print("mapped_mib=%d\nrefused=%s\nbar1_taken_mib=%d", mapped/quota.MiB, describe(refused), taken/quota.MiB)
		if taken > most {
			return fmt.Errorf("%v of BAR1 by one allocation of %v, of a GPU of %v", taken, size, total)
		}
		if mapped == 0 && !realDriver() {
			return skip("the simulated driver maps nothing")
		}
		if mapped == 0 {
			return fmt.Errorf("a single mapping was refused: %w", refused)
		}
		// What was mapped goes with the memory, and another one can be.
		if err := c.free(h); err != nil {
			return err
		}
		if h, size, err = c.memory(2 * quota.MiB); err == nil {
			err = c.mapMemory(h, 0, size)
		}
		return err
	})
}

// mapMemory is RM_MAP_MEMORY of a piece of device memory, on a new file of the GPU's: each has room for one mapping.
func (c *client) mapMemory(object uint32, offset, length quota.Bytes) error {
	fd, err := syscall.Open(fmt.Sprintf("/dev/nvidia%d", c.gpus[0].minor), syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("map: %w", err)
	}
	b := make([]byte, rm.MapMemorySize)
	rm.PutU32(b, rm.MapMemoryClient, c.handle)
	rm.PutU32(b, rm.MapMemoryDevice, c.device)
	rm.PutU32(b, rm.MapMemoryMemory, object)
	rm.PutU64(b, rm.MapMemoryOffset, uint64(offset))
	rm.PutU64(b, rm.MapMemoryLength, uint64(length))
	rm.PutU32(b, rm.MapMemoryStatus, 0xbad)
	rm.PutU32(b, rm.MapMemoryFD, uint32(fd))
	errno := c.call.escape(c.fd, rm.EscMapMemory, b)
	if st := rm.U32(b, rm.MapMemoryStatus); errno != 0 || st != rm.StatusOK {
		syscall.Close(fd)
		return &rmError{what: fmt.Sprintf("RM_MAP_MEMORY of %#x", object), errno: errno, status: st}
	}
	c.gpuFDs = append(c.gpuFDs, fd)
	return nil
}
