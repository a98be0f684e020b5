// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"fmt"
	"iter"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/proc"
)

// livingThread is a thread of a process that has not ended: the first one as a rule. When that has ended and others go on, the kernel tells
// nothing of the process by its own number: no memory maps, no mounts, no descriptors.
func livingThread(tgid int) int {
	for range livingTries {
		if hasNamespace(tgid) {
			return tgid
		}
		others := false
		for tid := range proc.Threads(tgid) {
			if tid != tgid && hasNamespace(tid) {
				return tid
			}
			others = others || tid != tgid
		}
		if !others {
			break
		}
	}
	return tgid // gone
}

// livingTries bounds how often a process is looked at whose threads end, and leave the work to new ones, before they can be looked at.
const livingTries = 16

func hasNamespace(tid int) bool {
	var st unix.Stat_t
	return unix.Stat("/proc/"+strconv.Itoa(tid)+"/ns/mnt", &st) == nil
}

// openThread opens a thread; other than the first of its process before Linux 6.9 it cannot.
func openThread(tid, tgid int) (pidfd int, err error) {
	if tid == tgid {
		return unix.PidfdOpen(tid, 0)
	}
	return unix.PidfdOpen(tid, pidfdThread)
}

// place is a descriptor of a thread, whose descriptor table may be one of its own.
type place struct{ tgid, tid, fd int }

// eachTable calls f with copies of all descriptors of a process that are NVIDIA's, until f returns false. The copies are f's. Threads
// can have descriptor tables of their own.
func eachTable(tgid int, nodes *nodeTable, f func(fd int, at place) bool) {
	first := livingThread(tgid)
	if !eachFile(tgid, first, livingThread, nodes, f) {
		return
	}
	for tid := range proc.Threads(tgid) {
		if tid == first {
			continue
		}
		if r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(tid), uintptr(first), kcmpFiles, 0, 0, 0); e == 0 && r == 0 {
			continue
		}
		if !eachFile(tgid, tid, nil, nodes, f) {
			return
		}
	}
}

// eachFile is eachTable of a thread. When that ends before its descriptors are all copied, next may name another that has the same.
func eachFile(tgid, tid int, next func(tgid int) int, nodes *nodeTable, f func(fd int, at place) bool) bool {
	pidfd, err := openThread(tid, tgid)
	if err != nil {
		return true // gone, or before Linux 6.9
	}
	defer func() { _ = unix.Close(pidfd) }()
	for number := range descriptorNumbers(tid) {
		fd, _, e := unix.RawSyscall(unix.SYS_PIDFD_GETFD, uintptr(pidfd), uintptr(number), 0)
		for i := 0; e == unix.ESRCH && next != nil && i < livingTries; i++ {
			if other := next(tgid); other != tid {
				if another, err := openThread(other, tgid); err == nil {
					_ = unix.Close(pidfd)
					pidfd, tid = another, other
				}
			}
			fd, _, e = unix.RawSyscall(unix.SYS_PIDFD_GETFD, uintptr(pidfd), uintptr(number), 0)
		}
		if e == unix.ESRCH || e == unix.EPERM {
			return true
		}
		if e != 0 {
			continue
		}
		var st unix.Stat_t
		if unix.Fstat(int(fd), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || !nodes.has(&st) {
			_ = unix.Close(int(fd))
			continue
		}
		if !f(int(fd), place{tgid, tid, number}) {
			return false
		}
	}
	return true
}

// smallTable is how many descriptors are tried one by one: up to here that costs less than to have them listed.
const smallTable = 1 << 10

// descriptorNumbers are those that a thread's descriptors can have. The guard may copy any process' descriptors (CAP_SYS_PTRACE), but not
// list /proc/PID/fd of another user's (that takes CAP_DAC_READ_SEARCH); /proc/PID/fdinfo it may, since Linux 5.14. A table can have room
// for more than can be tried: whoever copies a file to a high number makes it so large.
func descriptorNumbers(tid int) iter.Seq[int] {
	return func(yield func(int) bool) {
		size := tableSize(tid)
		if size > smallTable {
			if dir, err := os.Open("/proc/" + strconv.Itoa(tid) + "/fdinfo"); err == nil {
				defer dir.Close()
				for {
					names, err := dir.Readdirnames(1024)
					for _, name := range names {
						if number, err := strconv.Atoi(name); err == nil && !yield(number) {
							return
						}
					}
					if err != nil {
						return
					}
				}
			}
		}
		for number := range size {
			if !yield(number) {
				return
			}
		}
	}
}

// tableSize is how large a process' descriptor table is; 0 if it is gone.
func tableSize(tgid int) int { return max(0, statusNumber(tgid, "FDSize:", 0)) }

// euidOf is the effective user number of a process, as the host has it; -1 if it is gone.
func euidOf(tgid int) int { return statusNumber(tgid, "Uid:", 1) }

// statusNumber is a number in a line of /proc/PID/status; -1 if the process is gone.
func statusNumber(tgid int, key string, field int) int {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tgid) + "/status")
	if err != nil {
		return -1
	}
	for line := range bytes.Lines(b) {
		value, ok := bytes.CutPrefix(line, []byte(key))
		if fields := bytes.Fields(value); ok && len(fields) > field {
			if n, err := strconv.Atoi(string(fields[field])); err == nil {
				return n
			}
		}
	}
	return -1
}

// hasFile reports that a process has the same file open as the guard's descriptor.
func hasFile(self, tgid, held int, nodes *nodeTable) bool {
	found := false
	eachTable(tgid, nodes, func(fd int, _ place) bool {
		found = kcmpSame(self, fd, held)
		_ = unix.Close(fd)
		return !found
	})
	return found
}

// findFile copies a followed file back from a process that has it, and tells where it is; -1 if it does not.
func findFile(self, tgid int, f *file, nodes *nodeTable) (fd int, where place) {
	fd = -1
	eachTable(tgid, nodes, func(copied int, at place) bool {
		if order, e := f.compare(self, copied); e == 0 && order == kcmpEqual {
			fd, where = copied, at
			return false
		}
		_ = unix.Close(copied)
		return true
	})
	return fd, where
}

// readStatus reads what /proc/TID/status says of a thread: its process, that process' number in the innermost pid
// namespace, and its name.
func readStatus(tid int) (tgid, nspid int, name string, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
	if err != nil {
		return 0, 0, "", err
	}
	for line := range bytes.Lines(b) {
		key, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch string(key) {
		case "Name":
			name = string(value)
		case "Tgid":
			tgid, _ = strconv.Atoi(string(value))
		case "NStgid":
			fields := bytes.Fields(value)
			if len(fields) > 0 {
				nspid, _ = strconv.Atoi(string(fields[len(fields)-1]))
			}
		}
	}
	if tgid == 0 {
		return 0, 0, "", fmt.Errorf("/proc/%d/status has no Tgid", tid)
	}
	if nspid == 0 {
		nspid = tgid
	}
	return tgid, nspid, name, nil
}
