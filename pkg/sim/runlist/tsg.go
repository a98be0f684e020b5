// SPDX-License-Identifier: Apache-2.0

package runlist

import (
	"container/heap"
	"slices"
	"time"
)

// Work is a piece of work: kernels one after the other.
type Work struct {
	Length time.Duration // of one kernel, when it has the engine for itself; at least 1 ns
	Count  int           // 0: a closed loop without end
	// Gap is what the CPU needs after a kernel before it submits the next. Without one the engine finds the next kernel
	// in the queue.
	Gap time.Duration
}

// Arrivals is an open loop: each call tells when the next request of one kernel comes, and its length. Times do not
// decrease; one that has passed counts as now. False: no further request.
type Arrivals func() (at, length time.Duration, ok bool)

// Account is what became of a group's work.
type Account struct {
	GPUTime time.Duration `json:"gpuTime"` // computing
	Waiting time.Duration `json:"waiting"` // had work and did not compute; Held included
	Held    time.Duration `json:"held"`    // had work and was paused
	Kernels uint64        `json:"kernels"` // done
	// Switches counts how often the group came on the engine, Preemptions how often it was taken off with work left.
	Switches    uint64 `json:"switches"`
	Preemptions uint64 `json:"preemptions"`
}

// TSG is a channel group on the runlist. After Remove it has no effect.
type TSG struct {
	r         *Runlist
	seq       uint64
	pid       int
	context   uint32
	timeslice time.Duration
	paused    bool
	removed   bool
	whole     bool // kernels are not preempted

	queue []batch
	// gapEnd is when the first of the queue goes on, 0 if it is not in a gap.
	gapEnd time.Duration
	source Arrivals
	// The request that source announced last.
	arrival, arrivalLength time.Duration
	onDone                 func(arrived, ended time.Duration)

	ready   bool // in r.ready
	timer   int  // index in r.timers, -1 if not there
	account Account
	state   state
	since   time.Duration // of state
}

// state is what time counts as; computing is counted where it happens.
type state uint8

const (
	idle state = iota
	computing
	waiting
	held
)

// batch is what is left of a Work.
type batch struct {
	Work
	endless bool
	left    time.Duration // of the kernel in front
	arrived time.Duration // the kernel in front
}

// rest is how long b computes until something but the next kernel of b comes, at most limit.
func (b *batch) rest(limit time.Duration) time.Duration {
	switch {
	case b.Gap > 0:
		return min(b.left, limit)
	case b.endless || b.left >= limit || time.Duration(b.Count-1) > (limit-b.left)/b.Length:
		return limit
	}
	return b.left + time.Duration(b.Count-1)*b.Length
}

// PID is the process that made the group.
func (t *TSG) PID() int { return t.pid }

// Context is the group's number in the switch records.
func (t *TSG) Context() uint32 { return t.context }

// Pending reports whether the group has work, queued or under way. In a Gap it has none.
func (t *TSG) Pending() bool { return t.pending() }

func (t *TSG) pending() bool { return len(t.queue) > 0 && t.gapEnd == 0 }

// Queued is the number of pieces of work that are not done.
func (t *TSG) Queued() int { return len(t.queue) }

// Paused reports whether the group is paused.
func (t *TSG) Paused() bool { return t.paused }

// Timeslice is what SetTimeslice set.
func (t *TSG) Timeslice() time.Duration { return t.timeslice }

// SetTimeslice sets the timeslice, between MinTimeslice and MaxTimeslice. A slice that has begun keeps its length, unless it ends
// (Restart).
func (t *TSG) SetTimeslice(d time.Duration) {
	if t.r.Running() == t {
		t.r.roll() // slices that passed had the old length
	}
	t.timeslice = min(max(d, MinTimeslice), MaxTimeslice)
	if t.r.restart {
		t.r.begin()
	}
}

// SetPreemptible says whether the group's kernels are preempted at the end of a timeslice, as they are at first.
func (t *TSG) SetPreemptible(on bool) {
	t.whole = !on
	t.changed()
}

// Submit adds work behind what is queued. A loop without end is over when other work is submitted behind it: its kernel
// ends if it has begun. Work without end ends an open loop.
func (t *TSG) Submit(w Work) {
	if t.removed {
		return
	}
	w.Length, w.Gap, w.Count = max(w.Length, 1), max(w.Gap, 0), max(w.Count, 0)
	t.endLoop()
	b := batch{Work: w, endless: w.Count == 0, left: w.Length, arrived: t.r.now}
	if b.endless {
		t.source = nil
	}
	t.queue = append(t.queue, b)
	t.changed()
}

// Arrive starts an open loop, instead of the one before and of a loop without end. What is queued stays.
func (t *TSG) Arrive(source Arrivals) {
	if t.removed {
		return
	}
	t.endLoop()
	t.source = source
	t.announce()
	t.changed()
}

// Stop drops all work, the kernel under way too, and ends loops.
func (t *TSG) Stop() {
	t.queue, t.gapEnd, t.source = nil, 0, nil
	t.changed()
}

