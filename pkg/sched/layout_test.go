// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// one is a claim on one GPU.
func one(id string, p Permille) Claim { return Claim{id, map[string]Permille{"a": p}} }

func TestCycleOf(t *testing.T) {
	long := DefaultTiming()
	long.Cycle = 400 * ms
	for _, c := range []struct {
		name   string
		timing Timing
		claims []Claim
		want   time.Duration
	}{
		{"nobody", DefaultTiming(), nil, 100 * ms},
		{"half", DefaultTiming(), []Claim{one("x", 500)}, 100 * ms},
		{"5 % are the least slot", DefaultTiming(), []Claim{one("x", 500), one("y", 50)}, 100 * ms},
		{"4 %", DefaultTiming(), []Claim{one("x", 40), one("y", 500)}, 125 * ms},
		{"on any GPU", DefaultTiming(), []Claim{{"x", map[string]Permille{"a": 500, "b": 20}}}, 250 * ms},
		{"1/64", DefaultTiming(), []Claim{one("x", 15)}, 5 * ms * 1000 / 15},
		{"1 %", DefaultTiming(), []Claim{one("x", 10)}, 500 * ms},
		{"less than there is", DefaultTiming(), []Claim{one("x", 1)}, 500 * ms},
		{"configured longer", long, []Claim{one("x", 40)}, 400 * ms},
	} {
		if got := c.timing.CycleOf(c.claims); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestLayout(t *testing.T) {
	both := func(id string, a, b Permille) Claim { return Claim{id, map[string]Permille{"a": a, "b": b}} }
	for _, c := range []struct {
		name   string
		claims []Claim
		want   string // container, GPU, start and end in ms, by container and GPU
	}{
		{"nobody", nil, ""},
		{"without a cap", []Claim{{"x", nil}, {"y", map[string]Permille{}}}, ""},
		{"alone", []Claim{one("x", 300)}, "x:a:0-30"},
		{"two halves", []Claim{one("x", 500), one("y", 500)}, "x:a:0-50 y:a:50-100"},
		{"in the order of the claims", []Claim{one("y", 300), one("x", 700)}, "x:a:30-100 y:a:0-30"},
		{"a rest", []Claim{one("x", 200), one("y", 300), one("z", 100)}, "x:a:0-20 y:a:20-50 z:a:50-60"},
		{"different GPUs", []Claim{one("x", 800), {"y", map[string]Permille{"b": 800}}}, "x:a:0-80 y:b:0-80"},
		{"two GPUs start together", []Claim{one("x", 200), both("y", 300, 500)}, "x:a:0-20 y:a:20-50 y:b:20-70"},
		{"halves of two GPUs", []Claim{both("x", 500, 500), both("y", 500, 500)}, "x:a:0-50 x:b:0-50 y:a:50-100 y:b:50-100"},
		{"into a gap", []Claim{both("x", 200, 600), both("y", 300, 400), one("z", 400)}, "x:a:0-20 x:b:0-60 y:a:60-90 y:b:60-100 z:a:20-60"},
		// 70 % on both after 60 % on the first: at the end of the cycle 30 % overlap, as at its beginning; nowhere less.
		{"more than there is", []Claim{one("x", 600), both("y", 700, 700)}, "x:a:0-60 y:a:30-100 y:b:30-100"},
	} {
		if got := picture(DefaultTiming().Layout(c.claims)); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
		}
	}
}

func picture(layout map[string]map[string]Slot) string {
	var list []string
	for id, slots := range layout {
		for gpu, s := range slots {
			list = append(list, fmt.Sprintf("%s:%s:%d-%d", id, gpu, s.Start/ms, (s.Start+s.On)/ms))
		}
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// check holds a layout to what is true of every one.
func check(t *testing.T, timing Timing, claims []Claim, layout map[string]map[string]Slot) {
	t.Helper()
	cycle := timing.CycleOf(claims)
	for _, c := range claims {
		slots := layout[c.ID]
		if len(slots) != len(c.Caps) {
			t.Errorf("container %s has %d slots for %d caps", c.ID, len(slots), len(c.Caps))
		}
		start := time.Duration(-1)
		for gpu, s := range slots {
			if start < 0 {
				start = s.Start
			}
			off := s.Cycle - s.On
			if s.Start != start || s.Cycle != cycle || s.On != cycle*time.Duration(c.Caps[gpu])/1000 || s.Start < 0 ||
				s.Start+s.On > cycle || off > 500*ms {
				t.Errorf("container %s, GPU %s, cap %v: slot %+v; another starts at %v; cycle %v", c.ID, gpu, c.Caps[gpu], s, start, cycle)
			}
		}
	}
}

// overlap is for how long two containers are on together, on the GPU where that is longest.
func overlap(claims []Claim, layout map[string]map[string]Slot) time.Duration {
	most := time.Duration(0)
	for i, c := range claims {
		for _, d := range claims[:i] {
			for gpu, s := range layout[c.ID] {
				if o, ok := layout[d.ID][gpu]; ok {
					most = max(most, min(s.Start+s.On, o.Start+o.On)-max(s.Start, o.Start))
				}
			}
		}
	}
	return most
}

// TestLayoutOneGPU: random claims of up to 100 % together never overlap.
func TestLayoutOneGPU(t *testing.T) {
	for seed := range uint64(500) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var claims []Claim
		for left := Whole; left >= 10 && len(claims) < 64; {
			p := 10 + Permille(rnd.IntN(int(min(left, 10+Permille(rnd.IntN(600)))-9)))
			claims = append(claims, one(fmt.Sprint(len(claims)), p))
			left -= p
		}
		layout := DefaultTiming().Layout(claims)
		check(t, DefaultTiming(), claims, layout)
		if o := overlap(claims, layout); o > 0 {
			t.Errorf("seed %d: %v overlap in %v", seed, o, claims)
		}
	}
}

// TestLayoutLeavers: containers come and go in any order, and what remains of one GPU's claims never overlaps.
func TestLayoutLeavers(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		var claims []Claim
		sum := Permille(0)
		for n := range 200 {
			if p := 10 + Permille(rnd.IntN(300)); sum+p <= Whole {
				claims, sum = append(claims, one(fmt.Sprint(n), p)), sum+p
			} else {
				i := rnd.IntN(len(claims))
				sum -= claims[i].Caps["a"]
				claims = slices.Delete(claims, i, i+1)
			}
			layout := DefaultTiming().Layout(claims)
			check(t, DefaultTiming(), claims, layout)
			if o := overlap(claims, layout); o > 0 {
				t.Fatalf("seed %d: %v overlap in %v", seed, o, claims)
			}
		}
	}
}

func TestLayout64(t *testing.T) {
	var claims []Claim
	p, _ := Card{PolicyFair, 64, 99}.Cap(Share{Weight: 1, Priority: 1})
	for i := range 64 {
		claims = append(claims, one(fmt.Sprint(i), p))
	}
	layout := DefaultTiming().Layout(claims)
	check(t, DefaultTiming(), claims, layout)
	if o := overlap(claims, layout); o > 0 {
		t.Errorf("%v overlap", o)
	}
	for id, slots := range layout {
		if s := slots["a"]; s.On < minSlot-us {
			t.Errorf("container %s has a slot of %v", id, s.On)
		}
	}
}

// TestLayoutGPUs: claims on several GPUs start together, and the layout is the same whoever computes it, in whatever order
// a map is read. Whoever has the same GPUs in the same parts never overlaps.
func TestLayoutGPUs(t *testing.T) {
	gpus := []string{"a", "b", "c", "d"}
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		left := map[string]Permille{"a": Whole, "b": Whole, "c": Whole, "d": Whole}
		var claims []Claim
		for n := range 20 {
			c := Claim{fmt.Sprint(n), map[string]Permille{}}
			for _, g := range gpus {
				if p := 10 + Permille(rnd.IntN(300)); rnd.IntN(2) == 0 && p <= left[g] {
					c.Caps[g] = p
					left[g] -= p
				}
			}
			claims = append(claims, c)
		}
		layout := DefaultTiming().Layout(claims)
		check(t, DefaultTiming(), claims, layout)
		for range 5 {
			again := make([]Claim, len(claims))
			for i, c := range claims {
				again[i] = Claim{c.ID, maps.Clone(c.Caps)}
			}
			if other := DefaultTiming().Layout(again); !reflect.DeepEqual(layout, other) {
				t.Fatalf("seed %d: two layouts of the same claims: %v and %v", seed, layout, other)
			}
		}
	}
	for n := 1; n <= 20; n++ {
		var claims []Claim
		for i := range n {
			c := Claim{fmt.Sprint(i), map[string]Permille{}}
			for _, g := range gpus {
				c.Caps[g] = Whole / Permille(n)
			}
			claims = append(claims, c)
		}
		layout := DefaultTiming().Layout(claims)
		check(t, DefaultTiming(), claims, layout)
		if o := overlap(claims, layout); o > 0 {
			t.Errorf("%d containers on 4 GPUs: %v overlap", n, o)
		}
	}
}

