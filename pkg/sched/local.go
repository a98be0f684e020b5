// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math"
	"time"
)

// Local carries out for one vGPU what its arbiter says: when its channels are on, and what that does to its account. Times are of the
// machine's monotonic clock, unless said otherwise.
type Local struct {
	timing Timing
	plan   Plan
	since  time.Duration // when it came in force
	paused bool          // by the ledger
	held   bool          // by the guard itself
	busy   bool          // it had work when it was suspended: an arbiter that knows of that says none
	row    Verdict
	lapsed time.Duration // rows that were said before do not hold
	agreed bool          // the vGPU's slots are the same on all GPUs on which it has work
	debt   debt

	pauses    uint64        // times that the channels were stopped
	throttled time.Duration // with work, while they were
	stopped   time.Duration // when they were last
	had       bool          // it had work then
}

// Plan is what the ledger says of a vGPU.
type Plan struct {
	Card      Card
	Effective Policy
	Share     Share
	Cap       Permille // 0: none
	Slot      Slot     // with Cap
	Suspended bool     // by cgpu pause
}

// Verdict is what an arbiter says of a vGPU.
type Verdict struct {
	Row
	At      time.Duration // when it was said
	Until   time.Duration // from when on an arbiter has failed to say more
	Adopted time.Duration // when the plan that it was made by came in force
	Busy    int           // channel groups with work
	Exact   bool          // the driver tells of context switches
	Look    bool          // of high priority: others have work that should give way
	Gang    bool          // the slot is for all GPUs on which it has work, or for none (Agree)
	// What the vGPU had of the GPU's time in about the last second, and should have had.
	Lately, Entitled Permille
	// Open is the time on the engine that Account does not have yet: how much of it is GPU time is to be seen.
	Open time.Duration
	Account
}

// Used is the GPU time up to a moment: what a context that is on the engine may have without work is in it until the arbiter knows.
func (v Verdict) Used(now time.Duration) time.Duration {
	if v.Open > 0 && v.Busy > 0 {
		return v.GPUTime + v.Open + max(0, now-v.At)
	}
	return v.GPUTime + v.Open
}

// Recently is a part of the GPU's time as it fades when nobody decides because nobody has work.
func (v Verdict) Recently(part Permille, now time.Duration) Permille {
	if v.Busy > 0 || now <= v.At {
		return part
	}
	return Permille(float64(part) * math.Exp(-float64(now-v.At)/float64(FadeTime)))
}

// FadeTime is how far back Verdict.Lately and Entitled go.
const FadeTime = 400 * time.Millisecond

const (
	// Tick is how often the driver hands out its records.
	Tick = 33 * time.Millisecond
	// VerifyEvery is how often timeslices are read back.
	VerifyEvery = time.Second
)

// NewLocal makes one that nobody has said anything of.
func NewLocal(t Timing, c Card) *Local {
	return &Local{timing: t, plan: Plan{Card: c, Share: Share{Weight: 1}}}
}

// Adopt puts a plan in force. It reports whether it is another one.
func (l *Local) Adopt(p Plan, now time.Duration) bool {
	l.paused = p.Suspended
	p.Suspended = p.Suspended || l.held
	return l.change(p, now)
}

// Hold suspends the vGPU for the guard's own reasons, or no longer.
func (l *Local) Hold(on bool, now time.Duration) {
	l.held = on
	p := l.plan
	p.Suspended = l.paused || l.held
	l.change(p, now)
}

func (l *Local) change(p Plan, now time.Duration) bool {
	changed := l.plan != p
	l.busy = p.Suspended && (l.busy || l.row.Busy > 0)
	l.plan = p
	if changed {
		l.since = now
	}
	return changed
}

// Plan is the one in force, and since when.
func (l *Local) Plan() (Plan, time.Duration) { return l.plan, l.since }

// Take is told what the arbiter says. It reports whether the channels may have to turn.
func (l *Local) Take(v Verdict) (turn bool) {
	turn = v.Slot != l.row.Slot || v.Gang != l.row.Gang || v.Adopted != l.row.Adopted || (v.Busy > 0) != (l.row.Busy > 0)
	l.row = v
	return turn
}

// Verdict is the last that was said.
func (l *Local) Verdict() Verdict { return l.row }

// Slice is the timeslice of each group: the last that an arbiter said, also when it is gone.
func (l *Local) Slice() time.Duration {
	switch {
	case l.row.Slice > 0:
		return l.row.Slice
	case l.plan.Card.Policy == PolicyNative:
		return NativeTimeslice
	}
	return l.timing.Base
}

// Ruled reports that an arbiter decides: what it said last holds.
func (l *Local) Ruled(now time.Duration) bool { return now < l.row.Until && l.row.At >= l.lapsed }

// Lapse is told that whoever said the last row is gone, and nobody came after it.
func (l *Local) Lapse() { l.lapsed = l.row.At + 1 }

// slot is when the channels are to be on, if they are not always. Without an arbiter caps go on as the ledger has them, and turns end.
func (l *Local) slot(now time.Duration) (Slot, bool) {
	slot := l.plan.Slot
	switch {
	case l.Ruled(now) && l.row.Adopted == l.since:
		if slot = l.row.Slot; l.row.Gang && !l.agreed {
			slot = Slot{}
		}
	case l.plan.Cap == 0:
		slot = Slot{}
	}
	return slot, slot.Cycle > 0
}

// Off says whether the channels should be off, and when that changes; 0: not by itself. Of a vGPU that has never had a channel group,
// begun is false.
func (l *Local) Off(now time.Duration, begun bool) (off bool, until time.Duration) {
	switch {
	case l.plan.Suspended: // also what has no context on the graphics engine
		return true, 0
	case !begun:
		return false, 0
	}
	slot, ok := l.slot(now)
	if !ok {
		l.debt = debt{}
		return false, 0
	}
	if l.plan.Cap > 0 {
		l.debt.spend(l.row.At, l.row.GPUTime+l.row.Open, l.pauses, l.plan, l.row.Exact)
		if now < l.debt.owing {
			return true, l.debt.owing
		}
	}
	on, until := slot.Phase(now)
	return !on, until
}

// Paused is told that the channels are off since a time, or that more of them are.
func (l *Local) Paused(now time.Duration) {
	had := l.had
	l.Resumed(now)
	l.pauses++
	l.stopped, l.had = now, had || l.busy || l.row.Busy > 0
}

// Resumed is told that the channels are on.
func (l *Local) Resumed(now time.Duration) {
	_, l.throttled = l.Pauses(now)
	l.had = false
}

// Pauses counts the times that the channels were stopped, and the time with work while they were.
func (l *Local) Pauses(now time.Duration) (n uint64, throttled time.Duration) {
	if l.had {
		return l.pauses, l.throttled + max(0, now-l.stopped)
	}
	return l.pauses, l.throttled
}
