// SPDX-License-Identifier: Apache-2.0

package arbiter

import (
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// These tests have an arbiter decide about a GPU in virtual time (pkg/sim/runlist), for guards that are on its page as real ones are.

const (
	us = time.Microsecond
	ms = time.Millisecond
	// epoch is what the GPU's clock is ahead: it counts from 1970.
	epoch     = 1763700000 * time.Second
	pauseTime = 600 * us
	// setTime is what a guard takes to set a timeslice, where many want to: the driver's lock lets in one at a time.
	setTime = 1200 * us
	testGPU = "GPU-0"
)

// node is a GPU, its guards, and the arbiter that there is just now.
type node struct {
	testing.TB
	dir      string
	gpu      *runlist.Runlist
	vgpus    []*guard
	arbiter  *Arbiter
	source   *ring
	again    time.Duration // when it wants to look
	tick     time.Duration
	pids     int
	all      []sched.Switch // every record
	next     uint64
	samples  []sched.Sample
	sampled  time.Duration // the GPU's time computing, until the last sample
	sampleAt time.Duration // the next one
	load     bool          // the driver tells the GPU's load
	records  bool          // and of context switches
}

// ring is an arbiter's own records: those since it enabled them.
type ring struct {
	n    *node
	next uint64
}

func (r *ring) Enable() error { return nil }
func (r *ring) Await() bool   { return true }
func (r *ring) Wake()         {}
func (r *ring) Read(to []sched.Switch) ([]sched.Switch, bool) {
	records, next, lost := r.n.gpu.Switches(r.next, 0)
	r.next = next
	for _, s := range records {
		s.At += epoch
		to = append(to, s)
	}
	return to, lost
}

// guard is a guard and its container.
type guard struct {
	n      *node
	e      *peerpage.Entry
	says   peerpage.Guard
	groups []*runlist.TSG
	rung   uint32
	row    sched.Verdict
	off    bool
	edge   time.Duration
	slices int // set
}

func newNode(t testing.TB) *node {
	return &node{TB: t, dir: t.TempDir(), gpu: runlist.New(runlist.Config{Restart: true}), records: true}
}

// begin has another arbiter take over, of which the source has been enabled for a while.
func (n *node) begin(source *ring) {
	o := Options{RunDir: n.dir, UUID: testGPU, Timing: sched.DefaultTiming(), Log: slog.New(slog.DiscardHandler),
		Now: func() time.Duration { return n.gpu.Now() }}
	if n.records {
		o.Source = source
	}
	if n.load {
		o.Samples = func() ([]sched.Sample, error) { return n.samples[max(0, len(n.samples)-gpuMonSamples):], nil }
	}
	a, err := New(o)
	if err != nil {
		n.Fatal(err)
	}
	if n.arbiter != nil {
		n.arbiter.Close()
	}
	n.arbiter, n.source, n.again = a, source, n.gpu.Now()
}

// standby enables the records of an arbiter to come.
func (n *node) standby() *ring {
	_, next, _ := n.gpu.Switches(0, 0)
	return &ring{n, next}
}

// sample is the driver's, of the GPU's load.
func (n *node) sample(now time.Duration) {
	busy := n.gpu.Totals().Load()
	n.samples = append(n.samples, sched.Sample{At: epoch + now, Load: float64(busy-n.sampled) / float64(sched.SamplePeriod)})
	n.sampled, n.sampleAt = busy, now+sched.SamplePeriod
}

func (n *node) add(share sched.Share) *guard {
	e, err := peerpage.Join(n.dir, testGPU)
	if err != nil {
		n.Fatal(err)
	}
	v := &guard{n: n, e: e, edge: never}
	v.says.Card = sched.Card{Policy: sched.PolicyWeight, MaxInst: 64, PrioRatio: 99}
	v.says.Share = share
	n.vgpus = append(n.vgpus, v)
	n.plan()
	return v
}

// plan is a change of the ledger.
func (n *node) plan() {
	var claims []sched.Claim
	for i, v := range n.vgpus {
		if p, ok := v.says.Card.Cap(v.says.Share); ok {
			claims = append(claims, sched.Claim{ID: fmt.Sprint(i), Caps: map[string]sched.Permille{"gpu": p}})
		}
	}
	layout := sched.DefaultTiming().Layout(claims)
	for i, v := range n.vgpus {
		v.says.Cap, _ = v.says.Card.Cap(v.says.Share)
		v.says.Slot = layout[fmt.Sprint(i)]["gpu"]
		v.says.Adopted = n.gpu.Now()
		v.e.Tell(v.says)
	}
}

func (n *node) remove(v *guard) {
	for _, g := range v.groups {
		g.Remove()
	}
	v.e.Leave()
	n.vgpus = slices.DeleteFunc(n.vgpus, func(x *guard) bool { return x == v })
	n.plan()
}

func (v *guard) process() *runlist.TSG {
	v.n.pids++
	g := v.n.gpu.Add(v.n.pids, 1)
	v.groups = append(v.groups, g)
	g.SetTimeslice(max(v.row.Slice, ms))
	v.says.Contexts++
	v.says.PIDs = append(slices.Clone(v.says.PIDs), g.PID())
	v.e.Tell(v.says)
	return g
}

func (v *guard) loop(kernel, think time.Duration) *guard {
	v.process().Submit(runlist.Work{Length: kernel, Gap: think})
	return v
}

func (v *guard) hog() *guard {
	v.process().Submit(runlist.Work{Length: 1200 * us})
	return v
}

// follow is what a guard does when it is woken, or at an edge of a slot.
func (v *guard) follow() {
	now := v.n.gpu.Now()
	v.rung = v.e.Rung()
	row, ok := v.e.Row()
	if !ok {
		return
	}
	if row.Slice != v.row.Slice && len(v.groups) > 0 {
		v.slices++
		v.e.TellSetting(sched.Setting{Slice: row.Slice, From: now})
		for _, g := range v.groups {
			v.n.gpu.Advance(v.n.gpu.Now() + setTime)
			g.SetTimeslice(row.Slice)
		}
		now = v.n.gpu.Now()
		v.e.TellSetting(sched.Setting{Slice: row.Slice, From: now - time.Duration(len(v.groups))*setTime, To: now})
	}
	v.row, v.edge = row, never
	off := false
	if row.Slot.Cycle > 0 {
		var on bool
		on, v.edge = row.Slot.Phase(now)
		off = !on
	}
	if off != v.off {
		v.off = off
		for _, g := range v.groups {
			if off {
				g.Pause()
			} else {
				g.Resume()
			}
		}
	}
}

// step is the arbiter's.
func (n *node) step() {
	now := n.gpu.Now()
	if again := n.arbiter.Step(now); again > 0 {
		n.again = now + again
	} else {
		n.again = never
	}
	n.heed()
}

func (n *node) heed() {
	for _, v := range n.vgpus {
		if v.e.Rung() != v.rung {
			v.follow()
		}
	}
}

// run lets time pass; records come every 33 ms.
func (n *node) run(until time.Duration) {
	for n.gpu.Now() < until {
		next := min(until, n.tick, n.again, n.sampleAt)
		for _, v := range n.vgpus {
			next = min(next, v.edge)
		}
		n.gpu.Advance(next)
		if n.sampleAt <= next {
			n.sample(next)
		}
		came := false
		if n.tick <= next {
			n.tick = next + sched.Tick
			records, at, _ := n.gpu.Switches(n.next, 0)
			n.next, came = at, len(records) > 0
			for _, s := range records {
				s.At += epoch
				n.all = append(n.all, s)
			}
		}
		if came || n.again <= next {
			n.step()
		}
		for _, v := range n.vgpus {
			if v.edge <= next {
				v.follow()
			}
		}
	}
}

// truth is what the records say of a process up to a time.
func (n *node) truth(pids []int, upTo time.Duration) (u sched.Usage) {
	on := time.Duration(0)
	for _, s := range n.all {
		if s.At > upTo {
			break
		}
		switch {
		case !slices.Contains(pids, s.PID):
		case s.On:
			u.Switches++
			on = s.At
		case on > 0:
			u.GPUTime += s.At - on
		}
	}
	return u
}

func weight(n int) sched.Share { return sched.Share{Weight: n, Priority: quota.PriorityDefault} }

// crowd are vGPUs of many kinds.
func (n *node) crowd(rnd *rand.Rand, many int) {
	for range many {
		v := n.add(weight(1 + rnd.IntN(3)))
		for range 1 + rnd.IntN(2) {
			if rnd.IntN(2) == 0 {
				v.hog()
			} else {
				v.loop(100*us<<rnd.IntN(6), time.Duration(rnd.Int64N(int64(3*ms))))
			}
		}
	}
}

// check holds every account to the records.
func (n *node) check(what string) {
	n.Helper()
	for i, v := range n.vgpus {
		row, ok := v.e.Row()
		if !ok {
			n.Errorf("%s: vGPU %d has no row", what, i)
			continue
		}
		want := n.truth(v.says.PIDs, row.UpTo)
		if row.GPUTime != want.GPUTime || row.Switches != want.Switches {
			n.Errorf("%s: vGPU %d: %v and %d switches up to %v, records say %v and %d", what, i, row.GPUTime, row.Switches, row.UpTo-epoch,
				want.GPUTime, want.Switches)
		}
	}
}

// TestAccounts: the accounts of a crowd are what the records say, to the nanosecond, and what they were entitled to adds up to it, within 1
// %.
func TestAccounts(t *testing.T) {
	for seed := range uint64(4) {
		n := newNode(t)
		n.begin(n.standby())
		n.crowd(rand.New(rand.NewPCG(seed, 1)), 2+10*int(seed))
		n.run(5 * time.Second)
		n.check(fmt.Sprint("seed ", seed))
		granted, used := time.Duration(0), time.Duration(0)
		for _, v := range n.vgpus {
			row, _ := v.e.Row()
			granted, used = granted+row.Granted, used+row.GPUTime
		}
		if off := float64(granted-used) / float64(used); off > 0.01 || off < -0.01 {
			t.Errorf("seed %d: %v were granted, %v used", seed, granted, used)
		}
	}
}

type killed struct{}

// killed has the arbiter die at its n-th store; false: it has not so many in a step.
func (n *node) kill(after int) (died bool) {
	stores := 0
	n.arbiter.page.Stored = func() {
		if stores++; stores == after {
			panic(killed{})
		}
	}
	defer func() {
		n.arbiter.page.Stored = nil
		if r := recover(); r != nil {
			if _, ok := r.(killed); !ok {
				panic(r)
			}
			died = true
		}
	}()
	n.step()
	return false
}

// TestKilled: arbiters die at any store and any time, and their successors go on: every account is what the records say, nothing is missing
// and nothing twice, and the pace is of the size that it was: who goes on has to see 16 turns of a group before it
// knows that the group never blocks, and until then wants a shorter one.
func TestKilled(t *testing.T) {
	for seed := range uint64(6) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		n := newNode(t)
		n.begin(n.standby())
		n.crowd(rnd, 1+rnd.IntN(12))
		n.run(2 * time.Second)
		for kill := range 60 {
			standby := n.standby()
			n.run(n.gpu.Now() + 3*sched.Tick + time.Duration(rnd.Int64N(int64(300*ms)))) // whoever stands by has records of before the last step
			before := n.arbiter.state.Pace()
			n.gpu.Advance(n.gpu.Now() + time.Duration(rnd.Int64N(int64(20*ms))))
			if rnd.IntN(4) > 0 {
				n.kill(1 + rnd.IntN(40*len(n.vgpus)))
			}
			n.heed()
			n.gpu.Advance(n.gpu.Now() + time.Duration(rnd.Int64N(int64(100*ms))))
			if kill%7 == 6 { // one goes and another comes while nobody decides
				n.remove(n.vgpus[0])
				n.crowd(rnd, 1)
			}
			n.begin(standby)
			n.step()
			if after := n.arbiter.state.Pace(); kill < 6 && len(n.vgpus) > 1 && (after > 16*before || after < before/16) {
				t.Errorf("seed %d, kill %d: the pace was %v, and is %v under the next arbiter", seed, kill, before, after)
			}
			n.run(n.gpu.Now() + 2*sched.Tick)
			n.check(fmt.Sprintf("seed %d, kill %d", seed, kill))
			if t.Failed() {
				return
			}
		}
	}
}

