// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"maps"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	g.memoryPatience = 0
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
	if is {
		m.number++
		m.inside = map[int]*memoryCall{tid: {args: args}}
		m.n.Store(1)
		return
	}
	clear(m.inside)
	m.forget(tid)
}

func (d *countingDriver) freeByTask(handle uint32) {
	if o, ok := d.objects[handle]; ok {
		d.refers[o.memory]--
		d.free(handle)
	}
}

// makes are calls that make an object under a handle.
func (x *freedByTask) makes() map[string]func(handle uint32) (status uint32) {
	return map[string]func(uint32) uint32{
		"RM_ALLOC": func(h uint32) uint32 { return x.driver.ownMemory(x.fakeCall, taskTwo, h) },
		"device memory": func(h uint32) uint32 {
			p := make([]byte, 128)
			rm.PutU32(p, rm.MemoryOwner, 1)
			rm.PutU64(p, rm.MemorySize, 4096)
			return x.alloc(h, classVidmem, p)
		},
		"RM_DUP_OBJECT": func(h uint32) uint32 {
			o := make([]byte, rm.DupSize)
			putWords(o, 0, fakeClient, fakeDevice, h, fakeClient, fakeMemory)
			x.escape(rm.EscDupObject, o)
			return rm.U32(o, rm.DupStatus)
		},
		"RM_VID_HEAP_CONTROL": func(h uint32) uint32 {
			o := make([]byte, rm.HeapSize)
			putWords(o, rm.HeapRoot, fakeClient)
			putWords(o, rm.HeapParent, fakeDevice)
			putWords(o, rm.HeapFunction, rm.HeapFnAllocSize)
			putWords(o, rm.HeapAllocMemory, h)
			rm.PutU64(o, rm.HeapAllocSize, 4096)
			x.escape(rm.EscVidHeapControl, o)
			return x.statusWord()
		},
		"RM_ALLOC_MEMORY of no memory": func(h uint32) uint32 {
			noteMemory(x.fakeCall, classVidmem, fakeDevice, h)
			return x.statusWord()
		},
	}
}

// TestFreedName: RM_ALLOC_MEMORY maps, and frees, by its handle. So nothing is made under that while the thread may be about to: device
// memory would be mapped into the task's file, uncounted, or what the guard believes in be freed.
func TestFreedName(t *testing.T) {
	for name := range (*freedByTask)(nil).makes() {
		for _, handle := range []uint32{taskMade, 0} {
			x := newFreedByTask(t)
			call := x.makes()[name]
			x.escape(rm.EscFree, fakeFree(taskMade))
			if s := call(handle); s != rm.StatusBusyRetry && handle != 0 || s == rm.StatusOK {
				t.Errorf("%s of %#x: %s", name, handle, rm.StatusName(s))
			}
			if _, known := x.guard.account.lookup(fakeClient, taskMade); known {
				t.Errorf("%s: the account has it", name)
			}
			if s := call(ours); s == rm.StatusBusyRetry {
				t.Errorf("%s of another handle: %s", name, rm.StatusName(s))
			}
			x.inside(false)
			if s := call(taskMade); s == rm.StatusBusyRetry {
				t.Errorf("%s when the thread has left: %s", name, rm.StatusName(s))
			}
		}
	}
}

// TestImportedNames: imports make objects as well, one or several.
func TestImportedNames(t *testing.T) {
	one, several := make([]byte, 64), make([]byte, 4096)
	rm.PutU32(one, rm.ImportFDObject+rm.ExportObjectHandle, ours)
	several[importObjectsCount] = 2
	putWords(several, importObjectsList, ours, theirs, fakeMemory)
	for kind, x := range map[rm.ControlKind]struct {
		params []byte
		want   []uint32
	}{rm.ControlImportFD: {one, []uint32{ours}}, rm.ControlImportFDs: {several, []uint32{ours, theirs}}, rm.ControlExportFD: {one, nil}} {
		c := &trappedCall{control: rm.Control{Kind: kind}, params: x.params}
		c.call.Cmd = uint32(testCmd(rm.EscControl, rm.ControlSize))
		if got := c.newHandles(); !slices.Equal(got, x.want) {
			t.Errorf("%v: %#x", kind, got)
		}
	}
}

