// SPDX-License-Identifier: Apache-2.0

package sched_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// These tests have one arbiter decide for a whole GPU in virtual time. It knows what a process could: switch records, which come every
// 33 ms, and the containers' shares. Guards set the timeslices that it says one after the other. Each that is set ends the turn at hand,
// and the driver takes up its list from the beginning.

// whole is a GPU and its arbiter.
type whole struct {
	gpu      *runlist.Runlist
	timing   sched.Timing
	card     sched.Card
	observer *sched.Observer
	state    sched.State
	vgpus    []*vgpu
	owner    map[int]string
	next     uint64
	tick     time.Duration
	pids     int
	script   []event
	settled  time.Duration   // when the last came
	paces    []time.Duration // that were set
	sets     int             // timeslices set
	setting  []*vgpu         // whose guards are about to set theirs
	setAt    time.Duration   // when the first of them will have
	rnd      *rand.Rand
	press    time.Duration // when guards look next whether those of high priority have work
	judged   time.Duration // when the GPU's load was looked at
	worked   time.Duration // GPU time then
}

// vgpu is a container and the part of its guard that carries rows out.
type vgpu struct {
	w       *whole
	id      string
	share   sched.Share
	gang    sched.Gang
	apart   bool // its slots are not the same on all of its GPUs
	row     sched.Row
	groups  []*runlist.TSG
	off     bool
	offAt   time.Duration
	turning time.Duration // when a pause or resume under way is carried out
	edge    time.Duration // when the phase of its slot changes
	setting sched.Setting // what the guard says of the timeslices that it set last
	wakes   time.Duration // when the guard sees its row
	waits   []time.Duration

	requests int // of an open loop, not done
	pressing bool
	worked   time.Duration // when work was seen last
}

func newWhole(maxLoss float64) *whole {
	w := &whole{gpu: runlist.New(runlist.Config{Restart: true, Overrun: 50}), timing: sched.DefaultTiming(),
		card:     cardOf(sched.PolicyWeight, 64),
		observer: sched.NewObserver(), owner: map[int]string{}, setAt: never, rnd: rand.New(rand.NewPCG(1, 7))}
	w.timing.MaxLoss = maxLoss
	return w
}

func (w *whole) add(share sched.Share) *vgpu {
	w.pids++
	v := &vgpu{w: w, id: fmt.Sprint("v", w.pids), share: share, turning: never, edge: never, wakes: never}
	w.vgpus = append(w.vgpus, v)
	w.arbitrate()
	return v
}

func (w *whole) remove(v *vgpu) {
	for _, g := range v.groups {
		g.Remove()
		delete(w.owner, g.PID())
	}
	w.setting = slices.DeleteFunc(w.setting, func(x *vgpu) bool { return x == v })
	w.vgpus = slices.DeleteFunc(w.vgpus, func(x *vgpu) bool { return x == v })
	w.observer.Forget(v.id)
	w.arbitrate()
}

// process starts a process with a context.
func (v *vgpu) process() *runlist.TSG {
	v.w.pids++
	g := v.w.gpu.Add(v.w.pids, 1)
	v.w.owner[v.w.pids] = v.id
	v.groups = append(v.groups, g)
	g.SetTimeslice(v.row.Slice)
	v.setting = sched.Setting{Slice: v.row.Slice, From: v.w.gpu.Now(), To: v.w.gpu.Now()}
	if v.off {
		g.Pause()
	}
	g.OnDone(func(arrived, ended time.Duration) { v.waits = append(v.waits, ended-arrived) })
	return g
}

// loop launches a kernel, waits for it, thinks, and launches the next.
func (v *vgpu) loop(kernel, think time.Duration) *vgpu {
	v.process().Submit(runlist.Work{Length: kernel, Gap: think})
	return v
}

// hog always has work.
func (v *vgpu) hog() *vgpu {
	v.process().Submit(runlist.Work{Length: 1200 * us})
	return v
}

// open has requests at random, of random lengths.
func (v *vgpu) open(seed uint64, every, kernel time.Duration) *vgpu {
	rnd := rand.New(rand.NewPCG(seed, 3))
	at := v.w.gpu.Now()
	v.process().Arrive(func() (time.Duration, time.Duration, bool) {
		at += time.Duration(rnd.ExpFloat64() * float64(every))
		return at, kernel/2 + time.Duration(rnd.Int64N(int64(kernel))), true
	})
	return v
}

