// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// abi is a way in which a process of this machine can make system calls, and the numbers of ioctl there.
type abi struct {
	arch   uint32 // AUDIT_ARCH_*
	mask   uint32 // of the number, before it is compared
	ioctls []uint32
}

// x32 is __X32_SYSCALL_BIT. Calls of the x32 ABI have the architecture of x86-64 and a bit of their own.
const x32 = 0x40000000

// abis are those of a machine of Go's architecture name goarch.
func abis(goarch string) []abi {
	if goarch == "arm64" {
		return []abi{{unix.AUDIT_ARCH_AARCH64, ^uint32(0), []uint32{29}}, {unix.AUDIT_ARCH_ARM, ^uint32(0), []uint32{54}}}
	}
	// 514 is ioctl of x32 (arch/x86/entry/syscalls/syscall_64.tbl). Kernels have taken a number of either ABI with and without
	// the bit, so both count as ioctl in both.
	return []abi{{unix.AUDIT_ARCH_X86_64, ^uint32(x32), []uint32{16, 514}}, {unix.AUDIT_ARCH_I386, ^uint32(0), []uint32{54}}}
}

// Offsets in struct seccomp_data, include/uapi/linux/seccomp.h.
const (
	dataNR      = 0
	dataArch    = 4
	dataRequest = 16 + 8 // low half of args[1]; both architectures are little endian
)

// filter is the seccomp program: an ioctl whose number's low byte is trapped goes to the guard, every other call passes. It
// compares what the filter of a container does (pkg/spec), for the same reasons: the driver ignores the other bits. A process
// that calls in by a way that is not in abis is killed, as libseccomp does.
func filter(abis []abi, trapped []uint8) []unix.SockFilter {
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		and    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		answer = unix.BPF_RET | unix.BPF_K
	)
	stmt := func(code uint16, k uint32) unix.SockFilter { return unix.SockFilter{Code: code, K: k} }
	// skip jumps over n instructions if the loaded value is not k.
	skip := func(k uint32, n int) unix.SockFilter { return unix.SockFilter{Code: equal, K: k, Jf: uint8(n)} }

	// The end, where every ioctl comes to: 2 + len(trapped) + 2 instructions.
	tail := []unix.SockFilter{stmt(load, dataRequest), stmt(and, 0xff)}
	for i, nr := range trapped {
		tail = append(tail, unix.SockFilter{Code: equal, K: uint32(nr), Jt: uint8(len(trapped) - i)})
	}
	tail = append(tail, stmt(answer, unix.SECCOMP_RET_ALLOW), stmt(answer, unix.SECCOMP_RET_USER_NOTIF))

	// A block for each ABI: it leaves to the next one, allows, or falls through to a jump to the tail. Built from the last.
	head := []unix.SockFilter{stmt(answer, unix.SECCOMP_RET_KILL_PROCESS)}
	for i := len(abis) - 1; i >= 0; i-- {
		a := abis[i]
		block := []unix.SockFilter{stmt(load, dataNR), stmt(and, a.mask)}
		for j, nr := range a.ioctls {
			block = append(block, unix.SockFilter{Code: equal, K: nr, Jt: uint8(len(a.ioctls) - j)}) // to the jump behind allow
		}
		block = append(block, stmt(answer, unix.SECCOMP_RET_ALLOW), stmt(unix.BPF_JMP|unix.BPF_JA, uint32(len(head))))
		block = append([]unix.SockFilter{skip(a.arch, len(block))}, block...)
		head = append(block, head...)
	}
	return append(append([]unix.SockFilter{stmt(load, dataArch)}, head...), tail...)
}

// waitKillable is SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, Linux 5.19: signals do not cut a call off that the guard has taken.
const waitKillable = 1 << 5

// errNested: the kernel allows one listener for a process.
var errNested = errors.New("this process has a seccomp listener already, perhaps because it runs in a container or a cgpu run: " +
	"start it outside")

// install puts the filter on this thread and returns its listener.
func install(program []unix.SockFilter) (int, error) {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// Without SPEC_ALLOW kernels before 5.16 would slow the whole process down, as a mitigation that it has not asked for.
	flags := uintptr(unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW)
	for _, more := range []uintptr{waitKillable, 0} {
		fd, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags|more, uintptr(unsafe.Pointer(&prog)))
		switch {
		case e == 0:
			return int(fd), nil
		case e == unix.EBUSY:
			return -1, errNested
		case e != unix.EINVAL || more == 0:
			return -1, fmt.Errorf("seccomp: %w", e)
		}
	}
	return -1, unix.EINVAL
}

// processState is what the guard gets with the listener: ContainerProcessState of the OCI runtime specification, as from runc.
type processState struct {
	Version  string   `json:"ociVersion"`
	Fds      []string `json:"fds"`
	PID      int      `json:"pid"`
	Metadata string   `json:"metadata"`
	State    struct {
		ID     string `json:"id"`
		Status string `json:"status"`
		PID    int    `json:"pid"`
	} `json:"state"`
}

// stateOf describes a process that is about to become the command, and its thread that sees what the command will see.
func stateOf(id, nonce string, pid, tid int) ([]byte, error) {
	metadata, err := json.Marshal(map[string]string{"id": id, "nonce": nonce})
	if err != nil {
		return nil, err
	}
	s := processState{Version: "1.0.2", Fds: []string{"seccompFd"}, PID: tid, Metadata: string(metadata)}
	s.State.ID, s.State.Status, s.State.PID = id, "creating", pid
	return json.Marshal(s)
}

// guarded puts this thread under the guard at the other end of conn.
func guarded(conn int, id, nonce string) error {
	state, err := stateOf(id, nonce, unix.Getpid(), unix.Gettid())
	if err != nil {
		return err
	}
	fd, err := install(filter(abis(runtime.GOARCH), rm.TrappedNRs[:]))
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Sendmsg(conn, state, unix.UnixRights(fd), nil, 0); err != nil {
		return fmt.Errorf("give the guard the listener: %w", err)
	}
	awaitGuard(conn)
	return nil
}

// awaitGuard waits until the guard has taken the filter, when it closes the connection. It looks at this process for its /dev, and a
// command may end at once while its children go on. A guard that has ended closes it too: then the command's calls fail.
func awaitGuard(conn int) {
	for {
		if _, err := unix.Read(conn, make([]byte, 1)); err != unix.EINTR {
			return
		}
	}
}
