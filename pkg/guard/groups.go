// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rm"
)

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
			if c.gpuOf(o) == gpu {
				list = append(list, gpusched.Group{Client: c, Handle: h})
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
	if c == nil {
		return nil, noGPU, false
	}
	for h, o := range c.channels {
		if h == handle || o.parent == handle {
			list = append(list, c.channel(h, o))
			gpu, graphics = c.gpuOf(o), c.groups[o.parent] != nil
		}
	}
	return list, gpu, graphics
}

// markGraphics notes that a channel group is on the graphics engine, whatever it said when it was made: before Ampere the
// engine follows from the objects on its channels. False: it was known, or is no group.
func (a *account) markGraphics(client, handle uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil {
		return false
	}
	o := c.objects[handle]
	if o == nil || o.graphics || o.kind != rm.ClassTSG && o.class != classChannelGroup {
		return false
	}
	o.graphics = true
	a.books.note(o)
	c.groups[handle] = o
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
	return ok && (o.kind == rm.ClassTSG || o.graphics || o.class == classChannelGroup)
}

// classChannelGroup is KEPLER_CHANNEL_GROUP_A.
const classChannelGroup = 0xa06c
