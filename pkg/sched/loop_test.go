package sched_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// These tests close the loop in virtual time: the model of a graphics engine (pkg/sim/runlist), and for each container a
// small guard that knows what a real one knows, as late as a real one does, and does what pkg/sched says.

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// What a guard does when (pkg/guard), and how long the driver takes for it on an H200.
const (
	tick       = 33 * ms  // between two batches of switch records
	idleAfter  = 200 * ms // a group without a run for so long has no work
	pressEvery = 2 * ms   // between two looks at a high-priority container
	pressFor   = 100 * ms // after its last work
	pauseTime  = 600 * us
	resumeTime = 300 * us
)

// switchCost is what a switch takes from who has work left to another.
const switchCost = runlist.DefaultSwitchCost + runlist.DefaultPreemptCost

const never = time.Duration(math.MaxInt64)

// node is a GPU and the containers on it, in the order of the ledger.
type node struct {
	gpu        *runlist.Runlist
	timing     sched.Timing
	card       sched.Card
	containers []*container
	script     []event // by time
	pids       int
}

type event struct {
	at time.Duration
	do func()
}

// container has its processes, and a guard.
type container struct {
	n      *node
	id     string
	share  sched.Share
	groups []*runlist.TSG
	pids   map[int]bool

	tracker  *sched.Tracker
	next     uint64       // switch record
	self     sched.Tenant // as the other guards see it
	slice    time.Duration
	tick     time.Duration // when it looks next
	worked   time.Duration // when a high-priority container was last seen to have work
	kernels  uint64        // that had ended then
	slot     sched.Slot
	capped   bool
	load     float64         // of the looks at a high-priority container, those with work
	turns    sched.Slot      // while it takes turns; else zero
	off      bool            // its channels are
	turning  time.Duration   // when a pause or resume under way is carried out
	edge     time.Duration   // when the phase of its slot changes
	requests int             // of an open loop, not done
	waits    []time.Duration // from a request to its end
}

func newNode(card sched.Card) *node {
	return &node{gpu: runlist.New(runlist.Config{}), timing: sched.DefaultTiming(), card: card}
}

// cardOf has the default prio_ratio.
func cardOf(p sched.Policy, maxInst int) sched.Card {
	return sched.Card{Policy: p, MaxInst: maxInst, PrioRatio: sched.DefaultPrioRatio}
}

func weight(n int) sched.Share { return sched.Share{Weight: n, Priority: quota.PriorityDefault} }

func percent(n int) sched.Share {
	return sched.Share{Weight: 1, Percent: n, Priority: quota.PriorityDefault}
}

// add starts a container.
func (n *node) add(share sched.Share) *container {
	c := &container{n: n, id: fmt.Sprint("c", n.pids), self: sched.Tenant{Place: n.pids}, share: share, pids: map[int]bool{}, tracker: sched.NewTracker(),
		turning: never, edge: never, worked: -never}
	// Guards do not look at the same time.
	n.pids++
	c.tick = n.gpu.Now() + time.Duration(n.pids*7%33)*ms
	n.containers = append(n.containers, c)
	n.changed()
	return c
}

// remove ends a container: its processes, then its guard.
func (n *node) remove(c *container) {
	for _, g := range c.groups {
		g.Remove()
	}
	n.containers = slices.DeleteFunc(n.containers, func(x *container) bool { return x == c })
	n.changed()
}

// changed is a change of the ledger, which all guards follow.
func (n *node) changed() {
	var claims []sched.Claim
	for _, c := range n.containers {
		if p, ok := n.card.Cap(c.share); ok {
			claims = append(claims, sched.Claim{ID: c.id, Caps: map[string]sched.Permille{"gpu": p}})
		}
	}
	layout := n.timing.Layout(claims)
	for _, c := range n.containers {
		c.slot, c.capped = layout[c.id]["gpu"]
		c.self.Share = c.share
		c.duty()
	}
	n.slices()
}