// bursts has n kernels at once, at random times.
func (v *vgpu) bursts(seed uint64, every, kernel time.Duration, n int) *vgpu {
	rnd := rand.New(rand.NewPCG(seed, 4))
	at, left := v.w.gpu.Now(), 0
	v.process().Arrive(func() (time.Duration, time.Duration, bool) {
		if left--; left < 0 {
			left = rnd.IntN(n)
			at += time.Duration(rnd.ExpFloat64() * float64(every))
		}
		return at, kernel, true
	})
	return v
}

// arbitrate is the arbiter's look at the records.
func (w *whole) arbitrate() {
	now := w.gpu.Now()
	records, next, lost := w.gpu.Switches(w.next, 0)
	w.next = next
	for _, v := range w.vgpus {
		if v.setting.Slice > 0 {
			w.observer.Sliced(v.id, v.setting)
		}
	}
	w.observer.Add(records, now, func(pid int) string { return w.owner[pid] }, lost)
	w.decide()
}

func (w *whole) decide() {
	now := w.gpu.Now()
	var seen []sched.VGPU
	claims := []sched.Claim{}
	for _, v := range w.vgpus {
		if p, ok := w.card.Cap(v.share); ok {
			claims = append(claims, sched.Claim{ID: v.id, Caps: map[string]sched.Permille{"gpu": p}})
		}
	}
	layout := w.timing.Layout(claims)
	for _, v := range w.vgpus {
		slot := layout[v.id]["gpu"]
		idle := max(200*ms, 2*max(slot.Cycle, v.row.Slot.Cycle))
		x := sched.VGPU{ID: v.id, Share: v.share, Slot: slot, Contexts: len(v.groups), Pressing: v.pressing, Gang: v.gang,
			Seen: w.observer.Seen(v.id, idle)}
		x.Busy = min(x.Busy, len(v.groups))
		x.Endless = min(x.Endless, x.Busy)
		seen = append(seen, x)
	}
	w.judge(now)
	rows, state := w.timing.Decide(w.card, seen, w.observer.Costs(), w.state, now)
	if state.Pace() != w.state.Pace() {
		w.paces = append(w.paces, state.Pace())
	}
	w.state = state
	for i, v := range w.vgpus {
		v.apply(rows[i])
	}
}

// wake is when a guard has seen that its row is another one.
func (v *vgpu) wake() {
	v.wakes = never
	v.setting = sched.Setting{Slice: v.row.Slice, From: v.w.gpu.Now(), To: -1}
	if v.w.setting = append(v.w.setting, v); v.w.setAt == never {
		v.w.setNext()
	}
}

// setNext has the driver's lock given to one of the guards that wait for it.
func (w *whole) setNext() {
	if w.setAt = never; len(w.setting) > 0 {
		i := w.rnd.IntN(len(w.setting))
		w.setting[0], w.setting[i] = w.setting[i], w.setting[0]
		w.setAt = w.gpu.Now() + setTime
	}
}

// set is one guard's turn at the driver.
func (w *whole) set() {
	if len(w.setting) == 0 { // its container is gone
		w.setAt = never
		return
	}
	v := w.setting[0]
	w.setting = w.setting[1:]
	v.setting.Slice, v.setting.To = v.row.Slice, w.gpu.Now()
	for _, g := range v.groups {
		if g.Timeslice() != v.row.Slice {
			w.sets++
			g.SetTimeslice(v.row.Slice)
		}
	}
	w.setNext()
}

// judge looks at the GPU's load while crowds are apart.
func (w *whole) judge(now time.Duration) {
	since, ok := w.state.Apart()
	if !ok || since > w.judged {
		w.judged, w.worked = now, w.gpu.Totals().Busy
	}
	if dt := now - w.judged; dt > time.Second {
		busy := w.gpu.Totals().Busy
		w.state = w.timing.Judge(w.state, float64(busy-w.worked)/float64(dt), now)
		w.judged, w.worked = now, busy
	}
}

func (v *vgpu) apply(row sched.Row) {
	if row.Slice != v.row.Slice && len(v.groups) > 0 && v.wakes == never && !slices.Contains(v.w.setting, v) {
		v.wakes = v.w.gpu.Now() + time.Duration(v.w.rnd.ExpFloat64()*float64(wakeTime))
	}
	v.row = row
	if v.apart {
		row.Slot = sched.Slot{}
	}
	v.w.observer.Applied(v.id, row, v.w.gpu.Now())
	v.duty()
}

