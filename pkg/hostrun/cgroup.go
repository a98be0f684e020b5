// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/opencontainers/cgroups"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// cgroupRoot is where the hierarchies are; the guard looks there too (pkg/guard, cgroupOf).
const cgroupRoot = "/sys/fs/cgroup"

// cgroupPrefix begins the name of every run's cgroup; its nonce follows.
const cgroupPrefix = "cgpu-run-"

// hierarchy is a cgroup of a process in one of the trees of cgroups.
type hierarchy struct {
	root, path string // path begins with a slash; alone that is the root's
}

func (h hierarchy) dir() string { return filepath.Join(h.root, h.path) }

// hierarchies are those of paths (of /proc/PID/cgroup) that have one of the controllers; "" is cgroup v2. One that several controllers
// share comes once. mounted is where that of a controller is.
func hierarchies(paths map[string]string, mounted func(controller string) (string, error), controllers []string) []hierarchy {
	var list []hierarchy
	for _, c := range controllers {
		path := paths[c]
		// "/../x" is what a process sees that is outside of its own cgroup namespace.
		if !strings.HasPrefix(path, "/") || strings.Contains(path, "/..") {
			continue
		}
		if root, err := mounted(c); err == nil && !slices.Contains(list, hierarchy{root, path}) {
			list = append(list, hierarchy{root, path})
		}
	}
	return list
}

// cgroupsOf reads the cgroups of a process, of the given controllers of v1, or of v2 where that is alone: then those of v1, which
// /proc tells of all the same where the kernel has them, are not to be seen here.
func cgroupsOf(pid int, controllers ...string) ([]hierarchy, error) {
	paths, err := cgroups.ParseCgroupFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return nil, err
	}
	mounted := func(controller string) (string, error) { return cgroups.FindCgroupMountpoint(cgroupRoot, controller) }
	if cgroups.IsCgroup2UnifiedMode() {
		controllers, mounted = []string{""}, func(string) (string, error) { return cgroupRoot, nil }
	}
	return hierarchies(paths, mounted, controllers), nil
}

// Home is where the caller has started us.
type Home struct {
	watched []hierarchy // in which the guard looks for a run's processes
	left    []hierarchy // which this process has left and has to enter again; not those of watched
}

// HomeOf is that of another process, which stays where it is.
func HomeOf(pid int) (Home, error) {
	watched, err := cgroupsOf(pid, "devices", "cpuacct")
	if err == nil && len(watched) == 0 {
		err = fmt.Errorf("run: there is no cgroup hierarchy below %s (v2, or devices of v1): mount it", cgroupRoot)
	}
	return Home{watched: watched}, err
}

// StepOut takes this process out of the cgroups in which the caller can freeze it, if they are his: it takes the node's locks,
// and others would wait for them. What is not allowed, in a container say, is left out.
func StepOut() (Home, error) {
	home, err := HomeOf(os.Getpid())
	if err != nil {
		return Home{}, err
	}
	ends, err := cgroupsOf(os.Getpid(), "freezer", "name=systemd")
	if err != nil {
		return Home{}, err
	}
	for _, h := range ends {
		if h.path != "/" && cgroups.WriteCgroupProc(h.root, os.Getpid()) == nil && !slices.Contains(home.watched, h) {
			home.left = append(home.left, h)
		}
	}
	return home, nil
}

// Return enters again what StepOut has left, but for the hierarchies in which the run gets folders of its own.
func (home Home) Return() error {
	for _, h := range home.left {
		if err := cgroups.WriteCgroupProc(h.dir(), os.Getpid()); err != nil {
			return fmt.Errorf("run: return to the caller's cgroup: %w", err)
		}
	}
	return nil
}

// Cgroups are the folders that a run gets, below those of the caller, so that whatever limits his session or his batch job
// limits the run as well: in the hierarchies in which the guard looks for a container's processes and for their CPU time.
func (home Home) Cgroups(nonce string) []string { return runFolders(home.watched, nonce) }

// runFolders are the folders of a run whose caller is in the cgroups of list. Below the root of a hierarchy there is one more,
// which stays: nobody may write in a root without a capability, and the guard, which removes the run's folder, has given up
// all such.
func runFolders(list []hierarchy, nonce string) []string {
	var dirs []string
	for _, h := range list {
		parent := h.dir()
		if h.path == "/" {
			parent = filepath.Join(parent, "cgpu")
		}
		dirs = append(dirs, filepath.Join(parent, cgroupPrefix+nonce))
	}
	return dirs
}

