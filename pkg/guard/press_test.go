package guard

import (
	"sync"
	"sync/atomic"
	"syscall"
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
	p := newUserdPressure(f.card())
	p.next = time.Hour * 24 * 365 * 100
	one := &userdView{mem: make([]byte, userdPage), off: 0}
	two := &userdView{mem: make([]byte, userdPage), off: 0x200} // several channels share a page of a program's
	p.pages[&object{handle: 1}], p.pages[&object{handle: 2}] = one, two
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
	p := newUserdPressure(f.card())
	p.sync() // the memory is unknown
	if len(p.pages) > 0 || !p.blind() {
		t.Errorf("%d pages of unknown memory, blind %v", len(p.pages), p.blind())
	}
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), noGPU, 0, 0)
	p.sync() // /dev/zero stands for the GPU
	if len(p.pages) != 1 || p.pages[f.account.clients[fakeClient].channels[0x100]] == nil || p.blind() {
		t.Errorf("%d pages, blind %v", len(p.pages), p.blind())
	}
	f.account.freeObject(fakeClient, 0x100)
	if p.sync(); len(p.pages) > 0 {
		t.Error("the page of a channel that is gone is still mapped")
	}
	p.release()
}

// userdRig is a container with a channel that has its page in memory of 8 MiB, of which it has another name, and a fake driver that
// counts the guard's handles.
func userdRig(t *testing.T) (f *fakeContainer, p *userdPressure, handles func() int) {
	f = newFakeContainer(t, 1)
	f.card().press = newUserdPressure(f.card())
	var dups, frees atomic.Int32
	own := func(call *rm.Call, off int) bool { return f.own != nil && rm.U32(call.Outer, off) == f.own.Handle() }
	f.d.answer = func(target Target, call *rm.Call) syscall.Errno {
		switch {
		case call.NR() == rm.EscDupObject && own(call, rm.DupClient):
			dups.Add(1)
		case call.NR() == rm.EscFree && own(call, rm.FreeRoot):
			frees.Add(1)
		}
		return f.d.call(target, call)
	}
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), 0, 0, 8*quota.MiB)
	return f, f.card().press.(*userdPressure), func() int { return int(dups.Load() - frees.Load()) }
}

const userdChannel = 0x100

// userdChannel makes a channel as RM_ALLOC does.
func (c *fakeContainer) userdChannel(memory uint32) {
	c.Helper()
	p := make([]byte, 368)
	rm.PutU32(p, rm.ChannelEngineType, engineGR)
	rm.PutU32(p, rm.ChannelUserdMemory, memory)
	o := fakeAlloc(workGroup, userdChannel, 0xc36f, p)
	if newFakeCall(c, c.Guard, fakeControl).escape(rm.EscAlloc, o, p); !c.account.isChannel(fakeClient, userdChannel) {
		c.Fatalf("no channel: %s", rm.StatusName(rm.U32(o, 40)))
	}
}

// TestUserdKeepsCharge: what the guard's handle keeps is charged, whatever becomes of the channel and the memory, and no longer.
func TestUserdKeepsCharge(t *testing.T) {
	for name, test := range map[string]struct {
		end     func(f *fakeContainer, p *userdPressure)
		handles int
		used    quota.Bytes
	}{
		"nothing ends": {func(*fakeContainer, *userdPressure) {}, 1, 8 * quota.MiB},
		"all is freed": {func(f *fakeContainer, _ *userdPressure) {
			f.account.freeObject(fakeClient, fakeDevice)
		}, 1, 8 * quota.MiB},
		"all is freed, and looked at again": {func(f *fakeContainer, p *userdPressure) {
			f.account.freeObject(fakeClient, fakeDevice)
			p.sync()
		}, 0, 0},
		"all is freed, and somebody needs memory": {func(f *fakeContainer, _ *userdPressure) {
			f.account.freeObject(fakeClient, fakeDevice)
			f.sweep()
		}, 0, 0},
		"all is freed, and nobody looks any more": {func(f *fakeContainer, p *userdPressure) {
			f.account.freeObject(fakeClient, fakeDevice)
			p.release()
		}, 0, 0},
		"another channel has its handle": {func(f *fakeContainer, p *userdPressure) {
			f.account.addObject(fakeClient, memoryObject(fakeMemory+1, fakeDevice), 0, 0, quota.MiB)
			f.account.freeObject(fakeClient, userdChannel)
			f.account.freeObject(fakeClient, fakeMemory)
			f.userdChannel(fakeMemory + 1)
			p.sync()
		}, 1, quota.MiB},
	} {
		t.Run(name, func(t *testing.T) {
			f, p, handles := userdRig(t)
			f.userdChannel(fakeMemory)
			p.sync()
			test.end(f, p)
			wantUsage(t, f.account, 0, test.used)
			if n := handles(); n != test.handles {
				t.Errorf("the guard has %d handles, want %d", n, test.handles)
			}
		})
	}
}

// TestUserdOfAnotherObject: the channel keeps the memory that it was made with. Its handle may be another's by the time that the guard
// looks, or while it does.
func TestUserdOfAnotherObject(t *testing.T) {
	f, p, handles := userdRig(t)
	f.userdChannel(fakeMemory)
	f.account.freeObject(fakeClient, fakeMemory)
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), 0, 0, 512*quota.MiB)
	p.sync()
	f.account.freeObject(fakeClient, fakeMemory)
	wantUsage(t, f.account, 0, 8*quota.MiB)
	if n := handles(); n != 0 || !p.blind() {
		t.Errorf("the guard has %d handles on other memory; blind %v", n, p.blind())
	}

	f, p, _ = userdRig(t)
	f.userdChannel(fakeMemory)
	answer, c := f.d.answer, f.account.client(fakeClient)
	f.d.answer = func(target Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscDupObject {
			if c.calls.TryLock() {
				t.Error("the container's calls do not wait while the guard opens a handle of theirs")
				c.calls.Unlock()
			}
			f.clientGone(c) // which waits for nobody
		}
		return answer(target, call)
	}
	p.sync()
	wantUsage(t, f.account, 0, 8*quota.MiB)
	p.sync()
	wantUsage(t, f.account, 0, 0)
}

// TestUserdBesideSweeps: who holds a client's calls and needs memory does not wait for who opens a page of that client, and the other
// way round.
func TestUserdBesideSweeps(t *testing.T) {
	f, p, _ := userdRig(t)
	f.userdChannel(fakeMemory)
	lock, _ := f.account.lockCalls(fakeClient, fakeClient)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 10 {
			p.sync()
			_, _ = p.look()
			p.release()
		}
	})
	for range 20 {
		time.Sleep(100 * time.Microsecond)
		f.sweep()
	}
	lock.unlock()
	for range 20 {
		f.sweep()
	}
	wg.Wait()
	wantUsage(t, f.account, 0, 8*quota.MiB)
}

// TestUserdBehindALongCall: a call that takes long does not keep the guard from looking at other channels; its own is seen afterwards.
func TestUserdBehindALongCall(t *testing.T) {
	f, p, handles := userdRig(t)
	f.userdChannel(fakeMemory)
	c := f.account.client(fakeClient)
	c.calls.Lock()
	p.sync() // it would not come back
	c.calls.Unlock()
	if n := handles(); n != 0 || !p.blind() {
		t.Errorf("%d handles during the call, blind %v", n, p.blind())
	}
	if p.sync(); handles() != 1 || p.blind() {
		t.Errorf("%d handles after the call, blind %v", handles(), p.blind())
	}
}
