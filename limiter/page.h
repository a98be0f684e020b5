/* Generated from pkg/page and pkg/rm by `go generate ./pkg/page`. Do not edit. */
#ifndef CGPU_PAGE_H
#define CGPU_PAGE_H

#include <stdint.h>

#define CGPU_PAGE_MAGIC 0x55504763u
#define CGPU_PAGE_VERSION 1
#ifndef CGPU_PAGE_PATH
#define CGPU_PAGE_PATH "/run/cgpu/vgpu"
#endif
#define CGPU_MAX_VGPUS 16
#define CGPU_MAX_PROCESSES 512
#define CGPU_FLAG_GUARD 0x1u
#define CGPU_FLAG_PRELOAD 0x2u
#define CGPU_FLAG_MANAGED_LIMIT 0x4u
#define CGPU_FLAG_MANAGED_DENY 0x8u
#define CGPU_FLAG_NO_HMM 0x10u
#define CGPU_VGPU_NATIVE 0x1u
#define CGPU_RESERVE_MANAGED 0x43470021u
#define CGPU_RELEASE_MANAGED 0x43470022u

struct cgpu_header {
	uint32_t magic;
	uint32_t version;
	uint32_t size;
	uint32_t flags;
	uint32_t change;
	uint32_t vgpus;
	uint32_t processes;
	uint32_t reserved7;
	uint64_t uvm_device;
	uint64_t control_device;
	uint8_t reserved10[16];
};
_Static_assert(__builtin_offsetof(struct cgpu_header, magic) == 0, "Header.Magic");
_Static_assert(__builtin_offsetof(struct cgpu_header, version) == 4, "Header.Version");
_Static_assert(__builtin_offsetof(struct cgpu_header, size) == 8, "Header.Size");
_Static_assert(__builtin_offsetof(struct cgpu_header, flags) == 12, "Header.Flags");
_Static_assert(__builtin_offsetof(struct cgpu_header, change) == 16, "Header.Change");
_Static_assert(__builtin_offsetof(struct cgpu_header, vgpus) == 20, "Header.VGPUs");
_Static_assert(__builtin_offsetof(struct cgpu_header, processes) == 24, "Header.Processes");
_Static_assert(__builtin_offsetof(struct cgpu_header, reserved7) == 28, "Header._");
_Static_assert(__builtin_offsetof(struct cgpu_header, uvm_device) == 32, "Header.UVMDevice");
_Static_assert(__builtin_offsetof(struct cgpu_header, control_device) == 40, "Header.ControlDevice");
_Static_assert(__builtin_offsetof(struct cgpu_header, reserved10) == 48, "Header._");
_Static_assert(sizeof(struct cgpu_header) == 64, "Header");

struct cgpu_vgpu {
	uint32_t flags;
	uint32_t minor;
	uint32_t gpuid;
	uint32_t weight;
	uint64_t limit;
	uint64_t used;
	uint64_t spill;
	uint64_t spilled;
	uint64_t managed;
	uint64_t timeslice_micros;
};
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, flags) == 0, "VGPU.Flags");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, minor) == 4, "VGPU.Minor");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, gpuid) == 8, "VGPU.GPUID");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, weight) == 12, "VGPU.Weight");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, limit) == 16, "VGPU.Limit");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, used) == 24, "VGPU.Used");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, spill) == 32, "VGPU.Spill");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, spilled) == 40, "VGPU.Spilled");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, managed) == 48, "VGPU.Managed");
_Static_assert(__builtin_offsetof(struct cgpu_vgpu, timeslice_micros) == 56, "VGPU.TimesliceMicros");
_Static_assert(sizeof(struct cgpu_vgpu) == 64, "VGPU");

struct cgpu_slot {
	uint64_t owner;
	uint64_t used[16];
	uint64_t managed;
};
_Static_assert(__builtin_offsetof(struct cgpu_slot, owner) == 0, "Slot.Owner");
_Static_assert(__builtin_offsetof(struct cgpu_slot, used) == 8, "Slot.Used");
_Static_assert(__builtin_offsetof(struct cgpu_slot, managed) == 136, "Slot.Managed");
_Static_assert(sizeof(struct cgpu_slot) == 144, "Slot");

struct cgpu_managed_call {
	uint64_t base;
	uint64_t length;
	uint32_t status;
	uint32_t reserved3;
};
_Static_assert(__builtin_offsetof(struct cgpu_managed_call, base) == 0, "ManagedCall.Base");
_Static_assert(__builtin_offsetof(struct cgpu_managed_call, length) == 8, "ManagedCall.Length");
_Static_assert(__builtin_offsetof(struct cgpu_managed_call, status) == 16, "ManagedCall.Status");
_Static_assert(__builtin_offsetof(struct cgpu_managed_call, reserved3) == 20, "ManagedCall._");
_Static_assert(sizeof(struct cgpu_managed_call) == 24, "ManagedCall");

