// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// VGPU is a container on a GPU: what it may have, and what it was seen to do.
type VGPU struct {
	ID string
	Share
	Slot     Slot // of its hard cap (Layout); zero: none
	Contexts int  // channel groups on the graphics engine
	Pressing bool // of high priority: it has work now, or had a moment ago
	Gang     Gang // of its GPUs
	Seen
}

// Row is what one vGPU is to have: the timeslice of each of its channel groups, and when its channels are on (always, where the Slot is
// zero).
type Row struct {
	Slice time.Duration
	Slot  Slot
}

// State is what a decision needs of those before it. Its maps are not changed.
type State struct {
	at      time.Duration
	pace    pace
	mixed   time.Duration // when somebody blocked early last, or who is there was another
	weights float64       // of all, together
	amiss   float64       // measured loss by the computed one
	high    precedence
	turns   turns // beside one
	crowds  crowds
	gangs   gangs
	presses bool                     // it goes before the others
	lag     map[string]time.Duration // entitlement less GPU time; positive: behind
	slice   map[string]time.Duration // in force
	hold    time.Duration            // until when they are left alone
	came    map[string]span          // when those that have work began to, and had some last
}

// Begin is the state of who goes on after another, with the pace that he found (0: nobody was there) and what was learned of loss (Amiss).
func Begin(found time.Duration, amiss Permille) State {
	return State{pace: pace{value: max(0, min(found, longest)), alone: found <= 0},
		amiss: min(max(0, float64(amiss)/float64(Whole)), mostAmiss)}
}

// Amiss is the measured loss by the computed one.
func (s State) Amiss() Permille { return Permille(s.amiss * float64(Whole)) }

// lagTime is how far back lag looks: half of it is forgotten in so long.
const lagTime = 500 * time.Millisecond

// Pace is the GPU time that a weight of 1 has in a round.
func (s State) Pace() time.Duration { return s.pace.value }

// Lag is by how much a vGPU is behind its entitlement, of some lagTime.
func (s State) Lag(vgpu string) time.Duration { return s.lag[vgpu] }

// Decide says what every vGPU of one GPU is to have. One number, the pace, makes slices short or long: the GPU time that a weight of 1 has
// in every round.
//
//   - It is long while nobody who blocks early waits for those who do not (target).
//   - A vGPU that does pulls it down to what it takes of a round itself, so that all have the same (pull).
//   - It is never so short that preemptions take more than MaxLoss of the GPU (loss).
//   - Several groups of one vGPU cost the others no more than one (crowds).
//   - Turns on several GPUs coincide (gangs).
//   - A burst that fits into a vGPU's part of a round is not cut in two (slice).
//   - High priority is apart (press). Hard caps are slots, as they came.
func (t Timing) Decide(c Card, vgpus []VGPU, costs Costs, s State, now time.Duration) ([]Row, State) {
	rows := make([]Row, len(vgpus))
	for i, v := range vgpus {
		rows[i] = Row{NativeTimeslice, v.Slot}
	}
	r := t.round(c, vgpus, costs, s.pace.value, s.crowds.stretch)
	s.lag = r.lags(vgpus, s.lag, now-s.at)
	s.came = r.came(vgpus, s.came, now)
	s.gather(vgpus, costs, now)
	presses := s.presses
	if s.presses = c.Policy != PolicyNative && t.press(c, vgpus, rows, &s, now); !s.presses && c.Policy != PolicyNative {
		if weights := c.weights(vgpus); weights != s.weights || s.mixed == 0 {
			s.weights, s.mixed = weights, now // of those who are there now nobody knows yet
		}
		r = t.follow(r, vgpus, &s, presses, now)
		for i, v := range vgpus {
			x := r.of(i)
			rows[i].Slice = t.slice(c, x, v, s)
			if x == nil {
				continue
			}
			if now-s.came[v.ID].from < tryTime {
				rows[i].Slice = r.telling(*x, rows[i].Slice)
			}
			if x.crowd {
				rows[i].Slot = s.crowds.slot
			}
		}
		s.gangs.place(vgpus, rows)
	}
	if s.presses {
		s.crowds, s.gangs = crowds{barred: s.crowds.barred}, gangs{barred: s.gangs.barred, bar: s.gangs.bar}
	}
	s.at = now
	s.set(vgpus, rows, costs, presses != s.presses || len(r.turns) < 2, now)
	return rows, s
}

