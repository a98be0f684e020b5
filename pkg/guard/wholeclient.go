// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// A root alloc that went elsewhere (rootalloc.go) can have made a channel below a group that the guard knows. GPFIFO_SCHEDULE of the group
// would let it run, and memory that it writes errors to would be freed under it (notifiers.go). From 570 on the driver tells which channels
// a group has, by numbers that it never gives again (currentChannelUniqueId, kernel_channel.c). So the guard notes the number of each
// channel, and before a client's channels are let run, or its memory is freed, it looks whether its groups have others. It does so only if
// a root alloc was let through since it last did.

const controlGroupChannels = 0x20801123 // NV2080_CTRL_CMD_FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO

// channelIDs asks the driver for the numbers of a group's channels, or that of a channel. False: it does not say, or there is no such
// group.
func (g *Guard) channelIDs(client, handle uint32) (ids []uint32, ok bool) {
	form, has := g.abi.Control(controlGroupChannels)
	gpu := g.account.gpuOf(client, handle)
	if !has || gpu == noGPU {
		return nil, false
	}
	own, err := g.guardClient()
	if err != nil {
		return nil, false
	}
	p := make([]byte, form.Size)
	rm.PutU32(p, rm.GroupChannelsClient, client)
	rm.PutU32(p, rm.GroupChannelsObject, handle)
	if s, e := own.Control(own.Subdevice(gpu), controlGroupChannels, p); e != 0 || s != rm.StatusOK {
		return nil, false
	}
	for i := range min(rm.U32(p, rm.GroupChannelsCount), rm.GroupChannelsMax) {
		ids = append(ids, rm.U32(p, rm.GroupChannelsIDs+4*int(i)))
	}
	return ids, true
}

// noteChannelID notes the number of a new channel.
func (g *Guard) noteChannelID(client, handle uint32) {
	ids, ok := g.channelIDs(client, handle)
	if !ok || len(ids) != 1 {
		return
	}
	g.account.mu.Lock()
	defer g.account.mu.Unlock()
	if c := g.account.clients[client]; c != nil && c.channels[handle] != nil {
		c.channels[handle].id = ids[0]
		g.account.books.note(c.channels[handle])
	}
}

// wholeness is what the guard knows of a client's channel groups.
type wholeness int

const (
	notWhole wholeness = iota // one has a channel that the guard has not seen made
	wholeNow                  // none has, but a root alloc is under way
	whole                     // none has, nor will have one before another root alloc is let through
)

// wholenessOf looks whether all channels of a client's groups were made through the guard, and tells of which group they were not. The
// caller holds the client's calls.
func (g *Guard) wholenessOf(client uint32) (is wholeness, not uint32) {
	roots := g.rootsLet.Load() + 1 // so 0 is never
	groups, known := g.account.groupsToAsk(client, roots)
	if known {
		return whole, 0
	}
	underWay := g.pendingRoots.Load() > 0 || g.insideSettledRoot() // before the driver is asked
	for _, group := range groups {
		if o, _ := g.account.lookup(client, group); g.hasOthersChannels(o.group) {
			continue // see endShared
		}
		if ids, ok := g.channelIDs(client, group); ok && g.account.hasUnknownChannel(client, group, ids) {
			return notWhole, group
		}
	}
	if underWay {
		return wholeNow, 0
	}
	g.account.setWhole(client, roots)
	return whole, 0
}

// hasOthersChannels reports a group below which members of a trust domain have channels, of which other guards know.
func (g *Guard) hasOthersChannels(x *channelGroup) bool {
	return x != nil && (x.lent() || x.shared && g.cfg.DomainServer)
}

// endShared ends the clients with such groups, where a root alloc went elsewhere: nobody could find the channel that it may have made
// there.
func (g *Guard) endShared(pid int) {
	some := false
	g.killClients(func(c *client) bool { // the account is locked
		for _, o := range c.groups {
			if g.hasOthersChannels(o.group) {
				some = true
				return true
			}
		}
		return false
	})
	if some {
		g.log.Error("RM clients with a channel group of the trust domain's are freed: a thread may have made a channel there of a call that "+
			"asks for an RM client", "pid", pid)
		g.events.Note(event.Event{Kind: event.Freed, PID: pid,
			Text: "RM clients with a channel group of the trust domain's: a thread may have made a channel there unseen"})
	}
}