/* Of the driver interface: pkg/rm says where each comes from. */
#define RM_NR_FREE 0x29u
#define RM_NR_CONTROL 0x2au
#define RM_NR_ALLOC 0x2bu
#define RM_NR_DUP 0x34u
#define RM_NR_HEAP 0x4au
#define RM_NR_ALLOC_MEMORY 0x27u
#define RM_FREE_ROOT 0x0u
#define RM_FREE_OBJECT 0x8u
#define RM_FREE_STATUS 0xcu
#define RM_ALLOC_ROOT 0x0u
#define RM_ALLOC_PARENT 0x4u
#define RM_ALLOC_OBJECT 0x8u
#define RM_ALLOC_CLASS 0xcu
#define RM_ALLOC_PARAMS 0x10u
#define RM_CONTROL_CLIENT 0x0u
#define RM_CONTROL_OBJECT 0x4u
#define RM_CONTROL_CMD 0x8u
#define RM_CONTROL_PARAMS 0x10u
#define RM_CONTROL_PARAMS_SIZE 0x18u
#define RM_CONTROL_STATUS 0x1cu
#define RM_CONTROL_SIZE 0x20u
#define RM_DUP_CLIENT 0x0u
#define RM_DUP_PARENT 0x4u
#define RM_DUP_OBJECT 0x8u
#define RM_DUP_CLIENT_SRC 0xcu
#define RM_DUP_OBJECT_SRC 0x10u
#define RM_DUP_STATUS 0x18u
#define RM_MEMORY_ATTR 0x18u
#define RM_MEMORY_SIZE 0x40u
#define RM_MEMORY_ATTR_PAGE_SHIFT 0x17u
#define RM_MEMORY_ATTR_PAGE_MASK 0x3u
#define RM_DEVICE_ID 0x0u
#define RM_TSG_ENGINE_TYPE 0xcu
#define RM_FREE_SIZE 0x10u
#define RM_DUP_SIZE 0x1cu
#define RM_HEAP_SIZE 0xb8u
#define RM_HEAP_ROOT 0x0u
#define RM_HEAP_PARENT 0x4u
#define RM_HEAP_FUNCTION 0x8u
#define RM_HEAP_STATUS 0x14u
#define RM_HEAP_TOTAL 0x18u
#define RM_HEAP_FREE 0x20u
#define RM_HEAP_FN_ALLOC_SIZE 0x2u
#define RM_HEAP_FN_FREE 0x3u
#define RM_HEAP_FN_INFO 0x5u
#define RM_HEAP_FN_ALLOC_TILED 0x6u
#define RM_HEAP_FN_ALLOC_SIZE_RANGE 0xeu
#define RM_HEAP_ALLOC_MEMORY 0x2cu
#define RM_HEAP_ALLOC_FLAGS 0x34u
#define RM_HEAP_ALLOC_ATTR 0x38u
#define RM_HEAP_ALLOC_SIZE 0x58u
#define RM_HEAP_TILED_HEIGHT 0x38u
#define RM_HEAP_TILED_PITCH 0x3cu
#define RM_HEAP_TILED_ATTR 0x40u
#define RM_HEAP_ALLOC_RANGE_SIZE 0x50u
#define RM_HEAP_FREE_MEMORY 0x2cu
#define RM_HEAP_INFO_SIZE 0x38u
#define RM_MEMORY_FLAG_VIRTUAL 0x80000u
#define RM_MEMORY_ATTR_LOCATION_SHIFT 0x19u
#define RM_MEMORY_ATTR_LOCATION_MASK 0x3u
#define RM_FB_INFO_COUNT 0x0u
#define RM_FB_INFO_LIST 0x4u
#define RM_FB_INFO_ENTRY 0x8u
#define RM_FB_INFO_V1_COUNT 0x0u
#define RM_FB_INFO_V1_LIST 0x8u
#define RM_FB_RAM_SIZE 0x7u
#define RM_FB_TOTAL_RAM_SIZE 0x8u
#define RM_FB_HEAP_SIZE 0x9u
#define RM_FB_MAPPABLE_HEAP_SIZE 0xau
#define RM_FB_TAX_SIZE 0x10u
#define RM_FB_LARGEST_FREE_REGION 0x12u
#define RM_FB_HEAP_FREE 0x16u
#define RM_FB_USABLE_RAM_SIZE 0x20u
#define RM_FB_PROTECTED_TOTAL 0x33u
#define RM_FB_PROTECTED_FREE 0x34u
#define RM_UVM_INITIALIZE 0x30000001u
#define RM_UVM_INITIALIZE_FLAGS 0x0u
#define RM_UVM_INIT_DISABLE_HMM 0x1u
#define RM_STATUS_OK 0x0u
#define RM_STATUS_NO_MEMORY 0x51u
#define RM_STATUS_NOT_SUPPORTED 0x56u

#endif