// slices has every guard set its timeslices.
func (n *node) slices() {
	for _, c := range n.containers {
		var others []sched.Tenant
		for _, o := range n.containers {
			if o != c {
				others = append(others, o.self)
			}
		}
		c.slice = n.timing.Slice(n.card, c.self, others)
		if turns, ok := n.timing.Turn(n.card, c.self, others); !ok {
			c.turns = sched.Slot{}
		} else {
			c.turns = turns
		}
		c.tracker.SetSlice(c.slice)
		for _, g := range c.groups {
			g.SetTimeslice(c.slice)
		}
		c.duty()
	}
}

// process starts a process with a context.
func (c *container) process() *runlist.TSG {
	c.n.pids++
	g := c.n.gpu.Add(c.n.pids, uint32(c.n.pids))
	c.pids[c.n.pids] = true
	c.groups = append(c.groups, g)
	g.SetTimeslice(c.slice)
	if c.off {
		g.Pause()
	}
	return g
}

// busy gives n processes endless work.
func (c *container) busy(n int, kernel time.Duration) *container {
	for range n {
		c.process().Submit(runlist.Work{Length: kernel})
	}
	return c
}

// poisson gives a process requests in an open loop until a time, of random lengths around kernel.
func (c *container) poisson(seed uint64, every, kernel, until time.Duration) *container {
	g := c.process()
	g.OnDone(func(arrived, ended time.Duration) {
		c.requests--
		c.waits = append(c.waits, ended-arrived)
	})
	rnd := rand.New(rand.NewPCG(seed, uint64(len(c.n.containers))))
	at := c.n.gpu.Now()
	g.Arrive(func() (time.Duration, time.Duration, bool) {
		at += time.Duration(rnd.ExpFloat64() * float64(every))
		if at > until {
			return 0, 0, false
		}
		c.requests++
		return at, kernel/2 + time.Duration(rnd.Int64N(int64(kernel))), true
	})
	return c
}

// look is a guard's turn.
func (c *container) look() {
	now := c.n.gpu.Now()
	c.tick = now + tick
	if c.share.Priority == quota.PriorityHigh {
		c.tick = now + pressEvery
	}
	records, next, lost := c.n.gpu.Switches(c.next, 0)
	c.next = next
	c.tracker.Add(records, func(pid int) bool { return c.pids[pid] }, lost)
	idle := idleAfter
	idle = max(idle, 2*max(c.slot.Cycle, c.turns.Cycle))
	self := sched.Tenant{Place: c.self.Place, Share: c.share, Busy: min(c.tracker.Busy(now, idle), len(c.groups))}
	self.Saturating = !c.capped && c.tracker.Saturating()
	if c.share.Priority == quota.PriorityHigh {
		kernels := uint64(0)
		for _, g := range c.groups {
			if kernels += g.Account().Kernels; g.Pending() {
				c.worked = now
			}
		}
		if kernels != c.kernels {
			c.kernels, c.worked = kernels, now
		}
		self.Pressing = now-pressFor < c.worked
		pending := 0.0
		for _, g := range c.groups {
			if g.Pending() {
				pending = 1
			}
		}
		c.load += (pending - c.load) / 32
		self.Saturating = self.Pressing && (c.load > 0.7 || c.self.Saturating && c.load > 0.4)
	}
	if self != c.self {
		c.self = self
		c.n.slices()
		c.duty()
	}
}

// duty pauses or resumes as the slot wants it.
func (c *container) duty() {
	c.edge = never
	if c.turning != never {
		return // in the driver; it looks again when it is back
	}
	now := c.n.gpu.Now()
	off := false
	slot := c.slot
	if !c.capped {
		slot = c.turns
	}
	if slot.Cycle > 0 && c.self.Busy > 0 {
		var on bool
		on, c.edge = slot.Phase(now)
		off = !on
	}
	if off != c.off {
		c.edge = never
		c.turning = now + resumeTime
		if off {
			c.turning = now + pauseTime
		}
	}
}

