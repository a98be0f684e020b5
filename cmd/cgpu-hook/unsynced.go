package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// leaveUnsynced makes fsync and fdatasync of this process, and of what it executes, succeed without effect. ldconfig calls both
// for the two caches that it writes (glibc, elf/cache.c: save_cache, save_aux_cache). After a loss of power they may be
// damaged; but before any program reads them the container has to be started anew, and that writes them anew.
//
// flags are those of seccomp(2): a process of several threads wants SECCOMP_FILTER_FLAG_TSYNC.
func leaveUnsynced(flags uintptr) error {
	const (
		load = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		is   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		end  = unix.BPF_RET | unix.BPF_K
		nr   = 0 // of struct seccomp_data
		arch = 4
	)
	native := uint32(unix.AUDIT_ARCH_X86_64)
	if runtime.GOARCH == "arm64" {
		native = unix.AUDIT_ARCH_AARCH64
	}
	program := []unix.SockFilter{
		{Code: load, K: arch},
		{Code: is, K: native, Jf: 3},
		{Code: load, K: nr},
		{Code: is, K: unix.SYS_FSYNC, Jt: 2},
		{Code: is, K: unix.SYS_FDATASYNC, Jt: 1},
		{Code: end, K: unix.SECCOMP_RET_ALLOW},
		{Code: end, K: unix.SECCOMP_RET_ERRNO}, // error 0: done
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog))); e != 0 {
		return e
	}
	return nil
}
