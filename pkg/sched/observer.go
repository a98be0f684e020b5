package sched

import (
	"math"
	"time"
)

// Seen is what a vGPU did of late, as switch records tell it.
type Seen struct {
	Busy    int           // channel groups with work
	Endless int           // of them, those that have not blocked for many turns
	Ran     time.Duration // GPU time since the last look
	// Burst is the GPU time that one of the others takes from having work to blocking, had it not been interrupted; unending: not known.
	Burst time.Duration
	// Gap is the time from a group's blocking to its next turn: until it had work again, and then until it was its turn.
	Gap time.Duration
	// Cuts are the preemptions in a second.
	Cuts float64
}

// unending is the burst of a vGPU that was not seen to block.
const unending = time.Hour

// Costs are what switches take, in which nobody computes.
type Costs struct {
	Preempt time.Duration // from a group with work left to another
	Yield   time.Duration // from one that blocked
}

// H200Costs are taken until some have been seen.
func H200Costs() Costs { return Costs{Preempt: 190 * time.Microsecond, Yield: 130 * time.Microsecond} }

// Observer follows the switch records of a whole GPU for the one who decides about it.
type Observer struct {
	groups map[group]*runner
	vgpus  map[string]*habit
	costs  Costs
	passed float64 // time, as weighed as habits are

	running *runner // who is on the engine
	since   time.Duration
	counted time.Duration // GPU time is counted until then
	out     ending        // of the last run
	outAt   time.Duration
}

// runner is a channel group.
type runner struct {
	vgpu    string
	last    time.Duration // on the engine
	blocked bool          // by the end of the last run
	waits   bool          // it was taken off with work left
	burst   time.Duration // since it had work
	whole   bool          // burst is all of it
	cuts    int           // preemptions since
}

// manyCuts is how many preemptions without a block make a group one that does not block.
const manyCuts = 16

// habit is what the groups of a vGPU do, each record's weight halved every habitTime.
type habit struct {
	row         Row
	former      time.Duration // slice
	changed     time.Duration
	ran         time.Duration // since the last look
	burst, gap  float64       // sums
	blocks, ons float64       // of how many
	cuts        float64       // preemptions
}

// habitTime is long beside a round, and short for users who wait for what they asked.
const habitTime = 200 * time.Millisecond

// ending says how a run ended.
type ending int

const (
	unclear   ending = iota
	preempted        // with work left
	blocked
)

// NewObserver makes one that has seen nothing.
func NewObserver() *Observer {
	return &Observer{groups: map[group]*runner{}, vgpus: map[string]*habit{}, costs: H200Costs()}
}

// Applied tells the row in force for a vGPU since a time of the records' clock.
func (o *Observer) Applied(vgpu string, row Row, now time.Duration) {
	h := o.habit(vgpu)
	if row.Slice != h.row.Slice {
		h.former, h.changed = h.row.Slice, now
	}
	h.row = row
}

// Forget drops a vGPU that is gone.
func (o *Observer) Forget(vgpu string) {
	delete(o.vgpus, vgpu)
	for g, r := range o.groups {
		if r.vgpu == vgpu {
			delete(o.groups, g)
		}
	}
}

func (o *Observer) habit(vgpu string) *habit {
	h := o.vgpus[vgpu]
	if h == nil {
		h = &habit{}
		o.vgpus[vgpu] = h
	}
	return h
}

// Add takes records in the order of the GPU, until now; owner says whose a process is ("": nobody's). The times are of the clock that
// slots are of. lost: records before the first one are missing.
func (o *Observer) Add(records []Switch, now time.Duration, owner func(pid int) string, lost bool) {
	keep := math.Exp2(-float64(now-o.counted) / float64(habitTime))
	for _, h := range o.vgpus {
		h.ran = 0
		h.burst, h.gap, h.blocks, h.ons, h.cuts = h.burst*keep, h.gap*keep, h.blocks*keep, h.ons*keep, h.cuts*keep
	}
	o.passed = o.passed*keep + float64(now-o.counted)
	if lost {
		o.running, o.out = nil, unclear
		for _, r := range o.groups {
			r.blocked, r.waits, r.whole = false, false, false
		}
	}
	for _, s := range records {
		if s.On {
			o.in(s, owner(s.PID))
		} else if o.running != nil {
			o.off(s.At)
		}
	}
	if r := o.running; r != nil {
		o.habit(r.vgpu).ran += now - max(o.since, o.counted)
		r.last = now
	}
	o.counted = now
	for g, r := range o.groups {
		if now-r.last > forgetAfter {
			delete(o.groups, g)
		}
	}
}

