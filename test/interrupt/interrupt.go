// SPDX-License-Identifier: Apache-2.0

// Package interrupt has signals interrupt system calls, for the tests of what happens to a call on its way through a guard.
package interrupt

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Thread sends SIGALRM to the calling thread, over and over (setitimer would let the kernel choose one).
func Thread(every time.Duration) (stop func(), err error) {
	type sigevent struct {
		value  uint64
		signo  int32
		notify int32
		tid    int32
		_      [44]byte
	}
	const sigevThreadID = 4
	ev := sigevent{signo: int32(syscall.SIGALRM), notify: sigevThreadID, tid: int32(unix.Gettid())}
	var id int32
	if _, _, e := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&ev)),
		uintptr(unsafe.Pointer(&id))); e != 0 {
		return nil, fmt.Errorf("timer_create: %w", e)
	}
	ts := unix.NsecToTimespec(every.Nanoseconds())
	spec := [2]unix.Timespec{ts, ts}
	if _, _, e := unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(id), 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0); e != 0 {
		return nil, fmt.Errorf("timer_settime: %w", e)
	}
	return func() { _, _, _ = unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(id), 0, 0) }, nil
}

// Restart sets or clears SA_RESTART of Go's own handler of a signal.
func Restart(sig syscall.Signal, on bool) error {
	const saRestart = 0x10000000
	var act struct {
		handler  uintptr
		flags    uint64
		restorer uintptr
		mask     uint64
	}
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), 0, uintptr(unsafe.Pointer(&act)), 8, 0, 0); e != 0 {
		return fmt.Errorf("rt_sigaction: %w", e)
	}
	act.flags &^= saRestart
	if on {
		act.flags |= saRestart
	}
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0); e != 0 {
		return fmt.Errorf("rt_sigaction: %w", e)
	}
	return nil
}
