// SPDX-License-Identifier: Apache-2.0

// Package parity compares the tables of pkg/rm with gVisor's nvproxy, which keeps the same structures as Go types. It is a
// module of its own so that cgpu does not depend on gVisor: run `go test` in this folder after a change to the tables.
package parity

import (
	"testing"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/rm"
	"gvisor.dev/gvisor/pkg/abi/nvgpu"
)

// The drivers that gVisor knows, one per branch.
var drivers = []string{"535.104.05", "535.288.01", "545.23.06", "550.163.01", "555.42.02", "560.35.03", "565.57.01", "570.195.03",
	"575.57.08", "580.159.04", "590.48.01", "595.45.04"}

// sized is a structure that holds from a branch on.
type sized struct {
	from string
	size uintptr
}

func want(t *testing.T, list []sized, driver string) int {
	t.Helper()
	v, err := rm.ParseVersion(driver)
	if err != nil {
		t.Fatal(err)
	}
	size := 0
	for _, s := range list {
		from := rm.Version{}
		if s.from != "" {
			if from, err = rm.ParseVersion(s.from); err != nil {
				t.Fatal(err)
			}
		}
		if v.Compare(from) >= 0 {
			size = int(s.size)
		}
	}
	return size
}

var (
	memory = []sized{{"", unsafe.Sizeof(nvgpu.NV_MEMORY_ALLOCATION_PARAMS{})},
		{"545.0", unsafe.Sizeof(nvgpu.NV_MEMORY_ALLOCATION_PARAMS_V545{})}}
	channel = []sized{{"", unsafe.Sizeof(nvgpu.NV_CHANNEL_ALLOC_PARAMS{})}, {"570.0", unsafe.Sizeof(nvgpu.NV_CHANNEL_ALLOC_PARAMS_V570{})}}
	// Classes that are younger than a change of their structure.
	channel570 = channel[1:]
	gr         = []sized{{"", unsafe.Sizeof(nvgpu.NV_GR_ALLOCATION_PARAMETERS{})}}
	bsp        = []sized{{"", unsafe.Sizeof(nvgpu.NV_BSP_ALLOCATION_PARAMETERS{})}}
	msenc      = []sized{{"", unsafe.Sizeof(nvgpu.NV_MSENC_ALLOCATION_PARAMETERS{})}}
	nvjpg      = []sized{{"", unsafe.Sizeof(nvgpu.NV_NVJPG_ALLOCATION_PARAMETERS{})}}
	ofa        = []sized{{"", unsafe.Sizeof(nvgpu.NV_OFA_ALLOCATION_PARAMETERS{})},
		{"545.0", unsafe.Sizeof(nvgpu.NV_OFA_ALLOCATION_PARAMETERS_V545{})}}
	copying = []sized{{"", unsafe.Sizeof(nvgpu.NVB0B5_ALLOCATION_PARAMETERS{})}}
	user    = []sized{{"", unsafe.Sizeof(nvgpu.NV_HOPPER_USERMODE_A_PARAMS{})}}
	handle  = []sized{{"", unsafe.Sizeof(nvgpu.Handle{})}}
)

