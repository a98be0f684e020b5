// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

var preloadable = map[sched.Policy]bool{sched.PolicyPreempt: true, sched.PolicyWeight: true, sched.PolicyNative: true}

// A container without a guard gets no GPU whose policy needs one.
func TestPreloadPolicies(t *testing.T) {
	for policy := sched.PolicyFair; policy <= sched.PolicyNative; policy++ {
		l := open(t)
		req := request("a", "n", gib)
		req.Record.Preload, req.Card = true, card(policy, 20)
		_, err := l.Reserve(req)
		var refusal *Refusal
		want := "GPU 0 (GPU-a): its policy is " + policy.String()
		if preloadable[policy] != (err == nil) || err != nil &&
			(!errors.As(err, &refusal) || refusal.Time || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "cgpu policy")) {
			t.Errorf("%s: %v", policy, err)
		}
		// Placement passes such a GPU over.
		place := Request{Record: Record{ID: "p", Nonce: "n", Preload: true}, GPUs: twoGPUs, Card: preempt,
			Place: &Placement{Memory: quota.Memory{Fixed: gib}, Slice: VGPU{Slice: quota.Slice{Share: quota.Share{Weight: 1}}}}}
		_, err = l.SetCard(twoGPUs[0], preempt, func(c *sched.Card) error { *c = card(policy, 20); return nil })
		must(t, err)
		if r := reserve(t, l, place); (r.VGPUs[0].UUID == "GPU-a") != preloadable[policy] {
			t.Errorf("%s: placed on %s", policy, r.VGPUs[0].UUID)
		}
		// With a guard all are well.
		req.Record.ID, req.Record.Preload = "g", false
		reserve(t, l, req)
	}
	l := open(t)
	place := Request{Record: Record{ID: "p", Nonce: "n", Preload: true}, GPUs: twoGPUs, Card: card(sched.PolicyFixed, 20),
		Place: &Placement{Memory: quota.Memory{Fixed: gib}, Slice: VGPU{Slice: quota.Slice{Share: quota.Share{Weight: 1}}}}}
	if _, err := l.Reserve(place); err == nil || !strings.Contains(err.Error(), "have room: GPU 0: its policy is fixed") ||
		!strings.Contains(err.Error(), "choose another (cgpu policy") {
		t.Errorf("nowhere to place it: %v", err)
	}
}

func TestSetCardBesidePreload(t *testing.T) {
	l := open(t)
	req := request("a", "n", gib)
	req.Record.Preload, req.Record.Name = true, "web"
	reserve(t, l, req)
	reserve(t, l, request("g", "n", gib))
	for policy := sched.PolicyFair; policy <= sched.PolicyNative; policy++ {
		set := func(gpu GPU) error {
			_, err := l.SetCard(gpu, preempt, func(c *sched.Card) error { c.Policy = policy; return nil })
			return err
		}
		err := set(twoGPUs[0])
		var refusal *Refusal
		if preloadable[policy] != (err == nil) || err != nil &&
			(!errors.As(err, &refusal) || !strings.Contains(err.Error(), `needs a guard, and container "web" has none`)) {
			t.Errorf("%s: %v", policy, err)
		}
		must(t, set(twoGPUs[1]))
	}
}

// TestPreloadPages: creates that fail without a hook, and those of one name, leave no more pages than there are records.
func TestPreloadPages(t *testing.T) {
	l := open(t)
	create := func(id string, n int) {
		t.Helper()
		req := request(id, fmt.Sprintf("%016x", n), 6*gib)
		req.Record.Preload, req.Record.LauncherPID = true, 100 // which has ended
		must(t, page.Create(page.File(l.dir, reserve(t, l, req).Nonce), page.Header{Flags: page.FlagPreload}, nil))
	}
	for n := range 20 {
		create(fmt.Sprint("pod-", n), n)
		create("web", 100+n)
	}
	var want []string
	records, err := l.List()
	must(t, err)
	for _, r := range records {
		want = append(want, r.Nonce)
	}
	slices.Sort(want)
	if got := left(t, l, pagesName); !slices.Equal(got, want) || len(want) > 4 {
		t.Errorf("pages %v, records %v", got, want)
	}
	// A change that is refused drops none.
	req := request("large", "eeeeeeeeeeeeeeee", 1000*gib)
	if _, err := l.Reserve(req); err == nil {
		t.Fatal("the test does not test")
	}
	if got := left(t, l, pagesName); !slices.Equal(got, want) {
		t.Errorf("pages %v, records %v", got, want)
	}
	_, err = os.Stat(page.File(l.dir, want[0]))
	must(t, err)
}
