// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// seen makes vGPUs for tests of single decisions: a hog, and one that blocks after each burst and comes back after a gap.
func hogOf(id string, p quota.Priority) VGPU {
	return VGPU{ID: id, Share: Share{Weight: 1, Priority: p}, Contexts: 1, Seen: Seen{Busy: 1, Endless: 1, Burst: unending}}
}

func loopOf(id string, burst, gap time.Duration) VGPU {
	return VGPU{ID: id, Share: Share{Weight: 1, Priority: quota.PriorityDefault}, Contexts: 1, Seen: Seen{Busy: 1, Burst: burst, Gap: gap}}
}

// decider decides one time after the other.
type decider struct {
	t     Timing
	card  Card
	state State
	now   time.Duration
}

func newDecider() *decider {
	return &decider{t: DefaultTiming(), card: Card{Policy: PolicyWeight, MaxInst: 64, PrioRatio: DefaultPrioRatio}}
}

// for lets time pass in which the same is seen, every 33 ms.
func (d *decider) after(dt time.Duration, vgpus ...VGPU) (rows []Row) {
	for until := d.now + dt; ; d.now += 33 * ms {
		rows, d.state = d.t.Decide(d.card, vgpus, H200Costs(), d.state, d.now)
		if d.now >= until {
			return rows
		}
	}
}

const first, usual, best = quota.PriorityHigh, quota.PriorityDefault, quota.PriorityBestEffort

func TestDecide(t *testing.T) {
	slot := Slot{On: 20 * ms, Cycle: 100 * ms}
	capped := hogOf("capped", usual)
	capped.Slot = slot
	saturating := hogOf("high", first)
	saturating.Ran = 32 * ms
	idle := VGPU{ID: "idle", Share: Share{Weight: 1, Priority: first}, Contexts: 1, Seen: Seen{Burst: unending}}
	two := VGPU{ID: "two", Share: Share{Weight: 1, Priority: usual}, Contexts: 2, Seen: Seen{Busy: 2, Endless: 1, Burst: 2 * ms}}
	three := VGPU{ID: "three", Share: Share{Weight: 2, Priority: usual}, Contexts: 3, Seen: Seen{Busy: 3, Endless: 3, Burst: unending}}
	greedy := loopOf("greedy", 5*ms, 10*ms)
	greedy.Ran = 30 * ms
	many := []VGPU{}
	for range 40 {
		many = append(many, hogOf(string(rune('A'+len(many))), usual))
	}
	for _, c := range []struct {
		name  string
		vgpus []VGPU
		want  []Row // of the first
	}{
		{"alone: the next who comes need not wait", []VGPU{hogOf("a", usual)}, []Row{{Slice: ms}}},
		{"several alone do not preempt each other all the time", []VGPU{three}, []Row{{Slice: 10 * ms}}},
		{"all saturate", []VGPU{hogOf("a", usual), hogOf("b", usual)}, []Row{{Slice: 35 * ms}, {Slice: 35 * ms}}},
		{"one who seldom has work", []VGPU{hogOf("a", usual), hogOf("b", usual), loopOf("c", ms, time.Second)}, []Row{{Slice: 10 * ms}}},
		{"one who needs no time, and nothing was seen to be lost", []VGPU{hogOf("a", usual), loopOf("b", 0, ms)}, []Row{{Slice: 109 * us}}},
		{"best effort gives way", []VGPU{loopOf("a", 2*ms, ms), hogOf("b", best)}, []Row{{Slice: 6 * ms}, {Slice: 200 * us}}},
		{"one that blocks leaves room to another of its container", []VGPU{two, hogOf("b", usual)}, []Row{{Slice: 33 * ms}, {Slice: 35 * ms}}},
		{"no room for bursts that bring one ahead", []VGPU{greedy, hogOf("b", usual)}, []Row{{Slice: 5*ms + 5*ms/6}}},
		{"a high-priority one that is idle", []VGPU{hogOf("a", best), idle}, []Row{{Slice: lone}}},
		{"beside one that saturates a cap out of reach is none", []VGPU{capped, saturating}, []Row{{Slice: 200 * us}}},
		{"and rounds are short", append([]VGPU{saturating}, many...), []Row{{Slice: 100 * ms}, {Slice: 50 * us}}},
	} {
		rows := newDecider().after(4*time.Second, c.vgpus...)
		for i, want := range c.want {
			if d := rows[i].Slice - want.Slice; d > want.Slice/50 || d < -want.Slice/50 || rows[i].Slot != want.Slot {
				t.Errorf("%s: %d has %+v, want %+v", c.name, i, rows[i], want)
			}
		}
	}
}