func TestClasses(t *testing.T) {
	for id, list := range map[nvgpu.ClassID][]sized{
		nvgpu.NV01_ROOT: handle, nvgpu.NV01_ROOT_NON_PRIV: handle, nvgpu.NV01_ROOT_CLIENT: handle,
		nvgpu.NV01_CONTEXT_DMA:   {{"", unsafe.Sizeof(nvgpu.NV_CONTEXT_DMA_ALLOCATION_PARAMS{})}},
		nvgpu.NV01_MEMORY_SYSTEM: memory, nvgpu.NV01_MEMORY_LOCAL_USER: memory, nvgpu.NV50_MEMORY_VIRTUAL: memory,
		nvgpu.NV01_EVENT_OS_EVENT:  {{"", unsafe.Sizeof(nvgpu.NV0005_ALLOC_PARAMETERS{})}},
		nvgpu.NV01_MEMORY_VIRTUAL:  {{"", unsafe.Sizeof(nvgpu.NV_MEMORY_VIRTUAL_ALLOCATION_PARAMS{})}},
		nvgpu.NV01_DEVICE_0:        {{"", unsafe.Sizeof(nvgpu.NV0080_ALLOC_PARAMETERS{})}},
		nvgpu.NV_SEMAPHORE_SURFACE: {{"", unsafe.Sizeof(nvgpu.NV_SEMAPHORE_SURFACE_ALLOC_PARAMETERS{})}},
		nvgpu.RM_USER_SHARED_DATA: {{"", unsafe.Sizeof(nvgpu.NV00DE_ALLOC_PARAMETERS{})},
			{"545.0", unsafe.Sizeof(nvgpu.NV00DE_ALLOC_PARAMETERS_V545{})}},
		nvgpu.NV_MEMORY_FABRIC: {{"", unsafe.Sizeof(nvgpu.NV00F8_ALLOCATION_PARAMETERS{})}},
		nvgpu.NV_MEMORY_MULTICAST_FABRIC: {{"", unsafe.Sizeof(nvgpu.NV00FD_ALLOCATION_PARAMETERS{})},
			{"545.0", unsafe.Sizeof(nvgpu.NV00FD_ALLOCATION_PARAMETERS_V545{})},
			{"590.0", unsafe.Sizeof(nvgpu.NV00FD_ALLOCATION_PARAMETERS_V590{})}},
		nvgpu.NV20_SUBDEVICE_0: {{"", unsafe.Sizeof(nvgpu.NV2080_ALLOC_PARAMETERS{})}},
		nvgpu.NV2081_BINAPI:    {{"", unsafe.Sizeof(nvgpu.NV2081_ALLOC_PARAMETERS{})}},
		nvgpu.NV50_P2P: {{"", unsafe.Sizeof(nvgpu.NV503B_ALLOC_PARAMETERS{})},
			{"590.0", unsafe.Sizeof(nvgpu.NV503B_ALLOC_PARAMETERS_V590{})}},
		nvgpu.NV50_THIRD_PARTY_P2P: {{"", unsafe.Sizeof(nvgpu.NV503C_ALLOC_PARAMETERS{})}},
		nvgpu.GT200_DEBUGGER:       {{"", unsafe.Sizeof(nvgpu.NV83DE_ALLOC_PARAMETERS{})}},
		nvgpu.FERMI_TWOD_A:         gr, nvgpu.KEPLER_INLINE_TO_MEMORY_B: gr,
		nvgpu.FERMI_CONTEXT_SHARE_A: {{"", unsafe.Sizeof(nvgpu.NV_CTXSHARE_ALLOCATION_PARAMETERS{})}},
		nvgpu.GF100_DISP_SW:         {{"", unsafe.Sizeof(nvgpu.NV9072_ALLOCATION_PARAMETERS{})}},
		nvgpu.FERMI_VASPACE_A: {{"", unsafe.Sizeof(nvgpu.NV_VASPACE_ALLOCATION_PARAMETERS{})},
			{"580.0", unsafe.Sizeof(nvgpu.NV_VASPACE_ALLOCATION_PARAMETERS_V580{})}},
		nvgpu.KEPLER_CHANNEL_GROUP_A:  {{"", unsafe.Sizeof(nvgpu.NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS{})}},
		nvgpu.TURING_CHANNEL_GPFIFO_A: channel, nvgpu.AMPERE_CHANNEL_GPFIFO_A: channel, nvgpu.HOPPER_CHANNEL_GPFIFO_A: channel,
		nvgpu.BLACKWELL_CHANNEL_GPFIFO_A: channel, nvgpu.BLACKWELL_CHANNEL_GPFIFO_B: channel570,
		nvgpu.NVC4B0_VIDEO_DECODER: bsp, nvgpu.NVCFB0_VIDEO_DECODER: bsp, nvgpu.NVC4B7_VIDEO_ENCODER: msenc, nvgpu.NVCFB7_VIDEO_ENCODER: msenc,
		nvgpu.NVC4D1_VIDEO_NVJPG: nvjpg, nvgpu.NVCFD1_VIDEO_NVJPG: nvjpg, nvgpu.NVC6FA_VIDEO_OFA: ofa, nvgpu.NVC9FA_VIDEO_OFA: ofa,
		nvgpu.TURING_A: gr, nvgpu.AMPERE_A: gr, nvgpu.ADA_A: gr, nvgpu.HOPPER_A: gr, nvgpu.BLACKWELL_A: gr, nvgpu.BLACKWELL_B: gr,
		nvgpu.TURING_COMPUTE_A: gr, nvgpu.AMPERE_COMPUTE_A: gr, nvgpu.AMPERE_COMPUTE_B: gr, nvgpu.ADA_COMPUTE_A: gr, nvgpu.HOPPER_COMPUTE_A: gr,
		nvgpu.BLACKWELL_COMPUTE_A: gr, nvgpu.BLACKWELL_COMPUTE_B: gr,
		nvgpu.TURING_DMA_COPY_A: copying, nvgpu.AMPERE_DMA_COPY_A: copying, nvgpu.AMPERE_DMA_COPY_B: copying, nvgpu.HOPPER_DMA_COPY_A: copying,
		nvgpu.BLACKWELL_DMA_COPY_A: copying, nvgpu.BLACKWELL_DMA_COPY_B: copying,
		nvgpu.HOPPER_USERMODE_A: user, nvgpu.BLACKWELL_USERMODE_A: user,
		nvgpu.NV_CONFIDENTIAL_COMPUTE: {{"", unsafe.Sizeof(nvgpu.NV_CONFIDENTIAL_COMPUTE_ALLOC_PARAMS{})}},
		nvgpu.NVENC_SW_SESSION:        {{"", unsafe.Sizeof(nvgpu.NVA0BC_ALLOC_PARAMETERS{})}},
		nvgpu.GF100_SUBDEVICE_MASTER:  nil, nvgpu.TURING_USERMODE_A: nil, nvgpu.VOLTA_USERMODE_A: nil, nvgpu.NV20_SUBDEVICE_DIAG: nil,
		nvgpu.NV04_DISPLAY_COMMON: nil, nvgpu.MPS_COMPUTE: nil, nvgpu.HOPPER_SEC2_WORK_LAUNCH_A: nil, nvgpu.GF100_ZBC_CLEAR: nil,
	} {
		for _, d := range drivers {
			a, err := rm.ForDriver(d, false)
			if err != nil {
				t.Fatal(err)
			}
			c, ok := a.Class(uint32(id))
			if !ok || c.Kind == rm.ClassDeny {
				t.Errorf("%s: class %#x is not allowed", d, uint32(id))
			} else if w := want(t, list, d); c.ParamsSize != w && (w != 0 || len(list) == 0) {
				t.Errorf("%s: %s: %d bytes, gVisor has %d", d, c.Name, c.ParamsSize, w)
			}
		}
	}
}

