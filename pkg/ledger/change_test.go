// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// two is a ledger with container abc on both GPUs (of GPU-a 4 GiB and 40 %) and abd on GPU-a (8 GiB, 50 %).
func two(t *testing.T) *Ledger {
	t.Helper()
	l := open(t)
	first := request("abc", "n1", 4*gib)
	first.Record.VGPUs[0].Percent = 40
	first.Record.VGPUs = append(first.Record.VGPUs, slice("GPU-b", gib)...)
	reserve(t, l, first)
	second := request("abd", "n2", 8*gib)
	second.Record.VGPUs[0].Percent = 50
	second.Record.Name = "web"
	reserve(t, l, second)
	return l
}

// Changes of several containers are one of the ledger; one that does not fit, or is of a container that is gone, changes nothing.
func TestChangeByPods(t *testing.T) {
	l := two(t)
	req := func(gpu string, limit quota.Bytes, weight int) ChangeRequest {
		return ChangeRequest{GPUs: twoGPUs, Overcommit: 1, Card: card(sched.PolicyPreempt, 20), Only: []string{gpu},
			Settings: Settings{Limit: &limit, Weight: &weight}, ByPod: true}
	}
	by := map[string]string{"cgpu.io/gpu-schd-weight": "2"}
	errs := l.ChangeByPods([]PodChange{
		{Nonce: "n1", Requests: []ChangeRequest{req("GPU-a", 2*gib, 2), req("GPU-b", gib, 3)}, ByPod: by},
		{Nonce: "other", Requests: []ChangeRequest{req("GPU-a", gib, 1)}, ByPod: by},
		{Nonce: "n2", Requests: []ChangeRequest{req("GPU-a", 14*gib, 7), req("GPU-a", 15*gib, 1)}, ByPod: by},
		{Nonce: "n2", Requests: []ChangeRequest{req("GPU-a", gib, 0)}, ByPod: by},
	})
	if errs[0] != nil || !errors.Is(errs[1], ErrNotFound) || errs[2] == nil || errs[3] == nil {
		t.Fatal(errs)
	}
	records, err := l.List()
	if err != nil {
		t.Fatal(err)
	}
	if want := []VGPU{vgpu("GPU-a", 2*gib, 2, 40, 0), vgpu("GPU-b", gib, 3, 0, 0)}; !reflect.DeepEqual(records[0].VGPUs, want) ||
		!reflect.DeepEqual(records[0].ByPod, by) {
		t.Errorf("%+v", records[0])
	}
	if want := []VGPU{vgpu("GPU-a", 8*gib, 1, 50, 0)}; !reflect.DeepEqual(records[1].VGPUs, want) || records[1].ByPod != nil {
		t.Errorf("one of two requests did not fit: %+v", records[1])
	}
	before, err := os.Stat(File(l.dir))
	if err != nil {
		t.Fatal(err)
	}
	if errs := l.ChangeByPods([]PodChange{{Nonce: "n2", Requests: []ChangeRequest{req("GPU-a", 15*gib, 1)}}}); errs[0] == nil {
		t.Error("more than there is")
	}
	if after, err := os.Stat(File(l.dir)); err != nil || !os.SameFile(before, after) {
		t.Errorf("nothing is changed, and the ledger is written: %v", err)
	}
}

