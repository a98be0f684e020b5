// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"
)

// TestLocalState: a Local that goes on from another one's state does the same, paused or not.
func TestLocalState(t *testing.T) {
	card := Card{Policy: PolicyFixed, MaxInst: 20, PrioRatio: 90}
	l := NewLocal(DefaultTiming(), card)
	l.Adopt(Plan{Card: card, Effective: PolicyFixed, Share: Share{Weight: 3, Percent: 40}, Cap: 400,
		Slot: Slot{10 * time.Millisecond, 40 * time.Millisecond, 100 * time.Millisecond}, Suspended: true}, time.Second)
	l.Hold(true, 2*time.Second)
	l.Paused(3 * time.Second)
	l.Lapse()
	l.debt = debt{budget: 1, spent: 2, at: 3, pauses: 4, owing: 5 * time.Second}
	b, err := json.Marshal(l.State())
	if err != nil {
		t.Fatal(err)
	}
	var s LocalState
	if err := json.Unmarshal(b, &s); err != nil {
		t.Fatal(err)
	}
	next := NewLocal(DefaultTiming(), Card{MaxInst: 1})
	next.Restore(s)
	next.row = l.row // which stands on the page
	if !reflect.DeepEqual(l, next) {
		t.Errorf("%+v\nwant %+v", next, l)
	}
	if off, _ := next.Off(4*time.Second, true); !off {
		t.Error("the pause is over")
	}
}

// TestPlanStateValid: what is no plan is none, wherever it came from.
func TestPlanStateValid(t *testing.T) {
	good := NewLocal(DefaultTiming(), Card{Policy: PolicyPreempt, MaxInst: 20, PrioRatio: 90}).State().Plan
	for name, change := range map[string]func(*PlanState){
		"policy": func(p *PlanState) { p.Policy = 99 }, "weight": func(p *PlanState) { p.Weight = 0 },
		"percent": func(p *PlanState) { p.Percent = 101 },
		"cap":     func(p *PlanState) { p.Cap = -1 }, "slot without a cycle": func(p *PlanState) { p.Slot[1] = 1 },
		"slot beyond its cycle": func(p *PlanState) { p.Slot = [3]time.Duration{0, 3, 2} },
	} {
		p := good
		if change(&p); p.Valid() || !good.Valid() {
			t.Errorf("%s: %+v is taken, or %+v is not", name, p, good)
		}
	}
}