// OnDone has f called for every kernel that ends, with the times of its arrival and its end. f must not call the
// runlist's methods: it is in the middle of its work, and Now is ahead of the kernel's end.
func (t *TSG) OnDone(f func(arrived, ended time.Duration)) { t.onDone = f }

// Pause takes the group off the engine at once and keeps it off; its work stays queued.
func (t *TSG) Pause() {
	if t.paused || t.removed {
		return
	}
	t.paused = true
	t.evict()
	t.changed()
}

// Resume ends a pause: the group waits for its turn.
func (t *TSG) Resume() {
	t.paused = false
	t.changed()
}

// Preempt ends the group's slice: it is taken off, and comes back when it is its turn.
func (t *TSG) Preempt() {
	t.evict()
	t.changed()
}

// Remove takes the group off the runlist for good and drops its work.
func (t *TSG) Remove() {
	t.removed = true
	t.queue, t.gapEnd, t.source = nil, 0, nil
	t.evict()
	t.changed()
}

// Account is the group's account until the runlist's Now.
func (t *TSG) Account() Account {
	t.accountTime()
	return t.account
}

func (t *TSG) evict() {
	if t.r.resident == t {
		t.r.leave()
	}
}

// endLoop ends a loop without end, which can only be the last of the queue.
func (t *TSG) endLoop() {
	last := len(t.queue) - 1
	if last < 0 || !t.queue[last].endless {
		return
	}
	b := &t.queue[last]
	if b.left < b.Length {
		b.endless, b.Count, b.Gap = false, 1, 0
		return
	}
	t.queue = t.queue[:last]
	if last == 0 {
		t.gapEnd = 0
	}
}

// announce takes the next request of the open loop.
func (t *TSG) announce() {
	if t.source == nil {
		return
	}
	at, length, ok := t.source()
	if !ok {
		t.source = nil
		return
	}
	t.arrival, t.arrivalLength = max(at, t.r.now), max(length, 1)
}

// wake is when fire has something to do.
func (t *TSG) wake() time.Duration {
	at := forever
	if t.gapEnd > 0 {
		at = t.gapEnd
	}
	if t.source != nil {
		at = min(at, t.arrival)
	}
	return at
}

// fire ends a gap, and queues a request of the open loop.
func (t *TSG) fire() {
	now := t.r.now
	if t.gapEnd > 0 && t.gapEnd <= now {
		t.gapEnd = 0
		t.queue[0].arrived = now
	}
	if t.source != nil && t.arrival <= now {
		t.queue = append(t.queue, batch{Work: Work{Length: t.arrivalLength, Count: 1}, left: t.arrivalLength, arrived: t.arrival})
		t.announce()
	}
	t.update()
}

// compute does the work of dt from start on, which is never more than the rest of the first batch.
func (t *TSG) compute(start, dt time.Duration) {
	t.account.GPUTime += dt
	b := &t.queue[0]
	for at := start; ; {
		if dt < b.left {
			b.left -= dt
			return
		}
		dt, at = dt-b.left, at+b.left
		n := 1
		if t.onDone != nil {
			t.onDone(b.arrived, at)
		} else if more := dt / b.Length; b.Gap == 0 && more > 0 {
			if !b.endless {
				more = min(more, time.Duration(b.Count-1))
			}
			n, dt, at = n+int(more), dt-more*b.Length, at+more*b.Length
		}
		t.account.Kernels += uint64(n)
		if !b.endless {
			b.Count -= n
		}
		if !b.endless && b.Count == 0 {
			t.queue = t.queue[1:]
			break
		}
		b.left = b.Length
		if b.endless {
			b.arrived = at
		}
		if b.Gap > 0 {
			t.gapEnd = at + b.Gap
			break
		}
	}
	t.update()
}

// changed is called after every change from outside.
func (t *TSG) changed() {
	t.update()
	t.r.schedule()
}

// update brings the group's places in the runlist's lists and its account up to date.
func (t *TSG) update() {
	r := t.r
	if want := t.pending() && !t.paused; want != t.ready {
		i, _ := r.find(t.seq)
		if want {
			r.ready = slices.Insert(r.ready, i, t)
			if r.resident == t {
				r.slice()
			}
		} else {
			r.ready = slices.Delete(r.ready, i, i+1)
		}
		t.ready = want
	}
	switch wants := t.wake() < forever; {
	case wants && t.timer >= 0:
		heap.Fix(&r.timers, t.timer)
	case wants:
		heap.Push(&r.timers, t)
	case t.timer >= 0:
		heap.Remove(&r.timers, t.timer)
	}
	t.mark()
}

// mark notes from now on what the group's time is.
func (t *TSG) mark() {
	t.accountTime()
	switch {
	case !t.pending():
		t.state = idle
	case t.paused:
		t.state = held
	case t.r.resident == t:
		t.state = computing
	default:
		t.state = waiting
	}
}

// accountTime counts the time since the last mark.
func (t *TSG) accountTime() {
	dt := t.r.now - t.since
	t.since = t.r.now
	switch t.state {
	case held:
		t.account.Held += dt
		t.account.Waiting += dt
	case waiting:
		t.account.Waiting += dt
	}
}
