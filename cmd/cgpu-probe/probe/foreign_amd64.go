// SPDX-License-Identifier: Apache-2.0

//go:build !libc

package probe

import (
	"syscall"
	"unsafe"
)

func int80(nr, a, b, c uintptr) uintptr

// foreignCalls are ways into the kernel of another ABI; the driver's compat_ioctl is the same function.
func foreignCalls() map[string]caller {
	return map[string]caller{
		// arg must lie below 4 GiB.
		"int80": func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
			const ioctl386 = 54
			if uintptr(arg)>>32 != 0 {
				return syscall.EFAULT
			}
			r := int32(int80(ioctl386, uintptr(fd), cmd, uintptr(arg)))
			if r < 0 {
				return syscall.Errno(-r)
			}
			return 0
		},
		"x32": func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
			const x32, ioctlX32 = 0x40000000, 514
			_, _, errno := syscall.Syscall(x32|ioctlX32, uintptr(fd), cmd, uintptr(arg))
			return errno
		},
	}
}
