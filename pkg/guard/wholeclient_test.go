// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync/atomic"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// unseenRig is a container with memory and a channel group below which a root alloc makes a channel.
type unseenRig struct {
	*rig
	c                      *child
	number, memory, group  int
	channel                int // the one that is known
	client                 *client
	asked                  atomic.Int64 // groups of which the driver was asked
	beforeFree, beforeAsks func()       // when the memory is to be freed; when a group is asked for after that
	beforeRun              func()       // when the group is to be let run
}

const unseenChannel = 0x5cffff01

func newUnseenRig(t *testing.T) *unseenRig {
	t.Helper()
	r := &unseenRig{rig: newRig(t)}
	r.c = r.start()
	r.number = r.c.do("open")[0]
	r.memory = r.c.do("alloc", r.number, 8*mib)[0]
	made := r.c.do("notifier", r.number, r.c.do("alloc", r.number, mib)[0], 1)
	r.group, r.channel = made[0], made[1]
	r.guard.account.mu.Lock()
	for _, x := range r.guard.account.clients {
		r.client = x
	}
	r.guard.account.mu.Unlock()
	return r
}

// watch begins to make what is to happen in between.
func (r *unseenRig) watch() {
	freed := false
	seen := func(call *rm.Call) {
		switch {
		case call.NR() == rm.EscFree && rm.U32(call.Outer, rm.FreeObject) == uint32(r.memory):
			if freed = true; r.beforeFree != nil {
				r.beforeFree()
			}
		case call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == scheduleGroup && r.beforeRun != nil:
			r.beforeRun()
		case call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlGroupChannels:
			if r.asked.Add(1); freed && r.beforeAsks != nil {
				r.beforeAsks()
			}
		}
	}
	r.seen.Store(&seen)
}

// on makes a call on the client's file.
func (r *unseenRig) on(f func(Target)) {
	if t, ok := r.guard.fileOf(r.client); ok {
		f(t)
		t.Done()
	}
}

// becomes is what a root alloc that was let through has become: a channel that writes errors to the memory.
func (r *unseenRig) becomes(handle int) {
	r.t.Helper()
	class, _ := r.guard.abi.Class(0xc86f)
	p := make([]byte, class.ParamsSize)
	rm.PutU32(p, rm.ChannelNotifiers[0], uint32(r.memory))
	rm.PutU32(p, rm.ChannelEngineType, 1)
	call := r.guard.allocCall(allocation{r.client.handle, uint32(r.group), uint32(handle), 0xc86f, p})
	rm.PutU32(call.Outer, 40, 0xdead)
	r.on(func(t Target) { _ = r.guard.driver.Exec(t, &call) })
	if s := rm.U32(call.Outer, 40); s != rm.StatusOK {
		r.t.Error(rm.StatusName(s))
	}
}

// writes has the driver write to the notifier of a channel, as it does on an error, if the channel is there.
func (r *unseenRig) writes(handle int) {
	for _, x := range []struct {
		object uint32
		cmd    uint32
		p      []byte
	}{{uint32(r.group), scheduleGroup, []byte{1, 0, 0}}, {uint32(handle), 0xc36f0108, make([]byte, 4)}} {
		r.on(func(t Target) { _, _ = r.guard.rmControl(t, r.client.handle, x.object, x.cmd, x.p) })
	}
	if n := r.sim.Snapshot().Stray; n != 0 {
		r.t.Errorf("%d writes to free memory", n)
	}
}