func TestChange(t *testing.T) {
	for _, c := range []struct {
		name    string
		nonce   string
		req     ChangeRequest
		want    []VGPU
		refused string
	}{
		{"nothing", "n2", ChangeRequest{}, []VGPU{vgpu("GPU-a", 8*gib, 1, 50, 0)}, ""},
		{"all at once", "n2", ChangeRequest{Settings: Settings{Limit: new(12 * gib), Weight: new(64), Percent: new(60),
			Priority: new(quota.PriorityHigh)}}, []VGPU{vgpu("GPU-a", 12*gib, 64, 60, 2)}, ""},
		{"percent dropped", "n2", ChangeRequest{Settings: Settings{Percent: new(0)}}, []VGPU{vgpu("GPU-a", 8*gib, 1, 0, 0)}, ""},
		{"each slice", "n1", ChangeRequest{Settings: Settings{Limit: new(2 * gib), Weight: new(3)}},
			[]VGPU{vgpu("GPU-a", 2*gib, 3, 40, 0), vgpu("GPU-b", 2*gib, 3, 0, 0)}, ""},
		{"one slice", "n1", ChangeRequest{Only: []string{"GPU-b"}, Settings: Settings{Limit: new(24 * gib), Percent: new(100)}},
			[]VGPU{vgpu("GPU-a", 4*gib, 1, 40, 0), vgpu("GPU-b", 24*gib, 1, 100, 0)}, ""},
		{"overcommit", "n2", ChangeRequest{Settings: Settings{Limit: new(16 * gib)}, Overcommit: 1.25},
			[]VGPU{vgpu("GPU-a", 16*gib, 1, 50, 0)}, ""},
		{"lowered below what is promised too much", "n2",
			ChangeRequest{Settings: Settings{Percent: new(30), Limit: new(7 * gib)}, Card: card(sched.PolicyPreempt, 1)},
			[]VGPU{vgpu("GPU-a", 7*gib, 1, 30, 0)}, ""},

		{"one byte too many", "n2", ChangeRequest{Settings: Settings{Limit: new(12*gib + 1)}}, nil,
			"GPU 0 (GPU-a): asked for 12884901889B, but 12288MiB are free of 16384MiB, beside 1 container"},
		{"a percent too many", "n2", ChangeRequest{Settings: Settings{Percent: new(61)}}, nil,
			"GPU 0 (GPU-a): asked for 61 % of the GPU's time, but 60 % are free"},
		{"one slice has no room", "n1", ChangeRequest{Settings: Settings{Limit: new(9 * gib)}}, nil, "GPU 0 (GPU-a): asked for 9216MiB"},
		{"one setting does not fit", "n2", ChangeRequest{Settings: Settings{Weight: new(2), Percent: new(70)}}, nil, "asked for 70 %"},
		{"less than 64MiB", "n2", ChangeRequest{Settings: Settings{Limit: new(63 * quota.MiB)}}, nil, "want 64MiB to the GPU's 16384MiB"},
		{"more than the card", "n1", ChangeRequest{Settings: Settings{Limit: new(24*gib + 1)}, Only: []string{"GPU-b"}, Overcommit: 9}, nil,
			"GPU 1 (GPU-b): a limit of"},
		{"a GPU it does not have", "n2", ChangeRequest{Only: []string{"GPU-b"}, Settings: Settings{Weight: new(2)}}, nil,
			`container "web" has no slice of GPU GPU-b`},
		{"weight 0", "n2", ChangeRequest{Settings: Settings{Weight: new(0)}}, nil, "weight 0: want 1 to 64"},
		{"weight 65", "n2", ChangeRequest{Settings: Settings{Weight: new(65)}}, nil, "weight 65: want 1 to 64"},
		{"percent 101", "n2", ChangeRequest{Settings: Settings{Percent: new(101)}}, nil, "percent 101: want 1 to 100, or 0 for none"},
		{"percent -1", "n2", ChangeRequest{Settings: Settings{Percent: new(-1)}}, nil, "percent -1"},
		{"priority", "n2", ChangeRequest{Settings: Settings{Priority: new(quota.Priority(3))}}, nil, "priority 3: want 0 to 2"},
		{"unknown", "abd", ChangeRequest{Settings: Settings{Weight: new(2)}}, nil, ErrNotFound.Error()},
	} {
		l := two(t)
		c.req.GPUs = twoGPUs
		if c.req.Card == (sched.Card{}) {
			c.req.Card = preempt
		}
		before, err := l.List()
		must(t, err)
		got, err := l.Change(c.nonce, c.req)
		after, readErr := l.List()
		must(t, readErr)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: got %+v, %v; want %q", c.name, got, err, c.refused)
			}
			if !reflect.DeepEqual(before, after) {
				t.Errorf("%s: refused, and yet changed to %+v", c.name, after)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got.VGPUs, c.want) {
			t.Errorf("%s: got %+v, %v; want %+v", c.name, got.VGPUs, err, c.want)
		}
		for i, r := range after {
			if r.ID == got.ID {
				before[i].VGPUs = c.want
			}
		}
		if !reflect.DeepEqual(before, after) {
			t.Errorf("%s: stored\n%+v\nwant\n%+v", c.name, after, before)
		}
	}
}

