// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/proc"
)

// killProcess kills a process of the container. The guard has not the capability to send signals to another user's processes;
// but it may trace them, and the kernel kills what a tracer that asked for it leaves behind (PTRACE_O_EXITKILL, kernel/ptrace.c,
// exit_ptrace). A tracer is a thread, so one ends.
//
// The first thread need not be among those that are traced: it may have ended. Where all of them have a tracer in the container
// already, that one is killed instead, and the process at the next look.
func (g *Guard) killProcess(tgid int) {
	err := error(unix.EPERM)
	for i := range maxTracers {
		if !slices.Contains(g.containerPIDs(), tgid) {
			if i == 0 {
				return // gone; the number may be another's by now
			}
			break
		}
		g.stopChannels(func(c *client) bool { return c.tgid == tgid })
		if err = killOne(tgid); err == nil {
			return
		}
		tgid = tracerOf(tgid)
	}
	g.logOnce("kill", "cannot kill a process; the container's RM clients are freed instead", "err", err)
	g.killClients(func(*client) bool { return true })
}

// maxTracers bounds a chain of processes that trace each other.
const maxTracers = 8

func killOne(tgid int) error {
	pidfd, err := unix.PidfdOpen(tgid, 0)
	if err != nil {
		return nil // gone
	}
	defer unix.Close(pidfd)
	return killHeld(pidfd, tgid)
}

// killHeld is killOne of a process that is held by a pidfd.
func killHeld(pidfd, tgid int) error {
	if unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) == nil {
		return nil
	}
	err, killed := error(unix.ESRCH), 0
	for tries := 0; (err == nil || errors.Is(err, unix.ESRCH)) && killed < livingTries && tries < seizeTries; tries++ {
		wait := time.Duration(0)
		if err = onOwnThread(func() error { return seize(tgid) }); err == nil {
			killed, wait = killed+1, killPause
		}
		if awaitEnd(pidfd, wait) {
			return nil
		}
	}
	if killed > 0 {
		return nil // it takes its time to end
	}
	return err
}

// seizeTries bounds how often a process' threads are looked for that end before they are traced.
const seizeTries = 256

// killPause is how long a process that is killed has to end before its threads are looked at anew: one may have been made, or have
// ended, meanwhile.
const killPause = 5 * time.Millisecond

// seize traces all threads of a process, or as many as it can. What is sent to one that is about to end does not reach the others: hence
// all, and each stops before it ends.
func seize(tgid int) error {
	err, some := unix.ESRCH, false
	for tid := range proc.Threads(tgid) {
		_, _, e := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(tid), 0, ptraceExitKill|ptraceTraceExit, 0, 0)
		if some = some || e == 0; e != 0 && e != unix.ESRCH && hasNamespace(tid) {
			err = e // of one that has ended it says nothing
		}
	}
	if some {
		return nil
	}
	return err
}

// awaitEnd waits for the end of a process.
func awaitEnd(pidfd int, within time.Duration) bool {
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(within.Milliseconds()))
	return n > 0
}

// onOwnThread calls f on a thread that ends with it.
func onOwnThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock it: the thread ends with this function
		if unix.Gettid() == os.Getpid() {
			// The main thread never ends (runtime.mexit parks it). As long as this function has it, another one gets another.
			err := onOwnThread(f)
			runtime.UnlockOSThread()
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

// tracerOf is a process that traces another one; 0: none.
func tracerOf(tgid int) int {
	for tid := range proc.Threads(tgid) {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
		if err != nil {
			continue
		}
		for line := range bytes.Lines(b) {
			if value, ok := bytes.CutPrefix(line, []byte("TracerPid:")); ok {
				tracer, _ := strconv.Atoi(string(bytes.TrimSpace(value))) // a thread
				if process, _, _, err := readStatus(tracer); err == nil {
					return process
				}
			}
		}
	}
	return 0
}

const (
	ptraceSeize     = 0x4206  // PTRACE_SEIZE
	ptraceTraceExit = 1 << 6  // PTRACE_O_TRACEEXIT
	ptraceExitKill  = 1 << 20 // PTRACE_O_EXITKILL
)