// turn is what the driver does at the end of a pause or resume.
func (c *container) turn() {
	c.turning = never
	if c.off = !c.off; c.off {
		c.tracker.Paused(c.n.gpu.Now() - pauseTime)
	}
	for _, g := range c.groups {
		if c.off {
			g.Pause()
		} else {
			g.Resume()
		}
	}
	c.duty()
}

// at has f called at a time to come.
func (n *node) at(at time.Duration, f func()) {
	i, _ := slices.BinarySearchFunc(n.script, at+1, func(e event, at time.Duration) int { return int(e.at - at) })
	n.script = slices.Insert(n.script, i, event{at, f})
}

// run lets time pass.
func (n *node) run(until time.Duration) {
	for {
		next := until
		if len(n.script) > 0 {
			next = min(next, n.script[0].at)
		}
		for _, c := range n.containers {
			next = min(next, c.tick, c.turning, c.edge)
		}
		n.gpu.Advance(next)
		if next == until {
			return
		}
		for len(n.script) > 0 && n.script[0].at <= next {
			e := n.script[0]
			n.script = n.script[1:]
			e.do()
		}
		for _, c := range slices.Clone(n.containers) {
			if c.turning <= next {
				c.turn()
			}
			if c.edge <= next {
				c.duty()
			}
			if c.tick <= next {
				c.look()
			}
		}
	}
}

// used is a container's GPU time, as the GPU knows it.
func (c *container) used() time.Duration {
	sum := time.Duration(0)
	for _, g := range c.groups {
		sum += g.Account().GPUTime
	}
	return sum
}

// measure lets time pass and returns what part of it each container had, in percent, and the sum.
func (n *node) measure(d time.Duration) (parts []float64, sum float64) {
	before := map[*container]time.Duration{}
	for _, c := range n.containers {
		before[c] = c.used()
	}
	n.run(n.gpu.Now() + d)
	for _, c := range n.containers {
		p := 100 * float64(c.used()-before[c]) / float64(d)
		parts = append(parts, p)
		sum += p
	}
	return parts, sum
}

// shares is as measure, but of what all had together: without what switches take.
func (n *node) shares(d time.Duration) []float64 {
	parts, sum := n.measure(d)
	for i := range parts {
		parts[i] *= 100 / sum
	}
	return parts
}

// within compares in points.
func within(t *testing.T, what string, got, want []float64, points float64) {
	t.Helper()
	for i := range want {
		if math.Abs(got[i]-want[i]) > points {
			t.Errorf("%s: %.2f, want %.2f ± %g points", what, got, want, points)
			return
		}
	}
}

var kernels = []time.Duration{10 * us, ms, 100 * ms}

// TestWeights: shares from the first moment on, over 5 s and in every second.
func TestWeights(t *testing.T) {
	for _, weights := range [][]int{{1, 1}, {1, 3}, {1, 9}, {1, 2, 4, 8}, {1, 64}} {
		for _, kernel := range kernels {
			n := newNode(cardOf(sched.PolicyWeight, 64))
			sum := 0
			for _, w := range weights {
				n.add(weight(w)).busy(1, kernel)
				sum += w
			}
			var want []float64
			for _, w := range weights {
				want = append(want, 100*float64(w)/float64(sum))
			}
			what := fmt.Sprintf("weights %v, kernels of %v", weights, kernel)
			mean := make([]float64, len(want))
			for second := range 5 {
				parts, all := n.measure(time.Second)
				if all < 97 {
					t.Errorf("%s: second %d: %.1f %% of the time used", what, second, all)
				}
				for i := range parts {
					parts[i] *= 100 / all
					mean[i] += parts[i] / 5
				}
				within(t, fmt.Sprintf("%s, second %d", what, second), parts, want, 3)
			}
			within(t, what, mean, want, 1)
		}
	}
}

