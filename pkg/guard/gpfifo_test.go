// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/sched"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

const (
	scheduleGroup   = 0xa06c0101
	scheduleChannel = 0xa06f0103
)

// schedule makes a tenant's GPFIFO_SCHEDULE.
func (c *fakeContainer) schedule(f *fakeCall, handle, cmd uint32, enable bool) uint32 {
	p := make([]byte, 3)
	if enable {
		p[0] = 1
	}
	o := fakeControlCall(handle, cmd, p)
	rm.PutU32(o, rm.ControlStatus, 0xdead)
	if rep := f.escape(rm.EscControl, o, p); rep != replyDone {
		c.Errorf("%+v", rep)
	}
	return rm.U32(o, rm.ControlStatus)
}

func (d *fakeGPU) schedules() []fakeSchedule {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.scheduled
	d.scheduled = nil
	return s
}

// TestSchedule: while the container is on, its calls reach the driver, and the guard knows what runs.
func TestSchedule(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 2)
	f := newFakeCall(t, c.Guard, fakeControl)
	for _, x := range []struct {
		handle, cmd uint32
		enable      bool
		known       [3]bool // the group, each channel
	}{
		{0x100, scheduleChannel, true, [3]bool{false, true, false}},
		{workGroup, scheduleGroup, true, [3]bool{true, true, true}},
		{0x101, scheduleChannel, false, [3]bool{false, true, false}},
		{workGroup, scheduleGroup, false, [3]bool{false, false, false}},
	} {
		if s := c.schedule(f, x.handle, x.cmd, x.enable); s != rm.StatusOK {
			t.Errorf("%#x: %s", x.handle, rm.StatusName(s))
		}
		if got := c.d.schedules(); !slices.Equal(got, []fakeSchedule{{fakeName{fakeClient, x.handle}, x.enable}}) {
			t.Errorf("%#x: the driver saw %+v", x.handle, got)
		}
		known := [3]bool{c.account.allScheduled(fakeClient, workGroup), c.account.allScheduled(fakeClient, 0x100),
			c.account.allScheduled(fakeClient, 0x101)}
		if known != x.known {
			t.Errorf("after %#x, %v: %v run, want %v", x.handle, x.enable, known, x.known)
		}
	}
	if c.account.allScheduled(fakeClient, copyGroup) {
		t.Error("a group without channels runs")
	}
}

// TestScheduleEnding: what is off for good is refused, where it waited for ever to be let run.
func TestScheduleEnding(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 1)
	c.stopChannels(func(*client) bool { return true })
	f := newFakeCall(t, c.Guard, fakeControl)
	done := make(chan [2]uint32, 1)
	go func() {
		done <- [2]uint32{c.schedule(f, workGroup, scheduleGroup, true), c.schedule(f, workGroup, scheduleGroup, false)}
	}()
	select {
	case s := <-done:
		if s[0] != rm.StatusInvalidState || s[1] != rm.StatusOK {
			t.Errorf("on: %s, off: %s", rm.StatusName(s[0]), rm.StatusName(s[1]))
		}
	case <-time.After(patience):
		t.Fatal("the call hangs")
	}
	if got := c.d.schedules(); len(got) != 1 || got[0].enable {
		t.Errorf("the driver saw %+v", got)
	}
}

// TestScheduleUnseen: what the guard has not seen made does not run, neither does what is no channel.
func TestScheduleUnseen(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 1)
	f := newFakeCall(t, c.Guard, fakeControl)
	for _, handle := range []uint32{0x999, fakeDevice, fakeMemory} {
		for _, cmd := range []uint32{scheduleGroup, scheduleChannel} {
			if s := c.schedule(f, handle, cmd, true); s != rm.StatusInvalidObjectHandle {
				t.Errorf("%#x by %#x: %s", handle, cmd, rm.StatusName(s))
			}
		}
	}
	if got := c.d.schedules(); len(got) > 0 {
		t.Errorf("the driver saw %+v", got)
	}
}

