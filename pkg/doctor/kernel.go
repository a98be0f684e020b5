// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/version"
)

// TryKernel is Host.Try's word for a child that becomes to us what a container is to its guard.
const TryKernel = "kernel"

// What golang.org/x/sys/unix does not have; include/uapi/linux/seccomp.h.
const (
	setModeFilter    = 1
	flagNewListener  = 1 << 3
	flagWaitKillable = 1 << 5 // SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, Linux 5.19
	actAllow         = 0x7fff0000
	actNotify        = 0x7fc00000
	notifRecv        = 0xc0502100
	notifSend        = 0xc0182101
	notifSetFlags    = 0x40082104 // Linux 6.6
	syncWakeUp       = 1
	pidfdThread      = unix.O_EXCL // Linux 6.9
)

const (
	magicRequest = 0x63677075 // no driver's ioctl
	magicAnswer  = 4242
	magicText    = "cgpu doctor was here"
	tryTime      = 10 * time.Second
)

// KernelReport says of each interface of the kernel why it cannot be used; empty: it can.
type KernelReport struct {
	Notify       string // a filter with a listener, a notification, an answer
	GetFD        string // pidfd_getfd
	ReadMemory   string // process_vm_readv
	WaitKillable string
	ThreadPidfd  string
	SyncWakeUp   string
	Openat2      string
}

// announced is what the child says before it makes the call that the filter traps.
type announced struct {
	FD           int     `json:"fd"`
	TID          int     `json:"tid"`
	Address      uintptr `json:"address"`
	Refused      string  `json:"refused,omitempty"`
	WaitKillable string  `json:"waitKillable,omitempty"`
}

// KernelChild is the child's part: it installs a filter that traps one ioctl, tells its parent, and makes that ioctl. It returns
// the exit status.
func KernelChild(w io.Writer) int {
	// The filter would outlive a parent that was killed: the child itself holds the listener, so nobody would ever answer.
	time.AfterFunc(tryTime, func() { os.Exit(1) })
	runtime.LockOSThread() // a filter is a thread's; this one does nothing else
	say := func(v any) {
		b, _ := json.Marshal(v)
		fmt.Fprintf(w, "%s\n", b)
	}
	a := announced{TID: unix.Gettid()}
	// With a filter that is none the kernel gets as far as to read it (EFAULT) only if it knows the flags.
	if _, _, e := unix.RawSyscall(unix.SYS_SECCOMP, setModeFilter, flagNewListener|flagWaitKillable, 0); e != unix.EFAULT {
		a.WaitKillable = e.Error()
	}
	fd, err := listener()
	if err != nil {
		a.Refused = err.Error()
		say(a)
		return 0
	}
	text := []byte(magicText)
	var pin runtime.Pinner
	pin.Pin(&text[0])
	defer pin.Unpin()
	a.FD, a.Address = fd, uintptr(unsafe.Pointer(&text[0]))
	say(a)
	r, _, e := unix.Syscall(unix.SYS_IOCTL, ^uintptr(0), magicRequest, uintptr(unsafe.Pointer(&text[0])))
	if e != 0 {
		say(e.Error())
	} else {
		say(fmt.Sprint(r))
	}
	return 0
}

// listener installs a filter for this thread that traps ioctl(_, magicRequest).
func listener() (int, error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("no_new_privs: %w", err)
	}
	const load, jump, ret = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	filter := []unix.SockFilter{
		{Code: load, K: 0}, // seccomp_data.nr
		{Code: jump, Jf: 3, K: unix.SYS_IOCTL},
		{Code: load, K: 16 + 8}, // args[1], lower half
		{Code: jump, Jf: 1, K: magicRequest},
		{Code: ret, K: actNotify},
		{Code: ret, K: actAllow},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	fd, _, e := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, flagNewListener, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return 0, fmt.Errorf("seccomp filter with a listener: %w", e)
	}
	return int(fd), nil
}