// follow brings the pace up to date, and the slots of crowds; atOnce although timeslices are to stay.
func (t Timing) follow(r round, vgpus []VGPU, s *State, atOnce bool, now time.Duration) round {
	for _, c := range s.came {
		s.mixed = max(s.mixed, c.from)
	}
	s.mixed = r.mixed(t, s.mixed, now)
	if _, apart := s.Apart(); !apart { // else what is lost is not that of one round
		s.amiss = r.amiss(s.amiss, s.pace.value.Seconds())
	}
	r.scale = s.amiss
	settled, target := now-s.mixed >= settleTime, time.Duration(0)
	s.crowds, target = s.crowds.follow(t, r, settled, now)
	if !settled {
		target = t.worth(r, vgpus, s.pace.value, target)
	}
	target = s.gang(t, vgpus, r, target, now)
	if now >= s.hold || atOnce || len(r.turns) < 2 {
		s.pace = s.pace.follow(target, r.few(t), len(r.turns) < 2, r.lost > t.MaxLoss || s.mixed < now, now)
	}
	return r.stretched(max(1, s.crowds.stretch))
}

// set makes slices those of the rows, but not twice in two rounds. Each that is set ends a turn, and the driver takes up its list from the
// beginning: those at the end of it have the less, and the first ones the more, the more of them are set. So they stay for longer then, and
// those of vGPUs without work are not set.
func (s *State) set(vgpus []VGPU, rows []Row, costs Costs, atOnce bool, now time.Duration) {
	old, round, changed := s.slice, time.Duration(0), 0
	s.slice = map[string]time.Duration{}
	for i, v := range vgpus {
		before, known := old[v.ID]
		if known && !atOnce && (v.Busy == 0 && !s.presses || now < s.hold) {
			rows[i].Slice = before
		}
		s.slice[v.ID] = rows[i].Slice
		if known && rows[i].Slice != before { // one that comes new must not keep the others' as they are
			changed++
		}
		round += time.Duration(v.Busy) * (min(rows[i].Slice, v.Burst) + costs.Preempt)
	}
	if changed > 0 && now >= s.hold {
		s.hold = now + max(2*round, time.Duration(changed)*setRest)
	}
}

// gather leaves timeslices as they are while many come at once: those that have not run yet are not known, and each slice that is set keeps
// who is late in the list from it.
func (s *State) gather(vgpus []VGPU, costs Costs, now time.Duration) {
	round, busy, fresh := time.Duration(0), 0, 0 // a round of all that have contexts
	for _, v := range vgpus {
		round += time.Duration(v.Contexts) * (min(s.slice[v.ID], v.Burst) + costs.Preempt)
		if v.Busy > 0 {
			busy++
			if s.came[v.ID].from == now {
				fresh++
			}
		}
	}
	if 4*fresh > busy && 2*round > Tick { // else all had a turn since the last look
		s.hold = max(s.hold, now+min(2*round, gatherTime))
	}
}

// gatherTime is the longest that many are waited for that may come to be seen.
const gatherTime = 2 * Tick

// setRest is for how long timeslices stay for each that was set, which takes 1.2 ms.
const setRest = 12 * time.Millisecond

// settleTime is for how long all must saturate before slices are prolonged.
const settleTime = 1200 * time.Millisecond

// round is what those with work want of the GPU between two turns of the same one.
type round struct {
	turns []turn
	costs Costs
	lost  float64 // the part of the time that preemptions took of late
	scale float64 // of what loss computes
}