// What asks for no more is not refused because others were promised too much meanwhile.
func TestChangeWithinTooMuch(t *testing.T) {
	l := two(t) // 90 % and 12 GiB of GPU-a
	fixed := card(sched.PolicyFixed, 20)
	must(t, l.change(func(f *file) error { f.Records[0].VGPUs[0].Percent = 80; return nil }))
	req := ChangeRequest{GPUs: twoGPUs, Card: fixed, Overcommit: 0.5, Settings: Settings{Percent: new(30), Limit: new(7 * gib)}}
	if _, err := l.Change("n2", req); err != nil {
		t.Errorf("less of both: %v", err)
	}
	native := ChangeRequest{GPUs: twoGPUs, Card: card(sched.PolicyNative, 20), Settings: Settings{Limit: new(6 * gib)}}
	if _, err := l.Change("n2", native); err != nil {
		t.Errorf("memory, where its percentage would be refused: %v", err)
	}
	must(t, l.Update("n2", func(r *Record) error { r.VGPUs[0].Limit = 7 * gib; return nil }))
	for name, req := range map[string]ChangeRequest{
		"fair has less":        {Settings: Settings{Percent: new(20)}, Card: card(sched.PolicyFair, 20)},
		"more time":            {Settings: Settings{Percent: new(31)}},
		"more memory":          {Settings: Settings{Limit: new(7*gib + quota.MiB)}},
		"native has no shares": {Settings: Settings{Percent: new(10)}, Card: card(sched.PolicyNative, 20)},
	} {
		req.GPUs, req.Overcommit = twoGPUs, 0.5
		if req.Card == (sched.Card{}) {
			req.Card = fixed
		}
		var refusal *Refusal
		if _, err := l.Change("n2", req); !errors.As(err, &refusal) || refusal.Remedy == "" {
			t.Errorf("%s: got %v, want a refusal", name, err)
		}
	}
}

func TestChangeDropsTheDead(t *testing.T) {
	l := two(t)
	must(t, l.Update("n1", func(r *Record) error { r.LauncherPID = 100; return nil }))
	r, err := l.Change("n2", ChangeRequest{GPUs: twoGPUs, Card: preempt, Settings: Settings{Percent: new(100)}})
	if err != nil || r.VGPUs[0].Percent != 100 {
		t.Errorf("got %+v, %v", r, err)
	}
	if got := ids(t, l); got != "abd/n2" {
		t.Errorf("left %s", got)
	}
}

func TestPause(t *testing.T) {
	l := two(t)
	for _, paused := range []bool{true, true, false, false} {
		// Neither a card nor GPUs are needed: nothing is admitted.
		if r, err := l.Change("n2", ChangeRequest{Paused: &paused}); err != nil || r.Paused != paused {
			t.Errorf("got %+v, %v; want paused %v", r, err, paused)
		}
		r, err := l.Find("abd")
		if must(t, err); r.Paused != paused {
			t.Errorf("stored %+v, want paused %v", r, paused)
		}
		if r, err = l.Find("abc"); err != nil || r.Paused {
			t.Errorf("another is paused: %+v, %v", r, err)
		}
	}
}

