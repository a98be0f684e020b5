// SPDX-License-Identifier: Apache-2.0

package rm

import "encoding/binary"

// U32 reads a little-endian word. Outside of b it is zero: lengths are checked where a block is read, and a mistake
// there must not bring the guard down.
func U32(b []byte, off int) uint32 {
	if off < 0 || off > len(b)-4 {
		return 0
	}
	return binary.LittleEndian.Uint32(b[off:])
}

// PutU32 writes a little-endian word; outside of b it does nothing.
func PutU32(b []byte, off int, v uint32) {
	if off < 0 || off > len(b)-4 {
		return
	}
	binary.LittleEndian.PutUint32(b[off:], v)
}

// U64 reads a little-endian double word; outside of b it is zero.
func U64(b []byte, off int) uint64 {
	if off < 0 || off > len(b)-8 {
		return 0
	}
	return binary.LittleEndian.Uint64(b[off:])
}

// PutU64 writes a little-endian double word; outside of b it does nothing.
func PutU64(b []byte, off int, v uint64) {
	if off < 0 || off > len(b)-8 {
		return
	}
	binary.LittleEndian.PutUint64(b[off:], v)
}

// U16 reads a little-endian half word; outside of b it is zero.
func U16(b []byte, off int) uint16 {
	if off < 0 || off > len(b)-2 {
		return 0
	}
	return binary.LittleEndian.Uint16(b[off:])
}

