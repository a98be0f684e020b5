// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func weightsOf(percent float64) map[string][]Figure {
	return map[string][]Figure{partWeights: {{Name: "weight-3-share", Value: percent, Unit: "%", Least: 70, Most: 80, text: "weight 3 gets"}},
		partPause: {{Name: "pause", Value: 3, Unit: "ms", Most: pauseWanted, text: "after"}}}
}

// TestJudgeMeasured: the figure and what was wanted are said; the worst GPU decides; what was not measured is no failure.
func TestJudgeMeasured(t *testing.T) {
	on := func(index int, figures map[string][]Figure, why string) measured {
		return measured{gpu: device.GPU{Index: index}, figures: figures, why: map[string]string{"": why}}
	}
	expect(t, "as wanted", judgeMeasured([]measured{on(0, weightsOf(74.9), "")}, partWeights), OK,
		"GPU 0: weight 3 gets 74.9 % (want 70 to 80)")
	expect(t, "not", judgeMeasured([]measured{on(0, weightsOf(75), ""), on(1, weightsOf(66), "")}, partWeights), Warn,
		"GPU 1: weight 3 gets 66 %")
	expect(t, "one to one", judgeMeasured([]measured{on(0, weightsOf(50.5), "")}, partWeights), Warn,
		"SET_TIMESLICE has no effect here; what works: caps by pauses")
	none := weightsOf(50)
	none[partPause][0].Value = 10000
	expect(t, "nor pauses", judgeMeasured([]measured{on(0, none, "")}, partWeights), Warn, "what works: memory limits only")
	expect(t, "no pause", judgeMeasured([]measured{on(0, none, "")}, partPause), Warn, "1e+04 ms (want at most 500)")
	expect(t, "no CUDA", judgeMeasured([]measured{on(0, nil, "cuInit: no device")}, partSwitch), Skip, "GPU 0: unknown: cuInit: no device")
	expect(t, "one of two", judgeMeasured([]measured{on(0, nil, "web has work on it"), on(1, weightsOf(75), "")}, partWeights), OK,
		"web has work")
	left := on(0, weightsOf(75), "")
	left.left = "doctor-1-0 is still there"
	expect(t, "left behind", judgeMeasured([]measured{left}, partWeights), Fail, "doctor-1-0 is still there → cgpu gc")
	if r := judgeMeasured([]measured{on(0, weightsOf(75), ""), on(1, weightsOf(74), "")}, partWeights); len(r.Figures) != 2 ||
		r.Figures[1].Value != 74 {
		t.Errorf("figures: %+v", r.Figures)
	}
}

// TestGPUUsers: whoever may have work keeps the measurement off.
func TestGPUUsers(t *testing.T) {
	user := func(nonce string, c *api.ComputeStatus) GPUUser {
		return GPUUser{Name: nonce, Record: ledger.Record{Nonce: nonce}, Compute: c}
	}
	for _, u := range []GPUUser{user("a context", &api.ComputeStatus{TSGs: 1}),
		user("just now", &api.ComputeStatus{Utilization: 3}), user("mute", nil)} {
		if !u.works() {
			t.Errorf("%s may have work", u.Name)
		}
	}
	idle := user("idle", &api.ComputeStatus{GPUTime: time.Second})
	if idle.works() {
		t.Error("who is idle has work")
	}
	if names := since([]GPUUser{idle}, []GPUUser{idle, user("new", &api.ComputeStatus{})}); len(names) != 0 {
		t.Errorf("%v computed", names)
	}
	again := user("idle", &api.ComputeStatus{GPUTime: 2 * time.Second})
	if names := since([]GPUUser{idle, user("gone", nil)}, []GPUUser{idle}); !slices.Equal(names, []string{"gone"}) {
		t.Errorf("%v may have computed", names)
	}
	if names := since([]GPUUser{idle}, []GPUUser{again, user("new", &api.ComputeStatus{GPUTime: 1})}); len(names) != 2 {
		t.Errorf("%v computed", names)
	}
}

