// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// says is an arbiter of the test's own: it writes a row for each guard that has said something.
func says(t *testing.T, runDir string, row func(g peerpage.Guest) sched.Verdict) {
	t.Helper()
	p, err := peerpage.Open(runDir, "GPU-0")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range p.Guests(nil) {
		v := row(g)
		p.Put(g, &v, true)
	}
}

// TestSlices: each group has the timeslice that the arbiter says, on the file of its client; what somebody changes is set again, while the
// container has work; at rest nobody looks.
func TestSlices(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	now := c.Now()
	c.Now = func() time.Duration { return now }
	x.joinPage(peerpage.Join)
	group, second := fakeName{fakeClient, workGroup}, fakeName{fakeClient + 1, workGroup}
	step := func(again time.Duration, want ...fakeName) {
		t.Helper()
		if got := x.step(now); got != again {
			t.Errorf("it looks again after %v, want %v", got, again)
		}
		if got := c.d.took(); !slices.Equal(got, want) {
			t.Errorf("timeslices were set for %#x, want %#x", got, want)
		}
	}
	slice := func(slice time.Duration, busy int) {
		says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
			return sched.Verdict{Row: sched.Row{Slice: slice}, Until: now + time.Hour, Adopted: g.Adopted, Busy: busy, Exact: true}
		})
	}
	step(sched.VerifyEvery, group) // nobody knows whether it has work
	if got := c.d.slices[group]; got != c.timing.Base {
		t.Errorf("%v before anybody said anything", got)
	}
	slice(3*time.Millisecond, 1)
	step(sched.VerifyEvery, group)
	if got := c.d.slices[group]; got != 3*time.Millisecond {
		t.Errorf("%v", got)
	}
	asked := c.d.asked
	now += sched.VerifyEvery
	if step(sched.VerifyEvery); c.d.asked != asked+1 {
		t.Error("the driver is not asked")
	}
	now += sched.VerifyEvery / 2
	if step(sched.VerifyEvery); c.d.asked != asked+1 {
		t.Error("the driver is asked all the time")
	}
	c.d.slices[group] = sched.NativeTimeslice
	now += sched.VerifyEvery
	step(sched.VerifyEvery, group)
	if c.d.slices[group] != 3*time.Millisecond || x.drift != 1 {
		t.Errorf("%v, drift %d", c.d.slices[group], x.drift)
	}
	c.client(fakeClient + 1)
	step(sched.VerifyEvery, second)
	c.free(fakeClient+1, workGroup)
	step(sched.VerifyEvery)
	asked = c.d.asked
	slice(3*time.Millisecond, 0)
	step(0)
	now += time.Minute
	if step(0); c.d.asked != asked {
		t.Error("the driver is asked at rest")
	}
}

// TestTold: the arbiter hears what the ledger says of the container, and what it has on the GPU.
func TestTold(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	x.joinPage(peerpage.Join)
	c.set(func(p *sched.Plan) {
		p.Card = sched.Card{Policy: sched.PolicyWeight, MaxInst: 20, PrioRatio: 99}
		p.Share, p.Cap, p.Slot = sched.Share{Weight: 9, Percent: 30}, 300, sched.Slot{On: 30, Cycle: 100}
	})
	x.step(c.Now())
	told := 0
	says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
		told++
		plan, since := x.local.Plan()
		if g.Plan != plan || g.Adopted != since || g.Contexts != 1 || !slices.Equal(g.PIDs, []int{os.Getpid()}) {
			t.Errorf("%+v", g)
		}
		return sched.Verdict{}
	})
	c.free(fakeClient, workGroup)
	x.step(c.Now())
	says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
		told++
		if g.Contexts != 0 || len(g.PIDs) != 0 {
			t.Errorf("%+v", g)
		}
		return sched.Verdict{}
	})
	if told != 2 {
		t.Errorf("told %d times", told)
	}
}