// TestUnseenChannel: what a root alloc has made below a known group is not let run, and memory that it writes to is not freed before it.
func TestUnseenChannel(t *testing.T) {
	ended := func(r *unseenRig) {
		eventually(r.t, "the client is freed", func() bool { return !r.guard.account.ownsClient(r.client.handle) })
	}
	t.Run("it is not let run", func(t *testing.T) {
		r := newUnseenRig(t)
		r.guard.rootsLet.Add(1)
		r.becomes(unseenChannel)
		r.c.refused("INVALID_STATE", "schedule", r.number, r.group)
		ended(r)
		r.writes(unseenChannel)
	})
	for name, handle := range map[string]func(r *unseenRig) int{
		"memory is not freed": func(*unseenRig) int { return unseenChannel },
		"it has the handle of a known one that ended unnoticed": func(r *unseenRig) int {
			r.on(func(t Target) { _, _ = r.guard.rmFree(t, r.client.handle, uint32(r.channel)) }) // with its context share
			return r.channel
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newUnseenRig(t)
			r.guard.rootsLet.Add(1)
			h := handle(r)
			r.becomes(h)
			r.c.refused("IN_USE", "free", r.number, r.memory)
			ended(r)
			r.writes(h)
		})
	}
	t.Run("it is made while the group is let run", func(t *testing.T) {
		r := newUnseenRig(t)
		r.guard.rootsLet.Add(1)
		r.guard.pendingRoots.Add(1)
		defer r.guard.pendingRoots.Add(-1)
		r.beforeRun = func() { r.becomes(unseenChannel) }
		r.watch()
		r.c.do("schedule", r.number, r.group)
		ended(r)
	})
	t.Run("it is made while memory is freed", func(t *testing.T) {
		r := newUnseenRig(t)
		r.guard.rootsLet.Add(1)
		r.guard.pendingRoots.Add(1)
		defer r.guard.pendingRoots.Add(-1)
		r.beforeFree = func() { r.becomes(unseenChannel) }
		r.beforeAsks = func() { r.writes(unseenChannel) }
		r.watch()
		r.c.do("free", r.number, r.memory)
		ended(r)
	})
}

// TestWholeClient: a program whose groups have no such channel is let do everything, and the driver is asked once for each root alloc.
func TestWholeClient(t *testing.T) {
	r := newUnseenRig(t)
	if o, _ := r.guard.account.lookup(r.client.handle, uint32(r.channel)); o.id == 0 {
		t.Fatal("the number of a channel is not known")
	}
	r.watch()
	for range 3 {
		r.guard.rootsLet.Add(1)
		r.asked.Store(0)
		r.c.do("schedule", r.number, r.group)
		r.c.do("free", r.number, r.c.do("alloc", r.number, mib)[0])
		r.c.do("free", r.number, r.c.do("alloc", r.number, mib)[0])
		if n := r.asked.Load(); n != 1 {
			t.Errorf("asked %d times", n)
		}
	}
	r.guard.pendingRoots.Add(1) // while one is under way, too; and nothing is left of it
	r.guard.rootsLet.Add(1)
	r.c.do("free", r.number, r.memory)
	r.guard.pendingRoots.Add(-1)
	r.guard.endWindows()
	if n := len(r.guard.account.looseWindows()); n != 0 {
		t.Errorf("%d handles are left", n)
	}
	r.c.do("freeclient", r.number)
	r.agree(0)
	r.c.kill()
	r.empty()
}

// TestUnknownChannels: a record without a number stands for any channel.
func TestUnknownChannels(t *testing.T) {
	const group = 0x5c000015
	for _, x := range []struct {
		known, ids []uint32
		want       bool
	}{
		{nil, nil, false},
		{nil, []uint32{5}, true},
		{[]uint32{5, 6}, []uint32{6, 5}, false},
		{[]uint32{5, 6}, []uint32{6}, false}, // one that ended with something else
		{[]uint32{5, 6}, []uint32{6, 7}, true},
		{[]uint32{5, 0}, []uint32{5, 7}, false},
		{[]uint32{5, 0}, []uint32{7, 8}, true},
	} {
		g := withClient(newFakeGuard(t, &fakeDriver{}))
		g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
		for i, id := range x.known {
			g.account.addObject(fakeClient, object{handle: group + 1 + uint32(i), parent: group, kind: rm.ClassChannel, gpu: noGPU, id: id},
				noGPU, 0, quota.Bytes(0))
		}
		if got := g.account.hasUnknownChannel(fakeClient, group, x.ids); got != x.want {
			t.Errorf("%v of %v: %v", x.ids, x.known, got)
		}
	}
}
