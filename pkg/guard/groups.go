package guard

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

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

// lockCallsSoon keeps the program from freeing the client's objects until unlock: a control of what is gone leaves a line in the kernel log. A call
// that takes long is not waited for, or a program could keep its timeslice by such calls.
func (c *client) lockCallsSoon() (unlock func()) {
	if c.tryLockCalls() {
		return c.calls.Unlock
	}
	return func() {}
}

// tryLockCalls locks a client's calls if they take no longer than about a millisecond.
func (c *client) tryLockCalls() bool {
	for range 20 {
		if c.calls.TryLock() {
			return true
		}
		time.Sleep(50 * time.Microsecond)
	}
	return false
}

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

// gpuOf follows an object's ancestors to a device. The account is locked.
func (c *client) gpuOf(o *object) int {
	for range 64 {
		if o == nil {
			return noGPU
		}
		if o.gpu != noGPU {
			return o.gpu
		}
		o = c.objects[o.parent]
	}
	return noGPU
}

// clientPIDs lists who made the container's RM clients, by which the driver names contexts.
func (a *account) clientPIDs() map[int]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	pids := map[int]bool{}
	for _, c := range a.clients {
		pids[c.tgid] = true
	}
	return pids
}

// fileOf copies the file that a client lives on back from the container, to make a call in the client's name. The guard
// keeps none: it would hold the client's memory when the container has closed it. Close the target's descriptor.
func (g *Guard) fileOf(c *client) (Target, bool) { return g.fileWithin(c, &g.bill.searches) }

// fileWithin is fileOf, which searches for as long as a bucket has seconds.
func (g *Guard) fileWithin(c *client, searches *bucket) (Target, bool) {
	t := Target{FD: -1, PID: c.tgid, TID: c.tgid}
	if c.file == nil {
		return t, false
	}
	if !g.driver.Native() {
		t.File = uint32(c.file.sim)
		return t, t.File != 0
	}
	g.account.mu.Lock()
	seen := c.fileSeenAt
	g.account.mu.Unlock()
	if seen.tgid != 0 {
		if t.FD = g.fileAt(seen, c.file); t.FD >= 0 {
			return t, true
		}
	}
	if searches.owed(time.Now()) > 0 {
		return t, false
	}
	defer func(begin time.Time) { searches.spend(time.Now(), time.Since(begin).Seconds()) }(time.Now())
	tgids := []int{c.tgid}
	for _, p := range g.tasks.processes() {
		if p.tgid != c.tgid {
			tgids = append(tgids, p.tgid)
		}
	}
	tgids = append(tgids, g.containerCgroups().processes()...)
	for _, tgid := range tgids {
		if fd, at := findFile(g.files.self, tgid, c.file, &g.nodes); fd >= 0 {
			g.account.mu.Lock()
			c.fileSeenAt = at
			g.account.mu.Unlock()
			t.FD = fd
			return t, true
		}
	}
	return t, false
}

// fileAt copies a descriptor if it is the file.
func (g *Guard) fileAt(p place, f *file) int {
	pidfd, err := openThread(p.tid, p.tgid)
	if err != nil {
		return -1
	}
	defer unix.Close(pidfd)
	fd, _, e := unix.RawSyscall(unix.SYS_PIDFD_GETFD, uintptr(pidfd), uintptr(p.fd), 0)
	if e != 0 {
		return -1
	}
	if order, e := f.compare(g.files.self, int(fd)); e != 0 || order != kcmpEqual {
		_ = unix.Close(int(fd))
		return -1
	}
	return int(fd)
}