// TestSettingTold: the arbiter is told of each timeslice before it is set and when it has been, also of those that a call of the
// container's sets.
func TestSettingTold(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	now := 10 * time.Second
	c.Now = func() time.Duration { return now }
	page, err := peerpage.Open(c.Config.RunDir, "GPU-0")
	if err != nil {
		t.Fatal(err)
	}
	told := func() sched.Setting {
		s, _ := page.Setting(page.Guests(nil)[0], time.Hour)
		return s
	}
	control := func(object, cmd uint32, p []byte) (uint32, syscall.Errno) {
		now += 300 * time.Microsecond
		return c.d.control(fakeName{fakeClient, object}, cmd, p), 0
	}
	c.Started(0, c.Groups(0), control)
	x.joinPage(peerpage.Join)
	x.step(now)
	base, begin := c.timing.Base, 10*time.Second
	if want := (sched.Setting{Slice: base, From: begin, To: now}); told() != want {
		t.Errorf("of what was set before it was on the page: %+v, want %+v", told(), want)
	}
	now += time.Second
	begin = now
	x.setSlice(func(uint32, uint32, []byte) (uint32, syscall.Errno) {
		if s := told(); s.From != begin || s.To >= s.From || s.Slice != 7*time.Millisecond {
			t.Errorf("while it is set: %+v", s)
		}
		now += 300 * time.Microsecond
		return 0, 0
	}, Group{}, 7*time.Millisecond)
	x.setSlice(control, Group{}, 7*time.Millisecond) // the next group of the container
	if want := (sched.Setting{Slice: 7 * time.Millisecond, From: begin, To: now}); told() != want {
		t.Errorf("two one after the other: %+v, want %+v", told(), want)
	}
	set := told()
	now += sched.VerifyEvery
	c.d.slices[fakeName{fakeClient, workGroup}] = sched.NativeTimeslice
	if x.step(now); told() == set {
		t.Error("what somebody else changed is set again, and not told")
	}
	set = told()
	now += sched.VerifyEvery
	if x.step(now); told() != set {
		t.Error("what is only read is told")
	}
}

// TestRung: a row is heard of at once, and turns are carried out.
func TestRung(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.Begin()
	c.Made(0)
	heard := func() (n int) {
		says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict { n++; return sched.Verdict{} })
		return n
	}
	eventually(t, "a guard's part", func() bool { return heard() == 1 })
	turn := sched.Slot{Start: time.Hour, On: time.Hour, Cycle: 100000 * time.Hour}
	rule := func(slot sched.Slot) {
		says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
			return sched.Verdict{Row: sched.Row{Slice: 7 * time.Millisecond, Slot: slot}, Until: c.Now() + time.Hour, Adopted: g.Adopted, Busy: 1}
		})
	}
	turn.Cycle = time.Minute
	turn.Start, turn.On = 59*time.Second, time.Second
	if on, _ := turn.Phase(c.Now()); on {
		turn.Start = time.Second // the other end of a cycle
	}
	rule(turn)
	eventually(t, "its timeslice", func() bool {
		c.d.mu.Lock()
		defer c.d.mu.Unlock()
		return c.d.slices[fakeName{fakeClient, workGroup}] == 7*time.Millisecond
	})
	eventually(t, "off", func() bool { return c.d.offNow() == len(names) })
	rule(sched.Slot{})
	eventually(t, "on", func() bool { return c.d.offNow() == 0 })
}

// TestAlone: without an arbiter timeslices stay, and that is said, once.
func TestAlone(t *testing.T) {
	c := newFakeContainer(t, 1)
	warned := 0
	c.Warn = func(string) { warned++ }
	x := c.gpu()
	x.joinPage(peerpage.Join)
	now := c.Now()
	c.Now = func() time.Duration { return now }
	x.step(now)
	says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
		return sched.Verdict{Row: sched.Row{Slice: 7 * time.Millisecond}, Until: now + time.Second, Adopted: g.Adopted, Busy: 1}
	})
	for range 10 {
		if again := x.step(now); again != sched.VerifyEvery {
			t.Errorf("it looks again after %v", again)
		}
		if ruled := c.Status(0).Ruled; ruled != (now < x.local.Verdict().Until) {
			t.Errorf("ruled: %v", ruled)
		}
		now += sched.VerifyEvery
	}
	if warned != 1 || c.d.slices[fakeName{fakeClient, workGroup}] != 7*time.Millisecond {
		t.Errorf("%d warnings, %v", warned, c.d.slices)
	}
}

