// SPDX-License-Identifier: Apache-2.0

// Package runlist models the time of one GPU's graphics engine: channel groups (TSGs) that share it by timeslices, on one
// runlist. It is pure and deterministic: time is what the caller says, and everything between two calls is computed event
// by event.
//
// The rules are those seen on an H200 with driver 580.159.04:
//
//   - Groups take turns in the order of their creation. A group without work is passed over.
//
//   - A switch to another group takes SwitchCost, in which nobody computes, and PreemptCost more if who leaves has work left.
//
//   - A group is taken off at the end of its timeslice, in the middle of a kernel (compute-instruction-level preemption),
//     but only if another group has work then. A group that ran out of work gives way at once, and stays resident if nobody
//     else has work: when its own work comes it goes on without a switch, on a new timeslice.
//
//   - A paused group is taken off at once and keeps its work.
//
//   - A group whose context is not switched in the middle of a kernel (SetPreemptible; not measured) is taken off at the end of one.
//
//   - A timeslice that is set ends the turn at hand, and the driver takes up its list from the beginning (with Restart:
//     docs/internals/sched.md, "What calls cost").
//
// What the rules give beside what was measured, in percent of one process alone (kernels of 1.2 ms, 2 processes; the second figure is of
// another machine of the kind):
//
//	timeslice    0.5 ms   2.048 ms     10 ms
//	model        72.5     91.5         98.1
//	measured     69.5     90.5, 91.6   97.9
//
// for a client with a kernel of 0.137 ms every 2 ms beside a saturating one, median latency in µs and the rate of the
// other in percent:
//
//	timeslice of the other   1 µs         200 µs       2.048 ms     10 ms
//	model                    328, 80.4    457, 81.4    505, 81.8    8457, 95.6
//	measured                 323, 80.3    402, 81.0    453, 81.8    8561, 95.5
//
// and for a loop that launches a kernel, waits for it and launches the next, beside a saturating one: percent of the loop and of the other
// (TestSynchronous has them all). A loop with short kernels waits for a whole slice of the other between two of them, which is all
// that explains the table:
//
//	loop's kernel                  0.1 ms       1 ms         5 ms
//	model, slices of 2.048 ms      4.1, 83.0    29.7, 60.8   40.9, 50.3
//	measured                       4.0, 83.1    29.5, 61.1   40.8, 50.7
//	model, slices of 10 ms         1.0, 96.0    8.8, 88.3    32.6, 65.3
//	measured                       0.9, 95.9    8.7, 88.4    32.3, 65.7
//
// Not modelled: that caches and TLBs are cold after a switch, and that a switch takes longer the more state the kernel has
// on the chip; the rounding of timeslices to 8 bits and a scale; other engines and
// their runlists; spatial sharing inside a group (MPS); the time that a control takes (a pause 584 µs, a resume 304 µs on
// the H200: whoever calls has to wait for it).
package runlist