// Outer structures. The same in every branch; names follow src/common/sdk/nvidia/inc/nvos.h.
const (
	// NVOS00_PARAMETERS, RM_FREE.
	FreeSize     = 16
	FreeRoot     = 0
	FreeParent   = 4
	FreeObject   = 8
	FreeStatus   = 12
	FreeNoParent = 0

	// NVOS02_PARAMETERS and a file descriptor, RM_ALLOC_MEMORY.
	AllocMemorySize     = 56
	AllocMemoryRoot     = 0
	AllocMemoryParent   = 4
	AllocMemoryObject   = 8
	AllocMemoryClass    = 12
	AllocMemoryFlags    = 16
	AllocMemoryRegister = 1 << 27 // NVOS02_FLAGS_REGISTER_MEMDESC_TO_PHYS_RM, since 580
	AllocMemoryPointer  = 24      // the caller's pages (class 0x71)
	AllocMemoryLimit    = 32      // size - 1
	AllocMemoryStatus   = 40
	AllocMemoryFD       = 48 // of the file to map, for class 0x3e (AllocMemoryMaps)

	// NVOS05_PARAMETERS, RM_ALLOC_OBJECT.
	AllocObjectSize   = 20
	AllocObjectStatus = 16

	// NVOS21_PARAMETERS and NVOS64_PARAMETERS, RM_ALLOC: the common head. For the rest see ABI.AllocForm.
	AllocRoot   = 0
	AllocParent = 4
	AllocObject = 8 // in: wanted handle or 0; out: the handle
	AllocClass  = 12
	AllocParams = 16 // pointer
	AllocRights = 24 // pointer, NVOS64 only; RS_ACCESS_MASK
	RightsSize  = 4  // sizeof(RS_ACCESS_MASK)

	// NVOS54_PARAMETERS, RM_CONTROL.
	ControlSize       = 32
	ControlClient     = 0
	ControlObject     = 4
	ControlCmd        = 8
	ControlFlags      = 12 // anything but 0 is refused: bit 2 hides the parameters in a serialised form
	ControlParams     = 16 // pointer
	ControlParamsSize = 24
	ControlStatus     = 28

	// NVOS55_PARAMETERS, RM_DUP_OBJECT.
	DupSize      = 28
	DupClient    = 0
	DupParent    = 4
	DupObject    = 8 // in: wanted handle or 0; out: the handle
	DupClientSrc = 12
	DupObjectSrc = 16
	DupFlags     = 20
	DupStatus    = 24

	// NVOS57_PARAMETERS, RM_SHARE.
	ShareSize   = 24
	ShareClient = 0
	ShareObject = 4
	SharePolicy = 8 // RS_SHARE_POLICY
	ShareStatus = 20

	// RS_SHARE_POLICY, src/common/sdk/nvidia/inc/rs_access.h. It also sits in controls 0xd04 (at 0) and 0xd06 (at 4).
	SharePolicySize   = 12
	SharePolicyTarget = 0
	SharePolicyAccess = 4
	SharePolicyType   = 8  // u16
	SharePolicyAction = 10 // u8

	// NVOS32_PARAMETERS, RM_VID_HEAP_CONTROL: head, then a union by function.
	HeapSize     = 184
	HeapRoot     = 0
	HeapParent   = 4
	HeapFunction = 8
	HeapVASpace  = 12
	HeapStatus   = 20
	HeapTotal    = 24 // bytes
	HeapFree     = 32 // bytes

	HeapFnAllocSize         = 2
	HeapFnFree              = 3
	HeapFnInfo              = 5
	HeapFnAllocTiled        = 6
	HeapFnAllocSizeRange    = 14
	HeapFnReacquireCompr    = 15
	HeapFnReleaseCompr      = 16
	HeapFnGetMemAlignment   = 18
	HeapFnHWAlloc           = 19
	HeapFnHWFree            = 20
	HeapFnAllocOSDescriptor = 27

	// Functions 2, 6 and 14.
	HeapAllocMemory     = 44
	HeapAllocType       = 48
	HeapAllocFlags      = 52
	HeapAllocAttr       = 56 // functions 2 and 14
	HeapAllocSize       = 88 // functions 2 and 6
	HeapTiledHeight     = 56 // function 6: the driver takes height × pitch for the size
	HeapTiledPitch      = 60
	HeapTiledAttr       = 64
	HeapAllocAttr2      = 144 // functions 2 and 6
	HeapAllocRangeSize  = 80  // function 14
	HeapAllocRangeAttr2 = 136 // function 14
	// Function 3.
	HeapFreeMemory = 44
	HeapFreeFlags  = 48
	// Function 5.
	HeapInfoOffset = 48
	HeapInfoSize   = 56
	HeapInfoBase   = 64

	// NVOS33_PARAMETERS and a file descriptor, RM_MAP_MEMORY.
	MapMemorySize    = 56
	MapMemoryClient  = 0
	MapMemoryDevice  = 4
	MapMemoryMemory  = 8
	MapMemoryOffset  = 16
	MapMemoryLength  = 24
	MapMemoryAddress = 32
	MapMemoryStatus  = 40
	MapMemoryFlags   = 44
	MapMemoryFD      = 48

	// NVOS34_PARAMETERS, RM_UNMAP_MEMORY.
	UnmapMemorySize    = 32
	UnmapMemoryClient  = 0
	UnmapMemoryMemory  = 8
	UnmapMemoryAddress = 16
	UnmapMemoryStatus  = 24

	// NVOS56_PARAMETERS, RM_UPDATE_DEVICE_MAPPING_INFO.
	UpdateMappingSize   = 40
	UpdateMappingClient = 0
	UpdateMappingMemory = 8
	UpdateMappingOld    = 16
	UpdateMappingNew    = 24
	UpdateMappingStatus = 32

	// NVOS46_PARAMETERS, RM_MAP_MEMORY_DMA, and NVOS47_PARAMETERS, RM_UNMAP_MEMORY_DMA: the heads. For the rest see ABI.MapDMA and
	// ABI.UnmapDMA.
	DMAClient    = 0
	DMADevice    = 4
	DMAMapper    = 8 // hDma: a range of virtual addresses
	DMAMemory    = 12
	DMAMapOffset = 16 // in the memory
	DMAMapLength = 24
	DMAFlags     = 32

	DMAFlagKernel = 1 << 5 // NVOS46_FLAGS_KERNEL_MAPPING

	// nv_ioctl_xfer_t; kernel-open/common/inc/nv-ioctl.h for this and the following.
	XferSize   = 16
	XferCmd    = 0 // the inner number, all 32 bits count
	XferLength = 4
	XferPtr    = 8
	XferMax    = 16384 // NV_ABSOLUTE_MAX_IOCTL_SIZE

	// nv_ioctl_card_info_t, one element of the array.
	CardInfoSize    = 72
	CardInfoValid   = 0 // u8
	CardInfoDomain  = 4
	CardInfoBus     = 8  // u8
	CardInfoSlot    = 9  // u8
	CardInfoVendor  = 12 // u16
	CardInfoDevice  = 14 // u16
	CardInfoGPUID   = 16
	CardInfoIRQ     = 20 // u16
	CardInfoRegAddr = 24
	CardInfoRegSize = 32
	CardInfoFBAddr  = 40
	CardInfoFBSize  = 48 // size of BAR1
	CardInfoMinor   = 56

	// nv_ioctl_register_fd_t.
	RegisterFDSize = 4
	RegisterFDFD   = 0

	// nv_ioctl_alloc_os_event_t, nv_ioctl_free_os_event_t.
	OSEventSize   = 16
	OSEventClient = 0
	OSEventFD     = 8
	OSEventStatus = 12

	// nv_ioctl_status_code_t.
	StatusCodeSize   = 12
	StatusCodeDomain = 0
	StatusCodeBus    = 4 // u8
	StatusCodeSlot   = 5 // u8
	StatusCodeStatus = 8

	// nv_ioctl_rm_api_version_t.
	CheckVersionSize   = 72
	CheckVersionCmd    = 0
	CheckVersionReply  = 4
	CheckVersionString = 8 // 64 bytes

	// Of CheckVersionCmd; everything else compares the strings to their ends.
	CheckVersionRelaxed = '1' // only up to the first dot
	CheckVersionQuery   = '2' // compare nothing; before 530 it was NV_RM_API_VERSION_CMD_OVERRIDE, which does not tell the version either

	// nv_ioctl_export_to_dma_buf_fd_t: the head. The handles follow at ABI.DMABufHandles.
	DMABufFD           = 0
	DMABufClient       = 4
	DMABufTotalObjects = 8
	DMABufNumObjects   = 12
	DMABufIndex        = 16
	DMABufTotalSize    = 24
	DMABufMaxObjects   = 128
)

