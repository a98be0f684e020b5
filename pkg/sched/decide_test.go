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
// 33 ms, and the containers' shares. A timeslice that is set makes the driver take up its list from the beginning.

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
	paces    []time.Duration // that were set
	sets     int             // timeslices set
}

// vgpu is a container and the part of its guard that carries rows out.
type vgpu struct {
	w       *whole
	id      string
	share   sched.Share
	row     sched.Row
	groups  []*runlist.TSG
	off     bool
	turning time.Duration // when a pause or resume under way is carried out
	edge    time.Duration // when the phase of its slot changes
	waits   []time.Duration
	kinds   []string
	worked  time.Duration
}

func newWhole(maxLoss float64) *whole {
	w := &whole{gpu: runlist.New(runlist.Config{Restart: true}), timing: sched.DefaultTiming(), card: cardOf(sched.PolicyWeight, 64),
		observer: sched.NewObserver(), owner: map[int]string{}}
	w.timing.MaxLoss = maxLoss
	return w
}

func (w *whole) add(share sched.Share) *vgpu {
	w.pids++
	v := &vgpu{w: w, id: fmt.Sprint("v", w.pids), share: share, turning: never, edge: never}
	w.vgpus = append(w.vgpus, v)
	w.decide()
	return v
}

func (w *whole) remove(v *vgpu) {
	for _, g := range v.groups {
		g.Remove()
		delete(w.owner, g.PID())
	}
	w.vgpus = slices.DeleteFunc(w.vgpus, func(x *vgpu) bool { return x == v })
	w.observer.Forget(v.id)
	w.decide()
}

// process starts a process with a context.
func (v *vgpu) process() *runlist.TSG {
	v.w.pids++
	g := v.w.gpu.Add(v.w.pids, 1)
	v.w.owner[v.w.pids] = v.id
	v.groups = append(v.groups, g)
	g.SetTimeslice(v.row.Slice)
	if v.off {
		g.Pause()
	}
	g.OnDone(func(arrived, ended time.Duration) { v.waits = append(v.waits, ended-arrived) })
	return g
}

// loop launches a kernel, waits for it, thinks, and launches the next.
func (v *vgpu) loop(kernel, think time.Duration) *vgpu {
	v.kinds = append(v.kinds, fmt.Sprintf("loop %v, %v", kernel, think))
	v.process().Submit(runlist.Work{Length: kernel, Gap: think})
	return v
}

// hog always has work.
func (v *vgpu) hog() *vgpu {
	v.kinds = append(v.kinds, "hog")
	v.process().Submit(runlist.Work{Length: 1200 * us})
	return v
}

// open has requests at random, of random lengths.
func (v *vgpu) open(seed uint64, every, kernel time.Duration) *vgpu {
	v.kinds = append(v.kinds, fmt.Sprintf("open %v every %v", kernel, every))
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
	v.kinds = append(v.kinds, fmt.Sprintf("bursts of %d of %v every %v", n, kernel, every))
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
		for _, g := range v.groups {
			if v.share.Priority == quota.PriorityHigh && g.Pending() {
				v.worked = now
			}
		}
		idle := max(200*ms, 2*max(slot.Cycle, v.row.Slot.Cycle))
		x := sched.VGPU{ID: v.id, Share: v.share, Slot: slot, Contexts: len(v.groups), Seen: w.observer.Seen(v.id, idle)}
		x.Busy = min(x.Busy, len(v.groups))
		seen = append(seen, x)
	}
	rows, state := w.timing.Decide(w.card, seen, w.observer.Costs(), w.state, now)
	if state.Pace() != w.state.Pace() {
		w.paces = append(w.paces, state.Pace())
	}
	w.state = state
	for i, v := range w.vgpus {
		v.apply(rows[i])
	}
}

func (v *vgpu) apply(row sched.Row) {
	if row.Slice != v.row.Slice {
		v.w.sets++
		for _, g := range v.groups {
			g.SetTimeslice(row.Slice)
		}
	}
	v.row = row
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
	if v.row.Slot.Cycle > 0 {
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
		next := min(until, w.tick)
		if len(w.script) > 0 {
			next = min(next, w.script[0].at)
		}
		for _, v := range w.vgpus {
			next = min(next, v.turning, v.edge)
		}
		w.gpu.Advance(next)
		if next == until {
			return
		}
		if w.tick <= next {
			w.tick = next + tick
			w.arbitrate()
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
		}
	}
}

func (v *vgpu) account() (sum runlist.Account) {
	for _, g := range v.groups {
		a := g.Account()
		sum.GPUTime += a.GPUTime
		sum.Waiting += a.Waiting
		sum.Preemptions += a.Preemptions
	}
	return sum
}

// measured is what happened in a span of time.
type measured struct {
	parts     []float64 // of the GPU's time, in percent
	sum       float64
	preempted float64 // lost to preemptions, in percent
	lag       []float64
}

func (w *whole) measure(d time.Duration) (m measured) {
	before := map[*vgpu]runlist.Account{}
	for _, v := range w.vgpus {
		before[v] = v.account()
	}
	w.run(w.gpu.Now() + d)
	for _, v := range w.vgpus {
		a := v.account()
		part := 100 * float64(a.GPUTime-before[v].GPUTime) / float64(d)
		m.parts = append(m.parts, part)
		m.sum += part
		m.preempted += 100 * float64(a.Preemptions-before[v].Preemptions) * float64(switchCost) / float64(d)
	}
	return m
}

