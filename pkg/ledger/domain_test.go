// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestDomain: one server for each domain and GPU, and members are placed where others of theirs are.
func TestDomain(t *testing.T) {
	server := Record{ID: "s", Nonce: "s", Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)}
	member := Record{ID: "m", Nonce: "m", Domain: "team", VGPUs: slice("GPU-a", gib)}
	for _, c := range []struct {
		name    string
		r       Record
		placed  string // where, if the ledger chooses
		refused string
	}{
		{"a member", Record{Domain: "team", VGPUs: slice("GPU-b", gib)}, "", ""},
		{"a member that is placed", Record{Domain: "team"}, "GPU-a", ""},
		{"another domain's that is placed", Record{Domain: "tea"}, "GPU-b", ""},
		{"one of none", Record{}, "GPU-b", ""},
		{"a second server", Record{Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)}, "", "has an MPS server on GPU GPU-a already"},
		{"a server on another GPU", Record{Domain: "team", DomainServer: true, VGPUs: slice("GPU-b", gib)}, "", ""},
		{"another domain's", Record{Domain: "tea", DomainServer: true, VGPUs: slice("GPU-a", gib)}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := Request{Record: c.r, GPUs: twoGPUs, Card: preempt}
			if c.r.DomainServer {
				req.Refuse = SoleServer(c.r.Domain)
			}
			if c.placed != "" {
				req.Place = &Placement{Policy: PolicySpread, Memory: quota.Memory{Fixed: gib}}
			}
			got, err := admit(&file{Records: []Record{server, member}}, req)
			switch {
			case c.refused == "" && (err != nil || c.placed != "" && got[0].UUID != c.placed):
				t.Errorf("%v, %v", got, err)
			case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)):
				t.Errorf("%v, want %q", err, c.refused)
			}
		})
	}
}

// TestRetire: a server is marked for its end while nobody names its domain on its GPU, and not else.
func TestRetire(t *testing.T) {
	for name, c := range map[string]struct {
		other Record
		want  bool
	}{
		"alone":                        {Record{}, true},
		"a member":                     {Record{Domain: "team", VGPUs: slice("GPU-a", gib)}, false},
		"a member on another GPU":      {Record{Domain: "team", VGPUs: slice("GPU-b", gib)}, true},
		"another domain's member":      {Record{Domain: "tea", VGPUs: slice("GPU-a", gib)}, true},
		"a server on another GPU":      {Record{Domain: "team", DomainServer: true, VGPUs: slice("GPU-b", gib)}, true},
		"one that is in no domain":     {Record{VGPUs: slice("GPU-a", gib)}, true},
		"another domain's on that GPU": {Record{Domain: "tea", DomainServer: true, VGPUs: slice("GPU-a", gib)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := Open(t.TempDir())
			for i, r := range []Record{{Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)}, c.other} {
				r.ID, r.Nonce = string(rune('a'+i)), string(rune('a'+i))
				r.LauncherPID = os.Getpid()
				if len(r.VGPUs) == 0 {
					r.VGPUs = slice("GPU-b", gib)
				}
				if _, err := l.Reserve(Request{Record: r, GPUs: twoGPUs, Card: preempt}); err != nil {
					t.Fatal(err)
				}
			}
			got, err := l.Retire("a")
			r, _ := l.Get("a")
			if err != nil || got != c.want || r.Retired != c.want {
				t.Errorf("%v, %v, %+v", got, err, r)
			}
		})
	}
	l := Open(t.TempDir()) // a member that was killed with its guard is none
	l.status = func(pid int, _ uint64) liveness {
		if pid == 7 {
			return dead
		}
		return alive
	}
	for _, r := range []Record{{ID: "a", Nonce: "a", LauncherPID: 1, Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)},
		{ID: "b", Nonce: "b", LauncherPID: 7, GuardPID: 7, Domain: "team", VGPUs: slice("GPU-a", gib)}} {
		if _, err := l.Reserve(Request{Record: r, GPUs: twoGPUs, Card: preempt}); err != nil {
			t.Fatal(err)
		}
	}
	if retired, err := l.Retire("a"); !retired || err != nil {
		t.Errorf("beside a dead member: %v, %v", retired, err)
	}
	if retired, err := Open(t.TempDir()).Retire("a"); retired || err == nil {
		t.Errorf("one that is not there: %v, %v", retired, err)
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

// TestSeats: a member has the first seat that no other of its domain has on its GPU, and keeps it; nobody else has one.
func TestSeats(t *testing.T) {
	l := Open(t.TempDir())
	for i, c := range []struct {
		r    Record
		seat int
	}{
		{Record{Domain: "team", DomainServer: true, VGPUs: slice("GPU-a", gib)}, 0},
		{Record{Domain: "team", VGPUs: slice("GPU-a", gib)}, 1},
		{Record{Domain: "team", VGPUs: slice("GPU-a", gib)}, 2},
		{Record{VGPUs: slice("GPU-a", gib)}, 0},
		{Record{Domain: "tea", VGPUs: slice("GPU-a", gib)}, 1},
		{Record{Domain: "team", VGPUs: slice("GPU-b", gib)}, 1},
		{Record{Domain: "team", VGPUs: slice("GPU-a", gib)}, 3},
		{Record{Domain: "team", VGPUs: slice("GPU-a", gib)}, 2}, // whose was given back
	} {
		if i == 7 {
			if err := l.Release("n2"); err != nil {
				t.Fatal(err)
			}
		}
		c.r.ID, c.r.Nonce, c.r.LauncherPID = fmt.Sprint("c", i), fmt.Sprint("n", i), os.Getpid()
		r, err := l.Reserve(Request{Record: c.r, GPUs: twoGPUs, Card: preempt})
		if err != nil || r.Seat != c.seat {
			t.Errorf("%d: seat %d, %v, want %d", i, r.Seat, err, c.seat)
		}
	}
}

// TestThreadsChange: only a member has a part of the multiprocessors.
func TestThreadsChange(t *testing.T) {
	for name, c := range map[string]struct {
		r       Record
		threads int
		only    string
		refused string
	}{
		"a member":                 {Record{Domain: "team"}, 60, "", ""},
		"all of it":                {Record{Domain: "team"}, 0, "", ""},
		"on its GPU":               {Record{Domain: "team"}, 60, "GPU-a", ""},
		"on a GPU that is not's":   {Record{Domain: "team"}, 60, "GPU-b", "has no slice of GPU GPU-b"},
		"more than all":            {Record{Domain: "team"}, 101, "", "want 1 to 100"},
		"less than nothing":        {Record{Domain: "team"}, -1, "", "want 1 to 100"},
		"one in no domain":         {Record{}, 60, "", "it is in no trust domain"},
		"all, of one in none":      {Record{}, 0, "", "it is in no trust domain"},
		"the server of a domain's": {Record{Domain: "team", DomainServer: true}, 60, "", "it is a domain's MPS server"},
	} {
		l := Open(t.TempDir())
		c.r.ID, c.r.Nonce, c.r.LauncherPID, c.r.VGPUs = "a", "a", os.Getpid(), slice("GPU-a", gib)
		if c.r.Domain != "" {
			c.r.Threads = 30
		}
		if _, err := l.Reserve(Request{Record: c.r, GPUs: twoGPUs, Card: preempt}); err != nil {
			t.Fatal(err)
		}
		req := ChangeRequest{GPUs: twoGPUs, Card: preempt, Threads: &c.threads}
		if c.only != "" {
			req.Only = []string{c.only}
		}
		_, err := l.Change("a", req)
		want := c.threads
		if c.refused != "" {
			want = c.r.Threads
		}
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %v, want %q", name, err, c.refused)
		}
		if r, _ := l.Get("a"); r.Threads != want {
			t.Errorf("%s: %d %%, want %d", name, r.Threads, want)
		}
	}
}