// TestResident: who is alone on the engine without work has none, as the GPU says: its account is what it computed, and the next to come
// has the GPU to itself. Its work is seen again.
func TestResident(t *testing.T) {
	n := newNode(t)
	n.load = true
	n.begin(n.standby())
	v := n.add(weight(1))
	g := v.process()
	for round, work := range []time.Duration{3 * time.Second, 20 * time.Second} {
		n.run(n.gpu.Now() + 20*time.Second)
		g.Submit(runlist.Work{Length: ms, Count: int(work / ms)})
		n.run(n.gpu.Now() + work/2 + maxPatience/2*time.Duration(round))
		if row, _ := v.e.Row(); row.Busy != 1 {
			t.Errorf("round %d: its work is not seen: %+v", round, row)
		}
		n.run(n.gpu.Now() + work + 2*maxPatience)
		row, _ := v.e.Row()
		if used, want := row.Used(n.gpu.Now()), g.Account().GPUTime; row.Busy != 0 || max(used-want, want-used) > want/100 {
			t.Errorf("round %d: busy %d, used %v, want %v", round, row.Busy, used, want)
		}
	}
}

// TestSparse: contexts stay on the engine when their work is done. The accounts have what they computed all the same, and what they were
// entitled to is of that.
func TestSparse(t *testing.T) {
	for _, c := range []struct {
		name  string
		loops [][2]time.Duration // a kernel, and the time without work after it
		exact bool               // two that take the same parts of the time they are on the engine for
	}{
		{"one", [][2]time.Duration{{20 * ms, 480 * ms}}, true},
		{"two", [][2]time.Duration{{20 * ms, 480 * ms}, {20 * ms, 473 * ms}}, true},
		{"two that come often", [][2]time.Duration{{5 * ms, 45 * ms}, {5 * ms, 44 * ms}}, true},
		{"two of which one has more", [][2]time.Duration{{5 * ms, 45 * ms}, {20 * ms, 27 * ms}}, false},
		{"one beside a hog", [][2]time.Duration{{20 * ms, 200 * ms}, {ms, 0}}, true},
		{"a crowd", [][2]time.Duration{{ms, 9 * ms}, {2 * ms, 31 * ms}, {3 * ms, 63 * ms}, {ms, 21 * ms}, {10 * ms, 390 * ms}}, false},
	} {
		n := newNode(t)
		n.load = true
		n.begin(n.standby())
		for _, l := range c.loops {
			n.add(weight(1)).loop(l[0], l[1])
		}
		n.run(20 * time.Second)
		for _, v := range n.vgpus {
			v.groups[0].Stop()
		}
		n.run(30 * time.Second)
		var got, want, granted time.Duration
		for i, v := range n.vgpus {
			row, _ := v.e.Row()
			mine := v.groups[0].Account().GPUTime
			got, want, granted = got+row.GPUTime, want+mine, granted+row.Granted
			// A switch takes some of the engine's time, which is the account's by intent.
			if most := mine + time.Duration(row.Switches)*200*us; c.exact && (row.GPUTime < mine*98/100 || row.GPUTime > most+most/50) {
				t.Errorf("%s: vGPU %d: %v counted, it computed for %v, with its switches %v", c.name, i, row.GPUTime, mine, most)
			}
			if row.Open != 0 {
				t.Errorf("%s: vGPU %d: %v open at rest", c.name, i, row.Open)
			}
		}
		if got < want*98/100 || got > want*110/100 {
			t.Errorf("%s: %v counted of all, they computed for %v", c.name, got, want)
		}
		if granted > got+got/20 {
			t.Errorf("%s: %v were granted, of %v", c.name, granted, got)
		}
	}
}

