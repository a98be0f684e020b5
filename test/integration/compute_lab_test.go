// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

// Shares are compared within tolerance points of a GPU's time, measured for measured. That is tried attempts times. A machine with more to
// do than its cores can is late with guards and timers, so what is measured while this test itself is late does not count against a share:
// it is measured again, for at most busyTime.
const (
	tolerance = 5.0
	measured  = 3 * time.Second
	attempts  = 5
	busyTime  = 3 * time.Minute
	busyLate  = 0.02 // of the time
)

// simOnly skips a test on the real driver, which gets its work through memory: test/gpu/shares.sh measures that one.
func simOnly(t *testing.T) {
	t.Helper()
	if lab.Driver != device.DriverSim {
		testenv.Skip(t, "on a GPU: only the simulated driver takes work by a control; test/gpu/shares.sh is for the real one")
	}
}

// lanes are the GPUs that nobody shares at present.
type lanes chan int

// newLanes has all of the node's GPUs.
func newLanes(t *testing.T) lanes {
	t.Helper()
	all := gpus(t)
	l := make(lanes, len(all))
	for _, g := range all {
		l <- g.Index
	}
	return l
}

// take waits for a GPU and has it for the test alone. Its policy is the default one, at the start and again at the end.
func (l lanes) take(t *testing.T) int {
	t.Helper()
	gpu := <-l
	t.Cleanup(func() {
		defer func() { l <- gpu }()
		eventually(t, 5*time.Second, func() string {
			for _, r := range records(t) {
				if holds(t, r, gpu) {
					return fmt.Sprintf("container %s is still in the ledger", r.ID)
				}
			}
			return ""
		})
		cgpu(t, "policy", strconv.Itoa(gpu), "preempt", "--max-inst", "20", "--prio-ratio", "99")
	})
	return gpu
}

// holds reports that a container has a slice of a GPU.
func holds(t *testing.T, r ledger.Record, gpu int) bool {
	t.Helper()
	for _, v := range r.VGPUs {
		if v.UUID == gpus(t)[gpu].UUID {
			return true
		}
	}
	return false
}

