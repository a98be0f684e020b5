// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// channelGroup is a channel group. The one of a trust domain's MPS server has handles in all clients (RM_DUP_OBJECT, lend.go): each handle
// has channels of its own below it, and what becomes of the group is the same under all. The account is locked.
type channelGroup struct {
	number    int // which no other has or will have, under no guard
	handles   map[*object]*client
	graphics  bool   // it is on the graphics engine
	context   bool   // it has a context there: an object of the engine was made below it
	gfxp      bool   // and the buffers of graphics preemption, which are charged
	shared    bool   // and what it takes for several clients, which is charged too
	preempts  bool   // and a context that is switched in the middle of a kernel; see preemption.go
	draws     bool   // and a context that never can be: of a 2D or 3D object
	scheduled bool   // it was let run as a whole
	legacy    bool   // it has had a channel without a context share, see mayHaveChannel
	lender    lender // of one that is the domain's MPS server's, see lend.go
}

// noteGroup notes that an object is a handle of a channel group, if it is.
func (a *account) noteGroup(c *client, o *object) {
	if o.group == nil && (o.kind == rm.ClassTSG || o.class == classChannelGroup) {
		o.group = &channelGroup{}
	}
	if o.group == nil {
		return
	}
	if o.group.handles == nil {
		o.group.handles = map[*object]*client{}
	}
	if o.group.number == 0 {
		o.group.number = 1 + rand.IntN(math.MaxInt) // what others hold by it may outlive the group, and this guard
	}
	o.group.handles[o] = c
	if o.group.graphics {
		c.groups[o.handle] = o
	}
}

// noteHandles has what became of a group written down, with each of its handles; or what is no group. The account is locked.
func (a *account) noteHandles(o *object) {
	if o.group == nil {
		a.books.note(o)
		return
	}
	for x := range o.group.handles {
		a.books.note(x)
	}
}

// lent reports the group of the domain's MPS server.
func (g *channelGroup) lent() bool { return g.lender != lender{} }

// forgetGroup notes that a handle is gone.
func (a *account) forgetGroup(c *client, o *object) {
	if o.group == nil {
		return
	}
	delete(o.group.handles, o)
	delete(c.groups, o.handle)
}

// channels lists the channels below all handles of a group.
func (g *channelGroup) channels() (list []gpusched.Channel) {
	for o, c := range g.handles {
		for h, ch := range c.channels {
			if ch.parent == o.handle {
				list = append(list, c.channel(h, ch))
			}
		}
	}
	return list
}

// mayHaveChannel reports that a new channel with a context share, or with none (0), may be made below a group: where that has handles in
// several clients, only with a share that is below the same handle. A group has a pointer to its maker's address space, which may have
// ended, and channels without a share use that; the first brings the group into legacy mode, for good, in which new shares use it, too
// (kchangrpapiSetLegacyMode_IMPL, kctxshareapiConstruct_IMPL). So a group that has ever had one is not lent.
func (a *account) mayHaveChannel(client, group, share uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	o := c.object(group)
	if o == nil || o.group == nil || !o.group.shared {
		return true
	}
	s := c.object(share)
	return s != nil && s.class == classContextShare && s.parent == group
}

// chargeNow is what a second handle of an object has a reference on: of a group what its handles have by now.
func (o *object) chargeNow() *charge {
	if o.group != nil {
		for x := range o.group.handles {
			return x.charge
		}
	}
	return o.charge
}

// chargeAll charges a group, which keeps its memory until the last handle is gone; or what is no group. The account is locked.
func (o *object) chargeAll(ch *charge) {
	if o.group == nil {
		o.charge, ch.handles = ch, 1
		return
	}
	for x := range o.group.handles {
		x.charge = ch
		ch.handles++
	}
}

// object finds an object of a client; nil: there is none, or no client.
func (c *client) object(handle uint32) *object {
	if c == nil {
		return nil
	}
	return c.objects[handle]
}

// groupRef names a channel group.
type groupRef struct {
	client *client
	handle uint32
}

// objectOf is what the account knows a channel by.
func objectOf(ch gpusched.Channel) *object { return ch.Object.(*object) }

// livingGroups leaves out the groups that are gone.
func (a *account) livingGroups(groups []gpusched.Group) []gpusched.Group {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.DeleteFunc(groups, func(r gpusched.Group) bool {
		c := r.Client.(*client)
		return a.clients[c.handle] != c || c.objects[r.Handle] == nil
	})
}

// groupsOn lists the container's channel groups on a GPU's graphics engine. A group that has two handles is in it twice.
func (a *account) groupsOn(gpu int) []gpusched.Group {
	a.mu.Lock()
	defer a.mu.Unlock()
	var list []gpusched.Group
	for _, c := range a.clients {
		for h, o := range c.groups {
			if c.gpuOf(o) == gpu && !o.group.lent() {
				list = append(list, gpusched.Group{Client: c, Handle: h, Of: o.group})
			}
		}
	}
	return list
}

// channel is a channel of the client as GPU time sees it.
func (c *client) channel(handle uint32, o *object) gpusched.Channel {
	return gpusched.Channel{Client: c.handle, Handle: handle, PID: c.tgid, Object: o}
}

// channelsOn lists the channels of those groups; with all, those on other engines too.
func (a *account) channelsOn(gpu int, all bool) []gpusched.Channel {
	a.mu.Lock()
	defer a.mu.Unlock()
	var list []gpusched.Channel
	for _, c := range a.clients {
		for h, o := range c.channels {
			if (all || c.groups[o.parent] != nil) && c.gpuOf(o) == gpu {
				list = append(list, c.channel(h, o))
			}
		}
	}
	return list
}

// channelsOf lists the channels that a handle of a client stands for, a group's or the channel itself, and says whether they
// are on the graphics engine.
func (a *account) channelsOf(client, handle uint32) (list []gpusched.Channel, gpu int, graphics bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	o := c.object(handle)
	switch {
	case o == nil:
		return nil, noGPU, false
	case o.group != nil:
		if list = o.group.channels(); len(list) == 0 {
			return nil, noGPU, false
		}
		return list, c.gpuOf(o), o.group.graphics
	case o.kind == rm.ClassChannel:
		return []gpusched.Channel{c.channel(handle, o)}, c.gpuOf(o), c.groups[o.parent] != nil
	}
	return nil, noGPU, false
}

// markGraphics notes that a channel group is on the graphics engine, whatever it said when it was made: before Ampere the
// engine follows from the objects on its channels. False: it was known, or is no group.
func (a *account) markGraphics(client, handle uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.clients[client].object(handle)
	if o == nil || o.group == nil || o.group.graphics {
		return false
	}
	o.group.graphics = true
	for x, c := range o.group.handles {
		c.groups[x.handle] = x
	}
	a.noteHandles(o)
	return true
}

// isChannel reports a handle of a channel.
func (a *account) isChannel(client, handle uint32) bool {
	o, ok := a.lookup(client, handle)
	return ok && o.kind == rm.ClassChannel
}

// isGroup reports a handle of a channel group, on whatever engine.
func (a *account) isGroup(client, handle uint32) bool {
	o, ok := a.lookup(client, handle)
	return ok && o.group != nil
}

// isLent reports a handle of the channel group that the domain's MPS server has lent.
func (a *account) isLent(client, handle uint32) bool {
	o, ok := a.lookup(client, handle)
	return ok && o.group != nil && o.group.lent()
}

// classChannelGroup is KEPLER_CHANNEL_GROUP_A.
const classChannelGroup = 0xa06c
