// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel interfaces that golang.org/x/sys/unix does not wrap.

// seccompNotif is struct seccomp_notif, include/uapi/linux/seccomp.h.
type seccompNotif struct {
	ID    uint64
	PID   uint32
	Flags uint32
	NR    int32
	Arch  uint32
	IP    uint64
	Args  [6]uint64
}

// seccompResp is struct seccomp_notif_resp.
type seccompResp struct {
	ID    uint64
	Val   int64
	Error int32
	Flags uint32
}

const (
	ioctlNotifRecv     = 0xc0502100 // SECCOMP_IOCTL_NOTIF_RECV
	ioctlNotifSend     = 0xc0182101 // SECCOMP_IOCTL_NOTIF_SEND
	ioctlNotifIDValid  = 0x40082102 // SECCOMP_IOCTL_NOTIF_ID_VALID
	ioctlNotifSetFlags = 0x40082104 // SECCOMP_IOCTL_NOTIF_SET_FLAGS, Linux 6.6

	notifContinue   = 1 // SECCOMP_USER_NOTIF_FLAG_CONTINUE
	notifSyncWakeUp = 1 // SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP

	kcmpFile     = 0 // KCMP_FILE
	kcmpFiles    = 2 // KCMP_FILES
	kcmpEpollTFD = 7 // KCMP_EPOLL_TFD

	pidfdThread = unix.O_EXCL // PIDFD_THREAD, Linux 6.9
)

// ioctlPtr makes an ioctl whose argument is memory of the guard.
func ioctlPtr(fd int, cmd uintptr, p unsafe.Pointer) syscall.Errno {
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), cmd, uintptr(p))
	return e
}

// ioctlQuick is ioctlPtr for calls that never wait. It does without telling the Go scheduler, which costs more than they do.
func ioctlQuick(fd int, cmd uintptr, p unsafe.Pointer) syscall.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), cmd, uintptr(p))
	return e
}

// epollSlot is struct kcmp_epoll_slot.
type epollSlot struct{ efd, tfd, toff uint32 }

// What kcmp(2) returns: an order of what it compares, which is the same for as long as that exists.
const (
	kcmpEqual = 0
	kcmpLess  = 1
)

// kcmpStrong compares two files of the guard.
func kcmpStrong(self, a, b int) (order int, e syscall.Errno) {
	r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(self), uintptr(self), kcmpFile, uintptr(a), uintptr(b), 0)
	return int(r), e
}

// kcmpSame says whether two files of the guard are the same.
func kcmpSame(self, a, b int) bool {
	order, e := kcmpStrong(self, a, b)
	return e == 0 && order == kcmpEqual
}

// kcmpWeak compares a file of the guard with one that is registered in an epoll instance, in the same order (kernel/kcmp.c,
// kcmp_epoll_target compares as KCMP_FILE). ENOENT: the registered file is closed for good.
func kcmpWeak(self, fd, epfd, tfd int) (order int, e syscall.Errno) {
	s := epollSlot{uint32(epfd), uint32(tfd), 0}
	r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(self), uintptr(self), kcmpEpollTFD, uintptr(fd), uintptr(unsafe.Pointer(&s)), 0)
	return int(r), e
}

// readMemory copies from a task's memory. It fails unless every byte could be read.
func readMemory(tid int, addr uint64, b []byte) bool {
	return len(b) == 0 || readSome(tid, addr, b) == len(b)
}

// readSome copies as much as can be read, from the start, and tells how much that was. It may wait for as long as the task
// likes: its memory may be served by itself (userfaultfd, FUSE).
func readSome(tid int, addr uint64, b []byte) int {
	if len(b) == 0 || uint64(len(b)) > ^uint64(0)-addr {
		return 0
	}
	local := unix.Iovec{Base: &b[0], Len: uint64(len(b))}
	remote := remoteIovec{addr, uint64(len(b))}
	n, _, e := unix.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(tid), uintptr(unsafe.Pointer(&local)), 1,
		uintptr(unsafe.Pointer(&remote)), 1, 0)
	if e != 0 {
		return 0
	}
	return int(n)
}

// readTwo copies two ranges at once; it fails unless both could be read whole.
func readTwo(tid int, addrA uint64, a []byte, addrB uint64, b []byte) bool {
	local := [2]unix.Iovec{{Base: &a[0], Len: uint64(len(a))}, {Base: &b[0], Len: uint64(len(b))}}
	remote := [2]remoteIovec{{addrA, uint64(len(a))}, {addrB, uint64(len(b))}}
	n, _, e := unix.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(tid), uintptr(unsafe.Pointer(&local)), 2,
		uintptr(unsafe.Pointer(&remote)), 2, 0)
	return e == 0 && n == uintptr(len(a)+len(b))
}

// remoteIovec is struct iovec with an address of another process, which must never be a Go pointer.
type remoteIovec struct{ base, len uint64 }

// writeMemory copies several ranges into a task's memory in one system call.
func writeMemory(tid int, parts []memoryPart) bool {
	if len(parts) == 0 {
		return true
	}
	var local [maxParts]unix.Iovec
	var remote [maxParts]remoteIovec
	total := 0
	for i, p := range parts {
		local[i] = unix.Iovec{Base: &p.data[0], Len: uint64(len(p.data))}
		remote[i] = remoteIovec{p.addr, uint64(len(p.data))}
		total += len(p.data)
	}
	n, _, e := unix.Syscall6(unix.SYS_PROCESS_VM_WRITEV, uintptr(tid), uintptr(unsafe.Pointer(&local)), uintptr(len(parts)),
		uintptr(unsafe.Pointer(&remote)), uintptr(len(parts)), 0)
	return e == 0 && n == uintptr(total)
}

// maxParts bounds the pieces of one call: the outer structure, its block, the rights and the blocks behind pointers.
const maxParts = 16

// memoryPart is a non-empty range to write at an address of a task.
type memoryPart struct {
	addr uint64
	data []byte
}