// turn is the part of one vGPU.
type turn struct {
	vgpu    int // which
	weight  float64
	groups  float64
	endless float64 // of groups
	burst   float64 // of the others, in seconds as all that follows
	think   float64 // of Seen.Gap, what was not spent waiting for the others: a lower bound
	present float64 // the part of the rounds in which it has work
	capped  bool    // it is on in slots only
	gives   float64 // the least slice of one of best effort beside others; 0: it does not give way
	crowd   bool    // several of its groups never block (crowds)
	stretch float64 // how much longer its slices are than the pace makes them
}

// round looks at those with work, as they were at a pace.
func (t Timing) round(c Card, vgpus []VGPU, costs Costs, pace time.Duration, stretch float64) round {
	r := round{costs: costs, scale: 1}
	level := quota.PriorityBestEffort
	for _, v := range vgpus {
		if v.Busy > 0 {
			level = max(level, min(v.Priority, quota.PriorityDefault))
		}
	}
	for i, v := range vgpus {
		if v.Busy == 0 {
			continue
		}
		x := turn{vgpu: i, capped: v.Slot.Cycle > 0, weight: c.weightAt(level, v), groups: float64(v.Busy), endless: float64(v.Endless),
			present: 1, stretch: 1}
		x.burst = v.Burst.Seconds()
		if v.Priority < level {
			x.gives = t.HighPrio.Seconds() / x.groups
		} else {
			r.lost += v.Cuts * costs.Preempt.Seconds()
		}
		if x.crowd = v.Endless > 1 && !x.capped && x.gives == 0 && !v.high(); x.crowd {
			x.stretch = max(1, stretch)
		}
		r.turns = append(r.turns, x)
	}
	waits := r.length(pace.Seconds())
	for i := range r.turns {
		x := &r.turns[i]
		if gap := vgpus[x.vgpu].Gap.Seconds(); x.endless == 0 && gap > 0 {
			x.think = max(0, gap-(waits-r.share(*x, pace.Seconds())))
			x.present = 1 - x.think/(x.burst+gap)
		}
	}
	return r
}

// weights is the sum of all vGPUs'.
func (c Card) weights(vgpus []VGPU) (sum float64) {
	for _, v := range vgpus {
		sum += c.weight(v.Share)
	}
	return sum
}

// weightAt is a vGPU's weight beside others of which the highest has the level given.
func (c Card) weightAt(level quota.Priority, v VGPU) float64 {
	if v.Priority < level {
		return c.weight(v.Share) / yields
	}
	return c.weight(v.Share)
}

// of is the turn of a vGPU; nil: it has no work.
func (r round) of(vgpu int) *turn {
	for i := range r.turns {
		if r.turns[i].vgpu == vgpu {
			return &r.turns[i]
		}
	}
	return nil
}

// slice is the timeslice of each of its groups at a pace. Those that block leave some of their part to those that do not.
func (x turn) slice(pace float64) float64 {
	part := x.weight * x.stretch * pace
	slice := part / x.groups
	if x.endless > 0 {
		slice = max(slice, (part-(x.groups-x.endless)*x.burst)/x.endless)
	}
	return min(max(slice, x.gives, shortest.Seconds()), longest.Seconds())
}

// use is what it takes of a round in which it has work.
func (x turn) use(pace float64) float64 {
	slice := x.slice(pace)
	return x.endless*slice + (x.groups-x.endless)*min(slice, x.burst)
}

// cuts is how many of its groups' turns end in a preemption.
func (x turn) cuts(pace float64) float64 {
	return x.endless + (x.groups-x.endless)*max(0, 1-x.slice(pace)/x.burst)
}

// share is what a round takes longer because of one vGPU.
func (r round) share(x turn, pace float64) float64 {
	cuts := x.cuts(pace)
	return x.present * (x.use(pace) + cuts*r.costs.Preempt.Seconds() + (x.groups-cuts)*r.costs.Yield.Seconds())
}

func (r round) length(pace float64) float64 {
	sum := 0.0
	for _, x := range r.turns {
		sum += r.share(x, pace)
	}
	return sum
}

