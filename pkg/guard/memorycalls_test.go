// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// freedByTask is a client with two devices, one of whose threads is in RM_ALLOC_MEMORY, in which the driver has made memory.
type freedByTask struct {
	*fakeCall
	driver *countingDriver
	inside func(bool)
}

const (
	taskOne, taskTwo = 0x5d000001, 0x5d000002
	taskMade         = 0x5c0000e1
)

func newFreedByTask(t *testing.T) *freedByTask {
	d := newCountingDriver()
	g := withClient(newFakeGuard(t, d))
	d.guard = g
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	d.makeDevice(taskOne)
	d.makeDevice(taskTwo)
	tid, args, end := stuckThread(t)
	t.Cleanup(end)
	x := &freedByTask{newFakeCall(t, g, fakeControl), d, func(is bool) { g.insideMemoryCall(tid, args, is) }}
	if rep := noteMemory(x.fakeCall, classSystem, taskOne, taskMade); !rep.resume {
		t.Fatalf("%+v", rep)
	}
	d.allocMemory(taskMade, taskOne)
	x.inside(true)
	return x
}

// insideMemoryCall has a thread be in RM_ALLOC_MEMORY, and no other.
func (g *Guard) insideMemoryCall(tid int, args [3]uint64, is bool) {
	m := &g.memoryCalls
	m.mu.Lock()
	defer m.mu.Unlock()
	m.number++
	if clear(m.inside); is {
		m.inside = map[int]*memoryCall{tid: {args: args, number: m.number}}
	}
	m.n.Store(int32(len(m.inside)))
}

// freeInCall has the driver free what it cannot map.
func (x *freedByTask) freeInCall() {
	x.driver.freeByTask(taskMade)
	x.inside(false)
}

func (d *countingDriver) freeByTask(handle uint32) {
	if o, ok := d.objects[handle]; ok {
		d.refers[o.memory]--
		d.free(handle)
	}
}

func (x *freedByTask) dup() (status uint32) {
	o := make([]byte, rm.DupSize)
	putWords(o, 0, fakeClient, taskTwo, ours, fakeClient, taskMade)
	x.escape(rm.EscDupObject, o)
	return rm.U32(o, rm.DupStatus)
}

// TestFreedByTask: RM_ALLOC_MEMORY that cannot map what it has made frees that by its handle, in the task. By then it may be what the guard
// has made, and would vouch for what is made there next.
func TestFreedByTask(t *testing.T) {
	x := newFreedByTask(t)
	x.escape(rm.EscFree, fakeFree(taskMade))
	if s := x.driver.ownMemory(x.fakeCall, taskOne, taskMade); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	if s := x.dup(); s != rm.StatusOK {
		t.Errorf("while it is there: %s", rm.StatusName(s))
	}
	x.escape(rm.EscFree, fakeFree(ours))
	if o, _ := x.guard.account.lookup(fakeClient, taskMade); !o.doubtful {
		t.Error("it is believed while the thread is inside")
	}
	x.freeInCall()
	if s := x.dup(); s == rm.StatusOK {
		t.Error("a handle on what is not there")
	}
	x.driver.allocMemory(taskMade, taskTwo) // swapped
	if s := x.dup(); s != rm.StatusInvalidObjectHandle {
		t.Errorf("a handle on what is below another device: %s", rm.StatusName(s))
	}
}

// TestFreedWithDevice: the first object can be freed with its device, too.
func TestFreedWithDevice(t *testing.T) {
	x := newFreedByTask(t)
	x.escape(rm.EscFree, fakeFree(taskOne))
	x.driver.makeDevice(taskOne)
	x.driver.ownMemory(x.fakeCall, taskOne, taskMade)
	x.freeInCall()
	if o, known := x.guard.account.lookup(fakeClient, taskMade); known && o.isThere() {
		t.Error("the account has as made by the guard what the driver has not")
	}
}

// TestNoDoubt: nobody is asked of what the guard has made, where nothing can have freed it.
func TestNoDoubt(t *testing.T) {
	free := func(x *freedByTask) { x.escape(rm.EscFree, fakeFree(taskMade)) }
	for name, before := range map[string]func(*freedByTask){
		"the thread makes another call": func(x *freedByTask) {
			x.inside(false)
			x.guard.memoryCalls.let(&x.trappedCall)
			x.guard.memoryCalls.left(&x.trappedCall)
			free(x)
		},
		"its thread has ended": func(x *freedByTask) {
			x.guard.insideMemoryCall(1<<22, [3]uint64{}, true)
			free(x)
		},
		"the call is over when it is made": func(x *freedByTask) {
			free(x)
			x.inside(false)
		},
		"nothing of the task's is freed": func(x *freedByTask) {
			x.escape(rm.EscFree, fakeFree(fakeMemory))
			x.driver.free(taskMade)
		},
	} {
		x := newFreedByTask(t)
		before(x)
		if s := x.driver.ownMemory(x.fakeCall, taskOne, taskMade); s != rm.StatusOK {
			t.Errorf("%s: %s", name, rm.StatusName(s))
		}
		if o, known := x.guard.account.lookup(fakeClient, taskMade); !known || !o.isThere() {
			t.Errorf("%s: %v, doubtful %v", name, known, o.doubtful)
		}
	}
}