// duty pauses or resumes as the row wants it; the driver takes a while.
func (v *vgpu) duty() {
	v.edge = never
	if v.turning != never {
		return
	}
	now, off := v.w.gpu.Now(), false
	if v.row.Slot.Cycle > 0 && !v.apart {
		var on bool
		on, v.edge = v.row.Slot.Phase(now)
		off = !on
	}
	if off != v.off {
		v.edge, v.turning = never, now+resumeTime
		if off {
			v.turning = now + pauseTime
		}
	}
}

func (v *vgpu) turn() {
	v.turning, v.off = never, !v.off
	v.offAt = v.w.gpu.Now()
	for _, g := range v.groups {
		if v.off {
			g.Pause()
		} else {
			g.Resume()
		}
	}
	v.duty()
}

func (w *whole) at(at time.Duration, f func()) { w.script = append(w.script, event{at, f}) }

func (w *whole) run(until time.Duration) {
	slices.SortStableFunc(w.script, func(a, b event) int { return int(a.at - b.at) })
	for {
		next := min(until, w.tick, w.press, w.setAt)
		if len(w.script) > 0 {
			next = min(next, w.script[0].at)
		}
		for _, v := range w.vgpus {
			next = min(next, v.turning, v.edge, v.wakes)
		}
		w.gpu.Advance(next)
		if next == until {
			return
		}
		if w.setAt <= next {
			w.set()
		}
		if w.tick <= next {
			w.tick = next + tick
			w.arbitrate()
		}
		if w.press <= next {
			w.press = next + pressEvery
			w.look()
		}
		for len(w.script) > 0 && w.script[0].at <= next {
			e := w.script[0]
			w.script = w.script[1:]
			e.do()
		}
		for _, v := range slices.Clone(w.vgpus) {
			if v.turning <= next {
				v.turn()
			}
			if v.edge <= next {
				v.duty()
			}
			if v.wakes <= next {
				v.wake()
			}
		}
	}
}

// look is what guards of high priority do: they see at once when there is work.
func (w *whole) look() {
	changed, now := false, w.gpu.Now()
	for _, v := range w.vgpus {
		if v.share.Priority != quota.PriorityHigh {
			continue
		}
		for _, g := range v.groups {
			if g.Pending() {
				v.worked = now
			}
		}
		pressing := v.worked > 0 && now-v.worked < pressFor
		changed = changed || pressing != v.pressing
		v.pressing = pressing
	}
	if changed {
		w.decide()
	}
}

func (v *vgpu) account() (sum runlist.Account) {
	for _, g := range v.groups {
		a := g.Account()
		sum.GPUTime += a.GPUTime
		sum.Waiting = max(sum.Waiting, a.Waiting)
		sum.Preemptions += a.Preemptions
	}
	return sum
}

// measured is what happened in a span of time, in percent of it.
type measured struct {
	parts     []float64 // computing
	present   []float64 // having work
	sum       float64   // computing, all
	preempted float64   // lost to preemptions
}

func (w *whole) measure(d time.Duration) (m measured) {
	before := map[*vgpu]runlist.Account{}
	for _, v := range w.vgpus {
		before[v] = v.account()
	}
	w.paces, w.sets = nil, 0
	w.run(w.gpu.Now() + d)
	percent := func(t time.Duration) float64 { return 100 * float64(t) / float64(d) }
	for _, v := range w.vgpus {
		a, b := v.account(), before[v]
		ran := percent(a.GPUTime - b.GPUTime)
		m.parts = append(m.parts, ran)
		m.present = append(m.present, min(100, ran+percent(a.Waiting-b.Waiting)))
		m.sum += ran
		if v.share.Priority == quota.PriorityBestEffort {
			continue // whose preemptions do not count where others have work
		}
		m.preempted += percent(time.Duration(a.Preemptions-b.Preemptions) * switchCost)
	}
	return m
}

// cl is what measurements call so: a loop that launches one kernel, waits for it and launches the next has 99 % of a GPU alone with
// kernels of 1 ms.
const think = 15 * us