// loss is the part of the GPU's time that preemptions take at a pace. Who blocks makes a switch of his own, whatever the pace is; and who
// gives way is preempted whatever is lost.
func (r round) loss(pace float64) float64 {
	sum := 0.0
	for _, x := range r.turns {
		if x.gives == 0 {
			sum += x.present * x.cuts(pace)
		}
	}
	return r.scale * sum * r.costs.Preempt.Seconds() / r.length(pace)
}

// mostAmiss is by how much computed loss is ever corrected.
const mostAmiss = 4

// amiss learns by how much that is wrong, since it knows bursts by their mean only.
func (r round) amiss(before, pace float64) float64 {
	const memory = 32
	if before == 0 {
		before = 1
	}
	if loss := r.loss(pace); loss > 0.01 {
		before += (min(max(r.lost/loss, 1./mostAmiss), mostAmiss) - before) / memory
	}
	return before
}

// fair is the pace at which those who never block take as much of a round as it does, by weight.
func (x turn) fair() float64 {
	if x.endless > 0 {
		return unending.Seconds()
	}
	return x.groups * x.burst / x.weight / overrun
}

// overrun is by how much a turn is longer than the timeslice that was set (H200: 50 µs to 90 ms).
const overrun = 1.02

// mixed is when somebody with work blocked early last, or was on in slots only: others' turns as long as its slot would take it.
func (r round) mixed(t Timing, last, now time.Duration) time.Duration {
	for _, x := range r.turns {
		if x.capped || x.early(t, r) {
			return now
		}
	}
	return last
}

// worth is the target, or the pace as it is: where nobody blocks a longer one saves switches only, and a shorter one makes rounds shorter.
// To set the slices of many costs more than that until they are set again (settleTime); and more of those that have contexts may come.
func (t Timing) worth(r round, vgpus []VGPU, pace, target time.Duration) time.Duration {
	if slices.ContainsFunc(r.turns, func(x turn) bool { return x.early(t, r) }) {
		return target
	}
	contexts := 0
	for _, v := range vgpus {
		contexts += v.Contexts
	}
	if target > pace/2 && (target-pace).Abs() < pace*time.Duration(contexts)/worthTwice {
		return pace
	}
	return target
}

// worthTwice is how many groups' slices are set only if they get twice as long.
const worthTwice = 20

// early reports that it blocks early: before a turn at the pace of those that do not is over.
func (x turn) early(t Timing, r round) bool { return x.gives == 0 && x.fair() < t.base(r) }

// few reports that to set all slices costs little, and that who blocks says how long they are, not what is lost.
func (r round) few(t Timing) bool {
	groups := 0.0
	for _, x := range r.turns {
		groups += x.groups
	}
	return groups <= fewGroups && r.lost < 0.9*t.MaxLoss
}

// base is the pace while nobody is behind: as long as those with work can have it in MaxRound, or twice that where slices would be
// shorter than Min.
func (t Timing) base(r round) float64 {
	base, sum, least := t.Base.Seconds(), 0.0, math.Inf(1)
	for _, x := range r.turns {
		sum += x.weight
		if x.gives == 0 {
			least = min(least, x.weight/x.groups)
		}
	}
	limit := t.MaxRound.Seconds()
	pace := min(base, limit/sum)
	if least*pace < t.Min.Seconds() {
		pace = max(pace, min(t.Min.Seconds()/least, 2*limit/sum, base))
	}
	return pace
}

// target is the pace that is right now.
func (t Timing) target(r round, settled bool) time.Duration {
	switch {
	case len(r.turns) == 1 && r.turns[0].groups > 1 && r.turns[0].endless == r.turns[0].groups:
		x := r.turns[0]
		return time.Duration(min(x.groups*float64(t.Base), float64(t.MaxRound)) / x.weight)
	case len(r.turns) < 2:
		return t.Min // it is not switched, and the next one who comes waits the less
	}
	long := t.base(r)
	if settled {
		most, sum := 0.0, 0.0
		for _, x := range r.turns {
			most, sum = max(most, x.weight), sum+x.weight
		}
		limit := t.MaxRound.Seconds()
		long *= max(1, min(maxStretch, longRound*limit/(sum*long), limit/2/(most*long)))
	}
	pace, length, weights := long, r.length(long), 0.0
	for _, x := range r.turns {
		weights += x.present * x.weight
	}
	for _, x := range r.turns {
		pace = min(pace, r.pull(x, long, length, weights))
	}
	return time.Duration(t.bounded(r, max(pace, lone.Seconds()), long) * float64(time.Second))
}