// cgpu runs the command line, which must succeed.
func cgpu(t *testing.T, args ...string) string {
	t.Helper()
	r := tryCgpu(args...)
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// tryCgpu is cgpu for a command that may fail. It is given again where a guard was too busy to say what its container uses.
func tryCgpu(args ...string) (r node.Result) {
	for range 10 {
		r = lab.Run(nil, append([]string{filepath.Join(lab.Bin, "cgpu")}, args...)...)
		if !strings.Contains(r.Stderr, "what it uses is not known") {
			break
		}
	}
	return r
}

// on is the environment of a container with a slice of a GPU. Further variables are name=value without the prefix.
func on(gpu int, more ...string) []string {
	env := quotaOf("600MiB", "", strconv.Itoa(gpu))
	for _, m := range more {
		env = append(env, "ALIYUN_COM_GPU_"+m)
	}
	return env
}

// busy starts a container that computes without end, and waits until it does.
func busy(t *testing.T, env []string, work ...string) string {
	t.Helper()
	if len(work) == 0 {
		work = []string{"--kernel", "1ms"}
	}
	id := container{env: env, cmd: append([]string{"cgpu-probe", "work", "--for", "0", "--windows", "1h"}, work...)}.start(t)
	computes(t, id)
	return id
}

// computes waits until a container has done work.
func computes(t *testing.T, id string) {
	t.Helper()
	eventually(t, 20*time.Second, func() string {
		for _, g := range drivers(t).GPUs {
			for _, tsg := range g.TSGs {
				if tsg.Kernels > 0 && inContainer(tsg.PID, id) {
					return ""
				}
			}
		}
		return "it does not compute: " + lab.Run(nil, "docker", "logs", id).String()
	})
}

// drivers is the simulated driver's own view.
func drivers(t *testing.T) (s sim.Snapshot) {
	t.Helper()
	if err := json.Unmarshal([]byte(run(t, filepath.Join(lab.Bin, "cgpu-sim"), "snapshot")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// inContainer reports that a process (of the host's numbers) is one of a container's.
func inContainer(pid int32, id string) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && strings.Contains(string(text), id)
}

// pidsOf are a container's processes that have channel groups on the graphics engine of some GPU.
func pidsOf(t *testing.T, id string) map[int]bool {
	t.Helper()
	pids := map[int]bool{}
	for _, g := range drivers(t).GPUs {
		for _, tsg := range g.TSGs {
			if inContainer(tsg.PID, id) {
				pids[int(tsg.PID)] = true
			}
		}
	}
	return pids
}

// spent is what a GPU's graphics engine has done so far, as the driver has it.
type spent struct {
	at   time.Duration // of the driver's clock
	busy time.Duration
	late float64 // what part of the time this process waited for a processor
	// of containers, in the order asked for
	gpuTime, waiting []time.Duration
	kernels          []uint64
}

func spentBy(t *testing.T, gpu int, ids ...string) spent {
	t.Helper()
	g := drivers(t).GPUs[gpu]
	s := spent{at: g.Engine.Busy + g.Engine.Switching + g.Engine.Idle, busy: g.Engine.Busy,
		gpuTime: make([]time.Duration, len(ids)), waiting: make([]time.Duration, len(ids)), kernels: make([]uint64, len(ids))}
	for _, tsg := range g.TSGs {
		for i, id := range ids {
			if inContainer(tsg.PID, id) {
				s.gpuTime[i] += tsg.GPUTime
				s.waiting[i] += tsg.Waiting
				s.kernels[i] += tsg.Kernels
			}
		}
	}
	return s
}

// since is what was done between two moments.
func (s spent) since(old spent) spent {
	d := spent{at: s.at - old.at, busy: s.busy - old.busy, gpuTime: make([]time.Duration, len(s.gpuTime)),
		waiting: make([]time.Duration, len(s.waiting)), kernels: make([]uint64, len(s.kernels))}
	for i := range s.gpuTime {
		d.gpuTime[i], d.waiting[i], d.kernels[i] = s.gpuTime[i]-old.gpuTime[i], s.waiting[i]-old.waiting[i], s.kernels[i]-old.kernels[i]
	}
	return d
}

// percent is a part of the whole time.
func (s spent) percent(d time.Duration) float64 { return 100 * float64(d) / float64(max(s.at, 1)) }

// during measures.
func during(t *testing.T, d time.Duration, gpu int, ids ...string) spent {
	t.Helper()
	before := spentBy(t, gpu, ids...)
	late := sleep(d)
	s := spentBy(t, gpu, ids...).since(before)
	s.late = late
	return s
}

// sleep sleeps and tells for what part of the time the machine had no processor for it. A timer's own two milliseconds are none.
func sleep(d time.Duration) (late float64) {
	const step, slack = 5 * time.Millisecond, 2 * time.Millisecond
	var waited time.Duration
	for begin := time.Now(); time.Since(begin) < d; {
		before := time.Now()
		time.Sleep(step)
		waited += max(0, time.Since(before)-step-slack)
	}
	return float64(waited) / float64(d)
}

// wantOf checks that containers get shares, in percent of what the GPU computes, and that it computes most of the time: with the driver's
// own timeslices of 2.048 ms, the shortest here, the model loses 8.5 % in switches, and programs that are late for their processors some
// more.
func wantOf(t *testing.T, gpu int, ids []string, want ...float64) {
	t.Helper()
	measuring(t, gpu, ids, func(s spent) string {
		if s.percent(s.busy) < 85 {
			return fmt.Sprintf("the GPU computes %.1f %% of the time only", s.percent(s.busy))
		}
		got := make([]float64, len(ids))
		for i, d := range s.gpuTime {
			got[i] = 100 * float64(d) / float64(s.busy)
		}
		return differs(got, want)
	})
}

// wantAll checks that a container has a GPU for itself. Nobody is between it and the driver then, so it is soon told.
func wantAll(t *testing.T, gpu int, id string) {
	t.Helper()
	eventually(t, time.Minute, func() string {
		d := during(t, time.Second, gpu, id)
		if share := d.percent(d.gpuTime[0]); share < 95 {
			return fmt.Sprintf("it has %.1f %% of a GPU on which nobody else has work", share)
		}
		return ""
	})
}

// wantCaps checks that containers get shares in percent of the time.
func wantCaps(t *testing.T, gpu int, ids []string, want ...float64) {
	t.Helper()
	measuring(t, gpu, ids, func(s spent) string {
		got := make([]float64, len(ids))
		for i, d := range s.gpuTime {
			got[i] = s.percent(d)
		}
		return differs(got, want)
	})
}

// measuring gives measurements to a check until it has no complaint.
func measuring(t *testing.T, gpu int, ids []string, check func(spent) string) {
	t.Helper()
	time.Sleep(300 * time.Millisecond) // work of others is noticed within 200 ms
	measuringOver(t, measured, attempts, gpu, ids, check)
}

// measuringOver is measuring with another length and number of tries.
func measuringOver(t *testing.T, length time.Duration, tries, gpu int, ids []string, check func(spent) string) {
	t.Helper()
	var complaints []string
	for begin := time.Now(); tries > 0 && time.Since(begin) < busyTime; {
		s := during(t, length, gpu, ids...)
		complaint := check(s)
		if complaint == "" {
			return
		}
		if s.late < busyLate {
			tries--
		}
		complaints = append(complaints, fmt.Sprintf("%s (late %.1f %% of the time)", complaint, 100*s.late))
	}
	t.Errorf("%s\n%s", strings.Join(complaints, "\n"), cgpu(t, "smi", "-o", "wide"))
}

// differs compares shares.
func differs(got, want []float64) string {
	for i := range want {
		if math.Abs(got[i]-want[i]) > tolerance {
			return fmt.Sprintf("shares %.1f, want %.1f ± %v", got, want, tolerance)
		}
	}
	return ""
}