// TestSetWeight: a change of a running pair holds after 200 ms.
func TestSetWeight(t *testing.T) {
	n := newNode(cardOf(sched.PolicyPreempt, 20))
	a := n.add(weight(1)).busy(1, ms)
	n.add(weight(1)).busy(2, ms)
	n.run(1234 * ms)
	a.share.Weight = 3
	n.changed()
	n.run(n.gpu.Now() + 200*ms)
	within(t, "after 200 ms", n.shares(time.Second), []float64{75, 25}, 1)
}

// TestProcesses: a container's processes share its part.
func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		groups []int
		want   []float64
	}{{[]int{8, 1}, []float64{50, 50}}, {[]int{8, 3, 1}, []float64{33.33, 33.33, 33.33}}, {[]int{64, 1}, []float64{50, 50}}, {[]int{64, 1, 1, 1}, []float64{25, 25, 25, 25}}} {
		for _, kernel := range kernels {
			n := newNode(cardOf(sched.PolicyPreempt, 20))
			for _, groups := range c.groups {
				n.add(weight(1)).busy(groups, kernel)
			}
			what := fmt.Sprintf("%v processes, kernels of %v", c.groups, kernel)
			if c.groups[0] > 8 {
				n.run(time.Second) // so many take a while to be seen
			}
			within(t, what, n.shares(5*time.Second), c.want, 1)
		}
	}
}

// TestIdleContext: contexts without work cost nothing, however they came to rest.
func TestIdleContext(t *testing.T) {
	for _, kernel := range kernels {
		n := newNode(cardOf(sched.PolicyPreempt, 20))
		a := n.add(weight(1))
		b := n.add(weight(1))
		idle := a.process()
		idle.Submit(runlist.Work{Length: ms, Count: 3})
		a.process() // never had any
		n.run(2 * time.Second)
		// Now the idle one leaves the engine, after longer than its timeslice.
		a.busy(1, kernel)
		b.busy(1, kernel)
		n.run(n.gpu.Now() + 300*ms)
		within(t, fmt.Sprintf("beside an idle context, kernels of %v", kernel), n.shares(time.Second), []float64{50, 50}, 1)
		// Its work comes back, and goes.
		idle.Submit(runlist.Work{Length: kernel, Count: int(500 * ms / kernel)})
		n.run(n.gpu.Now() + 3*time.Second)
		within(t, fmt.Sprintf("after it worked, kernels of %v", kernel), n.shares(time.Second), []float64{50, 50}, 1)
	}
}

// TestIdle: what an idle container leaves, the others have.
func TestIdle(t *testing.T) {
	n := newNode(cardOf(sched.PolicyWeight, 20))
	a := n.add(weight(1)).busy(1, ms)
	b := n.add(weight(3)).busy(1, ms)
	n.run(time.Second)
	b.groups[0].Stop()
	n.run(n.gpu.Now() + 10*ms)
	if parts, _ := n.measure(time.Second); parts[0] < 99.9 {
		t.Errorf("alone it has %.1f %%", parts[0])
	}
	b.groups[0].Submit(runlist.Work{Length: ms})
	n.run(n.gpu.Now() + 200*ms)
	within(t, "together again", n.shares(time.Second), []float64{25, 75}, 1)
	n.remove(b)
	n.run(n.gpu.Now() + 300*ms)
	if a.slice != 10*ms {
		t.Errorf("alone it has slices of %v", a.slice)
	}
}

