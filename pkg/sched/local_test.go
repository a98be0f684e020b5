// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// localNow is a moment, the begin of a cycle of 100 ms.
const localNow = 1000 * time.Second

func newTestLocal() *Local {
	return NewLocal(DefaultTiming(), Card{Policy: PolicyPreempt, MaxInst: 20, PrioRatio: DefaultPrioRatio})
}

// TestDebt keeps the account of a cap of 10 %.
func TestDebt(t *testing.T) {
	p := Plan{Cap: 100, Slot: Slot{On: 10 * ms, Cycle: 100 * ms}}
	var d debt
	now, gpuTime, exact := localNow, time.Duration(0), true
	// pass lets time go by, of which the container uses some.
	pass := func(passed, used time.Duration) (owes bool) {
		now, gpuTime = now+passed, gpuTime+used
		return d.spend(now, gpuTime, 0, p, exact)
	}
	budget := func(want time.Duration) {
		t.Helper()
		if d.budget != want {
			t.Errorf("budget %v, want %v", d.budget, want)
		}
	}
	off := func(want time.Duration) {
		t.Helper()
		if wait := max(0, d.owing-now); wait != want {
			t.Errorf("off for another %v, want %v", wait, want)
		}
	}
	pass(50*ms, 50*ms) // what was before counts for nobody
	budget(0)
	pass(100*ms, 10*ms)
	budget(0)
	pass(100*ms, 0)
	budget(10 * ms)
	pass(time.Hour, 0)
	budget(10 * ms) // no more than a slot is saved
	if pass(20*ms, 20*ms) {
		t.Error("a debt of less than a slot")
	}
	budget(-8 * ms)
	off(0)
	if !pass(10*ms, 10*ms) {
		t.Error("nobody is told")
	}
	budget(-17 * ms)
	off(170 * ms)
	was := d.owing
	if pass(100*ms, 20*ms) || d.owing != was {
		t.Error("a debt is collected twice")
	}
	budget(-27 * ms)
	d.owing = 0
	pass(10*time.Second, 10*time.Second)
	budget(-maxDebt * 10 * ms)
	off(maxOff - 100*ms) // not for longer than what is taken for a hang
	exact = false
	pass(100*ms, 100*ms)
	budget(0)
	off(0)
	exact, d.budget, d.owing, p.Cap = true, -50*ms, now+time.Hour, 0
	pass(100*ms, 100*ms)
	budget(0)
	off(0)

	// What a pause itself takes is no debt.
	p.Cap = 100
	pass(0, 0)
	now, gpuTime = now+100*ms, gpuTime+10*ms+2*pauseCost
	d.spend(now, gpuTime, 2, p, exact)
	budget(0)
}

// TestOff: what the arbiter says holds while there is one and it knows the plan; else hard caps are as the ledger has them, and turns end.
func TestOff(t *testing.T) {
	slot := Slot{Start: 20 * ms, On: 30 * ms, Cycle: 100 * ms}
	capped := Plan{Cap: 300, Slot: slot}
	suspended := capped
	suspended.Suspended = true
	base := localNow
	says := func(s Slot) Verdict { return Verdict{Row: Row{Slot: s}, Until: base + time.Second} }
	for _, c := range []struct {
		name  string
		set   func(l *Local)
		begun bool
		now   time.Duration
		off   bool
		until time.Duration
	}{
		{"no cap", func(l *Local) { l.row = says(Slot{}) }, true, base, false, 0},
		{"not begun", func(l *Local) { l.plan.Suspended = true }, false, base, true, 0},
		{"not begun, capped", func(l *Local) { l.plan, l.row = capped, says(slot) }, false, base, false, 0},
		{"suspended", func(l *Local) { l.plan = Plan{Suspended: true} }, true, base, true, 0},
		{"suspended, in its slot", func(l *Local) { l.plan, l.row = suspended, says(slot) }, true, base + 30*ms, true, 0},
		{"before its slot", func(l *Local) { l.plan, l.row = capped, says(slot) }, true, base + 10*ms, true, base + 20*ms},
		{"its slot begins", func(l *Local) { l.plan, l.row = capped, says(slot) }, true, base + 20*ms, false, base + 50*ms},
		{"within", func(l *Local) { l.plan, l.row = capped, says(slot) }, true, base + 49*ms, false, base + 50*ms},
		{"after", func(l *Local) { l.plan, l.row = capped, says(slot) }, true, base + 50*ms, true, base + 120*ms},
		{"left alone by the arbiter", func(l *Local) { l.plan, l.row = capped, says(Slot{}) }, true, base, false, 0},
		{"no arbiter", func(l *Local) { l.plan = capped }, true, base, true, base + 20*ms},
		{"left alone by one that is gone", func(l *Local) { l.plan, l.row = capped, says(Slot{}) }, true, base + time.Second,
			true, base + 1020*ms},
		{"left alone under another plan", func(l *Local) { l.plan, l.row, l.since = capped, says(Slot{}), base }, true, base, true, base + 20*ms},
		{"in debt", func(l *Local) {
			l.plan, l.row = capped, says(slot)
			l.row.Exact = true
			l.debt = debt{at: 1, owing: base + 400*ms}
		}, true, base + 30*ms, true, base + 400*ms},
		{"its debt is over", func(l *Local) {
			l.plan, l.row = capped, says(slot)
			l.row.Exact = true
			l.debt = debt{at: 1, owing: base + 30*ms}
		}, true, base + 30*ms, false, base + 50*ms},
		{"a debt of a cap that is no more", func(l *Local) { l.debt.owing = base + 400*ms }, true, base, false, 0},
		{"takes turns", func(l *Local) { l.row = says(slot) }, true, base, true, base + 20*ms},
		{"takes turns, its own", func(l *Local) { l.row = says(slot) }, true, base + 20*ms, false, base + 50*ms},
		{"took turns under one that is gone", func(l *Local) { l.row = says(slot) }, true, base + time.Second, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTestLocal()
			c.set(l)
			if off, until := l.Off(c.now, c.begun); off != c.off || until != c.until {
				t.Errorf("off %v until %v, want %v until %v", off, until-base, c.off, c.until-base)
			}
		})
	}
}

