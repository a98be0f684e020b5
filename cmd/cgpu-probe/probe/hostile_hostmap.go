// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Host memory that RM_ALLOC_MEMORY has mapped at once outlives its handle: the driver frees the pages when the file is gone, which a
// mapping holds (nv_free_pages, nv_alloc_release).

const (
	mappedPiece = 256 * quota.MiB
	// mappedMost is what is taken of a real machine's memory.
	mappedMost = 4 * quota.GiB
)

// mappedHost is host memory and what shows it: a mapping or, where nothing can be mapped (simulated driver), its file.
type mappedHost struct {
	handle uint32
	window []byte
	fd     int
}

func (c *client) mapHost(size quota.Bytes) (*mappedHost, error) {
	fd, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	m := &mappedHost{fd: fd}
	if m.handle, err = c.oldAlloc(classSystem, scatteredCached, 0, size, fd); err != nil {
		syscall.Close(fd)
		return nil, err
	}
	m.window, err = syscall.Mmap(fd, 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	switch {
	case errors.Is(err, syscall.ENODEV):
		return m, nil
	case err != nil:
		return nil, fmt.Errorf("mmap of host memory: %w", err)
	}
	syscall.Close(fd)
	m.fd = -1
	m.window[0] = 1
	return m, nil
}

const (
	scatteredCached   = 1<<4 | 1<<12 // NVOS02_FLAGS_PHYSICALITY, _COHERENCY
	noMap             = 1 << 30      // NVOS02_FLAGS_MAPPING
	classOSDescriptor = 0x71
)

// oldAlloc is RM_ALLOC_MEMORY of host memory.
func (c *client) oldAlloc(class, flags uint32, address uintptr, size quota.Bytes, fd int) (handle uint32, err error) {
	handle = c.newHandle()
	b := c.oldCall(handle, c.device, class, flags, address, size, fd)
	errno := c.call.escape(c.gpuFDs[0], rm.EscAllocMemory, b)
	if st := rm.U32(b, rm.AllocMemoryStatus); errno != 0 || st != rm.StatusOK {
		return 0, &rmError{what: fmt.Sprintf("RM_ALLOC_MEMORY of class %#x", class), errno: errno, status: st}
	}
	return handle, nil
}

// oldCall is the structure of RM_ALLOC_MEMORY, with a status that no driver answers.
func (c *client) oldCall(handle, parent, class, flags uint32, address uintptr, size quota.Bytes, fd int) []byte {
	b := make([]byte, rm.AllocMemorySize)
	rm.PutU32(b, rm.AllocMemoryRoot, c.handle)
	rm.PutU32(b, rm.AllocMemoryParent, parent)
	rm.PutU32(b, rm.AllocMemoryObject, handle)
	rm.PutU32(b, rm.AllocMemoryClass, class)
	rm.PutU32(b, rm.AllocMemoryFlags, flags)
	rm.PutU64(b, rm.AllocMemoryPointer, uint64(address))
	rm.PutU64(b, rm.AllocMemoryLimit, uint64(size)-1)
	rm.PutU32(b, rm.AllocMemoryStatus, 0xbad)
	rm.PutU32(b, rm.AllocMemoryFD, uint32(fd))
	return b
}

// unmap lets go of the pages.
func (m *mappedHost) unmap() error {
	if m.window == nil {
		return syscall.Close(m.fd)
	}
	return syscall.Munmap(m.window)
}

// hostileHostMapped maps host memory and frees its handle, again and again: what is mapped stays, so it must stay charged. What is unmapped
// is back, and whoever unmaps what he frees is never refused.
func hostileHostMapped(hostileOptions) error {
	total, err := memTotal()
	if err != nil {
		return err
	}
	return withGPU(func(c *client) error {
		var held []*mappedHost
		var refused error
		most := total
		for sum := quota.Bytes(0); sum < most; sum += mappedPiece {
			m, err := c.mapHost(mappedPiece)
			if refused = err; err != nil {
				break
			}
			if held = append(held, m); m.window != nil {
				most = min(most, mappedMost)
			}
			if err := c.free(m.handle); err != nil {
				return err
			}
		}
		print("mapped_mib=%d", quota.Bytes(len(held))*mappedPiece/quota.MiB)
		if refused == nil && most < total {
			return skip(fmt.Sprintf("max_host_memory in cgpu.toml is %v and more", mappedMost))
		}
		if err := mustAnswer("one_more", refused, rm.StatusNoMemory); err != nil {
			return err
		}
		for _, m := range held {
			if err := m.unmap(); err != nil {
				return err
			}
		}
		return c.mapHostInTurn(2 * len(held))
	})
}

// mapHostInTurn has one piece after the other, unmapped before its handle is freed, or after.
func (c *client) mapHostInTurn(n int) error {
	for i := range n {
		m, err := c.mapHost(mappedPiece)
		if err != nil {
			return fmt.Errorf("piece %d, when those before it are unmapped: %w", i+1, err)
		}
		ends := []func() error{m.unmap, func() error { return c.free(m.handle) }}
		if err := errors.Join(ends[i%2](), ends[1-i%2]()); err != nil {
			return err
		}
	}
	print("unmapped=%d", n)
	return nil
}

// cmdHostPages shows what the machine has available as host memory is mapped, freed and unmapped, and as it is pinned before that. Other
// programs change it, too: so it takes much.
func cmdHostPages(c *client, _ []string) error {
	const size = 2 * quota.GiB
	show := func(when string) {
		if n, err := memInfo("MemAvailable"); err == nil {
			print("available_%s_mib=%d", when, n/quota.MiB)
		}
	}
	for _, pin := range []bool{false, true} {
		show("before")
		m, err := c.mapHost(size)
		if err != nil {
			return err
		}
		if m.window == nil {
			return skip("nothing can be mapped: the simulated driver")
		}
		show("mapped")
		var pinned uint32
		if pin {
			if pinned, err = c.oldAlloc(classOSDescriptor, scatteredCached|noMap, uintptr(unsafe.Pointer(&m.window[0])), size, -1); err != nil {
				return fmt.Errorf("pin: %w", err)
			}
			show("pinned")
		}
		if err := c.free(m.handle); err != nil {
			return err
		}
		show("freed")
		if err := m.unmap(); err != nil {
			return err
		}
		show("unmapped")
		if pinned != 0 {
			if err := c.free(pinned); err != nil {
				return err
			}
			show("unpinned")
		}
	}
	return nil
}