// DMABufHandles is the offset of the handles in nv_ioctl_export_to_dma_buf_fd_t of this size.
func DMABufHandles(size int) (int, bool) {
	switch size {
	case 2600:
		return 32, true
	case 2608:
		return 36, true
	}
	return 0, false
}

// ChannelNotifiers and TSGNotifiers are where the parameters of a channel and of a group name memory that errors are written to: any
// (hObjectError), and of ECC (hObjectEccError).
var (
	ChannelNotifiers = [...]int{0, 140}
	TSGNotifiers     = [...]int{0, 4}
)

// Blocks behind pAllocParms.
const (
	// NV_MEMORY_ALLOCATION_PARAMS: classes 0x3e, 0x40, 0x42, 0x50a0.
	MemoryOwner         = 0
	MemoryType          = 4
	MemoryTypeImage     = 0 // NVOS32_TYPE_*
	MemoryTypeNotifier  = 13
	MemoryFlags         = 8
	MemoryAttr          = 24
	MemoryAttr2         = 28
	MemoryAttr2Register = 1 << 31 // NVOS32_ATTR2_REGISTER_MEMDESC_TO_PHYS_RM, since 550
	MemorySize          = 64      // in: wanted; out: granted
	MemoryAlignment     = 72
	MemoryOffset        = 80
	MemoryLimit         = 88
	MemoryAddress       = 96 // pointer; the driver overwrites it (stdmemValidateParams and callers)
	MemoryVASpace       = 108
	MemoryInternalFlags = 112
	MemoryTag           = 116
	MemoryNUMANode      = 120 // since 545

	MemoryFlagFixed         = 1 << 4  // NVOS32_ALLOC_FLAGS_FIXED_ADDRESS_ALLOCATE
	MemoryFlagLazy          = 1 << 10 // NVOS32_ALLOC_FLAGS_LAZY
	MemoryFlagVirtual       = 1 << 19 // NVOS32_ALLOC_FLAGS_VIRTUAL
	MemoryFlagExternal      = 1 << 22 // NVOS32_ALLOC_FLAGS_EXTERNALLY_MANAGED
	MemoryFlagSparse        = 1 << 26 // NVOS32_ALLOC_FLAGS_SPARSE
	MemoryAttrLocationShift = 25      // two bits, NVOS32_ATTR_LOCATION
	MemoryAttrLocationMask  = 3
	MemoryLocationVidmem    = 0
	MemoryLocationPCI       = 1
	MemoryAttrPageShift     = 23 // two bits, NVOS32_ATTR_PAGE_SIZE
	MemoryAttrPageMask      = 3

	// NV_OS_DESC_MEMORY_ALLOCATION_PARAMS: class 0x71.
	OSDescType       = 0
	OSDescFlags      = 4
	OSDescAttr       = 8
	OSDescAttr2      = 12
	OSDescDescriptor = 16 // the caller's pages
	OSDescLimit      = 24

	// NV0080_ALLOC_PARAMETERS: class 0x80.
	DeviceID           = 0
	DeviceClientShare  = 4
	DeviceTargetClient = 8
	DeviceTargetDevice = 12
	DeviceFlags        = 16
	DeviceVAMode       = 48

	DeviceFlagRetryHost = 1 << 2 // NV_DEVICE_ALLOCATION_FLAGS_RETRY_PTE_ALLOC_IN_SYS

	// NV_VASPACE_ALLOCATION_PARAMETERS: class 0x90f1.
	VASpaceIndex           = 0
	VASpaceNew             = 0 // NV_VASPACE_ALLOCATION_INDEX_GPU_NEW
	VASpaceGlobal          = 2 // …_GLOBAL: the one of all who have none of their own
	VASpaceDevice          = 3 // …_DEVICE: the device's, for what names none
	VASpaceFlags           = 4
	VASpaceFlagRetryHost   = 1 << 1  // NV_VASPACE_ALLOCATION_FLAGS_RETRY_PTE_ALLOC_IN_SYS
	VASpaceFlagFLA         = 1 << 9  // NV_VASPACE_ALLOCATION_FLAGS_IS_FLA
	VASpaceFlagHeapManaged = 1 << 13 // NV_VASPACE_ALLOCATION_FLAGS_PTETABLE_HEAP_MANAGED

	// NV_CONTEXT_DMA_ALLOCATION_PARAMS: class 0x2.
	ContextDMASize       = 32
	ContextDMASubdevice  = 0
	ContextDMAFlags      = 4
	ContextDMAMemory     = 8
	ContextDMAOffset     = 16
	ContextDMALimit      = 24      // length - 1
	ContextDMAFlagKernel = 1 << 20 // NVOS03_FLAGS_MAPPING_KERNEL, and part of NVOS03_FLAGS_TYPE_NOTIFIER
	ContextDMAFlagNoHash = 1 << 29 // NVOS03_FLAGS_HASH_TABLE_DISABLE, without which none is made

	// NVOS39_PARAMETERS: RM_ALLOC_CONTEXT_DMA2.
	OldContextDMAClient    = 0
	OldContextDMASubdevice = 4
	OldContextDMAObject    = 8
	OldContextDMAClass     = 12
	OldContextDMAFlags     = 16
	OldContextDMAMemory    = 24
	OldContextDMAOffset    = 32
	OldContextDMALimit     = 40 // length - 1

	// NV_SEMAPHORE_SURFACE_ALLOC_PARAMETERS: class 0xda.
	SemaphoreMemory    = 0
	SemaphoreMaxMemory = 4 // 0: none, or the GPU needs none

	// NV_MEMORY_MAPPER_ALLOCATION_PARAMS: class 0xfe, from 555 on.
	MapperSurface      = 0
	MapperQueue        = 4 // places in it
	MapperNotification = 8
	MapperOffset       = 16
	MapperSize         = 24

	// NV2080_ALLOC_PARAMETERS: class 0x2080.
	SubdeviceID = 0

	// NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS: class 0xa06c.
	TSGVASpace    = 8
	TSGEngineType = 12

	// NV_CTXSHARE_ALLOCATION_PARAMETERS: class 0x9067.
	ContextShareVASpace = 0

	// NV_MEMORY_VIRTUAL_ALLOCATION_PARAMS: class 0x70.
	AllMemoryVASpace = 16
	NoAddressSpace   = 1<<32 - 1 // NV_MEMORY_VIRTUAL_SYSMEM_DYNAMIC_HVASPACE: memory without addresses, no handle

	// NV503B_ALLOC_PARAMETERS: class 0x503b.
	P2PSubdevice = 0
	P2PPeer      = 4

	// NV_CHANNEL_ALLOC_PARAMS: the *_CHANNEL_GPFIFO classes.
	ChannelFlags           = 20
	ChannelContextShare    = 24
	ChannelVASpace         = 28
	ChannelUserdMemory     = 32 // the first of eight, one for each GPU of an SLI group
	ChannelUserdOffset     = 64
	ChannelEngineType      = 128
	ChannelFlagPrivileged  = 1 << 5 // NVOS04_FLAGS_PRIVILEGED_CHANNEL
	ChannelEngineTypeGR    = 1      // NV2080_ENGINE_TYPE_GRAPHICS
	ChannelEngineTypeCopy0 = 9      // NV2080_ENGINE_TYPE_COPY0

	// NV906F_CTRL_CMD_RESET_CHANNEL_PARAMS (ctrl906f.h). The reasons are DEFAULT, VERIF and MMU_FLT.
	ResetEngine     = 0
	ResetSubdevice  = 4
	ResetReason     = 8
	ResetReasonLast = 2

	// NV83DE_CTRL_DEBUG_READ_MEMORY_PARAMS and …WRITE_MEMORY_PARAMS (ctrl83dedebug.h).
	DebugMemoryHandle = 0
	DebugMemoryLength = 4
	DebugMemoryOffset = 8
	DebugMemoryBuffer = 16

	// NV2080_CTRL_GPU_EXEC_REG_OPS_PARAMS and NV2080_CTRL_GPU_REG_OP (ctrl2080gpu.h).
	RegOpsClient  = 0
	RegOpsChannel = 4
	RegOpsRoute   = 32 // NV2080_CTRL_GR_ROUTE_INFO, 16 bytes
	RegOpSize     = 32

	// NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS (ctrl2080fb.h).
	CacheFlushFlags      = 4016
	CacheFlushWriteBack  = 1 << 2
	CacheFlushInvalidate = 1 << 3

	// NVB0CC_CTRL_ALLOC_PMA_STREAM_PARAMS, NVB0CC_CTRL_FREE_PMA_STREAM_PARAMS (ctrlb0ccprofiler.h).
	StreamAllocIndex = 44 // written by the driver
	StreamFreeIndex  = 0

	// NV83DE_ALLOC_PARAMETERS: class 0x83de.
	DebuggerAppClient = 4

	// NVA0BC_ALLOC_PARAMETERS.
	EncoderVersion = 12
	EncoderMemory  = 16

	DebuggerObject = 8

	// NV0005_ALLOC_PARAMETERS: classes 0x5, 0x79.
	EventParentClient = 0
	EventSrcResource  = 4
	EventClass        = 8
	EventNotifyIndex  = 12
	EventData         = 16 // the number of a file descriptor; compared, never looked up

	// NV00FD_ALLOCATION_PARAMETERS: class 0xfd. pOsEvent moves, see Class.
)

