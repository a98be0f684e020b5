// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Cases around memory that the driver takes without being asked for any: page tables, events, memory of the host.

const (
	classVirtual = 0x50a0
	classSystem  = 0x3e
)

// tableSlack is how far page tables may pass a limit.
const tableSlack = 16 * quota.MiB

// virtual makes a range of GPU addresses in an address space (0: the device's own), for pages of 4 KiB.
func (c *client) virtual(space uint32, size uint64, flags uint32) (uint32, error) {
	return c.alloc(c.device, c.newHandle(), classVirtual, virtualParams(space, size, flags))
}

func virtualParams(space uint32, size uint64, flags uint32) []byte {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 0x63677075)
	rm.PutU32(p, rm.MemoryFlags, rm.MemoryFlagVirtual|0x4000|0x8000|flags) // MEMORY_HANDLE_PROVIDED, MAP_NOT_REQUIRED
	rm.PutU32(p, rm.MemoryAttr, 1<<rm.MemoryAttrPageShift)
	rm.PutU64(p, rm.MemorySize, size)
	rm.PutU32(p, rm.MemoryVASpace, space)
	return p
}

func (c *client) vaSpace(flags uint32) (uint32, error) { return c.vaSpaceBy(rm.VASpaceNew, flags) }

// vaSpaceBy makes an address space, or a handle of one that is there (NV_VASPACE_ALLOCATION_INDEX_GPU_*).
func (c *client) vaSpaceBy(index, flags uint32) (uint32, error) {
	p := make([]byte, 56)
	rm.PutU32(p, rm.VASpaceIndex, index)
	rm.PutU32(p, rm.VASpaceFlags, flags)
	return c.alloc(c.device, c.newHandle(), classVASpace, p)
}

// hostileTables makes ranges of addresses: each has its page tables at once, out of the GPU's memory.
func hostileTables(c *client, _ hostileOptions) error {
	const gib, tib, sparse, lazy, external = 1 << 30, 1 << 40, rm.MemoryFlagSparse, rm.MemoryFlagLazy, rm.MemoryFlagExternal
	_, before, err := c.usage()
	if err != nil {
		return err
	}
	space, err := c.vaSpace(1 << 1) // RETRY_PTE_ALLOC_IN_SYS: tables on the host where the GPU is full
	if err != nil {
		return err
	}
	for _, r := range []struct {
		size  uint64
		flags uint32
	}{{tib, 0}, {64*gib + 4096, 0}, {8 * tib, sparse}, {tib, sparse | lazy}, {tib, sparse | external}, {^uint64(0), 0}, {1 << 63, sparse}} {
		_, err := c.virtual(space, r.size, r.flags)
		if err := mustRefuse(fmt.Sprintf("range_%#x_%#x", r.size, r.flags), err); err != nil {
			return err
		}
	}
	_, full, err := c.usage()
	if err != nil {
		return err
	}
	const ranges = 16
	for i := range ranges {
		if _, err := c.virtual(space, gib, 0); err != nil {
			return fmt.Errorf("range %d of a GiB: %w", i, err)
		}
	}
	if err := c.expectLess("ranges", full, ranges*quota.Bytes(rm.PagePool(gib, false))); err != nil {
		return err
	}
	if err := c.free(space); err != nil {
		return err
	}
	if err := c.free(c.device); err != nil { // what the ranges are below
		return err
	}
	o, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer o.close()
	return o.expectFree("end", before, 0)
}

// expectLess checks that at least so much is missing from free memory.
func (c *client) expectLess(what string, before, least quota.Bytes) error {
	_, free, err := c.usage()
	if err != nil {
		return err
	}
	print("free_%s_mib=%d", what, free/quota.MiB)
	if before-min(before, free) < least {
		return fmt.Errorf("%s: free memory went from %v to %v: at least %v are in use that nobody counts", what, before, free, least)
	}
	return nil
}

// mapDMA maps memory into a range of addresses, at an offset in it.
func (c *client) mapDMA(space, memory uint32, at, length uint64) error {
	return c.mapDMABy(space, memory, at, length, 0)
}

// mapDMABy is mapDMA with flags (NVOS46_FLAGS_*).
func (c *client) mapDMABy(space, memory uint32, at, length uint64, flags uint32) error {
	for _, size := range []int{64, 56} { // since 580, and before
		o := make([]byte, size)
		rm.PutU32(o, rm.DMAClient, c.handle)
		rm.PutU32(o, rm.DMADevice, c.device)
		rm.PutU32(o, rm.DMAMapper, space)
		rm.PutU32(o, rm.DMAMemory, memory)
		rm.PutU64(o, rm.DMAMapLength, length)
		rm.PutU32(o, rm.DMAFlags, flags)
		rm.PutU64(o, size-16, at)
		rm.PutU32(o, size-8, 0xbad)
		errno := c.call.escape(c.fd, rm.EscMapDMA, o)
		if errno == syscall.EINVAL && size == 64 {
			continue
		}
		if st := rm.U32(o, size-8); errno != 0 || st != rm.StatusOK {
			return &rmError{what: "RM_MAP_MEMORY_DMA", errno: errno, status: st}
		}
		break
	}
	return nil
}