// TestOffInDebt: what the account says was used beyond the cap keeps the vGPU off.
func TestOffInDebt(t *testing.T) {
	l := newTestLocal()
	l.Adopt(Plan{Cap: 100, Slot: Slot{On: 10 * ms, Cycle: 100 * ms}}, localNow)
	for i := range 3 {
		at := localNow + time.Duration(i)*100*ms
		v := Verdict{Row: Row{Slot: l.plan.Slot}, At: at, Until: at + time.Second, Adopted: localNow, Exact: true}
		v.GPUTime = time.Duration(i) * 30 * ms
		l.Take(v)
		if off, _ := l.Off(at, true); off != (i > 0) {
			t.Errorf("cycle %d: off %v, debt %+v", i, off, l.debt)
		}
	}
}

// TestSlice: the last that an arbiter said stays when it is gone.
func TestSlice(t *testing.T) {
	l := newTestLocal()
	if got := l.Slice(); got != DefaultTiming().Base {
		t.Errorf("%v before anybody said anything", got)
	}
	l.plan.Card.Policy = PolicyNative
	if got := l.Slice(); got != NativeTimeslice {
		t.Errorf("%v under policy native", got)
	}
	if l.Take(Verdict{Row: Row{Slice: 3 * ms}, Until: localNow}); l.Slice() != 3*ms || l.Ruled(localNow) || !l.Ruled(localNow-1) {
		t.Errorf("%v, ruled %v", l.Slice(), l.Ruled(localNow))
	}
}

// TestThrottled: time without work is not throttled; with work it counts at once, and goes on where a pause follows another.
func TestThrottled(t *testing.T) {
	l := newTestLocal()
	for _, busy := range []int{0, 2} {
		l.Take(Verdict{Busy: busy})
		l.Paused(localNow)
		l.Resumed(localNow + time.Second)
	}
	if n, throttled := l.Pauses(localNow); n != 2 || throttled != time.Second {
		t.Errorf("%d pauses, %v", n, throttled)
	}
	l.Paused(localNow)
	l.Take(Verdict{})
	if _, throttled := l.Pauses(localNow + time.Second); throttled != 2*time.Second {
		t.Errorf("%v while it is off", throttled)
	}
	l.Paused(localNow + 2*time.Second) // cgpu pause
	l.Resumed(localNow + 4*time.Second)
	if n, throttled := l.Pauses(localNow + 5*time.Second); n != 4 || throttled != 5*time.Second {
		t.Errorf("%d pauses, %v in the end", n, throttled)
	}
	// The arbiter hears of the pause before the channels are off.
	l.Take(Verdict{Busy: 1})
	l.Adopt(Plan{Suspended: true}, localNow+5*time.Second)
	l.Take(Verdict{})
	l.Paused(localNow + 5*time.Second)
	l.Adopt(Plan{}, localNow+6*time.Second)
	l.Resumed(localNow + 6*time.Second)
	l.Paused(localNow + 6*time.Second)
	if _, throttled := l.Pauses(localNow + 9*time.Second); throttled != 6*time.Second {
		t.Errorf("%v with a pause that the arbiter heard of first", throttled)
	}
}

// TestRecently: what is told of the last second fades while nobody decides because nobody has work.
func TestRecently(t *testing.T) {
	v := Verdict{At: localNow, Busy: 1}
	if got := v.Recently(800, localNow+time.Hour); got != 800 {
		t.Errorf("%v with work", got)
	}
	v.Busy = 0
	if now, then := v.Recently(800, localNow), v.Recently(800, localNow+2*time.Second); now != 800 || then > 10 {
		t.Errorf("%v, then %v", now, then)
	}
}

// TestAdopt: a plan is in force at once, and a change is told once. A pause by the ledger and one by the guard do not undo each other.
func TestAdopt(t *testing.T) {
	l := newTestLocal()
	p, _ := l.Plan()
	if _, since := l.Plan(); l.Adopt(p, localNow) || since != 0 {
		t.Error("nothing new is a change")
	}
	p.Share.Weight = 3
	changed := l.Adopt(p, localNow)
	if got, since := l.Plan(); !changed || got != p || since != localNow {
		t.Errorf("%+v since %v", got, since)
	}
	for _, c := range []struct{ paused, held bool }{{false, true}, {true, true}, {true, false}, {false, false}} {
		p.Suspended = c.paused
		l.Hold(c.held, localNow)
		l.Adopt(p, localNow)
		if l.plan.Suspended != (c.paused || c.held) {
			t.Errorf("%+v, adopted last: %+v", c, l.plan)
		}
		l.Hold(c.held, localNow)
		if l.plan.Suspended != (c.paused || c.held) {
			t.Errorf("%+v: %+v", c, l.plan)
		}
	}
}
