// SPDX-License-Identifier: Apache-2.0

package runlist

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
)

func endless(length time.Duration) Work { return Work{Length: length} }

// draw is a random time below n.
func draw(rnd *rand.Rand, n time.Duration) time.Duration { return time.Duration(rnd.Int64N(int64(n))) }

// near compares in per cent of want.
func near(t *testing.T, what string, got, want, percent float64) {
	t.Helper()
	if math.Abs(got-want) > want*percent/100 {
		t.Errorf("%s: %.4g, want %.4g ± %g %%", what, got, want, percent)
	}
}

// events writes the switch records, in µs.
func events(r *Runlist) string {
	records, _, _ := r.Switches(0, 0)
	var b strings.Builder
	for _, s := range records {
		sign := '-'
		if s.On {
			sign = '+'
		}
		fmt.Fprintf(&b, " %d%c%d", s.At/us, sign, s.PID)
	}
	return strings.TrimSpace(b.String())
}

func TestEvents(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(r *Runlist, a, b *TSG)
		want string // until 10 ms; slices of 1000 µs, a switch 100 µs
	}{
		{"nothing", func(r *Runlist, a, b *TSG) {}, ""},
		{"a lone group is not switched, and stays when it is idle", func(r *Runlist, a, b *TSG) {
			a.Submit(Work{Length: 3 * ms, Count: 1})
			r.Advance(5 * ms)
			a.Submit(Work{Length: 3 * ms, Count: 1})
		}, "100+1"},
		{"turns until the work is done", func(r *Runlist, a, b *TSG) {
			a.Submit(Work{Length: 1500 * us, Count: 1})
			b.Submit(Work{Length: 700 * us, Count: 3})
		}, "100+1 1136-1 1200+2 2236-2 2300+1 2836-1 2900+2"},
		{"kernels that are not preempted", func(r *Runlist, a, b *TSG) {
			a.SetPreemptible(false)
			a.Submit(Work{Length: 1500 * us, Count: 3})
			b.Submit(Work{Length: 700 * us, Count: 3})
		}, "100+1 1636-1 1700+2 2736-2 2800+1 4336-1 4400+2 5436-2 5500+1 7036-1 7100+2"},
		{"an idle resident goes when somebody comes", func(r *Runlist, a, b *TSG) {
			a.Submit(Work{Length: 10 * us, Count: 1})
			r.Advance(3 * ms)
			b.Submit(Work{Length: 10 * us, Count: 1})
		}, "100+1 3036-1 3100+2"},
		{"slices of a lone group go on from its first", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			r.Advance(2500 * us) // in the slice from 2100 to 3100
			b.Submit(Work{Length: 10 * us, Count: 1})
		}, "100+1 3136-1 3200+2 3246-2 3310+1"},
		{"work of an idle resident begins a slice", func(r *Runlist, a, b *TSG) {
			a.Submit(Work{Length: 100 * us, Count: 1})
			r.Advance(2800 * us)
			a.Submit(endless(ms))
			b.Submit(Work{Length: 10 * us, Count: 1})
		}, "100+1 3836-1 3900+2 3946-2 4010+1"},
		{"work at the end of a slice", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			r.Advance(3100 * us)
			b.Submit(Work{Length: 10 * us, Count: 1})
		}, "100+1 3136-1 3200+2 3246-2 3310+1"},
		{"a timeslice counts from the next slice on", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			r.Advance(2500 * us)
			a.SetTimeslice(5 * ms)
			r.Advance(3500 * us)
			b.Submit(Work{Length: 10 * us, Count: 1})
		}, "100+1 8136-1 8200+2 8246-2 8310+1"},
		{"a timeslice does not change the slice under way", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			b.Submit(endless(ms))
			r.Advance(500 * us)
			a.SetTimeslice(5 * ms)
			b.SetTimeslice(3 * ms)
		}, "100+1 1136-1 1200+2 4236-2 4300+1 9336-1 9400+2"},
		{"pause and resume", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(100 * ms))
			r.Advance(3 * ms)
			a.Pause()
			r.Advance(4 * ms)
			a.Resume()
		}, "100+1 3036-1 4100+1"},
		{"who waits takes over from a paused one", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(100 * ms))
			b.Submit(Work{Length: 600 * us, Count: 1})
			r.Advance(300 * us)
			a.Pause()
			r.Advance(2 * ms)
			a.Resume()
		}, "100+1 336-1 400+2 2036-2 2100+1"},
		{"a pause during the switch", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			r.Advance(50 * us)
			b.Submit(endless(ms))
			a.Pause()
			r.Advance(9 * ms)
			b.Stop()
			a.Resume()
		}, "150+2 9036-2 9100+1"},
		{"preempt", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			r.Advance(300 * us)
			a.Preempt()
			b.Preempt() // is not on the engine
			r.Advance(500 * us)
			b.Submit(Work{Length: 10 * us, Count: 1})
			a.Preempt()
		}, "100+1 336-1 400+1 536-1 600+2 646-2 710+1"},
		{"removal", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(ms))
			b.Submit(Work{Length: 100 * us, Count: 1})
			r.Advance(300 * us)
			a.Remove()
			a.Submit(endless(ms))
			r.Advance(ms)
			b.Remove()
		}, "100+1 336-1 400+2 1036-2"},
		{"a gap gives way", func(r *Runlist, a, b *TSG) {
			a.Submit(Work{Length: 200 * us, Count: 2, Gap: 4 * ms})
			b.Submit(Work{Length: 200 * us, Count: 2})
		}, "100+1 336-1 400+2 4336-2 4400+1"},
		{"arrivals in turn", func(r *Runlist, a, b *TSG) {
			every := func(period time.Duration) Arrivals {
				at := time.Duration(0)
				return func() (time.Duration, time.Duration, bool) { at += period; return at, 10 * us, true }
			}
			a.Arrive(every(4 * ms))
			b.Arrive(every(3 * ms))
		}, "3100+2 4036-2 4100+1 6036-1 6100+2 8036-2 8100+1 9036-1 9100+2"},
		{"replaced loops", func(r *Runlist, a, b *TSG) {
			a.Submit(endless(500 * us))
			r.Advance(800 * us)                        // in the second kernel
			a.Submit(Work{Length: 700 * us, Count: 1}) // ends at 1100 + 700
			b.Submit(Work{Length: 10 * us, Count: 1})  // at the end of the slice
		}, "100+1 1136-1 1200+2 1246-2 1310+1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := New(Config{SwitchCost: 100 * us})
			a, b := r.Add(1, 0xa), r.Add(2, 0xb)
			a.SetTimeslice(ms)
			b.SetTimeslice(ms)
			c.run(r, a, b)
			r.Advance(10 * ms)
			if got := events(r); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

func TestAccounts(t *testing.T) {
	r := New(Config{SwitchCost: 100 * us})
	a, b := r.Add(1, 0xa), r.Add(2, 0xb)
	a.SetTimeslice(ms)
	a.Submit(Work{Length: 800 * us, Count: 3}) // 100-1100, 1400-2400, 2400-2800
	r.Advance(200 * us)
	b.Submit(Work{Length: 100 * us, Count: 1}) // 1200-1300
	r.Advance(2 * ms)
	a.Pause()
	r.Advance(2500 * us)
	if got, want := a.Account(), (Account{GPUTime: 1600 * us, Waiting: 900 * us, Held: 500 * us, Kernels: 2, Switches: 2,
		Preemptions: 2}); got != want {
		t.Errorf("a in its pause %+v\nwant %+v", got, want)
	}
	a.Resume()
	r.Advance(10 * ms)
	if got, want := a.Account(), (Account{GPUTime: 2400 * us, Waiting: 1000 * us, Held: 500 * us, Kernels: 3, Switches: 3,
		Preemptions: 2}); got != want {
		t.Errorf("a %+v\nwant %+v", got, want)
	}
	if got, want := b.Account(), (Account{GPUTime: 100 * us, Waiting: 1000 * us, Kernels: 1, Switches: 1}); got != want {
		t.Errorf("b %+v\nwant %+v", got, want)
	}
	if got, want := r.Totals(), (Totals{Busy: 2500 * us, Switching: 400 * us, Idle: 7100 * us}); got != want {
		t.Errorf("totals %+v\nwant %+v", got, want)
	}
	if a.Pending() || r.Running() != nil {
		t.Error("work left")
	}
}

func TestLatency(t *testing.T) {
	r := New(Config{SwitchCost: -1})
	a := r.Add(1, 1)
	var got []time.Duration
	a.OnDone(func(arrived, ended time.Duration) { got = append(got, arrived, ended) })
	requests := [][2]time.Duration{{ms, 3 * ms}, {2 * ms, ms}, {10 * ms, ms}, {9 * ms, ms}}
	a.Arrive(func() (time.Duration, time.Duration, bool) {
		if len(requests) == 0 {
			return 0, 0, false
		}
		q := requests[0]
		requests = requests[1:]
		return q[0], q[1], true
	})
	r.Advance(20 * ms)
	a.Submit(Work{Length: ms, Count: 2, Gap: 2 * ms})
	r.Advance(30 * ms)
	want := []time.Duration{ms, 4 * ms, 2 * ms, 5 * ms, 10 * ms, 11 * ms, 10 * ms, 12 * ms, 20 * ms, 21 * ms, 23 * ms, 24 * ms}
	if !slices.Equal(got, want) {
		t.Errorf("arrivals and ends %v\nwant %v", got, want)
	}
	if _, ok := r.Next(); ok {
		t.Error("an event without work")
	}
}

// TestLoops: what replaces what.
func TestLoops(t *testing.T) {
	requests := func(n int) Arrivals {
		at := time.Duration(0)
		return func() (time.Duration, time.Duration, bool) {
			n, at = n-1, at+2*ms
			return at, ms / 2, n >= 0
		}
	}
	for _, c := range []struct {
		name string
		run  func(r *Runlist, g *TSG)
		want string // arrivals and ends of the kernels until 10 ms, in µs
	}{
		{"kernels of a loop come when the last ended", func(r *Runlist, g *TSG) {
			g.Submit(endless(4 * ms))
		}, "0-4000 4000-8000"},
		{"kernels of a queue come at once", func(r *Runlist, g *TSG) {
			g.Submit(Work{Length: 4 * ms, Count: 2})
		}, "0-4000 0-8000"},
		{"after its gap", func(r *Runlist, g *TSG) {
			g.Submit(Work{Length: 3 * ms, Gap: ms})
		}, "0-3000 4000-7000"},
		{"a loop by a loop, in a kernel", func(r *Runlist, g *TSG) {
			g.Submit(endless(3 * ms))
			r.Advance(4 * ms)
			g.Submit(endless(ms))
			r.Advance(8 * ms)
			g.Stop()
		}, "0-3000 3000-6000 4000-7000 7000-8000"},
		{"a loop by a queue, in a gap", func(r *Runlist, g *TSG) {
			g.Submit(Work{Length: ms, Gap: 5 * ms})
			r.Advance(3 * ms)
			g.Submit(Work{Length: ms, Count: 1})
		}, "0-1000 3000-4000"},
		{"a loop by a queue, before it began", func(r *Runlist, g *TSG) {
			g.Submit(endless(5 * ms))
			g.Submit(Work{Length: ms, Count: 1})
		}, "0-1000"},
		{"a loop by a queue, between two kernels", func(r *Runlist, g *TSG) {
			g.Submit(endless(ms))
			r.Advance(2 * ms)
			g.Submit(Work{Length: 3 * ms, Count: 1})
		}, "0-1000 1000-2000 2000-5000"},
		{"a queue by a loop: not replaced", func(r *Runlist, g *TSG) {
			g.Submit(Work{Length: ms, Count: 2, Gap: ms})
			g.Submit(endless(4 * ms))
		}, "0-1000 2000-3000 0-7000"},
		{"an open loop by a loop", func(r *Runlist, g *TSG) {
			g.Arrive(requests(5))
			r.Advance(5 * ms)
			g.Submit(endless(2 * ms))
			r.Advance(8 * ms)
			g.Submit(Work{Length: 900 * us, Count: 1})
		}, "2000-2500 4000-4500 5000-7000 7000-9000 8000-9900"},
		{"a loop by an open loop", func(r *Runlist, g *TSG) {
			g.Submit(endless(3 * ms))
			r.Advance(ms)
			g.Arrive(requests(2))
		}, "0-3000 2000-3500 4000-4500"},
		{"an open loop by another", func(r *Runlist, g *TSG) {
			g.Arrive(requests(5))
			r.Advance(3 * ms)
			g.Arrive(requests(2)) // the first has passed
		}, "2000-2500 3000-3500 4000-4500"},
		{"stop", func(r *Runlist, g *TSG) {
			g.Arrive(requests(5))
			g.Submit(Work{Length: 3 * ms, Count: 5})
			r.Advance(5 * ms)
			g.Stop()
		}, "0-3000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := New(Config{SwitchCost: -1})
			g := r.Add(1, 0)
			var got []string
			g.OnDone(func(arrived, ended time.Duration) { got = append(got, fmt.Sprintf("%d-%d", arrived/us, ended/us)) })
			c.run(r, g)
			r.Advance(10*ms - 1)
			if got := strings.Join(got, " "); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestQueue compares an open loop with the formula of Pollaczek and Khinchine: with Poisson arrivals and kernels of one
// length, at load ρ, the mean time in the queue is ρ/(2(1-ρ)) kernels.
func TestQueue(t *testing.T) {
	for _, load := range []float64{0.2, 0.5, 0.8} {
		r := New(Config{SwitchCost: -1})
		a := r.Add(1, 1)
		var sum time.Duration
		n := 0
		a.OnDone(func(arrived, ended time.Duration) { sum += ended - arrived - ms; n++ })
		a.Arrive(poisson(1, float64(ms)/load, ms))
		r.Advance(1000 * time.Second)
		near(t, fmt.Sprintf("wait at load %g", load), float64(sum)/float64(n)/float64(ms), load/(2*(1-load)), 3)
		near(t, "busy", r.Totals().Busy.Seconds(), 1000*load, 1)
	}
}

func poisson(seed uint64, mean float64, length time.Duration) Arrivals {
	rnd := rand.New(rand.NewPCG(seed, 7))
	at := time.Duration(0)
	return func() (time.Duration, time.Duration, bool) {
		at += time.Duration(rnd.ExpFloat64() * mean)
		return at, length, true
	}
}

// TestMeasured holds the model to the tables in the package's comment.
func TestMeasured(t *testing.T) {
	const kernel = 1192 * us
	for _, c := range []struct {
		slice           time.Duration
		model, measured float64
	}{{500 * us, 72.46, 69.5}, {2048 * us, 91.5, 90.5}, {10 * ms, 98.13, 97.9}} {
		r := New(Config{})
		a, b := r.Add(1, 1), r.Add(2, 2)
		for _, g := range []*TSG{a, b} {
			g.SetTimeslice(c.slice)
			g.Submit(endless(kernel))
		}
		r.Advance(20 * time.Second)
		got := float64((a.Account().Kernels+b.Account().Kernels)*uint64(kernel)) / float64(20*time.Second) * 100
		near(t, fmt.Sprintf("2 × %v", c.slice), got, c.model, 0.1)
		near(t, fmt.Sprintf("2 × %v, on the hardware", c.slice), got, c.measured, 5)
	}
	for _, c := range []struct {
		other                     time.Duration
		p50, rate                 float64
		measuredP50, measuredRate float64
	}{{MinTimeslice, 328, 80.4, 323, 80.3}, {200 * us, 457, 81.4, 402, 81.0}, {2048 * us, 505, 81.8, 453, 81.8},
		{10 * ms, 8457, 95.6, 8561, 95.5}} {
		r := New(Config{})
		client, other := r.Add(1, 1), r.Add(2, 2)
		other.SetTimeslice(c.other)
		other.Submit(endless(kernel))
		var latency []time.Duration
		client.OnDone(func(arrived, ended time.Duration) { latency = append(latency, ended-arrived) })
		client.SetTimeslice(time.Second)
		client.Submit(Work{Length: 137 * us, Gap: 2 * ms})
		r.Advance(20 * time.Second)
		slices.Sort(latency)
		p50 := float64(latency[len(latency)/2]) / float64(us)
		rate := float64(other.Account().Kernels*uint64(kernel)) / float64(20*time.Second) * 100
		near(t, fmt.Sprintf("median beside %v", c.other), p50, c.p50, 0.2)
		near(t, fmt.Sprintf("median beside %v, on the hardware", c.other), p50, c.measuredP50, 14)
		near(t, fmt.Sprintf("rate beside %v", c.other), rate, c.rate, 0.2)
		near(t, fmt.Sprintf("rate beside %v, on the hardware", c.other), rate, c.measuredRate, 1.5)
	}
}

// TestSynchronous holds the model to the table of loops in the package's comment: measured with cl.cu, a loop that launches one kernel,
// waits for it and launches the next, beside a process that keeps four kernels of 1.2 ms queued; H200, 580.159.04.
func TestSynchronous(t *testing.T) {
	const think = 15 * us // from a kernel's end to the next on the engine: alone the loop has 99 % of the GPU with kernels of 1 ms
	for _, c := range []struct {
		kernel, slice       time.Duration
		loop, other, points float64
	}{
		{100 * us, 2048 * us, 4.0, 83.1, 1}, {ms, 2048 * us, 29.5, 61.1, 1}, {5 * ms, 2048 * us, 40.8, 50.7, 1},
		{100 * us, 10 * ms, 0.9, 95.9, 1}, {ms, 10 * ms, 8.7, 88.4, 1}, {5 * ms, 10 * ms, 32.3, 65.7, 1},
		{100 * us, 4 * ms, 2.2, 90.5, 1}, {ms, 4 * ms, 18.5, 75.4, 1}, {5 * ms, 4 * ms, 36.2, 58.8, 1},
		{100 * us, 2 * ms, 4.1, 82.5, 1}, {ms, 2 * ms, 29.8, 60.4, 1}, {100 * us, ms, 7.0, 70.3, 1},
	} {
		r := New(Config{})
		loop, other := r.Add(1, 1), r.Add(2, 2)
		for _, g := range []*TSG{loop, other} {
			g.SetTimeslice(c.slice)
		}
		other.Submit(endless(1200 * us))
		loop.Submit(Work{Length: c.kernel, Gap: think})
		r.Advance(20 * time.Second)
		got := [2]float64{100 * loop.Account().GPUTime.Seconds() / 20, 100 * other.Account().GPUTime.Seconds() / 20}
		t.Logf("kernels of %v, slices of %v: %.1f %%", c.kernel, c.slice, got)
		if math.Abs(got[0]-c.loop) > c.points || math.Abs(got[1]-c.other) > c.points {
			t.Errorf("kernels of %v, slices of %v: %.1f %%, measured %.1f and %.1f", c.kernel, c.slice, got, c.loop, c.other)
		}
	}
}

// TestShares: saturating groups get time in proportion to their timeslices, whatever their kernels.
func TestShares(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		r := New(Config{})
		n := 2 + rnd.IntN(63)
		var groups []*TSG
		var sum time.Duration
		for i := range n {
			g := r.Add(i, 0)
			g.SetTimeslice(10*ms + draw(rnd, 90*ms))
			sum += g.Timeslice()
			g.Submit(endless(10*us + draw(rnd, 100*ms)))
			groups = append(groups, g)
		}
		const long = 2000 * time.Second
		r.Advance(long)
		near(t, "busy", r.Totals().Busy.Seconds(), long.Seconds()*float64(sum)/float64(sum+
			time.Duration(n)*(DefaultSwitchCost+DefaultPreemptCost)), 0.1)
		for _, g := range groups {
			near(t, fmt.Sprintf("seed %d: share of a slice of %v among %d", seed, g.Timeslice(), n),
				float64(g.Account().GPUTime)/float64(r.Totals().Busy), float64(g.Timeslice())/float64(sum), 1)
		}
	}
}

// TestNoStarvation: a group with work comes on the engine within one slice and one switch of every other, whatever they
// do.
func TestNoStarvation(t *testing.T) {
	for seed := range uint64(10) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		r := New(Config{})
		bound := time.Duration(0)
		var groups []*TSG
		for i := range 64 {
			g := r.Add(i, 0)
			g.SetTimeslice(MinTimeslice + draw(rnd, 20*ms))
			switch rnd.IntN(3) {
			case 0:
				g.Submit(endless(1 + draw(rnd, 50*ms)))
			case 1:
				g.Submit(Work{Length: 1 + draw(rnd, 5*ms), Gap: draw(rnd, 50*ms)})
			case 2:
				g.Arrive(poisson(seed+uint64(i), float64(100*ms), 1+draw(rnd, 5*ms)))
			}
			bound += g.Timeslice() + DefaultSwitchCost + DefaultPreemptCost
			groups = append(groups, g)
		}
		last := make([]Account, len(groups))
		started := make([]time.Duration, len(groups)) // of a wait
		for at, ok := r.Next(); ok && at < 30*time.Second; at, ok = r.Next() {
			r.Advance(at)
			for i, g := range groups {
				now := g.Account()
				if !g.Pending() || now.GPUTime > last[i].GPUTime || now.Kernels > last[i].Kernels {
					started[i] = at
				} else if at-started[i] > bound {
					t.Fatalf("seed %d: group %d waits for %v, want at most %v", seed, i, at-started[i], bound)
				}
				last[i] = now
			}
		}
	}
}

// chaos drives a runlist at random; every decision comes from seed, and step cuts the time into pieces.
func chaos(seed uint64, step func(r *Runlist, to time.Duration)) (r *Runlist, groups []*TSG, kernels []uint64, work []time.Duration) {
	rnd := rand.New(rand.NewPCG(seed, 3))
	r = New(Config{SwitchCost: []time.Duration{-1, 0, 20 * us}[rnd.IntN(3)]})
	length := func(most time.Duration) time.Duration { return 1 + time.Duration(rnd.Int64N(int64(most))) }
	for i := range 1 + rnd.IntN(64) {
		g := r.Add(i, uint32(i))
		groups, kernels, work = append(groups, g), append(kernels, 0), append(work, 0)
		requests, at := rnd.IntN(50), time.Duration(0)
		g.Arrive(func() (time.Duration, time.Duration, bool) {
			if requests--; requests < 0 {
				return 0, 0, false
			}
			at += length(100 * ms)
			d := length(3 * ms)
			kernels[i]++
			work[i] += d
			return at, d, true
		})
	}
	now := time.Duration(0)
	for range 2000 {
		i := rnd.IntN(len(groups))
		switch g := groups[i]; rnd.IntN(6) {
		case 0, 1:
			w := Work{Length: length(5 * ms), Count: 1 + rnd.IntN(4)}
			if rnd.IntN(3) == 0 {
				w.Gap = length(3 * ms)
			}
			kernels[i] += uint64(w.Count)
			work[i] += w.Length * time.Duration(w.Count)
			g.Submit(w)
		case 2:
			g.Pause()
		case 3:
			g.Resume()
		case 4:
			g.SetTimeslice(length(20 * ms))
		case 5:
			if rnd.IntN(4) == 0 {
				g.Preempt()
			}
		}
		now += length(4 * ms)
		step(r, now)
	}
	for _, g := range groups {
		g.Resume()
	}
	step(r, now+10*time.Minute)
	return r, groups, kernels, work
}

// TestNothingIsLost: time is conserved at every step, pauses lose no kernel, all work gets done, and the records are of
// one context after the other.
func TestNothingIsLost(t *testing.T) {
	for seed := range uint64(50) {
		r, groups, kernels, work := chaos(seed, func(r *Runlist, to time.Duration) {
			r.Advance(to)
			if s := r.Totals(); s.Busy+s.Switching+s.Idle != to || r.Now() != to {
				t.Fatalf("seed %d at %v: %+v", seed, to, s)
			}
		})
		var sum, waiting time.Duration
		var switches uint64
		for i, g := range groups {
			a := g.Account()
			if a.Kernels != kernels[i] || a.GPUTime != work[i] {
				t.Errorf("seed %d group %d: %d kernels in %v, want %d in %v", seed, i, a.Kernels, a.GPUTime, kernels[i], work[i])
			}
			if a.Held > a.Waiting {
				t.Errorf("seed %d group %d: held %v of %v", seed, i, a.Held, a.Waiting)
			}
			sum, waiting, switches = sum+a.GPUTime, waiting+a.Waiting, switches+a.Switches
		}
		if sum != r.Totals().Busy || sum == 0 || waiting == 0 {
			t.Errorf("seed %d: groups computed %v and waited %v, the engine computed %v", seed, sum, waiting, r.Totals().Busy)
		}
		records, next, lost := r.Switches(0, 0)
		if lost || next != uint64(len(records)) {
			t.Fatalf("seed %d: %d records, next %d, lost %v", seed, len(records), next, lost)
		}
		ons := uint64(0)
		for i, s := range records {
			if s.On {
				ons++
			}
			if i == 0 {
				continue
			}
			before := records[i-1]
			if s.On == before.On || !s.On && s.PID != before.PID || s.At < before.At {
				t.Fatalf("seed %d: record %d %+v after %+v", seed, i, s, before)
			}
		}
		if ons != switches {
			t.Errorf("seed %d: %d records of switches in, %d counted", seed, ons, switches)
		}
	}
}

// TestSteps: how time is cut into steps changes nothing.
func TestSteps(t *testing.T) {
	for seed := range uint64(20) {
		var accounts [3][]Account
		var history [3]string
		for i, step := range []func(r *Runlist, to time.Duration){
			(*Runlist).Advance,
			func(r *Runlist, to time.Duration) {
				for at, ok := r.Next(); ok && at <= to; at, ok = r.Next() {
					r.Advance(at)
				}
				r.Advance(to)
			},
			func(r *Runlist, to time.Duration) {
				rnd := rand.New(rand.NewPCG(uint64(to), 4))
				for r.Now() < to {
					r.Advance(min(to, r.Now()+1+draw(rnd, 100*ms)))
				}
				r.Advance(0) // the past changes nothing
			},
		} {
			r, groups, _, _ := chaos(seed, step)
			for _, g := range groups {
				accounts[i] = append(accounts[i], g.Account())
			}
			history[i] = events(r)
		}
		for i := range 2 {
			if !slices.Equal(accounts[0], accounts[i+1]) || history[0] != history[i+1] {
				t.Errorf("seed %d: way %d of stepping differs", seed, i+1)
			}
		}
	}
}

func TestSwitches(t *testing.T) {
	r := New(Config{History: 4})
	a, b := r.Add(1, 0xa), r.Add(2, 0xb)
	a.Submit(endless(ms))
	b.Submit(endless(ms))
	r.Advance(2400 * us) // +a -a +b -b
	for _, c := range []struct {
		since uint64
		limit int
		n     int
		next  uint64
		lost  bool
	}{{0, 0, 4, 4, false}, {0, 3, 3, 3, false}, {3, 3, 1, 4, false}, {4, 0, 0, 4, false}, {5, 0, 0, 4, true}} {
		if list, next, lost := r.Switches(c.since, c.limit); len(list) != c.n || next != c.next || lost != c.lost {
			t.Errorf("since %d limit %d: %d records, next %d, lost %v; want %+v", c.since, c.limit, len(list), next, lost, c)
		}
	}
	_, next, _ := r.Switches(0, 0)
	r.Advance(time.Second)
	all, end, lost := r.Switches(next, 0)
	if !lost || len(all) != 4 || end != a.Account().Switches+b.Account().Switches+a.Account().Preemptions+b.Account().Preemptions {
		t.Errorf("after an overflow: %d records, next %d, lost %v", len(all), end, lost)
	}
	if list, _, lost := r.Switches(end-3, 0); lost || !slices.Equal(list, all[1:]) {
		t.Errorf("the newest 3: %v, lost %v; want %v", list, lost, all[1:])
	}
	if !slices.IsSortedFunc(all, func(a, b sched.Switch) int { return int(a.At - b.At) }) {
		t.Errorf("not in order: %v", all)
	}
}

func TestHugeWork(t *testing.T) {
	r := New(Config{})
	a, b := r.Add(1, 1), r.Add(2, 2)
	a.Submit(Work{Length: 1 << 60, Count: math.MaxInt32})
	a.SetTimeslice(1 << 62)
	b.Submit(Work{Length: -1, Gap: -1})
	b.SetTimeslice(-1)
	r.Advance(1000 * time.Hour)
	if a.Timeslice() != MaxTimeslice || b.Timeslice() != MinTimeslice || a.Account().GPUTime < 990*time.Hour || b.Account().Kernels == 0 {
		t.Errorf("a %+v, b %+v", a.Account(), b.Account())
	}
}

func BenchmarkSaturating64(b *testing.B) {
	for b.Loop() {
		r := New(Config{})
		for i := range 64 {
			r.Add(i, 0).Submit(endless(10 * us))
		}
		r.Advance(100 * time.Second)
	}
}

func BenchmarkOpenLoop64(b *testing.B) {
	for b.Loop() {
		r := New(Config{})
		for i := range 64 {
			r.Add(i, 0).Arrive(poisson(uint64(i), float64(20*ms), 100*us))
		}
		r.Advance(100 * time.Second)
	}
}

// TestRestart: who comes late in the list waits when timeslices are set all the time.
func TestRestart(t *testing.T) {
	for _, restart := range []bool{false, true} {
		r := New(Config{SwitchCost: -1, Restart: restart})
		var groups []*TSG
		for i := range 4 {
			groups = append(groups, r.Add(i, 0))
			groups[i].SetTimeslice(ms)
			groups[i].Submit(endless(ms))
		}
		for at := 2 * ms; at <= 80*ms; at += 2 * ms {
			r.Advance(at - 1)
			groups[3].SetTimeslice(ms)
		}
		if ran := groups[3].Account().GPUTime > 0; ran == restart {
			t.Errorf("restart %v: the last one ran: %v", restart, ran)
		}
	}
}

// TestSetEndsTurn: a timeslice that is set, whosever it is, ends the turn at hand, and the first group comes next.
func TestSetEndsTurn(t *testing.T) {
	r := New(Config{SwitchCost: -1, Restart: true})
	var groups []*TSG
	for i := range 4 {
		groups = append(groups, r.Add(i, 0))
		groups[i].SetTimeslice(10 * ms)
	}
	groups[3].SetTimeslice(5 * ms) // nobody runs
	for _, g := range groups[:3] {
		g.Submit(endless(ms))
	}
	for _, c := range []struct {
		until time.Duration
		set   *TSG
		ran   []time.Duration
	}{
		{13 * ms, groups[3], []time.Duration{10 * ms, 3 * ms, 0}},
		{20 * ms, groups[0], []time.Duration{17 * ms, 3 * ms, 0}},
		{28 * ms, groups[0], []time.Duration{25 * ms, 3 * ms, 0}}, // whose turn it is
		{58 * ms, groups[2], []time.Duration{35 * ms, 13 * ms, 10 * ms}},
	} {
		r.Advance(c.until)
		for i, want := range c.ran {
			if got := groups[i].Account().GPUTime; got != want {
				t.Errorf("at %v: group %d has run for %v, want %v", c.until, i, got, want)
			}
		}
		c.set.SetTimeslice(10 * ms)
	}
	groups[0].Stop()
	groups[1].Stop()
	r.Advance(70 * ms)
	switches := groups[2].Account().Switches
	groups[2].SetTimeslice(10 * ms)
	if r.Advance(80 * ms); groups[2].Account().Switches != switches {
		t.Error("who has the engine for itself is taken off")
	}
}
