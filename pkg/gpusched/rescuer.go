// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// RescueName is how cgpu-guard is called to wait for the end of another one.
const RescueName = "cgpu-rescue"

// Rescue waits for the end of in and then resumes what the file at path says is off. ready is told when it waits.
func Rescue(path string, in io.Reader, open func(guardcfg.Config) (rmclient.Driver, error), ready func(),
	log func(guardcfg.Config) *slog.Logger) error {
	cfg, err := rescueConfig(path)
	if err != nil {
		return err
	}
	driver, err := open(cfg)
	if err != nil {
		return err
	}
	defer driver.Close()
	r, err := newResumer(cfg, driver, log(cfg))
	if err != nil {
		return err
	}
	defer r.close()
	ready()
	_, _ = io.Copy(io.Discard, in)
	_, err = r.resume(path)
	return err
}

// ResumeLeftovers resumes what a guard that was killed, and its rescuer with it, left off; it returns how many channels.
func ResumeLeftovers(path string, open func(guardcfg.Config) (rmclient.Driver, error), log *slog.Logger) (int, error) {
	cfg, err := rescueConfig(path)
	if err != nil {
		return 0, err
	}
	driver, err := open(cfg)
	if err != nil {
		return 0, err
	}
	defer driver.Close()
	r, err := newResumer(cfg, driver, log)
	if err != nil {
		return 0, err
	}
	defer r.close()
	return r.resume(path)
}

func rescueConfig(path string) (cfg guardcfg.Config, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return cfg, fmt.Errorf("read what is paused: %w", err)
	}
	if len(b) < rescueHeader || int(rm.U32(b, 0)) > rescueHeader-8 {
		return cfg, fmt.Errorf("%s is damaged", path)
	}
	if err := json.Unmarshal(b[8:8+rm.U32(b, 0)], &cfg); err != nil {
		return cfg, fmt.Errorf("%s is damaged: %w", path, err)
	}
	return cfg, nil
}

// resumer lets run what a guard has left off.
type resumer struct {
	cfg guardcfg.Config
	log *slog.Logger
	gpus
}

func newResumer(cfg guardcfg.Config, driver rmclient.Driver, log *slog.Logger) (*resumer, error) {
	g, err := openGPUs(cfg, driver)
	return &resumer{cfg, log, g}, err
}

// resume lets everything run that the file says is off, but for what ends (ofLiving). The file goes when all of it does.
func (r *resumer) resume(path string) (int, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil // the guard ended as it should
	}
	if err != nil {
		return 0, fmt.Errorf("read what is paused: %w", err)
	}
	list := &rescue{entries: int(rm.U32(b, 4))}
	if len(b) < rescueHeader+len(r.cfg.GPUs)*list.section() {
		return 0, fmt.Errorf("%s is damaged", path)
	}
	resumed := 0
	for gpu := range r.cfg.GPUs {
		var channels []Channel
		for i := range min(int(rm.U32(b, list.entry(gpu, 0)-8)), list.entries) {
			at := list.entry(gpu, i)
			channels = append(channels, Channel{Client: rm.U32(b, at), Handle: rm.U32(b, at+4), PID: int(rm.U32(b, at+8))})
		}
		channels = ofLiving(channels)
		if len(channels) == 0 {
			continue
		}
		r.log.Warn("the guard is gone while its container was paused; its channels run again", "channels", len(channels))
		done := r.run(gpu, channels)
		if done < len(channels) {
			err = fmt.Errorf("the driver refuses to resume %d of %d channels on GPU %d", len(channels)-done, len(channels), r.cfg.GPUs[gpu].Index)
		}
		resumed += done
	}
	if err == nil {
		_ = os.Remove(path)
	}
	return resumed, err
}

// run lets channels run and counts them.
func (r *resumer) run(gpu int, channels []Channel) int {
	own, err := r.client()
	if err != nil {
		r.log.Warn("cannot pause or resume", "err", err)
		return 0
	}
	return disableAll(own, gpu, channels, chanRuns, func(Channel) {}, func(status uint32, e syscall.Errno) {
		r.log.Warn(refusedMessage, "off", false, "status", rm.StatusName(status), "errno", e)
	})
}