// TestKilledSampled: with accounts that go as far as samples do, a successor that has the records of the time since goes on just there.
func TestKilledSampled(t *testing.T) {
	for seed := range uint64(4) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		n := newNode(t)
		n.load = true
		n.begin(n.standby())
		for range 1 + rnd.IntN(5) {
			n.add(weight(1)).loop(ms<<rnd.IntN(5), time.Duration(rnd.Int64N(int64(60*ms))))
		}
		n.run(2 * time.Second)
		for range 20 {
			standby := n.standby()
			n.run(n.gpu.Now() + 2*time.Second + time.Duration(rnd.Int64N(int64(300*ms))))
			n.kill(1 + rnd.IntN(40*len(n.vgpus)))
			n.heed()
			n.begin(standby)
			n.step()
		}
		for _, v := range n.vgpus {
			v.groups[0].Stop()
		}
		n.run(n.gpu.Now() + 10*time.Second)
		var got, want time.Duration
		for i, v := range n.vgpus {
			row, _ := v.e.Row()
			got, want = got+row.GPUTime, want+v.groups[0].Account().GPUTime
			if all := n.truth(v.says.PIDs, never); row.Switches != all.Switches {
				t.Errorf("seed %d: vGPU %d: %d switches, records say %d", seed, i, row.Switches, all.Switches)
			}
		}
		if got < want*98/100 || got > want*115/100 {
			t.Errorf("seed %d: %v counted of all, they computed for %v", seed, got, want)
		}
	}
}