// groupsToAsk lists a client's channel groups, on whatever engine. whole: they are known to be, since no root alloc was let through; then
// nothing is gone through, as this is asked at each free, and a program can have tens of thousands of handles.
func (a *account) groupsToAsk(client uint32, roots int64) (groups []uint32, whole bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil || c.wholeAt == roots {
		return nil, c != nil
	}
	for h, o := range c.dependants {
		if o.kind == rm.ClassTSG || o.class == classChannelGroup {
			groups = append(groups, h)
		}
	}
	return groups, false
}

func (a *account) setWhole(client uint32, at int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil {
		c.wholeAt = at
	}
}

// hasUnknownChannel reports that a group has a channel of which there is no record. A record without a number, of a guard that did not ask
// for it, stands for any one.
func (a *account) hasUnknownChannel(client, group uint32, ids []uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil {
		return false
	}
	x := c.objects[group]
	if x == nil || x.group == nil {
		return false
	}
	known, any := map[uint32]bool{}, 0
	for handle, of := range x.group.handles {
		for _, o := range of.channels {
			if o.parent != handle.handle {
				continue
			}
			if known[o.id] = true; o.id == 0 {
				any++
			}
		}
	}
	for _, id := range ids {
		if !known[id] {
			any--
		}
	}
	return any < 0
}

// freeWhole frees an object, but not if that may be memory which an unseen channel writes to.
func (g *Guard) freeWhole(t Target, client, handle uint32, free func() (uint32, unix.Errno)) (uint32, unix.Errno) {
	if !g.account.mayHoldNotifier(client, handle) {
		return g.keepNotifiersOver(t, client, handle, free)
	}
	g.rootGate.RLock()
	defer g.rootGate.RUnlock()
	switch is, _ := g.wholenessOf(client); is {
	case notWhole:
		g.endUnseenChannels(client)
		return rm.StatusInUse, 0
	case whole:
		return g.keepNotifiersOver(t, client, handle, free)
	}
	// A root alloc that is under way can become a channel as long as the memory has a handle.
	kept := g.keepMemory(t, client, handle)
	s, e := g.keepNotifiersOver(t, client, handle, free)
	is, group := g.wholenessOf(client)
	g.account.keepWith(client, group, kept)
	if is == notWhole {
		g.endUnseenChannels(client)
	}
	return s, e
}

// keepWith ties handles of the guard's to a group, with which its channels end. Without one they end now.
func (a *account) keepWith(client, group uint32, kept []*window) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if o := a.clients[client].object(group); o != nil {
		o.keptWindows = append(o.keptWindows, kept...)
		a.books.note(o)
		return
	}
	a.loosenLocked(kept...)
}

// mayHoldNotifier reports that memory, or a context DMA, may be freed with an object.
func (a *account) mayHoldNotifier(client, handle uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil || handle == client { // the driver frees its channels, too
		return false
	}
	o := c.objects[handle]
	return o == nil || c.children[handle] > 0 || o.isMemory() || o.kind == rm.ClassContextDMA
}

// keepMemory takes a handle on memory, if it can.
func (g *Guard) keepMemory(t Target, client, handle uint32) []*window {
	o, ok := g.account.lookup(client, handle)
	if !ok || !o.isMemory() {
		return nil
	}
	if w, _, _ := g.keepNotifier(t, client, notifier{memory: o}); w != nil {
		return []*window{w}
	}
	return nil
}

// endsUnseenChannels reports that a client has such a channel, and ends it then.
func (g *Guard) endsUnseenChannels(client uint32) bool {
	is, _ := g.wholenessOf(client)
	if is == notWhole {
		g.endUnseenChannels(client)
	}
	return is == notWhole
}

// endUnseenChannels ends the RM clients of a process, one of which has a channel that the guard has not seen made. It does not wait: the
// caller holds locks.
func (g *Guard) endUnseenChannels(handle uint32) {
	of := g.account.markUnseen(handle)
	if of == nil {
		return
	}
	g.log.Error("a channel group has a channel that the guard has not seen made: a thread made something else of a call that asks for an "+
		"RM client; all RM clients of the process are freed", "pid", of.tgid)
	g.events.Note(event.Event{Kind: event.Freed, PID: of.tgid,
		Text: "all RM clients of a process: one had a channel that the guard has not seen made"})
	go g.chargeTime(func() { g.killClients(func(c *client) bool { return c.tgid == of.tgid }) })
}

// markUnseen notes that a client is being freed for that. Nil: it is already.
func (a *account) markUnseen(handle uint32) *client {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[handle]
	if c == nil || c.unseen {
		return nil
	}
	c.unseen = true
	return c
}
