// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestSetPreload(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "abc", Name: "web", Preload: true,
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB}},
			{UUID: nodetest.H200, Slice: quota.Slice{Limit: 4 * quota.GiB}}}})
	nodetest.Occupy(t, r, 0, page.Slot{Owner: 7, Used: [page.MaxVGPUs]uint64{2 << 30, 1 << 30}})
	nodetest.Occupy(t, r, 9, page.Slot{Owner: 8, Used: [page.MaxVGPUs]uint64{1 << 30}})
	type vgpu struct {
		limit     quota.Bytes
		weight    uint32
		timeslice uint64
	}
	want := [2]vgpu{{4 * quota.GiB, 1, 10000}, {4 * quota.GiB, 1, 10000}}
	for _, tt := range []struct {
		args, out string
		change    func()
	}{
		{"--weight 3", "weight 1 → 3", func() { want[0].weight, want[1].weight, want[0].timeslice, want[1].timeslice = 3, 3, 30000, 30000 }},
		{"--memory 5GiB --gpu 1", "GPU 1: memory 4096MiB → 5120MiB", func() { want[1].limit = 5 * quota.GiB }},
		{"--memory 2GiB", `error: set: --memory "2GiB": container abc uses 3072MiB of its 4096MiB on GPU 0`, nil},
		{"--memory 2GiB --force", "GPU 0: memory 4096MiB → 2048MiB", func() { want[0].limit, want[1].limit = 2*quota.GiB, 2*quota.GiB }},
		{"--spill 1GiB",
			`error: set: --spill: container abc (web): only the preload library enforces its limits (enforcement in cgpu.toml), and it cannot serve`,
			nil},
		{"--percent 20", `error: set: --percent: container abc (web): only the preload library`, nil},
		{"--priority high", `error: set: --priority: container abc (web): only the preload library`, nil},
		{"--weight 4 --percent 20", `error: set: --percent`, nil},
		{"--spill none --percent none --priority default", "nothing to change", nil},
	} {
		if tt.change != nil {
			tt.change()
		}
		if out := cgpu("set abc " + tt.args); !strings.Contains(out, tt.out) {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.out)
		}
		p, err := page.Read(r.Page)
		if err != nil {
			t.Fatal(err)
		}
		record, err := n.Book.Find("abc")
		if err != nil {
			t.Fatal(err)
		}
		for i, w := range want {
			v := p.VGPU(i)
			if got := (vgpu{quota.Bytes(v.Limit), v.Weight, v.TimesliceMicros}); got != w {
				t.Errorf("%s: vGPU %d on the page: %+v, want %+v", tt.args, i, got, w)
			}
			if l := record.VGPUs[i]; l.Limit != w.limit || l.Weight != int(w.weight) || l.Spill != 0 || l.Percent != 0 {
				t.Errorf("%s: vGPU %d in the ledger: %+v, want %+v", tt.args, i, l, w)
			}
		}
	}
	if err := os.Truncate(r.Page, 10); err != nil { // a tenant can
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--weight 5":    "it is in the ledger, but its programs do not know",
		"--memory 1GiB": "its vGPU page cannot be read",
	} {
		if out := cgpu("set abc " + args); !strings.Contains(out, want) {
			t.Errorf("%s: printed %s\nwant %s", args, out, want)
		}
	}
}

// TestSetDriverLimits: the ledger promises to others what the driver has taken back, and a limit that only the ledger has changed is told.
func TestSetDriverLimits(t *testing.T) {
	for name, record := range map[string]ledger.Record{"guard": {}, "preload": {Preload: true}, "driver": {Preload: true, DriverOnly: true}} {
		n := nodetest.New(t)
		record.ID, record.Name, record.DriverLimits = "abc", "web", true
		record.VGPUs = []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB}}}
		n.Reserve(record)
		weight := "weight 1 → 3"
		if record.DriverOnly {
			weight = `error: set: --weight: container abc (web): only NVIDIA's driver enforces its limits (limits in cgpu.toml), and it cannot share out time by weight; with limits = "guard"`
		}
		for _, tt := range []struct {
			args, want string
			limit      quota.Bytes
		}{
			{"--memory 3GiB --force", "error: container abc: its limit stays: the ledger does not say which cgroup is the container's",
				4 * quota.GiB},
			{"--memory 5GiB", "error: container abc: it is in the ledger, but not with the driver: ", 5 * quota.GiB},
			{"--weight 3", weight, 5 * quota.GiB},
		} {
			if out := cgpu("set abc " + tt.args); !strings.Contains(out, tt.want) {
				t.Errorf("%s: %s: printed %s\nwant %s", name, tt.args, out, tt.want)
			}
			if r, err := n.Book.Find("abc"); err != nil || r.VGPUs[0].Limit != tt.limit {
				t.Errorf("%s: %s: %+v, %v", name, tt.args, r.VGPUs, err)
			}
		}
	}
}

// TestDriverOnlyRefuses: what the driver alone limits has nobody who could do more.
func TestDriverOnlyRefuses(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "abc", Name: "web", Preload: true, DriverOnly: true, DriverLimits: true,
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	for _, tt := range []struct{ args, want string }{
		{"pause abc", "only NVIDIA's driver enforces its limits (limits in cgpu.toml), and it cannot stop its GPU work"},
		{"set abc --percent 20", "only NVIDIA's driver"},
		{"set abc --memory 512MiB", "is not known, because its driver alone counts it"},
		{"policy 0 fair", `policy fair needs a guard, and container "web" has none`},
		{"policy 0 weight", "policy preempt → weight-preempt"},
		{"smi", "running^"},
		{"smi", "^ memory is limited by NVIDIA's driver only, and time is not shared out (limits in cgpu.toml)"},
		{"smi --filter enforcement=driver", "abc"},
		{"smi --filter enforcement=guard", "0 vGPUs"},
		{"smi -o json", `"enforcement": "driver"`},
		{"inspect abc", `"guard_error": "there is no guard to ask: limits = \"driver\" in cgpu.toml"`},
		{"gc", "nothing to remove"},
	} {
		if out := cgpu(tt.args); !strings.Contains(out, tt.want) {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.want)
		}
	}
}

func TestPreloadRefuses(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "abc", Name: "web", Preload: true,
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	for _, tt := range []struct{ args, want string }{
		{"pause abc",
			`error: pause: container abc (web): only the preload library enforces its limits (enforcement in cgpu.toml), and it cannot stop its GPU work`},
		{"resume abc", `error: resume: container abc (web): only the preload library`},
		{"policy 0 fair", `error: policy: GPU 0 (` + nodetest.T4 + `): policy fair needs a guard, and container "web" has none; choose preempt`},
		{"policy 0 fixed", `error: policy: GPU 0`},
		{"policy 0 soft", `error: policy: GPU 0`},
		{"policy 0 weight", `policy preempt → weight-preempt`},
		{"policy 1 fixed", `policy preempt → fixed`},
		{"policy 0", `1           0%`},
		{"gc", `nothing to remove`},
	} {
		if out := cgpu(tt.args); !strings.Contains(out, tt.want) {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.want)
		}
	}
	if r, err := n.Book.Find("abc"); err != nil || r.Paused {
		t.Errorf("%+v, %v", r, err)
	}
}
