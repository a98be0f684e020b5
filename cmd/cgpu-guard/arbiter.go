// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
)

// arbiterMain is cgpu-arbiter: it decides about the time of one GPU, or stands by for who does. Nothing of a container's but what
// guards and the driver say reaches it. To take the driver's switch records it needs CAP_SYS_ADMIN; then it has no capability. The one
// that it starts to stand by has root's again: the kernel gives them to each program that root executes.
func arbiterMain() {
	tune()
	runtime.GOMAXPROCS(1)
	text, err := io.ReadAll(io.LimitReader(os.Stdin, maxConfig))
	var cfg guard.Config
	if err == nil {
		err = json.Unmarshal(text, &cfg)
	}
	if err != nil || len(cfg.GPUs) != 1 {
		fmt.Fprintln(os.Stderr, process.Name+": it is started by cgpu-guard only")
		os.Exit(1)
	}
	_ = os.WriteFile("/proc/self/comm", []byte(process.Name), 0)
	leaveCgroups("/proc/self/cgroup", "/sys/fs/cgroup")
	log := arbiterLog(cfg.Log)
	defer log.close()
	err = detach()
	if err == nil {
		options := process.Options{RunDir: cfg.RunDir, UUID: cfg.GPUs[0].UUID, Config: text, Now: gpusched.Monotonic, Log: log.Logger,
			Times: process.DefaultTimes()}
		err = process.Run(options, func() (process.Decider, error) { return openArbiter(cfg, log) })
	}
	if err != nil {
		log.Error("ends", "pid", os.Getpid(), "err", err)
		log.close()
		os.Exit(1)
	}
}

func openArbiter(cfg guard.Config, log *guardLog) (process.Decider, error) {
	d, err := driver.Open(cfg)
	if err != nil {
		return nil, err
	}
	a, err := gpusched.OpenArbiter(cfg, d, log.Logger)
	if err == nil {
		err = cap.NewSet().SetProc()
	}
	return a, err
}

// arbiterLog is a log of all arbiters of a GPU. What one of them writes is bounded; how many there were is not.
func arbiterLog(path string) *guardLog {
	if info, err := os.Stat(path); err == nil && info.Size() > maxLog {
		_ = os.Rename(path, path+".old")
	}
	return newLog(path)
}

// leaveCgroups takes this process out of the cgroups of who started it: it outlives that container, and works for others. Where that is not
// allowed it stays, and ends with them.
func leaveCgroups(own, root string) {
	text, _ := os.ReadFile(own)
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) < 3 || fields[2] == "/" {
			continue
		}
		folders := []string{strings.TrimPrefix(fields[1], "name=")}
		if folders[0] == "" { // cgroup v2, alone or beside v1
			folders = append(folders, "unified")
		}
		for _, folder := range folders {
			procs, err := os.OpenFile(filepath.Join(root, folder, "cgroup.procs"), os.O_WRONLY, 0)
			if err != nil {
				continue
			}
			_, _ = fmt.Fprint(procs, os.Getpid())
			_ = procs.Close()
			break
		}
	}
}
