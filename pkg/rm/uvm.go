// SPDX-License-Identifier: Apache-2.0

package rm

// UVMForm is the layout of the parameters of a UVM call that the guard executes or makes; -1 where the call has no such field.
// All are UVM_*_PARAMS of kernel-open/nvidia-uvm/uvm_ioctl.h.
type UVMForm struct {
	Size   int
	Base   int // u64, start of the range
	Length int // u64
	FD     int // i32, the caller's nvidiactl file
	Client int // u32
	Object int // u32, the handle that the call takes a reference on, or drops it
	Status int // u32
}

// UVM is the form of a UVM call (whole ioctl number).
func (a *ABI) UVM(cmd uint32) (UVMForm, bool) {
	switch cmd {
	case UVMInitialize:
		return UVMForm{UVMInitializeSize, -1, -1, -1, -1, -1, UVMInitializeStatus}, true
	case UVMCreateRangeGroup, UVMDestroyRangeGroup:
		return UVMForm{16, 0, -1, -1, -1, -1, 8}, true // what is at 0 is the group's number
	case UVMCreateExternal:
		return UVMForm{24, 0, 8, -1, -1, -1, 16}, true
	case UVMMapDynamicRegion:
		return UVMForm{40, 0, 8, -1, -1, -1, 32}, true
	case UVMAllocSemaphorePool:
		if a.layout() < 550_040_53 { // as UVMMapExternal
			return UVMForm{1184, 0, 8, -1, -1, -1, 1176}, true
		}
		return UVMForm{9248, 0, 8, -1, -1, -1, 9240}, true
	case UVMCleanUpZombies:
		return UVMForm{4, -1, -1, -1, -1, -1, 0}, true
	case UVMMapExternal:
		if a.layout() < 550_040_53 { // inside of the branch: 550.40.07 has the short one
			return UVMForm{1200, 0, 8, 1184, 1188, 1192, 1196}, true
		}
		return UVMForm{9264, 0, 8, 9248, 9252, 9256, 9260}, true
	case UVMFree:
		if a.branch < 590 {
			return UVMForm{24, 0, 8, -1, -1, -1, 16}, true
		}
		return UVMForm{16, 0, -1, -1, -1, -1, 8}, true
	case UVMUnmapExternal:
		return UVMForm{40, 0, 8, -1, -1, -1, 32}, true
	case UVMMapSparse:
		return UVMForm{40, 0, 8, -1, -1, -1, 32}, true
	case UVMAllocDeviceP2P:
		return UVMForm{56, 0, 8, 40, 44, 48, 52}, a.branch >= 565
	case UVMRegisterGPU:
		return UVMForm{40, -1, -1, 24, 28, -1, 36}, true
	case UVMRegisterGPUVASpace:
		return UVMForm{32, -1, -1, 16, 20, 24, 28}, true
	case UVMUnregisterVASpace, UVMUnregisterGPU:
		return UVMForm{20, -1, -1, -1, -1, -1, 16}, true
	case UVMRegisterChannel:
		return UVMForm{56, 32, 40, 16, 20, 24, 48}, true
	case UVMUnregisterChannel:
		if a.branch < 590 {
			return UVMForm{28, -1, -1, -1, 16, 20, 24}, true
		}
		return UVMForm{12, -1, -1, -1, 0, 4, 8}, true
	case UVMValidateVARange:
		return UVMForm{24, 0, 8, -1, -1, -1, 16}, true
	}
	return UVMForm{}, false
}