// hostileMapDMA maps more than the memory has, for which the driver takes page tables all the same, and the same memory often.
func hostileMapDMA(c *client, _ hostileOptions) error {
	space, err := c.vaSpace(0)
	if err != nil {
		return err
	}
	lazy, err := c.virtual(space, 1<<40, rm.MemoryFlagLazy)
	if err != nil {
		return err
	}
	memory, _, err := c.memory(2 * quota.MiB)
	if err != nil {
		return err
	}
	_, before, err := c.usage()
	if err != nil {
		return err
	}
	// The driver itself would have no memory for the tables of the first.
	for _, length := range []uint64{1 << 47, 1 << 40, 2<<20 + 1<<16, ^uint64(0), 1 << 63} {
		if err := mustAnswer(fmt.Sprintf("map_%#x", length), c.mapDMA(lazy, memory, 0, length), rm.StatusInvalidLimit); err != nil {
			return err
		}
	}
	const maps = 100
	for i := range maps {
		if err := c.mapDMA(lazy, memory, uint64(i)*(2<<20), 2<<20); err != nil {
			return fmt.Errorf("mapping %d: %w", i, err)
		}
	}
	if err := c.expectLess("mapped", before, maps*quota.Bytes(rm.PageTables(2<<20, false))); err != nil {
		return err
	}
	if err := c.free(memory); err != nil {
		return err
	}
	return c.expectFree("freed", before+2*quota.MiB, 0)
}

// hostileVASpaces makes address spaces, each of which has some of the GPU's memory and some of its firmware's.
func hostileVASpaces(c *client, _ hostileOptions) error {
	_, before, err := c.usage()
	if err != nil {
		return err
	}
	n := 0
	for ; n < bombCap; n++ {
		if _, err = c.vaSpace(0); err != nil {
			break
		}
	}
	print("vaspaces=%d\nrefused=%s", n, describe(err))
	if err == nil {
		return fmt.Errorf("%d address spaces without a refusal", n)
	}
	return c.expectLess("vaspaces", before, quota.Bytes(n)*16*quota.KiB)
}

// hostileEvents makes OS events, for descriptors that need not exist: the driver keeps those of all containers in one list.
func hostileEvents(c *client, _ hostileOptions) error {
	event := func(client, number uint32) error {
		o := make([]byte, rm.OSEventSize)
		rm.PutU32(o, rm.OSEventClient, client)
		rm.PutU32(o, rm.OSEventFD, number)
		rm.PutU32(o, rm.OSEventStatus, 0xbad)
		errno := c.call.escape(c.fd, rm.EscAllocOSEvent, o)
		if st := rm.U32(o, rm.OSEventStatus); errno != 0 || st != rm.StatusOK {
			return &rmError{what: "ALLOC_OS_EVENT", errno: errno, status: st}
		}
		return nil
	}
	if err := mustRefuse("foreign", event(c.handle-1000, 1)); err != nil {
		return err
	}
	n := uint32(0)
	var err error
	for ; n < bombCap; n++ {
		if err = event(c.handle, n); err != nil {
			break
		}
	}
	print("events=%d\nrefused=%s", n, describe(err))
	if err == nil || n == 0 {
		return fmt.Errorf("%d OS events: %s: want a refusal after some", n, describe(err))
	}
	return mustAnswer("duplicate", event(c.handle, 0), rm.StatusInsufficientResources)
}

// hostileHostMemory asks the driver for more host memory than there is, which no cgroup would count.
func hostileHostMemory(hostileOptions) error {
	total, err := memTotal()
	if err != nil {
		return err
	}
	return withGPU(func(c *client) error {
		for _, size := range []uint64{uint64(2 * total), 1 << 50, ^uint64(0), ^uint64(0) - 4095} {
			_, err := c.hostMemory(size)
			if err := mustAnswer(fmt.Sprintf("host_%#x", size), err, rm.StatusNoMemory); err != nil {
				return err
			}
			if size > 1<<60 {
				continue
			}
			b := make([]byte, rm.AllocMemorySize)
			rm.PutU32(b, rm.AllocMemoryRoot, c.handle)
			rm.PutU32(b, rm.AllocMemoryParent, c.device)
			rm.PutU32(b, rm.AllocMemoryObject, c.newHandle())
			rm.PutU32(b, rm.AllocMemoryClass, classSystem)
			rm.PutU64(b, rm.AllocMemoryLimit, size-1)
			o := &client{call: c.call, fd: c.gpuFDs[0]}
			if err := o.mustFail(fmt.Sprintf("old_%#x", size), rm.EscAllocMemory, b, rm.AllocMemoryStatus); err != nil {
				return err
			}
		}
		return nil
	})
}

