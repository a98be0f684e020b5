// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"math"
	"slices"
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

// A context is on the engine, as records tell, until its state is saved: longer than it computes by so much (H200: an empty kernel's run is
// 61 µs long, and one that a slice of 50 µs to 10 ms ended by 90 to 120 µs longer than 1.02 of that). The rest of Costs is between two
// runs.
const (
	saveYield   = 47 * time.Microsecond
	savePreempt = 107 * time.Microsecond
)

// saving is what of a run was no work.
func (e ending) saving() time.Duration {
	if e == preempted {
		return savePreempt
	}
	return saveYield
}

// Observer follows the switch records of a whole GPU for the one who decides about it.
type Observer struct {
	groups map[group]*runner
	vgpus  map[string]*habit
	costs  Costs
	passed float64 // time, as weighed as habits are

	running *runner // who is on the engine
	since   time.Duration
	counted time.Duration // GPU time that was seen goes until then
	out     ending        // of the last run
	outAt   time.Duration

	// Ahead is by how much the records' clock is ahead of that which slots are of.
	Ahead   time.Duration
	begun   bool
	last    time.Duration // the newest record
	upTo    time.Duration // until when accounts go
	settled time.Duration // for who is on the engine
	entries []entry       // of accounts, after upTo
	runs    []span        // since accounts were booked
	booked  bool
	setting []span         // when timeslices were set, since the last record, in order
	lately  float64        // how much of the time they were
	lap     uint64         // counts rounds of all that have work
	seen    map[group]bool // who was switched in during this one
}

type group struct {
	pid     int
	context uint32
}

// runner is a channel group.
type runner struct {
	group
	vgpu    string
	last    time.Duration // on the engine
	blocked bool          // by the end of the last run
	waits   bool          // it was taken off with work left
	burst   time.Duration // since it had work
	whole   bool          // burst is all of it
	cuts    int           // preemptions since
	resting bool          // it has no work although it is on the engine
	rested  bool          // it had a break since it was switched in
	worked  time.Duration // when it had work last since then, by samples
	lap     uint64        // when it was switched out
}

// manyCuts is how many preemptions without a block make a group one that does not block.
const manyCuts = 16

// habit is what the groups of a vGPU do, each record's weight halved every habitTime.
type habit struct {
	account Account
	from    time.Duration // what was before is in the account already
	// By the last samples: its time on the engine, that of it in which the GPU computed, and the part that this is.
	on, computed time.Duration
	load         float64
	open         time.Duration // of its entries
	// Its part of the GPU's time since the account went on, and how long that was for.
	part, parts float64
	grantable   time.Duration // most that account.Granted can be
	runners     []*runner
	row         Row
	// Its timeslice, the one before it, and when it was set.
	slice, former time.Duration
	setting       span
	told          bool          // its guard says when it sets them
	ran           time.Duration // since the last look
	burst, gap    float64       // sums
	blocks, ons   float64       // of how many
	cuts          float64       // preemptions
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
	return &Observer{groups: map[group]*runner{}, vgpus: map[string]*habit{}, seen: map[group]bool{}, costs: H200Costs()}
}

// Applied tells the row in force for a vGPU since a time of the records' clock.
func (o *Observer) Applied(vgpu string, row Row, now time.Duration) {
	h := o.habit(vgpu)
	h.row = row
	if !h.told && row.Slice != h.slice {
		h.set(row.Slice, span{now, now + applyTime})
	}
}

// Setting is what a guard says of its vGPU's timeslices: which it set last, and between which times. To is before From while it does.
type Setting struct{ Slice, From, To time.Duration }

// Sliced tells what a guard says, by the records' clock.
func (o *Observer) Sliced(vgpu string, s Setting) {
	if s.To < s.From {
		s.To = s.From + setTime
	}
	h := o.habit(vgpu)
	setting := span{s.From - setLag, s.To + setLag}
	if h.told && h.setting.to > setting.from { // it was at it when it was heard of last
		setting.from = min(setting.from, h.setting.from)
	}
	h.told = true
	h.set(s.Slice, setting)
}

func (h *habit) set(slice time.Duration, setting span) {
	if slice != h.slice {
		h.former, h.slice = h.slice, slice
	}
	h.setting = setting
}

const (
	// setTime is the longest that a guard may take to set timeslices.
	setTime = time.Second
	// setLag is how exactly the GPU's clock is known.
	setLag = 4 * time.Millisecond
	// mostSetting bounds the time in which turns tell nothing, each second's halved after another: a container that makes contexts all the
	// time has its guard set timeslices all the time.
	mostSetting = 700 * time.Millisecond
)

