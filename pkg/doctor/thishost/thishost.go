// SPDX-License-Identifier: Apache-2.0

// Package thishost is the machine that cgpu doctor runs on, and what its children try there.
package thishost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Host is the machine we run on.
func Host(version string, engines map[string]string) (*doctor.Host, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &doctor.Host{
		Root: "/", RunDir: device.RunDir(), ConfigFile: device.ConfigFile(), Bin: filepath.Dir(self), Limiter: device.Limiter(),
		Version: version, UID: os.Geteuid(), Path: os.Getenv("PATH"), Engines: engines, DockerHost: os.Getenv("DOCKER_HOST"),
		Try: func(ctx context.Context, what string) (*exec.Cmd, error) {
			return exec.CommandContext(ctx, self, "doctor", "--try", what), nil
		},
		Containers: containers, Users: users, Used: asker(nvmlclient.New(device.MemoryLine, nvmlclient.Rest).Used),
	}, nil
}

// containers asks the guards how their containers are.
func containers(t *device.Table, records []ledger.Record) []doctor.Container {
	var list []doctor.Container
	for i, a := range snapshot.AskAll(t, records) {
		r := records[i]
		s := snapshot.StateOf(r, a)
		list = append(list, doctor.Container{Name: view.ShortID(r.ID) + view.Label(snapshot.Named(r)), State: s, Dead: s == snapshot.StateGone,
			Bad: s == snapshot.StateGuardDead || s == snapshot.StateNoAnswer || s == snapshot.StateNoPage, Alone: alone(a)})
	}
	return list
}

// users asks the guards of those who have a GPU how its time is used.
func users(t *device.Table, records []ledger.Record, uuid string) []doctor.GPUUser {
	records = slices.DeleteFunc(slices.Clone(records), func(r ledger.Record) bool {
		return !slices.Contains(r.Native, uuid) && !slices.ContainsFunc(r.VGPUs, func(v ledger.VGPU) bool { return v.UUID == uuid })
	})
	var list []doctor.GPUUser
	for i, a := range snapshot.AskAll(t, records) {
		r := records[i]
		if snapshot.StateOf(r, a) == snapshot.StateGone {
			continue
		}
		u := doctor.GPUUser{Name: view.ShortID(r.ID) + view.Label(snapshot.Named(r)), Record: r}
		for _, v := range a.Status.VGPUs {
			if v.UUID == uuid {
				u.Compute, u.Used = v.Compute, v.Used
			}
		}
		list = append(list, u)
	}
	return list
}

// asker asks for a while: the first answer of a driver that nobody uses takes seconds, and comes at a later try.
func asker[T any](ask func(gpus []int) (T, error)) func(gpus []int) (T, error) {
	return func(gpus []int) (all T, err error) {
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			if all, err = ask(gpus); err == nil || time.Now().After(deadline) {
				return all, err
			}
		}
	}
}

// alone reports a container with contexts on a GPU that has no arbiter.
func alone(a snapshot.Answer) bool {
	return slices.ContainsFunc(a.Status.VGPUs, func(v api.VGPUStatus) bool {
		if v.Compute == nil || v.Compute.TSGs == 0 {
			return false
		}
		_, lives, err := process.Find(device.RunDir(), v.UUID)
		return err == nil && !lives
	})
}

// Try is what a child of doctor does.
func Try(w io.Writer, what string) error {
	if what == doctor.TryKernel {
		os.Exit(doctor.KernelChild(w))
	}
	trials, err := tryDriver(device.RunDir())
	report := doctor.TrialReport{Trials: trials}
	if err != nil {
		report.Err = err.Error()
	}
	return json.NewEncoder(w).Encode(report)
}

func tryDriver(runDir string) ([]gpusched.Trial, error) {
	t, err := device.Load(runDir)
	if err != nil {
		return nil, err
	}
	all := ledger.Record{ID: "doctor"} // in no ledger: what a guard of a container with every GPU would be told
	for _, g := range t.GPUs {
		all.Native = append(all.Native, g.UUID)
	}
	cfg := launch.GuardConfig(all, t, runDir)
	d, err := driver.Open(cfg)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return gpusched.TryDriver(cfg, d, likeGuard)
}

// likeGuard drops the privileges that a guard has not when it makes its calls: the driver looks at them.
func likeGuard() error {
	keep := cap.NewSet()
	if err := errors.Join(keep.SetFlag(cap.Permitted, true, cap.SYS_PTRACE), keep.SetFlag(cap.Effective, true, cap.SYS_PTRACE)); err != nil {
		return err
	}
	if err := keep.SetProc(); err != nil {
		return fmt.Errorf("keep CAP_SYS_PTRACE only, as a guard does: %w", err)
	}
	return nil
}
