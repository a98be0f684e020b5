// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// allocated is a request for a share of GPU-a as it was allocated.
func allocated(id string, limit quota.Bytes, percent int) Request {
	req := request(id, "n-"+id, limit)
	req.Record.VGPUs[0].Percent = percent
	req.Record.Allocated = []Allocation{{ID: "claim/" + id, UUID: "GPU-a", Given: req.Record.VGPUs[0]}}
	return req
}

// byPod asks for a share of GPU-a beside 4 GiB and 20 percent of headroom.
func byPod(l *Ledger, id string, policy sched.Policy, limit quota.Bytes, percent, weight int) error {
	req := ChangeRequest{GPUs: twoGPUs, Overcommit: 1, Card: card(policy, 20), Only: []string{"GPU-a"}, ByPod: true,
		Headroom: 4 * gib, HeadroomCores: 20}
	if limit > 0 {
		req.Limit = &limit
	}
	if percent > 0 {
		req.Percent = &percent
	}
	if weight > 0 {
		req.Weight = &weight
	}
	return l.ChangeByPods([]PodChange{{Nonce: "n-" + id, Requests: []ChangeRequest{req}}})[0]
}

// What pods have beyond their allocations, and containers without any have at all, is together at most the headroom.
func TestBeyondAllocation(t *testing.T) {
	l := open(t)
	reserve(t, l, allocated("abc", 4*gib, 30))
	reserve(t, l, allocated("abd", 2*gib, 10))
	refused := func(what string, err error, text string) {
		t.Helper()
		if _, ok := errors.AsType[*Refusal](err); !ok || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want a refusal with %q", what, err, text)
		}
	}
	taken := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	// The GPU has 9 GiB that nobody has; but a scheduler takes all but 4 of them for its own.
	refused("more than the headroom", byPod(l, "abc", sched.PolicyPreempt, 9*gib, 0, 0), "5120MiB beyond what was allocated")
	taken("a part of it", byPod(l, "abc", sched.PolicyPreempt, 7*gib, 45, 5))
	refused("the rest is less", byPod(l, "abd", sched.PolicyPreempt, 4*gib, 0, 0), "1024MiB are left")
	refused("the rest of the time is less", byPod(l, "abd", sched.PolicyPreempt, 0, 16, 0), "5 are left")
	taken("the rest", byPod(l, "abd", sched.PolicyPreempt, 3*gib, 15, 0))
	refused("one's own is no room for more", byPod(l, "abc", sched.PolicyPreempt, 8*gib, 0, 0), "3072MiB are left")
	taken("lowered, and still beyond", byPod(l, "abc", sched.PolicyPreempt, 6*gib, 40, 0))
	taken("what another gave back", byPod(l, "abd", sched.PolicyPreempt, 4*gib, 0, 0))
	// What was allocated elsewhere finds its room: 15 GiB less the 4.
	reserve(t, l, allocated("abe", 5*gib, 40))

	l = open(t)
	reserve(t, l, allocated("abc", 4*gib, 0))
	docker := request("doc", "n-doc", 3*gib)
	reserve(t, l, docker)
	refused("beside one that no scheduler knows of", byPod(l, "abc", sched.PolicyPreempt, 6*gib, 0, 0), "1024MiB are left")
	refused("a weight that is a cap", byPod(l, "abc", sched.PolicyFixed, 0, 0, 9), "no scheduler counted")
	taken("a weight that is none", byPod(l, "abc", sched.PolicyPreempt, 0, 0, 9))

	l = open(t)
	plugin := allocated("abd", gib, 0)
	plugin.Record.Allocated[0].Plugin = true
	reserve(t, l, plugin)
	refused("a weight that is a cap, of a device plugin's", byPod(l, "abd", sched.PolicyFixed, 0, 0, 9), "no scheduler counted")
	reserve(t, l, allocated("abc", 4*gib, 30))
	taken("beyond", byPod(l, "abc", sched.PolicyPreempt, 7*gib, 45, 5))
	limit, percent, weight := 5*gib, 40, 3
	admin := ChangeRequest{GPUs: twoGPUs, Overcommit: 1, Card: card(sched.PolicyPreempt, 20), Only: []string{"GPU-a"},
		Settings: Settings{Limit: &limit, Percent: &percent, Weight: &weight}}
	if _, err := l.Change("n-abc", admin); err != nil {
		t.Fatal(err)
	}
	refused("memory that an administrator took back", byPod(l, "abc", sched.PolicyPreempt, 6*gib, 0, 0), "an administrator has set 5120MiB")
	refused("time that he took back", byPod(l, "abc", sched.PolicyPreempt, 0, 45, 0), "an administrator has set 40")
	refused("weight that he took back", byPod(l, "abc", sched.PolicyPreempt, 0, 0, 5), "an administrator has set 3")
	taken("what he left", byPod(l, "abc", sched.PolicyPreempt, 5*gib, 40, 3))
}

// However pods are raised and lowered, start and end: what a scheduler allocates of all but the headroom always finds its room.
func TestHeadroomHolds(t *testing.T) {
	const headroom, cores = 4 * gib, 20
	gpu := twoGPUs[0]
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		l := open(t)
		type pod struct {
			limit   quota.Bytes
			percent int
		}
		pods := map[string]pod{}
		raised := 0
		for step := range 120 {
			memory, percent := gpu.Memory-headroom, 100-cores
			for _, p := range pods {
				memory, percent = memory-p.limit, percent-p.percent
			}
			switch id := fmt.Sprintf("pod%d", r.IntN(8)); {
			case pods[id].limit == 0:
				p := pod{quota.Bytes(1+r.IntN(3000)) * quota.MiB * 2, 1 + r.IntN(30)}
				if p.limit > memory || p.percent > percent || p.limit < quota.MinMemory {
					continue // the scheduler has no room for it
				}
				req := allocated(id, p.limit, p.percent)
				if _, err := l.Reserve(req); err != nil {
					t.Fatalf("seed %d, step %d: what was allocated has no room: %v", seed, step, err)
				}
				pods[id] = p
			case r.IntN(6) == 0:
				if err := l.Release("n-" + id); err != nil {
					t.Fatal(err)
				}
				delete(pods, id)
			default:
				err := byPod(l, id, sched.PolicyPreempt, quota.Bytes(64+r.IntN(8000))*quota.MiB, 1+r.IntN(60), 0)
				if err == nil {
					raised++
				}
			}
		}
		if raised == 0 {
			t.Errorf("seed %d: nothing was changed", seed)
		}
	}
}
