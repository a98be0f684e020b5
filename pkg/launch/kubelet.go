// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// kubeletTimeout bounds the kubelet's answer, which takes it a few milliseconds.
const kubeletTimeout = 2 * time.Second

// AskKubelet asks the kubelet how many units a device plugin allocated to a container, over the socket of its PodResources API.
// That speaks gRPC, which would make cgpu-runtime four times as large, so a program of its own asks.
func AskKubelet(socket string, c spec.PodContainer) (quota.Units, error) {
	path, err := device.Program("cgpu-podresources")
	if err != nil {
		return quota.Units{}, err
	}
	return askKubelet(path, socket, c, kubeletTimeout)
}

func askKubelet(path, socket string, c spec.PodContainer, timeout time.Duration) (quota.Units, error) {
	fd, err := unix.MemfdCreate("cgpu-podresources", unix.MFD_CLOEXEC)
	if err != nil {
		return quota.Units{}, fmt.Errorf("launch: memfd: %w", err)
	}
	output := os.NewFile(uintptr(fd), "output")
	defer output.Close()
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return quota.Units{}, fmt.Errorf("launch: /dev/null: %w", err)
	}
	defer unix.Close(null)
	argv := []string{"cgpu-podresources", socket, timeout.String(), c.Namespace, c.Pod, c.Container}
	pid, err := spawn(path, argv, nil, []int{null, fd, fd})
	if err != nil {
		return quota.Units{}, fmt.Errorf("launch: start %s: %w", path, err)
	}
	// It watches the time itself, and says what it waited for.
	status, ended, err := await(pid, timeout+kubeletTimeout/4)
	if err == nil && !ended {
		syscall.Kill(pid, syscall.SIGKILL) //nolint:errcheck // our child: the number is its own until we have waited
		await(pid, killTimeout)            //nolint:errcheck // nothing is left to do about it
		return quota.Units{}, fmt.Errorf("launch: cgpu-podresources was not done after %v: is the machine overloaded?", timeout)
	}
	if err != nil {
		return quota.Units{}, fmt.Errorf("launch: wait for cgpu-podresources: %w", err)
	}
	text := make([]byte, 64<<10)
	n, _ := output.ReadAt(text, 0)
	if !status.Exited() || status.ExitStatus() != 0 {
		return quota.Units{}, fmt.Errorf("launch: the kubelet did not tell what is allocated: %s", oneLine(string(text[:min(n, 2048)])))
	}
	return parseUnits(string(text[:n]))
}

// parseUnits reads what cgpu-podresources prints: lines of a word and numbers, the last one "end".
func parseUnits(text string) (quota.Units, error) {
	u := quota.Units{PerGPU: map[string]int{}}
	bad := func(line string) (quota.Units, error) {
		return quota.Units{}, fmt.Errorf("launch: cgpu-podresources said %.80q: is it of the same version as cgpu-runtime?", line)
	}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 1 && fields[0] == "end" {
			return u, nil
		}
		if len(fields) < 2 {
			return bad(line)
		}
		n, err := strconv.Atoi(fields[len(fields)-1])
		if err != nil || n < 0 {
			return bad(line)
		}
		switch {
		case fields[0] == "memory" && len(fields) == 2:
			u.Memory = n
		case fields[0] == "percent" && len(fields) == 2 && n <= quota.MaxPercent:
			u.Percent = n
		case fields[0] == "gpu" && len(fields) == 3:
			u.PerGPU[fields[1]] = n
		default:
			return bad(line)
		}
	}
	return bad("an answer without an end")
}