// TestMany: of many that saturate the GPU beside others that have no work, all have the same, although the driver takes up its list from
// the beginning each time that a guard sets a timeslice.
func TestMany(t *testing.T) {
	for _, busy := range []int{2, 20, 50, 64} {
		n := newNode(t)
		n.load = true
		n.begin(n.standby())
		for range 64 {
			n.add(weight(1)).process().Submit(runlist.Work{Length: ms, Count: 50})
			n.step()
			n.run(n.gpu.Now() + 50*ms)
		}
		n.run(n.gpu.Now() + 4*time.Second)
		for _, v := range n.vgpus[:busy] {
			v.groups[0].Submit(runlist.Work{Length: ms})
		}
		n.run(n.gpu.Now() + 400*ms)
		before := make([]time.Duration, busy)
		for i := range before {
			before[i] = n.vgpus[i].groups[0].Account().GPUTime
		}
		n.run(n.gpu.Now() + 5*time.Second)
		for i, had := range before {
			if part := 100 * (n.vgpus[i].groups[0].Account().GPUTime - had).Seconds() / 5; math.Abs(part-100/float64(busy)) > 1.5 {
				t.Errorf("%d of 64 with work: number %d has %.1f %%", busy, i, part)
			}
		}
	}
}

// TestDelayed: an arbiter that waits for a processor between the call of Step and its look at records takes nobody for idle after that.
func TestDelayed(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	for range 2 {
		n.add(weight(1)).loop(ms, 15*us)
	}
	n.run(time.Second)
	was := n.gpu.Now()
	n.gpu.Advance(was + 400*ms)
	n.arbiter.Step(was)
	n.again = n.gpu.Now()
	n.run(n.gpu.Now() + time.Second)
	for i, v := range n.vgpus {
		if row, _ := v.e.Row(); row.Busy != 1 {
			t.Errorf("vGPU %d: %+v", i, row)
		}
	}
}