// meterOf measures a GPU of a node where no program can be started, in place of which there is an error.
func meterOf(t *testing.T, users *[]GPUUser, used func() (quota.Bytes, error)) *meter {
	h := files(t, nil)
	h.Users = func(*device.Table, []ledger.Record, string) []GPUUser { return *users }
	h.Used = func(gpus []int) (map[string]quota.Bytes, error) {
		n, err := used()
		return map[string]quota.Bytes{"GPU-3": n}, err
	}
	return &meter{host: h, prefix: "doctor-1-3", measured: measured{gpu: device.GPU{Index: 3, UUID: "GPU-3", Memory: 16 * quota.GiB},
		figures: map[string][]Figure{}, why: map[string]string{}}}
}

// TestMeasureBegins: nothing is started where somebody would be held up, or refused for want of what is taken, or where nobody knows.
func TestMeasureBegins(t *testing.T) {
	const begun = "no such file"
	idle := []GPUUser{{Name: "idle", Record: ledger.Record{Nonce: "n"}, Compute: &api.ComputeStatus{}, Used: quota.GiB}}
	for want, tt := range map[string]struct {
		used  quota.Bytes
		err   error
		size  quota.Bytes
		force bool
	}{
		begun:                                    {used: quota.GiB + 10*quota.MiB, size: 16 * quota.GiB},
		"programs outside cgpu use 512MiB of it": {used: quota.GiB + 512*quota.MiB, size: 16 * quota.GiB},
		"NVML: no answer":                        {err: errors.New("NVML: no answer"), size: 16 * quota.GiB},
		"no room to spare":                       {used: quota.GiB, size: 4 * quota.GiB},
		begun + " ":                              {err: errors.New("NVML: no answer"), size: 4 * quota.GiB, force: true},
	} {
		m := meterOf(t, &idle, func() (quota.Bytes, error) { return tt.used, tt.err })
		m.gpu.Memory, m.host.Force = tt.size, tt.force
		m.run(&device.Table{Config: config.Default().Settings})
		if why := m.why[""] + " "; !strings.Contains(why, want) {
			t.Errorf("%s, want %s", why, want)
		}
	}
}

// TestDisturbed: who comes or computes while it is measured ends it, and there are no figures.
func TestDisturbed(t *testing.T) {
	users := []GPUUser{}
	m := meterOf(t, &users, func() (quota.Bytes, error) { return 0, nil })
	table := &device.Table{Config: config.Default().Settings}
	if err := m.mayBegin(table); err != nil {
		t.Fatal(err)
	}
	if err := m.undisturbed(table); err != nil {
		t.Error(err)
	}
	m.figures = weightsOf(75)
	users = []GPUUser{{Name: "web", Record: ledger.Record{Nonce: "n"}, Compute: &api.ComputeStatus{TSGs: 1}}}
	if _, is := errors.AsType[*disturbance](m.undisturbed(table)); !is {
		t.Error("somebody has a context, and it is measured on")
	}
	users = []GPUUser{}
	m.host.Users = func(*device.Table, []ledger.Record, string) []GPUUser {
		if now := users; len(now) == 0 { // it comes after the look before
			users = []GPUUser{{Name: "web", Record: ledger.Record{Nonce: "n"}, Compute: &api.ComputeStatus{TSGs: 1}}}
			return now
		}
		return users
	}
	m.run(table)
	if m.figures != nil || !strings.Contains(m.why[""], "web came") {
		t.Errorf("%v, %s", m.figures, m.why[""])
	}
}

