// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
)

// Who holds a write lease on a file makes everybody wait who opens it, for 45 seconds (fcntl(2), F_SETLEASE). Root in a container may take
// one on each file of root's that it sees, and a mount that is read-only does not stand in the way.

// givenFiles are those that somebody outside has put into this container: files that are mounted, and those of its cgroup by which a
// guard finds its processes and their CPU time. (The other hierarchies of cgroup v1 are the engine's business.)
func givenFiles() ([]string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var paths []string
	add := func(path string) {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(line, " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 5 {
			continue
		}
		add(fields[4])
		v2, v1 := strings.HasPrefix(after, "cgroup2 "), strings.HasPrefix(after, "cgroup ")
		if v2 || v1 && strings.Contains(after, "devices") {
			add(filepath.Join(fields[4], "cgroup.procs"))
		}
		if v2 || v1 && strings.Contains(after, "cpuacct") {
			add(filepath.Join(fields[4], "cpuacct.usage"))
			add(filepath.Join(fields[4], "cpu.stat"))
		}
	}
	return paths, nil
}

// lease is a lease of this process.
type lease struct {
	path string
	f    *os.File
}

// takeLeases takes what leases it gets.
func takeLeases(paths []string) (got []lease) {
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
			f.Close()
			continue
		}
		got = append(got, lease{path, f})
	}
	return got
}

// broken: somebody opened the file.
func (l lease) broken() bool {
	kind, err := unix.FcntlInt(l.f.Fd(), unix.F_GETLEASE, 0)
	return err != nil || kind != unix.F_WRLCK
}

// cmdLease holds leases and tells of each whose file is opened by somebody, who is then let pass.
func cmdLease(args []string) error {
	fs := flag.NewFlagSet("lease", flag.ExitOnError)
	_ = fs.Parse(args)
	paths, err := givenFiles()
	if err != nil {
		return err
	}
	held := takeLeases(paths)
	for _, l := range held {
		print("lease=%s", l.path)
	}
	print("files=%d\nready=1", len(paths))
	for ; ; time.Sleep(2 * time.Millisecond) {
		held = slices.DeleteFunc(held, func(l lease) bool {
			if !l.broken() {
				return false
			}
			print("broken=%s", l.path)
			l.f.Close()
			return true
		})
	}
}

// hostPIDs is the first PID namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h).
const hostPIDs = "pid:[4026531836]"

// hostileLease takes leases on what other containers have too, and on what is read outside while this one runs. What is this container's
// alone it may have: where it is opened it is opened by this container.
func hostileLease(hostileOptions) error {
	p, err := page.Read(page.Path)
	if err == nil && p.Header().Flags&page.FlagPreload != 0 {
		return skip("in preload mode there is nobody to hold files; each container has its own")
	}
	if ns, _ := os.Readlink("/proc/self/ns/pid"); ns == hostPIDs {
		return skip("in a cgpu run root is the machine's")
	}
	paths, err := givenFiles()
	if err != nil {
		return err
	}
	// Of docker's own and of ours.
	own := []string{"/etc/resolv.conf", "/etc/hostname", "/etc/hosts", "/etc/ld.so.preload", "/proc/driver/nvidia/params"}
	paths = slices.DeleteFunc(paths, func(path string) bool { return slices.Contains(own, path) })
	var bad []error
	for _, l := range takeLeases(paths) {
		bad = append(bad, fmt.Errorf("got a lease on %s", l.path))
		l.f.Close()
	}
	print("files=%d", len(paths))
	return errors.Join(bad...)
}
