// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestDomain: one server for each domain and GPU, and members after it, there.
func TestDomain(t *testing.T) {
	server := Record{ID: "s", Nonce: "s", Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)}
	for _, c := range []struct {
		name    string
		r       Record
		place   bool
		refused string
	}{
		{"a member", Record{Domain: "team", VGPUs: slice("GPU-a", gib)}, false, ""},
		{"a member that is placed", Record{Domain: "team"}, true, ""},
		{"a member elsewhere", Record{Domain: "team", VGPUs: slice("GPU-b", gib)}, false, "domain team has no MPS server there; start it before"},
		{"a member of another domain", Record{Domain: "tea", VGPUs: slice("GPU-a", gib)}, false, "domain tea has no MPS server there"},
		{"a member of none that is placed", Record{Domain: "tea"}, true, "has no MPS server"},
		{"a second server", Record{Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)}, false, "has an MPS server there already"},
		{"a server on another GPU", Record{Domain: "team", DomainServer: true, VGPUs: slice("GPU-b", gib)}, false, ""},
		{"another domain's", Record{Domain: "tea", DomainServer: true, VGPUs: slice("GPU-a", gib)}, false, ""},
		{"in no domain", Record{VGPUs: slice("GPU-a", gib)}, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := Request{Record: c.r, GPUs: twoGPUs, Card: preempt}
			if c.place {
				req.Place = &Placement{Policy: PolicySpread, Memory: quota.Memory{Fixed: gib}}
			}
			got, err := admit(&file{Records: []Record{server}}, req)
			switch {
			case c.refused == "" && (err != nil || c.place && got[0].UUID != "GPU-a"):
				t.Errorf("%v, %v", got, err)
			case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)):
				t.Errorf("%v, want %q", err, c.refused)
			}
		})
	}
}

// TestDomainChange: a member's share is the domain's, and no domain has a priority.
func TestDomainChange(t *testing.T) {
	two, high, normal, limit := 2, quota.PriorityHigh, quota.PriorityDefault, 2*gib
	for name, c := range map[string]struct {
		server  bool
		s       Settings
		refused bool
	}{
		"memory of a member":       {false, Settings{Limit: &limit}, false},
		"weight of a member":       {false, Settings{Weight: &two}, true},
		"percentage of a member":   {false, Settings{Percent: &two}, true},
		"priority of a member":     {false, Settings{Priority: &normal}, true},
		"weight of a server":       {true, Settings{Weight: &two}, false},
		"priority of a server":     {true, Settings{Priority: &high}, true},
		"a server's, as it was":    {true, Settings{Priority: &normal}, false},
		"percentage of the server": {true, Settings{Percent: &two}, false},
	} {
		req := ChangeRequest{GPUs: twoGPUs, Card: card(sched.PolicyFair, 20), Settings: c.s}
		_, err := req.apply(&file{}, Record{Domain: "team", DomainServer: c.server, VGPUs: slice("GPU-a", gib)})
		if (err != nil) != c.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}
