package sched

import (
	"testing"
	"time"
)

const localNow = 1000 * time.Second

// newTestLocal is one with records.
func newTestLocal() *Local {
	l := NewLocal(DefaultTiming(), Card{Policy: PolicyPreempt, MaxInst: 20, PrioRatio: DefaultPrioRatio})
	l.Exact = true
	return l
}

func TestDamped(t *testing.T) {
	const ms = time.Millisecond
	busy := []Tenant{{Busy: 1}, {Busy: 1}, {Busy: 1}, {Busy: 1}, {Busy: 1}, {Busy: 1}}
	for _, c := range []struct {
		name   string
		set    func(l *Local)
		slice  time.Duration // has 20 ms
		others []Tenant
		want   time.Duration
	}{
		{"the same", nil, 20 * ms, busy, 20 * ms},
		{"nearly the same", nil, 20*ms + 20*ms/40, busy, 20 * ms},
		{"nearly the same, right after a change", func(l *Local) { l.settling = localNow + time.Hour }, 20*ms + 20*ms/40, busy, 20*ms + 20*ms/40},
		{"much less", nil, 15 * ms, busy, 15 * ms},
		{"a little less", nil, 18 * ms, busy, 20 * ms},
		{"more", nil, 40 * ms, busy, 20 * ms},
		{"more, alone", func(l *Local) { l.damping.since = localNow }, 40 * ms, nil, 40 * ms},
		{"more for long", func(l *Local) { l.damping.since = localNow - dampTime }, 40 * ms, busy, 40 * ms},
		{"more, because of its own groups", func(l *Local) { l.busy = 1 }, 40 * ms, busy, 40 * ms},
		{"more, after a change", func(l *Local) { l.settling = localNow + time.Hour }, 40 * ms, busy, 40 * ms},
		{"less than the shortest", nil, 200 * time.Microsecond, busy, 200 * time.Microsecond},
		{"back from less than the shortest", func(l *Local) { l.slice = 200 * time.Microsecond }, 20 * ms, busy, 20 * ms},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTestLocal()
			l.slice, l.busy, l.damping.busy = 20*ms, 2, 2
			if c.set != nil {
				c.set(l)
			}
			if got := l.damped(localNow, c.slice, c.others); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// TestDebt keeps the account of a cap of 10 %.
func TestDebt(t *testing.T) {
	const ms = time.Millisecond
	p := Plan{Cap: 100, Slot: Slot{On: 10 * ms, Cycle: 100 * ms}}
	var d debt
	now, gpuTime, exact := localNow, time.Duration(0), true
	// pass lets time go by, of which the container uses some.
	pass := func(passed, used time.Duration) (owes bool) {
		now, gpuTime = now+passed, gpuTime+used
		return d.spend(now, gpuTime, 0, p, exact)
	}
	budget := func(want time.Duration) {
		t.Helper()
		if d.budget != want {
			t.Errorf("budget %v, want %v", d.budget, want)
		}
	}
	off := func(want time.Duration) {
		t.Helper()
		if wait := max(0, d.owing-now); wait != want {
			t.Errorf("off for another %v, want %v", wait, want)
		}
	}
	pass(50*ms, 50*ms) // what was before counts for nobody
	budget(0)
	pass(100*ms, 10*ms)
	budget(0)
	pass(100*ms, 0)
	budget(10 * ms)
	pass(time.Hour, 0)
	budget(10 * ms) // no more than a slot is saved
	if pass(20*ms, 20*ms) {
		t.Error("a debt of less than a slot")
	}
	budget(-8 * ms)
	off(0)
	if !pass(10*ms, 10*ms) {
		t.Error("nobody is told")
	}
	budget(-17 * ms)
	off(170 * ms)
	was := d.owing
	if pass(100*ms, 20*ms) || d.owing != was {
		t.Error("a debt is collected twice")
	}
	budget(-27 * ms)
	d.owing = 0
	pass(10*time.Second, 10*time.Second)
	budget(-maxDebt * 10 * ms)
	off(maxOff - 100*ms) // not for longer than what is taken for a hang
	exact = false
	pass(100*ms, 100*ms)
	budget(0)
	off(0)
	exact, d.budget, d.owing, p.Cap = true, -50*ms, now+time.Hour, 0
	pass(100*ms, 100*ms)
	budget(0)
	off(0)

	// What a pause itself takes is no debt.
	p.Cap = 100
	pass(0, 0)
	now, gpuTime = now+100*ms, gpuTime+10*ms+2*pauseCost
	d.spend(now, gpuTime, 2, p, exact)
	budget(0)
}

// TestWait: a container without work costs no processor time.
func TestWait(t *testing.T) {
	for _, c := range []struct {
		name   string
		set    func(l *Local)
		groups int
		want   time.Duration
	}{
		{"nothing there", nil, 0, 0},
		{"no work", func(l *Local) { l.Told, l.read = true, localNow }, 3, 0},
		{"no work, no way to hear of it", nil, 3, 3 * Tick},
		{"no work, no records", func(l *Local) { l.Exact = false }, 3, 0},
		{"no records", func(l *Local) { l.Exact, l.busy = false, 1 }, 1, VerifyEvery},
		{"work", func(l *Local) { l.busy, l.read = 1, localNow }, 1, Tick},
		{"alone for long", func(l *Local) { l.busy, l.read, l.patience = 1, localNow-settled, settled }, 1, 2 * settled},
		{"alone for very long", func(l *Local) { l.busy, l.read, l.patience = 1, localNow-time.Minute, maxPatience }, 1, maxPatience},
		{"alone, capped", func(l *Local) { l.busy, l.read, l.plan.Cap = 1, localNow-settled, 100 }, 1, Tick},
		{"alone, in turns", func(l *Local) { l.busy, l.read, l.turn = 1, localNow-settled, Slot{On: 1, Cycle: 2} }, 1, Tick},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTestLocal()
			if c.set != nil {
				c.set(l)
			}
			if got := l.Wait(localNow, c.groups); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// TestLook counts the groups with work: those that run or ran, and those that are too new to have.
func TestLook(t *testing.T) {
	l := newTestLocal()
	v := View{Now: localNow, Mine: func(pid int) bool { return pid == 1 }}
	look := func(groups, want int) {
		t.Helper()
		v.Groups = groups
		if l.Look(v); l.busy != want {
			t.Errorf("%d with work, want %d", l.busy, want)
		}
		v.Records = nil
	}
	l.Exact = false
	look(3, 3) // nobody tells
	l.Exact = true
	look(3, 0)
	l.Made(v.Now)
	look(3, 1)
	v.Now += idleAfter + time.Second
	look(3, 0)
	v.Records = []Switch{{At: time.Second, PID: 1, Context: 1, On: true}, {At: time.Second + 1, PID: 1, Context: 1},
		{At: time.Second + 2, PID: 2, Context: 1, On: true}, {At: time.Second + 3, PID: 2, Context: 1}}
	look(3, 1) // the other one is somebody else's
	look(0, 0) // its groups are gone
	look(3, 1)
	l.plan.Suspended, v.Off = true, true
	look(3, 0)
	l.plan.Suspended, v.Off = false, false
	v.Now += idleAfter
	look(3, 0)
	for range 2 * maxYoung {
		l.Made(v.Now)
	}
	if n := len(l.young); n != maxYoung {
		t.Errorf("%d are remembered", n)
	}
}

// TestResident: of who is alone the driver's samples tell whether it has work.
func TestResident(t *testing.T) {
	l := newTestLocal()
	load, known := time.Duration(0), true
	v := View{Now: localNow, Groups: 1, Mine: func(int) bool { return true }, Records: []Switch{{At: time.Minute, PID: 1, On: true}},
		Load: func(from, to time.Duration) (time.Duration, bool) { return min(load, to-from), known }}
	look := func(after time.Duration, busy int, used time.Duration) {
		t.Helper()
		v.Now += after
		l.Look(v)
		v.Records = nil
		if got := l.Account(v.Now).GPUTime; l.busy != busy || got != used {
			t.Errorf("busy %d, want %d; used %v, want %v", l.busy, busy, got, used)
		}
	}
	look(0, 1, 0)
	look(settled/2, 1, settled/2) // too soon to ask
	known = false
	look(settled/2, 1, settled) // the driver does not say
	known, load = true, time.Hour
	look(time.Second, 1, 2*time.Second)
	load = 0
	look(time.Second, 0, 2*time.Second+SamplePeriod/2)
}

func TestOff(t *testing.T) {
	const ms = time.Millisecond
	slot := Slot{Start: 20 * ms, On: 30 * ms, Cycle: 100 * ms}
	capped := Plan{Cap: 300, Slot: slot}
	suspended := capped
	suspended.Suspended = true
	base := localNow // a cycle begins
	for _, c := range []struct {
		name  string
		set   func(l *Local)
		begun bool
		now   time.Duration
		off   bool
		until time.Duration
	}{
		{"no cap", func(l *Local) { l.busy = 1 }, true, base, false, 0},
		{"not begun", func(l *Local) { l.plan.Suspended = true }, false, base, true, 0},
		{"not begun, capped", func(l *Local) { l.plan = capped }, false, base, false, 0},
		{"suspended", func(l *Local) { l.plan = Plan{Suspended: true} }, true, base, true, 0},
		{"suspended, in its slot", func(l *Local) { l.plan = suspended; l.busy = 1 }, true, base + 30*ms, true, 0},
		{"before its slot", func(l *Local) { l.plan = capped; l.busy = 1 }, true, base + 10*ms, true, base + 20*ms},
		{"its slot begins", func(l *Local) { l.plan = capped; l.busy = 1 }, true, base + 20*ms, false, base + 50*ms},
		{"within", func(l *Local) { l.plan = capped; l.busy = 1 }, true, base + 49*ms, false, base + 50*ms},
		{"after", func(l *Local) { l.plan = capped; l.busy = 1 }, true, base + 50*ms, true, base + 120*ms},
		{"without work", func(l *Local) { l.plan = capped; l.worked = base - capIdle - ms }, true, base, false, 0},
		{"without work for a moment", func(l *Local) { l.plan = capped; l.worked = base - capIdle + ms }, true, base, true, base + 20*ms},
		{"nobody knows whether there is work", func(l *Local) { l.plan = capped; l.Exact = false }, true, base, true, base + 20*ms},
		{"in debt", func(l *Local) { l.plan = capped; l.busy = 1; l.debt.owing = base + 400*ms }, true, base + 30*ms, true, base + 400*ms},
		{"its debt is over", func(l *Local) { l.plan = capped; l.busy = 1; l.debt.owing = base + 30*ms }, true, base + 30*ms, false, base + 50*ms},
		{"a debt of a cap that is no more", func(l *Local) { l.busy = 1; l.debt.owing = base + 400*ms }, true, base, false, 0},
		{"takes turns", func(l *Local) { l.turn = slot; l.busy = 1 }, true, base, true, base + 20*ms},
		{"takes turns, its own", func(l *Local) { l.turn = slot; l.busy = 1 }, true, base + 20*ms, false, base + 50*ms},
		{"takes turns, without work", func(l *Local) { l.turn = slot; l.worked = base }, true, base, false, 0},
		{"a cap goes before turns", func(l *Local) { l.plan = capped; l.turn = Slot{On: 1, Cycle: 2}; l.busy = 1 }, true, base, true, base + 20*ms},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTestLocal()
			c.set(l)
			if off, until := l.Off(c.now, c.begun); off != c.off || until != c.until {
				t.Errorf("off %v until %v, want %v until %v", off, until-base, c.off, c.until-base)
			}
		})
	}
}

// TestAdopt: a plan is in force at once, and a change is told once. A pause by the ledger and one by the guard do not undo each other.
func TestAdopt(t *testing.T) {
	l := newTestLocal()
	p := l.Plan()
	if l.Adopt(p, localNow) || l.settling != 0 {
		t.Error("nothing new is a change")
	}
	p.Share.Weight = 3
	if !l.Adopt(p, localNow) || l.Plan() != p || l.settling <= localNow {
		t.Errorf("%+v", l.Plan())
	}
	for _, c := range []struct{ paused, held bool }{{false, true}, {true, true}, {true, false}, {false, false}} {
		p.Suspended = c.paused
		l.Hold(c.held, localNow)
		l.Adopt(p, localNow)
		if l.Plan().Suspended != (c.paused || c.held) {
			t.Errorf("%+v, adopted last: %+v", c, l.Plan())
		}
		l.Hold(c.held, localNow)
		if l.Plan().Suspended != (c.paused || c.held) {
			t.Errorf("%+v: %+v", c, l.Plan())
		}
	}
}

// TestGranted: a share is counted of the time in which the GPU worked, a cap of all time.
func TestGranted(t *testing.T) {
	self := Tenant{Share: Share{Weight: 1}, Busy: 1}
	others := []Tenant{{Share: Share{Weight: 3}, Busy: 1}, {Share: Share{Weight: 5}}}
	var a account
	a.grant(localNow, time.Minute, 0, self, others) // what was before
	for _, c := range []struct {
		limit Permille
		busy  int
		want  time.Duration
	}{{0, 1, time.Second}, {0, 0, 0}, {100, 1, 800 * time.Millisecond}, {100, 0, 0}} {
		before := a.Granted
		self.Busy = c.busy
		a.grant(a.at+8*time.Second, a.card+4*time.Second, c.limit, self, others)
		if got := a.Granted - before; got != c.want {
			t.Errorf("%v with work in %d groups: %v, want %v", c.limit, c.busy, got, c.want)
		}
	}
}
