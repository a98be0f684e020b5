package sched

import "time"

// Tracker follows the context switches of one GPU and tells what one container used of it.
//
// It counts a context as running from its switch in to its switch out. One that nobody else competes with stays switched in
// when its work is done; Quiet says for how long nothing happened, so that a caller can ask for the GPU's load then.
type Tracker struct {
	groups map[group]*use
	slice  time.Duration

	last    time.Duration // the newest record
	running *use          // who is on the engine, if it is the container's
	on      bool          // somebody is on the engine
	since   time.Duration // since when

	total   Usage
	card    time.Duration // GPU time of everybody
	buckets [10]bucket
}

type group struct {
	pid     int
	context uint32
}

// use is one channel group's.
type use struct {
	on, off   time.Duration // last switch in and out
	preempted bool          // was switched out with work left
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
func NewTracker() *Tracker { return &Tracker{groups: map[group]*use{}} }

// SetSlice tells the timeslice in effect: a run of that length that somebody else follows counts as a preemption.
func (t *Tracker) SetSlice(slice time.Duration) { t.slice = slice }

// Add takes records in the order of the GPU; mine says which processes are the container's. lost says that records are missing
// before the first one: what ran meanwhile is not counted.
func (t *Tracker) Add(records []Switch, mine func(pid int) bool, lost bool) {
	if lost {
		t.on, t.running = false, nil
	}
	for _, r := range records {
		if r.At < t.last { // never seen; a clock that was set back must not make negative times
			t.on, t.running = false, nil
		}
		t.last = r.At
		if !r.On {
			t.out(r, mine)
			continue
		}
		t.on, t.since, t.running = true, r.At, nil
		if !mine(r.PID) {
			continue
		}
		u := t.groups[group{r.PID, r.Context}]
		if u == nil {
			u = &use{}
			t.groups[group{r.PID, r.Context}] = u
		}
		if u.preempted {
			t.total.Waiting += r.At - u.off
			u.preempted = false
		}
		u.on = r.At
		t.running = u
		t.total.Switches++
	}
	t.forget()
}

func (t *Tracker) out(r Switch, mine func(pid int) bool) {
	if !t.on {
		return
	}
	t.on = false
	ran := r.At - t.since
	t.card += ran
	u := t.groups[group{r.PID, r.Context}]
	if u == nil || u != t.running || !mine(r.PID) {
		return
	}
	t.running = nil
	u.off = r.At
	t.use(t.since, r.At)
	// The hardware's slice is rounded down by up to 1/128, and the switch itself takes part of it.
	if t.slice > 0 && ran >= t.slice-t.slice/10 {
		u.preempted = true
		t.total.Preemptions++
	}
}

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

// Paused notes that the container's channels were stopped: what is switched out then has work left, perhaps, but was not
// preempted.
func (t *Tracker) Paused() {
	for _, u := range t.groups {
		u.preempted = false
	}
}

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

// Busy counts the container's groups that ran within idle before now, a time of the GPU's clock.
func (t *Tracker) Busy(now, idle time.Duration) int {
	n := 0
	for _, u := range t.groups {
		if u == t.running || now-max(u.on, u.off) < idle || u.preempted && now-u.off < forgetAfter {
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
	return own, card
}

// Utilization is the part of the last second before now that the container was on the engine.
func (t *Tracker) Utilization(now time.Duration) Permille {
	window := bucketLength * time.Duration(len(t.buckets))
	first := int64((now-window)/bucketLength) + 1
	used := time.Duration(0)
	for _, b := range t.buckets {
		if b.n >= first {
			used += b.used
		}
	}
	if t.running != nil && now > t.since {
		used += now - max(t.since, now-window)
	}
	return min(Permille(used*time.Duration(Whole)/window), Whole)
}
