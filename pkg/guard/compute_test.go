package guard

import (
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestPlans: what the ledger says becomes the container's plan and limit.
func TestPlans(t *testing.T) {
	const gpu, other = "GPU-0", "GPU-9"
	card := func(p sched.Policy) map[string]sched.Card {
		return map[string]sched.Card{gpu: {Policy: p, MaxInst: 4, PrioRatio: 80}}
	}
	own := func(f func(v *ledger.VGPU)) ledger.Record {
		v := ledger.VGPU{UUID: gpu, Limit: quota.GiB, Weight: 1, Priority: quota.PriorityDefault}
		if f != nil {
			f(&v)
		}
		return ledger.Record{ID: "c0ffee", Nonce: "n", VGPUs: []ledger.VGPU{v}}
	}
	beside := func(weight, percent int) ledger.Record {
		return ledger.Record{ID: "another", Nonce: "m", VGPUs: []ledger.VGPU{{UUID: gpu, Limit: quota.GiB, Weight: weight, Percent: percent, Priority: quota.PriorityDefault}}}
	}
	paused := own(nil)
	paused.Paused = true
	restarted, elsewhere := own(func(v *ledger.VGPU) { v.Weight = 9 }), own(func(v *ledger.VGPU) { v.UUID, v.Weight = other, 9 })
	restarted.Nonce = "later"
	for _, c := range []struct {
		name      string
		records   []ledger.Record
		cards     map[string]sched.Card
		ignored   bool
		effective sched.Policy
		weight    int
		cap       sched.Permille
		suspended bool
		limit     quota.Bytes
	}{
		{"no card", []ledger.Record{own(nil)}, nil, false, sched.PolicyPreempt, 1, 0, false, quota.GiB},
		{"a weight", []ledger.Record{own(func(v *ledger.VGPU) { v.Weight = 3 })}, nil, false, sched.PolicyWeight, 3, 0, false, quota.GiB},
		{"another's weight", []ledger.Record{own(nil), beside(2, 0)}, card(sched.PolicyPreempt), false, sched.PolicyWeight, 1, 0, false, quota.GiB},
		{"no weight at all", []ledger.Record{own(func(v *ledger.VGPU) { v.Weight = 0 })}, nil, false, sched.PolicyPreempt, 1, 0, false, quota.GiB},
		{"fair", []ledger.Record{own(nil)}, card(sched.PolicyFair), false, sched.PolicyFair, 1, 250, false, quota.GiB},
		{"fixed", []ledger.Record{own(func(v *ledger.VGPU) { v.Weight = 2 })}, card(sched.PolicyFixed), false, sched.PolicyFixed, 2, 500, false, quota.GiB},
		{"a percentage", []ledger.Record{beside(1, 0), own(func(v *ledger.VGPU) { v.Percent = 30 })}, card(sched.PolicyPreempt), false, sched.PolicyPreempt, 1, 300, false, quota.GiB},
		{"soft", []ledger.Record{own(func(v *ledger.VGPU) { v.Percent = 30 })}, card(sched.PolicySoft), false, sched.PolicySoft, 1, 0, false, quota.GiB},
		{"native", []ledger.Record{own(nil)}, card(sched.PolicyNative), false, sched.PolicyNative, 1, 0, false, quota.GiB},
		{"paused", []ledger.Record{paused}, nil, false, sched.PolicyPreempt, 1, 0, true, quota.GiB},
		{"another limit", []ledger.Record{own(func(v *ledger.VGPU) { v.Limit = 3 * quota.GiB })}, nil, false, sched.PolicyPreempt, 1, 0, false, 3 * quota.GiB},
		{"less than is used", []ledger.Record{own(func(v *ledger.VGPU) { v.Limit = quota.MiB })}, nil, false, sched.PolicyPreempt, 1, 0, false, quota.MiB},
		{"of a later container", []ledger.Record{restarted}, nil, true, 0, 0, 0, false, 0},
		{"of another container", []ledger.Record{beside(7, 0)}, nil, true, 0, 0, 0, false, 0},
		{"of another GPU", []ledger.Record{elsewhere}, nil, true, 0, 0, 0, false, 0},
		{"empty", nil, nil, true, 0, 0, 0, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeContainer(t, 1)
			x, before := g.card(), g.card().plan
			g.compute.plans(c.records, c.cards)
			p := x.plan
			if c.ignored {
				if p != before || g.account.usage(0).limit != testLimit || len(x.kick) > 0 {
					t.Errorf("%+v", p)
				}
				return
			}
			if p.effective != c.effective || p.share.Weight != c.weight || p.cap != c.cap || p.suspended != c.suspended || (p.slot.Cycle > 0) != (c.cap > 0) {
				t.Errorf("%+v", p)
			}
			if p.cap > 0 && p.slot.On*time.Duration(sched.Whole) != p.slot.Cycle*time.Duration(p.cap) {
				t.Errorf("%+v for %v", p.slot, p.cap)
			}
			if l := g.account.usage(0).limit; l != c.limit {
				t.Errorf("limit %v", l)
			}
			if len(x.kick) != 1 || len(g.compute.dutyKick) != 1 || x.settling <= monotonic() {
				t.Error("nobody is told of the change")
			}
			<-x.kick
			<-g.compute.dutyKick
			was := x.settling
			if g.compute.plans(c.records, c.cards); len(x.kick) > 0 || len(g.compute.dutyKick) > 0 || x.settling != was {
				t.Error("nothing new is a change")
			}
		})
	}
}