func TestSetCard(t *testing.T) {
	l := Open(t.TempDir() + "/run")
	set := func(gpu GPU, f func(*sched.Card)) (sched.Card, error) {
		return l.SetCard(gpu, preempt, func(c *sched.Card) error { f(c); return nil })
	}
	a, b := twoGPUs[0], twoGPUs[1]
	got, err := set(a, func(c *sched.Card) { c.MaxInst = 5 })
	if want := card(sched.PolicyPreempt, 5); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if got, err = set(a, func(c *sched.Card) { c.Policy = sched.PolicyFixed }); err != nil || got != card(sched.PolicyFixed, 5) {
		t.Errorf("not on top of what was set: %+v, %v", got, err)
	}
	want := map[string]sched.Card{"GPU-a": got}
	if cards, err := l.Cards(); err != nil || !reflect.DeepEqual(cards, want) {
		t.Errorf("cards %+v, %v; want %+v", cards, err, want)
	}

	stop := errors.New("stop")
	if _, err := l.SetCard(b, preempt, func(c *sched.Card) error { c.MaxInst = 1; return stop }); !errors.Is(err, stop) {
		t.Error(err)
	}
	for text, f := range map[string]func(*sched.Card){
		"max-inst 65":   func(c *sched.Card) { c.MaxInst = 65 },
		"max-inst 0":    func(c *sched.Card) { c.MaxInst = 0 },
		"prio-ratio 19": func(c *sched.Card) { c.PrioRatio = 19 },
		"policy":        func(c *sched.Card) { c.Policy = 6 },
	} {
		if _, err := set(b, f); err == nil || !strings.Contains(err.Error(), "GPU 1 (GPU-b): "+text) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if cards, err := l.Cards(); err != nil || !reflect.DeepEqual(cards, want) {
		t.Errorf("after refusals: cards %+v, %v; want %+v", cards, err, want)
	}

	// Containers come and go; the settings stay, and are those that count.
	req := request("x", "n", gib)
	req.Record.VGPUs = append(slice("GPU-a", gib), slice("GPU-b", gib)...)
	reserve(t, l, req)
	must(t, l.Update("n", func(r *Record) error { r.GuardPID = 1 << 30; return nil }))
	if removed, err := l.GC(); err != nil || len(removed) != 1 {
		t.Error(removed, err)
	}
	reserve(t, l, req)
	must(t, l.Release("n"))
	records, cards, err := l.State()
	if err != nil || len(records) != 0 || !reflect.DeepEqual(cards, want) {
		t.Errorf("state %v, %+v, %v", records, cards, err)
	}
	req.Record.VGPUs[0].Percent = 60
	reserve(t, l, req)
	if _, err := l.Reserve(request("y", "y", gib)); err != nil {
		t.Errorf("a weight of 1 of 5 beside 60 %%: %v", err)
	}
	var refusal *Refusal
	if _, err := l.Reserve(request("z", "z", gib)); err != nil {
		t.Errorf("the last 20 %%: %v", err)
	} else if _, err := l.Reserve(request("zz", "zz", gib)); !errors.As(err, &refusal) || !refusal.Time || refusal.GPU != a {
		t.Errorf("more than 100 %%: %v", err)
	}
}

func TestSetCardRefuses(t *testing.T) {
	for _, c := range []struct {
		name    string
		to      sched.Card
		refused string
	}{
		{"soft", card(sched.PolicySoft, 2), ""},
		{"fixed", card(sched.PolicyFixed, 20), ""},
		{"fixed, and the weight of the third is too much", card(sched.PolicyFixed, 9),
			`GPU 0 (GPU-a): policy fixed with max-inst 9: container "web" asked for 11.1 % of the GPU's time, but 10 % are free; choose another policy`},
		{"native", card(sched.PolicyNative, 20), "container abc asked for 40 % of the GPU's time, but its policy is native"},
		{"fair", card(sched.PolicyFair, 20), "container abc asked for 40 % of the GPU's time, but under policy fair"},
		{"fair for two", card(sched.PolicyFair, 2), ""},
		{"fewer than there are", card(sched.PolicyPreempt, 1), "GPU 0 (GPU-a): max-inst 1: 2 containers share it; stop some"},
	} {
		l := open(t)
		first := request("abc", "n1", gib)
		first.Record.VGPUs[0].Percent = 40
		reserve(t, l, first)
		second := request("abd", "n2", gib)
		second.Record.VGPUs[0].Percent, second.Record.Name = 50, "web"
		if strings.Contains(c.name, "weight") {
			first.Record.ID, first.Record.VGPUs[0].Percent = "abe", 50
			reserve(t, l, first)
			second.Record.VGPUs[0].Percent = 0
		}
		reserve(t, l, second)
		before, err := os.ReadFile(l.path(fileName))
		must(t, err)
		got, err := l.SetCard(twoGPUs[0], preempt, func(card *sched.Card) error { *card = c.to; return nil })
		if c.refused == "" {
			if err != nil || got != c.to {
				t.Errorf("%s: got %+v, %v", c.name, got, err)
			}
			continue
		}
		var refusal *Refusal
		if !errors.As(err, &refusal) || !strings.Contains(err.Error(), c.refused) || refusal.Remedy == "" {
			t.Errorf("%s: got %v, want %q", c.name, err, c.refused)
		}
		if after, err := os.ReadFile(l.path(fileName)); err != nil || string(after) != string(before) {
			t.Errorf("%s: refused, and yet stored %s", c.name, after)
		}
		// Once the containers are provably dead they are in nobody's way.
		must(t, l.change(func(f *file) error {
			for i := range f.Records {
				f.Records[i].LauncherPID = 100
			}
			return nil
		}))
		if got, err := l.SetCard(twoGPUs[0], preempt, func(card *sched.Card) error { *card = c.to; return nil }); err != nil || got != c.to {
			t.Errorf("%s, when they are dead: got %+v, %v", c.name, got, err)
		}
	}
}

// A ledger from before there were cards is as good, and one without keeps that form.
func TestLedgerWithoutCards(t *testing.T) {
	l := open(t)
	must(t, os.MkdirAll(l.dir, 0o700))
	const old = `{"version":1,"records":[{"id":"a","nonce":"n","bundle":"","created":"2026-01-01T00:00:00Z","vgpus":[{"uuid":"GPU-a","limit":1073741824,"weight":1,"priority":1}],"socket":"","control":"","launcherPid":1,"launcherStart":0}]}` + "\n"
	must(t, os.WriteFile(l.path(fileName), []byte(old), 0o600))
	records, cards, err := l.State()
	if err != nil || len(records) != 1 || cards != nil {
		t.Fatal(records, cards, err)
	}
	must(t, l.Update("n", func(*Record) error { return nil }))
	if got, err := os.ReadFile(l.path(fileName)); err != nil || string(got) != old {
		t.Errorf("rewritten as %s, %v", got, err)
	}
}

// What administrators set is noted with the allocation, for the slice that it is about; what a pod's author sets is not.
func TestChangeNotes(t *testing.T) {
	l := open(t)
	req := request("abc", "n1", 4*gib)
	req.Record.VGPUs = append(req.Record.VGPUs, slice("GPU-b", gib)...)
	req.Record.Allocated = []Allocation{{ID: "1", UUID: "GPU-a", Given: req.Record.VGPUs[0]},
		{ID: "2", UUID: "GPU-b", Given: req.Record.VGPUs[1]}}
	reserve(t, l, req)
	change := func(r ChangeRequest) []Allocation {
		t.Helper()
		r.GPUs, r.Overcommit, r.Card = req.GPUs, 1, card(sched.PolicyPreempt, 20)
		if _, err := l.Change("n1", r); err != nil {
			t.Fatal(err)
		}
		got, err := l.Find("abc") // as it is in the file
		if err != nil {
			t.Fatal(err)
		}
		return got.Allocated
	}
	text := func(s Settings) string {
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for i, step := range []struct {
		req  ChangeRequest
		a, b string
	}{
		{ChangeRequest{ByPod: true, Settings: Settings{Weight: new(2), Limit: new(gib)}}, `{}`, `{}`},
		{ChangeRequest{Paused: new(true)}, `{}`, `{}`},
		{ChangeRequest{Only: []string{"GPU-b"}, Settings: Settings{Limit: new(gib / 2)}}, `{}`, `{"limit":536870912}`},
		{ChangeRequest{Settings: Settings{Weight: new(2), Percent: new(0)}}, `{"weight":2,"percent":0}`,
			`{"limit":536870912,"weight":2,"percent":0}`},
		{ChangeRequest{ByPod: true, Settings: Settings{Weight: new(1)}}, `{"weight":2,"percent":0}`,
			`{"limit":536870912,"weight":2,"percent":0}`},
	} {
		got := change(step.req)
		if len(got) != 2 || text(got[0].Set) != step.a || text(got[1].Set) != step.b {
			t.Errorf("step %d: %s and %s, want %s and %s", i, text(got[0].Set), text(got[1].Set), step.a, step.b)
		}
	}
}

// vgpu is one without spill.
func vgpu(uuid string, limit quota.Bytes, weight, percent int, priority quota.Priority) VGPU {
	return VGPU{UUID: uuid, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: weight, Percent: percent, Priority: priority}}}
}
