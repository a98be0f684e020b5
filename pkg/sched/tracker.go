package sched

import "time"

// Tracker follows the context switches of one GPU and tells what one container used of it.
//
// It counts a context as running from its switch in to its switch out. One that nobody else competes with stays switched in
// when its work is done; Running says since when, so that a caller can ask for the GPU's load then.
type Tracker struct {
	groups  map[group]*use
	slice   time.Duration
	former  time.Duration // slice before it was changed
	changed time.Duration

	last    time.Duration // the newest record
	running *use          // who is on the engine, if it is the container's
	on      bool          // somebody is on the engine
	since   time.Duration // since when

	lap  uint64             // counts rounds of all that have work
	seen map[group]struct{} // who was switched in during this one

	paused     time.Duration // when the channels were stopped last
	pausing    bool          // they ever were
	saturating bool
	endless    float64 // of the last runs, those that ended in a preemption
	total      Usage
	idle       time.Duration // of total.GPUTime and what runs now, without work
	card       time.Duration // GPU time of everybody
	buckets    [10]bucket
}

type group struct {
	pid     int
	context uint32
}

// use is one channel group's.
type use struct {
	on, off   time.Duration // last switch in and out
	preempted bool          // was switched out at the end of a timeslice, with work left unless it was an idle resident
	lap       uint64        // when it was switched out
}

// bucket is a tenth of a second.
type bucket struct {
	n    int64
	used time.Duration
}

const bucketLength = 100 * time.Millisecond

// Usage is what a container used of a GPU.
type Usage struct {
	GPUTime     time.Duration // on the engine
	Waiting     time.Duration // from a preemption to the next switch in
	Switches    uint64        // switches in
	Preemptions uint64        // switches out at the end of a timeslice
}

// NewTracker makes a tracker that has seen nothing.
func NewTracker() *Tracker {
	return &Tracker{groups: map[group]*use{}, seen: map[group]struct{}{}}
}

// SetSlice tells the timeslice in effect: a run of that length that somebody else follows counts as a preemption.
func (t *Tracker) SetSlice(slice time.Duration) {
	if slice != t.slice {
		t.former, t.changed, t.slice = t.slice, t.last, slice
	}
}

// Add takes records in the order of the GPU; mine says which processes are the container's. lost says that records are missing
// before the first one: what ran meanwhile is not counted.
func (t *Tracker) Add(records []Switch, mine func(pid int) bool, lost bool) {
	if lost {
		t.on, t.running = false, nil
		t.settle() // who waited then may have been served
	}
	for _, r := range records {
		// Never seen; a clock that was set back must not make negative times.
		switch back := t.last - r.At; {
		case back > time.Second:
			t.on, t.running = false, nil
			clear(t.groups)
			clear(t.buckets[:])
		case back > 0:
			r.At = t.last
		}
		t.last = r.At
		if !r.On {
			t.out(r)
			continue
		}
		g := group{r.PID, r.Context}
		t.on, t.since, t.running = true, r.At, nil
		t.turn(g)
		if !mine(r.PID) {
			continue
		}
		u := t.groups[g]
		if u == nil {
			u = &use{}
			t.groups[g] = u
		}
		if t.waits(u, r.At) {
			t.total.Waiting += r.At - u.off
		}
		u.preempted = false
		u.on = r.At
		t.running = u
		t.total.Switches++
	}
	t.forget()
}

// turn notes who is switched in. Groups with work have their turns one after the other: when one comes a second time, all of
// them came in between.
func (t *Tracker) turn(g group) {
	if _, again := t.seen[g]; again || len(t.seen) >= maxSeen {
		clear(t.seen)
		t.lap++
	}
	t.seen[g] = struct{}{}
}

const (
	// maxSeen bounds a round in which nobody comes again, of contexts that end before.
	maxSeen = 4096
	// patience is longer than a group with work ever waits for another's turn.
	patience = 2 * longest
)

// waits reports that a group has had work since it was switched out. An idle context that stayed on the engine until somebody
// else came looks preempted then; that it had no work shows when a whole round passes it over.
func (t *Tracker) waits(u *use, now time.Duration) bool {
	return u.preempted && t.lap-u.lap < 2 && now-u.off < patience
}

