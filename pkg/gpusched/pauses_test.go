// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestTurn: all channels go off in lists of 64 and come back.
func TestTurn(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.client(fakeClient + 1)
	all := slices.Concat(c.channels(fakeClient, workGroup, 0x100, 100), c.channels(fakeClient+1, workGroup, 0x100, 30))
	for _, off := range []bool{true, false} {
		c.turn(c.gpu(), off)
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
		c.turn(c.gpu(), off)
		if again := c.d.take(); len(again) > 0 {
			t.Errorf("again: %d lists", len(again))
		}
	}
	if n := c.Status(0).Pauses; n != 1 {
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
			c.turn(c.gpu(), true)
			lists := c.d.take()
			if n := c.d.offNow(); n != x.off || c.gpu().off != x.is {
				t.Errorf("%d of 70 are off, and the card: %v", n, c.gpu().off)
			}
			if n := c.noted(0); (n > 0) != x.is {
				t.Errorf("%d channels are noted", n)
			}
			if last := lists[len(lists)-1]; last.off != x.last {
				t.Errorf("the last list turns off: %v", last.off)
			}
			for !c.turn(c.gpu(), false) {
			}
			if n := c.d.offNow(); n > 0 || c.gpu().off {
				t.Errorf("%d stay off", n)
			}
			if c.noted(0) != 0 {
				t.Error("what runs again is still noted")
			}
		})
	}
}

// TestGoneHandle: the container is told of a channel that the driver says is gone.
func TestGoneHandle(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.d.gone[names[1]] = true
	c.turn(c.gpu(), true)
	if c.isOff(names[:1]); !slices.Equal(c.freed, names[1:]) {
		t.Errorf("%#x", c.freed)
	}
}

// TestTurnWithoutRescuer: nothing is paused while nobody would resume it.
func TestTurnWithoutRescuer(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.none.Store(true)
	c.turn(c.gpu(), true)
	if l := c.d.take(); len(l) > 0 || c.gpu().off {
		t.Fatalf("%d lists", len(l))
	}
	c.none.Store(false)
	c.turn(c.gpu(), true)
	c.isOff(names)

	// It dies while the channels are off: the next pause has a new one, and cannot do without.
	c.rescue.gone.Store(true)
	c.turn(c.gpu(), false)
	c.isOff()
	c.none.Store(true)
	c.turn(c.gpu(), true)
	c.isOff()
	c.none.Store(false)
	c.turn(c.gpu(), true)
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
	suspend := func(on bool) { c.set(func(p *sched.Plan) { p.Suspended = on }) }

	c.turn(c.gpu(), true)
	c.isOff(work)
	suspend(true)
	c.turn(c.gpu(), true)
	c.isOff(work, copies)
	if n := c.noted(0); n != 5 {
		t.Errorf("%d are noted", n)
	}
	suspend(false)
	c.turn(c.gpu(), false)
	c.isOff()

	suspend(true)
	c.turn(c.gpu(), true)
	c.isOff(work, copies)
	c.turn(c.gpu(), true)
	suspend(false)
	c.turn(c.gpu(), true) // now only because of its cap: what is off stays so
	c.turn(c.gpu(), false)
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
	if c.turn(c.gpu(), true); c.gpu().off {
		t.Error("a container without channels is off because of a cap")
	}
	c.set(func(p *sched.Plan) { p.Suspended = true })
	if c.turn(c.gpu(), true); !c.gpu().off || !c.gpu().offAll {
		t.Error("a paused container without channels would let new ones run")
	}
	if l := c.d.take(); len(l) > 0 {
		t.Errorf("%d lists of nothing", len(l))
	}
}

