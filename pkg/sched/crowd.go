// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math"
	"slices"
	"time"
)

// crowds is what is done about vGPUs with several groups that never block. Each of the groups is preempted in a round: beside a program
// that waits for each kernel either most of the time would go into switches, or rounds had to be long. That is the vGPU's own loss; the
// others have what they would have beside one group of it. So its slices are as long as MaxLoss wants them, and it is on in a slot only
// (in which the others have a burst in each of the long rounds). In the rest of the cycle they are among themselves.
type crowds struct {
	stretch float64 // by how much its slices are longer than the pace makes them; 0: there is no slot
	slot    Slot    // of all of them: they are on together
	since   time.Duration
	doubt   time.Duration // since when it should be another; 0: it should not
	barred  time.Duration // until when there is none
}

const (
	// There is a slot where the groups beyond the first of each make the pace longer by crowded, until it is less than lessCrowded.
	crowded, lessCrowded = 1.4, 1.2
	// crowdRounds are in each slot at least: in the third it can be seen for how long a program ran that was alone before.
	crowdRounds = 4
	// crowdOn is the shortest such slot, and crowdTime for how long another must be right before it is set.
	crowdOn   = 40 * time.Millisecond
	crowdTime = time.Second
	// crowdBar is for how long there is none where the GPU had rested (Judge).
	crowdBar = time.Minute
	// lossToAll is what all switches take at most, by what preemptions do.
	lossToAll = 1.7
)

// Apart reports since when some have had slots: vGPUs with several groups that never block, or each of those that share several GPUs.
func (s State) Apart() (since time.Duration, ok bool) {
	if len(s.gangs.slots) > 0 {
		return s.gangs.since, true
	}
	return s.crowds.since, s.crowds.stretch > 0
}

// Judge is told for what part of the time since then the GPU computed; negative: nobody knows. A program that is alone on the GPU makes no
// records, so whether it leaves the GPU idle while the others are off is seen only when it is tried. Where more is lost by that than by
// what MaxLoss stands for, all are on together for a while.
func (t Timing) Judge(s State, load float64, now time.Duration) State {
	switch {
	case s.Ganged():
		s.gangs = s.gangs.judge(load, now)
	case load < 0:
		s.crowds = crowds{barred: math.MaxInt64}
	case load < 1-lossToAll*t.MaxLoss:
		s.crowds = crowds{barred: now + crowdBar}
	}
	return s
}

// follow decides about the slot, and what the pace is to be.
func (old crowds) follow(t Timing, r round, settled bool, now time.Duration) (crowds, time.Duration) {
	r = r.stretched(1)
	pace, others := t.target(r, settled), r.others()
	if len(others.turns) == len(r.turns) || len(others.turns) == 0 || now < old.barred {
		return crowds{barred: old.barred}, pace
	}
	ones := r.ofOne()
	fair := t.target(ones, settled)
	if len(others.turns) > 1 {
		fair = time.Duration(t.bounded(others, fair.Seconds(), pace.Seconds()) * float64(time.Second))
	}
	limit, wait := crowded, soonTime
	if old.stretch > 0 {
		limit, wait = lessCrowded, crowdTime
	}
	next := crowds{since: now}
	if float64(pace) > limit*float64(fair) {
		next.slot, next.stretch = t.apart(r, ones, others, fair.Seconds())
	}
	switch {
	case old.like(next):
		old.doubt = 0
	case old.doubt == 0:
		old.doubt = now
	case now-old.doubt >= wait:
		old = next
	}
	if old.stretch > 0 {
		pace = fair
	}
	return old, pace
}

// like reports that another slot is not worth a change.
func (c crowds) like(next crowds) bool {
	near := func(a, b float64) bool { return math.Abs(a-b) <= max(a, b)/8 }
	return near(c.stretch, next.stretch) && near(c.on(), next.on()) && near(1-c.on(), 1-next.on())
}

// on is the part of the time in which they are.
func (c crowds) on() float64 { return float64(c.slot.On) / float64(max(c.slot.Cycle, 1)) }

// apart is the slot at a pace, and by how much slices are longer in it; 0: none would help.
func (t Timing) apart(r, ones, others round, pace float64) (Slot, float64) {
	stretch, in := 1.0, r
	for in.loss(pace) > t.MaxLoss && in.length(pace) < longRound*t.MaxRound.Seconds() {
		stretch *= paceStep
		in = r.stretched(stretch)
	}
	alone := others.length(pace)
	if x := others.turns[0]; len(others.turns) == 1 && x.groups == 1 {
		alone = x.use(pace) // it is not switched
	}
	due, within, without := others.had(pace, ones.length(pace)), others.had(pace, in.length(pace)), others.had(pace, alone)
	part := (without - due) / (without - within)
	if !(part > 0 && part < 1) {
		return Slot{}, 0
	}
	on := max(crowdOn.Seconds(), crowdRounds*in.length(pace), minSlot.Seconds()*part/(1-part))
	cycle := min(time.Duration(on/part*float64(time.Second)), maxCycle)
	return Slot{On: time.Duration(part * float64(cycle)), Cycle: cycle}, stretch
}

// stretched is a round in which the slices of crowds are longer.
func (r round) stretched(by float64) round { return r.with(func(x *turn) { x.stretch = by }) }

// ofOne is a round in which each of them has one group.
func (r round) ofOne() round { return r.with(func(x *turn) { x.groups, x.endless = 1, 1 }) }

func (r round) with(change func(*turn)) round {
	r.turns = slices.Clone(r.turns)
	for i := range r.turns {
		if r.turns[i].crowd {
			change(&r.turns[i])
		}
	}
	return r
}

// others is a round without them.
func (r round) others() round {
	r.turns = slices.DeleteFunc(slices.Clone(r.turns), func(x turn) bool { return x.crowd })
	return r
}

// had is the part of the time that those in r have where rounds are so long.
func (r round) had(pace, length float64) (sum float64) {
	for _, x := range r.turns {
		sum += x.use(pace) / (length + x.think)
	}
	return sum
}
