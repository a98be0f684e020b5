// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/view"
)

// TestHealth: what is wrong is shown with who is hit, in cgpu smi too; clear forgets it, and says so in the events.
func TestHealthUsage(t *testing.T) {
	if out := cgpu("health wacth"); out != "error: health: \"wacth\": want nothing, watch, or clear and a GPU; did you mean watch?; see "+
		"cgpu health --help\n" {
		t.Error(out)
	}
}

func TestHealth(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "a", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	want := func(args string, words ...string) {
		t.Helper()
		out := cgpu(args)
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("cgpu %s: no %q in\n%s", args, w, out)
			}
		}
	}
	want("health", "0    Tesla T4     GPU-00000000  1           ok", "Nobody watches")
	if out := cgpu("smi"); strings.Contains(out, "HEALTH") {
		t.Errorf("a column for nothing:\n%s", out)
	}
	table := nodetest.Table(t)
	_, _, err := health.Change(n.Dir, func(s health.State) health.State {
		return s.Step(table, health.Seen{Hardware: map[string]device.Hardware{nodetest.T4: {NewXids: []uint64{79}}, nodetest.H200: {Lost: true}}},
			time.Now())
	})
	if err != nil {
		t.Fatal(err)
	}
	want("health", "unhealthy  0s   Xid 79: fallen off the bus", "unhealthy  0s   the driver cannot reach the GPU")
	want("smi", "HEALTH", "unhealthy")
	var v view.Health
	if err := json.Unmarshal([]byte(cgpu("health -o json")), &v); err != nil || v.Watched || len(v.GPUs) != 2 || v.GPUs[0].Healthy ||
		v.GPUs[0].Faults[0].Xid != 79 ||
		len(v.GPUs[0].Containers) != 1 || v.GPUs[0].Containers[0] != "a" || v.GPUs[1].Faults[0].Kind != health.Lost ||
		len(v.GPUs[1].Containers) != 0 {
		t.Errorf("%v, %+v", err, v)
	}
	v = view.Health{}
	if fromJSON(t, "health -o json clear 1", &v); len(v.GPUs) != 2 || !v.GPUs[1].Healthy || v.GPUs[0].Healthy {
		t.Errorf("%+v", v)
	}
	want("health clear 0", "GPU 0: forgotten: Xid 79: fallen off the bus")
	want("health clear all", "GPU 0: nothing was reported of it", "GPU 1: nothing was reported of it")
	want("events --kind healthy", "GPU 0: healthy again", "GPU 1: healthy again")
	if events, err := event.Read(n.Dir); err != nil || len(events) != 3 || events[2].Container != "a" {
		t.Errorf("%v, %+v: want one of each GPU, and of the container", err, events)
	}
	want("health clear 7", `health: GPU "7": there is none`)
	for _, args := range []string{"health clear", "health x", "health watch now", "health -o xml", "health -o xml clear 0"} {
		want(args, "error: health: ")
	}
}