// TestPlansSlots: guards that read the same ledger agree, and their slots do not overlap, also where two engines chose one ID.
func TestPlansSlots(t *testing.T) {
	a, b := newFakeContainer(t, 1), newFakeContainer(t, 1)
	b.cfg.Nonce = "m"
	var records []ledger.Record
	for _, nonce := range []string{"n", "m"} {
		records = append(records, ledger.Record{ID: "c0ffee", Nonce: nonce, VGPUs: []ledger.VGPU{{UUID: "GPU-0", Limit: quota.GiB, Percent: 50}}})
	}
	for _, c := range []*fakeContainer{a, b} {
		c.compute.plans(records, nil)
	}
	one, two := a.card().plan.slot, b.card().plan.slot
	if one.Cycle == 0 || one.Cycle != two.Cycle || one.Start+one.On > two.Start && two.Start+two.On > one.Start {
		t.Errorf("%+v and %+v", one, two)
	}
}

// TestSlices: each group with work gets its timeslice, on the file of its client; what somebody changes is set again.
func TestSlices(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.card()
	now := time.Now()
	group := fakeName{fakeClient, workGroup}
	step := func(want ...fakeName) {
		t.Helper()
		x.step(now)
		if got := c.d.took(); !slices.Equal(got, want) {
			t.Errorf("timeslices were set for %#x, want %#x", got, want)
		}
		if c.d.elsewhere > 0 {
			t.Fatal("a call on another file")
		}
	}
	step(group)
	if got := c.d.slices[group]; got != c.compute.timing.Base {
		t.Errorf("%v", got)
	}
	now = now.Add(verifyEvery)
	step()
	if c.d.asked == 0 {
		t.Error("the driver is never asked")
	}
	now = now.Add(verifyEvery / 2)
	asked := c.d.asked
	if step(); c.d.asked != asked {
		t.Error("the driver is asked all the time")
	}
	c.d.slices[group] = sched.NativeTimeslice
	now = now.Add(verifyEvery)
	step(group)
	if c.d.slices[group] != c.compute.timing.Base || x.counted.drift != 1 {
		t.Errorf("%v, drift %d", c.d.slices[group], x.counted.drift)
	}

	// A second process, its client on the same file here.
	c.client(fakeClient + 1)
	second := fakeName{fakeClient + 1, workGroup}
	step(group, second) // half for each, now that there are two
	if c.d.slices[group] != c.compute.timing.Base/2 || c.d.slices[second] != c.compute.timing.Base/2 {
		t.Errorf("%v, %v", c.d.slices[group], c.d.slices[second])
	}
	c.account.freeObject(fakeClient+1, workGroup)
	step(group)

	x.plan.card.Policy, x.plan.share.Weight = sched.PolicyWeight, 5
	x.setBusy = 0
	step(group)
	if got := c.d.slices[group]; got != 5*c.compute.timing.Base {
		t.Errorf("%v for weight 5", got)
	}
	x.plan.card.Policy = sched.PolicyNative
	x.setBusy = 0
	step(group)
	if got := c.d.slices[group]; got != sched.NativeTimeslice {
		t.Errorf("%v under policy native", got)
	}
}

