// SPDX-License-Identifier: Apache-2.0

package rm

import "time"

// AllocForm says where the fields sit that differ between the forms of RM_ALLOC's outer structure; -1 where absent.
// The driver tells NVOS21 from NVOS64 by the size field of the ioctl number.
type AllocForm struct {
	Size          int
	ParamsSizeOff int // u32, 0 means: as large as the class needs
	FlagsOff      int // u32, anything but 0 is refused: bit 0 hides the parameters in a serialised form
	RightsOff     int // pointer to an RS_ACCESS_MASK
	StatusOff     int
}

// AllocForm finds the form of RM_ALLOC for an outer structure of this size.
func (a *ABI) AllocForm(size int) (AllocForm, bool) {
	switch {
	case size == 32 && a.branch < 535:
		return AllocForm{32, -1, -1, -1, 24}, true
	case size == 32:
		return AllocForm{32, 24, -1, -1, 28}, true
	case size == 40 && a.branch < 525:
		return AllocForm{40, -1, -1, AllocRights, 32}, true
	case size == 40 && a.branch < 535:
		return AllocForm{40, -1, 32, AllocRights, 36}, true
	case size == 48 && a.branch >= 535:
		return AllocForm{48, 32, 36, AllocRights, 40}, true
	}
	return AllocForm{}, false
}

// ClassKind is what a class means to the guard. The zero value denies.
type ClassKind uint8

const (
	ClassDeny       ClassKind = iota
	ClassRoot                 // 0x0, 0x1, 0x41: a client; runs in the task under the root-alloc rule
	ClassPlain                // allowed; flat parameters, nothing special
	ClassVidmem               // 0x40: device memory, charged
	ClassDevice               // 0x80: the executor must hold the GPU's node open
	ClassSubdevice            // 0x2080
	ClassVASpace              // 0x90f1
	ClassTSG                  // 0xa06c: channel group, counted
	ClassChannel              // *_CHANNEL_GPFIFO: never with CAP_SYS_ADMIN
	ClassCompute              // *_COMPUTE: marks a compute channel
	ClassGraphics             // 2D and 3D: its context draws, and cannot be switched in the middle of work
	ClassEvent                // 0x5, 0x79: the parameters name a client
	ClassDebugger             // 0x83de: the parameters name a client
	ClassSysmem               // 0x3e: host memory
	ClassVirtual              // 0x50a0: a range of GPU addresses, with page tables
	ClassInTask               // 0x71: pins pages of whoever makes the call
	ClassFabric               // 0xf8: holds a reference on other memory
	ClassMulticast            // 0xfd: fabric multicast; holds a file descriptor
	ClassUserShared           // 0xde: a page of the driver's with what firmware measures
	ClassProfiler             // 0xb2cc: hardware counters; the parameters name a client
	ClassContextDMA           // 0x2: a name of memory, by which it may be mapped into the kernel
	ClassSemaphores           // 0xda: holds references on one or two memories, and writes them
	ClassMapper               // 0xfe: holds a semaphore surface; a queue in the kernel of what it would map
	ClassP2P                  // 0x503b: the parameters may choose peer ids, which all of a GPU's users share
	ClassEncoder              // 0xa0bc: a session on a list of the GPU's; the parameters may name memory that it keeps no reference on
	ClassFD                   // others with a file descriptor of the caller (MIG partitions)
)

// InFirmware reports that the driver may make an object of this kind in the GPU's firmware too, out of a fixed piece of memory for all of
// the GPU. Of plain ones it does of nearly all (RS_FLAGS_ALLOC_RPC_TO_PHYS_RM in resource_list.h, which whatever is below a channel has; an
// event on such an object): testdata/firmware.csv.
func (k ClassKind) InFirmware() bool {
	switch k {
	case ClassDeny, ClassRoot, ClassVidmem, ClassSysmem, ClassVirtual, ClassInTask, ClassFabric, ClassMulticast, ClassUserShared,
		ClassContextDMA, ClassSemaphores, ClassMapper, ClassFD:
		return false
	}
	return true
}

// FreeHoldsLocks is for how long the driver's locks may be held when an object of a kind ends: from 590 on RM_USER_SHARED_DATA's destructor
// goes through all objects of all clients, whatever the object had asked for (_handlePollMaskHelper in gpu_user_shared_data.c), as the
// control 0xde0001 does. An end cannot wait, so this is paid for when the object is made.
func (a *ABI) FreeHoldsLocks(k ClassKind) time.Duration {
	if k == ClassUserShared && a.branch >= 590 {
		return 10 * time.Millisecond
	}
	return 0
}

// Class is an object class that RM_ALLOC may make.
type Class struct {
	ID             uint32
	Name           string
	Kind           ClassKind
	Profiling      bool  // of a profiler: only where the node's settings allow those
	ParamsSize     int   // size of the block behind pAllocParms, 0: the class takes none; callers may pass 0 for it
	ParamsOptional bool  // the driver accepts a null pointer
	ClientHandles  []int // offsets of client handles in the block; each must be 0 or the container's own
	Clear          []int // offsets of pointers that mean nothing to the driver; zeroed before it sees them
	FDOff          int   // offset of a file descriptor of the caller (64 bits wide), -1: none
	Source         string
}

// Class looks a class up. Not found means deny, like ClassDeny.
func (a *ABI) Class(id uint32) (Class, bool) {
	r := findClass(id)
	if r == nil {
		return Class{}, false
	}
	c := Class{ID: r.id, Name: r.name, Kind: r.kind, Profiling: r.profiling, ParamsSize: at(r.sizes, a.layout()),
		ParamsOptional: r.optional, ClientHandles: r.clients, Clear: r.clear, FDOff: -1, Source: r.source}
	if r.fd != nil {
		c.FDOff = at(r.fd, a.layout())
	}
	return c, true
}

// classRow is a line of the class table.
type classRow struct {
	id        uint32
	name      string
	kind      ClassKind
	profiling bool
	optional  bool
	sizes     []since
	clients   []int
	clear     []int
	fd        []since
	source    string
}

// FabricForm is where the fields of a fabric object's parameters sit (class 0xf8, NV00F8_ALLOCATION_PARAMETERS).
type FabricForm struct {
	Flags  int // u32, allocFlags
	Offset int // u64, map.offset
	Memory int // u32, map.hVidMem: device memory that the object holds a reference on
}

const (
	FabricAlignment = 0 // u64
	FabricSize      = 8 // u64, allocSize
	fabricPage      = 16

	FabricFlexible   = 1 << 0 // NV00F8_ALLOC_FLAGS_FLEXIBLE_FLA: addresses that have no memory yet
	FabricContiguous = 1 << 2 // NV00F8_ALLOC_FLAGS_FORCE_CONTIGUOUS
)

// FabricPage is the size of the pages that a fabric object's parameters ask for.
func (a *ABI) FabricPage(p []byte) uint64 {
	if a.branch < 535 {
		return uint64(U32(p, fabricPage))
	}
	return U64(p, fabricPage)
}

// Fabric is the form of the driver's fabric objects.
func (a *ABI) Fabric() FabricForm {
	if a.branch < 535 {
		return FabricForm{20, 24, 32}
	}
	return FabricForm{24, 32, 40}
}

func findClass(id uint32) *classRow {
	lo, hi := 0, len(classes)
	for lo < hi {
		mid := (lo + hi) / 2
		if classes[mid].id < id {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo < len(classes) && classes[lo].id == id {
		return &classes[lo]
	}
	return nil
}