// TestAtRest: while nobody has work there is nothing to look at, and what was said holds.
func TestAtRest(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	for range 3 {
		n.add(weight(1)).process().Submit(runlist.Work{Length: ms, Count: 500})
	}
	n.run(4 * time.Second)
	other := n.gpu.Add(99999, 1) // a program of nobody's takes the engine
	other.Submit(runlist.Work{Length: ms, Count: 3})
	n.run(5 * time.Second)
	if n.again != never {
		t.Errorf("it looks again after %v", n.again-n.gpu.Now())
	}
	for i, v := range n.vgpus {
		if row, ok := v.e.Row(); !ok || row.Busy != 0 || row.Until != never || row.GPUTime < 500*ms {
			t.Errorf("vGPU %d: %+v", i, row)
		}
	}
}

// TestWithoutRecords: every context counts as one with work, and shares are by weight.
func TestWithoutRecords(t *testing.T) {
	n := newNode(t)
	n.records = false
	n.begin(nil)
	a, b, c := n.add(weight(3)), n.add(weight(1)), n.add(weight(1))
	a.process()
	b.process()
	b.process()
	c.says.Suspended = true
	c.process()
	n.again = n.gpu.Now()
	n.run(3 * time.Second)
	rowA, _ := a.e.Row()
	rowB, _ := b.e.Row()
	rowC, _ := c.e.Row()
	if rowA.Exact || rowA.Busy != 1 || rowB.Busy != 2 || rowC.Busy != 0 || rowA.Slice != 6*rowB.Slice {
		t.Errorf("%+v\n%+v\n%+v", rowA, rowB, rowC)
	}
}

