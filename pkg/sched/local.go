package sched

import (
	"slices"
	"time"
)

// Local decides for one vGPU from what its own guard sees of the GPU and what others say of themselves. Times are of the machine's
// monotonic clock, unless said otherwise.
type Local struct {
	// Exact says that there are records of context switches, Told that somebody tells when there are new ones.
	Exact, Told bool

	timing   Timing
	plan     Plan
	paused   bool // by the ledger
	held     bool // by the guard itself
	tracker  *Tracker
	read     time.Duration // when records came last; 0: never
	busy     int
	acted    int             // busy at the last decision
	worked   time.Duration   // when it was last decided with work
	young    []time.Duration // when groups were made lately, that may not have run yet
	slice    time.Duration   // of each group with work
	settling time.Duration   // until when slices are not prolonged, after a change
	verified time.Duration   // when timeslices were read back last
	patience time.Duration   // between looks while nothing is switched
	turn     Slot            // while it takes turns with others that give way to a high-priority one; else zero
	damping  damping
	debt     debt
	resident resident
	account  account
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

// NewLocal makes one that has seen nothing.
func NewLocal(t Timing, c Card) *Local {
	return &Local{timing: t, tracker: NewTracker(), slice: t.Base, plan: Plan{Card: c, Share: Share{Weight: 1}}}
}

// View is what is seen of the vGPU at a moment.
type View struct {
	Now     time.Duration
	Groups  int      // its channel groups on the graphics engine
	Records []Switch // since the last time
	Lost    bool     // some before them are missing
	Mine    func(pid int) bool
	Off     bool // its channels are
	// Load is how long the GPU computed for the vGPU between two times of the GPU's clock. False: the driver does not say.
	Load func(from, to time.Duration) (time.Duration, bool)
}

// Decision is what is to be done now.
type Decision struct {
	Slice   time.Duration // of each group with work
	Changed bool          // the slice is another one
	Verify  bool          // what is set is to be read back
	Turned  bool          // when the vGPU is to be on has changed
}

const (
	// Tick is how often a vGPU with work is looked at: as often as the driver hands out its records.
	Tick = 33 * time.Millisecond
	// IdleLook is how often a vGPU without work is looked at, while others have some.
	IdleLook = 100 * time.Millisecond
	// idleAfter is for how long a group without a run counts as one with work.
	idleAfter = 200 * time.Millisecond
	// VerifyEvery is how often timeslices are read back.
	VerifyEvery = time.Second
	// lingerTime is for how long after its last work a vGPU keeps its place.
	lingerTime = 2 * time.Second
	// settled is after how long without a context switch a vGPU with work counts as alone on the GPU.
	settled = time.Second
	// maxPatience bounds the time between looks at one that is; the driver's samples reach back 14 seconds.
	maxPatience = 8 * time.Second
	// adoptTime is for how long after a change of the plan slices are short, so that shares are right soon.
	adoptTime = 2 * time.Second
	// capIdle is after how long without work a capped vGPU is left alone. Its first work then goes on until it is noticed
	// (IdleLook, and the driver's own delay of a Tick), and is made up for later.
	capIdle = 30 * time.Second
	// maxYoung bounds what is remembered of new groups; max_tsgs is 64 by default.
	maxYoung = 256
)

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
	l.plan = p
	if changed {
		l.settling = now + adoptTime
	}
	return changed
}

// Plan is the one in force.
func (l *Local) Plan() Plan { return l.plan }

// Slice is the timeslice of each group with work.
func (l *Local) Slice() time.Duration { return l.slice }

// Busy counts the groups with work.
func (l *Local) Busy() int { return l.busy }

// Made is told of a new group.
func (l *Local) Made(now time.Duration) {
	if len(l.young) < maxYoung {
		l.young = append(l.young, now)
	}
}

// Look takes new records in and counts the groups with work.
func (l *Local) Look(v View) {
	off := v.Off && l.plan.Suspended
	if !l.Exact {
		if l.busy = v.Groups; off {
			l.busy = 0
		}
		return
	}
	if len(v.Records) > 0 || v.Lost {
		l.tracker.Add(v.Records, v.Mine, v.Lost)
		l.read = v.Now
	}
	idle := idleAfter
	if slot, ok := l.slot(); ok {
		idle = max(idle, 2*slot.Cycle)
	}
	// A group that was just made has not run, but will: one program after the other, each new, must not have base slices.
	l.young = slices.DeleteFunc(l.young, func(made time.Duration) bool { return v.Now-made > idleAfter })
	if l.busy = min(l.tracker.Busy(l.gpuNow(v.Now), idle)+len(l.young), v.Groups); off {
		l.busy = 0
	}
	if l.busy > 0 && l.read > 0 && v.Now-l.read >= settled && !l.resident.works(l.tracker, l.gpuNow(v.Now), v.Load) {
		l.busy = 0
	}
}

