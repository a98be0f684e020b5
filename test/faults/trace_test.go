// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fault is what happens to one of our programs at its n-th system call: it is killed, or the call fails.
type fault struct {
	program string         // as it is called by itself: argv[0]
	n       int            // 0: nothing happens, calls are counted
	errors  map[int]string // which calls count, and how they fail (an errno's name); nil: all, and the process is killed
}

// watch makes one fault happen in the commands that it runs and in all that they start. Commands of one watch count together.
type watch struct {
	fault
	mu   sync.Mutex
	seen int
	hit  string // the call at which it happened
	pid  int    // of the process to which it happened
	over bool
	skip bool // calls do not count now
}

// count has calls counted from now on, or not.
func (w *watch) count(yes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.skip = !yes
}

// result is how a command ended.
type result struct {
	args   []string
	code   int // -1: killed, -2: it hangs
	stderr string
}

func (r result) String() string {
	return fmt.Sprintf("%s: exit %d: %s", strings.Join(r.args, " "), r.code, strings.TrimSpace(r.stderr))
}

// run runs a command, at most for limit. What it leaves behind stays watched.
func (w *watch) run(limit time.Duration, env []string, stdout string, args ...string) result {
	r := result{args: args, code: -2}
	out, err := os.OpenFile(stdout, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		r.stderr = err.Error()
		return r
	}
	defer out.Close()
	said, err := os.CreateTemp("", "stderr")
	if err != nil {
		r.stderr = err.Error()
		return r
	}
	defer os.Remove(said.Name()) //nolint:errcheck // in the temporary folder
	defer said.Close()
	started, ended := make(chan int, 1), make(chan int, 1)
	go w.trace(started, ended, &syscall.ProcAttr{Env: env, Files: []uintptr{0, out.Fd(), said.Fd()},
		Sys: &syscall.SysProcAttr{Ptrace: true, Setsid: true}}, args)
	pid := <-started
	select {
	case r.code = <-ended:
	case <-time.After(limit):
		select {
		case r.code = <-ended: // in the same moment: its number may be another's
		default:
			_ = unix.Kill(pid, unix.SIGKILL)
			<-ended
		}
	}
	text, _ := os.ReadFile(said.Name())
	r.stderr = string(text)
	return r
}

// tracee is a thread that the kernel stops for us.
type tracee struct {
	process int
	program string
	fails   syscall.Errno // what the call that it is in is to return
}

// trace starts a command and follows it and all that it starts, until nothing is left. It stays on its thread, and ends with it: the
// kernel then lets go of whatever is still there.
func (w *watch) trace(started, ended chan<- int, attr *syscall.ProcAttr, args []string) {
	runtime.LockOSThread()
	root, err := syscall.ForkExec(args[0], args, attr)
	if err != nil {
		started <- 0
		ended <- -1
		return
	}
	threads := map[int]*tracee{}
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return // ECHILD
		}
		if !status.Stopped() {
			if tid == root && threads[tid] == nil { // it never stopped
				started <- root
			}
			delete(threads, tid)
			if tid == root {
				code := -1
				if status.Exited() {
					code = status.ExitStatus()
				}
				ended <- code
				root = 0 // its number comes again
			}
			continue
		}
		t, signal := threads[tid], status.StopSignal()
		switch {
		case t == nil:
			t = look(tid)
			threads[tid] = t
			if tid == root {
				started <- root
				// A test that is ended takes its node along.
				if err := unix.PtraceSetOptions(tid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACEFORK|unix.PTRACE_O_TRACEVFORK|
					unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_TRACEEXEC|unix.PTRACE_O_EXITKILL); err != nil {
					panic(err)
				}
			}
			signal = 0 // the stop by which it begins
		case signal == unix.SIGTRAP|0x80:
			w.call(tid, t)
			signal = 0
		case signal == unix.SIGTRAP && status.TrapCause() > 0:
			if status.TrapCause() == unix.PTRACE_EVENT_EXEC {
				*t = *look(tid)
				if old, err := unix.PtraceGetEventMsg(tid); err == nil && int(old) != tid { // a thread that went on by the process' number
					delete(threads, int(old))
				}
			}
			signal = 0
		}
		if t.program == w.program {
			err = unix.PtraceSyscall(tid, int(signal))
		} else {
			err = unix.PtraceCont(tid, int(signal))
		}
		if err != nil && err != unix.ESRCH { // it may have been killed
			panic(err)
		}
	}
}