func TestPhase(t *testing.T) {
	for _, c := range []struct {
		name  string
		slot  Slot
		now   time.Duration
		on    bool
		until time.Duration
	}{
		{"before the slot", Slot{30 * ms, 40 * ms, 100 * ms}, 0, false, 30 * ms},
		{"just before", Slot{30 * ms, 40 * ms, 100 * ms}, 30*ms - 1, false, 30 * ms},
		{"at its start", Slot{30 * ms, 40 * ms, 100 * ms}, 30 * ms, true, 70 * ms},
		{"just before its end", Slot{30 * ms, 40 * ms, 100 * ms}, 70*ms - 1, true, 70 * ms},
		{"at its end", Slot{30 * ms, 40 * ms, 100 * ms}, 70 * ms, false, 130 * ms},
		{"the end of the cycle", Slot{30 * ms, 40 * ms, 100 * ms}, 100*ms - 1, false, 130 * ms},
		{"the next cycle", Slot{30 * ms, 40 * ms, 100 * ms}, 100 * ms, false, 130 * ms},
		{"a day later", Slot{30 * ms, 40 * ms, 100 * ms}, 24*time.Hour + 50*ms, true, 24*time.Hour + 70*ms},
		{"first in the cycle", Slot{0, 40 * ms, 100 * ms}, 0, true, 40 * ms},
		{"first in the cycle, off", Slot{0, 40 * ms, 100 * ms}, 40 * ms, false, 100 * ms},
		{"last in the cycle", Slot{60 * ms, 40 * ms, 100 * ms}, 100*ms - 1, true, 100 * ms},
		{"last in the cycle, off", Slot{60 * ms, 40 * ms, 100 * ms}, 100 * ms, false, 160 * ms},
		{"a cycle that no power of ten is", Slot{0, 5 * ms, 333333333}, 333333333, true, 333333333 + 5*ms},
	} {
		if on, until := c.slot.Phase(c.now); on != c.on || until != c.until {
			t.Errorf("%s: %v until %v, want %v until %v", c.name, on, until, c.on, c.until)
		}
	}
}

