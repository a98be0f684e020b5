package sched

import (
	"math/rand/v2"
	"testing"
	"time"
)

// log makes records the way a GPU does: one group after the other.
type log struct {
	records []Switch
	in      Switch
	at      time.Duration
}

// on switches a process's group in at a time.
func (l *log) on(at time.Duration, pid int, context uint32) *log {
	l.in, l.at = Switch{At: at, PID: pid, Context: context, On: true}, at
	l.records = append(l.records, l.in)
	return l
}

// off switches out who is in.
func (l *log) off(at time.Duration) *log {
	l.in.At, l.in.On, l.at = at, false, at
	l.records = append(l.records, l.in)
	return l
}

// run is a switch in and, after a time, out; 0.1 ms after what was before.
func (l *log) run(d time.Duration, pid int, context uint32) *log {
	return l.on(l.at+100*us, pid, context).off(l.at + d)
}

// take hands the records over and forgets them.
func (l *log) take() []Switch {
	records := l.records
	l.records = nil
	return records
}

// own are the container's processes: those below 100.
func own(pid int) bool { return pid < 100 }

const slice = 10 * ms

func newTracker() *Tracker {
	t := NewTracker()
	t.SetSlice(slice)
	return t
}

func TestTrackerUsage(t *testing.T) {
	for _, c := range []struct {
		name   string
		log    func(l *log)
		now    time.Duration
		want   Usage
		card   time.Duration
		busy   int // within 50 ms
		onNow  bool
		onFrom time.Duration
	}{
		{name: "nothing", log: func(l *log) {}, now: time.Second},
		{name: "a run", log: func(l *log) { l.on(ms, 1, 7).off(5 * ms) }, now: 20 * ms,
			want: Usage{GPUTime: 4 * ms, Switches: 1}, card: 4 * ms, busy: 1},
		{name: "a run, long ago", log: func(l *log) { l.on(ms, 1, 7).off(5 * ms) }, now: 56 * ms,
			want: Usage{GPUTime: 4 * ms, Switches: 1}, card: 4 * ms},
		{name: "under way", log: func(l *log) { l.on(ms, 1, 7) }, now: 900 * ms,
			want: Usage{GPUTime: 899 * ms, Switches: 1}, card: 899 * ms, busy: 1, onNow: true, onFrom: ms},
		{name: "the GPU's clock behind the newest record", log: func(l *log) { l.on(5*ms, 1, 7) }, now: ms,
			want: Usage{Switches: 1}, busy: 1, onNow: true, onFrom: 5 * ms},
		{name: "somebody else", log: func(l *log) { l.on(ms, 100, 7).off(5*ms).on(6*ms, 100, 7) }, now: 10 * ms,
			card: 8 * ms},
		{name: "the same context of another process", log: func(l *log) { l.run(ms, 1, 7).run(ms, 2, 7).run(ms, 100, 7) }, now: 10 * ms,
			want: Usage{GPUTime: 2 * ms, Switches: 2}, card: 3 * ms, busy: 2},
		{name: "three groups of one process", log: func(l *log) { l.run(ms, 1, 7).run(ms, 1, 8).run(ms, 1, 9) }, now: 10 * ms,
			want: Usage{GPUTime: 3 * ms, Switches: 3}, card: 3 * ms, busy: 3},
		{name: "at the end of its slice", log: func(l *log) { l.run(slice, 1, 7).run(slice, 100, 7).run(2*ms, 1, 7) }, now: 30 * ms,
			want: Usage{GPUTime: 12 * ms, Waiting: 10200 * us, Switches: 2, Preemptions: 1}, card: 22 * ms, busy: 1},
		{name: "a slice that the hardware rounds down", log: func(l *log) { l.run(slice-slice/12, 1, 7) }, now: 20 * ms,
			want: Usage{GPUTime: slice - slice/12, Switches: 1, Preemptions: 1}, card: slice - slice/12, busy: 1},
		{name: "done before its slice ends", log: func(l *log) { l.run(8*ms, 1, 7).run(slice, 100, 7).run(8*ms, 1, 7) }, now: 30 * ms,
			want: Usage{GPUTime: 16 * ms, Switches: 2}, card: 26 * ms, busy: 1},
		{name: "a switch out without a switch in", log: func(l *log) {
			l.records = append(l.records, Switch{At: ms, PID: 1, Context: 7})
			l.on(2*ms, 1, 7).off(3 * ms)
			l.records = append(l.records, Switch{At: 4 * ms, PID: 1, Context: 7})
		}, now: 5 * ms, want: Usage{GPUTime: ms, Switches: 1}, card: ms, busy: 1},
		{name: "a switch in without a switch out", log: func(l *log) { l.on(ms, 1, 7).on(4*ms, 100, 7).off(6 * ms) }, now: 6 * ms,
			want: Usage{Switches: 1}, card: 2 * ms, busy: 1},
		{name: "another one's switch out", log: func(l *log) {
			l.on(ms, 1, 7)
			l.records = append(l.records, Switch{At: 4 * ms, PID: 100, Context: 7})
		}, now: 900 * ms, want: Usage{Switches: 1}, card: 3 * ms},
		{name: "waiting for long, and busy all the time", log: func(l *log) { l.run(slice, 1, 7).on(11*ms, 100, 7) }, now: 900 * ms,
			want: Usage{GPUTime: slice, Switches: 1, Preemptions: 1}, card: slice + 889*ms, busy: 1},
	} {
		l := &log{}
		c.log(l)
		// One batch, and one record at a time, are the same.
		for _, batch := range []int{1000, 1} {
			tr := newTracker()
			for i := 0; i < len(l.records); i += batch {
				tr.Add(l.records[i:min(i+batch, len(l.records))], own, false)
			}
			got, card := tr.Usage(c.now)
			busy := tr.Busy(c.now, 50*ms)
			from, on := tr.Running()
			if got != c.want || card != c.card || busy != c.busy || on != c.onNow || on && from != c.onFrom {
				t.Errorf("%s, in batches of %d:\ngot  %+v, all %v, busy %d, running %v since %v\nwant %+v, all %v, busy %d, running %v since %v",
					c.name, batch, got, card, busy, on, from, c.want, c.card, c.busy, c.onNow, c.onFrom)
			}
		}
	}
}

