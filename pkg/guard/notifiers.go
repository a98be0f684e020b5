// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Error notifiers. The driver writes to memory that a channel names when it is made (hObjectError, hObjectEccError, or those of its group),
// and the GPU's firmware has the physical address, but neither keeps a reference (kchannelGetNotifierInfo). Freed under a channel that
// lives, it is written when it is a neighbour's or the host's, and the kernel uses a descriptor that is gone (kchannelUpdateNotifierMem).
// So when a call is about to free such memory the guard first takes a handle of its own on it, which lives as long as the channel
// (docs/adr/0010-windows.md).

// notifiersIn are the handles that parameters name.
func notifiersIn(p []byte, offsets [2]int) (n [2]uint32) {
	for i, off := range offsets {
		if len(p) >= off+4 {
			n[i] = rm.U32(p, off)
		}
	}
	return n
}

// checkNotifiers finds the notifiers of a new channel, which are its group's where it names none. They must be memory of its GPU that the
// guard can have a handle on, or a context DMA, which stays as it is. Anything else that the driver takes for memory is a page that all
// share (RM_USER_SHARED_DATA), registers, or addresses whose memory is unmapped at any time.
func (g *Guard) checkNotifiers(c *trappedCall, o *object) (refusal reply, ok bool) {
	client := c.allocClient()
	o.notifiers = notifiersIn(c.params, rm.ChannelNotifiers)
	group, _ := g.account.lookup(client, o.parent)
	for i, h := range o.notifiers {
		if h == 0 {
			h = group.notifiers[i]
			o.notifiers[i] = h
		}
		if h == 0 {
			continue
		}
		m, _ := g.account.lookup(client, h)
		if c.isUncounted(c.target(), client, h) {
			return c.denyUnseen(), false
		}
		if !m.isMemory() && m.kind != rm.ClassContextDMA {
			return c.deny(rm.StatusInvalidObjectHandle, "notifier", "denied a channel whose error notifier is no memory",
				"class", rm.ClassName(m.class), "known", m.handle != 0), false
		}
		if g.account.onOtherGPU(client, h, g.account.gpuOf(client, o.parent)) {
			return c.denyOtherGPU(), false
		}
	}
	return reply{}, true
}

// isMemory reports memory that is one client's.
func (o *object) isMemory() bool {
	return o.kind == rm.ClassVidmem || o.kind == rm.ClassSysmem || o.host
}

// noteNotifiers lets memory know the channel that writes to it, or no more. The account is locked.
func (a *account) noteNotifiers(c *client, channel *object, on bool) {
	for _, h := range channel.notifiers {
		m := c.objects[h]
		if h == 0 || m == nil {
			continue
		}
		if on && m.notifies == nil {
			m.notifies = map[*object]bool{}
		}
		if on {
			m.notifies[channel] = true
		} else {
			delete(m.notifies, channel)
		}
		a.books.note(m)
		if c.notified == nil {
			c.notified = map[*object]bool{}
		}
		if c.notified[m] = true; len(m.notifies) == 0 {
			delete(c.notified, m)
		}
	}
}

// notifier is memory, or a context DMA, that is to be freed before a channel that writes to it.
type notifier struct {
	memory  object
	channel *object
}

// notifiersBelow lists those that go with an object, and keeps the memory's charges until releaseObject.
func (a *account) notifiersBelow(clientHandle, handle uint32) (list []notifier) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil || handle == clientHandle || c.objects[handle] == nil {
		return nil
	}
	above := c.objects[handle]
	for m := range c.notified {
		if !c.isBelow(m, above, 0) {
			continue
		}
		for channel := range m.notifies {
			if !c.isBelow(channel, above, 0) {
				for ch := range m.charges {
					a.countReference(ch, &ch.calls, 1)
				}
				list = append(list, notifier{*m, channel})
			}
		}
	}
	// First what cannot be kept: then nothing has to be dropped again.
	slices.SortFunc(list, func(x, y notifier) int { return cmp.Compare(keepLast(x.memory), keepLast(y.memory)) })
	return list
}

func keepLast(o object) int {
	if o.isMemory() {
		return 1
	}
	return 0
}