// bounded is the shortest pace from one on at which preemptions take no more than MaxLoss; long at most.
func (t Timing) bounded(r round, pace, long float64) float64 {
	for pace < long && r.loss(pace) > t.MaxLoss {
		pace = min(pace*paceStep, long)
	}
	return pace
}

// paceStep is how exactly the shortest pace is found that loses no more than MaxLoss.
const paceStep = 1.05

const (
	// A vGPU that would be behind by a smaller part of its entitlement than mindful does not pull at the pace; by more than that, the more
	// the further behind; and from behind on by all that it can.
	mindful, behind = 0.03, 0.1
)

// pull is the pace that a vGPU wants: a fair one. How much it matters says the lag that it would have at the long pace: what it would be
// entitled to while it has work, less its burst. Not the lag that it has, which is little once the pace is right: to follow that would
// be to swing.
//
// length and weights are of the round at the long pace.
func (r round) pull(x turn, long, length, weights float64) float64 {
	fair := x.fair()
	if fair >= long || x.gives > 0 {
		return long
	}
	wait, own := length-r.share(x, long), x.groups*x.burst
	part := x.weight / (weights + (1-x.present)*x.weight)
	lag := (part*(own+wait) - own) / (part * (own + wait + x.think))
	lag = min(lag, r.excess(x, long)/part)
	return long * math.Pow(fair/long, min(1, max(0, (lag-mindful)/(behind-mindful))))
}

// excess is the part of the GPU's time that the others take beyond their entitlement at a pace: more cannot be given to one of them.
func (r round) excess(of turn, pace float64) (sum float64) {
	weights, length := 0.0, r.cycle(pace)
	for _, x := range r.turns {
		weights += x.weight
	}
	for _, x := range r.turns {
		if x.vgpu != of.vgpu {
			sum += max(0, x.use(pace)/(length+x.rest())-x.weight/weights)
		}
	}
	return sum
}

// cycle is how long a round is at a pace where each vGPU is in as many of them as it comes back for.
func (r round) cycle(pace float64) float64 {
	length := 0.0
	for _, x := range r.turns {
		length += r.share(x, pace) / x.present
	}
	for range 16 {
		next := 0.0
		for _, x := range r.turns {
			next += r.share(x, pace) / x.present * length / (length + x.rest())
		}
		length = next
	}
	return length
}

// rest is think of a vGPU with one group: the mean of several says nothing of the one that hardly rests.
func (x turn) rest() float64 {
	if x.groups > 1 {
		return 0
	}
	return x.think
}

// lags brings up to date by how much each vGPU is behind; dt is the time since the last look.
func (r round) lags(vgpus []VGPU, lag map[string]time.Duration, dt time.Duration) map[string]time.Duration {
	weights, ran, keep := 0.0, 0.0, math.Exp2(-float64(dt)/float64(lagTime))
	for _, x := range r.turns {
		weights += x.present * x.weight
		ran += float64(vgpus[x.vgpu].Ran)
	}
	next := map[string]time.Duration{}
	for _, x := range r.turns {
		v := vgpus[x.vgpu]
		next[v.ID] = time.Duration(keep*float64(lag[v.ID]) + x.present*x.weight/weights*ran - float64(v.Ran))
	}
	return next
}

