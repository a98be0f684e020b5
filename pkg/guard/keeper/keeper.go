// SPDX-License-Identifier: Apache-2.0

// Package keeper is the process that has a guard's descriptors and memory files when the guard is killed, and becomes the next guard
// (docs/adr/0015-keeper.md).
//
// It is made by clone(2) with CLONE_FILES: the two have one table of descriptors, so whatever the guard opens the keeper has, under the
// same number, and nothing is passed. It has no thread but one, which runs keep and nothing else: it waits for the guard's end, and
// executes the guard's program. So it reads nothing of a container's, needs no memory but what it had at its start, and opens nothing.
package keeper

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ReviveArg is the argument of the program that goes on, after its name, with the number of the descriptor of Memory behind it.
const ReviveArg = "revive"

// Name is what the process is called, so that who ends processes called cgpu-guard does not end it, too.
const Name = "cgpu-keeper"

// Process is a keeper that waits.
type Process struct {
	PID   int
	pidfd int
	self  int // that of the guard, by which it waits for the guard's end
}

// want is all that keep reads. It is made before the process is, and never changed.
type want struct {
	guard   uintptr // pidfd, which is closed with the keeper
	ended   *atomic.Uint32
	died    *unix.Timespec // told when it has ended (CLOCK_MONOTONIC)
	program uintptr        // descriptor
	argv    []*byte
	envp    []*byte
	name    [16]byte
	empty   [1]byte
	poll    unix.PollFd
	mask    uint64 // signals that are blocked in the program
	all     uint64
}

// Start makes a keeper. It executes program, which is an open file, with the number of memory's descriptor, unless memory says by the time
// that this process ends that nobody is to go on.
func Start(program *os.File, memory *Memory) (*Process, error) {
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	w := &want{guard: uintptr(self), ended: memory.Ended(), died: memory.died(), program: program.Fd(),
		poll: unix.PollFd{Fd: int32(self), Events: unix.POLLIN}, all: ^uint64(0)}
	copy(w.name[:15], Name)
	if w.argv, err = syscall.SlicePtrFromStrings([]string{"cgpu-guard", ReviveArg, strconv.Itoa(memory.FD())}); err == nil {
		w.envp, err = syscall.SlicePtrFromStrings(os.Environ())
	}
	if err != nil {
		_ = unix.Close(self)
		return nil, err
	}
	pid, e := clone(w)
	if e != 0 {
		_ = unix.Close(self)
		return nil, os.NewSyscallError("clone", e)
	}
	runtime.KeepAlive(w)
	p := &Process{PID: pid, self: self}
	if p.pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
		p.Kill()
		go p.Wait()
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	return p, nil
}

// clone makes the process. No signal is delivered in it: its handlers are those of Go's runtime, which it does not have.
func clone(w *want) (pid int, e syscall.Errno) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if _, _, e = unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&w.all)),
		uintptr(unsafe.Pointer(&w.mask)), 8,
		0, 0); e != 0 {
		return 0, e
	}
	pid, e = cloneBlocked(w)
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&w.mask)), 0, 8, 0, 0)
	return pid, e
}

//go:noinline
//go:norace
//go:nosplit
func cloneBlocked(w *want) (pid int, e syscall.Errno) {
	n, _, e := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_FILES|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && n == 0 {
		keep(w)
	}
	return int(n), e
}

// Of keep: descriptors beyond so many that are not open in a row are not looked for.
const noneBeyond = 1 << 12

// keep is the keeper: all that it ever does. It must not allocate, grow its stack, or call anything that Go's scheduler has a part in.
//
//go:noinline
//go:norace
//go:nosplit
func keep(w *want) {
	_, _, _ = unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&w.name[0])), 0, 0, 0, 0)
	for {
		_, _, e := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&w.poll)), 1, 0, 0, 8, 0)
		if e == 0 && w.poll.Revents != 0 {
			break
		}
		if e != 0 && e != unix.EINTR && e != unix.EAGAIN {
			exit()
		}
	}
	if w.ended.Load() != 0 {
		exit()
	}
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(w.died)), 0)
	// What the guard had open the program has, too, and finds out which of it is to be kept: it can tell them from its own, which are closed
	// by execve(2).
	for fd, none := uintptr(3), 0; none < noneBeyond; fd++ {
		none++
		if _, _, e := unix.RawSyscall(unix.SYS_FCNTL, fd, unix.F_SETFD, 0); e == 0 {
			none = 0
		}
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&w.mask)), 0, 8, 0, 0)
	_, _, _ = unix.RawSyscall6(unix.SYS_EXECVEAT, w.program, uintptr(unsafe.Pointer(&w.empty[0])), uintptr(unsafe.Pointer(&w.argv[0])),
		uintptr(unsafe.Pointer(&w.envp[0])), unix.AT_EMPTY_PATH, 0)
	exit()
}

//go:norace
//go:nosplit
func exit() {
	for {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
	}
}

// Kill ends the keeper, if it has not ended. Wait comes afterwards.
func (p *Process) Kill() {
	_ = unix.Kill(p.PID, unix.SIGKILL)
	if p.pidfd > 0 {
		_ = unix.Close(p.pidfd)
	}
	_ = unix.Close(p.self)
}

// Wait waits until a keeper that was killed has ended, and does not stay as a zombie. That may take any time: who traces it is told first.
func (p *Process) Wait() {
	for p != nil {
		if _, err := unix.Wait4(p.PID, nil, 0, nil); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Descriptor becomes readable when the keeper has ended.
func (p *Process) Descriptor() int { return p.pidfd }

// Left closes what the guard that was killed had open, and this program has no use for; kept stays, and is closed in programs that this one
// starts.
func Left(kept []int) error {
	keeps := map[int]bool{}
	for _, fd := range kept {
		keeps[fd] = true
	}
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	found := 0
	for _, name := range names {
		fd, err := strconv.Atoi(name.Name())
		if err != nil || fd < 3 {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		switch {
		case err != nil || flags&unix.FD_CLOEXEC != 0: // this program's own
		case keeps[fd]:
			unix.CloseOnExec(fd)
			found++
		default:
			_ = unix.Close(fd)
		}
	}
	if found != len(keeps) {
		return fmt.Errorf("%d of %d descriptors are there", found, len(keeps))
	}
	return nil
}
