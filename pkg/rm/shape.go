// SPDX-License-Identifier: Apache-2.0

package rm

// RMShaped reports whether any known driver dispatches this ioctl number to one of TrappedNRs. It looks at the number
// and the size field only, like the driver; type and direction bits mean nothing to it. All of that sits in a register,
// so the answer cannot change under the guard. False means that the driver refuses the call whatever the memory
// holds, so it may run natively; when in doubt the answer is true.
//
// Sources, every branch from 515 to 595: nvidia_ioctl in kernel-open/nvidia/nv.c (0xc8, 0xd3, 0xd4, 0xd5, 0xd9),
// rm_ioctl in src/nvidia/arch/nvalloc/unix/src/osapi.c (0xce, 0xcf) and RmIoctl in …/escape.c (the others, each of which compares the size
// exactly).
func RMShaped(cmd uint32) bool {
	size := int(cmd>>16) & 0x3fff
	switch cmd & 0xff {
	case EscAllocMemory:
		return size == 56
	case EscAllocObject:
		return size == 20
	case EscFree:
		return size == 16
	case EscControl:
		return size == 32
	case EscAlloc:
		return size == 32 || size == 40 || size == 48
	case EscDupObject:
		return size == 28
	case EscShare:
		return size == 24
	case EscI2CAccess:
		return size == 32
	case EscIdleChannels:
		return size == 56
	case EscVidHeapControl:
		return size == 184
	case EscAccessRegistry:
		return size == 72
	case EscMapMemory:
		return size == MapMemorySize
	case EscUnmapMemory:
		return size == UnmapMemorySize
	case EscContextDMA:
		return size == 56
	case EscMapDMA:
		return size == 56 || size == 64
	case EscUnmapDMA:
		return size == 40 || size == 48
	case EscBindContextDMA, EscAllocOSEvent, EscFreeOSEvent:
		return size == 16
	case EscUpdateMapping:
		return size == UpdateMappingSize
	case EscCardInfo:
		return size >= CardInfoSize // before 595 also sizes that are no multiple of it
	case EscRegisterFD:
		return size == 4
	case EscStatusCode:
		return size == 12
	case EscCheckVersion:
		return size == CheckVersionSize
	case EscXferCmd:
		return size == XferSize
	case EscAttachGPUs:
		return size != 0 && size%4 == 0
	case EscQueryIntr:
		return size >= 8 // before 595 also larger ones
	case EscExportDMABuf:
		return size == 2600 || size == 2608
	}
	return false
}

// RMShaped is the function of the same name for one driver. If the driver's branch is unknown its sizes are too: then
// every trapped number with any size counts.
func (a *ABI) RMShaped(cmd uint32) bool {
	if !a.guessed {
		return RMShaped(cmd)
	}
	if cmd>>16&0x3fff == 0 || !Trapped(cmd) {
		return false
	}
	return !uvmAlone(cmd & 0xff)
}

// Trapped reports whether the container's seccomp filter hands this ioctl number to the guard.
func Trapped(cmd uint32) bool {
	for _, nr := range TrappedNRs {
		if uint32(nr) == cmd&TrapMask(nr) {
			return true
		}
	}
	return false
}

// StatusOff is the offset of the NV_STATUS word in the outer structure of an escape, for answers made up by the guard.
// It is false for escapes without one (such a call can only fail with an errno) and for a size that the driver refuses.
func (a *ABI) StatusOff(nr uint32, size int) (int, bool) {
	switch nr {
	case EscAlloc:
		f, ok := a.AllocForm(size)
		return f.StatusOff, ok
	case EscExportDMABuf:
		switch size {
		case 2600:
			return 2592, true
		case 2608:
			return 2600, true
		}
		return 0, false
	}
	for _, s := range statusOffs {
		if s.nr == nr && s.size == size {
			return s.off, true
		}
	}
	return 0, false
}

var statusOffs = [...]struct {
	nr        uint32
	size, off int
}{
	{EscAllocMemory, 56, 40},
	{EscAllocObject, 20, 16},
	{EscFree, 16, 12},
	{EscControl, 32, 28},
	{EscDupObject, 28, 24},
	{EscShare, 24, 20},
	{EscI2CAccess, 32, 24},
	{EscIdleChannels, 56, 48},
	{EscVidHeapControl, 184, 20},
	{EscAccessRegistry, 72, 64},
	{EscMapMemory, MapMemorySize, MapMemoryStatus},
	{EscUnmapMemory, UnmapMemorySize, UnmapMemoryStatus},
	{EscUpdateMapping, UpdateMappingSize, UpdateMappingStatus},
	{EscContextDMA, 56, 48},
	{EscMapDMA, 56, 48},
	{EscMapDMA, 64, 56},
	{EscUnmapDMA, 40, 32},
	{EscUnmapDMA, 48, 40},
	{EscBindContextDMA, 16, 12},
	{EscAllocOSEvent, 16, 12},
	{EscFreeOSEvent, 16, 12},
	{EscStatusCode, 12, 8},
	{EscQueryIntr, 8, 4},
}
