package gpusched

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestSlices: each group with work gets its timeslice, on the file of its client; what somebody changes is set again.
func TestSlices(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	now := c.Now()
	c.Now = func() time.Duration { return now }
	group := fakeName{fakeClient, workGroup}
	step := func(want ...fakeName) {
		t.Helper()
		x.step(now)
		if got := c.d.took(); !slices.Equal(got, want) {
			t.Errorf("timeslices were set for %#x, want %#x", got, want)
		}
	}
	step(group)
	if got := c.d.slices[group]; got != c.timing.Base {
		t.Errorf("%v", got)
	}
	now += sched.VerifyEvery
	step()
	if c.d.asked == 0 {
		t.Error("the driver is never asked")
	}
	now += sched.VerifyEvery / 2
	asked := c.d.asked
	if step(); c.d.asked != asked {
		t.Error("the driver is asked all the time")
	}
	c.d.slices[group] = sched.NativeTimeslice
	now += sched.VerifyEvery
	step(group)
	if c.d.slices[group] != c.timing.Base || x.drift != 1 {
		t.Errorf("%v, drift %d", c.d.slices[group], x.drift)
	}

	c.client(fakeClient + 1)
	second := fakeName{fakeClient + 1, workGroup}
	step(group, second) // half for each, now that there are two
	if c.d.slices[group] != c.timing.Base/2 || c.d.slices[second] != c.timing.Base/2 {
		t.Errorf("%v, %v", c.d.slices[group], c.d.slices[second])
	}
	c.free(fakeClient+1, workGroup)
	step(group)

	c.set(func(p *sched.Plan) { p.Card.Policy, p.Share.Weight = sched.PolicyWeight, 5 })
	step(group)
	if got := c.d.slices[group]; got != 5*c.timing.Base {
		t.Errorf("%v for weight 5", got)
	}
	c.set(func(p *sched.Plan) { p.Card.Policy = sched.PolicyNative })
	step(group)
	if got := c.d.slices[group]; got != sched.NativeTimeslice {
		t.Errorf("%v under policy native", got)
	}
}

// TestSlicesBeside: two guards of one GPU see each other on the peer page.
func TestSlicesBeside(t *testing.T) {
	a, b := newFakeContainer(t, 1), newFakeContainer(t, 1)
	dir := t.TempDir()
	for _, c := range []*fakeContainer{a, b} {
		c.gpu().page = newPeerPage(t, dir)
		c.set(func(p *sched.Plan) {
			p.Card = sched.Card{Policy: sched.PolicyWeight, MaxInst: 20, PrioRatio: 99}
			p.Share.Weight = 9
		})
	}
	group, now := fakeName{fakeClient, workGroup}, a.Now()
	a.gpu().step(now)
	alone := a.d.slices[group]
	b.gpu().step(now)
	a.gpu().step(now)
	if got := a.d.slices[group]; alone != 90*time.Millisecond || got != 50*time.Millisecond || b.d.slices[group] != got {
		t.Errorf("%v alone, %v and %v together", alone, got, b.d.slices[group])
	}
	b.free(fakeClient, workGroup)
	b.gpu().step(now)
	if o := a.gpu().page.others(); len(o) != 1 || o[0].Busy != 0 {
		t.Errorf("%+v", o)
	}
	for _, c := range []*fakeContainer{a, b} {
		c.End()
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