// makeCgroups makes the folders and moves a process into them.
func makeCgroups(pid int, dirs []string, hidden []device.Node) error {
	for _, dir := range dirs {
		err := os.Mkdir(dir, 0o755)
		// Above it only our own folder is made, as runFolders has it. The caller's, if it is gone, went with his session.
		if parent := filepath.Dir(dir); errors.Is(err, fs.ErrNotExist) && filepath.Base(parent) == "cgpu" {
			_ = os.Mkdir(parent, 0o755)
			err = os.Mkdir(dir, 0o755)
		}
		if err != nil {
			return fmt.Errorf("make the cgroup: %w", err)
		}
		if err := denyDevices(dir, hidden); err != nil {
			return err
		}
		if err := cgroups.WriteCgroupProc(dir, pid); err != nil {
			return fmt.Errorf("enter the cgroup: %w", err)
		}
	}
	return nil
}

// boundMemory bounds the host's memory of a run in cgroup v2, of which none is swapped, if the folder that its is in is ours or lets it.
func boundMemory(dirs []string, most quota.Bytes) error {
	if most == 0 || !cgroups.IsCgroup2UnifiedMode() {
		return nil
	}
	for _, dir := range dirs {
		// Where this is refused the file is not there.
		_ = cgroups.WriteFile(filepath.Dir(dir), "cgroup.subtree_control", "+memory")
		if err := boundFolder(dir, most); err != nil {
			return err
		}
	}
	return nil
}

func boundFolder(dir string, most quota.Bytes) error {
	for file, value := range map[string]string{"memory.max": strconv.FormatUint(uint64(most), 10), "memory.swap.max": "0"} {
		if err := cgroups.WriteFile(dir, file, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// SweepCgroups removes what killed guards have left beside the folders of a new run: those that belong to no reservation. The
// kernel keeps one that has processes.
func SweepCgroups(dirs []string, alive func(nonce string) bool) {
	found := map[string]string{} // all, before the first is asked for
	for _, dir := range dirs {
		// Not Glob: systemd's names have backslashes.
		beside, _ := os.ReadDir(filepath.Dir(dir))
		for _, e := range beside {
			if nonce, ok := strings.CutPrefix(e.Name(), cgroupPrefix); ok {
				found[filepath.Join(filepath.Dir(dir), e.Name())] = nonce
			}
		}
	}
	for dir, nonce := range found {
		if !alive(nonce) {
			_ = syscall.Rmdir(dir)
		}
	}
}

// Cgroups are the cgroups of runs anywhere on the machine, each with the nonce of its run.
func Cgroups() map[string]string { return cgroupsBelow(cgroupRoot) }

func cgroupsBelow(root string) map[string]string {
	found := map[string]string{}
	_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil // it went meanwhile
		}
		if nonce, ok := strings.CutPrefix(e.Name(), cgroupPrefix); ok {
			found[path] = nonce
			return fs.SkipDir
		}
		return nil
	})
	return found
}

// denyDevices forbids the nodes of other GPUs, for a command of root's, which could make them. Only cgroup v1 has a file for
// that; elsewhere the guard stands alone, which refuses all calls on a GPU that it was not given.
func denyDevices(dir string, hidden []device.Node) error {
	const deny = "devices.deny"
	if _, err := os.Stat(filepath.Join(dir, deny)); err != nil {
		return nil
	}
	for _, n := range hidden {
		if n.Bind { // a simulated one has the numbers of /dev/null
			continue
		}
		if err := cgroups.WriteFile(dir, deny, fmt.Sprintf("c %d:%d rwm", n.Major, n.Minor)); err != nil {
			return fmt.Errorf("forbid the run the GPU at %s: %w", n.Path, err)
		}
	}
	return nil
}

// forbidden are the nodes of NVIDIA's driver that the run must not have: other GPUs, and ways around the guard.
func forbidden(p spec.Plan) []device.Node {
	list := slices.Clone(p.Hidden)
	for _, n := range p.Common {
		switch {
		case n.Bind:
		case n.Path == "/dev/nvidia-uvm": // NV_UVM_TOOLS_MINOR
			list = append(list, device.Node{Path: "/dev/nvidia-uvm-tools", Major: n.Major, Minor: 1})
		case n.Path == "/dev/nvidiactl": // NV_MINOR_DEVICE_NUMBER_MODESET_DEVICE
			list = append(list, device.Node{Path: "/dev/nvidia-modeset", Major: n.Major, Minor: 254})
		}
	}
	return list
}

// Leave takes this process out of the cgroups by which a session or a batch job is ended: the guard, which it will be, has to
// outlive the last process of the run by a moment, to give the reservation back. Where that is not allowed cgpu gc does it.
func Leave() { _, _ = StepOut() }
