// SPDX-License-Identifier: Apache-2.0

package rm

import "fmt"

// ClassName names a class for logs.
func ClassName(id uint32) string {
	if r := findClass(id); r != nil {
		return r.name
	}
	return fmt.Sprintf("class %#x", id)
}

// ControlName names a control for logs.
func ControlName(id uint32) string {
	if i, ok := findControl(id); ok {
		return controls[i].name
	}
	return fmt.Sprintf("control %#x", id)
}

// EscapeName names an escape for logs.
func EscapeName(nr uint32) string {
	for i := range escapeNames {
		if escapeNames[i].nr == nr {
			return escapeNames[i].name
		}
	}
	return fmt.Sprintf("escape %#x", nr)
}

var escapeNames = [...]struct {
	nr   uint32
	name string
}{
	{EscAllocMemory, "NV_ESC_RM_ALLOC_MEMORY"},
	{EscAllocObject, "NV_ESC_RM_ALLOC_OBJECT"},
	{EscFree, "NV_ESC_RM_FREE"},
	{EscControl, "NV_ESC_RM_CONTROL"},
	{EscAlloc, "NV_ESC_RM_ALLOC"},
	{EscDupObject, "NV_ESC_RM_DUP_OBJECT"},
	{EscShare, "NV_ESC_RM_SHARE"},
	{EscI2CAccess, "NV_ESC_RM_I2C_ACCESS"},
	{EscIdleChannels, "NV_ESC_RM_IDLE_CHANNELS"},
	{EscVidHeapControl, "NV_ESC_RM_VID_HEAP_CONTROL"},
	{EscAccessRegistry, "NV_ESC_RM_ACCESS_REGISTRY"},
	{EscMapMemory, "NV_ESC_RM_MAP_MEMORY"},
	{EscUnmapMemory, "NV_ESC_RM_UNMAP_MEMORY"},
	{EscContextDMA, "NV_ESC_RM_ALLOC_CONTEXT_DMA2"},
	{EscMapDMA, "NV_ESC_RM_MAP_MEMORY_DMA"},
	{EscUnmapDMA, "NV_ESC_RM_UNMAP_MEMORY_DMA"},
	{EscBindContextDMA, "NV_ESC_RM_BIND_CONTEXT_DMA"},
	{EscUpdateMapping, "NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO"},
	{EscCardInfo, "NV_ESC_CARD_INFO"},
	{EscRegisterFD, "NV_ESC_REGISTER_FD"},
	{EscAllocOSEvent, "NV_ESC_ALLOC_OS_EVENT"},
	{EscFreeOSEvent, "NV_ESC_FREE_OS_EVENT"},
	{EscStatusCode, "NV_ESC_STATUS_CODE"},
	{EscCheckVersion, "NV_ESC_CHECK_VERSION_STR"},
	{EscXferCmd, "NV_ESC_IOCTL_XFER_CMD"},
	{EscAttachGPUs, "NV_ESC_ATTACH_GPUS_TO_FD"},
	{EscQueryIntr, "NV_ESC_QUERY_DEVICE_INTR"},
	{EscExportDMABuf, "NV_ESC_EXPORT_TO_DMABUF_FD"},
}
