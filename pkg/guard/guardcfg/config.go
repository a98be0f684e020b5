// SPDX-License-Identifier: Apache-2.0

// Package guardcfg is what cgpu-runtime and cgpu-guard tell each other. It is apart from package guard because the
// runtime starts for every container of the node and must not link what the guard needs (net, log/slog).
package guardcfg

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Config is what cgpu-runtime tells a guard, as JSON on its standard input.
//
// The guard answers on file descriptor 3 with one line: "ok" once its socket listens, or an error text.
type Config struct {
	ID    string `json:"id"`
	Nonce string `json:"nonce"`
	// RunDir holds the ledger; Socket, Control and Log are absolute paths below it.
	RunDir  string `json:"runDir"`
	Socket  string `json:"socket"`
	Control string `json:"control"`
	Log     string `json:"log"`
	// Driver is device.DriverNVIDIA or device.DriverSim.
	Driver        string `json:"driver"`
	DriverVersion string `json:"driverVersion"`
	SimSocket     string `json:"simSocket,omitempty"`
	// ControlNode and UVMNode are nvidiactl and nvidia-uvm.
	ControlNode device.Node `json:"controlNode"`
	UVMNode     device.Node `json:"uvmNode"`
	GPUs        []GPU       `json:"gpus"` // sliced and native GPUs of the container
	// Page is the file of the container's vGPU page; empty: it has none.
	Page string `json:"page,omitempty"`
	// Hold are the files that the container has in common with others: those of the driver and the limiter. The guard holds them open
	// for reading, so that no tenant is granted a lease on them (package guard, leases.go).
	Hold []string `json:"hold,omitempty"`
	// HostMemory is the machine's.
	HostMemory  quota.Bytes `json:"hostMemory,omitempty"`
	LauncherPID int         `json:"launcherPid"`
	// Cgroups are folders below /sys/fs/cgroup that were made for this container alone, to be removed when it is over. An
	// engine removes its own; cgpu run has nobody left to do it.
	Cgroups []string `json:"cgroups,omitempty"`
	// Domain is whose MPS server the container's processes are clients of; empty: nobody's. DomainServer: it has that server.
	Domain       string        `json:"domain,omitempty"`
	DomainServer bool          `json:"domainServer,omitempty"`
	Settings     device.Config `json:"settings"`
}

// GPU is one GPU of the container.
type GPU struct {
	device.GPU
	Native bool        `json:"native,omitempty"` // whole card: no limit
	Limit  quota.Bytes `json:"limit,omitempty"`
	Spill  quota.Bytes `json:"spill,omitempty"` // host memory beyond Limit
}

// CleanUp removes the sockets and the cgroups.
func (cfg Config) CleanUp() {
	for _, p := range []string{cfg.Socket, cfg.Control} {
		if filepath.IsAbs(p) {
			_ = os.Remove(p)
		}
	}
	// The filter is gone a moment before the last process is, and that keeps its cgroup.
	deadline := time.Now().Add(cgroupTime)
	for _, dir := range cfg.Cgroups {
		for errors.Is(syscall.Rmdir(dir), syscall.EBUSY) && time.Now().Before(deadline) {
			time.Sleep(2 * time.Millisecond)
		}
	}
}

// cgroupTime is how long CleanUp waits for processes to leave their cgroups; one that stays is removed by the next cgpu run.
const cgroupTime = 2 * time.Second
