// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// hostileBAR1 maps pieces of one allocation without end. Each takes its length of the GPU's BAR1, a range of addresses that all
// containers share; when it is used up nobody on the GPU can map anything. The driver gives the mapping again that a piece has
// already (mapping_reuse.c, reusemappingdbMap), so each piece here is another one. Where all memory is in BAR1 once and for all
// (static) the guard counts them the same.
func hostileBAR1(hostileOptions) error {
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1 << 14, Max: 1 << 14})
	return withGPU(func(c *client) error {
		_, free, err := c.usage()
		if err != nil {
			return err
		}
		bar1, err := c.fb(rm.FBIndexBAR1Size)
		if err != nil {
			return err
		}
		h, size, err := c.memory(min(bar1[0]/64, free/4) &^ (2*quota.MiB - 1))
		if err != nil {
			return err
		}
		const step = 4 * quota.KiB
		mapped, refused, files := quota.Bytes(0), error(nil), []int{}
		for skipped := quota.Bytes(0); mapped < bar1[0] && skipped < size && refused == nil; skipped += step {
			var fd int
			if fd, _, refused = c.mapMemory(h, skipped, size-skipped); refused == nil {
				mapped += size - skipped
				files = append(files, fd)
			}
		}
		print("mapped_mib=%d\nrefused=%s\nbar1_mib=%d", mapped/quota.MiB, describe(refused), bar1[0]/quota.MiB)
		if refused == nil {
			return fmt.Errorf("%v of %v of BAR1 by one allocation of %v", mapped, bar1[0], size)
		}
		if mapped == 0 {
			return fmt.Errorf("a single mapping was refused: %w", refused)
		}
		// What was mapped goes with the memory and the files, and another one can be.
		for _, fd := range files {
			syscall.Close(fd)
		}
		if err := c.free(h); err != nil {
			return err
		}
		if h, size, err = c.memory(2 * quota.MiB); err == nil {
			_, _, err = c.mapMemory(h, 0, size)
		}
		return err
	})
}

// mapMemory is RM_MAP_MEMORY of a piece of device memory, on a new file of the GPU's: each has room for one mapping.
func (c *client) mapMemory(object uint32, offset, length quota.Bytes) (fd int, address uint64, err error) {
	return c.mapOn(fmt.Sprintf("/dev/nvidia%d", c.gpus[0].minor), object, offset, length, 0)
}

// mapReadOnly is NVOS33_FLAGS_ACCESS_READ_ONLY (nvos.h).
const mapReadOnly = 1

// mapOn is RM_MAP_MEMORY on a new file of a node: a GPU's for device memory, nvidiactl for other.
func (c *client) mapOn(node string, object uint32, offset, length quota.Bytes, flags uint32) (fd int, address uint64, err error) {
	fd, err = syscall.Open(node, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, 0, fmt.Errorf("map: %w", err)
	}
	b := make([]byte, rm.MapMemorySize)
	rm.PutU32(b, rm.MapMemoryClient, c.handle)
	rm.PutU32(b, rm.MapMemoryDevice, c.device)
	rm.PutU32(b, rm.MapMemoryMemory, object)
	rm.PutU64(b, rm.MapMemoryOffset, uint64(offset))
	rm.PutU64(b, rm.MapMemoryLength, uint64(length))
	rm.PutU32(b, rm.MapMemoryStatus, 0xbad)
	rm.PutU32(b, rm.MapMemoryFlags, flags)
	rm.PutU32(b, rm.MapMemoryFD, uint32(fd))
	errno := c.call.escape(c.fd, rm.EscMapMemory, b)
	if st := rm.U32(b, rm.MapMemoryStatus); errno != 0 || st != rm.StatusOK {
		syscall.Close(fd)
		return -1, 0, &rmError{what: fmt.Sprintf("RM_MAP_MEMORY of %#x", object), errno: errno, status: st}
	}
	return fd, rm.U64(b, rm.MapMemoryAddress), nil
}