// TestTrackerPaused: a pause switches out too, which is no preemption, and what follows no waiting.
func TestTrackerPaused(t *testing.T) {
	tr, l := newTracker(), &log{}
	l.run(slice, 1, 7).run(slice, 1, 8)
	tr.Add(l.take(), own, false)
	tr.Paused(tr.Last())
	if got := tr.Busy(90*ms, 50*ms); got != 0 {
		t.Errorf("%d groups busy after a pause of 70 ms", got)
	}
	l.at = time.Second
	tr.Add(l.run(ms, 1, 7).take(), own, false)
	if got, _ := tr.Usage(l.at); got.Waiting != 0 || got.Preemptions != 2 {
		t.Errorf("a pause counts as waiting: %+v", got)
	}
}

// TestTrackerLost: what ran while records were lost is not counted, nor are groups taken to wait for the engine because
// they did before.
func TestTrackerLost(t *testing.T) {
	tr, l := newTracker(), &log{}
	tr.Add(l.run(slice, 1, 7).run(slice, 1, 8).on(21*ms, 1, 9).take(), own, false)
	l.at = time.Second
	tr.Add(nil, own, true)
	if _, on := tr.Running(); on {
		t.Error("a group is on the engine, after records were lost")
	}
	got, card := tr.Usage(time.Second)
	if want := (Usage{GPUTime: 2 * slice, Switches: 3, Preemptions: 2}); got != want || card != 2*slice {
		t.Errorf("got %+v, all %v; want %+v", got, card, want)
	}
	if got := tr.Busy(time.Second, 50*ms); got != 0 {
		t.Errorf("%d groups busy that were not seen for a second", got)
	}
	// The first record after the gap is a switch out; then they go on.
	l.records = append(l.records, Switch{At: time.Second, PID: 1, Context: 7})
	tr.Add(l.run(ms, 1, 7).run(ms, 1, 8).take(), own, false)
	got, card = tr.Usage(l.at)
	if want := (Usage{GPUTime: 2*slice + 2*ms, Switches: 5, Preemptions: 2}); got != want || card != 2*slice+2*ms {
		t.Errorf("got %+v, all %v; want %+v", got, card, want)
	}
	if got := tr.Busy(l.at, 50*ms); got != 2 {
		t.Errorf("%d groups busy, want 2", got)
	}
}