// in notes a switch in.
func (o *Observer) in(s Switch, vgpu string) {
	o.cost(s.At - o.outAt)
	g := group{s.PID, s.Context}
	r := o.groups[g]
	if r == nil || r.vgpu != vgpu {
		r = &runner{vgpu: vgpu, last: s.At}
		o.groups[g] = r
	}
	if r.blocked {
		h := o.habit(vgpu)
		h.gap += float64(s.At - r.last)
		h.ons++
	}
	o.running, o.since = r, s.At
	r.last, r.waits, r.blocked = s.At, false, false
}

// cost learns what a switch takes from a time between two contexts.
func (o *Observer) cost(gap time.Duration) {
	if gap < 0 || gap > 5*max(o.costs.Preempt, o.costs.Yield) {
		return // nobody had work, or a pause
	}
	const memory = 64
	switch o.out {
	case preempted:
		o.costs.Preempt += (gap - o.costs.Preempt) / memory
	case blocked:
		o.costs.Yield += (gap - o.costs.Yield) / memory
	}
}

// off notes a switch out.
func (o *Observer) off(at time.Duration) {
	r := o.running
	h := o.habit(r.vgpu)
	h.ran += at - max(o.since, o.counted)
	o.out, o.outAt, o.running = h.ending(o.since, at), at, nil
	r.last, r.waits, r.blocked = at, o.out == preempted, o.out == blocked
	r.burst += at - o.since
	switch o.out {
	case unclear:
		r.whole = false
	case preempted:
		h.cuts++
		r.cuts++
	case blocked:
		if r.whole {
			h.burst += float64(r.burst)
			h.blocks++
		}
		r.burst, r.cuts, r.whole = 0, 0, true
	}
}

// ending tells how a run that began at some time ended. Who is on the engine for longer than a slice was alone for some of it, and maybe
// idle.
func (h *habit) ending(since, at time.Duration) ending {
	if h.row.Slot.Cycle > 0 {
		if on, _ := h.row.Slot.Phase(at); !on {
			return unclear
		}
	}
	ran, slice := at-since, h.row.Slice
	if since < h.changed+applyTime && h.former > 0 && ran < slice-slice/10 || since < h.changed { // the slice of before
		slice = h.former
	}
	switch {
	case ran > slice+slice/10:
		return unclear
	case ran >= slice-slice/10: // the hardware's slice is rounded down by up to 1/128, and the switch itself takes part of it
		return preempted
	}
	return blocked
}

// applyTime is the most that guards need to set what a row says.
const applyTime = 5 * time.Millisecond

// Seen tells what a vGPU did until the time of the last Add. A group without a run for idle has no work, unless it waits for its turn.
func (o *Observer) Seen(vgpu string, idle time.Duration) Seen {
	h := o.habit(vgpu)
	s := Seen{Ran: h.ran, Burst: unending, Cuts: h.cuts / max(1, o.passed) * float64(time.Second)}
	for _, r := range o.groups {
		if r.vgpu == vgpu && (o.counted-r.last < idle || r.waits && o.counted-r.last < patience) {
			s.Busy++
			if r.cuts >= manyCuts || h.blocks <= 0.25 {
				s.Endless++
			}
		}
	}
	// Less than one block a habitTime is none: work of any length ends some time.
	if h.blocks > 0.25 {
		s.Burst = min(unending, time.Duration(h.burst/h.blocks))
	}
	if h.ons > 0 {
		s.Gap = time.Duration(h.gap / h.ons)
	}
	return s
}

// Costs are what switches took of late.
func (o *Observer) Costs() Costs { return o.costs }