// TestLoopBesideHog: what the design wants of a loop beside a hog, at weights 1 : 1 unless said; in percent of the GPU, as both are rounded
// there.
//
// What is not reached cannot be: two switches come with each kernel, one of them a preemption, which takes 0.335 ms with the loop's own
// time. So beside a loop with kernels of 0.1 ms that has x % the hog has 100 - 4.35 x % at most, with the best of schedules: 67.5 beside
// 7.5 (want 75), 43.5 beside 13 (want 52). Measured with slices of 1 ms: 7.0 and 70.3.
func TestLoopBesideHog(t *testing.T) {
	for _, c := range []struct {
		kernel, think     time.Duration
		weight            int
		maxLoss           float64
		loop, hog         float64
		wanted            string
		loopThen, hogThen float64 // by the driver's default
	}{
		{100 * us, think, 1, 0.15, 7.5, 67, "7.5, 75", 4.0, 83.1},
		{100 * us, think, 1, 0.30, 13, 34, "13, 52", 4.0, 83.1},
		{ms, think, 1, 0.15, 43, 43, "43, 43", 29.5, 61.1},
		{ms, think, 3, 0.15, 60, 18, "60, 18", 29.5, 61.1},
		{5 * ms, think, 1, 0.15, 47, 47, "47, 47", 40.8, 50.7},
		{20 * ms, think, 1, 0.15, 45, 45, "entitlement less 5", 0, 0},
		{ms, ms, 1, 0.15, 43, 43, "demand (49) or entitlement less 5", 0, 0},
		{100 * us, think, 1, 0.01, 0.6, 95, "a throughput node", 0, 0},
	} {
		w := newWhole(c.maxLoss)
		w.add(weight(1)).hog()
		w.add(weight(c.weight)).loop(c.kernel, c.think)
		w.run(7 * time.Second)
		m := w.measure(5 * time.Second)
		what := fmt.Sprintf("kernels of %v, then %v, weight %d, max_loss %g %%: loop %.1f, hog %.1f, pace %v",
			c.kernel, c.think, c.weight, 100*c.maxLoss, m.parts[1], m.parts[0], w.state.Pace())
		t.Log(what)
		if m.parts[1] < c.loop-0.5 || m.parts[0] < c.hog-0.5 || m.parts[1] < c.loopThen || m.preempted > 100*c.maxLoss+1 {
			t.Errorf("%s, %.1f %% lost to preemptions; want %s", what, m.preempted, c.wanted)
		}
		if len(w.paces) > 1 {
			t.Errorf("%s: it went on to %v", what, w.paces)
		}
	}
}

// TestSaturating: nobody waits for an answer, so slices are long.
func TestSaturating(t *testing.T) {
	for n, least := range map[int]float64{2: 99.4, 5: 99.3, 10: 99.0, 64: 94} {
		w := newWhole(0.15)
		for range n {
			w.add(weight(1)).hog()
		}
		w.run(4 * time.Second)
		m := w.measure(10 * time.Second)
		t.Logf("%d: %.2f %%", n, m.sum)
		if m.sum < least || slices.Max(m.parts) > 1.05*slices.Min(m.parts) {
			t.Errorf("%d: %.2f %%, want %.1f; each %.1f to %.1f", n, m.sum, least, slices.Min(m.parts), slices.Max(m.parts))
		}
	}
}

// TestLoops: many loops that come within 2.2 s, and hogs beside them. Each has the same within 1.2, when the slices of all have been set
// twice.
func TestLoops(t *testing.T) {
	for _, n := range []int{10, 30, 60} {
		for _, hogs := range []int{0, 1, 4} {
			w := newWhole(0.15)
			for i := range n {
				w.at(2200*ms*time.Duration(i)/time.Duration(n), func() { w.add(weight(1)).loop(ms, think) })
			}
			for range hogs {
				w.add(weight(1)).hog()
			}
			w.run(4 * time.Second)
			m := w.measure(5 * time.Second)
			most := slices.Max(m.parts) / slices.Min(m.parts)
			t.Logf("%d and %d hogs: largest by smallest %.3f, %.1f %%, %d sets, paces %v", n, hogs, most, m.sum, w.sets, w.paces)
			if most > 1.2 || m.sum < 85 {
				t.Errorf("%d and %d hogs: %.2f", n, hogs, m.parts)
			}
		}
	}
}