func TestControls(t *testing.T) {
	list := []sized{{"", unsafe.Sizeof(nvgpu.NvxxxCtrlXxxGetInfoParams{})}}
	caps := []sized{{"", unsafe.Sizeof(nvgpu.NV0080_CTRL_GET_CAPS_PARAMS{})}}
	for id, list := range map[uint32][]sized{
		nvgpu.NV0000_CTRL_CMD_GPU_GET_ID_INFO:          {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_GPU_GET_ID_INFO_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_GPU_ATTACH_IDS:           {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_GPU_ATTACH_IDS_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID: {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS: {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_SYSTEM_GET_P2P_CAPS_PARAMS{})},
			{"550.0", unsafe.Sizeof(nvgpu.NV0000_CTRL_SYSTEM_GET_P2P_CAPS_PARAMS_V550{})}},
		nvgpu.NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION: {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_SYSTEM_GET_BUILD_VERSION_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO: {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS{})},
			{"545.0", unsafe.Sizeof(nvgpu.NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS_V545{})}},
		nvgpu.NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD:    {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD:  {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD:   {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_PARAMS{})}},
		nvgpu.NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD: {{"", unsafe.Sizeof(nvgpu.NV0000_CTRL_OS_UNIX_IMPORT_OBJECTS_FROM_FD_PARAMS{})}},
		nvgpu.NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST:           {{"", unsafe.Sizeof(nvgpu.NV0080_CTRL_FIFO_GET_CHANNELLIST_PARAMS{})}},
		nvgpu.NV00FD_CTRL_CMD_ATTACH_GPU:                     {{"", unsafe.Sizeof(nvgpu.NV00FD_CTRL_ATTACH_GPU_PARAMS{})}},
		nvgpu.NV2080_CTRL_CMD_GR_GET_INFO:                    {{"", unsafe.Sizeof(nvgpu.NV2080_CTRL_GR_GET_INFO_PARAMS{})}},
		nvgpu.NV83DE_CTRL_CMD_DEBUG_READ_MEMORY:              {{"", unsafe.Sizeof(nvgpu.NV83DE_CTRL_DEBUG_READ_MEMORY_PARAMS{})}},
		nvgpu.NV0041_CTRL_CMD_GET_SURFACE_INFO:               list, nvgpu.NV2080_CTRL_CMD_BIOS_GET_INFO: list,
		nvgpu.NV2080_CTRL_CMD_FB_GET_INFO:  list,
		nvgpu.NV2080_CTRL_CMD_BUS_GET_INFO: list, nvgpu.NV0080_CTRL_CMD_GR_GET_INFO: list, nvgpu.NV0080_CTRL_CMD_GR_GET_CAPS: caps,
		nvgpu.NV0080_CTRL_CMD_FB_GET_CAPS: caps, nvgpu.NV0080_CTRL_CMD_FIFO_GET_CAPS: caps, nvgpu.NV0080_CTRL_CMD_MSENC_GET_CAPS: caps,
	} {
		for _, d := range drivers {
			a, err := rm.ForDriver(d, false)
			if err != nil {
				t.Fatal(err)
			}
			c, ok := a.Control(id)
			if !ok || c.Kind == rm.ControlDeny {
				t.Errorf("%s: control %#x is not allowed", d, id)
			} else if w := want(t, list, d); c.Size != w {
				t.Errorf("%s: %s: %d bytes, gVisor has %d", d, c.Name, c.Size, w)
			}
			// gVisor gives these a handler of their own because something in them has to be translated. So must we.
			if len(c.Pointers) == 0 && c.FDOff < 0 && len(c.Clear) == 0 && c.Kind == rm.ControlFlat {
				t.Errorf("%s: %s looks flat", d, c.Name)
			}
		}
	}
}

