// SPDX-License-Identifier: Apache-2.0

// Package rm is the interface of NVIDIA's resource manager as data: escapes, classes, controls, structure layouts and
// driver versions, with the decisions that follow from them for a container. It opens nothing and imports nothing of ours.
//
// The guard decides with it, the simulated driver and cgpu-probe speak it, pkg/spec takes the list of trapped numbers.
// Sources: NVIDIA's open kernel modules (named beside each row) and gVisor's pkg/abi/nvgpu for the structures.
package rm

// Escape numbers (NR), from src/nvidia/arch/nvalloc/unix/include/nv_escape.h and kernel-open/common/inc/nv-ioctl-numbers.h.
const (
	EscAllocMemory    = 0x27 // NV_ESC_RM_ALLOC_MEMORY
	EscAllocObject    = 0x28 // NV_ESC_RM_ALLOC_OBJECT
	EscFree           = 0x29 // NV_ESC_RM_FREE
	EscControl        = 0x2a // NV_ESC_RM_CONTROL
	EscAlloc          = 0x2b // NV_ESC_RM_ALLOC
	EscDupObject      = 0x34 // NV_ESC_RM_DUP_OBJECT
	EscShare          = 0x35 // NV_ESC_RM_SHARE
	EscI2CAccess      = 0x39 // NV_ESC_RM_I2C_ACCESS
	EscIdleChannels   = 0x41 // NV_ESC_RM_IDLE_CHANNELS
	EscVidHeapControl = 0x4a // NV_ESC_RM_VID_HEAP_CONTROL
	EscAccessRegistry = 0x4d // NV_ESC_RM_ACCESS_REGISTRY
	EscMapMemory      = 0x4e // NV_ESC_RM_MAP_MEMORY
	EscUnmapMemory    = 0x4f // NV_ESC_RM_UNMAP_MEMORY
	EscContextDMA     = 0x54 // NV_ESC_RM_ALLOC_CONTEXT_DMA2
	EscMapDMA         = 0x57 // NV_ESC_RM_MAP_MEMORY_DMA
	EscUnmapDMA       = 0x58 // NV_ESC_RM_UNMAP_MEMORY_DMA
	EscBindContextDMA = 0x59 // NV_ESC_RM_BIND_CONTEXT_DMA
	EscUpdateMapping  = 0x5e // NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO
	EscCardInfo       = 0xc8 // NV_ESC_CARD_INFO
	EscRegisterFD     = 0xc9 // NV_ESC_REGISTER_FD
	EscAllocOSEvent   = 0xce // NV_ESC_ALLOC_OS_EVENT
	EscFreeOSEvent    = 0xcf // NV_ESC_FREE_OS_EVENT
	EscStatusCode     = 0xd1 // NV_ESC_STATUS_CODE
	EscCheckVersion   = 0xd2 // NV_ESC_CHECK_VERSION_STR
	EscXferCmd        = 0xd3 // NV_ESC_IOCTL_XFER_CMD
	EscAttachGPUs     = 0xd4 // NV_ESC_ATTACH_GPUS_TO_FD
	EscQueryIntr      = 0xd5 // NV_ESC_QUERY_DEVICE_INTR
	EscExportDMABuf   = 0xd9 // NV_ESC_EXPORT_TO_DMABUF_FD
)

// TrappedNRs are the low bytes of the ioctl numbers that the container's seccomp filter hands to the guard. The filter
// compares the low byte only, because the driver ignores the type and direction bits of an ioctl number
// (kernel-open/nvidia/nv.c, nvidia_ioctl); of UVM's it compares one bit more, see TrapMask.
//
// The first are UVM calls: they make and drop references that keep device memory alive past RM_FREE (nvGpuOpsDupMemory,
// rmapi/nv_gpu_ops.c), or name objects of an RM client without a check of whose they are, so the guard must execute them itself. UVM
// compares whole numbers, see UVMShaped. Or they take memory that nobody else counts: page tables, or the kernel's. UVM_MAP_EXTERNAL_SPARSE
// has the low byte of EscVidHeapControl, UVM_ALLOC_DEVICE_P2P that of EscMapMemory, UVM_MAP_DYNAMIC_PARALLELISM_REGION that of
// EscIdleChannels.
var TrappedNRs = [...]uint8{
	UVMRegisterGPU, UVMRegisterGPUVASpace, UVMUnregisterVASpace, UVMRegisterChannel, UVMUnregisterChannel, UVMUnregisterGPU,
	UVMMapExternal, UVMFree, UVMUnmapExternal, UVMAllocDeviceP2P, UVMCreateExternal, UVMAllocSemaphorePool,
	UVMCreateRangeGroup, UVMDestroyRangeGroup,
	EscAllocMemory, EscAllocObject, EscFree, EscControl, EscAlloc, EscDupObject, EscShare, EscI2CAccess, EscIdleChannels,
	EscVidHeapControl, EscAccessRegistry, EscMapMemory, EscUnmapMemory, EscContextDMA, EscMapDMA, EscUnmapDMA, EscBindContextDMA,
	EscUpdateMapping, EscCardInfo, EscRegisterFD, EscAllocOSEvent, EscFreeOSEvent, EscStatusCode, EscCheckVersion, EscXferCmd, EscAttachGPUs,
	EscQueryIntr, EscExportDMABuf,
}

// UVMShaped reports whether the whole number is one of the UVM calls that the guard executes: uvm_unlocked_ioctl
// (kernel-open/nvidia-uvm/uvm.c) switches on all 32 bits.
func UVMShaped(cmd uint32) bool {
	switch cmd {
	case UVMRegisterGPU, UVMRegisterGPUVASpace, UVMUnregisterVASpace, UVMRegisterChannel, UVMUnregisterChannel, UVMUnregisterGPU,
		UVMMapExternal, UVMMapSparse, UVMFree, UVMUnmapExternal, UVMAllocDeviceP2P, UVMCreateExternal, UVMAllocSemaphorePool,
		UVMMapDynamicRegion, UVMCreateRangeGroup, UVMDestroyRangeGroup:
		return true
	}
	return false
}

// TrapMask are the bits of an ioctl number that the filter compares with one of TrappedNRs. Of UVM calls bit 14 is one, which the
// numbers of terminals and sockets have (0x54..): FIONBIO and FIONREAD, which some programs use all the time, share the low byte of one.
func TrapMask(nr uint8) uint32 {
	if uvmAlone(uint32(nr)) {
		return 0x40ff
	}
	return 0xff
}

// uvmAlone reports that a number is trapped for the sake of UVM alone: no escape of interest has it.
func uvmAlone(nr uint32) bool {
	return UVMShaped(nr) && nr != EscVidHeapControl && nr != EscMapMemory && nr != EscIdleChannels
}