// service has requests at random.
func (v *vgpu) service(seed uint64, every, kernel time.Duration) *vgpu {
	rnd := rand.New(rand.NewPCG(seed, 3))
	at := v.w.gpu.Now()
	v.process().Arrive(func() (time.Duration, time.Duration, bool) {
		at += time.Duration(rnd.ExpFloat64() * float64(every))
		return at, kernel, true
	})
	return v
}

// TestHighService: a service of high priority with requests of 2 ms at random beside a hog. 99 of 100 take at most 1.15 of what they take
// alone: they are not cut in two.
func TestHighService(t *testing.T) {
	p99 := func(load int, beside bool) time.Duration {
		w := newWhole(0.15)
		client := w.add(sched.Share{Weight: 1, Priority: quota.PriorityHigh}).service(7, 2*ms*100/time.Duration(load), 2*ms)
		if beside {
			w.add(weight(1)).hog()
		}
		w.run(time.Second)
		client.waits = nil
		w.measure(16 * time.Second)
		slices.Sort(client.waits)
		return client.waits[len(client.waits)*99/100]
	}
	for _, load := range []int{20, 50, 80} {
		alone, beside := p99(load, false), p99(load, true)
		t.Logf("load %d %%: p99 %v alone, %v beside a hog", load, alone, beside)
		if beside > alone*115/100 {
			t.Errorf("load %d %%: p99 %v alone, %v beside a hog", load, alone, beside)
		}
	}
}

// TestServiceBesideTiny: a service with requests of 2 ms at random beside a program of the same weight with kernels of 40 µs. While it
// needs less than its part turns are no shorter for these kernels: it has what it has by the driver's own slices, but for one request of a
// hundred, and so has the program, but for what switches take.
func TestServiceBesideTiny(t *testing.T) {
	run := func(seed uint64, load int, ours bool) (waits []time.Duration, tiny float64) {
		w := newWhole(0.15)
		client := w.add(weight(1)).service(seed, 2*ms*100/time.Duration(load), 2*ms)
		other := w.add(weight(1)).loop(40*us, 8*us)
		if !ours {
			w.tick = never
			client.groups[0].SetTimeslice(sched.NativeTimeslice)
			other.groups[0].SetTimeslice(sched.NativeTimeslice)
		}
		w.run(2 * time.Second)
		client.waits = nil
		m := w.measure(8 * time.Second)
		slices.Sort(client.waits)
		return client.waits, m.parts[1]
	}
	of := func(w []time.Duration, percent int) time.Duration { return w[len(w)*percent/100].Round(100 * us) }
	for _, load := range []int{20, 50} {
		for seed := range uint64(5) {
			plain, less := run(seed, load, false)
			waits, got := run(seed, load, true)
			t.Logf("load %d %%: p50 %v (driver's default %v), p99 %v (%v), the other has %.1f (%.1f) %%", load, of(waits, 50), of(plain, 50),
				of(waits, 99), of(plain, 99), got, less)
			if load == 20 && (of(waits, 50) > of(plain, 50)*11/10 || of(waits, 99) > 3*of(plain, 99) || got < less-4) {
				t.Errorf("seed %d: p50 %v, p99 %v, the other has %.1f %%", seed, of(waits, 50), of(waits, 99), got)
			}
		}
	}
}

// TestServices: four services with requests of 0.4 ms at random, of which each needs less than its part. 99 of 100 take little
// more than by the driver's own slices.
func TestServices(t *testing.T) {
	run := func(load int, ours bool) time.Duration {
		w, waits := newWhole(0.15), []time.Duration{}
		for i := range uint64(4) {
			v := w.add(weight(1)).service(10+i, 400*us*400/time.Duration(load), 400*us)
			if !ours {
				w.tick = never
				v.groups[0].SetTimeslice(sched.NativeTimeslice)
			}
		}
		w.run(2 * time.Second)
		for _, v := range w.vgpus {
			v.waits = nil
		}
		w.measure(8 * time.Second)
		for _, v := range w.vgpus {
			waits = append(waits, v.waits...)
		}
		slices.Sort(waits)
		return waits[len(waits)*99/100]
	}
	for _, load := range []int{20, 50} {
		plain, ours := run(load, false), run(load, true)
		t.Logf("load %d %%: p99 %v, by the driver's own slices %v", load, ours, plain)
		if ours > plain*6/5 {
			t.Errorf("load %d %%: p99 %v, by the driver's own slices %v", load, ours, plain)
		}
	}
}

