// SPDX-License-Identifier: Apache-2.0

// Package config reads cgpu.toml, the node's configuration.
//
// Only cgpu-refresh (and cgpu, to check a file) read it: cgpu-refresh puts what the runtime and the guard need into the
// node table, so that they link no TOML parser. Every key is optional; a key that is not known is an error, because a
// misspelt limit would otherwise be no limit.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Config is cgpu.toml with defaults filled in.
type Config struct {
	Driver   string // device.DriverNVIDIA or device.DriverSim
	Settings device.Config
	Sim      Sim // used when Driver is device.DriverSim
}

// Sim describes the simulated driver.
type Sim struct {
	DriverVersion string
	GPUs          []SimGPU
}

// SimGPU is one simulated GPU; where UUID or BusID is empty, cgpu-refresh makes one from the index.
type SimGPU struct {
	Name   string
	Memory quota.Bytes
	UUID   string
	BusID  string
}

// Default is the configuration of a node without a file. configs/cgpu.toml documents every value; a test compares them.
func Default() Config {
	return Config{
		Driver: device.DriverNVIDIA,
		Settings: device.Config{
			Runtimes:          []string{"runc", "crun"},
			Overcommit:        1,
			MaxInst:           20,
			Placement:         "binpack",
			ContextOverhead:   13 * quota.MiB,
			GuardStartTimeout: 10 * time.Second,
			MaxClients:        256,
			MaxTSGs:           64,
			MaxChannels:       512,
			CallsPerSecond:    50000,
			CallsBurst:        100000,
			Policy:            sched.PolicyPreempt,
			PrioRatio:         sched.DefaultPrioRatio,
			BaseTimeslice:     10 * time.Millisecond,
			MinTimeslice:      time.Millisecond,
			MaxRound:          100 * time.Millisecond,
			HighPrioTimeslice: 200 * time.Microsecond,
			MaxLoss:           15,
			CapCycle:          100 * time.Millisecond,
			Enforcement:       device.EnforceGuard,
			Managed:           device.ManagedLimit,
			MaxSpill:          device.Part{Percent: 50},
			SpillReserve:      device.Part{Percent: 10},
			MaxHostMemory:     device.Part{Percent: 50},
			Pods:              device.PodsAny,
			PodResources:      "/var/lib/kubelet/pod-resources/kubelet.sock",
			Health:            device.HealthOn,
		},
		Sim: Sim{
			DriverVersion: "580.159.04",
			GPUs:          []SimGPU{{Name: "Tesla T4", Memory: 15109 * quota.MiB}},
		},
	}
}

// maxFile bounds cgpu.toml.
const maxFile = 1 << 20

// Load reads a configuration file; one that is not there gives the defaults.
func Load(path string) (Config, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Default(), nil
	case err != nil:
		return Config{}, fmt.Errorf("config: %w", err)
	case !info.Mode().IsRegular() || info.Size() > maxFile:
		return Config{}, fmt.Errorf("config: %s: want a regular file of at most %d bytes", path, maxFile)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("config: %w", err)
	}
	return Parse(path, text)
}
