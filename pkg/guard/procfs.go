package guard

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxScan bounds the processes looked at for a file; a container that has more hides it from itself only: the guard frees
// a UVM range before it forgets it.
const maxScan = 4096

// containerProcesses lists the processes in the container's cgroup and below.
func containerProcesses(initPID int) []int {
	if initPID == 0 {
		return nil
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(initPID) + "/cgroup")
	if err != nil {
		return nil
	}
	// "4:devices:/docker/…" with cgroup v1, "0::/…" with v2. Any hierarchy that the engine made will do.
	for line := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || parts[2] == "/" {
			continue
		}
		root := "/sys/fs/cgroup"
		switch parts[1] {
		case "devices":
			root += "/devices"
		case "":
			if _, err := os.Stat(root + "/cgroup.controllers"); err != nil {
				continue
			}
		default:
			continue
		}
		var pids []int
		_ = filepath.WalkDir(root+parts[2], func(path string, d os.DirEntry, err error) error {
			if err != nil || len(pids) >= maxScan {
				return filepath.SkipDir
			}
			if d.Name() == "cgroup.procs" {
				list, _ := os.ReadFile(path)
				for f := range bytes.FieldsSeq(list) {
					if pid, err := strconv.Atoi(string(f)); err == nil && pid > 0 {
						pids = append(pids, pid)
					}
				}
			}
			return nil
		})
		return pids
	}
	return nil
}

// eachFile calls f with a copy of every descriptor of a process that is one of NVIDIA's nodes, until f returns true.
func eachFile(tgid int, nodes *nodeTable, f func(fd int) bool) bool {
	dir, err := os.Open("/proc/" + strconv.Itoa(tgid) + "/fd")
	if err != nil {
		return false
	}
	defer dir.Close()
	pidfd, err := unix.PidfdOpen(tgid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(pidfd)
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			number, err := strconv.Atoi(name)
			if err != nil {
				continue
			}
			// stat through the link costs less than copying every descriptor, and opens nothing.
			var st unix.Stat_t
			if unix.Stat("/proc/"+strconv.Itoa(tgid)+"/fd/"+name, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || !nodes.knows(&st) {
				continue
			}
			fd, err := unix.PidfdGetfd(pidfd, number, 0)
			if err != nil {
				continue
			}
			if f(fd) {
				return true
			}
			_ = unix.Close(fd)
		}
		if err != nil || len(names) == 0 {
			return false
		}
	}
}

func (t *nodeTable) knows(st *unix.Stat_t) bool {
	if t.byInode != nil {
		_, ok := t.byInode[inode{st.Dev, st.Ino}]
		return ok
	}
	_, ok := t.byRdev[st.Rdev]
	return ok
}

// processHolds reports that a process has the same file open as the guard's descriptor.
func processHolds(self, tgid, held int, nodes *nodeTable) bool {
	return eachFile(tgid, nodes, func(fd int) bool {
		if kcmpSame(self, fd, held) {
			_ = unix.Close(fd)
			return true
		}
		return false
	})
}

// findFile copies a followed file back from a process that has it; -1 if it does not.
func findFile(self, tgid int, f *file, nodes *nodeTable) int {
	found := -1
	eachFile(tgid, nodes, func(fd int) bool {
		if same, _ := kcmpWeak(self, fd, f.epfd, f.tfd); same {
			found = fd
		}
		return found >= 0
	})
	return found
}
