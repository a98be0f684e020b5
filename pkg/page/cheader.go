// SPDX-License-Identifier: Apache-2.0

package page

import (
	"fmt"
	"reflect"
	"strings"
	"unicode"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// CHeader is limiter/page.h: the structures of this package in C, and the numbers of package rm that the limiter uses.
func CHeader() []byte {
	var b strings.Builder
	b.WriteString("/* Generated from pkg/page and pkg/rm by `go generate ./pkg/page`. Do not edit. */\n#ifndef CGPU_PAGE_H\n#define " +
		"CGPU_PAGE_H\n\n#include <stdint.h>\n\n")
	define := func(name string, value any) { fmt.Fprintf(&b, "#define %s %v\n", name, value) }
	define("CGPU_PAGE_MAGIC", hex(Magic))
	define("CGPU_PAGE_VERSION", Version)
	fmt.Fprintf(&b, "#ifndef CGPU_PAGE_PATH\n#define CGPU_PAGE_PATH %q\n#endif\n", Path)
	define("CGPU_MAX_VGPUS", MaxVGPUs)
	define("CGPU_MAX_PROCESSES", MaxProcesses)
	define("CGPU_FLAG_GUARD", hex(FlagGuard))
	define("CGPU_FLAG_PRELOAD", hex(FlagPreload))
	define("CGPU_FLAG_MANAGED_LIMIT", hex(FlagManagedLimit))
	define("CGPU_FLAG_MANAGED_DENY", hex(FlagManagedDeny))
	define("CGPU_FLAG_NO_HMM", hex(FlagNoHMM))
	define("CGPU_VGPU_NATIVE", hex(VGPUNative))
	define("CGPU_RESERVE_MANAGED", hex(ReserveManaged))
	define("CGPU_RELEASE_MANAGED", hex(ReleaseManaged))
	b.WriteString("\n")
	for _, s := range []any{Header{}, VGPU{}, Slot{}, ManagedCall{}} {
		structure(&b, reflect.TypeOf(s))
	}
	b.WriteString("/* Of the driver interface: pkg/rm says where each comes from. */\n")
	for _, c := range []struct {
		name  string
		value uint64
	}{
		{"NR_FREE", rm.EscFree}, {"NR_CONTROL", rm.EscControl}, {"NR_ALLOC", rm.EscAlloc}, {"NR_DUP", rm.EscDupObject},
		{"NR_HEAP", rm.EscVidHeapControl}, {"NR_ALLOC_MEMORY", rm.EscAllocMemory},
		{"FREE_ROOT", rm.FreeRoot}, {"FREE_OBJECT", rm.FreeObject}, {"FREE_STATUS", rm.FreeStatus},
		{"ALLOC_ROOT", rm.AllocRoot}, {"ALLOC_PARENT", rm.AllocParent}, {"ALLOC_OBJECT", rm.AllocObject}, {"ALLOC_CLASS", rm.AllocClass},
		{"ALLOC_PARAMS", rm.AllocParams},
		{"CONTROL_CLIENT", rm.ControlClient}, {"CONTROL_OBJECT", rm.ControlObject}, {"CONTROL_CMD", rm.ControlCmd},
		{"CONTROL_PARAMS", rm.ControlParams}, {"CONTROL_PARAMS_SIZE", rm.ControlParamsSize}, {"CONTROL_STATUS", rm.ControlStatus},
		{"CONTROL_SIZE", rm.ControlSize},
		{"DUP_CLIENT", rm.DupClient}, {"DUP_PARENT", rm.DupParent}, {"DUP_OBJECT", rm.DupObject}, {"DUP_CLIENT_SRC", rm.DupClientSrc},
		{"DUP_OBJECT_SRC", rm.DupObjectSrc}, {"DUP_STATUS", rm.DupStatus},
		{"MEMORY_ATTR", rm.MemoryAttr}, {"MEMORY_SIZE", rm.MemorySize}, {"MEMORY_ATTR_PAGE_SHIFT", rm.MemoryAttrPageShift},
		{"MEMORY_ATTR_PAGE_MASK", rm.MemoryAttrPageMask},
		{"DEVICE_ID", rm.DeviceID}, {"TSG_ENGINE_TYPE", rm.TSGEngineType}, {"FREE_SIZE", rm.FreeSize}, {"DUP_SIZE", rm.DupSize},
		{"HEAP_SIZE", rm.HeapSize}, {"HEAP_ROOT", rm.HeapRoot}, {"HEAP_PARENT", rm.HeapParent}, {"HEAP_FUNCTION", rm.HeapFunction},
		{"HEAP_STATUS", rm.HeapStatus},
		{"HEAP_TOTAL", rm.HeapTotal}, {"HEAP_FREE", rm.HeapFree}, {"HEAP_FN_ALLOC_SIZE", rm.HeapFnAllocSize}, {"HEAP_FN_FREE", rm.HeapFnFree},
		{"HEAP_FN_INFO", rm.HeapFnInfo},
		{"HEAP_FN_ALLOC_TILED", rm.HeapFnAllocTiled}, {"HEAP_FN_ALLOC_SIZE_RANGE", rm.HeapFnAllocSizeRange},
		{"HEAP_ALLOC_MEMORY", rm.HeapAllocMemory},
		{"HEAP_ALLOC_FLAGS", rm.HeapAllocFlags}, {"HEAP_ALLOC_ATTR", rm.HeapAllocAttr}, {"HEAP_ALLOC_SIZE", rm.HeapAllocSize},
		{"HEAP_TILED_HEIGHT", rm.HeapTiledHeight},
		{"HEAP_TILED_PITCH", rm.HeapTiledPitch}, {"HEAP_TILED_ATTR", rm.HeapTiledAttr}, {"HEAP_ALLOC_RANGE_SIZE", rm.HeapAllocRangeSize},
		{"HEAP_FREE_MEMORY", rm.HeapFreeMemory},
		{"HEAP_INFO_SIZE", rm.HeapInfoSize}, {"MEMORY_FLAG_VIRTUAL", rm.MemoryFlagVirtual},
		{"MEMORY_ATTR_LOCATION_SHIFT", rm.MemoryAttrLocationShift},
		{"MEMORY_ATTR_LOCATION_MASK", rm.MemoryAttrLocationMask},
		{"FB_INFO_COUNT", rm.FBInfoCount}, {"FB_INFO_LIST", rm.FBInfoList}, {"FB_INFO_ENTRY", rm.FBInfoEntry},
		{"FB_INFO_V1_COUNT", rm.FBInfoV1Count}, {"FB_INFO_V1_LIST", rm.FBInfoV1List},
		{"FB_RAM_SIZE", rm.FBIndexRAMSize}, {"FB_TOTAL_RAM_SIZE", rm.FBIndexTotalRAMSize}, {"FB_HEAP_SIZE", rm.FBIndexHeapSize},
		{"FB_MAPPABLE_HEAP_SIZE", rm.FBIndexMappableHeapSize}, {"FB_TAX_SIZE", rm.FBIndexTaxSize},
		{"FB_LARGEST_FREE_REGION", rm.FBIndexLargestFreeRegion}, {"FB_HEAP_FREE", rm.FBIndexHeapFree},
		{"FB_USABLE_RAM_SIZE", rm.FBIndexUsableRAMSize}, {"FB_PROTECTED_TOTAL", rm.FBIndexProtectedMemTotal},
		{"FB_PROTECTED_FREE", rm.FBIndexProtectedMemFree},
		{"UVM_INITIALIZE", rm.UVMInitialize}, {"UVM_INITIALIZE_FLAGS", rm.UVMInitializeFlags}, {"UVM_INIT_DISABLE_HMM", rm.UVMInitFlagDisableHMM},
		{"STATUS_OK", rm.StatusOK}, {"STATUS_NO_MEMORY", rm.StatusNoMemory}, {"STATUS_NOT_SUPPORTED", rm.StatusNotSupported},
	} {
		define("RM_"+c.name, hex(c.value))
	}
	b.WriteString("\n#endif\n")
	return []byte(b.String())
}

func hex[T ~int | ~uint32 | ~uint64](n T) string { return fmt.Sprintf("%#xu", n) }

// structure writes one structure in C, with an assertion for every offset.
func structure(b *strings.Builder, t reflect.Type) {
	name := "cgpu_" + snake(t.Name())
	fmt.Fprintf(b, "struct %s {\n", name)
	var asserts strings.Builder
	for i := range t.NumField() {
		f := t.Field(i)
		field := snake(f.Name)
		if f.Name == "_" {
			field = fmt.Sprintf("reserved%d", i)
		}
		kind, dim := f.Type, ""
		if kind.Kind() == reflect.Array {
			kind, dim = kind.Elem(), fmt.Sprintf("[%d]", kind.Len())
		}
		fmt.Fprintf(b, "\t%s_t %s%s;\n", kind.Kind(), field, dim)
		fmt.Fprintf(&asserts, "_Static_assert(__builtin_offsetof(struct %s, %s) == %d, \"%s.%s\");\n", name, field, f.Offset, t.Name(), f.Name)
	}
	fmt.Fprintf(b, "};\n%s_Static_assert(sizeof(struct %s) == %d, \"%s\");\n\n", asserts.String(), name, t.Size(), t.Name())
}

// snake turns a Go name into a C one: "UVMDevice" → "uvm_device", "VGPUs" → "vgpus", "GPUID" → "gpuid".
func snake(s string) string {
	var b strings.Builder
	for i, r := range s {
		if unicode.IsUpper(r) && i > 0 && (unicode.IsLower(rune(s[i-1])) || i+2 < len(s) && unicode.IsLower(rune(s[i+1])) &&
			unicode.IsLower(rune(s[i+2]))) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
