// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/inside"
)

// driverParams are the parameters of NVIDIA's driver.
const driverParams = "/proc/driver/nvidia/params"

// keepDeviceNodes stops the driver's libraries in the container from making nodes for GPUs that it was not given:
// libnvidia-ml and nvidia-modprobe do so when the driver's parameters, which params is, say "ModifyDeviceFiles: 1".
// The container sees a copy that says 0. Without an NVIDIA driver there is nothing to do.
//
// The copy is the container's alone: a tenant may hold a lease on what he sees (F_SETLEASE), and the next hook that opened it would wait
// for 45 seconds. It lies in a tmpfs that is there for a moment: a hook that is root of a user namespace may write nowhere on the host,
// and one that is killed leaves nothing.
func keepDeviceNodes(r root, params string) error {
	text, err := os.ReadFile(params)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	target, err := mounted(r, params)
	if errors.Is(err, os.ErrNotExist) {
		return nil // a container without /proc
	}
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if err := bindCopy(r, params, target, strings.ReplaceAll(string(text), "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0")); err != nil {
		return fmt.Errorf("mount over %s: %w", params, err)
	}
	// The descriptor still is the file below the mount: look it up again.
	copied, err := mounted(r, params)
	if err != nil {
		return err
	}
	defer unix.Close(copied)
	if err := unix.Mount("", fdPath(copied), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|inert, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", params, err)
	}
	return nil
}

// inert are the flags of a mount whose files are only read.
const inert = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// bindCopy mounts a file with the content over target, which is params. Its tmpfs covers the folder of params meanwhile.
func bindCopy(r root, params string, target int, content string) error {
	below, err := mounted(r, path.Dir(params))
	if err != nil {
		return err
	}
	defer unix.Close(below)
	if err := unix.Mount("cgpu", fdPath(below), "tmpfs", inert, "mode=755,size=64k,nr_inodes=4"); err != nil {
		return err
	}
	tmpfs, err := mounted(r, path.Dir(params))
	if err != nil {
		return err
	}
	defer unix.Close(tmpfs)
	file := path.Join(fdPath(tmpfs), path.Base(params))
	if err = os.WriteFile(file, []byte(content), 0o444); err == nil {
		err = unix.Mount(file, fdPath(target), "", unix.MS_BIND, "")
	}
	if unmountErr := unix.Unmount(fdPath(tmpfs), unix.MNT_DETACH); err == nil {
		err = unmountErr
	}
	return err
}

// mounted opens what is mounted in the root: /proc, where no link is on the way.
func mounted(r root, name string) (int, error) {
	return inside.Open(r.fd, name, unix.O_PATH, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_SYMLINKS)
}

// fdPath is the path of an open file.
func fdPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
