// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// TestGroupOfSeveral: a channel group that several clients have, as MPS makes it, has one context, which is charged once until the last
// handle is gone, whoever made it; a guard that goes on as another program knows the same.
func TestGroupOfSeveral(t *testing.T) {
	r := newRig(t)
	r.guard.cfg.Settings.Domains = []device.Domain{{Name: "team"}}
	c := r.start()
	server, first, second := c.do("open")[0], c.do("open")[0], c.do("open")[0]
	group := c.do("mpscontext", server)[0]
	r.agree(sim.DefaultContextCost)
	h1, h2 := c.do("dup", first, server, group)[0], c.do("dup", second, server, group)[0]
	c.do("engine", first, c.do("channel", first, h1, c.do("share", first, h1)[0])[0])
	c.do("engine", second, c.do("channel", second, h2, c.do("share", second, h2)[0])[0])
	c.do("schedule", first, h1)
	r.agree(sim.DefaultContextCost + sim.SharedContextCost)
	if n := r.guard.gpuTime.Status(0).TSGs; n != 1 {
		t.Errorf("%d groups", n)
	}
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	c.do("close", server)
	r.agree(sim.DefaultContextCost + sim.SharedContextCost)
	c.do("free", first, h1)
	r.agree(sim.DefaultContextCost + sim.SharedContextCost)
	third := c.do("open")[0]
	h3 := c.do("dup", third, second, h2)[0]
	c.do("close", second)
	r.agree(sim.DefaultContextCost + sim.SharedContextCost)
	c.do("free", third, h3)
	r.agree(0)
	fourth := c.do("open")[0]
	c.do("alloc", fourth, 900*mib)
	group = c.do("mpscontext", fourth)[0]
	c.refused("NV_ERR_NO_MEMORY", "dup", third, fourth, group) // a context fits, that does not
	r.agree(900*quota.MiB + sim.DefaultContextCost)
	c.kill()
	r.empty()
}

const otherClient, otherHandle = fakeClient + 1, 0x77

// sharing is a container with two clients that have a handle on one group each, with a channel below each.
func sharing(t *testing.T) (*fakeContainer, []fakeName) {
	c := newFakeContainer(t, 1)
	c.client(otherClient)
	c.account.dupOf(otherClient, fakeDevice, otherHandle, fakeClient, workGroup)
	return c, slices.Concat(c.channels(fakeClient, workGroup, 0x100, 1), c.channels(otherClient, otherHandle, 0x200, 1))
}

// TestScheduleOfSeveral: GPFIFO_SCHEDULE of a group lets the channels of all its clients run, so it waits where one of them must not.
func TestScheduleOfSeveral(t *testing.T) {
	c, channels := sharing(t)
	f := newFakeCall(t, c.Guard, fakeControl)
	if s := c.schedule(f, workGroup, scheduleGroup, true); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	if !c.account.allScheduled(otherClient, 0x200) || !c.account.allScheduled(otherClient, otherHandle) {
		t.Error("the other client's channel is not known to run")
	}
	c.pause(true)
	c.isOff(channels)
	c.pause(false)

	c.stopChannels(func(x *client) bool { return x.handle == otherClient })
	c.channels(fakeClient, workGroup, 0x101, 1) // or all ran before
	c.d.schedules()
	done := make(chan uint32, 1)
	go func() { done <- c.schedule(f, workGroup, scheduleGroup, true) }()
	select {
	case s := <-done:
		t.Errorf("%s beside a client that ends", rm.StatusName(s))
	case <-time.After(300 * time.Millisecond):
	}
	c.account.removeClient(c.clientOf(otherClient, os.Getpid()))
	select {
	case s := <-done:
		if s != rm.StatusOK {
			t.Error(rm.StatusName(s))
		}
	case <-time.After(patience):
		t.Fatal("the call hangs")
	}
}

// TestContextOfSeveral: a context that comes when a group has two handles is charged once, and lives with the last.
func TestContextOfSeveral(t *testing.T) {
	a := testAccount(quota.GiB)
	for i := range uint32(2) {
		a.addClient(testClient+i, 7, nil)
		a.addObject(testClient+i, object{handle: 1, parent: testClient + i, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	}
	a.addObject(testClient, object{handle: 2, parent: 1, kind: rm.ClassTSG, gpu: noGPU, engine: 9}, noGPU, 0, 0)
	a.dupOf(testClient+1, 1, 2, testClient, 2)
	context := cost{gpu: 0, size: 13 * quota.MiB}
	for i, want := range []bool{true, false} {
		if a.reserve(context, false); a.chargeContext(testClient+uint32(i), 2, 0, context.size) != want {
			t.Fatalf("by handle %d: %v", i, !want)
		}
	}
	a.unreserve(context)
	a.freeObject(testClient, 2)
	wantUsage(t, a, 0, context.size)
	a.freeObject(testClient+1, 2)
	wantUsage(t, a, 0, 0)
}

// TestGroupElsewhere: a group has no handle below another GPU's device.
func TestGroupElsewhere(t *testing.T) {
	d := answering(0, nil)
	g := withTwoGPUs(newFakeGuard(t, d))
	g.cfg.Settings.MaxTSGs, g.cfg.Settings.Domains = 8, []device.Domain{{Name: "team"}}
	g.account.addObject(fakeClient, object{handle: workGroup, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	for parent, want := range map[uint32]uint32{fakeDevice: rm.StatusOK, secondDevice: rm.StatusInvalidDevice} {
		o := make([]byte, rm.DupSize)
		putWords(o, 0, fakeClient, parent, otherHandle, fakeClient, workGroup)
		if f.escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != want {
			t.Errorf("below %#x: %s", parent, rm.StatusName(rm.U32(o, rm.DupStatus)))
		}
	}
}
