// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// modeContainer is a container whose driver logs what has to do with the mode of contexts.
type modeContainer struct {
	*fakeContainer
	f      *fakeCall
	log    []string
	refuse uint32          // the status of SET_CTXSW_PREEMPTION_MODE, for more than CTA
	stuck  map[uint32]bool // handles that cannot be freed
}

const (
	modeGroup     = 0x100
	modeSubdevice = 0x5d000000
)

func newModeContainer(t *testing.T) *modeContainer {
	c := &modeContainer{fakeContainer: newFakeContainer(t, 1), stuck: map[uint32]bool{}}
	c.cfg.Settings.ContextOverhead, c.cfg.Settings.MaxTSGs, c.cfg.Settings.MaxChannels = 13*quota.MiB, 8, 16
	c.account.addObject(fakeClient, object{handle: modeSubdevice, parent: fakeDevice, class: 0x2080, kind: rm.ClassSubdevice, gpu: noGPU},
		noGPU, 0, 0)
	c.d.answer = func(t Target, call *rm.Call) syscall.Errno {
		e := c.d.call(t, call)
		o := call.Outer
		switch call.NR() {
		case rm.EscAlloc:
			c.log = append(c.log, fmt.Sprintf("alloc %x", rm.U32(o, rm.AllocClass)))
		case rm.EscFree:
			c.log = append(c.log, fmt.Sprintf("free %x", rm.U32(o, rm.FreeObject)))
			if c.stuck[rm.U32(o, rm.FreeObject)] {
				rm.PutU32(o, rm.FreeStatus, rm.StatusInUse)
			}
		case rm.EscControl:
			p := call.Blocks[0].Data
			switch rm.U32(o, rm.ControlCmd) {
			case controlPreemptionMode:
				if rm.U32(o, rm.ControlClient) != fakeClient || rm.U32(o, rm.ControlObject) != modeSubdevice {
					c.Errorf("the mode is set by client %#x, object %#x", rm.U32(o, rm.ControlClient), rm.U32(o, rm.ControlObject))
				}
				c.log = append(c.log, fmt.Sprintf("mode %x %d %d", rm.U32(p, rm.PreemptChannel), rm.U32(p, rm.PreemptFlags), rm.U32(p, rm.PreemptCILP)))
				if rm.U32(p, rm.PreemptCILP) != rm.PreemptModeCTA {
					rm.PutU32(o, rm.ControlStatus, c.refuse)
				}
			case controlDisableChannels:
				c.log = append(c.log, map[byte]string{1: "off", 0: "on"}[p[disableFlag]])
			case scheduleGroup, scheduleChannel:
				c.log = append(c.log, fmt.Sprintf("schedule %x %d", rm.U32(o, rm.ControlObject), p[0]))
			}
		}
		return e
	}
	if _, err := c.guardClient(); err != nil { // or its objects would be in the log
		t.Fatal(err)
	}
	c.log = nil
	c.f = newFakeCall(t, c.Guard, c.d.file)
	return c
}

func (c *modeContainer) alloc(parent, handle, class uint32) uint32 {
	p := make([]byte, 368)
	if class == classChannelGroup {
		rm.PutU32(p, rm.TSGEngineType, engineGR)
	}
	o := fakeAlloc(parent, handle, class, p)
	c.f.escape(rm.EscAlloc, o, p)
	return rm.U32(o, 40)
}

func (c *modeContainer) free(handle uint32) uint32 {
	o := fakeFree(handle)
	c.f.escape(rm.EscFree, o)
	return rm.U32(o, rm.FreeStatus)
}

func (c *modeContainer) mode(channel, flags, gfxp, cilp uint32) uint32 {
	p := make([]byte, rm.PreemptSize)
	putWords(p, 0, flags, channel, gfxp, cilp)
	o := fakeControlCall(modeSubdevice, controlPreemptionMode, p)
	c.f.escape(rm.EscControl, o, p)
	return rm.U32(o, rm.ControlStatus)
}

