// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The driver ends some objects with others that they are not below (refAddDependant): a channel with its address space, its context share,
// its USERD memory, or an object of the driver's own below its group. A record of one that has ended would vouch for what a root alloc that
// went elsewhere makes under its handle (isThere). So after a free that can have ended such objects the guard asks which are still there.
// Nothing is asked when they are named: calls on what there is depend on no answer.

// objectFreed takes an object that the driver has freed out of the account, and what has ended with it. The caller holds its client's
// calls; t is its file.
func (g *Guard) objectFreed(t Target, client, handle uint32) {
	g.doubtNames(client, handle)
	list := g.account.dependants(client, handle)
	g.account.freeObject(client, handle)
	for _, o := range list {
		if g.isGone(t, client, o) {
			g.account.dropGone(client, o)
		}
	}
}

// dependants lists what may end with an object beside what is below it.
func (a *account) dependants(client, handle uint32) (list []*object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil {
		return nil
	}
	o := c.objects[handle]
	if o != nil && !o.hasDependants() {
		for _, x := range c.channels {
			if x.userd.memory == handle {
				list = append(list, x)
			}
		}
		return list
	}
	for _, x := range c.dependants {
		if x != o {
			list = append(list, x)
		}
	}
	return list
}

// hasDependants is of what is no channel's USERD; what is not known is an object of the driver's own.
func (o *object) hasDependants() bool {
	switch o.kind {
	case rm.ClassDevice, rm.ClassSubdevice, rm.ClassVASpace:
		return true
	}
	return o.class == classContextShare
}

// isDependant is of what ends with others in the driver, and not in the account (endsWith).
func (o *object) isDependant() bool {
	switch o.kind {
	case rm.ClassChannel, rm.ClassTSG, rm.ClassP2P:
		return true
	}
	return o.class == classContextShare || o.class == classPeerMemory || o.class == classChannelGroup
}

// isGone reports that the driver has no such object any more, or another under its handle. What it does not say is no proof.
func (g *Guard) isGone(t Target, client uint32, o *object) bool {
	class, s, e := g.handleInfo(t, client, o.handle, handleInfoClass)
	return e == 0 && (s == rm.StatusObjectNotFound || s == rm.StatusOK && class != o.class)
}

// dropGone drops an object that the driver has freed with something else, and all its descendants. Its handle may be another object's.
func (a *account) dropGone(client uint32, o *object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil && c.objects[o.handle] == o {
		a.dropTree(c, o)
	}
}