// TestSpare: what is taken for the measurement is there twice: memory, places, and slots where time is in slots.
func TestSpare(t *testing.T) {
	g := device.GPU{UUID: "GPU-3", Memory: 16 * quota.GiB}
	card := func(p sched.Policy, places int) sched.Card {
		return sched.Card{Policy: p, MaxInst: places, PrioRatio: 99}
	}
	of := func(limit quota.Bytes, percent int) []ledger.Record {
		return []ledger.Record{{VGPUs: []ledger.VGPU{{UUID: "GPU-3",
			Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: 1, Percent: percent, Priority: quota.PriorityDefault}}}}}}
	}
	for name, tt := range map[string]struct {
		card    sched.Card
		records []ledger.Record
		is      bool
	}{
		"an empty GPU":              {card(sched.PolicyPreempt, 20), nil, true},
		"just as much":              {card(sched.PolicyPreempt, 7), of(10*quota.GiB, 0), true},
		"too little memory":         {card(sched.PolicyPreempt, 20), of(10*quota.GiB+1, 0), false},
		"too few places":            {card(sched.PolicyPreempt, 6), of(quota.GiB, 0), false},
		"fixed, half of it":         {card(sched.PolicyFixed, 20), of(quota.GiB, 50), true},
		"fixed, more is promised":   {card(sched.PolicyFixed, 20), of(quota.GiB, 51), false},
		"fixed, for few containers": {card(sched.PolicyFixed, 9), nil, false},
		"preempt, promised":         {card(sched.PolicyPreempt, 20), of(quota.GiB, 90), true},
	} {
		if is := spare(g, 1, tt.card, tt.records); is != tt.is {
			t.Errorf("%s: %v", name, is)
		}
	}
}

// TestOwnRuns: a container is known for one of the measurement's by its process. Its name anybody may choose.
func TestOwnRuns(t *testing.T) {
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	run := func(name string, pid int, start uint64) GPUUser {
		return GPUUser{Name: name, Record: ledger.Record{Name: name, Nonce: name, LauncherPID: pid, LauncherStart: start}}
	}
	users := []GPUUser{run("doctor-1-3-a", os.Getppid(), start), run("renamed", os.Getpid(), start), run("doctor-1-3-b", os.Getpid(), start+1)}
	m := meterOf(t, &users, nil)
	m.one = &load{name: "doctor-1-3-a", cmd: &exec.Cmd{Process: &os.Process{Pid: os.Getpid()}}, start: start}
	others, own, err := m.users(nil)
	if err != nil || len(own) != 1 || own[0].Name != "renamed" || len(others) != 2 {
		t.Errorf("own %v, others %v, %v", own, others, err)
	}
}

// TestMeasurePods: where pods are allocated GPUs nobody tells a scheduler of the runs.
func TestMeasurePods(t *testing.T) {
	h := files(t, map[string]string{"bin/cgpu-load": "#!", "bin/cgpu-probe": "#!"})
	h.config.Settings.Pods = device.PodsAllocated
	if r, stop := h.cannotMeasure(); !stop || !strings.Contains(r.Found, "Kubernetes allocates GPUs") {
		t.Errorf("%+v", r)
	}
	h.Force = true
	if r, stop := h.cannotMeasure(); !stop || !strings.Contains(r.Found, "no table") {
		t.Errorf("%+v", r)
	}
}

// TestLoadSays: a load's lines become samples, of which a time's work is made.
func TestLoadSays(t *testing.T) {
	l := &load{}
	for _, text := range []string{"up", "ready 500.5 1001", "work 1000 0 900", "", "nonsense 1", "work x 1 2", "work 2000 400 1900",
		"gap 900 201000", "work 3000 500"} {
		l.take(text)
	}
	if !l.up || len(l.ready) != 2 || len(l.samples) != 2 || l.last() != 1900*time.Microsecond || l.told() != 2*time.Millisecond {
		t.Errorf("%+v", l)
	}
	if d := l.between(1250*time.Microsecond, 1750*time.Microsecond); d != 200*time.Microsecond {
		t.Errorf("half of the time: %v", d)
	}
	if g, found := l.gapAt(100 * time.Millisecond); !found || g.to != 201*time.Millisecond {
		t.Errorf("gap %v", g)
	}
	if _, found := l.gapAt(202 * time.Millisecond); found {
		t.Error("a gap where kernels ended")
	}
}
