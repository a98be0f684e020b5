// SPDX-License-Identifier: Apache-2.0

// Package page is the vGPU page: a small file per container through which the host tells the limiter (limiter/, the
// preload library) what the container's vGPUs are: limits, use, flags. The container sees it as /run/cgpu/vgpu, read-only
// where a guard enforces the limits; in preload mode it is writable, and the container's processes keep their common
// account in it.
//
// cgpu-runtime makes the file, the guard writes use and changes of limits into it, cgpu reads it in preload mode. The C
// side is limiter/page.h, generated from the structures below.
package page

//go:generate go run ./gen ../../limiter/page.h

// Magic and Version begin every page. A limiter that does not know both passes every call through.
const (
	Magic   = 0x55504763 // "cGPU"
	Version = 1
)

// Path is where the container sees its page.
const Path = "/run/cgpu/vgpu"

// MaxVGPUs bounds the GPUs of one container, MaxProcesses the GPU processes that share a page in preload mode.
const (
	MaxVGPUs     = 16
	MaxProcesses = 512
)

// Flags of a page.
const (
	// FlagGuard: a guard answers driver calls. The limiter asks it (ReserveManaged) and enforces nothing itself.
	FlagGuard = 1 << iota
	// FlagPreload: there is no guard; the limiter enforces. The page is writable and has process slots.
	FlagPreload
	// FlagManagedLimit: managed memory counts against the limit. FlagManagedDeny: it is refused. Neither: not looked at.
	FlagManagedLimit
	FlagManagedDeny
	// FlagNoHMM: UVM_INIT_FLAGS_DISABLE_HMM is set for the container, so that ordinary host memory stays out of the GPU.
	FlagNoHMM
)

// Flags of a vGPU.
const (
	// VGPUNative: the whole card, without a limit.
	VGPUNative = 1 << iota
)

// Header is the beginning of a page. All numbers are in the machine's byte order; 64-bit ones are read and written whole.
type Header struct {
	Magic     uint32
	Version   uint32
	Size      uint32 // of the file in bytes
	Flags     uint32
	Change    uint32 // counts changes of what the host sets, so that a limiter can tell that there was one
	VGPUs     uint32 // how many follow
	Processes uint32 // slots behind the vGPUs; 0 without FlagPreload
	_         uint32
	// UVMDevice is the device number of the nvidia-uvm node as the kernel encodes it in stat(2); 0 where the node is
	// simulated: then any shared mapping whose offset is its address counts as managed memory.
	UVMDevice     uint64
	ControlDevice uint64 // of nvidiactl; 0: not known
	_             [16]byte
}

// VGPU is one vGPU, in the order of the container's GPUs.
type VGPU struct {
	Flags uint32
	Minor uint32 // of /dev/nvidiaN
	// GPUID is how RM names the GPU (domain << 16 | bus << 8 | slot).
	GPUID  uint32
	Weight uint32
	Limit  uint64 // device memory in bytes; set by the host
	Used   uint64 // of it, managed memory included; written by the guard, in preload mode the sum of the slots is what counts
	// Spill and Spilled are host memory served as device memory beyond Limit, in bytes.
	Spill   uint64
	Spilled uint64
	Managed uint64 // the part of Used that is managed memory
	// TimesliceMicros is the timeslice for a channel group, in preload mode; 0: leave the driver's own.
	TimesliceMicros uint64
}

// Slot is a process in preload mode.
type Slot struct {
	// Owner is the process' number in the container (low 32 bits) and the low 31 bits of its start time (/proc/PID/stat,
	// field 22); 0: free. The highest bit is set while another process clears the slot of a dead one.
	Owner uint64
	Used  [MaxVGPUs]uint64 // bytes per vGPU, Managed included
	// Managed is the managed part of Used, the same for every vGPU.
	Managed uint64
}

// ReserveManaged and ReleaseManaged are ioctl numbers, on nvidia-uvm, by which a limiter tells the guard that it is about to
// map managed memory, or has unmapped some. The driver never sees them; their low bytes are those of UVM calls that the
// container's filter hands to the guard (rm.UVMMapExternal, rm.UVMFree).
const (
	ReserveManaged = 0x43470021
	ReleaseManaged = 0x43470022
)

// ManagedCall is what both take. Status is an NV_STATUS: 0, or NV_ERR_NO_MEMORY (0x51) where the limit does not allow it.
type ManagedCall struct {
	Base   uint64
	Length uint64
	Status uint32
	_      uint32
}
