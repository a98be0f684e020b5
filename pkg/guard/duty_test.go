package guard

import (
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestTurn: all channels go off in lists of 64 and come back.
func TestTurn(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.client(fakeClient + 1)
	all := slices.Concat(c.channels(fakeClient, workGroup, 0x100, 100), c.channels(fakeClient+1, workGroup, 0x100, 30))
	for _, off := range []bool{true, false} {
		c.compute.turn(c.card(), off)
		var sizes []int
		seen := map[fakeName]bool{}
		for _, l := range c.d.take() {
			sizes = append(sizes, len(l.channels))
			if l.off != off || l.sub != c.own.Subdevice(0) {
				t.Errorf("a list with off %v for %#x", l.off, l.sub)
			}
			for _, ch := range l.channels {
				seen[ch] = true
			}
		}
		if !slices.Equal(sizes, []int{64, 64, 2}) || len(seen) != len(all) {
			t.Errorf("lists of %v, %d channels", sizes, len(seen))
		}
		if off {
			c.isOff(all)
		} else {
			c.isOff()
		}
		c.compute.turn(c.card(), off)
		if again := c.d.take(); len(again) > 0 {
			t.Errorf("again: %d lists", len(again))
		}
	}
	if n := c.card().status().Pauses; n != 1 {
		t.Errorf("%d pauses counted", n)
	}
	if c.rescuers.Load() != 1 {
		t.Errorf("%d rescuers", c.rescuers.Load())
	}
}

// TestTurnRefused: what the driver refuses must not leave others on, or the wrong ones noted.
func TestTurnRefused(t *testing.T) {
	all := func(fakeList) uint32 { return rm.StatusInvalidState }
	first := func(ch fakeName) bool { return ch.handle == 0x103 }
	for _, x := range []struct {
		name   string
		gone   func(fakeName) bool
		refuse func(fakeList) uint32
		off    int  // of 70
		last   bool // the last list turned off
		is     bool // the card counts as off
	}{
		{"one is gone", first, nil, 69, true, true},
		{"all are gone", func(fakeName) bool { return true }, nil, 0, true, true},
		{"one is refused", nil, func(l fakeList) uint32 {
			if slices.ContainsFunc(l.channels, first) {
				return rm.StatusInvalidState
			}
			return 0
		}, 69, true, true},
		{"all are refused", nil, all, 0, false, false}, // and resumed, to be sure
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newFakeContainer(t, 1)
			names := c.channels(fakeClient, workGroup, 0x100, 70)
			c.d.refuse = x.refuse
			for _, ch := range names {
				c.d.gone[ch] = x.gone != nil && x.gone(ch)
			}
			c.compute.turn(c.card(), true)
			lists := c.d.take()
			if n := c.d.offNow(); n != x.off || c.card().off != x.is {
				t.Errorf("%d of 70 are off, and the card: %v", n, c.card().off)
			}
			if n := c.compute.rescue.count(0).Load(); (n > 0) != x.is {
				t.Errorf("%d channels are noted", n)
			}
			if last := lists[len(lists)-1]; last.off != x.last {
				t.Errorf("the last list turns off: %v", last.off)
			}
			for !c.compute.turn(c.card(), false) {
			}
			if n := c.d.offNow(); n > 0 || c.card().off {
				t.Errorf("%d stay off", n)
			}
			if c.compute.rescue.count(0).Load() != 0 {
				t.Error("what runs again is still noted")
			}
		})
	}
}

// TestGoneHandle: a channel that the driver says is gone is gone in the account, and its objects. What has its handle by now is not.
func TestGoneHandle(t *testing.T) {
	const below = 0x200
	for _, again := range []bool{false, true} {
		c := newFakeContainer(t, 1)
		name := c.channels(fakeClient, workGroup, 0x100, 1)[0]
		c.account.addObject(fakeClient, object{handle: below, parent: name.handle, gpu: noGPU}, noGPU, 0, 0)
		c.d.at = func(cmd uint32) {
			if cmd != controlDisableChannels || c.d.gone[name] {
				return
			}
			c.d.gone[name] = true
			if again {
				c.account.freeObject(fakeClient, name.handle)
				c.account.addObject(fakeClient, memoryObject(name.handle, fakeDevice), 0, 0, 8*quota.MiB)
			}
		}
		c.compute.turn(c.card(), true)
		if !c.d.gone[name] {
			t.Fatal("the driver was not asked")
		}
		if again {
			wantUsage(t, c.account, 0, 8*quota.MiB)
		}
		if _, ok := c.account.lookup(fakeClient, below); ok || c.account.gpus[0].channels != 0 {
			t.Errorf("the channel is still there: %d channels", c.account.gpus[0].channels)
		}
	}
}

