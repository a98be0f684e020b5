package sched

import (
	"math"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Timing are the scheduler's constants (cgpu.toml).
type Timing struct {
	Base     time.Duration // timeslice of a container of weight 1
	Min      time.Duration // no timeslice is made shorter to keep a round short
	MaxRound time.Duration // in which every container with work has its turn
	HighPrio time.Duration // timeslice of the others while a high-priority container has work
	Cycle    time.Duration // of hard caps, in which every capped container has its slot
	// MaxLoss is the part of the GPU's time that preemptions may take, so that programs which wait for each kernel come up with those that
	// do not (Decide).
	MaxLoss float64
}

// DefaultTiming holds the defaults. Base is a trade: two saturating containers lose 9 % of an H200 to context switches with
// CUDA's own 2 ms, 4 % with 5 ms, 1 to 2 % with 10 ms.
func DefaultTiming() Timing {
	return Timing{Base: 10 * time.Millisecond, Min: time.Millisecond, MaxRound: 100 * time.Millisecond,
		HighPrio: 200 * time.Microsecond, Cycle: 100 * time.Millisecond, MaxLoss: 0.15}
}

const (
	// NativeTimeslice is what libcuda asks for each context (NVA06C_CTRL_CMD_SET_TIMESLICE, traced). The guard does not carry
	// that call out, so PolicyNative sets it.
	NativeTimeslice = 2048 * time.Microsecond
	// shortest is the shortest timeslice that is ever set: a context switch of an H200 takes 83 µs.
	shortest = 50 * time.Microsecond
	// lone is the timeslice of a single group that gives way to a high-priority container which has work now and then. Alone it is
	// not switched at the end of its slices, so short ones cost it nothing, and what comes in between waits the shorter.
	lone = 10 * time.Microsecond
	// shortestShared is where the division among many contexts of one container ends.
	shortestShared = 200 * time.Microsecond
	// longest keeps a high-priority container within the watchdogs of desktop cards.
	longest = time.Second
)

// Tenant is a container on a GPU as the others see it.
type Tenant struct {
	Share
	// Busy is the number of its channel groups on the graphics engine that have had work lately. A container without work
	// has 0.
	Busy int
	// Pressing says of a high-priority container that it has work now, or had a moment ago. Saturating says of any that it
	// always has work.
	Pressing, Saturating bool
	// Lingers says of a container without work that it had some a moment ago. Among many it may just wait for its turn, so its
	// place in the round is kept for it.
	Lingers bool
	// Place orders the containers of a GPU; it is the same whoever looks.
	Place int
}

// weight in slots. Under PolicySoft a percentage takes as many slots as it is percent of the GPU.
func (c Card) weight(s Share) float64 {
	switch {
	case c.Policy == PolicySoft && s.Percent > 0:
		return float64(s.Percent) * float64(c.MaxInst) / 100
	case c.Policy == PolicyFair:
		return 1
	}
	return float64(max(s.Weight, 1))
}

// presses reports that o's work goes before s's.
func (o Tenant) presses(s Tenant) bool {
	switch {
	case o.Priority <= s.Priority:
		return false
	case o.Priority == quota.PriorityHigh:
		return o.Pressing
	}
	return o.Busy > 0
}

// Slice is the timeslice of each channel group of self with work.
//
// In every round a container gets weight × Base, divided among its groups that have work: a container with eight processes
// gets no more than one with a single process. Rounds longer than MaxRound are shortened, and prolonged again, up to twice
// MaxRound, where that would make slices shorter than Min; both leave the ratios as they are. Where even that leaves less
// than 200 µs for each of a container's groups (64 groups beside 15 containers and more), those get 200 µs all the same: the
// container then has more than its weight, and the round is longer by that much.
func (t Timing) Slice(c Card, self Tenant, others []Tenant) time.Duration {
	if c.Policy == PolicyNative {
		return NativeTimeslice
	}
	n := float64(max(self.Busy, 1))
	pressed, yielding := false, 0.0
	for _, o := range others {
		pressed = pressed || o.presses(self)
		if self.presses(o) && o.Busy > 0 {
			yielding += float64(o.Busy) * float64(t.pressed(o))
		}
	}
	if pressed {
		_, turns := t.Turn(c, self, others)
		if self.Busy <= 1 && (turns || alone(self, others)) && calmly(others) {
			return lone
		}
		return t.pressed(self)
	}
	if self.Priority == quota.PriorityHigh && self.Pressing && yielding > 0 {
		// PrioRatio of the time for all that press, by weight.
		share := c.weight(self.Share)
		sum := share
		for _, o := range others {
			if o.Priority == quota.PriorityHigh && o.Pressing {
				sum += c.weight(o.Share)
			}
		}
		slice := float64(c.PrioRatio) / float64(100-c.PrioRatio) * yielding * share / sum / n
		return min(max(time.Duration(slice), shortest), longest)
	}
	round, least, most := t.turn(c, self), t.turn(c, self)/n, t.turn(c, self)
	saturated, shared, tenants := self.Saturating, false, 1
	for _, o := range others {
		if o.Busy == 0 && !o.Lingers || self.presses(o) {
			continue
		}
		turn := t.turn(c, o)
		round += turn
		tenants++
		least, most = min(least, turn/float64(max(o.Busy, 1))), max(most, turn)
		saturated, shared = saturated && o.Saturating, true
	}
	steps := func(x float64) float64 {
		if tenants > manyTenants { // what one of many does should not change the slices of all
			return math.Exp2(math.Floor(8*math.Log2(x)) / 8)
		}
		return x
	}
	scale := steps(min(1, float64(t.MaxRound)/round))
	if shortened := least * scale; shortened < float64(t.Min) {
		scale *= max(1, min(float64(t.Min)/shortened, 2*float64(t.MaxRound)/(round*scale)))
	}
	if saturated && shared {
		// Nobody waits for an answer, so fewer switches are better: 10 ms lose 2 % of an H200 to them, 30 ms 0.7 %. No container
		// gets more than half of MaxRound at a time, so that shares are right within every second, too.
		limit := float64(t.MaxRound)
		scale *= steps(max(1, min(maxStretch, longRound*limit/(round*scale), limit/2/(most*scale))))
	}
	return max(time.Duration(math.Round(t.turn(c, self)*scale/n)), shortestShared)
}

// manyTenants is from how many containers with work on slices have steps, of an eighth of an octave.
const manyTenants = 16

// How much longer slices and rounds get while every container with work has more than it can get done.
const (
	maxStretch = 3.5
	longRound  = 2.0
)

// alone reports that no other container that gives way has work.
func alone(self Tenant, others []Tenant) bool {
	for _, o := range others {
		if o.Busy > 0 && !o.presses(self) {
			return false
		}
	}
	return true
}

// calmly reports that high-priority containers press, and that they leave time to others.
func calmly(others []Tenant) bool {
	pressing := false
	for _, o := range others {
		if o.Priority == quota.PriorityHigh && o.Pressing {
			if o.Saturating {
				return false
			}
			pressing = true
		}
	}
	return pressing
}

const (
	// yields is by how much a best-effort container's turn is shorter than a default one's: as their timeslices are.
	yields  = 50
	minTurn = 7 * time.Millisecond
	maxTurn = 25 * time.Millisecond
)

// Turn is when a container may run that gives way to a high-priority one beside others that do. If all of them ran by
// timeslices short enough for the high-priority one, they would spend more time in switches among themselves than in work: 39 %
// of an H200 is left to four. So they take turns, as with hard caps, and only one of them is on at a time. False: the container
// need not take turns.
func (t Timing) Turn(c Card, self Tenant, others []Tenant) (Slot, bool) {
	if c.Policy == PolicyFair || c.Policy == PolicyFixed || c.Policy == PolicyNative || self.Priority >= quota.PriorityHigh || self.Busy == 0 {
		return Slot{}, false // capped containers take turns anyway
	}
	level := self.Priority
	for _, o := range others {
		if o.Priority < quota.PriorityHigh && o.Busy > 0 {
			level = max(level, o.Priority)
		}
	}
	weight := func(x Tenant) float64 {
		if x.Priority < level {
			return c.weight(x.Share) / yields
		}
		return c.weight(x.Share)
	}
	many, before, sum := 1, 0.0, weight(self)
	for _, o := range others {
		if o.Priority >= quota.PriorityHigh || o.Busy == 0 {
			continue
		}
		many++
		sum += weight(o)
		if o.Place < self.Place {
			before += weight(o)
		}
	}
	if many < 2 || !calmly(others) {
		return Slot{}, false
	}
	cycle := time.Duration(many) * min(max(maxCycle/time.Duration(many), minTurn), maxTurn)
	part := func(weight float64) time.Duration {
		return time.Duration(float64(cycle) * weight / sum).Truncate(time.Microsecond)
	}
	return Slot{Start: part(before), On: part(weight(self)), Cycle: cycle}, true
}

// turn is what a container gets in a round, before the round's length is looked at.
func (t Timing) turn(c Card, x Tenant) float64 { return c.weight(x.Share) * float64(t.Base) }

// pressed is the timeslice of each group of a container while another one presses it.
func (t Timing) pressed(x Tenant) time.Duration {
	return max(t.HighPrio/time.Duration(max(x.Busy, 1)), shortest)
}
