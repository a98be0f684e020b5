// SPDX-License-Identifier: Apache-2.0

//go:build !libc

package probe

import (
	"syscall"
	"unsafe"
)

// Built without the tag libc the program is static and makes its own system calls: a preload library sees none of them.
var byProgram = bySyscall

func ioctl(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno { return rawIoctl(fd, cmd, arg) }
