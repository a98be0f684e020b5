// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
)

// programTrees are where a host has what its programs consist of.
var programTrees = []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache"}

// Root is what a run has in the place of the host's files: programs and libraries to read, the driver's nodes, what of /proc and /sys
// everybody may see, and a little room in /tmp and /dev/shm. There is no socket of the host's in it, and nothing else to write to.
type Root struct {
	Folders []string // clean paths, beside those where a host has its programs; empty: the host's root
	stage   int
}

func (r *Root) isHosts() bool { return len(r.Folders) == 0 }

// namespaces are those of a run, by its root. Who sees no socket of the host's is to reach none by its network either.
func (r *Root) namespaces() int {
	if r.isHosts() {
		return unix.CLONE_NEWNS
	}
	return unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
}

// inert are the flags of what nobody runs.
const inert = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// build makes it, in a folder that may be covered then.
func (r *Root) build(dir string) error {
	if r.isHosts() {
		return nil
	}
	if err := mountTmpfs(dir, unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=1m,nr_inodes=1k"); err != nil {
		return err
	}
	for _, name := range []string{"dev", "proc", "sys", "tmp", filepath.Dir(page.Path)} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			return err
		}
	}
	err := errors.Join(
		mountTmpfs(filepath.Join(dir, "tmp"), inert, "mode=1777,size=1m,nr_inodes=64"),
		unix.Mount("/proc", filepath.Join(dir, "proc"), "", unix.MS_BIND|unix.MS_REC, ""), // with the driver's parameters
		unix.Mount("/sys", filepath.Join(dir, "sys"), "", unix.MS_BIND, ""),
		unix.Mount("", filepath.Join(dir, "sys"), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|inert, ""))
	if err != nil {
		return err
	}
	var had []string
	paths := slices.Concat(programTrees, r.Folders)
	slices.Sort(paths) // parents first
	for _, path := range paths {
		if slices.ContainsFunc(had, func(x string) bool { return strings.HasPrefix(path+"/", x+"/") }) {
			continue
		}
		had = append(had, path)
		if err := bringTree(path, filepath.Join(dir, path)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	r.stage, err = unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	return err
}

// bringTree puts a folder, a file or a link of the host's into a root, if it is there: to read. Who could write below a mount in it is
// root.
func bringTree(from, to string) error {
	info, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	switch {
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return bring(copyLink, from, to)
	case !info.IsDir():
		return bind(from, to, unix.MS_RDONLY|inert)
	}
	return errors.Join(bring(bindTree, from, to),
		unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""))
}

// enter makes it this thread's root, with the run's own /dev and limiter.
func (r *Root) enter() error {
	if r.isHosts() {
		return nil
	}
	defer unix.Close(r.stage)
	const shm = "/dev/shm"
	if err := errors.Join(os.Mkdir(shm, 0o755), mountTmpfs(shm, inert, "mode=1777,size=16m,nr_inodes=256"), sealDev()); err != nil {
		return err
	}
	if err := unix.Fchdir(r.stage); err != nil {
		return err
	}
	for _, own := range []string{"/dev", filepath.Dir(page.Path)} {
		if err := unix.Mount(own, own[1:], "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("take %s along: %w", own, err)
		}
	}
	// pivot_root(2): the old root lies over the new one then, until it is taken away.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	return errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/"),
		unix.Mount("", "/", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""))
}

func mountTmpfs(dir string, flags uintptr, options string) error {
	if err := unix.Mount("cgpu", dir, "tmpfs", flags, options); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	return nil
}
