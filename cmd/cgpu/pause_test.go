// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
)

// fromJSON runs a command that prints JSON, and reads it.
func fromJSON(t *testing.T, args string, v any) {
	t.Helper()
	out := cgpu(args)
	if err := json.Unmarshal([]byte(out), v); err != nil {
		t.Fatalf("%s: %v: %s", args, err, out)
	}
}

func TestPause(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "abcdef0123456789", Name: "web",
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}},
			{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB}}}, Native: nil})
	n.Reserve(ledger.Record{ID: "other", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	// A guard that follows the ledger, the second GPU one question later than the first.
	var asked atomic.Int64
	nodetest.FakeGuardFunc(t, r.Control, func() string {
		now, err := n.Book.Find(r.ID)
		if err != nil {
			return ""
		}
		s := nodetest.Status(r)
		s.VGPUs[0].Compute.TSGs, s.VGPUs[1].Compute.TSGs = 2, 1
		s.VGPUs[0].Compute.Paused = now.Paused
		s.VGPUs[1].Compute.Paused = now.Paused == (asked.Add(1)%3 != 1)
		idle := api.VGPUStatus{Index: 3, Compute: &api.ComputeStatus{Paused: now.Paused}}
		s.VGPUs = append(s.VGPUs, api.VGPUStatus{Index: 2, Native: true}, idle)
		return nodetest.StatusLine(t, s)
	})
	for _, tt := range []struct {
		args, out string
		paused    bool
	}{
		{"pause abc", "abcdef012345 (web): paused\n", true},
		{"pause web", "abcdef012345 (web): was paused already\n", true},
		{"resume web", "abcdef012345 (web): goes on\n", false},
		{"resume abc", "abcdef012345 (web): was not paused\n", false},
	} {
		if out := cgpu(tt.args); out != tt.out {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.out)
		}
		if got, err := n.Book.Find(r.ID); err != nil || got.Paused != tt.paused {
			t.Errorf("%s: %+v, %v", tt.args, got, err)
		}
	}
	for _, args := range []string{"pause -o json web", "set web --weight 3 -o json"} {
		var v schema.Node
		fromJSON(t, args, &v)
		if len(v.GPUs) != 2 || len(v.GPUs[0].VGPUs) != 1 || v.GPUs[0].VGPUs[0].ID != r.ID || !v.GPUs[0].VGPUs[0].Paused {
			t.Errorf("%s: %+v", args, v)
		}
	}
	if out := cgpu("resume web -o yaml"); !strings.HasPrefix(out, `error: resume: -o "yaml": want table or json`) {
		t.Error(out)
	}
	if asked.Load() < 5 {
		t.Errorf("the guard was asked %d times", asked.Load())
	}
}

func TestPauseWithoutGuard(t *testing.T) {
	n := nodetest.New(t)
	vgpu := func() []ledger.VGPU { return []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}} }
	n.Reserve(ledger.Record{ID: "dead", VGPUs: vgpu()}) // nobody listens
	young := n.Reserve(ledger.Record{ID: "young", VGPUs: vgpu()})
	s := nodetest.Status(young)
	s.InitPID = 0
	nodetest.FakeGuard(t, young.Control, nodetest.StatusLine(t, s))
	for args, want := range map[string]string{
		"pause dead": "error: pause: container dead: its guard is gone, so nobody stops what runs on the GPU (new GPU calls fail); stop the " +
			"container, then cgpu gc gives back",
		"resume dead": "error: resume: container dead: its guard is gone, so its GPU calls fail for good; nothing of it is paused; stop the " +
			"container, then cgpu gc gives back",
		"pause young":  "young: paused; it has not started yet\n",
		"resume young": "young: ",
	} {
		if out := cgpu(args); !strings.HasPrefix(out, want) {
			t.Errorf("%s: printed %s\nwant %s", args, out, want)
		}
	}
}