// TestTargets: a loop beside a hog, and what else the design wants of the scheduler (loop and hog in percent).
func TestTargets(t *testing.T) {
	const think = 15 * us
	for _, c := range []struct {
		kernel, think time.Duration
		weight        int
		maxLoss       float64
		loop, hog     float64
	}{
		{100 * us, think, 1, 0.15, 7.5, 75}, {100 * us, think, 1, 0.30, 13, 52},
		{ms, think, 1, 0.15, 43, 43}, {ms, think, 3, 0.15, 60, 18},
		{5 * ms, think, 1, 0.15, 47, 47}, {20 * ms, think, 1, 0.15, 45, 45}, {ms, ms, 1, 0.15, 43, 43},
	} {
		w := newWhole(c.maxLoss)
		w.add(weight(1)).hog()
		w.add(weight(c.weight)).loop(c.kernel, c.think)
		w.run(2 * time.Second)
		w.paces = nil
		m := w.measure(10 * time.Second)
		t.Logf("%v %v %d %v: %.1f pace %v %v sets %d, preempted %.1f", c.kernel, c.think, c.weight, c.maxLoss, m.parts, w.state.Pace(), w.paces, w.sets, m.preempted)
		if m.parts[1] < c.loop-0.5 || m.parts[0] < c.hog-0.5 {
			t.Errorf("want %v %v", c.loop, c.hog)
		}
	}
}

func TestSat(t *testing.T) {
	for _, n := range []int{2, 5, 10, 64} {
		w := newWhole(0.15)
		for range n {
			w.add(weight(1)).hog()
		}
		w.run(3 * time.Second)
		w.paces = nil
		m := w.measure(10 * time.Second)
		t.Logf("%d: %.2f pace %v %v spread %.1f %.1f", n, m.sum, w.state.Pace(), w.paces, slices.Min(m.parts), slices.Max(m.parts))
	}
	for _, n := range []int{10, 30, 60} {
		for _, hogs := range []int{0, 1, 4} {
			w := newWhole(0.15)
			for range n {
				w.add(weight(1)).loop(ms, 15*us)
			}
			for range hogs {
				w.add(weight(1)).hog()
			}
			w.run(3 * time.Second)
			w.paces = nil
			m := w.measure(10 * time.Second)
			t.Logf("%d loops %d hogs: %.2f pace %v %v spread %.2f %.2f sets %d lost %.1f", n, hogs, m.sum, w.state.Pace(), w.paces, slices.Min(m.parts), slices.Max(m.parts), w.sets, m.preempted)
		}
	}
}

// kinds of programs that come.
func (w *whole) mixed(rnd *rand.Rand, high bool) *vgpu {
	s := sched.Share{Weight: 1 + rnd.IntN(4), Priority: quota.PriorityDefault}
	switch k := rnd.IntN(12); {
	case k == 0:
		s.Priority = quota.PriorityBestEffort
	case k == 1 && high:
		s.Priority = quota.PriorityHigh
	case k == 2:
		s.Percent = 10 + rnd.IntN(40)
		var list []sched.Share
		for _, o := range w.vgpus {
			list = append(list, o.share)
		}
		if w.card.Admit(list, s) != nil {
			s.Percent = 0
		}
	}
	v := w.add(s)
	seed := rnd.Uint64()
	length := time.Duration(float64(100*us) * float64(uint64(1)<<rnd.IntN(7)))
	for range 1 + rnd.IntN(6)/5 {
		switch k := rnd.IntN(10); {
		case k < 3:
			v.hog()
		case k < 6:
			v.loop(length, 15*us)
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

func TestProps(t *testing.T) {
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		w := newWhole(0.15)
		n := 2 + rnd.IntN(8)
		if seed%4 == 0 {
			n = 64
		}
		for range n {
			w.at(time.Duration(rnd.Int64N(int64(time.Second))), func() { w.mixed(rnd, false) })
		}
		for range n / 2 {
			w.at(time.Second+time.Duration(rnd.Int64N(int64(2*time.Second))), func() { w.remove(w.vgpus[rnd.IntN(len(w.vgpus))]); w.mixed(rnd, false) })
		}
		w.run(6 * time.Second)
		w.paces, w.sets = nil, 0
		before := map[*vgpu]runlist.Account{}
		for _, v := range w.vgpus {
			before[v] = v.account()
		}
		m := w.measure(4 * time.Second)
		weights, worst, who := 0.0, 10.0, ""
		type x struct{ run, ran, e float64 }
		var xs []x
		for _, v := range w.vgpus {
			a := v.account()
			ran := (a.GPUTime - before[v].GPUTime).Seconds() / 4
			run := min(1, ran+(a.Waiting-before[v].Waiting).Seconds()/4/float64(len(v.groups)))
			wt := float64(v.share.Weight)
			if v.share.Priority == quota.PriorityBestEffort {
				wt /= 50
			}
			weights += wt * run
			xs = append(xs, x{run, ran, wt})
		}
		for i, x := range xs {
			if x.run < 0.05 || w.vgpus[i].share.Percent > 0 {
				continue
			}
			if r := x.ran / (x.e / weights * x.run * m.sum / 100); r < worst {
				worst, who = r, fmt.Sprintf("%+v %.3f entitled %.3f", w.vgpus[i].share, x, x.e/weights)
			}
		}
		t.Logf("seed %d n %d: sum %.1f pace %v changes %v sets %d preempted %.1f worst %.2f %s", seed, n, m.sum, w.state.Pace(), len(w.paces), w.sets, m.preempted, worst, who)
	}
}