// TestHigh: a client of high priority, with a kernel of 0.137 ms 2 ms after each answer, beside hogs of best effort; then it is idle and
// has one request. The aims (p99 200 and 250 µs) are less than the kernel and one switch take.
func TestHigh(t *testing.T) {
	for _, c := range []struct {
		hogs       int
		p99, first time.Duration
		least      float64
	}{{1, 340 * us, 340 * us, 78}, {4, 500 * us, 500 * us, 78}} {
		w := newWhole(0.15)
		for range c.hogs {
			w.add(sched.Share{Weight: 1, Priority: quota.PriorityBestEffort}).hog()
		}
		client := w.add(sched.Share{Weight: 1, Priority: quota.PriorityHigh}).loop(137*us, 2*ms)
		w.run(3 * time.Second)
		client.waits = nil
		m := w.measure(5 * time.Second)
		slices.Sort(client.waits)
		p50, p99 := client.waits[len(client.waits)/2], client.waits[len(client.waits)*99/100]
		client.groups[0].Stop()
		w.run(w.gpu.Now() + time.Second)
		client.waits = nil
		client.groups[0].Submit(runlist.Work{Length: 137 * us, Count: 1})
		w.run(w.gpu.Now() + 100*ms)
		best := m.sum - m.parts[c.hogs]
		t.Logf("beside %d: p50 %v, p99 %v, first after idle %v, best effort %.1f %%", c.hogs, p50, p99, client.waits[0], best)
		if p99 > c.p99 || client.waits[0] > c.first || best < c.least {
			t.Errorf("beside %d: p99 %v, first after idle %v, best effort %.1f %%", c.hogs, p99, client.waits[0], best)
		}
	}
}

// mix says what comes.
type mix int

const (
	steady mix = iota // programs that always do the same
	varied            // and such with work at random
	apart             // and priorities and caps
)

// come starts a vGPU of any kind.
func (w *whole) come(rnd *rand.Rand, of mix) *vgpu {
	s := sched.Share{Weight: 1 + rnd.IntN(4), Priority: quota.PriorityDefault}
	switch k := rnd.IntN(12); {
	case k == 0:
		s.Priority = quota.PriorityBestEffort
	case k == 1 && of == apart:
		s.Priority = quota.PriorityHigh
	case k < 4 && of == apart:
		s.Percent = 10 + rnd.IntN(40)
		var list []sched.Share
		for _, o := range w.vgpus {
			list = append(list, o.share)
		}
		if w.card.Admit(list, s) != nil {
			s.Percent = 0
		}
	}
	v, seed, length := w.add(s), rnd.Uint64(), 100*us<<rnd.IntN(7)
	for range 1 + rnd.IntN(6)/5 {
		kinds := 10
		if of == steady {
			kinds = 7
		}
		switch k := rnd.IntN(kinds); {
		case k < 3:
			v.hog()
		case k < 6:
			v.loop(length, think)
		case k < 7:
			v.loop(length, length/2+time.Duration(rnd.Int64N(int64(20*length))))
		case k < 9:
			v.open(seed, 10*length, length)
		default:
			v.bursts(seed, 100*ms, ms, 40)
		}
	}
	return v
}

// crowd has vGPUs come in the first second, and some go and others come until the third.
func crowd(seed uint64, of mix) *whole {
	rnd := rand.New(rand.NewPCG(seed, 5))
	w, n := newWhole(0.15), 2+rnd.IntN(8)
	if seed%4 == 0 {
		n = 64
	}
	for range n {
		w.at(time.Duration(rnd.Int64N(int64(time.Second))), func() { w.come(rnd, of) })
	}
	w.settled = 3 * time.Second
	for range n {
		w.at(time.Second+time.Duration(rnd.Int64N(int64(2*time.Second))), func() {
			w.remove(w.vgpus[rnd.IntN(len(w.vgpus))])
			w.come(rnd, of)
		})
	}
	return w
}