// TestPhases follows random slots from edge to edge: each changes the phase, and on phases add up to the slot.
func TestPhases(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 4))
	for range 200 {
		cycle := 50*ms + time.Duration(rnd.Int64N(int64(450*ms)))
		on := 1 + time.Duration(rnd.Int64N(int64(cycle-1)))
		s := Slot{time.Duration(rnd.Int64N(int64(cycle-on) + 1)), on, cycle}
		begin := time.Duration(rnd.Int64N(int64(time.Hour)))
		begin -= begin % cycle
		sum := time.Duration(0)
		last, _ := s.Phase(begin)
		for at := begin; at < begin+10*cycle; {
			phase, until := s.Phase(at)
			if at > begin && phase == last || until <= at || until > at+2*cycle {
				t.Fatalf("%+v at %v: %v until %v, after %v", s, at, phase, until, last)
			}
			middle := at + time.Duration(rnd.Int64N(int64(until-at)))
			if p, u := s.Phase(middle); p != phase || u != until {
				t.Fatalf("%+v at %v: %v until %v, but at %v %v until %v", s, at, phase, until, middle, p, u)
			}
			if end := min(until, begin+10*cycle); phase {
				sum += end - at
			}
			at, last = until, phase
		}
		if sum != 10*on {
			t.Errorf("%+v: on for %v in 10 cycles", s, sum)
		}
	}
}