// TestScheduleWhileOff: what runs already needs no permission, what is new waits, and what stops may.
func TestScheduleWhileOff(t *testing.T) {
	for _, x := range []struct {
		name           string
		handle, cmd    uint32
		enable, paused bool
		waits, asked   bool
	}{
		{"a known group", workGroup, scheduleGroup, true, false, false, false},
		{"a known channel", 0x100, scheduleChannel, true, false, false, false},
		{"a new channel", 0x102, scheduleChannel, true, false, true, true},
		{"to stop", workGroup, scheduleGroup, false, false, false, true},
		{"copies beside a hard cap", copyGroup, scheduleGroup, true, false, false, true},
		{"copies while paused", copyGroup, scheduleGroup, true, true, true, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newFakeContainer(t, 1)
			c.channels(fakeClient, workGroup, 0x100, 2)
			f := newFakeCall(t, c.Guard, fakeControl)
			c.schedule(f, workGroup, scheduleGroup, true)
			c.channels(fakeClient, copyGroup, 0x200, 1)
			c.set(func(p *sched.Plan) { p.Suspended = x.paused })
			c.pause(true)
			if x.waits && !x.paused {
				c.channels(fakeClient, workGroup, 0x102, 1)
			}
			c.d.schedules()
			done := make(chan uint32, 1)
			go func() { done <- c.schedule(f, x.handle, x.cmd, x.enable) }()
			if x.waits {
				select {
				case s := <-done:
					t.Fatalf("it did not wait: %s", rm.StatusName(s))
				case <-time.After(10 * time.Millisecond):
				}
				if got := c.d.schedules(); len(got) > 0 {
					t.Fatalf("it waits, but the driver saw %+v", got)
				}
				c.set(func(p *sched.Plan) { p.Suspended = false })
				c.pause(false)
			}
			select {
			case s := <-done:
				if s != rm.StatusOK {
					t.Errorf("status %s", rm.StatusName(s))
				}
			case <-time.After(patience):
				t.Fatal("it waits for ever")
			}
			if got := c.d.schedules(); (len(got) == 1) != x.asked {
				t.Errorf("the driver saw %+v", got)
			}
		})
	}
}

// TestScheduleAfterStop: what its program has stopped counts as new, or a pause would end by itself.
func TestScheduleAfterStop(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 1)
	f := newFakeCall(t, c.Guard, fakeControl)
	c.schedule(f, workGroup, scheduleGroup, true)
	c.pause(true)
	c.schedule(f, workGroup, scheduleGroup, false)
	c.gpuTime.Lock()
	held := c.mustNotRun(fakeClient, workGroup) && !c.account.allScheduled(fakeClient, workGroup)
	c.gpuTime.Unlock()
	if !held {
		t.Error("a stopped group would run while its container is off")
	}
}

// TestScheduleOfTheGone: a caller that is killed while it waits lets go of the worker, and nothing runs.
func TestScheduleOfTheGone(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 1)
	c.pause(true)
	f := newFakeCall(t, c.Guard, fakeControl)
	p := []byte{1, 0, 0}
	o := fakeControlCall(workGroup, scheduleGroup, p)
	f.call = rm.Call{Cmd: uint32(testCmd(rm.EscControl, len(o))), Outer: o}
	done := make(chan reply, 1)
	f.listener = &listener{fd: -1}
	f.params = p
	go func() { done <- f.execute(c.checkSchedule(&f.trappedCall)) }()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("it waits for ever")
	}
	if got := c.d.schedules(); len(got) > 0 || c.account.allScheduled(fakeClient, workGroup) {
		t.Errorf("the driver saw %+v", got)
	}
}

// TestStarted: a new group has its timeslice when its first work can come, on the file of the call itself.
func TestStarted(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 2)
	c.channels(fakeClient, copyGroup, 0x200, 1)
	f := newFakeCall(t, c.Guard, fakeControl)
	c.d.file = fakeControl
	c.schedule(f, copyGroup, scheduleGroup, true)
	if got := c.d.took(); len(got) > 0 {
		t.Errorf("a timeslice for copies: %#x", got)
	}
	c.schedule(f, 0x100, scheduleChannel, true) // as libcuda does, or the whole group
	group := fakeName{fakeClient, workGroup}
	if got := c.d.took(); !slices.Equal(got, []fakeName{group}) || c.d.slices[group] != c.cfg.Settings.BaseTimeslice || c.d.elsewhere > 0 {
		t.Errorf("%#x, %v, %d on another file", got, c.d.slices[group], c.d.elsewhere)
	}
	c.schedule(f, workGroup, scheduleGroup, true)
	c.schedule(f, workGroup, scheduleGroup, false)
	if got := c.d.took(); len(got) > 0 {
		t.Errorf("set again: %#x", got)
	}
}

// TestSetTimesliceOfTheTenant is answered and not carried out.
func TestSetTimesliceOfTheTenant(t *testing.T) {
	c := newFakeContainer(t, 1)
	f := newFakeCall(t, c.Guard, fakeControl)
	p := make([]byte, 8)
	rm.PutU64(p, 0, 1e6)
	o := fakeControlCall(workGroup, controlSetTimeslice, p)
	rm.PutU32(o, rm.ControlStatus, 0xdead)
	if rep := f.escape(rm.EscControl, o, p); rep != replyDone || rm.U32(o, rm.ControlStatus) != rm.StatusOK {
		t.Errorf("%v, %s", rep, rm.StatusName(rm.U32(o, rm.ControlStatus)))
	}
	if got := c.d.took(); len(got) > 0 || len(c.d.calls) > 0 {
		t.Errorf("the driver was asked: %#x, %d calls", got, len(c.d.calls))
	}
}
