// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestFaults: the front ends and the condition are told of GPUs that are unhealthy, once, and when they are healthy again; an
// agent that starts knows it from the file; one that cannot read the file goes on with what it knew.
func TestFaults(t *testing.T) {
	dir := t.TempDir()
	key, err := device.ReadKey(device.DriverSim, "", "", "")
	if err != nil {
		t.Fatal(err)
	}
	const gpu0, gpu1 = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"
	table := tableOf(device.PodsAllocated)
	for i, uuid := range []string{gpu0, gpu1} {
		table.GPUs = append(table.GPUs, device.GPU{Index: i, Minor: i, UUID: uuid, BusID: []string{"0000:01:00.0", "0000:02:00.0"}[i],
			Memory: quota.GiB,
			Node:   device.Node{Path: "/dev/nvidia" + []string{"0", "1"}[i], HostPath: "/dev/null"}})
	}
	table.Key, table.Config.PrioRatio = key, sched.DefaultPrioRatio
	if err := table.Save(dir); err != nil {
		t.Fatal(err)
	}
	newAgent := func() (*agent, *fakeFront) {
		fake, metrics := &fakeFront{}, NewMetrics()
		return &agent{Options: Options{RunDir: dir, Log: silent}, metrics: metrics, table: newWatcher(dir),
				running:  []*front{{FrontEnd: fake.frontEnd()}},
				reporter: newReporter(nil, "n", nil, metrics, silent), resizer: newResizer(dir, newPods(answer(t), silent), nil, nil, metrics, silent)},
			fake
	}
	a, fake := newAgent()
	look := func(updates, sick int, reason string) {
		t.Helper()
		a.refresh(t.Context())
		if c := judge(a.state); fake.updates != updates || fake.sickGPUs != sick || c.Reason != reason || a.faults.differs() {
			t.Errorf("%+v, %s %q; want %d updates, %d unhealthy, %s; differs: %v", fake, c.Reason, c.Message, updates, sick, reason,
				a.faults.differs())
		}
	}
	change := func(h map[string]device.Hardware) {
		t.Helper()
		now := time.Now()
		_, _, err := health.Change(dir, func(s health.State) health.State { return s.Step(table, health.Seen{Loaded: "a", Hardware: h}, now) })
		if err != nil {
			t.Fatal(err)
		}
		if !a.faults.differs() {
			t.Error("is not looked at")
		}
	}
	look(0, 0, ReasonReady)
	change(map[string]device.Hardware{gpu0: {}, gpu1: {NewXids: []uint64{79}}})
	look(1, 1, ReasonUnhealthy)
	look(1, 1, ReasonUnhealthy)
	change(map[string]device.Hardware{gpu0: {NewXids: []uint64{48}}, gpu1: {}})
	look(2, 2, ReasonUnhealthy)
	if _, err := health.Clear(dir, gpu1); err != nil {
		t.Fatal(err)
	}
	look(3, 1, ReasonUnhealthy)
	// What cannot be read is not healthy for that.
	good, err := os.ReadFile(health.File(dir))
	if err != nil {
		t.Fatal(err)
	}
	write := func(text []byte) {
		t.Helper()
		next := filepath.Join(dir, "next")
		if err := os.WriteFile(next, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, health.File(dir)); err != nil {
			t.Fatal(err)
		}
	}
	write([]byte("{"))
	look(3, 1, ReasonUnhealthy)
	write(good)
	look(3, 1, ReasonUnhealthy)
	a, fake = newAgent() // another one, to which nobody tells it
	look(0, 0, ReasonUnhealthy)
	if _, err := health.Clear(dir, gpu0); err != nil {
		t.Fatal(err)
	}
	look(1, 0, ReasonReady)
}