func TestOuterStructures(t *testing.T) {
	for _, s := range []struct {
		name       string
		nr         uint32
		size, stat uintptr
	}{
		{"NVOS00", rm.EscFree, unsafe.Sizeof(nvgpu.NVOS00_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS00_PARAMETERS{}.Status)},
		{"NVOS21", rm.EscAlloc, unsafe.Sizeof(nvgpu.NVOS21_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS21_PARAMETERS{}.Status)},
		{"NVOS64", rm.EscAlloc, unsafe.Sizeof(nvgpu.NVOS64_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS64_PARAMETERS{}.Status)},
		{"NVOS54", rm.EscControl, unsafe.Sizeof(nvgpu.NVOS54_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS54_PARAMETERS{}.Status)},
		{"NVOS55", rm.EscDupObject, unsafe.Sizeof(nvgpu.NVOS55_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS55_PARAMETERS{}.Status)},
		{"NVOS57", rm.EscShare, unsafe.Sizeof(nvgpu.NVOS57_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS57_PARAMETERS{}.Status)},
		{"NVOS30", rm.EscIdleChannels, unsafe.Sizeof(nvgpu.NVOS30_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS30_PARAMETERS{}.Status)},
		{"NVOS32", rm.EscVidHeapControl, unsafe.Sizeof(nvgpu.NVOS32_PARAMETERS{}), unsafe.Offsetof(nvgpu.NVOS32_PARAMETERS{}.Status)},
		{"NVOS02", rm.EscAllocMemory, unsafe.Sizeof(nvgpu.IoctlNVOS02ParametersWithFD{}), unsafe.Offsetof(nvgpu.NVOS02_PARAMETERS{}.Status)},
		{"dmabuf", rm.EscExportDMABuf, unsafe.Sizeof(nvgpu.IoctlExportToDMABufFD{}), unsafe.Offsetof(nvgpu.IoctlExportToDMABufFD{}.Status)},
		{"dmabuf 570", rm.EscExportDMABuf, unsafe.Sizeof(nvgpu.IoctlExportToDMABufFD_V570{}),
			unsafe.Offsetof(nvgpu.IoctlExportToDMABufFD_V570{}.Status)},
	} {
		if !rm.RMShaped(uint32(s.size)<<16 | s.nr) {
			t.Errorf("%s: %d bytes are not RM-shaped", s.name, s.size)
		}
		for _, d := range drivers {
			a, err := rm.ForDriver(d, false)
			if err != nil {
				t.Fatal(err)
			}
			if off, ok := a.StatusOff(s.nr, int(s.size)); !ok || off != int(s.stat) {
				t.Errorf("%s: %s: status at %d, %v; gVisor has %d", d, s.name, off, ok, s.stat)
			}
		}
	}
}

