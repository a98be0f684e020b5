// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// caller makes an ioctl; the hostile cases have other ways than the usual one.
type caller func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno

// mapper makes and removes memory mappings: as a program does (byProgram), or by plain system calls (bySyscall).
type mapper struct {
	mmap   func(addr, length uintptr, prot, flags, fd int, off uintptr) (uintptr, syscall.Errno)
	munmap func(addr, length uintptr) syscall.Errno
}

// bySyscall passes by every library.
var bySyscall = mapper{
	mmap: func(addr, length uintptr, prot, flags, fd int, off uintptr) (uintptr, syscall.Errno) {
		at, _, errno := syscall.Syscall6(syscall.SYS_MMAP, addr, length, uintptr(prot), uintptr(flags), uintptr(fd), off)
		return at, errno
	},
	munmap: func(addr, length uintptr) syscall.Errno {
		_, _, errno := syscall.Syscall(syscall.SYS_MUNMAP, addr, length, 0)
		return errno
	},
}

func rawIoctl(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), cmd, uintptr(arg))
	return errno
}

// patient is what NVIDIA's libraries do when a signal interrupts a call.
func patient(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
	for {
		if errno := ioctl(fd, cmd, arg); errno != syscall.EINTR && errno != syscall.EAGAIN {
			return errno
		}
	}
}

// cmdOf is an ioctl number as NVIDIA's libraries make it: _IOWR('F', nr, size).
func cmdOf(nr uint32, size int) uintptr { return 3<<30 | uintptr(size)<<16 | 'F'<<8 | uintptr(nr) }

// escape issues an escape on fd with the outer structure b.
func (call caller) escape(fd int, nr uint32, b []byte) syscall.Errno {
	errno := call(fd, cmdOf(nr, len(b)), unsafe.Pointer(unsafe.SliceData(b)))
	runtime.KeepAlive(b)
	return errno
}

// putPtr writes the address of p into b. The caller keeps p alive over the call. Pinning makes the compiler put p on the
// heap, which does not move; a goroutine's stack does when it grows, and then the driver would write to where p was.
func putPtr(b []byte, off int, p []byte) {
	if len(p) > 0 {
		var pin runtime.Pinner
		pin.Pin(unsafe.SliceData(p))
		pin.Unpin()
		rm.PutU64(b, off, uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))))
	}
}

// pages maps n bytes of anonymous memory at a low address, where every kind of system call can name it.
func pages(n int) ([]byte, error) {
	flags := syscall.MAP_PRIVATE | syscall.MAP_ANONYMOUS
	if runtime.GOARCH == "amd64" {
		flags |= 0x40 // MAP_32BIT
	}
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, flags)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return b, nil
}

// rmError is a refusal: by errno, or by the status that RM wrote.
type rmError struct {
	what   string
	errno  syscall.Errno
	status uint32
}

func (e *rmError) Error() string {
	if e.errno != 0 {
		return fmt.Sprintf("%s: %v", e.what, e.errno)
	}
	return fmt.Sprintf("%s: %s", e.what, rm.StatusName(e.status))
}

// statusOf is the RM status of an error, 0 for none, and 0xffffffff for an errno.
func statusOf(err error) uint32 {
	if err == nil {
		return rm.StatusOK
	}
	if e, ok := errors.AsType[*rmError](err); ok && e.errno == 0 {
		return e.status
	}
	return ^uint32(0)
}

// describe is err for a result line.
func describe(err error) string {
	if err == nil {
		return "ok"
	}
	if e, ok := errors.AsType[*rmError](err); ok {
		if e.errno != 0 {
			return fmt.Sprintf("errno %d", int(e.errno))
		}
		return rm.StatusName(e.status)
	}
	return err.Error()
}