// TestTurnWithoutRescuer: nothing is paused while nobody would resume it.
func TestTurnWithoutRescuer(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.none.Store(true)
	c.compute.turn(c.card(), true)
	if l := c.d.take(); len(l) > 0 || c.card().off {
		t.Fatalf("%d lists", len(l))
	}
	c.none.Store(false)
	c.compute.turn(c.card(), true)
	c.isOff(names)

	// It dies while the channels are off: the next pause has a new one, and cannot do without.
	c.compute.rescue.gone.Store(true)
	c.compute.turn(c.card(), false)
	c.isOff()
	c.none.Store(true)
	c.compute.turn(c.card(), true)
	c.isOff()
	c.none.Store(false)
	c.compute.turn(c.card(), true)
	c.isOff(names)
	if n := c.rescuers.Load(); n != 2 {
		t.Errorf("%d rescuers were started", n)
	}
}

// TestEngines: a hard cap stops work on the graphics engine, cgpu pause everything.
func TestEngines(t *testing.T) {
	c := newFakeContainer(t, 2)
	work, copies := c.channels(fakeClient, workGroup, 0x100, 3), c.channels(fakeClient, copyGroup, 0x200, 2)
	c.channels(fakeClient, workGroup+1, 0x300, 3) // on the other GPU
	suspend := func(on bool) { c.set(func(p *entitlement) { p.suspended = on }) }

	c.compute.turn(c.card(), true)
	c.isOff(work)
	suspend(true)
	c.compute.turn(c.card(), true)
	c.isOff(work, copies)
	if n := c.compute.rescue.count(0).Load(); n != 5 {
		t.Errorf("%d are noted", n)
	}
	suspend(false)
	c.compute.turn(c.card(), false)
	c.isOff()

	suspend(true)
	c.compute.turn(c.card(), true)
	c.isOff(work, copies)
	c.compute.turn(c.card(), true)
	suspend(false)
	c.compute.turn(c.card(), true) // now only because of its cap: what is off stays so
	c.compute.turn(c.card(), false)
	c.isOff()
	for _, l := range c.d.take() {
		if l.sub != c.own.Subdevice(0) {
			t.Errorf("the other GPU was asked: %+v", l)
		}
	}
}

// TestTurnWithoutChannels: a cap has nothing to hold back then, cgpu pause has.
func TestTurnWithoutChannels(t *testing.T) {
	c := newFakeContainer(t, 1)
	if c.compute.turn(c.card(), true); c.card().off {
		t.Error("a container without channels is off because of a cap")
	}
	c.set(func(p *entitlement) { p.suspended = true })
	if c.compute.turn(c.card(), true); !c.card().off || !c.card().offAll {
		t.Error("a paused container without channels would let new ones run")
	}
	if l := c.d.take(); len(l) > 0 {
		t.Errorf("%d lists of nothing", len(l))
	}
}

