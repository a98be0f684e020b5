package sched

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// tenant is a container of default priority with work in some groups.
func tenant(weight, busy int) Tenant { return Tenant{Share: weighing(weight), Busy: busy} }

func tenants(n int, x Tenant) []Tenant {
	list := make([]Tenant, n)
	for i := range list {
		list[i] = x
	}
	return list
}

// pressing is a high-priority container with work now.
func pressing(weight, busy int) Tenant {
	return Tenant{Share: high(weighing(weight)), Busy: busy, Pressing: true, Saturating: true}
}

// slicesOf is what each container's guard sets, each by itself.
func slicesOf(t Timing, c Card, all []Tenant) []time.Duration {
	list := make([]time.Duration, len(all))
	for i, self := range all {
		list[i] = t.Slice(c, self, slices.Concat(all[:i], all[i+1:]))
	}
	return list
}

// turnsOf is what each container gets in a round, and the round.
func turnsOf(t Timing, c Card, all []Tenant) (turns []time.Duration, round time.Duration) {
	turns = slicesOf(t, c, all)
	for i, x := range all {
		turns[i] *= time.Duration(x.Busy)
		round += turns[i]
	}
	return turns, round
}

// near compares with a hundredth of a per cent for the rounding to nanoseconds.
func near(got, want time.Duration) bool {
	return math.Abs(float64(got-want)) <= float64(want)/10000
}