// memTotal is the machine's memory.
func memTotal() (quota.Bytes, error) { return memInfo("MemTotal") }

// memInfo is a size that /proc/meminfo tells.
func memInfo(name string) (quota.Bytes, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	_, rest, _ := bytes.Cut(b, []byte(name+":"))
	fields := bytes.Fields(rest[:min(len(rest), 64)])
	if len(fields) == 0 {
		return 0, fmt.Errorf("/proc/meminfo has no %s", name)
	}
	n, err := strconv.ParseUint(string(fields[0]), 10, 54)
	return quota.Bytes(n) * quota.KiB, err
}

// uvmAsk makes a UVM call whose structure has its status at an offset.
func (u *uvmSpace) uvmAsk(what string, cmd uintptr, b []byte, status int) error {
	rm.PutU32(b, status, 0xbad)
	errno := u.call(u.fd, cmd, unsafe.Pointer(unsafe.SliceData(b)))
	runtime.KeepAlive(b)
	if st := rm.U32(b, status); errno != 0 || st != rm.StatusOK {
		return &rmError{what: what, errno: errno, status: st}
	}
	return nil
}

// withUVMSpace runs f with an address space of UVM's on the first GPU, which the simulated driver has none of.
func withUVMSpace(f func(c *client, u *uvmSpace, uuid []byte) error) error {
	return withGPU(func(c *client) error {
		fd, err := syscall.Open("/dev/nvidia-uvm", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			return skip("no nvidia-uvm: " + err.Error())
		}
		defer syscall.Close(fd)
		u := &uvmSpace{fd: fd, call: patient}
		init := make([]byte, rm.UVMInitializeSize)
		rm.PutU64(init, rm.UVMInitializeFlags, 2) // of several processes: no memory of this one is watched
		if err := u.uvmAsk("UVM_INITIALIZE", rm.UVMInitialize, init, rm.UVMInitializeStatus); err != nil {
			return skip("no UVM: " + err.Error())
		}
		id := make([]byte, 268)
		rm.PutU32(id, 4, 2)
		if err := c.control(c.subdevice, 0x2080014a, id); err != nil {
			return err
		}
		uuid := id[12:28]
		b := make([]byte, 40)
		copy(b, uuid)
		rm.PutU32(b, 24, uint32(c.fd))
		rm.PutU32(b, 28, c.handle)
		if err := u.uvmAsk("UVM_REGISTER_GPU", rm.UVMRegisterGPU, b, 36); err != nil {
			return err
		}
		space, err := c.vaSpace(1<<3 | 1<<6) // IS_EXTERNALLY_OWNED, ENABLE_PAGE_FAULTING
		if err != nil {
			return err
		}
		b = make([]byte, 32)
		copy(b, uuid)
		rm.PutU32(b, 16, uint32(c.fd))
		rm.PutU32(b, 20, c.handle)
		rm.PutU32(b, 24, space)
		if err := u.uvmAsk("UVM_REGISTER_GPU_VASPACE", rm.UVMRegisterGPUVASpace, b, 28); err != nil {
			return err
		}
		return f(c, u, uuid)
	})
}

// hostileSparse maps nothing, again and again: UVM takes page tables for it.
func hostileSparse(hostileOptions) error {
	return withUVMSpace(func(c *client, u *uvmSpace, uuid []byte) error {
		total, before, err := c.usage()
		if err != nil {
			return err
		}
		base := uint64(0x200000000000)
		sparse := func(length uint64) error {
			b := make([]byte, 24)
			rm.PutU64(b, 0, base)
			rm.PutU64(b, 8, length)
			if err := u.uvmAsk("UVM_CREATE_EXTERNAL_RANGE", rm.UVMCreateExternal, b, 16); err != nil {
				return err
			}
			b = make([]byte, 40)
			rm.PutU64(b, 0, base)
			rm.PutU64(b, 8, length)
			copy(b[16:], uuid)
			base += length
			return u.uvmAsk("UVM_MAP_EXTERNAL_SPARSE", rm.UVMMapSparse, b, 32)
		}
		if err := mustAnswer("sparse_2tib", sparse(1<<41), rm.StatusInvalidLimit); err != nil {
			return err
		}
		const length = 64 << 30 // 8.5 MiB of tables
		n := quota.Bytes(0)
		cost := quota.Bytes(rm.UVMTables(length, 64<<10))
		for ; n < 256 && n*cost <= total+tableSlack; n++ {
			if err = sparse(length); err != nil {
				break
			}
			if n == 3 {
				if err := c.expectLess("sparse", before, 4*cost); err != nil {
					return err
				}
			}
		}
		print("sparse=%d\nrefused=%s", n, describe(err))
		if n*cost > total+tableSlack {
			return fmt.Errorf("%v of page tables on a GPU of %v", n*cost, total)
		}
		return nil
	})
}