// TestFair: of any mix, nobody with work has much less than its weight gives it, unless preemptions take what they may; they take little
// more; and among programs that do not change the pace does not either.
//
// Of 600 seeds, 588 are within tighter bounds: 17 % lost, 0.65 of the entitlement unless 12 % are, and 4 paces of steady programs in 4 s.
// In the others bursts are about as long as the pace, or one of default priority waits for the 0.2 ms of one of best effort.
func TestFair(t *testing.T) {
	for seed := range uint64(40) {
		of := mix(seed % 2)
		w := crowd(seed/2, of)
		w.run(6 * time.Second)
		m := w.measure(4 * time.Second)
		what := fmt.Sprintf("seed %d, %d vGPUs, mix %d", seed, len(w.vgpus), of)
		all, weights := 0.0, make([]float64, len(w.vgpus))
		for i, v := range w.vgpus {
			weights[i] = float64(v.share.Weight)
			if v.share.Priority == quota.PriorityBestEffort {
				weights[i] /= 50
			}
			all += weights[i] * m.present[i] / 100
		}
		least := 10.0
		for i, p := range m.present {
			entitled := weights[i] / (all + weights[i]*(1-p/100)) * p * m.sum / 100
			if p > 5 && w.vgpus[i].share.Priority > quota.PriorityBestEffort {
				least = min(least, m.parts[i]/entitled)
			}
		}
		t.Logf("%s: pace %v, %.1f %% lost to preemptions, the last has %.2f of its entitlement, %d paces set, %d slices",
			what, w.state.Pace(), m.preempted, least, len(w.paces), w.sets)
		if m.preempted > 20 {
			t.Errorf("%s: %.1f %% lost to preemptions", what, m.preempted)
		}
		if least < 0.5 && m.preempted < 10 {
			t.Errorf("%s: one has %.2f of its entitlement, with %.1f %% lost to preemptions", what, least, m.preempted)
		}
		if len(w.paces) > []int{5, 20}[of] {
			t.Errorf("%s: paces %v", what, w.paces)
		}
	}
}

// TestEverybodyGetsOn: with caps, priorities, and vGPUs that come and go nobody is off or waits for longer than caps make it, and at the
// end nobody is paused that is not capped.
func TestEverybodyGetsOn(t *testing.T) {
	for seed := range uint64(24) {
		w := crowd(seed, apart)
		type progress struct {
			ran time.Duration
			at  time.Duration
		}
		seen := map[*runlist.TSG]*progress{}
		for at := 7 * ms; at < 4*time.Second; at += 7 * ms {
			w.run(at)
			for _, v := range w.vgpus {
				for _, g := range v.groups {
					p, a := seen[g], g.Account()
					if p == nil {
						p = &progress{at: at}
						seen[g] = p
					}
					if !g.Pending() || a.GPUTime > p.ran {
						p.at, p.ran = at, a.GPUTime
					}
					if off := at - v.offAt; v.off && off > 750*ms || at-max(p.at, w.settled) > time.Second || at-p.at > 3500*ms {
						t.Fatalf("seed %d at %v: %s, %+v: off %v for %v, has waited for %v; %+v", seed, at, v.id, v.share, v.off, off, at-p.at, v.row)
					}
				}
			}
		}
		for _, v := range w.vgpus {
			v.share = weight(1)
		}
		w.run(w.gpu.Now() + 100*ms)
		for _, v := range w.vgpus {
			if len(v.groups) < 2 && (v.off || v.row.Slot.Cycle > 0) {
				t.Errorf("seed %d: %s is off at the end", seed, v.id)
			}
		}
	}
}

// TestWeightsChange: slices follow other weights at once and are not prolonged in the second after it, so that nothing moves twice; those
// of a pair that saturates for longer are.
func TestWeightsChange(t *testing.T) {
	w := newWhole(0.15)
	a, _ := w.add(weight(1)).hog(), w.add(weight(1)).hog()
	for i, c := range []struct {
		weight int
		soon   time.Duration // pace, from 0.2 s on
		late   time.Duration // after two seconds
	}{{1, 10 * ms, 35 * ms}, {4, 10 * ms, 12500 * us}, {1, 10 * ms, 35 * ms}} {
		a.share = weight(c.weight)
		w.run(w.gpu.Now() + 5*sched.Tick)
		for range 27 {
			if pace := w.state.Pace(); pace != c.soon {
				t.Errorf("change %d: pace %v, want %v", i, pace, c.soon)
			}
			w.run(w.gpu.Now() + sched.Tick)
		}
		if w.run(w.gpu.Now() + 2*time.Second); w.state.Pace() != c.late {
			t.Errorf("change %d: pace %v in the end, want %v", i, w.state.Pace(), c.late)
		}
	}
}
