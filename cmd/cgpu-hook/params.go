package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
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
	copied, err := unnamed(filepath.Join(runDir, "page"), strings.ReplaceAll(string(text), "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"))
	if err != nil {
		return err
	}
	defer os.Remove(copied) // the mount keeps the file
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

// unnamed writes a file that is to lose its name at once. No file is shared by containers: a tenant may hold a lease on what he sees
// (F_SETLEASE), and the next hook that opened it would wait for 45 seconds. The name is a nonce's of no reservation, so that cgpu gc
// removes what a killed hook leaves.
func unnamed(dir, content string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, fmt.Sprintf("%016x", rand.Uint64()))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return "", err
	}
	_, err = f.WriteString(content)
	if err == nil {
		err = f.Chmod(0o444) // whatever the umask
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		_ = os.Remove(path)
		return "", err
	}
	return path, nil
}