// TestFreedNameWaits: a call waits until the thread has left, holds nobody up meanwhile, and is made then.
func TestFreedNameWaits(t *testing.T) {
	x := newFreedByTask(t)
	x.guard.memoryPatience = memoryPatience
	x.escape(rm.EscFree, fakeFree(taskMade))
	begin, m := time.Now(), &x.guard.memoryCalls
	go func() {
		for m.awaited.Load() == 0 {
			shortly()
		}
		lock, _ := x.guard.account.lockCalls(fakeClient, fakeClient)
		lock.unlock()
		x.inside(false)
	}()
	if s := x.driver.ownMemory(x.fakeCall, taskOne, taskMade); s != rm.StatusOK {
		t.Error(rm.StatusName(s))
	}
	if took := time.Since(begin); took > memoryPatience/2 || m.awaited.Load() != 0 || x.guard.waiters.Load() != 0 {
		t.Errorf("after %v; %d wait", took, m.awaited.Load())
	}
}

// TestFreedNameWaitsForAll: threads that came later are waited for, too: one can have made what another frees. So they give way.
func TestFreedNameWaitsForAll(t *testing.T) {
	x := newFreedByTask(t)
	m := &x.guard.memoryCalls
	x.escape(rm.EscFree, fakeFree(taskMade))
	m.mu.Lock()
	first := *m.inside[slices.Collect(maps.Keys(m.inside))[0]]
	m.inside[1<<22] = &memoryCall{args: first.args}
	m.inside[os.Getppid()] = &memoryCall{} // it is not in an ioctl
	m.number++
	m.mu.Unlock()
	if s := x.driver.ownMemory(x.fakeCall, taskOne, taskMade); s != rm.StatusBusyRetry {
		t.Error(rm.StatusName(s))
	}
	if n := len(m.inside); n != 1 {
		t.Errorf("%d are inside", n)
	}
	x.guard.memoryPatience = time.Minute
	m.awaited.Store(1)
	time.AfterFunc(5*time.Millisecond, func() { x.inside(false); m.awaited.Store(0) })
	if rep := noteMemory(x.fakeCall, classSystem, taskOne, taskMade); !rep.resume || m.awaited.Load() != 0 {
		t.Errorf("%+v while others wait", rep)
	}
}

// TestFreedMany: with a device all that was below it is freed, and with what is not known nobody knows what.
func TestFreedMany(t *testing.T) {
	for name, free := range map[string]func(x *freedByTask){
		"a device":       func(x *freedByTask) { x.escape(rm.EscFree, fakeFree(taskOne)) },
		"an unknown one": func(x *freedByTask) { x.guard.objectFreed(x.target(), fakeClient, taskMade+0x1000) },
		"many": func(x *freedByTask) {
			for i := range uint32(maxFreedNames + 1) {
				noteMemory(x.fakeCall, classSystem, taskOne, taskMade+1+i)
				x.inside(true)
				x.escape(rm.EscFree, fakeFree(taskMade+1+i))
			}
		},
	} {
		x := newFreedByTask(t)
		free(x)
		if s := x.driver.ownMemory(x.fakeCall, taskTwo, theirs); s != rm.StatusBusyRetry {
			t.Errorf("%s: %s", name, rm.StatusName(s))
		}
		x.inside(false)
		if s := x.driver.ownMemory(x.fakeCall, taskTwo, theirs); s != rm.StatusOK {
			t.Errorf("%s: %s when the thread has left", name, rm.StatusName(s))
		}
		x.inside(true)
		noteMemory(x.fakeCall, classSystem, taskTwo, taskMade)
		x.inside(true)
		x.escape(rm.EscFree, fakeFree(taskMade))
		if f := &x.guard.account.clients[fakeClient].freed; len(f.names) != 1 {
			t.Errorf("%s: %d names are remembered", name, len(f.names))
		}
	}
}

// TestNothingFreed: no call waits where the driver cannot take one thing for another.
func TestNothingFreed(t *testing.T) {
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
	}
}

// TestMemoryLooks: however many threads there are, a call pays a look at some.
func TestMemoryLooks(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	f := newFakeCall(t, g, fakeControl)
	for i := range 3 * memoryLooks {
		f.trappedCall.task = &task{tid: 1<<22 + i}
		g.memoryCalls.let(&f.trappedCall)
	}
	for i := range 3 {
		if quiet := g.memoryCalls.quietSince(1); quiet != (i == 2) || len(g.memoryCalls.inside) != (2-i)*memoryLooks {
			t.Errorf("after %d looks: %v, %d", i+1, quiet, len(g.memoryCalls.inside))
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

// TestLeaving: of a thread that is stopped, or ends, the registers are those of the call that it comes from.
func TestLeaving(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	becomes := func(want bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); isLeaving(pid) != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("want %t", want)
			}
		}
	}
	becomes(false)
	_ = cmd.Process.Signal(unix.SIGSTOP)
	becomes(true)
	_ = cmd.Process.Signal(unix.SIGCONT)
	becomes(false)
	_ = cmd.Process.Kill()
	becomes(true) // until it is waited for
	_ = cmd.Wait()
}