// TestDoubtEnds: what is there when no thread is in such a call any more is asked about once more, and then believed.
func TestDoubtEnds(t *testing.T) {
	x := newFreedByTask(t)
	x.escape(rm.EscFree, fakeFree(taskMade))
	x.driver.ownMemory(x.fakeCall, taskOne, taskMade)
	for _, step := range []struct {
		inside   bool
		doubtful bool
	}{{true, true}, {false, false}} {
		x.inside(step.inside)
		if s := x.dup(); s != rm.StatusOK {
			t.Error(rm.StatusName(s))
		}
		if o, _ := x.guard.account.lookup(fakeClient, taskMade); o.doubtful != step.doubtful {
			t.Errorf("a thread is inside: %v, doubtful: %v", step.inside, o.doubtful)
		}
		x.escape(rm.EscFree, fakeFree(ours))
	}
	doubts := &x.guard.account.clients[fakeClient].doubts
	doubts.Store(1)
	x.guard.account.addObject(fakeClient, memoryObject(theirs, taskOne), 0, 0, 4096)
	doubts.Store(0)
	_, since := x.guard.memoryCalls.quiet()
	x.guard.memoryCalls.let(&x.trappedCall) // while the driver is asked: it may have made what is there
	x.guard.believe(fakeClient, theirs, since)
	if o, _ := x.guard.account.lookup(fakeClient, theirs); !o.doubtful {
		t.Error("it is believed when a call came in between")
	}
}

// TestDoubtfulStill: of a doubtful object the driver may say what it says of that object, and nothing else.
func TestDoubtfulStill(t *testing.T) {
	for name, x := range map[string]struct {
		record object
		class  uint32
		want   bool
	}{
		"memory":                  {object{class: classVidmem, kind: rm.ClassVidmem}, classVidmem, true},
		"spilled":                 {object{class: classVidmem, kind: rm.ClassVidmem, spilled: true}, classSystem, true},
		"imported":                {object{kind: rm.ClassPlain}, classSystem, true},
		"an event":                {object{class: 0x5, kind: rm.ClassEvent}, 0x79, true},
		"a device":                {object{class: 0x80, kind: rm.ClassDevice}, 0x80, true},
		"a device for memory":     {object{class: classVidmem, kind: rm.ClassVidmem}, 0x80, false},
		"memory for a channel":    {object{class: 0xc86f, kind: rm.ClassChannel}, classSystem, false},
		"memory for an event":     {object{class: 0x5, kind: rm.ClassEvent}, classSystem, false},
		"something for an import": {object{kind: rm.ClassPlain}, 0xc86f, false},
		"what nobody knows":       {object{class: 0x80, kind: rm.ClassDevice}, 0xffff, false},
	} {
		for _, parent := range []uint32{fakeDevice, fakeDevice + 0x100} {
			u := &unseenObjects{classes: map[uint32]uint32{theirs: x.class}, parents: map[uint32]uint32{theirs: parent}}
			g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: u.answer}))
			f := newFakeCall(t, g, fakeControl)
			g.account.clients[fakeClient].doubts.Store(1)
			o := x.record
			o.handle, o.parent, o.gpu = theirs, fakeDevice, noGPU
			g.account.addObject(fakeClient, o, noGPU, 0, 0)
			if is := !f.isUnseen(f.target(), fakeClient, theirs); is != (x.want && parent == fakeDevice) {
				t.Errorf("%s below %#x: %v", name, parent, is)
			}
		}
	}
}

// TestManyMemoryCalls: threads that have ended in the call are not remembered without end.
func TestManyMemoryCalls(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	f := newFakeCall(t, g, fakeControl)
	for i := range 3 * maxMemoryCalls {
		f.trappedCall.task = &task{tid: 1<<22 + i}
		if !g.memoryCalls.let(&f.trappedCall) {
			t.Fatalf("call %d", i)
		}
	}
	if n := len(g.memoryCalls.inside); n > maxMemoryCalls || int(g.memoryCalls.n.Load()) != n {
		t.Errorf("%d are remembered", n)
	}
}

// TestMemoryCallElsewhere: the call on a file that is none of NVIDIA's continues, and may reach one of these.
func TestMemoryCallElsewhere(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	f := newFakeCall(t, g, fakeControl)
	if rep := g.onOtherFile(&f.trappedCall, uint32(testCmd(rm.EscAllocMemory, rm.AllocMemorySize))); !rep.resume ||
		g.memoryCalls.n.Load() != 1 {
		t.Errorf("%+v, %d calls are known", rep, g.memoryCalls.n.Load())
	}
}