// TestCaps: hard caps in percent of the GPU's time, whatever the kernels.
func TestCaps(t *testing.T) {
	for _, c := range []struct {
		card   sched.Card
		shares []sched.Share
		want   []float64
	}{
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(10)}, []float64{10}},
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(30)}, []float64{30}},
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(50)}, []float64{50}},
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(70)}, []float64{70}},
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(1)}, []float64{1}},
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(50), percent(50)}, []float64{50, 50}},
		{cardOf(sched.PolicyFixed, 20), []sched.Share{percent(30), percent(70)}, []float64{30, 70}},
		{cardOf(sched.PolicyFixed, 10), []sched.Share{weight(2), weight(5), weight(1)}, []float64{20, 50, 10}},
		{cardOf(sched.PolicyPreempt, 20), []sched.Share{percent(50), percent(50)}, []float64{50, 50}},
		{cardOf(sched.PolicyWeight, 20), []sched.Share{percent(30)}, []float64{30}},
		{cardOf(sched.PolicyFair, 4), []sched.Share{weight(1), weight(1), weight(9)}, []float64{25, 25, 25}},
		{cardOf(sched.PolicyFair, 64), slices.Repeat([]sched.Share{weight(1)}, 64), slices.Repeat([]float64{1.5}, 64)},
	} {
		for _, processes := range []int{1, 3} {
			for _, kernel := range kernels {
				n := newNode(c.card)
				for _, s := range c.shares {
					n.add(s).busy(processes, kernel)
				}
				n.run(time.Second) // so long everybody is off at most, which may be in the first cycle
				got, _ := n.measure(5 * time.Second)
				want, points := slices.Clone(c.want), 1.0
				if len(c.shares) > 8 {
					points = 0.4 // slots of 5 ms, of which the driver takes 0.3 and the pause adds 0.6
				}
				if processes > 1 {
					// What it takes to switch from one of its processes to the next is the container's loss, not its neighbours'.
					for i, container := range n.containers {
						lost := float64(switchCost) / float64(container.slice+switchCost)
						want[i] -= want[i] * lost
					}
				}
				within(t, fmt.Sprintf("%v of %d, %d containers, %d processes, kernels of %v", c.card.Policy, c.card.MaxInst, len(c.shares), processes, kernel), got, want, points)
			}
		}
	}
}

// TestOffPhase: nobody is off for longer than half a second.
func TestOffPhase(t *testing.T) {
	for _, p := range []int{1, 3, 10, 50} {
		n := newNode(cardOf(sched.PolicyFixed, 20))
		c := n.add(percent(p)).busy(1, ms)
		n.run(time.Second)
		begin, longest := n.gpu.Now(), time.Duration(0)
		for on, at := begin, begin; at < begin+3*time.Second; at += ms {
			if n.run(at); !c.off {
				on = at
			}
			longest = max(longest, at-on)
		}
		if longest > 500*ms {
			t.Errorf("%d %%: off for %v", p, longest)
		}
	}
}

// TestMany: 64 saturating containers that come at random get equal parts.
func TestMany(t *testing.T) {
	for seed := range uint64(3) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		n := newNode(cardOf(sched.PolicyPreempt, 64))
		for range 64 {
			n.at(time.Duration(rnd.Int64N(int64(time.Second))), func() {
				n.add(weight(1)).busy(1+rnd.IntN(2), kernels[rnd.IntN(3)])
			})
		}
		n.run(2 * time.Second)
		within(t, fmt.Sprintf("seed %d", seed), n.shares(5*time.Second), slices.Repeat([]float64{100. / 64}, 64), 0.1)
	}
}

// TestNoStarvation: 64 containers with requests at random, 80 % of what the GPU can do; beside them one that saturates it. Every
// request is served, none waits for long.
func TestNoStarvation(t *testing.T) {
	for seed := range uint64(2) {
		for _, hog := range []int{0, 1, 64} {
			n := newNode(cardOf(sched.PolicyPreempt, 64))
			for i := range 64 - min(hog, 1) {
				n.add(weight(1)).poisson(seed<<8+uint64(i), 64*ms*10/8, ms, 2*time.Second)
			}
			if hog > 0 {
				n.add(weight(1)).busy(hog, 100*ms)
			}
			n.run(3 * time.Second)
			longest, served := time.Duration(0), 0
			for i, c := range n.containers {
				if c.requests > 0 {
					t.Errorf("seed %d, %d saturating processes: container %d waits for %d requests", seed, hog, i, c.requests)
				}
				served += len(c.waits)
				for _, w := range c.waits {
					longest = max(longest, w)
				}
			}
			// A request takes two or three rounds. A round is 100 ms; with a fork bomb 200 ms, and what 64 switches take.
			bound := 300 * ms
			if hog == 64 {
				bound = 650 * ms
			}
			if longest > bound || served < 1300 {
				t.Errorf("seed %d, %d saturating processes: %d requests, the longest took %v", seed, hog, served, longest)
			}
		}
	}
}