// slice is a vGPU's timeslice. Who blocks has room for its bursts, unless it is ahead: they differ, and a burst that is cut waits for one
// round more.
func (t Timing) slice(c Card, x *turn, v VGPU, s State) time.Duration {
	pace := s.pace.value.Seconds()
	if x == nil {
		x = &turn{weight: c.weight(v.Share), groups: float64(max(1, v.Contexts)), burst: unending.Seconds(), present: 1, stretch: 1}
	}
	slice := time.Duration(x.slice(pace) * float64(time.Second))
	if v.Burst > slice+slice/4 || v.Endless > 0 || v.Busy == 0 || x.gives > 0 || s.lag[v.ID] < -ahead {
		return plain(slice, v.Burst)
	}
	return max(slice, min(s.room(v), time.Duration(maxStretch*x.weight*float64(t.Base))))
}

// room is a slice in which most bursts of a vGPU end. It stays while they are about as long.
func (s State) room(v VGPU) time.Duration {
	own, old := 3*v.Burst, s.slice[v.ID]
	if old > own/2 && old < 2*own {
		return old
	}
	return own
}

// plain makes a slice a little longer of which a burst is a multiple: from the length of its last run nobody could tell that it was over.
func plain(slice, burst time.Duration) time.Duration {
	if rest := burst % slice; burst < 8*slice && (rest > slice-slice/8 || rest < slice/32) {
		return slice + slice/6
	}
	return slice
}

// tryTime is for how long it is found out of a vGPU that begins to have work whether it blocks.
const tryTime = 2 * habitTime

// telling makes the slice of a vGPU that was not seen to block a little longer where it is about a burst of another one: many of the same
// kind come together, and of one whose bursts are as long as its slices nobody could tell that it blocks.
func (r round) telling(x turn, slice time.Duration) time.Duration {
	for _, other := range r.turns {
		if x.endless == x.groups && other.endless < other.groups {
			slice = max(slice, plain(slice, time.Duration(other.burst*float64(time.Second))))
		}
	}
	return slice
}

// came is since when those with work have some. Who was seen without for a moment has not come: rounds may be long.
func (r round) came(vgpus []VGPU, before map[string]span, now time.Duration) map[string]span {
	next := map[string]span{}
	for id, c := range before {
		if now-c.to < settleTime {
			next[id] = c
		}
	}
	for _, x := range r.turns {
		id := vgpus[x.vgpu].ID
		c, known := next[id]
		if !known {
			c.from = now
		}
		next[id] = span{c.from, now}
	}
	return next
}

// ahead is how far before its entitlement a vGPU's bursts may bring it.
const ahead = lagTime / 16

// pace is a length of turns that does not follow every change. To set timeslices costs calls, and the driver takes up its list from the
// beginning each time.
type pace struct {
	value time.Duration
	since time.Duration // when the target began to be longer, or shorter, as it is now
	least time.Duration // of the targets since
	alone bool          // less than two had work
}

const (
	// growTime is for how long a longer pace, or one that is a little shorter, must be right before it is set; soonTime for one that is
	// shorter by more than an eighth, or longer and hurried to. One of less than half is set at once.
	growTime = time.Second
	soonTime = 100 * time.Millisecond
	muchPace = 8
	// No change is made by less than 1/32 down, or 1/16 up; where fewGroups at most have work, by less than a quarter of that.
	littlePace = 32
	fewGroups  = 4
)

// follow goes to the target, at once or later, if it differs by more than a little; a longer one is hurried to if more is lost than may be,
// or if nobody blocks early.
func (p pace) follow(target time.Duration, few, alone, hurried bool, now time.Duration) pace {
	off, little := target-p.value, time.Duration(littlePace)
	if few {
		little *= 4
	}
	switch {
	case target < p.value/2, p.alone:
		return pace{value: target, alone: alone}
	case max(off/2, -off) < p.value/little || p.least == 0 || (off < 0) != (p.least < p.value):
		return pace{p.value, now, target, alone}
	}
	p.least, p.alone = min(p.least, target), alone
	soon := off < -p.value/muchPace || off > 0 && hurried
	if age := now - p.since; age >= growTime || soon && age >= soonTime {
		return pace{value: p.least, alone: alone}
	}
	return p
}