// TestCapWithoutWork: a hard cap is left alone when there has been no work for a while, and holds again with the first.
func TestCapWithoutWork(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	v := n.add(sched.Share{Weight: 1, Percent: 30, Priority: quota.PriorityDefault})
	g := v.process()
	other := n.add(weight(1)).process()
	capped := func(what string, want bool) {
		t.Helper()
		if row, _ := v.e.Row(); (row.Slot.Cycle > 0) != want {
			t.Errorf("%s: %+v", what, row)
		}
	}
	n.again = n.gpu.Now()
	n.run(time.Second)
	g.Submit(runlist.Work{Length: ms, Count: 100})
	n.run(2 * time.Second)
	capped("with work", true)
	n.run(20 * time.Second)
	capped("a while after", true)
	other.Submit(runlist.Work{Length: ms, Count: 3})
	n.run(60 * time.Second)
	capped("long after", false)
	g.Submit(runlist.Work{Length: ms, Count: 100})
	n.run(61 * time.Second)
	capped("again", true)
}

// TestNamedTwice: a process that two guards name stays whose it was.
func TestNamedTwice(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	thief, a := n.add(weight(1)).hog(), n.add(weight(1)).hog()
	n.run(time.Second)
	thief.says.PIDs = append(slices.Clone(thief.says.PIDs), a.says.PIDs...)
	thief.e.Tell(thief.says)
	n.run(2 * time.Second)
	row, _ := a.e.Row()
	if want := n.truth(a.says.PIDs, row.UpTo).GPUTime; row.GPUTime != want || row.Busy != 1 {
		t.Errorf("%v, want %v, busy %d", row.GPUTime, want, row.Busy)
	}
}

// TestNamedLate: a process that is alone on the engine when its guard names it was that guard's from its start.
func TestNamedLate(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	v := n.add(weight(1))
	g := v.process()
	pids := v.says.PIDs
	v.says.PIDs = nil
	v.e.Tell(v.says)
	g.Submit(runlist.Work{Length: 1200 * us})
	n.run(300 * ms)
	v.says.PIDs = pids
	v.e.Tell(v.says)
	n.again = n.gpu.Now() // it is woken
	n.run(600 * ms)
	if row, _ := v.e.Row(); row.Busy != 1 || row.Used(n.gpu.Now()) < 600*ms-sched.Tick {
		t.Errorf("%v used, busy %d", row.Used(n.gpu.Now()), row.Busy)
	}
}