// Blocks behind NVOS54 params.
const (
	// NV2080_CTRL_FB_GET_INFO_V2_PARAMS (0x20801303); entries of 8 bytes: index, value in KiB.
	FBInfoCount = 0
	FBInfoList  = 4
	FBInfoEntry = 8
	// NV2080_CTRL_FB_GET_INFO_PARAMS (0x20801301): the list sits behind a pointer.
	FBInfoV1Count = 0
	FBInfoV1List  = 8

	FBIndexBAR1Size          = 0x5
	FBIndexRAMSize           = 0x7
	FBIndexTotalRAMSize      = 0x8
	FBIndexHeapSize          = 0x9
	FBIndexMappableHeapSize  = 0xa
	FBIndexTaxSize           = 0x10
	FBIndexLargestFreeRegion = 0x12
	FBIndexHeapFree          = 0x16
	FBIndexBAR1Avail         = 0x1d
	FBIndexBAR1MaxContiguous = 0x1f
	FBIndexUsableRAMSize     = 0x20
	FBIndexHeapOffline       = 0x27
	FBIndexProtectedMemTotal = 0x33
	FBIndexProtectedMemFree  = 0x34
	FBIndexNUMANode          = 0x3b

	// NV2080_CTRL_GPU_GET_PIDS_PARAMS (0x2080018d).
	PidsIDType = 0
	PidsID     = 4
	PidsCount  = 8
	PidsTable  = 12 // u32 each
	PidsMax    = 950

	// NV2080_CTRL_GPU_GET_PID_INFO_PARAMS (0x2080018e).
	PidInfoCount = 0
	PidInfoList  = 8
	PidInfoEntry = 72
	PidInfoMax   = 200
	// one entry
	PidInfoPid         = 0
	PidInfoIndex       = 4
	PidInfoResult      = 8
	PidInfoPrivate     = 16
	PidInfoSharedOwned = 24
	PidInfoSharedDuped = 32

	// NV2080_CTRL_FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO_PARAMS (0x20801123).
	GroupChannelsClient = 0
	GroupChannelsObject = 4 // a channel group, or a channel
	GroupChannelsCount  = 12
	GroupChannelsIDs    = 16 // u32 each
	GroupChannelsMax    = 128

	// GPU id lists; unused entries hold GPUIDUnused.
	GPUIDUnused   = 0xffffffff
	GPUIDAttach   = 0x0000ffff // NV0000_CTRL_GPU_ATTACH_ALL_PROBED_IDS, first entry of 0x215
	GPUIDListLen  = 32
	GPUIDFailedID = 128 // 0x215: failedId

	// NV0000_CTRL_GPU_GET_ACTIVE_DEVICE_IDS_PARAMS (0x288); entries gpuId, gpuInstanceId, computeInstanceId.
	ActiveDevicesCount = 0
	ActiveDevicesList  = 4
	ActiveDevicesEntry = 12
	ActiveDevicesMax   = 256

	// NV0000_CTRL_GPU_GET_UUID_INFO_PARAMS (0x274).
	UUIDQueryUUID  = 0 // 256 bytes
	UUIDQueryFlags = 256
	UUIDQueryGPUID = 260

	// NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS (0x20801210).
	PreemptSize     = 32
	PreemptFlags    = 0 // bit 0: cilpPreemptMode counts, bit 1: gfxpPreemptMode counts
	PreemptChannel  = 4
	PreemptGFXP     = 8
	PreemptCILP     = 12
	PreemptModeWFI  = 0
	PreemptModeCTA  = 1
	PreemptModeCILP = 2
	PreemptModeGFXP = 1

	// NV0080_CTRL_FIFO_GET_ENGINE_CONTEXT_PROPERTIES_PARAMS (0x801707).
	ContextBufferSize   = 12
	ContextBufferEngine = 0 // which buffer, see contextbuffers.go
	ContextBufferBytes  = 8

	DisableSize     = 536 // 0x2080110b: NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS
	DisableFlag     = 0   // a byte; 0: let run
	DisableCount    = 4
	DisableRewind   = 9 // a byte: drop what is queued
	DisableClients  = 24
	DisableChannels = 280
	DisableMost     = 64 // NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES (ctrl2080fifo.h)

	PreemptGroupWait    = 0 // 0xa06c0105: NVA06C_CTRL_PREEMPT_PARAMS, a byte each but for the timeout
	PreemptGroupManual  = 1 // the timeout is the caller's
	PreemptGroupTimeout = 4 // us

	StopImmediate = 0 // 0xa06f0112: NVA06F_CTRL_STOP_CHANNEL_PARAMS.bImmediate

	// NV2080_CTRL_THERMAL_SYSTEM_EXECUTE_V2_PARAMS (0x20800513).
	ThermalSizeOf = 8 // of an entry, as the caller has it
	ThermalCount  = 20
	ThermalList   = 24
	ThermalEntry  = 44
	ThermalMax    = 32
	ThermalOpcode = 8 // in an entry

	// NV2080_CTRL_PERF_BOOST_PARAMS (0x2080200a).
	BoostFlags   = 0
	BoostCommand = 0x3                               // in the flags
	BoostToMax   = 2                                 // the largest command
	BoostKnown   = BoostCommand | 1<<4 | 1<<5 | 1<<6 // …_CUDA, …_ASYNC, …_CUDA_PRIORITY

	// NV0000_CTRL_OS_UNIX_EXPORT_OBJECT (in 0x3d05 and 0x3d06): type, then the object's handles.
	ExportObjectType   = 0
	ExportObjectDevice = 4
	ExportObjectParent = 8
	ExportObjectHandle = 12
	PeerMemoryHandle   = 0  // 0x503c0104, 0x503c0105: NV503C_CTRL_REGISTER_VIDMEM_PARAMS.hMemory
	ExportFDObject     = 0  // 0x3d05
	ExportFDFD         = 16 // 0x3d05
	ExportFDFlags      = 20 // 0x3d05
	ImportFDFD         = 0  // 0x3d06
	ImportFDObject     = 4  // 0x3d06

	// NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS (0x20802096). For the samples see ABI.GPUMon.
	GPUMonType    = 0
	GPUMonBufSize = 4
	GPUMonCount   = 8
	GPUMonTracker = 12
	GPUMonSamples = 16
	GPUMonMax     = 72
)