// tryKernel plays the guard to a child.
func (h *Host) tryKernel() (KernelReport, error) {
	var r KernelReport
	r.Openat2 = tryOpenat2()
	r.ThreadPidfd = tryThreadPidfd()
	ctx, cancel := context.WithTimeout(context.Background(), tryTime)
	defer cancel()
	cmd, err := h.Try(ctx, TryKernel)
	if err != nil {
		return r, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := cmd.Start(); err != nil {
		return r, err
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	lines := bufio.NewScanner(out)
	var a announced
	if !lines.Scan() || json.Unmarshal(lines.Bytes(), &a) != nil {
		return r, fmt.Errorf("the child that tries it said %q", lines.Text())
	}
	r.WaitKillable = a.WaitKillable
	if a.Refused != "" {
		const unknown = "not tried: there is no listener"
		r.Notify, r.GetFD, r.ReadMemory, r.SyncWakeUp = a.Refused, unknown, unknown, unknown
		return r, nil
	}
	r.asGuard(cmd.Process.Pid, a)
	if r.Notify == "" {
		if !lines.Scan() || strings.Trim(lines.Text(), `"`) != strconv.Itoa(magicAnswer) {
			r.Notify = fmt.Sprintf("the call was answered with %d, the caller got %s", magicAnswer, lines.Text())
		}
	}
	return r, nil
}

// asGuard copies the child's listener, takes the notification, reads what it points to, and answers.
func (r *KernelReport) asGuard(pid int, a announced) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		r.GetFD = "pidfd_open: " + err.Error()
		r.Notify = "not tried: the listener cannot be copied"
		return
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, a.FD, 0)
	if err != nil {
		r.GetFD, r.Notify = err.Error(), "not tried: the listener cannot be copied"
		return
	}
	defer unix.Close(fd)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), notifSetFlags, syncWakeUp); e != 0 {
		r.SyncWakeUp = e.Error()
	}
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if err := await(poll, 5*time.Second); err != nil {
		r.Notify = "no notification came: " + err.Error()
		return
	}
	// struct seccomp_notif: id, pid, flags, then seccomp_data (nr, arch, ip, args[6]).
	var n [10]uint64
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), notifRecv, uintptr(unsafe.Pointer(&n))); e != 0 {
		r.Notify = "receive a notification: " + e.Error()
		return
	}
	if n[5] != magicRequest { // args[1] is behind id, pid and flags, nr and arch, ip, args[0]
		r.Notify = fmt.Sprintf("the notification tells of ioctl %#x, the call was %#x", n[5], magicRequest)
	}
	if err := readBack(a.TID, a.Address); err != nil {
		r.ReadMemory = err.Error()
	}
	resp := struct {
		id    uint64
		val   int64
		error int32
		flags uint32
	}{id: n[0], val: magicAnswer}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), notifSend, uintptr(unsafe.Pointer(&resp))); e != 0 {
		r.Notify = "answer a notification: " + e.Error()
	}
}

func await(poll []unix.PollFd, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; {
		n, err := unix.Poll(poll, max(0, int(time.Until(deadline).Milliseconds())))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return fmt.Errorf("none within %v", limit)
		default:
			return nil
		}
	}
}

// readBack reads the child's text out of its memory.
func readBack(tid int, address uintptr) error {
	b := make([]byte, len(magicText))
	local := []unix.Iovec{{Base: &b[0], Len: uint64(len(b))}}
	n, err := unix.ProcessVMReadv(tid, local, []unix.RemoteIovec{{Base: address, Len: len(b)}}, 0)
	switch {
	case err != nil:
		return err
	case n != len(b) || string(b) != magicText:
		return fmt.Errorf("read %q", b[:max(n, 0)])
	}
	return nil
}

func tryOpenat2() string {
	fd, err := unix.Openat2(unix.AT_FDCWD, "/proc/self",
		&unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return err.Error()
	}
	_ = unix.Close(fd)
	return ""
}

func tryThreadPidfd() string {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.PidfdOpen(unix.Gettid(), pidfdThread)
	if err != nil {
		return err.Error()
	}
	_ = unix.Close(fd)
	return ""
}

func checkKernel(h *Host) Result {
	release, found := h.text("/proc/sys/kernel/osrelease")
	v, err := version.ParseGeneric(release)
	switch {
	case !found || err != nil:
		return warn("the kernel's version cannot be read: /proc/sys/kernel/osrelease says %q", release).but("mount /proc")
	case v.LessThan(version.MajorMinor(5, 9)):
		return needed(h, fail("Linux %s, a guard needs 5.9", release))
	}
	return ok("Linux %s", release)
}

// needed makes a failure of what only a guard needs a warning where there are no guards.
func needed(h *Host, r Result) Result {
	if setting := h.settings().Unguarded(); setting != "" && r.Status == Fail {
		r.Status = Warn
		r.Found += "; " + setting + " does without"
	}
	return r
}

// kernelCheck is a check of one interface.
func kernelCheck(what string, without Status, lost string, field func(KernelReport) string) func(*Host) Result {
	return func(h *Host) Result {
		if h.kernel == nil {
			r, err := h.tryKernel()
			if err != nil {
				return fail("cannot try it: %v", err).but("run cgpu doctor again; if it stays, report it")
			}
			h.kernel = &r
		}
		if why := field(*h.kernel); why != "" {
			return needed(h, Result{Status: without, Found: line("%s: %s%s", what, why, lost)})
		}
		return ok("%s works", what)
	}
}