// TestPolicies holds docs/policies.md to what it says: three containers A, B and C with weights 1, 2 and 1, or as given, and
// what they get of the GPU's time (nothing is lost but what switches take) when A is alone, all work, and B is idle.
func TestPolicies(t *testing.T) {
	weights := []sched.Share{weight(1), weight(2), weight(1)}
	ones := []sched.Share{weight(1), weight(1), weight(1)}
	percents := []sched.Share{percent(30), percent(40), percent(20)}
	for _, c := range []struct {
		name             string
		card             sched.Card
		shares           []sched.Share
		alone, all, rest []float64
	}{
		{"fair", cardOf(sched.PolicyFair, 4), weights, []float64{25, 0, 0}, []float64{25, 25, 25}, []float64{25, 0, 25}},
		{"preempt", cardOf(sched.PolicyPreempt, 4), ones, []float64{100, 0, 0}, []float64{33.3, 33.3, 33.3}, []float64{50, 0, 50}},
		{"preempt, weights", cardOf(sched.PolicyPreempt, 4), weights, []float64{100, 0, 0}, []float64{25, 50, 25}, []float64{50, 0, 50}},
		{"preempt, percentages", cardOf(sched.PolicyPreempt, 4), percents, []float64{30, 0, 0}, []float64{30, 40, 20}, []float64{30, 0, 20}},
		{"weight-preempt", cardOf(sched.PolicyWeight, 4), weights, []float64{100, 0, 0}, []float64{25, 50, 25}, []float64{50, 0, 50}},
		{"fixed, weights", cardOf(sched.PolicyFixed, 4), weights, []float64{25, 0, 0}, []float64{25, 50, 25}, []float64{25, 0, 25}},
		{"fixed, percentages", cardOf(sched.PolicyFixed, 4), percents, []float64{30, 0, 0}, []float64{30, 40, 20}, []float64{30, 0, 20}},
		{"soft, weights", cardOf(sched.PolicySoft, 4), weights, []float64{100, 0, 0}, []float64{25, 50, 25}, []float64{50, 0, 50}},
		{"soft, percentages", cardOf(sched.PolicySoft, 4), percents, []float64{100, 0, 0}, []float64{33.3, 44.4, 22.2}, []float64{60, 0, 40}},
		{"native", cardOf(sched.PolicyNative, 4), weights, []float64{100, 0, 0}, []float64{31, 31, 31}, []float64{46.6, 0, 46.6}},
	} {
		for _, situation := range []struct {
			name string
			busy []int
			want []float64
		}{{"A alone", []int{0}, c.alone}, {"all", []int{0, 1, 2}, c.all}, {"B idle", []int{0, 2}, c.rest}} {
			n := newNode(c.card)
			for i, s := range c.shares {
				if x := n.add(s); slices.Contains(situation.busy, i) {
					x.busy(1, ms)
				} else {
					x.process()
				}
			}
			n.run(time.Second)
			got, _ := n.measure(5 * time.Second)
			within(t, c.name+", "+situation.name, got, situation.want, 1)
		}
	}

	// What else the page says.
	best := sched.Share{Weight: 1, Priority: quota.PriorityBestEffort}
	high := sched.Share{Weight: 1, Priority: quota.PriorityHigh}
	for _, c := range []struct {
		name   string
		card   sched.Card
		groups []int // of each
		shares []sched.Share
		want   []float64
		points float64
	}{
		{"native: a context is a part", cardOf(sched.PolicyNative, 20), []int{8, 1}, []sched.Share{weight(1), weight(1)}, []float64{81.5, 10}, 1},
		{"preempt: it is not", cardOf(sched.PolicyPreempt, 20), []int{8, 1}, []sched.Share{weight(1), weight(1)}, []float64{48.5, 48.5}, 1},
		{"a cap is no reservation", cardOf(sched.PolicyPreempt, 20), []int{1, 1}, []sched.Share{percent(30), weight(1)}, []float64{17, 81}, 3},
		{"soft: 40 % beside six of weight 2", cardOf(sched.PolicySoft, 20), []int{1, 1, 1, 1, 1, 1, 1}, append([]sched.Share{percent(40)}, slices.Repeat([]sched.Share{weight(2)}, 6)...), []float64{40, 10, 10}, 1},
		{"soft: 40 % beside one of weight 1", cardOf(sched.PolicySoft, 20), []int{1, 1}, []sched.Share{percent(40), weight(1)}, []float64{88.6, 11}, 1},
		{"default beside best effort", cardOf(sched.PolicyPreempt, 20), []int{1, 1}, []sched.Share{weight(1), best}, []float64{95, 2}, 1},
		{"prio_ratio 99", sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}, []int{1, 1}, []sched.Share{weight(1), high}, []float64{1, 97.5}, 1},
		{"prio_ratio 80", sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 80}, []int{1, 1}, []sched.Share{weight(1), high}, []float64{14.5, 58}, 1},
		{"prio_ratio 50", sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 50}, []int{1, 1}, []sched.Share{weight(1), high}, []float64{25.6, 25.6}, 1},
		{"prio_ratio 20", sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 20}, []int{1, 1}, []sched.Share{weight(1), high}, []float64{31.7, 7.9}, 1},
		{"high priority is not held by a fixed policy", cardOf(sched.PolicyFixed, 20), []int{1, 1}, []sched.Share{percent(50), high}, []float64{0.5, 98}, 1},
	} {
		n := newNode(c.card)
		for i, s := range c.shares {
			n.add(s).busy(c.groups[i], ms)
		}
		n.run(time.Second)
		got, _ := n.measure(5 * time.Second)
		within(t, c.name, got, c.want, c.points)
	}
}