// TestTrackerClockBack: a clock that is set back makes no negative times, and hides nothing that comes after.
func TestTrackerClockBack(t *testing.T) {
	tr, l := newTracker(), &log{at: time.Hour}
	tr.Add(l.run(slice, 1, 7).run(slice, 100, 7).run(slice, 1, 8).on(time.Hour+50*ms, 1, 9).take(), own, false)
	before, _ := tr.Usage(l.at)
	l.at = 1550 * ms
	tr.Add(l.run(slice, 1, 7).take(), own, false)
	after, _ := tr.Usage(l.at)
	if after.Waiting < before.Waiting || after.GPUTime != before.GPUTime+slice {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if got := tr.Busy(l.at+time.Minute, 50*ms); got != 0 {
		t.Errorf("%d groups busy a minute later", got)
	}
	if got := tr.Utilization(l.at, time.Second); got < 5 || got > 15 {
		t.Errorf("utilization %v, want about 1 %%", got)
	}
	// A little is no new time.
	back := l.at
	tr.Add(l.on(back-ms, 1, 7).off(back-us).on(back, 1, 8).off(back+ms).take(), own, false)
	if got, _ := tr.Usage(l.at); got.GPUTime != after.GPUTime+ms || got.Switches != after.Switches+2 {
		t.Errorf("before %+v, after two records that came too late and a run of 1 ms %+v", after, got)
	}
	if got := tr.Busy(l.at, 50*ms); got != 2 {
		t.Errorf("%d groups busy, want 2", got)
	}
	if tr.Last() != l.at {
		t.Errorf("the newest record is of %v, want %v", tr.Last(), l.at)
	}
}

// TestTrackerGone: a process ends in the middle of its run; when the switch out is read, nobody owns the process any more.
func TestTrackerGone(t *testing.T) {
	tr, l := newTracker(), &log{}
	tr.Add(l.on(ms, 1, 7).take(), own, false)
	l.records = append(l.records, Switch{At: 5 * ms, PID: 1, Context: 7})
	tr.Add(l.take(), func(int) bool { return false }, false)
	if _, on := tr.Running(); on {
		t.Error("it is still on the engine")
	}
	if got := tr.Busy(time.Second, 50*ms); got != 0 {
		t.Errorf("%d groups busy", got)
	}
	if got, card := tr.Usage(time.Second); got.GPUTime != 4*ms || card != 4*ms {
		t.Errorf("%+v, all %v; want 4 ms", got, card)
	}
	if got := tr.Utilization(10*time.Second, time.Second); got != 0 {
		t.Errorf("utilization %v", got)
	}
}

// TestTrackerIdleResident: a context that has no work stays on the engine until somebody else comes. That looks like a slice
// that ended, and must not pass for work left.
func TestTrackerIdleResident(t *testing.T) {
	for _, other := range []int{1, 100} {
		tr, l := newTracker(), &log{}
		tr.Add(l.on(ms, 1, 7).take(), own, false)
		if got := tr.Busy(time.Second, 200*ms); got != 1 {
			t.Errorf("resident: %d groups busy, want 1: nobody can tell", got)
		}
		// Others take turns.
		l.off(time.Second)
		for l.at < time.Second+300*ms {
			l.run(slice, other, 8).run(slice, 100, 9)
		}
		tr.Add(l.take(), own, false)
		want := 1 // the other
		if other == 100 {
			want = 0
		}
		if got := tr.Busy(l.at, 200*ms); got != want {
			t.Errorf("beside process %d, 300 ms after the idle context left: %d groups busy, want %d", other, got, want)
		}
		// It has work again: it did not wait for it.
		before, _ := tr.Usage(l.at)
		tr.Add(l.run(ms, 1, 7).take(), own, false)
		if after, _ := tr.Usage(l.at); after.Waiting != before.Waiting {
			t.Errorf("beside process %d: idle time of %v counts as waiting", other, after.Waiting-before.Waiting)
		}
	}

	// One other works for an hour, alone: whoever is out has no work.
	tr, l := newTracker(), &log{}
	tr.Add(l.on(ms, 1, 7).off(time.Second).on(time.Second+us, 100, 8).take(), own, false)
	if got := tr.Busy(time.Minute, 200*ms); got != 0 {
		t.Errorf("a minute later: %d groups busy", got)
	}
	l.records = append(l.records, Switch{At: time.Hour, PID: 100, Context: 8})
	l.at = time.Hour
	tr.Add(l.run(ms, 1, 7).take(), own, false)
	if got, _ := tr.Usage(l.at); got.Waiting != 0 {
		t.Errorf("an hour without work counts as waiting for %v", got.Waiting)
	}
}

// TestTrackerWaits: a group with work is busy for as long as others have their turns before it, also when that is long.
func TestTrackerWaits(t *testing.T) {
	tr, l := newTracker(), &log{}
	for range 3 {
		l.run(slice, 1, 7)
		for i := range 9 {
			l.run(100*ms, 100+i, 1)
		}
		tr.Add(l.take(), own, false)
		if got := tr.Busy(l.at, 50*ms); got != 1 {
			t.Errorf("after a round of 0.9 s: %d groups busy, want 1", got)
		}
	}
	got, _ := tr.Usage(l.at)
	if want := 2 * (9*100*ms + 10*100*us); got.Waiting != want || got.Preemptions != 3 {
		t.Errorf("waited %v with %d preemptions, want %v and 3", got.Waiting, got.Preemptions, want)
	}
}

func TestUtilization(t *testing.T) {
	// In turns of 10 ms: 1 of n is the container's. Looked at often, the figure is right and steady.
	for _, n := range []int{1, 2, 4, 10} {
		tr, l := newTracker(), &log{at: time.Hour + 37*ms}
		for i := range 400 {
			pid := 100
			if i%n == 0 {
				pid = 1
			}
			l.on(l.at, pid, uint32(pid)).off(l.at + slice)
			tr.Add(l.take(), own, false)
			if i < 100 {
				continue
			}
			// A turn more or less in 0.9 s is 1.1 %.
			if got, want := tr.Utilization(l.at, time.Second), Whole/Permille(n); got < want-12 || got > want+12 {
				t.Errorf("1 of %d turns, at %v: %v", n, l.at, got)
			}
		}
	}
	// A run that does not end.
	tr, l := newTracker(), &log{}
	tr.Add(l.on(time.Hour, 1, 7).take(), own, false)
	for d, want := range map[time.Duration]Permille{0: 0, 500 * ms: 500, 5 * time.Second: Whole} {
		if got := tr.Utilization(time.Hour+d, time.Second); got < want-want/8 || got > want+want/8 {
			t.Errorf("%v after a run began: %v, want %v", d, got, want)
		}
	}
	// It ends, and is forgotten a second later.
	l.off(time.Hour + 5*time.Second)
	tr.Add(l.take(), own, false)
	for d, want := range map[time.Duration]Permille{0: Whole, 500 * ms: 500, ms + time.Second: 0} {
		if got := tr.Utilization(l.at+d, time.Second); got < want-want/8 || got > want+want/8 {
			t.Errorf("%v after a run ended: %v, want %v", d, got, want)
		}
	}
	// A GPU whose clock just began.
	tr, l = newTracker(), &log{}
	if got := tr.Utilization(0, time.Second); got != 0 {
		t.Errorf("at the clock's 0: %v", got)
	}
	tr.Add(l.on(0, 1, 7).take(), own, false)
	if got := tr.Utilization(0, time.Second); got != 0 {
		t.Errorf("at the clock's 0, on the engine: %v", got)
	}
}

// TestTrackerMemory: contexts and processes that come and go, of the container and of others, are forgotten.
func TestTrackerMemory(t *testing.T) {
	tr, l := newTracker(), &log{}
	for i := range 20000 {
		l.run(ms, i%100, uint32(i)).run(ms, 100+i, uint32(i))
		if i%15 == 14 {
			tr.Add(l.take(), own, false)
		}
	}
	// 10 s of them are 5000.
	if len(tr.groups) > 6000 {
		t.Errorf("%d groups remembered", len(tr.groups))
	}
	if len(tr.seen) > maxSeen {
		t.Errorf("%d groups in a round", len(tr.seen))
	}
	// Then few.
	for i := range 20000 {
		if l.run(ms, 1, uint32(i%10)); i%15 == 14 {
			tr.Add(l.take(), own, false)
		}
	}
	if len(tr.groups) > 128 {
		t.Errorf("%d groups remembered", len(tr.groups))
	}
}

// TestTrackerAnything: no records, however wrong, make times negative or larger than the time that passed.
func TestTrackerAnything(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		tr := newTracker()
		at := time.Duration(0)
		passed := time.Duration(0)
		var before Usage
		for range 300 {
			var records []Switch
			for range rnd.IntN(4) {
				d := time.Duration(rnd.Int64N(int64(20 * ms)))
				if rnd.IntN(40) == 0 {
					d = -d
				}
				at += d
				passed += max(d, 0)
				records = append(records, Switch{At: at, PID: 95 + rnd.IntN(10), Context: uint32(rnd.IntN(2)), On: rnd.IntN(2) == 0})
			}
			tr.Add(records, func(pid int) bool { return own(pid) && rnd.IntN(20) > 0 }, rnd.IntN(20) == 0)
			if rnd.IntN(30) == 0 {
				tr.Paused(tr.Last())
			}
			now, card := tr.Usage(at)
			switch {
			case now.GPUTime < 0 || now.GPUTime > card || card > passed,
				now.Waiting < before.Waiting || now.Waiting > 10*passed,
				tr.Utilization(at, time.Second) < 0 || tr.Utilization(at, time.Second) > Whole,
				tr.Busy(at, 50*ms) < 0 || tr.Busy(at, 50*ms) > 10:
				t.Fatalf("seed %d, after %v: %+v before, %+v now, all %v, utilization %v, busy %d", seed, passed, before, now, card, tr.Utilization(at, time.Second), tr.Busy(at, 50*ms))
			}
			before = now
		}
	}
}

func BenchmarkTracker(b *testing.B) {
	tr, l := newTracker(), &log{}
	for i := range 1000 {
		l.run(ms, 50+i%100, uint32(i%7))
	}
	records := l.take()
	for b.Loop() {
		tr.Add(records, own, true)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(records)), "ns/record")
}
