package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// keepDeviceNodes stops the driver's libraries in the container from making nodes for GPUs that it was not given:
// libnvidia-ml and nvidia-modprobe do so when the driver's parameters, which params is, say "ModifyDeviceFiles: 1".
// The container sees a copy that says 0. Without an NVIDIA driver there is nothing to do.
func keepDeviceNodes(r root, runDir, params string) error {
	text, err := os.ReadFile(params)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	target, err := r.open(params, unix.O_PATH, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil // a container without /proc
	}
	if err != nil {
		return err
	}
	defer unix.Close(target)
	copied := filepath.Join(runDir, "nvidia-params")
	if err := replaceFile(copied, strings.ReplaceAll(string(text), "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0")); err != nil {
		return err
	}
	to := "/proc/self/fd/" + strconv.Itoa(target)
	if err := unix.Mount(copied, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount over %s: %w", params, err)
	}
	// The descriptor still is the file below the mount: look it up again.
	mounted, err := r.open(params, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(mounted)
	to = "/proc/self/fd/" + strconv.Itoa(mounted)
	if err := unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", params, err)
	}
	return nil
}

// replaceFile writes a file below the run directory unless it has that content already.
func replaceFile(path, content string) error {
	if have, err := os.ReadFile(path); err == nil && string(have) == content {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".params-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after the rename
	_, err = f.WriteString(content)
	if err == nil {
		err = f.Chmod(0o444)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	return err
}