// gpuNow is about the present time of the GPU's clock.
func (l *Local) gpuNow(now time.Duration) time.Duration {
	if l.read == 0 {
		return 0
	}
	return l.tracker.Last() + now - l.read
}

// Self is the vGPU as the others are to see it. Whether it presses, records do not tell.
func (l *Local) Self(now time.Duration) Tenant {
	self := Tenant{Share: l.plan.Share, Busy: l.busy, Lingers: l.busy == 0 && l.lingers(now)}
	if _, slotted := l.slot(); !slotted && now >= l.settling {
		self.Saturating = l.tracker.Saturating()
	}
	return self
}

// lingers reports that the vGPU had work a moment ago.
func (l *Local) lingers(now time.Duration) bool { return l.worked > 0 && now-l.worked < lingerTime }

// Decide says what is to be done, beside what others say of themselves.
func (l *Local) Decide(now time.Duration, self Tenant, others []Tenant) (d Decision) {
	own, card := l.tracker.Usage(l.gpuNow(now))
	d.Turned = l.debt.spend(now, own.GPUTime, l.account.Pauses, l.plan, l.Exact)
	l.account.grant(now, card, l.plan.Cap, self, others)
	d.Slice = l.damped(now, l.timing.Slice(l.plan.Card, self, others), others)
	d.Changed = d.Slice != l.slice
	if d.Verify = l.busy > 0 && now-l.verified >= VerifyEvery; d.Verify {
		l.verified = now
	}
	l.slice = d.Slice
	l.tracker.SetSlice(l.slice)
	turn, turns := l.timing.Turn(l.plan.Card, self, others)
	if !turns {
		turn = Slot{}
	}
	if turn != l.turn || (l.acted == 0) != (l.busy == 0) && l.plan.Cap > 0 {
		l.turn, d.Turned = turn, true
	}
	l.acted = l.busy
	if l.busy > 0 {
		l.worked = now
	}
	return d
}

// Wait is when to look again if nobody tells of anything; 0: not at all.
func (l *Local) Wait(now time.Duration, groups int) time.Duration {
	switch {
	case l.busy > 0 && !l.Exact:
		return VerifyEvery
	case l.busy > 0 && (now-l.read < settled || l.plan.Cap > 0 || l.turn.Cycle > 0):
		l.patience = settled
		return Tick
	case l.busy > 0:
		l.patience = min(max(2*l.patience, settled), maxPatience)
		return l.patience
	case l.lingers(now):
		return lingerTime / 4
	case groups > 0 && l.Exact && !l.Told:
		return 3 * Tick
	}
	return 0
}

// slot is when the channels are to be on, if they are not always.
func (l *Local) slot() (Slot, bool) {
	switch {
	case l.plan.Cap > 0 && l.plan.Slot.Cycle > 0:
		return l.plan.Slot, true
	case l.turn.Cycle > 0:
		return l.turn, true
	}
	return Slot{}, false
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
	slot, ok := l.slot()
	switch {
	case !ok:
		return false, 0
	case l.busy == 0 && l.Exact && (l.plan.Cap == 0 || now-l.worked > capIdle):
		return false, 0 // nothing to hold back; a decision with work changes that
	}
	if now < l.debt.owing && l.plan.Cap > 0 {
		return true, l.debt.owing
	}
	on, until := slot.Phase(now)
	return !on, until
}

// Paused is told that the channels are off since a time; v is what was seen then.
func (l *Local) Paused(v View) {
	l.account.Pauses++
	l.account.stopped = v.Now
	l.Look(v)
	l.tracker.Paused(l.gpuNow(v.Now))
}

// Resumed is told that the channels are on.
func (l *Local) Resumed(now time.Duration) {
	if l.busy > 0 {
		l.account.Stopped += now - l.account.stopped
	}
}

// Account is the vGPU's GPU time since its start, unless said otherwise.
func (l *Local) Account(now time.Duration) Account {
	a := l.account.Account
	a.Usage, _ = l.tracker.Usage(l.gpuNow(now))
	a.Utilization = l.tracker.Utilization(l.gpuNow(now), time.Second)
	if _, alone := l.tracker.Running(); alone && now-l.read >= settled {
		a.Utilization = min(a.Utilization, l.resident.lately)
	}
	return a
}

// Looked is the vGPU's GPU time up to the last record that was read.
func (l *Local) Looked() time.Duration {
	own, _ := l.tracker.Usage(l.tracker.Last())
	return own.GPUTime
}