func TestUVM(t *testing.T) {
	for cmd, list := range map[uint32][]sized{
		rm.UVMMapExternal: {{"", unsafe.Sizeof(nvgpu.UVM_MAP_EXTERNAL_ALLOCATION_PARAMS{})},
			{"550.0", unsafe.Sizeof(nvgpu.UVM_MAP_EXTERNAL_ALLOCATION_PARAMS_V550{})}},
		rm.UVMFree:               {{"", unsafe.Sizeof(nvgpu.UVM_FREE_PARAMS{})}, {"590.0", unsafe.Sizeof(nvgpu.UVM_FREE_PARAMS_V590{})}},
		rm.UVMUnmapExternal:      {{"", unsafe.Sizeof(nvgpu.UVM_UNMAP_EXTERNAL_PARAMS{})}},
		rm.UVMRegisterGPU:        {{"", unsafe.Sizeof(nvgpu.UVM_REGISTER_GPU_PARAMS{})}},
		rm.UVMRegisterGPUVASpace: {{"", unsafe.Sizeof(nvgpu.UVM_REGISTER_GPU_VASPACE_PARAMS{})}},
		rm.UVMRegisterChannel:    {{"", unsafe.Sizeof(nvgpu.UVM_REGISTER_CHANNEL_PARAMS{})}},
		rm.UVMValidateVARange:    {{"", unsafe.Sizeof(nvgpu.UVM_VALIDATE_VA_RANGE_PARAMS{})}},
	} {
		for _, d := range drivers {
			a, err := rm.ForDriver(d, false)
			if err != nil {
				t.Fatal(err)
			}
			f, ok := a.UVM(cmd)
			if w := want(t, list, d); !ok || f.Size != w {
				t.Errorf("%s: UVM %d: %d bytes, %v; gVisor has %d", d, cmd, f.Size, ok, w)
			}
		}
	}
}