var kernelChecks = []Check{
	{Name: "kernel", Means: "Linux is 5.9 or newer, the first on which a guard can hold a container.",
		Remedy: `use a newer kernel, or set enforcement = "preload" in cgpu.toml knowing that it can be walked around`, Run: checkKernel},
	{Name: "seccomp-notify",
		Means: "A child with a seccomp listener is trapped, and its call answered, as a guard does it. Without it no container with a quota " +
			"starts.",
		Remedy: `use a kernel with CONFIG_SECCOMP_FILTER, outside of a sandbox that forbids seccomp(2); or set enforcement = "preload"`,
		Run:    kernelCheck("seccomp user notification", Fail, "", func(r KernelReport) string { return r.Notify })},
	{Name: "pidfd-getfd", Means: "A descriptor of a child can be copied. The guard makes calls on copies of the container's files.",
		Remedy: "use Linux 5.6 or newer, as root; a sandbox or a security module may forbid it",
		Run:    kernelCheck("pidfd_getfd", Fail, "", func(r KernelReport) string { return r.GetFD })},
	{Name: "process-memory", Means: "A child's memory can be read (process_vm_readv). The guard copies calls in and results out.",
		Remedy: "use a kernel with CONFIG_CROSS_MEMORY_ATTACH; a security module may forbid it",
		Run:    kernelCheck("process_vm_readv", Fail, "", func(r KernelReport) string { return r.ReadMemory })},
	{Name: "openat2", Means: "Paths can be opened without following links (openat2), as cgpu-hook opens those of an image.",
		Remedy: "use Linux 5.6 or newer; a sandbox may forbid it",
		Run:    kernelCheck("openat2", Fail, "", func(r KernelReport) string { return r.Openat2 })},
	{Name: "wait-killable",
		Means:  "The kernel knows SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (5.19): signals do not cut off calls that a guard carries out.",
		Remedy: "nothing must be done; Linux 5.19, with a runtime that uses the flag, spares guards the undoing",
		Run: kernelCheck("WAIT_KILLABLE_RECV", Warn, "; the guard undoes what a signal cut off",
			func(r KernelReport) string { return r.WaitKillable })},
	{Name: "sync-wake-up", Means: "A listener can wake its guard on the caller's core (6.6), which makes trapped calls quicker.",
		Remedy: "nothing must be done; Linux 6.6 makes allocations quicker",
		Run: kernelCheck("SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP", Warn, "; trapped calls take longer",
			func(r KernelReport) string { return r.SyncWakeUp })},
	{Name: "thread-pidfd",
		Means:  "A thread can be held by a descriptor (PIDFD_THREAD, 6.9), so that its number cannot become another's unseen.",
		Remedy: "nothing must be done; on Linux 6.9 the guard need not look up a thread's process for each call",
		Run: kernelCheck("PIDFD_THREAD", Warn, "; the guard checks threads in a slower way",
			func(r KernelReport) string { return r.ThreadPidfd })},
	{Name: "yama",
		Means:  "kernel.yama.ptrace_scope is not 3, which forbids even a guard to copy files of and to stop the container's processes.",
		Remedy: "set kernel.yama.ptrace_scope to 0, 1 or 2 in /etc/sysctl.d and reboot: 3 cannot be taken back", Run: checkYama},
	{Name: "cgroup",
		Means: "The CPU time of a container can be read (cgroup v2, or v1 with cpuacct), by which a guard knows that it need not look at its " +
			"memory maps again.",
		Remedy: "mount cgroup v2, or cgroup v1 with cpuacct, on /sys/fs/cgroup", Run: checkCgroup},
}

func checkYama(h *Host) Result {
	scope, found := h.text("/proc/sys/kernel/yama/ptrace_scope")
	switch {
	case !found:
		return ok("no Yama")
	case scope == "3":
		return needed(h, fail("ptrace_scope is 3: a guard can neither copy a container's files nor end its processes"))
	}
	return ok("ptrace_scope is %s", scope)
}

func checkCgroup(h *Host) Result {
	switch {
	case h.there("/sys/fs/cgroup/cgroup.controllers"):
		if _, found := h.text("/sys/fs/cgroup/cpu.stat"); !found {
			return warn("cgroup v2 without cpu.stat: guards look at memory maps more often")
		}
		return ok("v2, CPU time is in cpu.stat")
	case h.there("/sys/fs/cgroup/cpuacct/cpuacct.usage"):
		if !h.there("/sys/fs/cgroup/devices") {
			return warn("v1 without the devices controller: a container's device nodes are not confined by its cgroup")
		}
		return ok("v1, CPU time is in cpuacct.usage")
	}
	return warn("neither cgroup v2 nor cpuacct below /sys/fs/cgroup: guards look at memory maps more often")
}