// settings notes when timeslices were set since the last record, by whomever.
func (o *Observer) settings(now time.Duration) {
	o.setting = o.setting[:0]
	for _, h := range o.vgpus {
		if h.told && h.setting.to >= o.last {
			o.setting = append(o.setting, h.setting)
		}
	}
	slices.SortFunc(o.setting, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	all, since := o.setting[:0], span{o.counted, now}
	for _, s := range o.setting {
		if last := len(all) - 1; last >= 0 && s.from <= all[last].to {
			all[last].to = max(all[last].to, s.to)
		} else {
			all = append(all, s)
		}
	}
	o.lately *= math.Exp2(-(now - o.counted).Seconds())
	for _, s := range all {
		o.lately += float64(s.overlap(since))
	}
	if o.setting = all; o.lately > float64(mostSetting) {
		o.setting = all[:0]
	}
}

// Own is told whose processes are whose, when that has changed: what nobody knew who it was may be somebody's.
func (o *Observer) Own(owner func(pid int) string) {
	former := o.habit("")
	former.runners = slices.DeleteFunc(former.runners, func(r *runner) bool {
		if r.vgpu = owner(r.pid); r.vgpu == "" {
			return false
		}
		h := o.habit(r.vgpu)
		h.runners = append(h.runners, r)
		return true
	})
}

// Forget drops a vGPU that is gone.
func (o *Observer) Forget(vgpu string) {
	for _, r := range o.habit(vgpu).runners {
		if o.groups[r.group] == r {
			delete(o.groups, r.group)
		}
	}
	delete(o.vgpus, vgpu)
}

func (o *Observer) habit(vgpu string) *habit {
	h := o.vgpus[vgpu]
	if h == nil {
		h = &habit{account: Account{UpTo: o.upTo}, load: 1}
		o.vgpus[vgpu] = h
	}
	return h
}

// Add takes records in the order of the GPU, until now; owner says whose a process is ("": nobody's). The times are of the records'
// clock. lost: records before the first one are missing.
func (o *Observer) Add(records []Switch, now time.Duration, owner func(pid int) string, lost bool) {
	if !o.begun {
		o.begun, o.counted = true, now
		if len(records) > 0 {
			o.counted, o.last = records[0].At, records[0].At
		}
	}
	now = max(now, o.counted)
	keep := math.Exp2(-float64(now-o.counted) / float64(habitTime))
	for _, h := range o.vgpus {
		h.ran = 0
		h.burst, h.gap, h.blocks, h.ons, h.cuts = h.burst*keep, h.gap*keep, h.blocks*keep, h.ons*keep, h.cuts*keep
	}
	// Weighed as what happened is, or a rest would make all rates too small for as long as it was.
	o.passed = o.passed*keep + (1-keep)*float64(habitTime)/math.Ln2
	if lost {
		o.running, o.out = nil, unclear
		for _, r := range o.groups {
			r.blocked, r.waits, r.whole = false, false, false
		}
	}
	o.settings(now)
	for _, s := range records {
		o.add(s, owner)
	}
	if r := o.running; r != nil && !r.resting {
		o.habit(r.vgpu).ran += max(0, now-max(o.since, o.counted))
		r.last = now
	}
	o.counted = now
	o.forget(now)
}

// add takes one record.
func (o *Observer) add(s Switch, owner func(pid int) string) {
	// Never seen; a clock that was set back must not make negative times.
	switch back := o.last - s.At; {
	case back > time.Second:
		o.SettleAll()
		o.running, o.out, o.counted, o.settled, o.upTo = nil, unclear, s.At, s.At, s.At
		clear(o.groups) // what they did last is to come
		for _, h := range o.vgpus {
			h.from, h.account.UpTo, h.runners = min(h.from, s.At), min(h.account.UpTo, s.At), nil
		}
	case back > 0:
		s.At = o.last
	}
	o.last = s.At
	r := o.running
	switch {
	case s.On:
		o.in(s, owner(s.PID))
	case r != nil && r.group == group{s.PID, s.Context} && s.At >= o.since:
		o.off(s.At)
	default:
		o.running, o.out = nil, unclear
	}
}

// forgetAfter bounds the groups remembered: those of processes that are gone.
const forgetAfter = 10 * time.Second

func (o *Observer) forget(now time.Duration) {
	for g, r := range o.groups {
		if now-r.last > forgetAfter && r != o.running {
			delete(o.groups, g)
			h := o.habit(r.vgpu)
			h.runners = slices.DeleteFunc(h.runners, func(x *runner) bool { return x == r })
		}
	}
}

// in notes a switch in.
func (o *Observer) in(s Switch, vgpu string) {
	e := entry{vgpu: vgpu, span: span{s.At, s.At}, usage: Usage{Switches: 1}}
	if o.cost(s.At - o.outAt) {
		e.gap = s.At - o.outAt
	}
	g := group{s.PID, s.Context}
	o.turn(g, s.At)
	r, h := o.groups[g], o.habit(vgpu)
	if r == nil || r.vgpu != vgpu {
		if r != nil {
			former := o.habit(r.vgpu)
			former.runners = slices.DeleteFunc(former.runners, func(x *runner) bool { return x == r })
		}
		r = &runner{group: g, vgpu: vgpu, last: s.At}
		o.groups[g] = r
		h.runners = append(h.runners, r)
	}
	if r.blocked {
		h.gap += float64(s.At - r.last)
		h.ons++
	}
	if r.waits && o.lap-r.lap < 2 && s.At-r.last < patience {
		e.usage.Waiting = s.At - r.last
	}
	o.enter(e)
	o.running, o.since, o.settled = r, s.At, s.At
	r.last, r.waits, r.blocked, r.resting, r.rested, r.worked = s.At, false, false, false, false, s.At
}

// turn notes who is switched in. Groups with work have their turns one after the other: when one comes a second time, all of them came in
// between, unless the driver took up its list from the beginning. Who was passed over has not waited: it looked preempted, but it had
// stayed on the engine without work.
func (o *Observer) turn(g group, at time.Duration) {
	switch again := o.seen[g] || len(o.seen) >= maxSeen; {
	case o.disturbed(at):
		clear(o.seen)
	case again:
		clear(o.seen)
		o.lap++
	}
	o.seen[g] = true
}

// disturbed reports that timeslices were set at a time: each one ends the turn at hand, and the driver takes up its list from the
// beginning.
func (o *Observer) disturbed(at time.Duration) bool {
	return slices.ContainsFunc(o.setting, func(s span) bool { return s.from <= at && at <= s.to })
}

const (
	// maxSeen bounds a round in which nobody comes again, of contexts that end before.
	maxSeen = 4096
	// patience is longer than a group with work ever waits for another's turn.
	patience = 2 * longest
)

// cost learns what a switch takes from a time between two contexts. False: nobody had work, or it was a pause.
func (o *Observer) cost(gap time.Duration) bool {
	if gap < 0 || gap > 5*max(o.costs.Preempt, o.costs.Yield) {
		return false
	}
	const memory = 64
	switch o.out {
	case preempted:
		o.costs.Preempt += (gap + savePreempt - o.costs.Preempt) / memory
	case blocked:
		o.costs.Yield += (gap + saveYield - o.costs.Yield) / memory
	}
	return true
}

// off notes a switch out.
func (o *Observer) off(at time.Duration) {
	r := o.running
	h := o.habit(r.vgpu)
	h.ran += max(0, at-max(o.since, o.counted))
	o.out, o.outAt, o.running = h.ending(o.since, at, o.Ahead), at, nil
	cut := o.out == blocked && o.disturbed(at)
	if cut {
		o.out = unclear
	}
	e := entry{vgpu: r.vgpu, group: r.group, span: span{min(o.settled, at), at}, sure: o.out == preempted, rested: r.rested}
	r.last, r.waits, r.blocked, r.lap = at, o.out == preempted || cut, o.out == blocked, o.lap
	r.burst += max(0, at-o.since-o.out.saving())
	switch o.out {
	case unclear:
		r.whole = false
	case preempted:
		h.cuts++
		r.cuts++
		e.usage.Preemptions = 1
	case blocked:
		if r.whole && r.cuts < manyCuts { // else others may be in it, of which nobody could tell that they were over
			h.burst += float64(r.burst)
			h.blocks++
		}
		r.burst, r.cuts, r.whole = 0, 0, true
	}
	o.enter(e)
}

// ending tells how a run that began at some time ended. Who is on the engine for longer than a slice was alone for some of it, and maybe
// idle.
func (h *habit) ending(since, at, ahead time.Duration) ending {
	if h.row.Slot.Cycle > 0 {
		if on, _ := h.row.Slot.Phase(at - ahead); !on {
			return unclear
		}
	}
	ran, slice := at-since, h.slice
	if since < h.setting.to && h.former > 0 && ran < slice-slice/10 || since < h.setting.from { // the slice of before
		slice = h.former
	}
	switch {
	case ran > slice+slice/10+savePreempt+saveYield:
		return unclear
	case ran >= slice-slice/10+saveYield: // the hardware's slice is rounded down by up to 1/128
		return preempted
	}
	return blocked
}

// applyTime is the most that guards need to set what a row says, if they do not tell.
const applyTime = 5 * time.Millisecond

// Seen tells what a vGPU did until the time of the last Add. A group without a run for idle has no work, unless it waits for its turn.
func (o *Observer) Seen(vgpu string, idle time.Duration) Seen {
	h := o.habit(vgpu)
	s := Seen{Ran: h.ran, Burst: unending, Cuts: h.cuts / max(1, o.passed) * float64(time.Second)}
	for _, r := range h.runners {
		if !r.resting && (o.counted-r.last < idle || r.waits && o.counted-r.last < patience) {
			s.Busy++
			if r.cuts >= manyCuts || h.blocks <= 0.25 {
				s.Endless++
			}
		}
	}
	// Less than one block a habitTime is none: work of any length ends some time.
	if h.blocks > 0.25 {
		s.Burst = min(unending, max(time.Duration(h.burst/h.blocks), time.Microsecond)) // less is none, and would be divided by
	}
	if h.ons > 0 {
		s.Gap = time.Duration(h.gap / h.ons)
	}
	return s
}

// Unseen is what is taken for a vGPU with n groups where no records tell: that it always has work.
func Unseen(n int) Seen { return Seen{Busy: n, Endless: n, Burst: unending} }

// Costs are what switches took of late.
func (o *Observer) Costs() Costs { return o.costs }