// TestHighShare: of a GPU that everybody wants, a high-priority container gets prio_ratio; what is left is the others'.
func TestHighShare(t *testing.T) {
	for _, ratio := range []int{50, 80, 99} {
		for _, others := range []int{1, 5} {
			card := cardOf(sched.PolicyPreempt, 20)
			card.PrioRatio = ratio
			n := newNode(card)
			for range others {
				n.add(weight(1)).busy(1, ms)
			}
			n.add(sched.Share{Weight: 1, Priority: quota.PriorityHigh}).busy(1, ms)
			n.run(500 * ms)
			got := n.shares(2 * time.Second)
			within(t, fmt.Sprintf("prio_ratio %d, %d others", ratio, others), got[others:], []float64{float64(ratio)}, 1)
			within(t, fmt.Sprintf("prio_ratio %d, %d others", ratio, others), got[:others], slices.Repeat([]float64{float64(100-ratio) / float64(others)}, others), 1)
		}
	}
}

// TestLatency: a client of high priority with a kernel of 0.14 ms every few ms, beside others that saturate the GPU. Then it is
// idle, and they get their long slices back.
func TestLatency(t *testing.T) {
	for _, others := range []int{1, 5} {
		for _, kernel := range kernels {
			what := fmt.Sprintf("beside %d, kernels of %v", others, kernel)
			n := newNode(cardOf(sched.PolicyPreempt, 20))
			for range others {
				n.add(sched.Share{Weight: 1, Priority: quota.PriorityBestEffort}).busy(1, kernel)
			}
			client := n.add(sched.Share{Weight: 1, Priority: quota.PriorityHigh})
			n.run(time.Second)
			g := client.process()
			g.OnDone(func(arrived, ended time.Duration) { client.waits = append(client.waits, ended-arrived) })
			at, end := n.gpu.Now(), n.gpu.Now()+2*time.Second
			g.Arrive(func() (time.Duration, time.Duration, bool) {
				at += time.Duration(1+others) * ms
				return at, 140 * us, at < end
			})
			n.run(n.gpu.Now() + 50*ms) // the client is noticed within 2 ms, but the others' long slices have begun
			client.waits = nil
			parts, sum := n.measure(1900 * ms)
			slices.Sort(client.waits)
			// Its kernel, a slice and a switch of each of the others, and if they are several, the switch between two of them
			// that is under way. A switch takes 190 µs in the model.
			bound := 140*us + time.Duration(others)*(200*us+switchCost)
			if others > 1 {
				bound += switchCost
			}
			if p99 := client.waits[len(client.waits)*99/100]; p99 > bound || len(client.waits) < 300 {
				t.Errorf("%s: %d requests, p99 %v", what, len(client.waits), p99)
			}
			// One other has hardly more switches than the client has requests. Several switch among themselves all the time.
			if least := map[int]float64{1: 76, 5: 50}[others]; sum-parts[others] < least {
				t.Errorf("%s: they have %.1f %%", what, parts[:others])
			}
			n.run(end + 200*ms)
			if got := n.containers[0].slice; got < 10*ms {
				t.Errorf("%s: when the client is idle, slices of %v", what, got)
			}
		}
	}
}