func TestWanted(t *testing.T) {
	const ms = time.Millisecond
	slot := sched.Slot{Start: 20 * ms, On: 30 * ms, Cycle: 100 * ms}
	capped := entitlement{cap: 300, slot: slot}
	base := 1000 * time.Second // a cycle begins
	for _, c := range []struct {
		name  string
		set   func(x *card)
		now   time.Duration
		off   bool
		until time.Duration
	}{
		{"no cap", func(x *card) { x.busy = 1 }, base, false, 0},
		{"not begun", func(x *card) { x.active.Store(false); x.plan.suspended = true }, base, true, 0},
		{"not begun, capped", func(x *card) { x.active.Store(false); x.plan = capped }, base, false, 0},
		{"suspended", func(x *card) { x.plan = entitlement{suspended: true} }, base, true, 0},
		{"suspended, in its slot", func(x *card) { x.plan = capped; x.plan.suspended = true; x.busy = 1 }, base + 30*ms, true, 0},
		{"before its slot", func(x *card) { x.plan = capped; x.busy = 1 }, base + 10*ms, true, base + 20*ms},
		{"its slot begins", func(x *card) { x.plan = capped; x.busy = 1 }, base + 20*ms, false, base + 50*ms},
		{"within", func(x *card) { x.plan = capped; x.busy = 1 }, base + 49*ms, false, base + 50*ms},
		{"after", func(x *card) { x.plan = capped; x.busy = 1 }, base + 50*ms, true, base + 120*ms},
		{"without work", func(x *card) { x.plan = capped; x.worked = base - capIdle - ms }, base, false, 0},
		{"without work for a moment", func(x *card) { x.plan = capped; x.worked = base - capIdle + ms }, base, true, base + 20*ms},
		{"nobody knows whether there is work", func(x *card) { x.plan = capped; x.source = nil }, base, true, base + 20*ms},
		{"in debt", func(x *card) { x.plan = capped; x.busy = 1; x.owing = base + 400*ms }, base + 30*ms, true, base + 400*ms},
		{"its debt is over", func(x *card) { x.plan = capped; x.busy = 1; x.owing = base + 30*ms }, base + 30*ms, false, base + 50*ms},
		{"a debt of a cap that is no more", func(x *card) { x.busy = 1; x.owing = base + 400*ms }, base, false, 0},
		{"takes turns", func(x *card) { x.turn = slot; x.busy = 1 }, base, true, base + 20*ms},
		{"takes turns, its own", func(x *card) { x.turn = slot; x.busy = 1 }, base + 20*ms, false, base + 50*ms},
		{"takes turns, without work", func(x *card) { x.turn = slot; x.worked = base }, base, false, 0},
		{"a cap goes before turns", func(x *card) { x.plan = capped; x.turn = sched.Slot{On: 1, Cycle: 2}; x.busy = 1 }, base, true, base + 20*ms},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := newFakeContainer(t, 1).card()
			x.source = &fakeSource{}
			x.active.Store(true)
			c.set(x)
			if off, until := x.wanted(c.now); off != c.off || until != c.until {
				t.Errorf("off %v until %v, want %v until %v", off, until-base, c.off, c.until-base)
			}
		})
	}
}

// TestDuty: the goroutine follows the slots, and plans as they change.
func TestDuty(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.card().active.Store(true)
	go c.compute.duty()
	c.set(func(p *entitlement) {
		p.cap, p.slot = 500, sched.Slot{On: 2 * time.Millisecond, Cycle: 4 * time.Millisecond}
	})
	turns := 0
	eventually(t, "three cycles", func() bool {
		for _, l := range c.d.take() {
			if turns++; l.off != (turns%2 == 1) || len(l.channels) != 2 {
				t.Fatalf("turn %d: %+v", turns, l)
			}
		}
		return turns >= 6
	})
	c.set(func(p *entitlement) { *p = entitlement{suspended: true} })
	eventually(t, "suspended", func() bool {
		c.compute.running.Lock()
		defer c.compute.running.Unlock()
		return c.card().offAll
	})
	c.isOff(names)
	c.set(func(p *entitlement) { *p = entitlement{} })
	eventually(t, "resumed", func() bool { return c.d.offNow() == 0 })
}

// TestResumeIsRepeated: a container must not stay off because the driver had no time.
func TestResumeIsRepeated(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 2)
	x := c.card()
	refuse := func(f func(fakeList) uint32) {
		c.d.mu.Lock()
		defer c.d.mu.Unlock()
		c.d.refuse = f
	}
	busy := func(fakeList) uint32 { return rm.StatusBusyRetry }
	c.compute.turn(x, true)
	refuse(busy)
	if c.compute.turn(x, false) || x.off || c.compute.rescue.count(0).Load() != 2 {
		t.Fatal("channels count as resumed that are not")
	}
	refuse(nil)
	if !c.compute.turn(x, false) || c.d.offNow() > 0 {
		t.Fatalf("%d channels are off for ever", c.d.offNow())
	}

	// What cannot be resumed at all must not keep new channels waiting.
	c.compute.turn(x, true)
	refuse(func(l fakeList) uint32 {
		if slices.Contains(l.channels, fakeName{fakeClient, 0x100}) {
			return rm.StatusInvalidState
		}
		return 0
	})
	for range maxRefused {
		if c.compute.turn(x, false) {
			t.Fatal("it gave up early")
		}
	}
	if !c.compute.turn(x, false) || x.off {
		t.Error("the container is off because of one broken channel")
	}
	refuse(nil)
	c.compute.turn(x, true)
	c.compute.turn(x, false)

	x.active.Store(true)
	c.set(func(p *entitlement) { p.suspended = true })
	go c.compute.duty()
	eventually(t, "paused", func() bool { return c.d.offNow() == 2 })
	refuse(busy)
	c.d.take()
	c.set(func(p *entitlement) { p.suspended = false })
	eventually(t, "a try", func() bool { return len(c.d.take()) > 0 })
	refuse(nil)
	eventually(t, "resumed", func() bool { return c.d.offNow() == 0 })
}
