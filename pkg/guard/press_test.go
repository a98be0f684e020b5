package guard

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestPresserLoad: a container saturates when most looks find work waiting, and for a while after.
func TestPresserLoad(t *testing.T) {
	var p presser
	run := func(looks int, waiting func(i int) bool) bool {
		for i := range looks {
			p.note(waiting(i))
		}
		p.last.Store(int64(monotonic()))
		return p.saturating()
	}
	always, never := func(int) bool { return true }, func(int) bool { return false }
	half := func(i int) bool { return i%2 == 0 }
	if run(1, always) {
		t.Error("it saturates after one look")
	}
	if run(1000, half) {
		t.Error("it saturates with work in half of the looks")
	}
	if !run(1000, always) {
		t.Error("it does not saturate although it always has work")
	}
	if !run(5, never) {
		t.Error("a moment without work ends it")
	}
	if !run(1000, half) {
		t.Error("half of the looks end it")
	}
	if run(1000, never) {
		t.Error("it saturates without work")
	}
	if run(1000, half) {
		t.Error("half of the looks begin it again")
	}
	run(1000, always)
	p.last.Store(int64(monotonic() - pressFor))
	if p.pressing() || p.saturating() {
		t.Error("its last work was long ago")
	}
	p = presser{}
	if p.pressing() {
		t.Error("it presses before it was looked at")
	}
}

// TestPresserWanted: who looks costs time, so it is done only for a high-priority container beside others with work.
func TestPresserWanted(t *testing.T) {
	high, def := sched.Tenant{Share: sched.Share{Priority: quota.PriorityHigh}, Busy: 1}, sched.Tenant{Share: sched.Share{Priority: quota.PriorityDefault}, Busy: 1}
	idle := sched.Tenant{Share: def.Share}
	for _, c := range []struct {
		name   string
		self   sched.Tenant
		others []sched.Tenant
		active bool
		want   bool
	}{
		{"beside work", high, []sched.Tenant{idle, def}, true, true},
		{"beside nobody", high, nil, true, false},
		{"beside who has no work", high, []sched.Tenant{idle}, true, false},
		{"beside its equals", high, []sched.Tenant{high}, true, false},
		{"of default priority", def, []sched.Tenant{def}, true, false},
		{"not begun", high, []sched.Tenant{def}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeContainer(t, 1)
			f.card().active.Store(c.active)
			var p presser
			var looks atomic.Int32
			ended := make(chan struct{}, 1)
			p.want(f.card(), c.self, c.others, func() (bool, bool) { looks.Add(1); return true, true }, func() { ended <- struct{}{} })
			if p.alive != c.want {
				t.Fatalf("it looks: %v", p.alive)
			}
			if !c.want {
				return
			}
			eventually(t, "a look", func() bool { return looks.Load() > 1 && p.pressing() })
			p.want(f.card(), c.self, nil, nil, nil)
			<-ended
			eventually(t, "the end", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.alive })
		})
	}
}

// TestPresserOnOff: however fast others come and go, one looks at a time, and never while what it looks at is let go of.
func TestPresserOnOff(t *testing.T) {
	f := newFakeContainer(t, 1)
	f.card().active.Store(true)
	var p presser
	var inside, wrong, released atomic.Int32
	within := func() {
		if inside.Add(1) != 1 {
			wrong.Add(1)
		}
		time.Sleep(100 * time.Microsecond)
		inside.Add(-1)
	}
	self, others := sched.Tenant{Share: sched.Share{Priority: quota.PriorityHigh}}, []sched.Tenant{{Busy: 1}}
	eventually(t, "20 times let go of", func() bool {
		for i := range 40 {
			p.want(f.card(), self, others[:i%2], func() (bool, bool) { within(); return true, true }, func() { within(); released.Add(1) })
			time.Sleep(50 * time.Microsecond)
		}
		return released.Load() >= 20
	})
	if n := wrong.Load(); n > 0 {
		t.Errorf("%d times two at once", n)
	}
	p.want(f.card(), self, nil, nil, nil)
	eventually(t, "the end", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.alive })
}

// TestUserdLook reads made-up pages.
func TestUserdLook(t *testing.T) {
	f := newFakeContainer(t, 1)
	p := &userdPressure{x: f.card(), next: time.Hour * 24 * 365 * 100, pages: map[userdKey]*userdView{}}
	one := &userdView{mem: make([]byte, userdPage), off: 0}
	two := &userdView{mem: make([]byte, userdPage), off: 0x200} // several channels share a page of a program's
	p.pages[userdKey{1, 1}], p.pages[userdKey{1, 2}] = one, two
	for _, c := range []struct {
		name            string
		v               *userdView
		get, put        uint32
		worked, waiting bool
	}{
		{"nothing yet", one, 0, 0, false, false},
		{"work is put in", one, 0, 3, true, true},
		{"it is still there", one, 0, 3, true, true},
		{"the GPU has got some", one, 2, 3, true, true},
		{"the GPU has got all", one, 3, 3, false, false}, // which is no news: it presses for a while anyway
		{"nothing new", one, 3, 3, false, false},
		{"work came and went between two looks", one, 9, 9, true, false},
		{"nothing new", one, 9, 9, false, false},
		{"in the other channel", two, 0, 1, true, true},
		{"done there", two, 1, 1, false, false},
		{"the queue begins anew", one, 9, 0, true, true},
		{"and is empty", one, 0, 0, false, false},
		{"nothing new", one, 0, 0, false, false},
	} {
		rm.PutU32(c.v.mem, c.v.off+userdGPGet, c.get)
		rm.PutU32(c.v.mem, c.v.off+userdGPPut, c.put)
		worked, waiting := p.look()
		if waiting != c.waiting || worked != c.worked {
			t.Errorf("%s: worked %v, waiting %v", c.name, worked, waiting)
		}
	}
}

// TestUserdOffset: a channel whose words are not within one page is not read.
func TestUserdOffset(t *testing.T) {
	f := newFakeContainer(t, 1)
	f.channels(fakeClient, workGroup, 0x100, 2)
	for h, o := range map[uint32]uint64{0x100: 0, 0x101: userdPage - 0x80} {
		f.account.clients[fakeClient].channels[h].userd = userd{fakeMemory, o}
	}
	p := &userdPressure{x: f.card()}
	p.sync() // the memory is unknown
	if len(p.pages) > 0 || !p.blind() {
		t.Errorf("%d pages of unknown memory, blind %v", len(p.pages), p.blind())
	}
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), noGPU, 0, 0)
	p.sync() // /dev/zero stands for the GPU
	if len(p.pages) != 1 || p.pages[userdKey{fakeClient, 0x100}] == nil || p.blind() {
		t.Errorf("%d pages, blind %v", len(p.pages), p.blind())
	}
	f.account.freeObject(fakeClient, 0x100)
	if p.sync(); len(p.pages) > 0 {
		t.Error("the page of a channel that is gone is still mapped")
	}
	p.release()
}