func (t *Tracker) out(r Switch) {
	if !t.on {
		return
	}
	ran, u := r.At-t.since, t.running
	t.on, t.running = false, nil
	t.card += ran
	if u == nil || u != t.groups[group{r.PID, r.Context}] {
		return
	}
	u.off, u.lap = r.At, t.lap
	t.use(t.since, r.At)
	// The hardware's slice is rounded down by up to 1/128, and the switch itself takes part of it.
	slice := t.slice
	if t.former > 0 && r.At-t.changed < changeTime {
		slice = min(slice, t.former)
	}
	stopped := t.pausing && r.At >= t.paused && r.At < t.paused+lateRecords
	switch {
	case stopped:
	case slice > 0 && ran >= slice-slice/10:
		u.preempted = true
		t.total.Preemptions++
		t.endless += (1 - t.endless) / runMemory
	case r.At-t.changed < changeTime: // to set a timeslice takes a group off the engine
	default:
		t.endless -= t.endless / runMemory
	}
	switch {
	case t.endless >= saturating:
		t.saturating = true
	case t.endless < saturating-0.25:
		t.saturating = false
	}
}

const (
	// changeTime is for how long after a change runs of the former timeslice's length are expected.
	changeTime = 500 * time.Millisecond
	// A container saturates the GPU when about four of five of its runs end in a preemption. Programs that launch many small kernels
	// are out of work for a moment now and then.
	runMemory  = 5
	saturating = 0.75
)

// Saturating reports that the container nearly always had more work than a timeslice's at a time.
func (t *Tracker) Saturating() bool { return t.saturating }

// use counts time on the engine.
func (t *Tracker) use(from, to time.Duration) {
	t.total.GPUTime += to - from
	for from = max(from, to-bucketLength*time.Duration(len(t.buckets))); from < to; {
		n := int64(from / bucketLength)
		end := min(to, time.Duration(n+1)*bucketLength)
		b := &t.buckets[n%int64(len(t.buckets))]
		if b.n != n {
			*b = bucket{n: n}
		}
		b.used += end - from
		from = end
	}
}

// Paused notes that the container's channels were stopped at a time of the GPU's clock: who waited for the engine waits for
// something else now, and who is switched out then was not preempted. The time may be early by as much as records are late.
func (t *Tracker) Paused(at time.Duration) {
	t.paused, t.pausing = at, true
	t.settle()
}

// lateRecords is how much later than a switch its record may arrive.
const lateRecords = 50 * time.Millisecond

func (t *Tracker) settle() {
	for _, u := range t.groups {
		u.preempted = false
	}
}

// Idle takes back time that was counted for a context which was switched in but had no work.
func (t *Tracker) Idle(d time.Duration) { t.idle += d }

// forgetAfter bounds the groups remembered: those of processes that are gone.
const forgetAfter = 10 * time.Second

func (t *Tracker) forget() {
	if len(t.groups) < 128 {
		return
	}
	for g, u := range t.groups {
		if u != t.running && t.last-max(u.on, u.off) > forgetAfter {
			delete(t.groups, g)
		}
	}
}

// Last is the time of the newest record on the GPU's clock.
func (t *Tracker) Last() time.Duration { return t.last }

// Busy counts the container's groups that ran within idle before now, a time of the GPU's clock, or wait for their turn.
func (t *Tracker) Busy(now, idle time.Duration) int {
	n := 0
	for _, u := range t.groups {
		if u == t.running || now-max(u.on, u.off) < idle || t.waits(u, now) {
			n++
		}
	}
	return n
}

// Running says since when one of the container's groups has been on the engine without a break; false: none is.
func (t *Tracker) Running() (since time.Duration, ok bool) { return t.since, t.running != nil }

// Usage is what the container used up to now, a time of the GPU's clock, and how much time all containers together did.
func (t *Tracker) Usage(now time.Duration) (own Usage, card time.Duration) {
	own, card = t.total, t.card
	if t.on && now > t.since {
		card += now - t.since
		if t.running != nil {
			own.GPUTime += now - t.since
		}
	}
	idle := min(t.idle, own.GPUTime)
	own.GPUTime -= idle
	card -= min(idle, card)
	return own, card
}

// Utilization is the part of a window before now, of 0.2 to 1 second, that the container was on the engine. The window begins
// with a whole tenth of a second, and so may be shorter by up to that.
func (t *Tracker) Utilization(now, window time.Duration) Permille {
	first := int64((now-window)/bucketLength) + 1
	begin := time.Duration(first) * bucketLength
	used := time.Duration(0)
	for _, b := range t.buckets {
		if b.n >= first {
			used += b.used
		}
	}
	if t.running != nil && now > t.since {
		used += now - max(t.since, begin)
	}
	return min(Permille(used*time.Duration(Whole)/(now-begin)), Whole)
}