// TestOtherChannels: others are told how many channels a container has, also of those that it had before it joined.
func TestOtherChannels(t *testing.T) {
	dir := t.TempDir()
	a, b := newFakeContainer(t, 1), newFakeContainer(t, 1)
	if _, ok := a.OtherChannels(0); ok {
		t.Error("somebody is known before there is a page")
	}
	for _, c := range []*fakeContainer{a, b} {
		c.Config.RunDir = dir
		c.TellChannels(0, 7)
		c.gpu().joinPage(peerpage.Join)
	}
	if n, ok := a.OtherChannels(0); n != 7 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	b.TellChannels(0, 9)
	if n, _ := a.OtherChannels(0); n != 9 {
		t.Errorf("%d", n)
	}
	b.gpu().leavePage()
	b.TellChannels(0, 11)
	if n, _ := a.OtherChannels(0); n != 0 {
		t.Errorf("%d of who has left", n)
	}
}

// TestStarted: a new group has its timeslice when its first work can come, by the call of the container's own.
func TestStarted(t *testing.T) {
	c := newFakeContainer(t, 1)
	groups, calls := c.Groups(0), 0
	control := func(object, cmd uint32, p []byte) (uint32, syscall.Errno) {
		calls++
		return c.d.control(fakeName{fakeClient, object}, cmd, p), 0
	}
	c.Started(0, groups, control)
	group := fakeName{fakeClient, workGroup}
	if got := c.d.took(); !slices.Equal(got, []fakeName{group}) || c.d.slices[group] != c.timing.Base || calls != 1 {
		t.Errorf("%#x, %v, %d calls", got, c.d.slices[group], calls)
	}
	if x := c.gpu(); !x.active.Load() || len(x.kick) == 0 || len(c.pausesKick) == 0 {
		t.Error("nobody looks after the GPU")
	}
	c.Started(0, groups, control)
	if got := c.d.took(); len(got) > 0 {
		t.Errorf("set again: %#x", got)
	}
}

// TestAdopted: whom a change concerns is told of it, and of nothing else.
func TestAdopted(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	c.set(func(*sched.Plan) {})
	if len(x.kick) > 0 || len(c.pausesKick) > 0 {
		t.Error("nothing new is a change")
	}
	c.set(func(p *sched.Plan) { p.Share.Weight = 3 })
	if len(x.kick) == 0 || len(c.pausesKick) == 0 || c.Plan(0).Share.Weight != 3 {
		t.Error("nobody is told of the change")
	}
	c.Adopt(7, sched.Plan{}) // a GPU that is not shared
}

// TestHold: the guard's own pause and that of the ledger do not undo each other.
func TestHold(t *testing.T) {
	c := newFakeContainer(t, 2)
	c.Hold(true)
	if !c.Plan(0).Suspended || !c.Plan(1).Suspended || len(c.pausesKick) == 0 {
		t.Error("not on all GPUs, or nobody is told")
	}
	c.set(func(p *sched.Plan) { p.Suspended = true })
	if c.Hold(false); !c.Plan(0).Suspended || c.Plan(1).Suspended {
		t.Error("a pause by the ledger ends with the guard's")
	}
}

// TestAwaitLast: what the arbiter counts when it has heard that no context is left is in the account; where nobody decides, or the
// container had no context, nothing is waited for.
func TestAwaitLast(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	used := func(d time.Duration) (a sched.Account) {
		a.GPUTime, a.Waiting, a.Granted = d, 2*d, 3*d
		return a
	}
	waits := 0
	c.Sleep = func(time.Duration) {
		waits++
		says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
			if g.Contexts != 0 || len(g.PIDs) != 0 {
				t.Errorf("%+v", g)
			}
			return sched.Verdict{At: c.Now(), Until: c.Now() + time.Hour, Exact: true, Account: used(6 * time.Second)}
		})
	}
	await := func(what string, want int) {
		t.Helper()
		if c.AwaitLast(); waits != want {
			t.Errorf("%s: %d waits, want %d", what, waits, want)
		}
	}
	await("no context", 0)
	x.joinPage(peerpage.Join)
	x.step(c.Now())
	says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
		return sched.Verdict{At: c.Now(), Until: c.Now() + time.Hour, Busy: 1, Exact: true, Account: used(4 * time.Second)}
	})
	await("nobody decides", 0)
	p, err := peerpage.Open(c.Config.RunDir, "GPU-0")
	if err == nil {
		err = p.Lead()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range c.Groups(0) {
		c.free(g.Client.Handle(), g.Handle)
	}
	await("one that decides", 1)
	if times, exact := c.Looked(0); times != (Times{Used: 6 * time.Second, Waiting: 12 * time.Second, Entitled: 18 * time.Second}) || !exact {
		t.Errorf("%v, %v", times, exact)
	}
}