func look(tid int) *tracee {
	t := &tracee{process: tid}
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", tid))
	name, _, _ := bytes.Cut(line, []byte{0})
	t.program = filepath.Base(string(name))
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if _, rest, ok := bytes.Cut(status, []byte("\nTgid:\t")); ok {
		fmt.Sscan(string(rest), &t.process) //nolint:errcheck // then it is its own
	}
	return t
}

// call is told of each beginning and end of a system call of the program.
func (w *watch) call(tid int, t *tracee) {
	// struct ptrace_syscall_info
	var info struct {
		op     uint8
		_      [3]byte
		_      uint32
		_, _   uint64
		number uint64
		args   [6]uint64
		_      [3]uint64
	}
	if _, _, e := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(tid), unsafe.Sizeof(info),
		uintptr(unsafe.Pointer(&info)), 0, 0); e != 0 {
		return
	}
	if info.op == unix.PTRACE_SYSCALL_INFO_EXIT {
		if t.fails != 0 {
			setResult(tid, func(r *unix.PtraceRegs) { r.Rax = -uint64(t.fails) })
			t.fails = 0
		}
		return
	}
	number := int(info.number)
	if info.op != unix.PTRACE_SYSCALL_INFO_ENTRY || !w.counts(tid, number, info.args) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over || w.skip {
		return
	}
	if w.seen++; w.seen != w.n {
		return
	}
	w.hit, w.pid = describe(tid, number, info.args), t.process
	if w.errors == nil {
		_ = unix.Kill(t.process, unix.SIGKILL)
		return
	}
	t.fails = errnos[w.errors[number]]
	w.hit += " = " + w.errors[number]
	setResult(tid, func(r *unix.PtraceRegs) { r.Orig_rax = ^uint64(0) })
}

func setResult(tid int, change func(*unix.PtraceRegs)) {
	var r unix.PtraceRegs
	if unix.PtraceGetRegs(tid, &r) == nil {
		change(&r)
		_ = unix.PtraceSetRegs(tid, &r)
	}
}

// stop ends counting, and returns how many calls there were and at which of them the fault happened.
func (w *watch) stop() (seen int, hit string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	return w.seen, w.hit
}

// killed is the process that was killed; 0: none was.
func (w *watch) killed() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.errors != nil {
		return 0
	}
	return w.pid
}

// counts says whether a call counts. To kill a process at one that only looks, or that concerns nothing but the process itself, is to
// kill it before the next that changes something; how many of those there are is chance.
func (w *watch) counts(tid, number int, args [6]uint64) bool {
	if (number == unix.SYS_READ || number == unix.SYS_WRITE) && descriptor(tid, args[0]) == "anon_inode:[eventfd]" {
		return false // by which Go's runtime wakes itself; it ends the process where that fails, which no disk and no signal brings about
	}
	if w.errors != nil {
		return w.errors[number] != ""
	}
	switch number {
	case unix.SYS_CLONE:
		return args[0]&unix.CLONE_THREAD == 0
	case unix.SYS_OPENAT:
		return args[2]&(unix.O_CREAT|unix.O_WRONLY|unix.O_RDWR) != 0
	case unix.SYS_IOCTL:
		return args[1] != notifReceive && args[1] != notifValid
	case unix.SYS_READ, unix.SYS_CLOSE: // of a file nobody notices
		return !strings.HasPrefix(descriptor(tid, args[0]), "/")
	}
	return !harmless[number]
}

// SECCOMP_IOCTL_NOTIF_RECV, which waits, and SECCOMP_IOCTL_NOTIF_ID_VALID.
const (
	notifReceive = 0xc0502100
	notifValid   = 0x40082102
)