// planFree is the plan of a call that frees an object and all below it.
func (g *Guard) planFree(c *trappedCall, handle uint32) plan {
	client := c.locked[0].handle
	return plan{ask: true, commit: func() { g.recordFree(c, handle) }, exec: func() unix.Errno {
		status, e := g.freeWhole(c.target(), client, handle, func() (uint32, unix.Errno) {
			e := g.driver.Exec(c.target(), &c.call)
			return c.statusWord(), e
		})
		c.status(status)
		return e
	}}
}

// keepNotifiersOver frees an object, and keeps what channels that live on write to. A context DMA cannot be kept: then the object stays.
func (g *Guard) keepNotifiersOver(t Target, client, handle uint32, free func() (uint32, unix.Errno)) (uint32, unix.Errno) {
	list := g.account.notifiersBelow(client, handle)
	defer func() {
		for _, n := range list {
			g.account.releaseObject(n.memory)
		}
	}()
	kept := make([]*window, 0, len(list))
	status, e := uint32(rm.StatusOK), unix.Errno(0)
	for _, n := range list {
		var w *window
		if w, status, e = g.keepNotifier(t, client, n); w == nil {
			break
		}
		kept = append(kept, w)
	}
	attached := g.books != nil && len(kept) == len(list) && len(list) > 0
	// else a guard that is killed after the driver's answer leaves handles that the books do not name, and the next one frees them
	if attached {
		g.account.attachNotifiers(client, list, kept)
		g.books.commit(nil)
	}
	if len(kept) == len(list) {
		status, e = free()
	} else {
		g.logOnce("notifierfreed", "an object is not freed: a channel writes errors to it", "status", rm.StatusName(status), "errno", e)
	}
	if attached { // one too many goes with its channel
		return status, e
	}
	if len(kept) == len(list) && e == 0 && status == rm.StatusOK {
		g.account.attachNotifiers(client, list, kept)
	} else {
		g.account.loosenWindows(kept)
	}
	return status, e
}

// keepNotifier takes a handle on what a channel writes to. Nil: it cannot be had.
func (g *Guard) keepNotifier(t Target, client uint32, n notifier) (*window, uint32, unix.Errno) {
	gpu := g.account.gpuOf(client, n.memory.handle)
	if !n.memory.isMemory() || gpu == noGPU {
		return nil, rm.StatusInUse, 0
	}
	if g.isSecretlyUserShared(t, client, n.memory) {
		return nil, rm.StatusInUse, 0
	}
	if !g.account.roomForReferences(n.memory.charge, 0) {
		return nil, rm.StatusInsufficientResources, 0
	}
	own, err := g.guardClient()
	if err != nil {
		return nil, rm.StatusInsufficientResources, 0
	}
	w := &window{gpu: gpu, own: own, kept: true}
	if !g.reserveWindow(w, ^quota.Bytes(0)) {
		return nil, rm.StatusInsufficientResources, 0
	}
	parent, _ := g.account.lookup(client, n.memory.parent)
	var s uint32
	var e unix.Errno
	status, errno := g.whileShared(t, client, []openRight{{n.memory.handle, accessDup}}, func() {
		w.handle, s, e = own.Dup(ownParent(own, gpu, parent.kind), client, n.memory.handle)
	})
	if status != rm.StatusOK || errno != 0 {
		s, e = status, errno
	}
	if s != rm.StatusOK || e != 0 {
		g.account.unreserveWindow(w)
		return nil, s, e
	}
	g.account.keepWindowCharge(w, n.memory.charge)
	return w, rm.StatusOK, 0
}

// attachNotifiers ties the guard's handles to the channels, with which they end.
func (a *account) attachNotifiers(client uint32, list []notifier, kept []*window) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	for i, w := range kept {
		if ch := list[i].channel; c != nil && c.objects[ch.handle] == ch {
			ch.keptWindows = append(ch.keptWindows, w)
			a.books.note(ch)
		} else {
			a.loosenLocked(w)
		}
	}
}

// loosenWindows: handles are of no use any more.
func (a *account) loosenWindows(kept []*window) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.loosenLocked(kept...)
}

// loosenLocked is loosenWindows with the account locked.
func (a *account) loosenLocked(windows ...*window) {
	for _, w := range windows {
		a.books.note(w)
	}
	if a.loose = append(a.loose, windows...); len(windows) > 0 && a.onLoose != nil {
		a.onLoose()
	}
}
