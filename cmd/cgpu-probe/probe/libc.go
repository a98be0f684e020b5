// SPDX-License-Identifier: Apache-2.0

//go:build libc

package probe

/*
#include <errno.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

// Cgo calls no variadic functions.
static int call_ioctl(int fd, unsigned long cmd, void *arg) { return ioctl(fd, cmd, arg) < 0 ? errno : 0; }

static unsigned long call_mmap(unsigned long addr, size_t len, int prot, int flags, int fd, unsigned long off, int *e)
{
	void *at = mmap((void *)addr, len, prot, flags, fd, (off_t)off);
	*e = at == MAP_FAILED ? errno : 0;
	return (unsigned long)at;
}

static int call_munmap(unsigned long addr, size_t len) { return munmap((void *)addr, len) ? errno : 0; }
*/
import "C"

import (
	"syscall"
	"unsafe"
)

// Built with the tag libc (and cgo) the program is linked with the C library and calls the driver through it, as CUDA does:
// what a preload library stands in front of.
var byProgram = mapper{
	mmap: func(addr, length uintptr, prot, flags, fd int, off uintptr) (uintptr, syscall.Errno) {
		var e C.int
		at := C.call_mmap(C.ulong(addr), C.size_t(length), C.int(prot), C.int(flags), C.int(fd), C.ulong(off), &e)
		return uintptr(at), syscall.Errno(e)
	},
	munmap: func(addr, length uintptr) syscall.Errno {
		return syscall.Errno(C.call_munmap(C.ulong(addr), C.size_t(length)))
	},
}

func ioctl(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
	return syscall.Errno(C.call_ioctl(C.int(fd), C.ulong(cmd), arg))
}
