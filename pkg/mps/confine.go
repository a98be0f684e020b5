// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Confine becomes the daemon without what it has as root of a user namespace: whoever takes NVIDIA's server over would have more of the
// kernel by that than a container has. The daemon wants the number 0 of its user, and no capability.
func Confine(command []string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	runtime.LockOSThread() // all of this is a thread's, and execve makes it the only one
	if err := dropCapabilities(); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if err := refuseCalls(0); err != nil {
		return err
	}
	return syscall.Exec(path, command, os.Environ())
}

// dropCapabilities takes them away from the next program, and from all that it starts: root has what the bounding set has.
func dropCapabilities() error {
	for c := uintptr(0); unix.Prctl(unix.PR_CAPBSET_READ, c, 0, 0, 0) == nil; c++ { // EINVAL beyond the last
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return err
		}
	}
	return nil
}

// refusedCalls are those by which one has capabilities again, in a namespace of one's own, or reaches what engines keep from containers.
var refusedCalls = []uint32{unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_IO_URING_SETUP,
	unix.SYS_USERFAULTFD, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL}

const newNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID |
	unix.CLONE_NEWCGROUP

// families of sockets that a program without a network may ask for; of others the kernel would load modules. (It may load some for these as
// well: protocols of IP and netlink.) Of pairs it has AF_UNIX alone.
var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

// Offsets in struct seccomp_data, include/uapi/linux/seccomp.h; the machine is little endian.
const (
	dataNumber, dataArch, dataFirst = 0, 4, 16

	x32 = 0x40000000 // __X32_SYSCALL_BIT, which no number of another ABI has
)

// Narrow refuses this process, all its threads, and what it starts from now on what the daemon is refused. Such is the daemon's own program
// for commands: whoever has taken NVIDIA's server over may be the one whom it asks.
func Narrow() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return refuseCalls(unix.SECCOMP_FILTER_FLAG_TSYNC)
}

// refuseCalls is for this thread, without the flag for all.
func refuseCalls(flags uintptr) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	program := filter(auditArch[runtime.GOARCH])
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	flags |= unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW // as in pkg/hostrun
	thread, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	switch {
	case e != 0:
		return fmt.Errorf("seccomp: %w", e)
	case thread != 0:
		return fmt.Errorf("seccomp: thread %d has filters of its own", thread)
	}
	return nil
}

var auditArch = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// filter lets pass what is not refused. Another ABI than the machine's own nothing of NVIDIA's uses.
func filter(arch uint32) (program []unix.SockFilter) {
	const (
		jump = unix.BPF_JMP | unix.BPF_K
		fail = unix.SECCOMP_RET_ERRNO
	)
	add := func(code uint16, k uint32) { program = append(program, unix.SockFilter{Code: code, K: k}) }
	load := func(offset uint32) { add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, offset) }
	answer := func(a uint32) { add(unix.BPF_RET|unix.BPF_K, a) }
	// when goes over the next n instructions unless the loaded value is as op says.
	when := func(op uint16, k uint32, n uint8) {
		program = append(program, unix.SockFilter{Code: jump | op, K: k, Jf: n})
	}
	load(dataArch)
	program = append(program, unix.SockFilter{Code: jump | unix.BPF_JEQ, K: arch, Jt: 1})
	answer(unix.SECCOMP_RET_KILL_PROCESS)
	load(dataNumber)
	when(unix.BPF_JGE, x32, 1)
	answer(unix.SECCOMP_RET_KILL_PROCESS)
	for _, nr := range refusedCalls {
		when(unix.BPF_JEQ, nr, 1)
		answer(fail | uint32(unix.EPERM))
	}
	when(unix.BPF_JEQ, unix.SYS_CLONE3, 1) // whose flags are out of sight; the C library goes on by clone
	answer(fail | uint32(unix.ENOSYS))
	when(unix.BPF_JEQ, unix.SYS_CLONE, 4)
	load(dataFirst)
	when(unix.BPF_JSET, newNamespaces, 1)
	answer(fail | uint32(unix.EPERM))
	answer(unix.SECCOMP_RET_ALLOW)
	when(unix.BPF_JEQ, unix.SYS_SOCKET, uint8(2+2*len(families)))
	load(dataFirst)
	for _, family := range families {
		when(unix.BPF_JEQ, family, 1)
		answer(unix.SECCOMP_RET_ALLOW)
	}
	answer(fail | uint32(unix.EAFNOSUPPORT))
	when(unix.BPF_JEQ, unix.SYS_SOCKETPAIR, 4)
	load(dataFirst)
	when(unix.BPF_JEQ, unix.AF_UNIX, 1)
	answer(unix.SECCOMP_RET_ALLOW)
	answer(fail | uint32(unix.EAFNOSUPPORT))
	answer(unix.SECCOMP_RET_ALLOW)
	return program
}
