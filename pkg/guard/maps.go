package guard

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// uvmSpans lists the mappings of managed memory of a process: shared, and with their own address as the offset in the file, as
// UVM requires of its mappings (uvm_mmap) and nothing else does by chance. Neither name nor inode of the file would do: a
// container can make other nodes of the device.
func uvmSpans(tgid int, now time.Time) []span {
	f, err := os.Open("/proc/" + strconv.Itoa(tgid) + "/maps")
	if err != nil {
		return nil
	}
	defer f.Close()
	var list []span
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 16<<10), 64<<10) // a path has at most 4096 bytes, and each may be written as four
	for lines.Scan() && len(list) < maxSpans {
		if base, end, ok := parseUVMMap(lines.Bytes()); ok {
			list = append(list, span{base: base, end: end, seen: now})
		}
	}
	return list
}

// parseUVMMap reads a line of /proc/PID/maps: "7fa2e6000000-7fa2f6000000 rw-s 7fa2e6000000 00:06 144 /dev/nvidia-uvm".
func parseUVMMap(line []byte) (base, end uint64, ok bool) {
	i := bytes.IndexByte(line, '-')
	if i <= 0 {
		return 0, 0, false
	}
	first := line[:i]
	rest := line[i+1:]
	j := bytes.IndexByte(rest, ' ')
	if j < 0 || len(rest) < j+6 || rest[j+4] != 's' {
		return 0, 0, false
	}
	offset := rest[j+6:]
	if k := bytes.IndexByte(offset, ' '); k >= 0 {
		offset = offset[:k]
	}
	// The kernel pads both with zeros to eight digits.
	if !bytes.Equal(first, offset) {
		return 0, 0, false
	}
	base, err := strconv.ParseUint(string(first), 16, 64)
	if err != nil || base == 0 {
		return 0, 0, false
	}
	end, err = strconv.ParseUint(string(rest[:j]), 16, 64)
	return base, end, err == nil && end > base
}

// sharesMaps reports that a process has the address space of another one that was looked at (vfork, CLONE_VM).
func sharesMaps(tgid int, list []span, found map[int][]span) bool {
	for other, same := range found {
		if !slices.EqualFunc(list, same, func(a, b span) bool { return a.base == b.base && a.end == b.end }) {
			continue
		}
		if r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(tgid), uintptr(other), kcmpVM, 0, 0, 0); e == 0 && r == 0 {
			return true
		}
	}
	return false
}

// cpuTime is what the container has used of the CPUs, by its cgroup. False: that cannot be read.
func cpuTime(initPID int) (time.Duration, bool) {
	if initPID == 0 {
		return 0, false
	}
	if dir, ok := cgroupOf(initPID, "cpuacct"); ok {
		if b, err := os.ReadFile(filepath.Join(dir, "cpuacct.usage")); err == nil {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
			return time.Duration(n), err == nil
		}
	}
	dir, ok := cgroupOf(initPID, "")
	if !ok {
		return 0, false
	}
	b, err := os.ReadFile(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return 0, false
	}
	for line := range bytes.Lines(b) {
		if value, ok := bytes.CutPrefix(line, []byte("usage_usec ")); ok {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(value)), 10, 64)
			return time.Duration(n) * time.Microsecond, err == nil
		}
	}
	return 0, false
}

// killProcess kills a process of the container. The guard has not the capability to send signals to another user's processes;
// but it may trace them, and the kernel kills what a tracer that asked for it leaves behind (PTRACE_O_EXITKILL, kernel/ptrace.c,
// exit_ptrace). A tracer is a thread, so this one ends.
func (g *Guard) killProcess(tgid int) {
	pidfd, err := unix.PidfdOpen(tgid, 0)
	if err != nil {
		return // gone
	}
	defer unix.Close(pidfd)
	if !slices.Contains(containerProcesses(g.firstPID()), tgid) {
		return // the number is another's by now
	}
	if unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) == nil {
		return
	}
	failed := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock it: the thread ends with this function
		_, _, e := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(tgid), 0, ptraceExitKill, 0, 0)
		if e != 0 {
			failed <- e
			return
		}
		failed <- nil
	}()
	if err := <-failed; err != nil {
		g.log.Error("cannot kill a process; its RM clients are freed instead", "pid", tgid, "err", err)
		g.killClients(func(c *client) bool { return c.tgid == tgid })
	}
}

const (
	kcmpVM         = 1       // KCMP_VM
	ptraceSeize    = 0x4206  // PTRACE_SEIZE
	ptraceExitKill = 1 << 20 // PTRACE_O_EXITKILL
)