// TestOnlyWhomItConcerns: a guard whose row stays the same is not woken.
func TestOnlyWhomItConcerns(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	for range 4 {
		n.add(weight(1)).hog()
	}
	n.run(4 * time.Second)
	rung := map[*guard]uint32{}
	for _, v := range n.vgpus {
		rung[v] = v.e.Rung()
	}
	n.run(6 * time.Second)
	for i, v := range n.vgpus {
		if woken := v.e.Rung() - rung[v]; woken > 2 {
			t.Errorf("guard %d was woken %d times in 2 s of nothing new", i, woken)
		}
	}
}

func BenchmarkStep64(b *testing.B) {
	n := newNode(b)
	n.begin(n.standby())
	for range 64 {
		n.add(weight(1)).loop(ms, 15*us)
	}
	n.run(time.Second)
	for b.Loop() {
		b.StopTimer()
		n.gpu.Advance(n.gpu.Now() + sched.Tick)
		b.StartTimer()
		n.arbiter.Step(n.gpu.Now())
	}
}

// TestAfterRest: what a preemption costs is known at once after a rest, and after the first arbiter's start: the loss stays what it may be.
func TestAfterRest(t *testing.T) {
	for _, rest := range []time.Duration{0, 10 * time.Second, 10 * time.Minute} {
		n := newNode(t)
		n.begin(n.standby())
		if rest > 0 {
			n.run(rest)
		}
		n.add(weight(1)).hog()
		n.add(weight(1)).loop(100*us, 0)
		n.run(n.gpu.Now() + time.Second)
		for second := range 5 {
			before := make([]time.Duration, len(n.vgpus))
			for i, v := range n.vgpus {
				before[i] = v.groups[0].Account().GPUTime
			}
			n.run(n.gpu.Now() + time.Second)
			sum := time.Duration(0)
			for i, v := range n.vgpus {
				sum += v.groups[0].Account().GPUTime - before[i]
			}
			if sum < 700*time.Millisecond {
				t.Errorf("after a rest of %v, second %d: %v used together", rest, second+2, sum)
			}
		}
	}
}

// TestShortProcesses: of a chain of short processes, each of which its guard names no more as soon as it ends, nothing is missing.
func TestShortProcesses(t *testing.T) {
	for _, life := range []time.Duration{20 * ms, 60 * ms, 150 * ms} {
		n := newNode(t)
		n.begin(n.standby())
		n.add(weight(1)).hog()
		v := n.add(weight(1))
		var pids []int
		n.run(time.Second)
		for n.gpu.Now() < 4*time.Second {
			v.hog()
			g := v.groups[len(v.groups)-1]
			pids = append(pids, g.PID())
			n.step()
			n.run(n.gpu.Now() + life)
			g.Remove()
			v.groups, v.says.Contexts, v.says.PIDs = nil, 0, nil
			v.e.Tell(v.says)
			n.step()
		}
		n.run(n.gpu.Now() + 200*ms)
		row, _ := v.e.Row()
		if want := n.truth(pids, row.UpTo); row.GPUTime < want.GPUTime*99/100 || row.GPUTime > want.GPUTime {
			t.Errorf("processes of %v: %v counted, records say %v", life, row.GPUTime, want.GPUTime)
		}
	}
}

// TestPoisonedRow: what a guard writes into its own row becomes nobody else's, whoever goes on.
func TestPoisonedRow(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	n.add(weight(1)).hog()
	n.add(weight(1)).hog()
	evil := n.add(weight(1))
	n.run(2 * time.Second)
	p, err := peerpage.Open(n.dir, testGPU)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		standby := n.standby()
		n.run(n.gpu.Now() + 300*ms)
		for _, g := range p.Guests(nil) {
			if g.Place == evil.e.Place() {
				v, _ := p.RowOf(g.Place)
				v.UpTo, v.Since, v.At = math.MaxInt64, math.MaxInt64, math.MinInt64
				p.Put(g, &v, false)
			}
		}
		n.begin(standby)
		n.step()
		n.run(n.gpu.Now() + time.Second)
	}
	n.check("after two poisoned rows")
}