// TestSlicesBeside: two guards of one GPU see each other on the board.
// TestSliceOfTheGone: nothing is asked of a group that the program frees meanwhile.
func TestSliceOfTheGone(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.card()
	of := c.account.clients[fakeClient]
	groups := []groupRef{{of, workGroup}}
	of.calls.Lock() // a free is under way
	go func() {
		defer of.calls.Unlock()
		c.account.freeObject(fakeClient, workGroup)
	}()
	x.apply(groups, true)
	if got := c.d.took(); len(got) > 0 || c.d.asked > 0 {
		t.Errorf("timeslices were set for %#x, %d asked for", got, c.d.asked)
	}
}

func TestSlicesBeside(t *testing.T) {
	a, b := newFakeContainer(t, 1), newFakeContainer(t, 1)
	dir := t.TempDir()
	for _, c := range []*fakeContainer{a, b} {
		c.card().board = newBoard(t, dir)
		c.set(func(p *entitlement) {
			p.card = sched.Card{Policy: sched.PolicyWeight, MaxInst: 20, PrioRatio: 99}
			p.share.Weight = 9
		})
	}
	group, now := fakeName{fakeClient, workGroup}, time.Now()
	a.card().step(now)
	alone := a.d.slices[group]
	b.card().step(now)
	a.card().step(now)
	if got := a.d.slices[group]; alone != 90*time.Millisecond || got != 50*time.Millisecond || b.d.slices[group] != got {
		t.Errorf("%v alone, %v and %v together", alone, got, b.d.slices[group])
	}
	b.account.freeObject(fakeClient, workGroup)
	b.card().step(now)
	if o := a.card().board.others(); len(o) != 1 || o[0].Busy != 0 {
		t.Errorf("%+v", o)
	}
	for _, c := range []*fakeContainer{a, b} {
		c.compute.end()
	}
}

// TestStarted: a new group has its timeslice when its first work can come, on the file of the call itself.
func TestStarted(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 2)
	c.channels(fakeClient, copyGroup, 0x200, 1)
	f := newFakeCall(t, c.Guard, fakeControl)
	c.d.file = fakeControl
	x := c.card()
	x.slice = 7 * time.Millisecond
	c.schedule(f, copyGroup, scheduleGroup, true)
	if got := c.d.took(); len(got) > 0 || x.active.Load() {
		t.Errorf("a timeslice for copies: %#x", got)
	}
	c.schedule(f, 0x100, scheduleChannel, true) // as libcuda does, or the whole group
	group := fakeName{fakeClient, workGroup}
	if got := c.d.took(); !slices.Equal(got, []fakeName{group}) || c.d.slices[group] != 7*time.Millisecond || c.d.elsewhere > 0 {
		t.Errorf("%#x, %v, %d on another file", got, c.d.slices[group], c.d.elsewhere)
	}
	if !x.active.Load() || len(x.kick) == 0 {
		t.Error("nobody looks after the GPU")
	}
	c.schedule(f, workGroup, scheduleGroup, true)
	c.schedule(f, workGroup, scheduleGroup, false)
	if got := c.d.took(); len(got) > 0 {
		t.Errorf("set again: %#x", got)
	}
}