var harmless = map[int]bool{
	unix.SYS_MMAP: true, unix.SYS_MUNMAP: true, unix.SYS_MPROTECT: true, unix.SYS_MADVISE: true, unix.SYS_BRK: true,
	unix.SYS_MREMAP: true, unix.SYS_FUTEX: true, unix.SYS_SCHED_YIELD: true, unix.SYS_SCHED_GETAFFINITY: true,
	unix.SYS_SET_TID_ADDRESS: true, unix.SYS_EXIT: true, unix.SYS_SET_ROBUST_LIST: true, unix.SYS_RSEQ: true,
	unix.SYS_ARCH_PRCTL: true, unix.SYS_GETTID: true, unix.SYS_GETPID: true, unix.SYS_RT_SIGACTION: true,
	unix.SYS_RT_SIGPROCMASK: true, unix.SYS_RT_SIGRETURN: true, unix.SYS_SIGALTSTACK: true, unix.SYS_TGKILL: true,
	unix.SYS_NANOSLEEP: true, unix.SYS_CLOCK_NANOSLEEP: true, unix.SYS_CLOCK_GETTIME: true, unix.SYS_GETTIMEOFDAY: true,
	unix.SYS_TIMER_CREATE: true, unix.SYS_TIMER_SETTIME: true, unix.SYS_TIMER_DELETE: true, unix.SYS_EPOLL_PWAIT: true,
	unix.SYS_RESTART_SYSCALL: true, unix.SYS_GETRANDOM: true, unix.SYS_UNAME: true, unix.SYS_PRLIMIT64: true,
	unix.SYS_GETRUSAGE: true, unix.SYS_FSTAT: true, unix.SYS_NEWFSTATAT: true, unix.SYS_READLINKAT: true, unix.SYS_FCNTL: true,
	unix.SYS_PREAD64: true, unix.SYS_LSEEK: true, unix.SYS_GETDENTS64: true, unix.SYS_EPOLL_CTL: true, unix.SYS_EPOLL_CREATE1: true,
	unix.SYS_EVENTFD2: true, unix.SYS_PRCTL: true, unix.SYS_FACCESSAT: true, unix.SYS_FACCESSAT2: true, unix.SYS_STATFS: true,
	unix.SYS_FSTATFS: true, unix.SYS_POLL: true, unix.SYS_PPOLL: true, unix.SYS_GETPPID: true, unix.SYS_GETUID: true,
	unix.SYS_GETEUID: true, unix.SYS_GETGID: true, unix.SYS_GETEGID: true, unix.SYS_CAPGET: true, unix.SYS_GETCWD: true,
	unix.SYS_STAT: true, unix.SYS_LSTAT: true, unix.SYS_ACCESS: true, unix.SYS_GETSOCKNAME: true, unix.SYS_GETSOCKOPT: true,
	unix.SYS_GETPEERNAME: true, unix.SYS_GETITIMER: true, unix.SYS_GETSID: true, unix.SYS_PROCESS_VM_READV: true,
	unix.SYS_SYSINFO: true, unix.SYS_KCMP: true, unix.SYS_PIDFD_OPEN: true, unix.SYS_SCHED_SETAFFINITY: true,
}

var errnos = map[string]syscall.Errno{"ENOSPC": syscall.ENOSPC, "EMFILE": syscall.EMFILE, "EINTR": syscall.EINTR, "ENOMEM": syscall.ENOMEM}

