// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
)

const (
	// refreshTimeout is above what cgpu-refresh itself waits for another one (a minute), and below what engines give a create
	// (the kubelet: two minutes).
	refreshTimeout = 90 * time.Second
	// killTimeout is for the end of one that was killed. Who hangs in the driver's kernel part does not end.
	killTimeout = time.Second
)

// Refresh runs cgpu-refresh, which writes the node table. It locks: of containers that start together one refreshes.
func Refresh() error {
	path, err := device.Program("cgpu-refresh")
	if err != nil {
		return err
	}
	return refresh(path, refreshTimeout)
}

func refresh(path string, timeout time.Duration) error {
	// A file, not a pipe: the simulated driver's server, which cgpu-refresh may start, must not hold us up.
	fd, err := unix.MemfdCreate("cgpu-refresh", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("launch: memfd: %w", err)
	}
	output := os.NewFile(uintptr(fd), "output")
	defer output.Close()
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("launch: /dev/null: %w", err)
	}
	defer unix.Close(null)
	pid, err := spawn(path, []string{"cgpu-refresh"}, os.Environ(), []int{null, null, fd})
	if err != nil {
		return fmt.Errorf("launch: start %s: %w", path, err)
	}
	status, ended, err := await(pid, timeout)
	if err == nil && !ended {
		syscall.Kill(pid, syscall.SIGKILL) //nolint:errcheck // our child: the number is its own until we have waited
		how := "was ended"
		if _, ended, _ := await(pid, killTimeout); !ended {
			how = "cannot even be killed"
		}
		return fmt.Errorf("launch: cgpu-refresh was not done after %v, and %s: the NVIDIA driver does not answer: see nvidia-smi and dmesg; "+
			"a driver that hangs takes a restart of the machine", timeout, how)
	}
	switch {
	case err != nil:
		return fmt.Errorf("launch: wait for cgpu-refresh: %w", err)
	case status.Exited() && status.ExitStatus() == 0:
		return nil
	}
	text := make([]byte, 2048)
	n, _ := output.ReadAt(text, 0)
	return fmt.Errorf("launch: the node's GPUs could not be read: %s", oneLine(string(text[:n])))
}

// await waits for a child's end, but not longer than timeout. Go's timers and this loop do for what happens once a boot.
func await(pid int, timeout time.Duration) (status syscall.WaitStatus, ended bool, err error) {
	for deadline := time.Now().Add(timeout); ; time.Sleep(2 * time.Millisecond) {
		got, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil || got == pid:
			return status, err == nil, err
		case time.Now().After(deadline):
			return status, false, nil
		}
	}
}
