// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

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