// TestPreemption: whatever the order, no work can begin in a context before it is switched in the middle of kernels, and that is set once.
func TestPreemption(t *testing.T) {
	const channel, engine = modeGroup + 1, modeGroup + 2
	group := func(c *modeContainer) uint32 {
		return max(c.alloc(fakeDevice, modeGroup, classChannelGroup), c.alloc(modeGroup, channel, 0xc86f))
	}
	object := func(class uint32) func(*modeContainer) uint32 {
		return func(c *modeContainer) uint32 { return c.alloc(channel, engine, class) }
	}
	schedule := func(handle uint32) func(*modeContainer) uint32 {
		cmd := uint32(scheduleGroup)
		if handle == channel {
			cmd = scheduleChannel
		}
		return func(c *modeContainer) uint32 { return c.schedule(c.f, handle, cmd, true) }
	}
	free := func(handle uint32) func(*modeContainer) uint32 {
		return func(c *modeContainer) uint32 { return c.free(handle) }
	}
	mode := func(flags, gfxp, cilp uint32) func(*modeContainer) uint32 {
		return func(c *modeContainer) uint32 { return c.mode(channel, flags, gfxp, cilp) }
	}
	draws := func(c *modeContainer) uint32 {
		c.cfg.Settings.Graphics, c.refuse = true, rm.StatusInvalidRequest
		return 0
	}
	capped := func(c *modeContainer) uint32 {
		c.set(func(p *sched.Plan) { p.Cap = 300 })
		return 0
	}
	loneMode := func(c *modeContainer) uint32 {
		p := make([]byte, 368)
		rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeCopy0)
		o := fakeAlloc(fakeDevice, modeGroup, 0xc86f, p)
		c.f.escape(rm.EscAlloc, o, p)
		return max(rm.U32(o, 40), c.mode(modeGroup, 1, 0, 1))
	}
	refuses := func(c *modeContainer) uint32 { c.refuse = rm.StatusNotSupported; return 0 }
	noSubdevice := func(c *modeContainer) uint32 { c.account.freeObject(fakeClient, modeSubdevice); return 0 }
	native := func(c *modeContainer) uint32 {
		c.account.gpus[0].native = true
		c.cfg.GPUs[0].Native = true
		c.gpuTime = newScheduler(c.Guard)
		return 0
	}
	stuck := func(handles ...uint32) func(*modeContainer) uint32 {
		return func(c *modeContainer) uint32 {
			for _, h := range handles {
				c.stuck[h] = true
			}
			return 0
		}
	}
	type steps []func(*modeContainer) uint32
	for _, x := range []struct {
		name   string
		steps  steps
		status uint32 // of the last
		want   []string
	}{
		{"as CUDA does", steps{group, object(0xcbc0), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 100 1"}},
		{"by a channel", steps{group, object(0xcbc0), schedule(channel), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 101 1", "schedule 100 1"}},
		{"an object for copies by the engine, on whose channel kernels can be launched too", steps{group, object(0xa140), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc a140", "mode 100 1 2", "schedule 100 1"}},
		{"a 3D object", steps{group, object(0xcb97)}, rm.StatusNotSupported, []string{"alloc a06c", "alloc c86f"}},
		{"a 2D object", steps{group, object(0x902d)}, rm.StatusNotSupported, []string{"alloc a06c", "alloc c86f"}},
		{"a 3D object on a whole GPU", steps{native, group, object(0xcb97), schedule(modeGroup), mode(1, 0, 1)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cb97", "schedule 100 1", "mode 101 1 1"}},
		{"a 3D object where the node allows it", steps{draws, group, object(0xcb97), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cb97", "schedule 100 1"}},
		{"as Vulkan does", steps{draws, group, schedule(channel), object(0x902d), mode(1, 0, 1),
			func(c *modeContainer) uint32 { return c.alloc(channel, engine+1, 0xcbc0) }}, 0,
			[]string{"alloc a06c", "alloc c86f", "schedule 101 1", "off", "alloc 902d", "on", "mode 101 1 1", "off", "alloc cbc0", "on"}},
		{"a 3D object with a hard cap", steps{draws, capped, group, object(0xcb97)}, rm.StatusNotSupported, []string{"alloc a06c", "alloc c86f"}},
		{"a context that draws asks for none at all", steps{draws, group, object(0xcb97), mode(1, 0, 0)}, rm.StatusNotSupported,
			[]string{"alloc a06c", "alloc c86f", "alloc cb97"}},
		{"a mode of a copy engine", steps{loneMode}, 0, []string{"alloc c86f"}},
		{"the object comes later", steps{group, schedule(modeGroup), object(0xcbc0)}, 0,
			[]string{"alloc a06c", "alloc c86f", "schedule 100 1", "off", "alloc cbc0", "mode 100 1 2", "on"}},
		{"a group that is scheduled before it has channels", steps{
			func(c *modeContainer) uint32 { return c.alloc(fakeDevice, modeGroup, classChannelGroup) }, schedule(modeGroup),
			func(c *modeContainer) uint32 { return c.alloc(modeGroup, channel, 0xc86f) }, object(0xcbc0)}, 0,
			[]string{"alloc a06c", "schedule 100 1", "alloc c86f", "off", "alloc cbc0", "mode 100 1 2", "on"}},
		{"the program asks too", steps{group, object(0xcbc0), schedule(modeGroup), mode(1, 0, 2)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 100 1"}},
		{"the program asks before", steps{group, object(0xcbc0), mode(1, 0, 2), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 101 1 2", "schedule 100 1"}},
		{"the program asks for graphics", steps{draws, group, object(0xcb97), schedule(modeGroup), mode(2, 1, 0)}, rm.StatusInvalidRequest,
			[]string{"alloc a06c", "alloc c86f", "alloc cb97", "schedule 100 1", "mode 101 2 0"}},
		{"the program asks before there is a context", steps{group, mode(1, 0, 2), object(0xcbc0), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "mode 101 1 2", "alloc cbc0", "mode 100 1 2", "schedule 100 1"}},
		{"another mode", steps{group, object(0xcbc0), schedule(modeGroup), mode(1, 0, 1)}, rm.StatusNotSupported,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 100 1"}},
		{"a second context under the same handles",
			steps{group, object(0xcbc0), schedule(modeGroup), free(modeGroup), group, object(0xcbc0), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 100 1", "free 100",
				"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 100 1"}},
		{"another object instead of the first", steps{group, object(0xcbc0), schedule(modeGroup), free(engine), object(0xcbc0)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2", "schedule 100 1", "free 102", "off", "alloc cbc0",
				"mode 100 1 2", "on"}},
		{"copies", steps{group, object(0xc8b5), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc c8b5", "schedule 100 1"}},
		{"a whole GPU", steps{native, group, object(0xcbc0), schedule(modeGroup)}, 0,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "schedule 100 1"}},
		{"the driver refuses", steps{refuses, group, object(0xcbc0), schedule(modeGroup)}, rm.StatusNotSupported,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0", "mode 100 1 2"}},
		{"the driver refuses in a group that runs", steps{refuses, group, schedule(modeGroup), object(0xcbc0)}, rm.StatusNotSupported,
			[]string{"alloc a06c", "alloc c86f", "schedule 100 1", "off", "alloc cbc0", "mode 100 1 2", "free 102", "on"}},
		{"and the object does not go", steps{refuses, stuck(engine, modeGroup), group, schedule(modeGroup), object(0xcbc0)},
			rm.StatusNotSupported,
			[]string{"alloc a06c", "alloc c86f", "schedule 100 1", "off", "alloc cbc0", "mode 100 1 2", "free 102", "free 100", "free c1d00005"}},
		{"no subdevice", steps{noSubdevice, group, object(0xcbc0), schedule(modeGroup)}, rm.StatusNotSupported,
			[]string{"alloc a06c", "alloc c86f", "alloc cbc0"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newModeContainer(t)
			var status uint32
			for i, step := range x.steps {
				if status = step(c); status != rm.StatusOK && i < len(x.steps)-1 {
					t.Fatalf("step %d: %s", i, rm.StatusName(status))
				}
			}
			if status != x.status || !slices.Equal(c.log, x.want) {
				t.Errorf("status %s\n got %q\nwant %q", rm.StatusName(status), c.log, x.want)
			}
		})
	}
}

// TestPreemptionIsAPause: while a group is off because its context is made, somebody is there to resume it, should the guard be killed; if
// nobody is, there is no context. What the driver would not resume is tried again.
func TestPreemptionIsAPause(t *testing.T) {
	const channel, engine = modeGroup + 1, modeGroup + 2
	c := newModeContainer(t)
	c.alloc(fakeDevice, modeGroup, classChannelGroup)
	c.alloc(modeGroup, channel, 0xc86f)
	c.schedule(c.f, modeGroup, scheduleGroup, true)
	c.none.Store(true)
	if s := c.alloc(channel, engine, 0xcbc0); s != rm.StatusNotSupported {
		t.Errorf("%s without a rescuer", rm.StatusName(s))
	}
	wantUsage(t, c.account, 0, 13*quota.MiB) // of the group
	c.isOff()
	c.none.Store(false)
	want := []fakeName{{fakeClient, channel}}
	c.d.at = func(cmd uint32) {
		if cmd == controlDisableChannels || cmd == controlPreemptionMode {
			if l := slices.Concat(c.noted()...); !slices.Equal(l, want) {
				t.Errorf("%#x is noted", l)
			}
		}
	}
	c.d.refuse = func(l fakeList) uint32 { return map[bool]uint32{false: rm.StatusInvalidState}[l.off] }
	if s := c.alloc(channel, engine, 0xcbc0); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	c.isOff(want)
	c.d.refuse = nil
	if !c.pause(false) {
		t.Error("not resumed")
	}
	c.isOff()
	if l := c.noted(); len(l) != 0 {
		t.Errorf("%#x is noted", l)
	}
}

// TestPreemptionOfTheHeld: what is off when its context is made stays off, and is resumed with the others.
func TestPreemptionOfTheHeld(t *testing.T) {
	c := newModeContainer(t)
	c.alloc(fakeDevice, modeGroup, classChannelGroup)
	c.alloc(modeGroup, modeGroup+1, 0xc86f)
	c.schedule(c.f, modeGroup, scheduleGroup, true)
	c.pause(true)
	if s := c.alloc(modeGroup+1, modeGroup+2, 0xcbc0); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	c.isOff([]fakeName{{fakeClient, modeGroup + 1}})
	c.pause(false)
	c.isOff()
}

// TestContextMemory: a context is charged what its buffers come to on the GPU, if that is more than context_overhead, and graphics
// preemption what it adds, once.
func TestContextMemory(t *testing.T) {
	c := newModeContainer(t)
	sizes := map[uint32]uint32{0x0: 3 << 20, 0x9: 5 << 20, 0x10: 200 << 10, 0xb: 9 << 20, 0xc: 1 << 20, 0xd: 40 << 10, 0xe: 2 << 20,
		0xf: 1 << 20, 0x19: 4 << 10}
	told := c.d.answer
	c.d.answer = func(tg Target, call *rm.Call) syscall.Errno {
		e := told(tg, call)
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlContextProperties {
			p := call.Blocks[0].Data
			rm.PutU32(p, rm.ContextBufferBytes, sizes[rm.U32(p, rm.ContextBufferEngine)])
		}
		return e
	}
	used := func(want quota.Bytes) {
		t.Helper()
		if got := c.account.usage(0).used; got != want {
			t.Errorf("%v are charged, want %v", got, want)
		}
	}
	mode := func(gfxp uint32) uint32 { return c.mode(modeGroup, 2, gfxp, 0) }
	const context = (4+512)*quota.MiB + 256*quota.KiB + contextRest
	c.account.gpus[0].limit = quota.GiB
	if s := c.alloc(fakeDevice, modeGroup, classChannelGroup); s != 0 {
		t.Fatal(rm.StatusName(s))
	}
	used(context)
	for range 2 {
		if s := mode(rm.PreemptModeGFXP); s != 0 {
			t.Fatal(rm.StatusName(s))
		}
		used(context + 13*quota.MiB + 2*64*quota.KiB)
	}
	if s := mode(2); s != rm.StatusNotSupported { // a pool that containers would share
		t.Error(rm.StatusName(s))
	}
	c.free(modeGroup)
	used(0)

	sizes[0x9], c.refuse = 1<<20, rm.StatusInvalidState
	c.contextBuffers = map[contextBuffer]uint64{}
	if s := c.alloc(fakeDevice, modeGroup, classChannelGroup); s != 0 {
		t.Fatal(rm.StatusName(s))
	}
	used(13 * quota.MiB) // context_overhead
	if s := mode(rm.PreemptModeGFXP); s != rm.StatusInvalidState {
		t.Error(rm.StatusName(s))
	}
	used(13 * quota.MiB)
	c.refuse, c.account.gpus[0].limit = 0, 20*quota.MiB
	if s := mode(rm.PreemptModeGFXP); s != rm.StatusNoMemory {
		t.Error(rm.StatusName(s))
	}
	used(13 * quota.MiB)
}

// TestPreemptionUnseen: after a root alloc that went elsewhere no group runs with a context that the guard has not seen made, and that is
// switched at the end of kernels only.
func TestPreemptionUnseen(t *testing.T) {
	const channel, engine = modeGroup + 1, modeGroup + 2
	for _, x := range []struct {
		name    string
		prepare func(c *modeContainer)
		want    []string // of what happens to the group
		off     bool
	}{
		{"it runs", func(*modeContainer) {}, []string{"off", "mode 100 1 2", "on"}, false},
		{"it has no context", func(c *modeContainer) { c.refuse = rm.StatusInvalidState }, []string{"off", "mode 100 1 2", "on"}, false},
		{"it has one that draws", func(c *modeContainer) { c.refuse = rm.StatusInvalidRequest },
			[]string{"off", "mode 100 1 2", "on", "off"}, true},
		{"it has one that draws where the node allows it", func(c *modeContainer) {
			c.cfg.Settings.Graphics, c.refuse = true, rm.StatusInvalidRequest
		}, []string{"off", "mode 100 1 2", "on"}, false},
		{"it has one that was seen to draw", func(c *modeContainer) {
			c.cfg.Settings.Graphics = true
			c.alloc(channel, engine, 0xcb97)
		}, nil, false},
		{"it has lost the one that was seen", func(c *modeContainer) {
			c.alloc(channel, engine, 0xcbc0)
			c.free(engine)
		}, []string{"off", "mode 100 1 2", "on"}, false},
		{"its own is switched in the middle of kernels", func(c *modeContainer) { c.alloc(channel, engine, 0xcbc0) }, nil, false},
		{"the container is off", func(c *modeContainer) { c.pause(true) }, []string{"off", "mode 100 1 2"}, true},
		{"the driver cannot be asked", func(c *modeContainer) { c.account.freeObject(fakeClient, modeSubdevice) }, []string{"off"}, true},
		{"its file is in no process", func(c *modeContainer) {
			c.account.clients[fakeClient].file = nil
		}, []string{"off"}, true},
		{"searches for files have taken all that they may", func(c *modeContainer) {
			c.bill.searches.spend(time.Now(), 1000)
		}, []string{"off", "mode 100 1 2", "on"}, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newModeContainer(t)
			c.account.freeObject(fakeClient, workGroup)
			c.account.freeObject(fakeClient, copyGroup)
			c.alloc(fakeDevice, modeGroup, classChannelGroup)
			c.alloc(modeGroup, channel, 0xc86f)
			c.schedule(c.f, modeGroup, scheduleGroup, true)
			x.prepare(c)
			c.log = nil
			c.preemptUnseen()
			if !slices.Equal(c.log, x.want) {
				t.Errorf("got %q, want %q", c.log, x.want)
			}
			off := []fakeName{{fakeClient, channel}}
			if !x.off {
				off = nil
			}
			c.isOff(off)
			if left := c.account.notPreempting(); x.off && c.account.isEnding(fakeClient) && len(left) > 0 {
				t.Errorf("the guard goes on to look at %d groups that do not run again", len(left))
			}
		})
	}
	t.Run("one that runs later", func(t *testing.T) {
		c := newModeContainer(t)
		c.alloc(fakeDevice, modeGroup, classChannelGroup)
		c.rootWentAstray(&pendingRoot{task: c.f.task})
		if !slices.Contains(c.log, "mode 100 1 2") {
			t.Errorf("%q", c.log)
		}
	})
	t.Run("while its thread is held", func(t *testing.T) {
		c := newModeContainer(t)
		c.alloc(fakeDevice, modeGroup, classChannelGroup)
		tid, args, end := stuckThread(t)
		defer end()
		p := &pendingRoot{task: &task{tid: tid, proc: c.f.task.proc}, fd: -1, args: args, since: time.Now().Add(-2 * time.Second)}
		f := &file{pending: p}
		c.watchRoot(f, p)
		if !slices.Contains(c.log, "mode 100 1 2") {
			t.Errorf("%q", c.log)
		}
		f.mu.Lock()
		f.pending = nil // the next look finds it settled
		f.mu.Unlock()
	})
}

// TestPreemptionWhileMany: root allocs that do not end, however many, have the guard look at all groups as often as one.
func TestPreemptionWhileMany(t *testing.T) {
	c := newModeContainer(t)
	c.account.freeObject(fakeClient, workGroup)
	c.account.freeObject(fakeClient, copyGroup)
	c.alloc(fakeDevice, modeGroup, classChannelGroup)
	answer := c.d.answer
	c.d.answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlPreemptionMode {
			time.Sleep(50 * time.Millisecond) // so it rests for 5 s
		}
		return answer(t, call)
	}
	c.refuse, c.log = rm.StatusInvalidState, nil
	for range 3 {
		c.preemptWhilePending()
	}
	if want := []string{"mode 100 1 2"}; !slices.Equal(c.log, want) {
		t.Errorf("got %q, want %q", c.log, want)
	}
	c.preemptNotBefore = time.Time{}
	c.preemptMu.Lock() // somebody is at it
	c.preemptWhilePending()
	c.preemptMu.Unlock()
	if len(c.log) != 1 {
		t.Errorf("two look at once: %q", c.log)
	}
	if c.preemptWhilePending(); len(c.log) != 2 {
		t.Error("it never looks again")
	}
}
