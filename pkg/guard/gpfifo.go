// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// checkSchedule: GPFIFO_SCHEDULE lets channels run for the first time, and would let paused ones run again. While
// the container is off, what runs already needs no permission, and what is new waits until the container is on: to let it run and
// pause it then would give away a millisecond each time.
func (g *Guard) checkSchedule(c *trappedCall) plan {
	client, handle := c.controlClient(), c.controlObject()
	if !g.account.isChannel(client, handle) && !g.account.isGroup(client, handle) {
		// One that was made unseen (rootalloc.go) has no timeslice of the guard's, and is not paused.
		return answer(c.deny(rm.StatusInvalidObjectHandle, "unseenchannel",
			"denied GPFIFO_SCHEDULE of a channel or a group that the guard has not seen made"))
	}
	enable := len(c.params) == 0 || c.params[0] != 0
	for {
		// Until the driver has answered, the handle is the same group's, and nothing is stopped or let run.
		lock, ok := g.account.lockCalls(client, client)
		if !ok {
			return answer(c.status(rm.StatusInvalidClient))
		}
		g.gpuTime.Lock()
		unlock := func() {
			g.gpuTime.Unlock()
			lock.unlock()
		}
		if !enable || !g.mustNotRun(client, handle) {
			return g.planSchedule(c, client, handle, enable, unlock)
		}
		known, turned, ending := g.account.allScheduled(client, handle), g.gpuTime.Turned(), g.account.isEnding(client)
		unlock()
		if ending {
			// Off for good, though another process has the file of the one that made the client: there is nothing to wait for. The driver says the
			// same of a channel whose context UVM has taken away (kchannelIsSchedulable_IMPL).
			return answer(c.status(rm.StatusInvalidState))
		}
		if known {
			return answer(c.status(rm.StatusOK))
		}
		select {
		case <-turned:
		case <-time.After(100 * time.Millisecond): // is the caller still there?
		}
		if !c.valid() {
			return answer(replyDone)
		}
	}
}

// planSchedule is the plan of a GPFIFO_SCHEDULE that need not wait.
func (g *Guard) planSchedule(c *trappedCall, client, handle uint32, enable bool, unlock func()) plan {
	g.rootGate.RLock()
	done := func() {
		g.rootGate.RUnlock()
		unlock()
	}
	if g.isMember() && g.account.isLent(client, handle) { // it was not yet when the call was looked at: no second handle is made meanwhile
		return plan{answer: c.deny(rm.StatusNotSupported, "lentschedule", "denied GPFIFO_SCHEDULE of the domain's channel group"), done: done}
	}
	if enable && g.endsUnseenChannels(client) {
		return plan{answer: c.status(rm.StatusInvalidState), done: done}
	}
	if enable && !g.ensurePreemption(c.target(), client, g.account.preemptionOf(client, handle)) {
		return plan{answer: c.status(rm.StatusNotSupported), done: done}
	}
	return plan{ask: true, done: done, commit: func() {
		g.account.setScheduled(client, handle, enable)
		if enable {
			g.channelsStarted(c.target(), client, handle)
			g.endsUnseenChannels(client) // a root alloc that was under way has made one meanwhile
		}
	}}
}

// channelsStarted tells, with gpuTime locked, that a trapped call let channels run which a handle names. Their group gets its timeslice on
// the call's own file.
func (g *Guard) channelsStarted(t Target, client, handle uint32) {
	channels, gpu, graphics := g.account.channelsOf(client, handle)
	if len(channels) == 0 || !graphics {
		return
	}
	group := handle
	if objectOf(channels[0]).handle == handle {
		group = objectOf(channels[0]).parent
	}
	groups := slices.DeleteFunc(g.account.groupsOn(gpu), func(r gpusched.Group) bool {
		return r.Client.Handle() != client || r.Handle != group
	})
	g.gpuTime.Started(gpu, groups, func(object, cmd uint32, params []byte) (uint32, syscall.Errno) {
		return g.rmControl(t, client, object, cmd, params)
	})
}

// mustNotRun reports, with gpuTime locked, that channels which a handle names must not begin to run now.
func (g *Guard) mustNotRun(client, handle uint32) bool {
	channels, gpu, graphics := g.account.channelsOf(client, handle)
	return len(channels) > 0 && (g.account.isEnding(client) || g.account.haveEnding(channels) || g.gpuTime.IsOff(gpu, graphics))
}

// allScheduled reports that all channels that a handle names were let run before.
func (a *account) allScheduled(client, handle uint32) bool {
	list, _, _ := a.channelsOf(client, handle)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, ch := range list {
		if !objectOf(ch).scheduled {
			return false
		}
	}
	return len(list) > 0
}

func (a *account) setScheduled(client, handle uint32, on bool) {
	list, _, _ := a.channelsOf(client, handle)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, ch := range list {
		objectOf(ch).scheduled = on
		a.books.note(objectOf(ch))
	}
	if o := a.clients[client].object(handle); o != nil && o.group != nil {
		o.group.scheduled = on
		a.noteHandles(o)
	}
}