// TestSetTimesliceOfTheTenant is answered and not carried out.
func TestSetTimesliceOfTheTenant(t *testing.T) {
	c := newFakeContainer(t, 1)
	f := newFakeCall(t, c.Guard, fakeControl)
	p := make([]byte, 8)
	rm.PutU64(p, 0, 1e6)
	o := fakeControlCall(workGroup, controlSetTimeslice, p)
	rm.PutU32(o, rm.ControlStatus, 0xdead)
	if rep := f.escape(rm.EscControl, o, p); rep != replyDone || rm.U32(o, rm.ControlStatus) != rm.StatusOK {
		t.Errorf("%v, %s", rep, rm.StatusName(rm.U32(o, rm.ControlStatus)))
	}
	if got := c.d.took(); len(got) > 0 || len(c.d.calls) > 0 {
		t.Errorf("the driver was asked: %#x, %d calls", got, len(c.d.calls))
	}
}

func TestDamped(t *testing.T) {
	const ms = time.Millisecond
	busy := []sched.Tenant{{Busy: 1}, {Busy: 1}, {Busy: 1}, {Busy: 1}, {Busy: 1}, {Busy: 1}}
	for _, c := range []struct {
		name   string
		set    func(x *card)
		slice  time.Duration // has 20 ms
		others []sched.Tenant
		want   time.Duration
	}{
		{"the same", nil, 20 * ms, busy, 20 * ms},
		{"nearly the same", nil, 20*ms + 20*ms/40, busy, 20 * ms},
		{"nearly the same, right after a change", func(x *card) { x.settling = monotonic() + time.Hour }, 20*ms + 20*ms/40, busy, 20*ms + 20*ms/40},
		{"much less", nil, 15 * ms, busy, 15 * ms},
		{"a little less", nil, 18 * ms, busy, 20 * ms},
		{"more", nil, 40 * ms, busy, 20 * ms},
		{"more, alone", func(x *card) { x.since = monotonic() }, 40 * ms, nil, 40 * ms},
		{"more for long", func(x *card) { x.since = monotonic() - dampTime }, 40 * ms, busy, 40 * ms},
		{"more, because of its own groups", func(x *card) { x.busy = 1 }, 40 * ms, busy, 40 * ms},
		{"more, after a change", func(x *card) { x.settling = monotonic() + time.Hour }, 40 * ms, busy, 40 * ms},
		{"less than the shortest", nil, 200 * time.Microsecond, busy, 200 * time.Microsecond},
		{"back from less than the shortest", func(x *card) { x.slice = 200 * time.Microsecond }, 20 * ms, busy, 20 * ms},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := newFakeContainer(t, 1).card()
			x.slice, x.busy, x.setBusy = 20*ms, 2, 2
			if c.set != nil {
				c.set(x)
			}
			if got := x.damped(c.slice, c.others); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// TestSpend keeps the account of a cap of 10 %.
func TestSpend(t *testing.T) {
	const ms = time.Millisecond
	c := newFakeContainer(t, 1)
	x := c.card()
	x.plan.cap, x.plan.slot, x.source = 100, sched.Slot{On: 10 * ms, Cycle: 100 * ms}, &fakeSource{}
	now, gpu := time.Now(), 1000*time.Second
	// pass lets time go by, of which the container uses some.
	pass := func(d, used time.Duration) {
		t.Helper()
		mine := func(int) bool { return true }
		x.tracker.Add([]sched.Switch{{At: gpu + d - used, PID: 1, On: true}, {At: gpu + d, PID: 1}}, mine, false)
		now, gpu = now.Add(d), gpu+d
		x.read = now
		x.spend(now)
	}
	owes := func(least, most time.Duration) {
		t.Helper()
		wait := max(0, x.owing-monotonic())
		if wait > most || wait < least-5*time.Second && least > 0 || (wait > 0) != (most > 0) {
			t.Errorf("off for another %v, want %v to %v", wait, least, most)
		}
	}
	budget := func(want time.Duration) {
		t.Helper()
		if x.budget != want {
			t.Errorf("budget %v, want %v", x.budget, want)
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
	pass(20*ms, 20*ms)
	budget(-8 * ms)
	if owes(0, 0); len(c.compute.dutyKick) > 0 {
		t.Error("a debt of less than a slot")
	}
	pass(10*ms, 10*ms)
	budget(-17 * ms)
	if owes(100*ms, 170*ms); len(c.compute.dutyKick) == 0 {
		t.Error("nobody is told")
	}
	was := x.owing
	x.owing = monotonic() + time.Hour
	pass(100*ms, 20*ms)
	if budget(-27 * ms); x.owing-was < time.Minute {
		t.Error("a debt is collected twice")
	}
	x.owing = 0
	pass(10*time.Second, 10*time.Second)
	budget(-maxDebt * 10 * ms)
	if x.owing-monotonic() > maxOff-100*ms {
		t.Error("off for longer than what is taken for a hang")
	}
	x.source = nil
	pass(100*ms, 100*ms)
	budget(0)
	owes(0, 0)
	x.source, x.budget, x.owing, x.plan.cap = &fakeSource{}, -50*ms, monotonic()+time.Hour, 0
	pass(100*ms, 100*ms)
	budget(0)
	owes(0, 0)
}

// TestWait: a container without work costs no processor time.
func TestWait(t *testing.T) {
	now := time.Now()
	records := &fecsBuffer{}
	for _, c := range []struct {
		name   string
		set    func(x *card)
		groups int
		want   time.Duration
	}{
		{"nothing there", func(x *card) { x.source = &fakeSource{} }, 0, 0},
		{"no work", func(x *card) { x.source = records; x.read = now }, 3, 0},
		{"no work, no way to hear of it", func(x *card) { x.source = &fakeSource{} }, 3, 3 * tick},
		{"no work, no records", nil, 0, 0},
		{"no records", func(x *card) { x.busy = 1 }, 1, verifyEvery},
		{"work", func(x *card) { x.source, x.busy, x.read = records, 1, now }, 1, tick},
		{"alone for long", func(x *card) { x.source, x.busy, x.read, x.patience = records, 1, now.Add(-settled), settled }, 1, 2 * settled},
		{"alone for very long", func(x *card) { x.source, x.busy, x.read, x.patience = records, 1, now.Add(-time.Hour), maxPatience }, 1, maxPatience},
		{"alone, capped", func(x *card) { x.source, x.busy, x.read, x.plan.cap = records, 1, now.Add(-settled), 100 }, 1, tick},
		{"alone, in turns", func(x *card) {
			x.source, x.busy, x.read, x.turn = records, 1, now.Add(-settled), sched.Slot{On: 1, Cycle: 2}
		}, 1, tick},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := newFakeContainer(t, 1).card()
			if c.set != nil {
				c.set(x)
			}
			if got := x.wait(now, c.groups); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
			x.source = nil // its memory is no ring
		})
	}
}

// TestLook counts the groups with work: those that run or ran, and those that are too new to have.
func TestLook(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.card()
	now := time.Now()
	look := func(groups, want int) {
		t.Helper()
		if x.look(now, groups); x.busy != want {
			t.Errorf("%d with work, want %d", x.busy, want)
		}
	}
	look(3, 3) // nobody tells
	source := &fakeSource{}
	x.source = source
	look(3, 0)
	c.compute.made(0)
	now = time.Now()
	look(3, 1)
	now = now.Add(idleAfter + time.Second)
	look(3, 0)
	self := c.account.clients[fakeClient].tgid
	source.records = []sched.Switch{{At: time.Second, PID: self, Context: 1, On: true}, {At: time.Second + 1, PID: self, Context: 1},
		{At: time.Second + 2, PID: self + 1, Context: 1, On: true}, {At: time.Second + 3, PID: self + 1, Context: 1}}
	look(3, 1) // the other one is somebody else's
	look(0, 0) // its groups are gone
	look(3, 1)
	x.plan.suspended, x.off = true, true
	look(3, 0)
	x.plan.suspended, x.off = false, false
	now = now.Add(idleAfter)
	look(3, 0)
	for range 2 * maxYoung {
		c.compute.made(0)
	}
	if n := len(x.young); n != maxYoung {
		t.Errorf("%d are remembered", n)
	}
}