// TestHold: what is right may change with every look, slices do not in two rounds.
func TestHold(t *testing.T) {
	d := newDecider()
	a, b := hogOf("a", usual), hogOf("b", usual)
	for d.after(0, a, b)[0].Slice < 35*ms {
		d.now += 33 * ms
	}
	for at := d.now; ; {
		d.now += 33 * ms
		if rows := d.after(0, a, b, loopOf("c", ms, 100*ms)); rows[0].Slice < 2*ms {
			if d.now-at < 140*ms || d.now-at > 240*ms {
				t.Errorf("set again after %v", d.now-at)
			}
			break
		}
	}
}

// TestMeasuredLoss: the pace goes by what preemptions are seen to take, which bursts by their mean do not tell.
func TestMeasuredLoss(t *testing.T) {
	a, b := hogOf("a", usual), loopOf("b", 500*us, 1500*us)
	a.Cuts = 600
	few := newDecider()
	few.after(2*time.Second, a, b)
	a.Cuts = 2400 // 0.46 of the time
	more := newDecider()
	more.after(2*time.Second, a, b)
	if few.state.Pace() > 800*us || more.state.Pace() < 2*few.state.Pace() {
		t.Errorf("paces %v and %v", few.state.Pace(), more.state.Pace())
	}
	if sooner := newDecider(); true {
		a.Cuts = 600
		sooner.after(2*time.Second, a, b)
		before := sooner.state.Pace()
		a.Cuts = 2400
		if sooner.after(700*ms, a, b); sooner.state.Pace() <= before {
			t.Errorf("after 0.7 s it is still %v", before)
		}
	}
}

// TestTurns: turns stay as they are until everybody had one, whoever comes and goes.
func TestTurns(t *testing.T) {
	client := loopOf("client", 100*us, 2*ms)
	client.Priority = first
	d := newDecider()
	hogs := []VGPU{hogOf("a", best), hogOf("b", best), hogOf("c", best)}
	before := d.after(time.Second, append([]VGPU{client}, hogs...)...)
	ends := map[time.Duration]bool{}
	for i, r := range before[1:] {
		if r.Slot.Cycle != 75*ms || r.Slot.On != 25*ms || r.Slice != lone || ends[r.Slot.Start] {
			t.Errorf("%d: %+v", i, r)
		}
		ends[r.Slot.Start] = true
	}
	d.now += 33 * ms
	at := d.now
	d.after(0, client, hogs[0], hogs[1], hogs[2], hogOf("d", best))
	d.now += 33 * ms
	came := d.after(0, client, hogs[0], hogs[1], hogs[2])
	if d.now += 33 * ms; d.now-at < 150*ms && came[1].Slot.Cycle != 100*ms {
		t.Errorf("%v after a change: %+v", d.now-at, came)
	}
}

func BenchmarkDecide64(b *testing.B) {
	d := newDecider()
	var vgpus []VGPU
	for i := range 64 {
		v := loopOf(string(rune('A'+i)), time.Duration(1+i)*100*us, 50*ms)
		if i%4 == 0 {
			v = hogOf(v.ID, usual)
		}
		vgpus = append(vgpus, v)
	}
	for b.Loop() {
		d.after(0, vgpus...)
		d.now += 33 * ms
	}
}

// TestMomentWithoutWork: of many that saturate the GPU one that is seen without work for a moment, as in a long round, does not have
// slices begin anew.
func TestMomentWithoutWork(t *testing.T) {
	d, all := newDecider(), []VGPU{}
	for i := range 20 {
		all = append(all, hogOf(fmt.Sprint(i), usual))
	}
	d.after(4*time.Second, all...)
	settled := d.state.Pace()
	without := slices.Clone(all)
	without[7].Busy, without[7].Endless = 0, 0
	for range 5 {
		for _, seen := range [][]VGPU{without, all} {
			for range 8 {
				if d.after(0, seen...); d.state.Pace() != settled || settled != 10*ms {
					t.Fatalf("at %v: pace %v, was %v", d.now, d.state.Pace(), settled)
				}
				d.now += 33 * ms
			}
		}
	}
}

// TestComeAtOnce: while many come that saturate the GPU, slices stay as they are, until all have been seen; and then until they are settled.
func TestComeAtOnce(t *testing.T) {
	d, all := newDecider(), []VGPU{}
	for i := range 64 {
		x := hogOf(fmt.Sprint(i), usual)
		x.Busy, x.Endless = 0, 0
		all = append(all, x)
	}
	d.after(time.Second, all...)
	begun := d.now
	for n := 16; n <= 64; n += 16 {
		for i := range all[:n] {
			all[i].Busy, all[i].Endless = 1, 1
		}
		for _, row := range d.after(33*ms, all...) {
			if row.Slice != ms {
				t.Fatalf("with %d of them: %v", n, row.Slice)
			}
		}
	}
	last := Row{Slice: ms}
	set := 0
	for d.now < begun+5*time.Second {
		row := d.after(33*ms, all...)[0]
		if row != last {
			set++
		}
		last = row
	}
	if set != 1 || last.Slice != 3125*us {
		t.Errorf("set %d times, %v in the end", set, last.Slice)
	}
}
