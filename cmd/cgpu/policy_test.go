// SPDX-License-Identifier: Apache-2.0

package main

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/schema"
)

func TestPolicy(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "a", VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Percent: 30}}},
		{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 2}}}}})
	n.Reserve(ledger.Record{ID: "b", VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Percent: 45}}}}})
	preempt := sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}
	cards := map[string]sched.Card(nil)
	for _, tt := range []struct {
		args, out string
		change    map[string]sched.Card
	}{
		{args: "policy", out: `GPU  NAME         UUID          POLICY          SET BY     MAX-INST  PRIO-RATIO  CONTAINERS  PROMISED
0    Tesla T4     GPU-00000000  preempt         cgpu.toml  20        99%         2           75%
1    NVIDIA H200  GPU-10000000  weight-preempt  cgpu.toml  20        99%         1           0%
`},
		{args: "policy 0 fixed --max-inst 8", out: "GPU 0 (GPU-00000000): policy preempt → fixed, max-inst 20 → 8\n",
			change: map[string]sched.Card{nodetest.T4: {Policy: sched.PolicyFixed, MaxInst: 8, PrioRatio: 99}}},
		{args: "policy --prio-ratio 80 GPU-1", out: "GPU 1 (GPU-10000000): prio-ratio 99 → 80\n",
			change: map[string]sched.Card{nodetest.H200: {Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 80}}},
		{args: "policy 0", out: `GPU  NAME      UUID          POLICY  SET BY       MAX-INST  PRIO-RATIO  CONTAINERS  PROMISED
0    Tesla T4  GPU-00000000  fixed   cgpu policy  8         99%         2           75%
`},
		{args: "policy all weight",
			out: "GPU 0 (GPU-00000000): policy fixed → weight-preempt\nGPU 1 (GPU-10000000): policy preempt → weight-preempt\n",
			change: map[string]sched.Card{nodetest.T4: {Policy: sched.PolicyWeight, MaxInst: 8, PrioRatio: 99},
				nodetest.H200: {Policy: sched.PolicyWeight, MaxInst: 20, PrioRatio: 80}}},
		{args: "policy all 2", out: "GPU 0 (GPU-00000000): nothing to change\nGPU 1 (GPU-10000000): nothing to change\n"},
		{args: "policy all", out: "weight-preempt  cgpu policy  20        80%         1           0%\n"},
		{args: "policy 0 native", out: "error: policy: GPU 0 (" + nodetest.T4 +
			"): policy native with max-inst 8: container a asked for 30 % of the GPU's time, but its policy is native, which enforces no share; " +
			"choose another policy"},
		{args: "policy 0 --max-inst 1", out: "max-inst 1: 2 containers share it; stop some"},
		{args: "policy 7 fair", out: `error: policy: GPU "7": there is none`},
	} {
		if out := cgpu(tt.args); !strings.Contains(out, tt.out) {
			t.Errorf("cgpu %s: printed\n%s\nwant\n%s", tt.args, out, tt.out)
		}
		if cards == nil && tt.change != nil {
			cards = map[string]sched.Card{}
		}
		for uuid, card := range tt.change {
			cards[uuid] = card
		}
		if got, err := n.Book.Cards(); err != nil || !reflect.DeepEqual(got, cards) {
			t.Errorf("cgpu %s: cards %+v, %v\nwant %+v", tt.args, got, err, cards)
		}
	}
	var list []schema.Policy
	fromJSON(t, "policy -o json 1 --max-inst 7", &list)
	if want := []schema.Policy{{GPU: 1, Name: "NVIDIA H200", UUID: nodetest.H200, Policy: "weight-preempt", SetBy: "cgpu policy", MaxInst: 7,
		PrioRatio: 80, Containers: 1}}; !slices.Equal(list, want) {
		t.Errorf("%+v", list)
	}
	// What is set back stays set: cgpu.toml does not come through again by chance.
	if _, err := n.Book.SetCard(ledger.GPU{UUID: nodetest.T4}, preempt, func(c *sched.Card) error { *c = preempt; return nil }); err != nil {
		t.Fatal(err)
	}
	if out := cgpu("policy 0"); !strings.Contains(out, "cgpu policy") {
		t.Error(out)
	}
}
