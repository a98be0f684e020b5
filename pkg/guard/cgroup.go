// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// cgroups are the folders of the container's cgroup. They are looked up once, when its first process has just begun: later that may
// have moved itself further down (systemd in a container does), and others would be missed.
type cgroups struct {
	procs string // where its processes are listed; empty: not known
	cpu   string // where the CPU time that they have used is told
	quota string // where its quota of CPU time stands, if it has one; one above it (a pod's) binds it too
}

// cgroupsOf finds the cgroup that the engine has put a process into.
func cgroupsOf(pid int) (c cgroups) {
	for _, controller := range []string{"devices", ""} {
		if dir, ok := cgroupOf(pid, controller); ok {
			c.procs = dir
			break
		}
	}
	for _, controller := range []string{"cpuacct", ""} {
		if dir, ok := cgroupOf(pid, controller); ok {
			if _, ok := cpuUsage(dir); ok {
				c.cpu = dir
				break
			}
		}
	}
	for _, controller := range []string{"cpu", ""} {
		if dir, ok := cgroupOf(pid, controller); ok {
			c.quota = dir
			break
		}
	}
	return c
}

// cpuQuota is how many CPUs the container may use; 0: there is no bound.
func (c cgroups) cpuQuota() (cpus float64) {
	for dir := range selfAndAncestors(c.quota) {
		if q := quotaOf(dir); q > 0 && (cpus == 0 || q < cpus) {
			cpus = q
		}
	}
	return cpus
}

// selfAndAncestors are a cgroup's folder and those above it.
func selfAndAncestors(dir string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for ; len(dir) > len(cgroupRoot) && yield(dir); dir = filepath.Dir(dir) {
		}
	}
}

// quotaOf reads a cgroup's quota: with v2 "max 100000" or "20000 100000" in cpu.max, µs of each period; with v1 two files, -1 for none.
func quotaOf(dir string) float64 {
	text, err := os.ReadFile(filepath.Join(dir, quotaFileV2))
	if err != nil {
		quota, _ := os.ReadFile(filepath.Join(dir, quotaFileV1))
		period, _ := os.ReadFile(filepath.Join(dir, periodFileV1))
		text = slices.Concat(quota, []byte(" "), period)
	}
	var quota, period float64
	if n, _ := fmt.Sscan(string(text), &quota, &period); n != 2 || quota <= 0 || period <= 0 {
		return 0
	}
	return quota / period
}

// leasable are those that are read again and again. The container sees them too, and they belong to who is root in it.
func (c cgroups) leasable() (paths []string) {
	if c.procs != "" {
		paths = append(paths, filepath.Join(c.procs, procsFile))
	}
	if c.cpu != "" {
		paths = append(paths, filepath.Join(c.cpu, cpuFileV1), filepath.Join(c.cpu, cpuFileV2))
	}
	for dir := range selfAndAncestors(c.quota) {
		for _, name := range []string{quotaFileV1, periodFileV1, quotaFileV2} {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	return paths
}

const (
	procsFile = "cgroup.procs"
	cpuFileV1 = "cpuacct.usage"
	cpuFileV2 = "cpu.stat"

	quotaFileV1  = "cpu.cfs_quota_us"
	periodFileV1 = "cpu.cfs_period_us"
	quotaFileV2  = "cpu.max"

	cgroupRoot = "/sys/fs/cgroup"
)

// processes lists those in the container's cgroup and below. All of them: any bound would be a place to hide behind.
func (c cgroups) processes() []int {
	if c.procs == "" {
		return nil
	}
	var pids []int
	_ = filepath.WalkDir(c.procs, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return filepath.SkipDir
		}
		if d.Name() == procsFile {
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

// cgroupOf is the folder of a process' cgroup: with cgroup v1 in the hierarchy of a controller, with v2 ("") in the only one.
// False: it is in none that an engine made for it. With v1 a thread that has ended is in the root's.
func cgroupOf(pid int, controller string) (string, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(livingThread(pid)) + "/cgroup")
	if err != nil {
		return "", false
	}
	// "4:cpu,cpuacct:/docker/…" with v1, "0::/…" with v2.
	for line := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || parts[2] == "/" || !slices.Contains(strings.Split(parts[1], ","), controller) {
			continue
		}
		root := cgroupRoot
		if controller != "" {
			root += "/" + controller // a link where controllers share a hierarchy
		} else if _, err := os.Stat(root + "/cgroup.controllers"); err != nil {
			continue
		}
		return root + parts[2], true
	}
	return "", false
}

// cpuUsage reads from a cgroup's folder what it has used of the CPUs.
func cpuUsage(dir string) (time.Duration, bool) {
	f, err := openUsage(dir)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	return readUsage(f)
}

// openUsage opens where that is told: with v1 cpuacct.usage, with v2 cpu.stat.
func openUsage(dir string) (*os.File, error) {
	f, err := os.Open(filepath.Join(dir, cpuFileV1))
	if err != nil {
		f, err = os.Open(filepath.Join(dir, cpuFileV2))
	}
	return f, err
}

// readUsage reads it: with v1 ns and nothing else, with v2 a line "usage_usec N", the first one.
func readUsage(f *os.File) (time.Duration, bool) {
	var buf [1024]byte
	n, err := f.ReadAt(buf[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, false
	}
	unit := time.Nanosecond
	for line := range bytes.Lines(buf[:n]) {
		if value, ok := bytes.CutPrefix(line, []byte("usage_usec ")); ok {
			line, unit = value, time.Microsecond
		}
		if n, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 10, 64); err == nil {
			return time.Duration(n) * unit, true
		}
	}
	return 0, false
}

func (g *Guard) containerCgroups() cgroups {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cgroups
}