// paths are the calls that name a file, and by which argument.
var paths = map[int]struct {
	name string
	arg  int
}{
	unix.SYS_OPENAT: {"openat", 1}, unix.SYS_UNLINKAT: {"unlinkat", 1}, unix.SYS_UNLINK: {"unlink", 0},
	unix.SYS_RENAME: {"rename", 0}, unix.SYS_RENAMEAT: {"renameat", 1}, unix.SYS_RENAMEAT2: {"renameat2", 1},
	unix.SYS_MKDIRAT: {"mkdirat", 1}, unix.SYS_MKDIR: {"mkdir", 0}, unix.SYS_RMDIR: {"rmdir", 0},
	unix.SYS_NEWFSTATAT: {"newfstatat", 1}, unix.SYS_READLINKAT: {"readlinkat", 1}, unix.SYS_EXECVE: {"execve", 0},
	unix.SYS_FCHMODAT: {"fchmodat", 1}, unix.SYS_FCHOWNAT: {"fchownat", 1}, unix.SYS_MOUNT: {"mount", 1},
	unix.SYS_UMOUNT2: {"umount2", 0}, unix.SYS_FACCESSAT: {"faccessat", 1}, unix.SYS_STATFS: {"statfs", 0},
}

// described are others that are worth a name.
var described = map[int]string{
	unix.SYS_READ: "read", unix.SYS_WRITE: "write", unix.SYS_CLOSE: "close", unix.SYS_FLOCK: "flock", unix.SYS_FSTAT: "fstat",
	unix.SYS_FCNTL: "fcntl", unix.SYS_CLONE: "clone", unix.SYS_EXIT_GROUP: "exit_group", unix.SYS_SOCKET: "socket",
	unix.SYS_CONNECT: "connect", unix.SYS_BIND: "bind", unix.SYS_LISTEN: "listen", unix.SYS_ACCEPT4: "accept4",
	unix.SYS_SENDMSG: "sendmsg", unix.SYS_RECVMSG: "recvmsg", unix.SYS_IOCTL: "ioctl", unix.SYS_PIPE2: "pipe2",
	unix.SYS_DUP3: "dup3", unix.SYS_WAIT4: "wait4", unix.SYS_WAITID: "waitid", unix.SYS_POLL: "poll",
	unix.SYS_FALLOCATE: "fallocate", unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_PWRITE64: "pwrite64", unix.SYS_PREAD64: "pread64",
	unix.SYS_EPOLL_CTL: "epoll_ctl", unix.SYS_EPOLL_CREATE1: "epoll_create1", unix.SYS_EVENTFD2: "eventfd2",
	unix.SYS_GETDENTS64: "getdents64", unix.SYS_PIDFD_OPEN: "pidfd_open", unix.SYS_PIDFD_GETFD: "pidfd_getfd",
	unix.SYS_PRCTL: "prctl", unix.SYS_FCHMOD: "fchmod", unix.SYS_FCHOWN: "fchown", unix.SYS_MEMFD_CREATE: "memfd_create",
	unix.SYS_KILL: "kill", unix.SYS_PROCESS_VM_READV: "process_vm_readv", unix.SYS_PROCESS_VM_WRITEV: "process_vm_writev",
	unix.SYS_CAPSET: "capset", unix.SYS_CAPGET: "capget", unix.SYS_UMASK: "umask", unix.SYS_SETNS: "setns",
	unix.SYS_UNSHARE: "unshare", unix.SYS_SECCOMP: "seccomp", unix.SYS_CLONE3: "clone3",
}

func describe(tid, number int, args [6]uint64) string {
	if p, ok := paths[number]; ok {
		return fmt.Sprintf("%s(%q)", p.name, textAt(tid, args[p.arg]))
	}
	name := described[number]
	if name == "" {
		return fmt.Sprintf("system call %d", number)
	}
	link := descriptor(tid, args[0])
	if number == unix.SYS_IOCTL {
		link += fmt.Sprintf(", %#x", args[1])
	}
	return name + "(" + link + ")"
}

// descriptor is what a file descriptor of another process is.
func descriptor(tid int, fd uint64) string {
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", tid, int32(fd)))
	if err != nil {
		return fmt.Sprintf("%#x", fd)
	}
	return link
}

// textAt reads a string of another process.
func textAt(tid int, at uint64) string {
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", tid))
	if err != nil {
		return "?"
	}
	defer memory.Close()
	b := make([]byte, 256)
	n, _ := memory.ReadAt(b, int64(at))
	text, _, _ := bytes.Cut(b[:n], []byte{0})
	return string(text)
}