// TestBesideDomains: members of a domain do not give way to high priority, so there is none beside them.
func TestBesideDomains(t *testing.T) {
	record := func(domain, gpu string, p quota.Priority) Record {
		r := Record{ID: "x", Nonce: domain + gpu + p.String(), Domain: domain, VGPUs: slice(gpu, gib)}
		r.VGPUs[0].Priority = p
		return r
	}
	high, normal := quota.PriorityHigh, quota.PriorityDefault
	for name, c := range map[string]struct {
		r, other Record
		refused  string
	}{
		"a member beside high priority":    {record("team", "GPU-a", normal), record("", "GPU-a", high), `CGPU_DOMAIN (--domain) "team"`},
		"high priority beside a member":    {record("", "GPU-a", high), record("team", "GPU-a", normal), "is in trust domain team"},
		"a member beside the default":      {record("team", "GPU-a", normal), record("", "GPU-a", normal), ""},
		"the default beside a member":      {record("", "GPU-a", normal), record("team", "GPU-a", normal), ""},
		"high priority beside the default": {record("", "GPU-a", high), record("", "GPU-a", normal), ""},
		"on another GPU":                   {record("", "GPU-b", high), record("team", "GPU-a", normal), ""},
		"itself":                           {record("team", "GPU-a", high), record("team", "GPU-a", high), ""},
	} {
		refusal := c.r.BesideDomains([]Record{c.other, c.r})
		if (refusal != nil) != (c.refused != "") || refusal != nil && !strings.Contains(refusal.Error(), c.refused) {
			t.Errorf("%s: %v", name, refusal)
		}
		if c.r.Domain != "" { // it is refused a priority in any case
			continue
		}
		r := c.r
		r.VGPUs = slice(r.VGPUs[0].UUID, gib)
		req := ChangeRequest{GPUs: twoGPUs, Card: preempt, Settings: Settings{Priority: &c.r.VGPUs[0].Priority}}
		if _, err := req.apply(&file{Records: []Record{c.other}}, r); (err != nil) != (c.refused != "") {
			t.Errorf("%s, by a change: %v", name, err)
		}
	}
}
