// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"sync/atomic"
	"testing"
	"time"
)

// fakeWork always has some.
type fakeWork struct{ looked, released func() }

func (w *fakeWork) hadWork() bool {
	w.looked()
	return true
}
func (w *fakeWork) Release() { w.released() }
func (*fakeWork) forget()    {}

// TestPriorityWanted: who looks costs time, so it is done only when the arbiter wants it.
func TestPriorityWanted(t *testing.T) {
	for _, c := range []struct {
		name           string
		wanted, active bool
		want           bool
	}{{"wanted", true, true, true}, {"not wanted", false, true, false}, {"not begun", true, false, false}} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeContainer(t, 1)
			f.gpu().active.Store(c.active)
			var looks atomic.Int32
			ended := make(chan struct{}, 1)
			p := newPriority(f.gpu(), &fakeWork{func() { looks.Add(1) }, func() { ended <- struct{}{} }})
			p.follow(c.wanted)
			if p.alive != c.want {
				t.Fatalf("it looks: %v", p.alive)
			}
			if !c.want {
				return
			}
			eventually(t, "a look", func() bool { return looks.Load() > 1 && p.pressing() })
			p.follow(false)
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
	eventually(t, "20 times let go of", func() bool {
		for i := range 40 {
			p.follow(i%2 == 1)
			time.Sleep(50 * time.Microsecond)
		}
		return released.Load() >= 20
	})
	if n := wrong.Load(); n > 0 {
		t.Errorf("%d times two at once", n)
	}
	p.follow(false)
	eventually(t, "the end", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.alive })
}