// TestClockSetAnew: a clock of the GPU's that was set back since the page was written is taken as it is.
func TestClockSetAnew(t *testing.T) {
	c := clock{ahead: 10 * time.Second, known: true}
	c.note(time.Second, time.Second, true) // the first look may have old ones
	if c.ahead < 9*time.Second {
		t.Error("an old record sets the clock")
	}
	if c.note(2*time.Second, 2*time.Second, false); c.ahead != 0 {
		t.Errorf("%v ahead", c.ahead)
	}
}

// TestApart: a program that waits for each kernel gets its share beside a container with many groups that never block, which is off for
// some of the time; but not for long where the GPU rests then, and not for longer than a look where nobody tells the GPU's load.
func TestApart(t *testing.T) {
	for _, c := range []struct {
		name  string
		load  bool
		think time.Duration
		apart bool
	}{{"a loop", true, 15 * us, true}, {"one who leaves the GPU idle", true, 5 * ms, false},
		{"the load is not known", false, 15 * us, false}} {
		n := newNode(t)
		n.load = c.load
		n.begin(n.standby())
		loop, many := n.add(weight(1)).loop(ms, c.think), n.add(weight(1))
		for range 6 {
			many.hog()
		}
		for tried := false; !tried; n.run(n.gpu.Now() + 100*ms) {
			if tried = many.row.Slot.Cycle > 0; n.gpu.Now() > 10*time.Second {
				t.Fatalf("%s: it never had a slot", c.name)
			}
		}
		n.run(n.gpu.Now() + 3*time.Second)
		before, begin := loop.groups[0].Account().GPUTime, n.gpu.Now()
		n.run(begin + 4*time.Second)
		part := float64(loop.groups[0].Account().GPUTime-before) / float64(n.gpu.Now()-begin)
		if apart := many.row.Slot.Cycle > 0; apart != c.apart || apart && part < 0.4 {
			t.Errorf("%s: it has %.2f, beside %+v", c.name, part, many.row.Row)
		}
	}
}

// TestNewcomerOfANewArbiter: what others computed before a container came is no entitlement of its, also where the arbiter before had no
// records, and the new one finds those of that time.
func TestNewcomerOfANewArbiter(t *testing.T) {
	n := newNode(t)
	begin := n.standby()
	n.begin(n.standby())
	former, other := n.add(weight(1)).hog(), n.add(weight(1)).hog()
	n.run(2 * time.Second)
	n.remove(former)
	n.remove(other)
	v, w := n.add(weight(1)), n.add(weight(1))
	n.begin(n.standby())
	n.step()
	v.hog()
	w.hog()
	since := n.gpu.Now()
	n.gpu.Advance(since + 300*ms)
	n.begin(begin)
	n.run(since + 800*ms)
	if row, _ := v.e.Row(); row.Granted <= 0 || row.Granted > n.gpu.Now()-since {
		t.Errorf("%v were granted in %v", row.Granted, n.gpu.Now()-since)
	}
}

// TestEntitledAfterRest: a context without work stays on the engine until the next one comes, and that is nobody's entitlement.
func TestEntitledAfterRest(t *testing.T) {
	n := newNode(t)
	n.begin(n.standby())
	outside := n.gpu.Add(9999, 1) // of no container
	outside.Submit(runlist.Work{Length: 1200 * us})
	n.run(time.Second)
	outside.Stop()
	n.run(40 * time.Second)
	begin, v := n.gpu.Now(), n.add(weight(1))
	g := v.process()
	n.step() // it has a context, and counts as one with work before records say so
	g.Submit(runlist.Work{Length: 1200 * us})
	n.add(weight(1)).hog()
	n.run(begin + time.Second)
	if row, _ := v.e.Row(); row.Granted <= 0 || row.Granted > n.gpu.Now()-begin {
		t.Errorf("%v were granted in a second", row.Granted)
	}
}
