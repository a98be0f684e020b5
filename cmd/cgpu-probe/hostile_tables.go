package main

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Page tables are device memory that no allocation shows: 8 bytes for each page of a range of addresses, whether anything is mapped there
// or not.

const (
	classVirtual = 0x50a0 // NV50_MEMORY_VIRTUAL
	// NVOS32_ALLOC_FLAGS_*: VIRTUAL, MEMORY_HANDLE_PROVIDED, MAP_NOT_REQUIRED; SPARSE; and NVOS32_ATTR_PAGE_SIZE_4KB.
	virtualFlags  = 0x80000 | 0x4000 | 0x8000
	virtualSparse = 0x4000000
	virtualAttr   = 1 << 23

	vaspaceTablesOnHost = 1 << 1 // RETRY_PTE_ALLOC_IN_SYS

	eventSize, eventClient, eventFD, eventStatus = 16, 0, 8, 12 // nv_ioctl_alloc_os_event_t
)

// hostileTables makes ranges of addresses. Each must be refused, or its tables charged.
func hostileTables(hostileOptions) error {
	return withGPU(func(c *client) error {
		for _, way := range []struct {
			name         string
			space, flags uint32
			heap         bool
		}{{name: "plain"}, {name: "sparse", flags: virtualSparse}, {name: "on_host", space: vaspaceTablesOnHost}, {name: "heap", heap: true}} {
			space, err := c.addressSpace(way.space)
			if err != nil {
				return err
			}
			for _, size := range []quota.Bytes{1 << 40, 1 << 32} {
				err := c.tablesHold(fmt.Sprintf("%s_%d_gib", way.name, size/quota.GiB), size/512, func() (uint32, error) {
					return c.virtual(space, way.flags, uint64(size), way.heap)
				})
				if err != nil {
					return err
				}
			}
			if err := c.free(space); err != nil {
				return err
			}
		}
		return nil
	})
}

// tablesHold checks that what takes page tables is refused, or charged with at least so much, and given back.
func (c *client) tablesHold(way string, least quota.Bytes, alloc func() (uint32, error)) error {
	_, before, err := c.usage()
	if err != nil {
		return err
	}
	h, refused := alloc()
	_, after, err := c.usage()
	if err != nil {
		return err
	}
	charged := before - min(before, after)
	print("%s=%s charged_kib=%d", way, describe(refused), charged/quota.KiB)
	if refused != nil {
		return c.expectFree("after_refusal", before, 0)
	}
	if charged < least {
		return fmt.Errorf("%s: page tables of %v or more, and %v charged", way, least, charged)
	}
	if err := c.free(h); err != nil {
		return err
	}
	return c.expectFree("after_free", before, 0)
}

// virtual makes a range of addresses, by its class or by the old heap call.
func (c *client) virtual(space, flags uint32, size uint64, heap bool) (uint32, error) {
	h := c.newHandle()
	if heap {
		b := make([]byte, rm.HeapSize)
		rm.PutU32(b, rm.HeapFunction, rm.HeapFnAllocSize)
		rm.PutU32(b, rm.HeapAllocMemory, h)
		rm.PutU32(b, rm.HeapAllocFlags, flags|virtualFlags)
		rm.PutU32(b, rm.HeapAllocAttr, virtualAttr)
		rm.PutU64(b, rm.HeapAllocSize, size)
		return h, c.heapCall(b)
	}
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 0x63677075)
	rm.PutU32(p, rm.MemoryFlags, flags|virtualFlags)
	rm.PutU32(p, rm.MemoryAttr, virtualAttr)
	rm.PutU64(p, rm.MemorySize, size)
	rm.PutU32(p, rm.MemoryVASpace, space)
	return c.alloc(c.device, h, classVirtual, p)
}

// hostileSparse maps nothing, by UVM, into ranges of addresses, which takes an entry for each 64 KiB.
func hostileSparse(hostileOptions) error {
	return withGPU(func(c *client) error {
		u, _, err := c.ownSpace()
		if err != nil {
			return err
		}
		defer u.close()
		base := uint64(0x2000_0000_0000)
		for _, size := range []quota.Bytes{8 << 40, 1 << 38} {
			_, before, err := c.usage()
			if err != nil {
				return err
			}
			refused := u.mapSparse(base, uint64(size))
			if _, ok := refused.(errNoUVM); ok {
				return skip("the simulated driver maps nothing sparse")
			}
			_, after, err := c.usage()
			if err != nil {
				return err
			}
			charged := before - min(before, after)
			print("sparse_%d_gib=%s charged_kib=%d", size/quota.GiB, describe(refused), charged/quota.KiB)
			if refused == nil && charged < size/8192 {
				return fmt.Errorf("page tables of %v for nothing, and %v charged", size/8192, charged)
			}
			base += uint64(size)
		}
		return nil
	})
}

func (u *gpuUVM) mapSparse(base, length uint64) error {
	b := make([]byte, 24)
	rm.PutU64(b, 0, base)
	rm.PutU64(b, 8, length)
	if err := u.ioctl("UVM_CREATE_EXTERNAL_RANGE", rm.UVMCreateExternal, b, 16); err != nil {
		return err
	}
	b = make([]byte, 40)
	rm.PutU64(b, 0, base)
	rm.PutU64(b, 8, length)
	copy(b[16:], u.uuid)
	return u.ioctl("UVM_MAP_EXTERNAL_SPARSE", 74, b, 32)
}

// hostileEvents makes OS events. The driver has all of the node's in one list, which it searches under a spinlock.
func hostileEvents(hostileOptions) error {
	return withGPU(func(c *client) error {
		n, refused := 0, error(nil)
		for ; n < bombCap && refused == nil; n++ {
			b := make([]byte, eventSize)
			rm.PutU32(b, eventClient, c.handle)
			rm.PutU32(b, eventFD, uint32(n+1000)) // of a file or not: nobody looks
			rm.PutU32(b, eventStatus, 0xbad)
			if errno := c.call.escape(c.fd, rm.EscAllocOSEvent, b); errno != 0 || rm.U32(b, eventStatus) != rm.StatusOK {
				refused = &rmError{what: "ALLOC_OS_EVENT", errno: errno, status: rm.U32(b, eventStatus)}
			}
		}
		print("events=%d\nrefused=%s", n, describe(refused))
		if refused == nil {
			return fmt.Errorf("%d OS events without a refusal", n)
		}
		return nil
	})
}