import (
	"container/heap"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// Defaults of Config and of a new group.
const (
	// DefaultSwitchCost and DefaultPreemptCost are an H200's. Two processes that saturate it lose 0.19 ms (91.6 % with 2.048 ms) to 0.215 ms a
	// switch. Beside a loop with kernels of 0.1 ms, where one of two switches is no preemption, every round of the same two takes 0.32 ms
	// more than slice and kernel, whatever the slice is (1, 2, 2.048, 4 and 10 ms: 0.32, 0.32, 0.32, 0.32, 0.33).
	DefaultSwitchCost  = 130 * time.Microsecond
	DefaultPreemptCost = 60 * time.Microsecond
	// DefaultTimeslice is RM's (kfifoChannelGroupGetDefaultTimeslice_GV100: 128 << 3 units of about a microsecond).
	DefaultTimeslice = 1024 * time.Microsecond
	// DefaultHistory is how many switch records are kept.
	DefaultHistory = 1 << 16
)

// Bounds of a timeslice: a unit, and 255 << 15 units (runlist_ram in NVIDIA's open Tegra driver). SetTimeslice clamps.
const (
	MinTimeslice = 1024 * time.Nanosecond
	MaxTimeslice = 255 << 15 * MinTimeslice
)

// forever is later than any event.
const forever = time.Duration(1 << 62)

// Config is the engine's. Zero values mean the defaults.
type Config struct {
	SwitchCost  time.Duration // negative: switches are free
	PreemptCost time.Duration // 0 beside a SwitchCost: none
	Restart     bool          // SetTimeslice ends the turn at hand, and the next is the first group's
	Overrun     time.Duration // a slice is longer than was set by a part in so many; 0: it is not (H200: 50)
	History     int           // switch records kept, ≥ 2
}

// Totals says where the engine's time went; the sum is Now.
type Totals struct {
	Busy      time.Duration `json:"busy"`      // computing
	Switching time.Duration `json:"switching"` // between two groups
	Idle      time.Duration `json:"idle"`
}

// Load is the time that the driver's samples have the engine busy for: a switch is load, too (H200, 580.159.04: 94 to 134 µs of it).
func (t Totals) Load() time.Duration { return t.Busy + t.Switching }

// Runlist is one graphics engine. It is not safe for concurrent use.
type Runlist struct {
	cost    time.Duration
	preempt time.Duration
	restart bool
	overrun time.Duration
	now     time.Duration
	totals  Totals
	seq     uint64

	ready  []*TSG // have work and are not paused; by seq
	timers timers // groups with an arrival or the end of a gap ahead, soonest first

	// At most one of them is set. Neither: nobody's context is on the engine.
	resident *TSG // its context is on the engine
	target   *TSG // being switched in until switchEnd
	// turn is the seq of the last resident: whoever comes after it is next.
	turn      uint64
	preempted bool // who left last had work left
	switchEnd time.Duration
	// The resident's slice. A group with nobody else to run gets one after the other; roll brings this up to date.
	sliceStart, sliceLen time.Duration

	history history
}

// New makes an engine at time 0 with no groups.
func New(cfg Config) *Runlist {
	r := &Runlist{cost: cfg.SwitchCost, preempt: max(cfg.PreemptCost, 0), restart: cfg.Restart, overrun: cfg.Overrun,
		history: history{size: cfg.History}}
	if r.cost == 0 && r.preempt == 0 {
		r.cost, r.preempt = DefaultSwitchCost, DefaultPreemptCost
	}
	r.cost = max(r.cost, 0)
	if r.history.size == 0 {
		r.history.size = DefaultHistory
	}
	r.history.size = max(r.history.size, 2)
	return r
}

// Add puts a new group at the end of the runlist, with DefaultTimeslice and no work. pid and context are for the switch
// records.
func (r *Runlist) Add(pid int, context uint32) *TSG {
	r.seq++
	return &TSG{r: r, seq: r.seq, pid: pid, context: context, timeslice: DefaultTimeslice, since: r.now, timer: -1}
}

// Now is the time up to which everything has been computed.
func (r *Runlist) Now() time.Duration { return r.now }

// Totals is the engine's time until Now.
func (r *Runlist) Totals() Totals { return r.totals }

// Running is the group that computes now, nil if none does.
func (r *Runlist) Running() *TSG {
	if r.resident != nil && r.resident.ready {
		return r.resident
	}
	return nil
}

// Switches returns the switch records from number since on (0 is the first), at most limit of them (0: all), and the
// number to ask for next. lost: some of them are not kept any more, or since is a number that was never given out.
func (r *Runlist) Switches(since uint64, limit int) (records []sched.Switch, next uint64, lost bool) {
	return r.history.recordsSince(since, limit)
}

// Next is the time of the next event: a switch, the end of a slice, an arrival, the end of a piece of work. False: nothing
// happens until somebody calls a method. Kernels inside a piece of work of several are no events.
func (r *Runlist) Next() (time.Duration, bool) {
	at := forever
	if len(r.timers) > 0 {
		at = r.timers[0].wake()
	}
	if r.target != nil {
		at = min(at, r.switchEnd)
	} else if t := r.Running(); t != nil {
		at = min(at, r.now+t.queue[0].rest(forever-r.now))
		if len(r.ready) > 1 {
			at = min(at, r.sliceEnd())
		}
	}
	return at, at < forever
}

// Advance computes everything until now. A time before Now changes nothing.
func (r *Runlist) Advance(now time.Duration) {
	for {
		at, ok := r.Next()
		if !ok || at > now {
			break
		}
		r.elapse(at)
		for len(r.timers) > 0 && r.timers[0].wake() <= r.now {
			r.timers[0].fire()
		}
		r.schedule()
	}
	r.elapse(now)
}

// elapse moves the time, in which nothing happens but work being done.
func (r *Runlist) elapse(to time.Duration) {
	dt := to - r.now
	if dt <= 0 {
		return
	}
	t := r.Running()
	r.now = to
	switch {
	case t != nil:
		r.totals.Busy += dt
		t.compute(to-dt, dt)
	case r.target != nil:
		r.totals.Switching += dt
	default:
		r.totals.Idle += dt
	}
}

// schedule decides what the engine does from now on. It is called after every change.
func (r *Runlist) schedule() {
	for {
		switch {
		case r.target != nil && !r.target.ready:
			r.target = nil // paused or gone during the switch: the time is lost
		case r.target != nil && r.now < r.switchEnd:
			return
		case r.target != nil:
			r.arrive()
		case r.resident != nil && r.resident.ready:
			if len(r.ready) < 2 {
				return
			}
			r.roll()
			if r.now < r.sliceEnd() {
				return
			}
			r.leave()
		case len(r.ready) == 0:
			r.preempted = false // whose state was saved long before anybody comes
			return              // an idle resident stays
		default:
			if r.resident != nil {
				r.leave()
			}
			r.target = r.after(r.turn)
			r.switchEnd = r.now + r.cost
			if r.preempted {
				r.switchEnd += r.preempt
			}
		}
	}
}

// begin takes up the list from the beginning. Who is the first in it has another slice, without a switch; who has the engine for itself
// keeps it.
func (r *Runlist) begin() {
	r.turn = 0
	switch {
	case len(r.ready) < 2:
	case r.target != nil:
		r.target = nil // the time of its switch is lost
	case r.resident == r.ready[0]:
		r.turn = r.resident.seq
		r.slice()
	case r.resident != nil:
		r.leave()
	}
	r.schedule()
}

// arrive ends a switch.
func (r *Runlist) arrive() {
	t := r.target
	r.resident, r.target, r.turn = t, nil, t.seq
	t.account.Switches++
	t.mark()
	r.slice()
	r.record(t, true, r.now)
}

// leave takes the resident off.
func (r *Runlist) leave() {
	t := r.resident
	r.resident, r.preempted = nil, t.pending()
	if r.preempted {
		t.account.Preemptions++
	}
	t.mark()
	saved := r.now + time.Duration(saving*float64(r.cost))
	if r.preempted {
		saved += r.preempt
	}
	r.record(t, false, saved)
}

// saving is the part of SwitchCost for which a context is on the engine, as records tell, after its work: until its state is saved. All of
// PreemptCost is. (H200: 83 µs between two records, whoever leaves.)
const saving = 47. / 130

func (r *Runlist) record(t *TSG, on bool, at time.Duration) {
	r.history.add(sched.Switch{At: at, PID: t.pid, Context: t.context, On: on})
}

// after is the first group with work behind number turn, in a circle.
func (r *Runlist) after(turn uint64) *TSG {
	i, _ := r.find(turn + 1)
	return r.ready[i%len(r.ready)]
}

func (r *Runlist) find(seq uint64) (int, bool) {
	return slices.BinarySearchFunc(r.ready, seq, func(t *TSG, seq uint64) int {
		switch {
		case t.seq < seq:
			return -1
		case t.seq > seq:
			return 1
		}
		return 0
	})
}

// slice starts a slice of the resident.
func (r *Runlist) slice() {
	r.sliceStart, r.sliceLen = r.now, r.length(r.resident)
}

// length is that of a group's slices.
func (r *Runlist) length(t *TSG) time.Duration {
	if r.overrun > 0 {
		return t.timeslice + t.timeslice/r.overrun
	}
	return t.timeslice
}

// sliceEnd is when the resident, which has work, may be taken off.
func (r *Runlist) sliceEnd() time.Duration {
	end := r.sliceStart + r.sliceLen
	if b := &r.resident.queue[0]; r.resident.whole && end <= r.now && b.left < b.Length {
		return r.now + b.left
	}
	return end
}

// roll makes the slice the one that now lies in, its end included: the resident had the engine for itself.
func (r *Runlist) roll() {
	if r.now <= r.sliceStart+r.sliceLen || r.resident.whole {
		return
	}
	r.sliceStart += r.sliceLen
	r.sliceLen = r.length(r.resident)
	r.sliceStart += (r.now - r.sliceStart - 1) / r.sliceLen * r.sliceLen
}

// history is a ring of switch records.
type history struct {
	size    int
	records []sched.Switch // record n is at n % size
	next    uint64
}

func (h *history) add(s sched.Switch) {
	if len(h.records) < h.size {
		h.records = append(h.records, s)
	} else {
		h.records[h.next%uint64(h.size)] = s
	}
	h.next++
}

func (h *history) recordsSince(since uint64, limit int) ([]sched.Switch, uint64, bool) {
	if since > h.next {
		return nil, h.next, true
	}
	first := h.next - uint64(len(h.records))
	lost := since < first
	since = max(since, first)
	n := h.next - since
	if limit > 0 {
		n = min(n, uint64(limit))
	}
	list := make([]sched.Switch, 0, n)
	for i := since; i < since+n; i++ {
		list = append(list, h.records[i%uint64(h.size)])
	}
	return list, since + n, lost
}

// timers is a heap of groups by wake.
type timers []*TSG

var _ heap.Interface = (*timers)(nil)

func (h timers) Len() int { return len(h) }
func (h timers) Less(i, j int) bool {
	a, b := h[i].wake(), h[j].wake()
	return a < b || a == b && h[i].seq < h[j].seq
}
func (h timers) Swap(i, j int) { h[i], h[j] = h[j], h[i]; h[i].timer, h[j].timer = i, j }
func (h *timers) Push(x any) {
	t := x.(*TSG)
	t.timer = len(*h)
	*h = append(*h, t)
}
func (h *timers) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	t.timer = -1
	return t
}
