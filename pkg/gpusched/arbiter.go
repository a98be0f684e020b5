// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// arbiterConfig is what an arbiter of one of the GPUs is told: nothing of the container.
func arbiterConfig(cfg guardcfg.Config, gpu int) guardcfg.Config {
	uuid := filepath.Base(cfg.GPUs[gpu].UUID)
	return guardcfg.Config{RunDir: cfg.RunDir, Driver: cfg.Driver, DriverVersion: cfg.DriverVersion, SimSocket: cfg.SimSocket,
		ControlNode: cfg.ControlNode, GPUs: []guardcfg.GPU{{GPU: cfg.GPUs[gpu].GPU}}, Settings: cfg.Settings,
		Log: filepath.Join(cfg.RunDir, "log", "arbiter-"+uuid+".log")}
}

// startArbiter has an arbiter started if there is none, or none that stands by. The container is on the GPU's page before, or it might be
// taken for the end of the last one.
func (x *gpuScheduler) startArbiter() {
	if x.s.StartArbiter == nil {
		return
	}
	config, err := json.Marshal(arbiterConfig(x.s.Config, x.gpu))
	if err == nil {
		err = x.s.StartArbiter(x.s.Config.RunDir, x.s.Config.GPUs[x.gpu].UUID, config)
	}
	if err != nil {
		x.s.LogOnce("arbiter", "cannot start who decides about the GPU's time", "err", err)
	}
}

// Decider is an arbiter with what it is woken by.
type Decider struct {
	*arbiter.Arbiter
	source arbiter.Source
	log    *slog.Logger
}

// OpenArbiter makes ready what decides about the one GPU of a configuration. It needs CAP_SYS_ADMIN, and what is made goes on without.
func OpenArbiter(cfg guardcfg.Config, driver rmclient.Driver, log *slog.Logger) (*Decider, error) {
	if len(cfg.GPUs) != 1 {
		return nil, fmt.Errorf("%d GPUs: want one", len(cfg.GPUs))
	}
	g, err := openGPUs(cfg, driver)
	if err != nil {
		return nil, err
	}
	own, err := g.client()
	if err != nil {
		return nil, err
	}
	d := &Decider{log: log}
	if !cfg.Settings.NoSwitchRecords {
		if d.source, err = switches(own, driver, cfg.GPUs[0].Minor); err != nil {
			log.Warn("the driver does not tell of context switches: every context counts as one with work", "err", err)
		}
	}
	d.Arbiter, err = arbiter.New(arbiter.Options{RunDir: cfg.RunDir, UUID: cfg.GPUs[0].UUID, Timing: TimingOf(cfg), Source: d.source, Log: log,
		Samples: func() ([]sched.Sample, error) { return arbiter.Samples(own, g.abi, 0) }})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// switches has the driver keep switch records from now on.
func switches(own *rmclient.Client, driver rmclient.Driver, minor int) (arbiter.Source, error) {
	source, err := arbiter.Bind(own, driver, 0, minor)
	if err != nil {
		return nil, err
	}
	return source, source.Enable()
}

// breath is between two decisions because of what guards say: one of them that went wrong could say something new all the time.
const breath = time.Millisecond

// Wakes are what it waits for, each in a goroutine.
func (d *Decider) Wakes() []func() bool {
	seen := d.Generation()
	wakes := []func() bool{func() bool {
		time.Sleep(breath)
		d.Await(seen)
		seen = d.Generation()
		return true
	}}
	if d.source != nil {
		wakes = append(wakes, func() bool {
			time.Sleep(sched.Tick / 2) // several batches at once are fine
			if d.source.Await() {
				return true
			}
			d.log.Warn("the driver's switch records are over: it is looked for them now and then")
			return false
		})
	}
	return wakes
}