// UVM ioctls, numbers as the driver compares them: kernel-open/nvidia-uvm/uvm_ioctl.h, uvm_linux_ioctl.h.
const (
	UVMInitialize         = 0x30000001
	UVMDeinitialize       = 0x30000002
	UVMCreateRangeGroup   = 23
	UVMDestroyRangeGroup  = 24
	UVMRegisterGPUVASpace = 25
	UVMUnregisterVASpace  = 26
	UVMRegisterChannel    = 27
	UVMUnregisterChannel  = 28
	UVMMapExternal        = 33
	UVMFree               = 34
	UVMRegisterGPU        = 37
	UVMUnregisterGPU      = 38
	UVMPageableMemAccess  = 39
	UVMDisableReadDup     = 45
	UVMToolsReadMemory    = 62
	UVMToolsWriteMemory   = 63
	UVMMapDynamicRegion   = 65 // UVM_MAP_DYNAMIC_PARALLELISM_REGION
	UVMUnmapExternal      = 66
	UVMAllocSemaphorePool = 68
	UVMCleanUpZombies     = 69
	UVMValidateVARange    = 72
	UVMCreateExternal     = 73
	UVMMapSparse          = 74
	UVMMMInitialize       = 75
	UVMAllocDeviceP2P     = 78

	// UVM_UNREGISTER_GPU_VASPACE_PARAMS.
	UVMUnregisterSize   = 20
	UVMGPU              = 0 // its UUID; it is first in the calls 25 to 27, 37 and 38 too
	UVMUnregisterStatus = 16

	// UVM_INITIALIZE_PARAMS.
	UVMInitializeSize     = 16
	UVMInitializeFlags    = 0
	UVMInitializeStatus   = 8
	UVMInitFlagDisableHMM = 1
	UVMInitFlagSharing    = 2 // MULTI_PROCESS_SHARING_MODE

	// UVM_VALIDATE_VA_RANGE_PARAMS.
	UVMValidateSize   = 24
	UVMValidateBase   = 0
	UVMValidateLength = 8
	UVMValidateStatus = 16
)

// P2PChoices are the offsets in NV503B_ALLOC_PARAMETERS of what a caller may choose of what all of a GPU's users share: peer ids, for
// either GPU, mailboxes in BAR1, and peer ids of extended memory.
var P2PChoices = [...]int{8, 12, 16, 20, 24, 32, 36}

// AllocMemoryMaps reports that RM_ALLOC_MEMORY of host memory with such flags has it mapped into a file at once (RmIoctl in escape.c).
func AllocMemoryMaps(flags uint32) bool {
	const allocNone, noMap = 1, 1 // NVOS02_FLAGS_ALLOC (17:16), NVOS02_FLAGS_MAPPING (31:30)
	return flags>>16&3 != allocNone && flags>>30 != noMap
}
