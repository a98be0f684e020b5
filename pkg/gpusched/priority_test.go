package gpusched

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// fakeWork always has some.
type fakeWork struct{ looked, released func() }

func (w *fakeWork) look() (worked, waiting bool) {
	w.looked()
	return true, true
}
func (*fakeWork) blind() bool { return false }
func (w *fakeWork) Release()  { w.released() }
func (*fakeWork) forget()     {}

// TestPriorityLoad: a container saturates when most looks find work waiting, and for a while after.
func TestPriorityLoad(t *testing.T) {
	p := newPriority(newFakeContainer(t, 1).gpu(), nil)
	run := func(looks int, waiting func(i int) bool) bool {
		for i := range looks {
			p.note(waiting(i))
		}
		p.last.Store(int64(p.x.s.Now()))
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
	p.last.Store(int64(p.x.s.Now() - pressFor))
	if p.pressing() || p.saturating() {
		t.Error("its last work was long ago")
	}
	p = newPriority(p.x, nil)
	if p.pressing() {
		t.Error("it presses before it was looked at")
	}
}

// TestPriorityWanted: who looks costs time, so it is done only for a high-priority container beside others with work.
func TestPriorityWanted(t *testing.T) {
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
			f.gpu().active.Store(c.active)
			var looks atomic.Int32
			ended := make(chan struct{}, 1)
			p := newPriority(f.gpu(), &fakeWork{func() { looks.Add(1) }, func() { ended <- struct{}{} }})
			p.follow(c.self, c.others)
			if p.alive != c.want {
				t.Fatalf("it looks: %v", p.alive)
			}
			if !c.want {
				return
			}
			eventually(t, "a look", func() bool { return looks.Load() > 1 && p.pressing() })
			p.follow(c.self, nil)
			<-ended
			eventually(t, "the end", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.alive })
		})
	}
}

// TestPriorityOnOff: however fast others come and go, one looks at a time, and never while what it looks at is let go of.
func TestPriorityOnOff(t *testing.T) {
	f := newFakeContainer(t, 1)
	f.gpu().active.Store(true)
	var inside, wrong, released atomic.Int32
	within := func() {
		if inside.Add(1) != 1 {
			wrong.Add(1)
		}
		time.Sleep(100 * time.Microsecond)
		inside.Add(-1)
	}
	p := newPriority(f.gpu(), &fakeWork{within, func() { within(); released.Add(1) }})
	self, others := sched.Tenant{Share: sched.Share{Priority: quota.PriorityHigh}}, []sched.Tenant{{Busy: 1}}
	eventually(t, "20 times let go of", func() bool {
		for i := range 40 {
			p.follow(self, others[:i%2])
			time.Sleep(50 * time.Microsecond)
		}
		return released.Load() >= 20
	})
	if n := wrong.Load(); n > 0 {
		t.Errorf("%d times two at once", n)
	}
	p.follow(self, nil)
	eventually(t, "the end", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.alive })
}