// TestPauses: the goroutine follows the slots, and plans as they change.
func TestPauses(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.gpu().active.Store(true)
	go c.runPauses()
	c.set(func(p *sched.Plan) {
		p.Cap, p.Slot = 500, sched.Slot{On: 2 * time.Millisecond, Cycle: 4 * time.Millisecond}
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
	c.set(func(p *sched.Plan) { *p = sched.Plan{Suspended: true} })
	eventually(t, "suspended", func() bool {
		c.Lock()
		defer c.Unlock()
		return c.gpu().offAll
	})
	c.isOff(names)
	c.set(func(p *sched.Plan) { *p = sched.Plan{} })
	eventually(t, "resumed", func() bool { return c.d.offNow() == 0 })
}

// TestResumeIsRepeated: a container must not stay off because the driver had no time.
func TestResumeIsRepeated(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 2)
	x := c.gpu()
	refuse := func(f func(fakeList) uint32) {
		c.d.mu.Lock()
		defer c.d.mu.Unlock()
		c.d.refuse = f
	}
	busy := func(fakeList) uint32 { return rm.StatusBusyRetry }
	c.turn(x, true)
	refuse(busy)
	if c.turn(x, false) || x.off || c.noted(0) != 2 {
		t.Fatal("channels count as resumed that are not")
	}
	refuse(nil)
	if !c.turn(x, false) || c.d.offNow() > 0 {
		t.Fatalf("%d channels are off for ever", c.d.offNow())
	}

	// What cannot be resumed at all must not keep new channels waiting.
	c.turn(x, true)
	refuse(func(l fakeList) uint32 {
		if slices.Contains(l.channels, fakeName{fakeClient, 0x100}) {
			return rm.StatusInvalidState
		}
		return 0
	})
	for range maxRefused {
		if c.turn(x, false) {
			t.Fatal("it gave up early")
		}
	}
	if !c.turn(x, false) || x.off {
		t.Error("the container is off because of one broken channel")
	}
	refuse(nil)
	c.turn(x, true)
	c.turn(x, false)

	x.active.Store(true)
	c.set(func(p *sched.Plan) { p.Suspended = true })
	go c.runPauses()
	eventually(t, "paused", func() bool { return c.d.offNow() == 2 })
	refuse(busy)
	c.d.take()
	c.set(func(p *sched.Plan) { p.Suspended = false })
	eventually(t, "a try", func() bool { return len(c.d.take()) > 0 })
	refuse(nil)
	eventually(t, "resumed", func() bool { return c.d.offNow() == 0 })
}

// TestStill: a group stands still for as long as its context needs, and is off afterwards only if the container is.
func TestStill(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.Lock()
	defer c.Unlock()
	c.none.Store(true)
	if _, ok := c.Still(0, c.Channels(0, true)); ok || len(c.d.take()) > 0 {
		t.Error("channels are off that nobody would resume")
	}
	c.none.Store(false)
	resume, ok := c.Still(0, c.Channels(0, true))
	if c.isOff(names); !ok || c.noted(0) != 2 {
		t.Errorf("%v, %d are noted", ok, c.noted(0))
	}
	resume()
	if c.isOff(); c.noted(0) != 0 {
		t.Errorf("%d are noted", c.noted(0))
	}
	c.Unlock()
	c.turn(c.gpu(), true)
	c.Lock()
	if resume, _ = c.Still(0, c.Channels(0, true)); resume == nil {
		t.Fatal("nobody would resume them")
	}
	resume()
	c.isOff(names)
	if _, ok := c.Still(7, nil); !ok {
		t.Error("nothing on a GPU that is not shared")
	}
}

// TestStop: what is stopped for good stays so, and is nothing to resume; what goes on again does so with the others.
func TestStop(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	channels := c.Channels(0, true)
	c.over[names[0]] = true
	if c.turn(c.gpu(), true); c.noted(0) != 1 {
		t.Errorf("%d are noted", c.noted(0))
	}
	delete(c.over, names[0])
	c.turn(c.gpu(), false)
	c.turn(c.gpu(), true)
	c.over[names[0]] = true
	c.d.take()
	c.Lock()
	c.Stop(0, channels[:1])
	c.Unlock()
	if l := c.d.take(); len(l) != 1 || !l[0].rewind || !slices.Equal(l[0].channels, names[:1]) || c.noted(0) != 1 {
		t.Errorf("%+v, %d are noted", l, c.noted(0))
	}
	c.turn(c.gpu(), false)
	c.isOff(names[:1])
	for _, off := range []bool{false, true} {
		c.turn(c.gpu(), off)
		c.over[names[0]] = true
		c.Lock()
		c.disable(0, channels, chanPaused)
		c.Forget()
		delete(c.over, names[0])
		c.LetRun(0, channels[:1])
		if _, is := c.d.off[names[0]]; is != off || off && c.noted(0) != 2 {
			t.Errorf("off %v in a container that is off %v, %d are noted", is, off, c.noted(0))
		}
		c.Unlock()
	}
}