// TestSlice: slices in known situations, beside others with one busy group of weight 1.
func TestSlice(t *testing.T) {
	weight := card(PolicyWeight, 20)
	for _, c := range []struct {
		name   string
		card   Card
		self   Tenant
		others []Tenant
		want   time.Duration
	}{
		{"alone", weight, tenant(1, 1), nil, 10 * ms},
		{"alone, weight 3", weight, tenant(3, 1), nil, 30 * ms},
		{"alone, not more than a round", weight, tenant(64, 1), nil, 100 * ms},
		{"alone, 4 groups", weight, tenant(1, 4), nil, 2500 * us},
		{"without work: ready for one group", weight, tenant(1, 0), nil, 10 * ms},
		{"beside one", weight, tenant(1, 1), tenants(1, tenant(1, 1)), 10 * ms},
		{"idle others count for nothing", weight, tenant(1, 1), tenants(99, tenant(64, 0)), 10 * ms},
		{"a round of just 100 ms", weight, tenant(1, 1), tenants(9, tenant(1, 1)), 10 * ms},
		{"a round of 110 ms", weight, tenant(1, 1), tenants(10, tenant(1, 1)), 100 * ms / 11},
		{"8 groups", weight, tenant(1, 8), tenants(1, tenant(1, 1)), 1250 * us},
		{"16 groups: the round is prolonged to 32 ms", weight, tenant(1, 16), tenants(1, tenant(1, 1)), ms},
		{"beside 16 groups", weight, tenant(1, 1), tenants(1, tenant(1, 16)), 16 * ms},
		{"a weight below 1 is 1", weight, tenant(0, 1), tenants(1, tenant(1, 1)), 10 * ms},

		{"fair: weights are ignored", card(PolicyFair, 20), tenant(9, 1), tenants(1, tenant(3, 1)), 10 * ms},
		{"fixed", card(PolicyFixed, 20), tenant(2, 1), tenants(1, tenant(1, 1)), 20 * ms},
		{"preempt", card(PolicyPreempt, 20), tenant(1, 1), tenants(1, tenant(1, 1)), 10 * ms},
		{"soft: percent points are slots", card(PolicySoft, 20), Tenant{Share: asking(15), Busy: 1}, tenants(1, tenant(1, 1)), 30 * ms},
		{"soft: percentage beats weight", card(PolicySoft, 20), Tenant{Share: Share{7, 15, 1}, Busy: 1}, nil, 30 * ms},
		{"soft: a part of a slot", card(PolicySoft, 20), Tenant{Share: asking(1), Busy: 1}, tenants(1, tenant(1, 1)), 2 * ms},
		{"those that it presses are no part of the round", weight, tenant(1, 1), tenants(20, Tenant{Share: low(weighing(1)), Busy: 1}), 10 * ms},
		{"native", card(PolicyNative, 20), tenant(9, 5), tenants(1, pressing(1, 1)), 2048 * us},
		{"native, high", card(PolicyNative, 20), pressing(1, 1), tenants(1, tenant(1, 1)), 2048 * us},
	} {
		if got := DefaultTiming().Slice(c.card, c.self, c.others); !near(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestRatios: a container gets its weight's part of a round, exactly, whatever the number of its groups.
func TestRatios(t *testing.T) {
	timing := DefaultTiming()
	for _, c := range []struct {
		name    string
		card    Card
		tenants []Tenant
		parts   []float64 // of a round
		round   time.Duration
	}{
		{"1:1", card(PolicyWeight, 20), []Tenant{tenant(1, 1), tenant(1, 1)}, []float64{1, 1}, 20 * ms},
		{"1:3", card(PolicyWeight, 20), []Tenant{tenant(1, 1), tenant(3, 1)}, []float64{1, 3}, 40 * ms},
		{"1:9", card(PolicyWeight, 20), []Tenant{tenant(1, 1), tenant(9, 1)}, []float64{1, 9}, 100 * ms},
		{"1:2:4:8", card(PolicyWeight, 20), []Tenant{tenant(1, 1), tenant(2, 1), tenant(4, 1), tenant(8, 1)}, []float64{1, 2, 4, 8}, 100 * ms},
		{"1:64", card(PolicyWeight, 64), []Tenant{tenant(1, 1), tenant(64, 1)}, []float64{1, 64}, 100 * ms},
		{"8 groups beside 1", card(PolicyWeight, 20), []Tenant{tenant(1, 8), tenant(1, 1)}, []float64{1, 1}, 20 * ms},
		{"8 groups of weight 3 beside 2 of 1 and 5 of 2", card(PolicyWeight, 20), []Tenant{tenant(3, 8), tenant(1, 2), tenant(2, 5)}, []float64{3, 1, 2}, 60 * ms},
		{"fair, 8 groups of weight 3 beside 1", card(PolicyFair, 20), []Tenant{tenant(3, 8), tenant(1, 1)}, []float64{1, 1}, 20 * ms},
		{"soft, percentages", card(PolicySoft, 20), []Tenant{{Share: asking(30), Busy: 1}, {Share: asking(70), Busy: 3}}, []float64{30, 70}, 100 * ms},
		{"soft, percentages and weights", card(PolicySoft, 10), []Tenant{{Share: asking(30), Busy: 1}, tenant(2, 1), tenant(5, 1)}, []float64{3, 2, 5}, 100 * ms},
		// The least slice is 10 ms / 64: the round is prolonged until it is 1 ms, or 200 ms long.
		{"64 groups beside 1", card(PolicyWeight, 20), []Tenant{tenant(1, 64), tenant(1, 1)}, []float64{1, 1}, 128 * ms},
		{"64 groups beside 3", card(PolicyWeight, 20), append(tenants(3, tenant(1, 1)), tenant(1, 64)), []float64{1, 1, 1, 1}, 200 * ms},
		{"64 groups beside 14", card(PolicyWeight, 20), append(tenants(14, tenant(1, 1)), tenant(1, 64)), []float64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 200 * ms},
		{"two of 64 groups beside one of weight 9", card(PolicyWeight, 20), []Tenant{tenant(1, 64), tenant(9, 1), tenant(1, 64)}, []float64{1, 9, 1}, 200 * ms},
		{"one of weight 9 with 64 groups", card(PolicyWeight, 20), []Tenant{tenant(9, 64), tenant(1, 1)}, []float64{9, 1}, 100 * ms},
	} {
		turns, round := turnsOf(timing, c.card, c.tenants)
		sum := 0.0
		for _, p := range c.parts {
			sum += p
		}
		for i, turn := range turns {
			if want := time.Duration(float64(round) * c.parts[i] / sum); !near(turn, want) {
				t.Errorf("%s: number %d gets %v of a round of %v, want %v", c.name, i, turn, round, want)
			}
		}
		if !near(round, c.round) {
			t.Errorf("%s: a round of %v, want %v", c.name, round, c.round)
		}
	}
}

// TestManyContainers: the round stays within its bound, no slice is below the least, and nobody gets more than another.
func TestManyContainers(t *testing.T) {
	timing := DefaultTiming()
	for _, n := range []int{20, 64, 100} {
		all := tenants(n, tenant(1, 1))
		list := slicesOf(timing, card(PolicyWeight, 64), all)
		for i, s := range list {
			if s < timing.Min || s != list[0] {
				t.Errorf("%d containers: number %d has slices of %v, number 0 of %v", n, i, s, list[0])
			}
		}
		if _, round := turnsOf(timing, card(PolicyWeight, 64), all); round > timing.MaxRound {
			t.Errorf("%d containers: a round of %v", n, round)
		}
	}
	// With slices of 1 ms at least, 150 containers need 150 ms.
	if _, round := turnsOf(timing, card(PolicyWeight, 64), tenants(150, tenant(1, 1))); !near(round, 150*ms) {
		t.Errorf("150 containers: a round of %v", round)
	}
	// 300 containers get less than 1 ms, because a round ends after 200 ms.
	if turns, round := turnsOf(timing, card(PolicyWeight, 64), tenants(300, tenant(1, 1))); !near(round, 200*ms) {
		t.Errorf("300 containers: a round of %v, slices of %v", round, turns[0])
	}
}

// TestForkBomb: 64 groups of one container beside many others. Its slices end at 200 µs; where its part of a round is less
// than 64 of those, it gets them all the same, and the others keep theirs.
func TestForkBomb(t *testing.T) {
	timing := DefaultTiming()
	for _, c := range []struct {
		others, bombs int
	}{{1, 1}, {3, 1}, {14, 1}, {15, 1}, {19, 1}, {63, 1}, {99, 1}, {10, 5}, {1, 19}} {
		turns, round := turnsOf(timing, card(PolicyWeight, 64), append(tenants(c.others, tenant(1, 1)), tenants(c.bombs, tenant(1, 64))...))
		other, bomb := turns[0], turns[len(turns)-1]
		least := 64 * shortestShared
		switch {
		case near(bomb, other) && bomb+us > least:
		case bomb == least && bomb > other:
		default:
			t.Errorf("%+v: its turn is %v, the others' %v", c, bomb, other)
		}
		if most := 2*timing.MaxRound + time.Duration(c.bombs)*least; round > most {
			t.Errorf("%+v: a round of %v, want %v at most", c, round, most)
		}
	}
}

// TestPriorities: all pairs of levels, both with work.
func TestPriorities(t *testing.T) {
	const (
		turn  = 10 * ms
		least = 200 * us
		most  = 99 * least // prio_ratio 99
	)
	of := func(p quota.Priority, pressing bool) Tenant {
		return Tenant{Share: Share{Weight: 1, Priority: p}, Busy: 1, Pressing: pressing && p == quota.PriorityHigh, Saturating: pressing && p == quota.PriorityHigh}
	}
	c := card(PolicyPreempt, 20)
	for _, x := range []struct {
		a, b     quota.Priority
		pressing bool
		want     [2]time.Duration
	}{
		{0, 0, true, [2]time.Duration{turn, turn}},
		{0, 1, true, [2]time.Duration{least, turn}},
		{0, 2, true, [2]time.Duration{least, most}},
		{1, 1, true, [2]time.Duration{turn, turn}},
		{1, 2, true, [2]time.Duration{least, most}},
		{2, 2, true, [2]time.Duration{35 * ms, 35 * ms}}, // both saturate
		// A high-priority container that lets go is one among others.
		{0, 2, false, [2]time.Duration{turn, turn}},
		{1, 2, false, [2]time.Duration{turn, turn}},
		{2, 2, false, [2]time.Duration{turn, turn}},
	} {
		got := slicesOf(DefaultTiming(), c, []Tenant{of(x.a, x.pressing), of(x.b, x.pressing)})
		if !near(got[0], x.want[0]) || !near(got[1], x.want[1]) {
			t.Errorf("levels %v and %v, pressing %v: %v, want %v", x.a, x.b, x.pressing, got, x.want)
		}
	}
	// All three: the high one presses both.
	if got := slicesOf(DefaultTiming(), c, []Tenant{of(0, true), of(1, true), of(2, true)}); got[0] != least || got[1] != least || !near(got[2], 2*most) {
		t.Errorf("three levels: %v", got)
	}
	// It has work, but lets go: the default one presses the best-effort one, and shares with the high one.
	if got := slicesOf(DefaultTiming(), c, []Tenant{of(0, false), of(1, false), of(2, false)}); got[0] != least || got[1] != turn || !near(got[2], turn) {
		t.Errorf("three levels, not pressing: %v", got)
	}
	// It presses without any group seen at work yet, and the default one is idle.
	idle := of(1, true)
	idle.Busy = 0
	first := of(2, true)
	first.Busy = 0
	if got := slicesOf(DefaultTiming(), c, []Tenant{of(0, true), idle, first}); got[0] != least || !near(got[2], most) {
		t.Errorf("a high one that just came: %v", got)
	}
	// A default one without work presses nobody.
	if got := slicesOf(DefaultTiming(), c, []Tenant{of(0, true), idle}); got[0] != turn {
		t.Errorf("best effort beside an idle one: %v", got)
	}
}

// TestPrioRatio: high-priority containers get prio_ratio of a round, divided by weight, and no more than that as long as
// their slices are above the shortest.
func TestPrioRatio(t *testing.T) {
	for _, c := range []struct {
		name  string
		ratio int
		high  []Tenant
		other []Tenant
		want  []float64 // percent of a round for each of high; nil: PrioRatio for the one
	}{
		{"20, one other", 20, tenants(1, pressing(1, 1)), tenants(1, tenant(1, 1)), nil},
		{"50, one other", 50, tenants(1, pressing(1, 1)), tenants(1, tenant(1, 1)), nil},
		{"99, one other", 99, tenants(1, pressing(1, 1)), tenants(1, tenant(1, 1)), nil},
		{"20, 20 others", 20, tenants(1, pressing(1, 1)), tenants(20, tenant(9, 1)), nil},
		{"50, 20 others, 4 groups", 50, tenants(1, pressing(1, 4)), tenants(20, tenant(1, 1)), nil},
		{"99, 20 others", 99, tenants(1, pressing(1, 1)), tenants(20, tenant(1, 1)), nil},
		{"80, others with many groups", 80, tenants(1, pressing(1, 2)), []Tenant{tenant(1, 64), tenant(1, 2)}, nil},
		{"idle others do not count", 50, tenants(1, pressing(1, 1)), append(tenants(9, tenant(1, 0)), tenant(1, 1)), nil},
		{"beside one that lets go", 50, []Tenant{pressing(1, 1), {Share: high(weighing(1))}}, tenants(1, tenant(1, 1)), []float64{50, 0}},
		{"two by weight", 80, []Tenant{pressing(1, 1), pressing(3, 1)}, tenants(5, tenant(1, 1)), []float64{20, 60}},
		{"two, one with 8 groups", 99, []Tenant{pressing(1, 8), pressing(1, 1)}, tenants(1, tenant(1, 1)), []float64{49.5, 49.5}},
		// The shortest slice: 2 × 50 µs beside 200 µs.
		{"20, the shortest slices", 20, tenants(1, pressing(1, 2)), tenants(1, tenant(1, 1)), []float64{100. / 3}},
		// The longest slice: 1 s beside 63 × 200 µs.
		{"99, the longest slice", 99, tenants(1, pressing(1, 1)), tenants(63, tenant(1, 1)), []float64{100 * 1000 / 1012.6}},
	} {
		card := Card{PolicyPreempt, 64, c.ratio}
		turns, round := turnsOf(DefaultTiming(), card, slices.Concat(c.high, c.other))
		want := c.want
		if want == nil {
			want = []float64{float64(c.ratio)}
		}
		for i, w := range want {
			if got := 100 * float64(turns[i]) / float64(round); math.Abs(got-w) > 0.01 {
				t.Errorf("%s: number %d gets %.2f %% of a round of %v, want %.2f", c.name, i, got, round, w)
			}
		}
		for i, x := range c.other {
			turn := turns[len(c.high)+i]
			if x.Busy > 0 && turn != max(200*us, time.Duration(x.Busy)*shortest) {
				t.Errorf("%s: another one with %d groups gets %v of a round", c.name, x.Busy, turn)
			}
		}
	}
	// Alone it has normal slices: nobody yields.
	if got := DefaultTiming().Slice(Card{PolicyPreempt, 20, 20}, pressing(1, 1), nil); got != 10*ms {
		t.Errorf("alone: %v", got)
	}
}

// TestCalmPressing: beside a high-priority container that has work now and then, a single group has the shortest slice, several
// containers take turns.
func TestCalmPressing(t *testing.T) {
	calm := Tenant{Share: high(weighing(1)), Busy: 1, Pressing: true}
	c, timing := card(PolicyPreempt, 64), DefaultTiming()
	if got := timing.Slice(c, tenant(1, 1), tenants(1, calm)); got != lone {
		t.Errorf("a single one: %v", got)
	}
	if got := timing.Slice(c, tenant(1, 4), tenants(1, calm)); got != 50*us {
		t.Errorf("one with four groups: %v", got)
	}
	if _, ok := timing.Turn(c, tenant(1, 1), tenants(1, calm)); ok {
		t.Error("a single one takes turns")
	}
	if _, ok := timing.Turn(c, tenant(1, 1), append(tenants(3, tenant(1, 1)), pressing(1, 1))); ok {
		t.Error("turns beside one that saturates")
	}
	if _, ok := timing.Turn(c, calm, append(tenants(3, tenant(1, 1)), calm)); ok {
		t.Error("the high-priority one takes turns")
	}
	for _, n := range []int{2, 4, 20, 50} {
		var all []Tenant
		for i := range n {
			x := tenant(1+i%3, 1)
			x.Place = 3*i + 1
			all = append(all, x)
		}
		all = append(all, calm)
		var slots []Slot
		sum := time.Duration(0)
		for i := range n {
			others := slices.Concat(all[:i], all[i+1:])
			slot, ok := timing.Turn(c, all[i], others)
			if !ok || slot.Cycle > maxCycle || slot.Cycle != slots0(slots, slot).Cycle {
				t.Fatalf("%d: %v %v", n, slot, ok)
			}
			if i > 0 && slot.Start < slots[i-1].Start+slots[i-1].On {
				t.Errorf("%d: %v begins before %v ends", n, slot, slots[i-1])
			}
			if got := timing.Slice(c, all[i], others); got != lone {
				t.Errorf("%d: slice %v", n, got)
			}
			slots, sum = append(slots, slot), sum+slot.On
		}
		if cycle := slots[0].Cycle; sum > cycle || cycle-sum > time.Millisecond {
			t.Errorf("%d: %v of %v are given away", n, sum, cycle)
		}
	}
}

func slots0(slots []Slot, x Slot) Slot {
	if len(slots) > 0 {
		return slots[0]
	}
	return x
}

// TestTimings: what can be configured moves the bounds.
func TestTimings(t *testing.T) {
	timing := Timing{Base: 2 * ms, Min: 500 * us, MaxRound: 10 * ms, HighPrio: 50 * us, Cycle: 50 * ms}
	c := card(PolicyWeight, 64)
	if _, round := turnsOf(timing, c, tenants(5, tenant(1, 1))); !near(round, 10*ms) {
		t.Errorf("5 containers: a round of %v", round)
	}
	if turns, round := turnsOf(timing, c, tenants(40, tenant(1, 1))); !near(round, 20*ms) || !near(turns[0], 500*us) {
		t.Errorf("40 containers: slices of %v, a round of %v", turns[0], round)
	}
	if turns, _ := turnsOf(timing, c, tenants(64, tenant(1, 1))); !near(turns[0], 20*ms/64) {
		t.Errorf("64 containers: slices of %v", turns[0])
	}
	if got := timing.Slice(c, tenant(1, 4), tenants(1, pressing(1, 1))); got != shortest {
		t.Errorf("4 groups beside a pressing one: %v", got)
	}
}