// TestComeAndGo: containers of all kinds come, go, and change; policies change. When the last cap is dropped, nobody stays
// paused, and all have equal parts.
func TestComeAndGo(t *testing.T) {
	for seed := range uint64(8) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		n := newNode(cardOf(sched.PolicyPreempt, 20))
		shareOf := func(others []*container) sched.Share {
			s := sched.Share{Weight: 1 + rnd.IntN(4), Percent: max(0, rnd.IntN(60)-20), Priority: quota.Priority(rnd.IntN(3))}
			var list []sched.Share
			for _, c := range others {
				list = append(list, c.share)
			}
			if n.card.Admit(list, s) != nil {
				s.Percent = 0
			}
			return s
		}
		change := func() {
			switch k := rnd.IntN(10); {
			case len(n.containers) == 0 || k < 4 && len(n.containers) < 20:
				c := n.add(shareOf(n.containers))
				if rnd.IntN(2) == 0 {
					c.busy(1+rnd.IntN(3), kernels[rnd.IntN(3)])
				} else {
					c.poisson(seed, 20*ms, 2*ms, never)
				}
			case k < 6:
				n.remove(n.containers[rnd.IntN(len(n.containers))])
			case k < 7:
				n.card.Policy = sched.Policy(rnd.IntN(6))
				n.changed()
			case k < 8:
				n.containers[rnd.IntN(len(n.containers))].process().Submit(runlist.Work{Length: ms, Count: 1 + rnd.IntN(300)})
			default:
				i := rnd.IntN(len(n.containers))
				n.containers[i].share = shareOf(slices.Delete(slices.Clone(n.containers), i, i+1))
				n.changed()
			}
		}
		for at := time.Duration(0); at < 5*time.Second; at += time.Duration(rnd.Int64N(int64(60 * ms))) {
			n.at(at, change)
		}
		n.run(5 * time.Second)
		if len(n.containers) < 3 {
			n.add(weight(1))
			n.add(weight(1))
		}
		n.card.Policy = sched.PolicyPreempt
		for _, c := range n.containers {
			c.share = weight(1)
			c.busy(1, ms)
		}
		n.changed()
		n.run(n.gpu.Now() + time.Second)
		for _, c := range n.containers {
			for _, g := range c.groups {
				if c.off || g.Paused() {
					t.Errorf("seed %d: container %s is paused", seed, c.id)
				}
			}
		}
		for _, c := range n.containers {
			for _, g := range c.groups {
				g.Stop()
			}
			c.groups[len(c.groups)-1].Submit(runlist.Work{Length: ms})
		}
		n.run(n.gpu.Now() + 500*ms)
		part := 100 / float64(len(n.containers))
		within(t, fmt.Sprintf("seed %d: at the end", seed), n.shares(2*time.Second), slices.Repeat([]float64{part}, len(n.containers)), 1)
	}
}
