// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// object is one handle of a client.
type object struct {
	entry
	owner                 *client
	handle, parent, class uint32
	kind                  rm.ClassKind
	countsOn              int                    // the GPU that it counts on; noGPU: it is not known, and it counts on each
	gpu                   int                    // of a device object; noGPU for all others, which inherit from their parent
	charge                *charge                // nil for what takes no device memory; of another name of memory, that memory's
	length                quota.Bytes            // of device memory, as the driver counts it: before rounding, without hidden costs
	size                  quota.Bytes            // of memory, wherever it is; 0: not known
	page                  quota.Bytes            // of device memory
	spilled               bool                   // host memory that the container takes for device memory
	host                  bool                   // host memory that the driver made for the container
	madeInTask            bool                   // the task was let make it, and may not have
	doubtful              bool                   // the driver may have freed it in a call of the task's, see memorycalls.go
	space                 uint32                 // handle of a range's address space (0: the device's) or a context DMA's memory: ends with it
	secondCharge          *charge                // of a second memory of which it is another name; nil: there is none
	contextShare          uint32                 // of a channel: handle, 0: none
	id                    uint32                 // of a channel: the driver's number for it, never given again; 0: not known
	retained              *retained              // of a channel that a UVM address space keeps
	unbound               bool                   // of a channel: UVM has taken its context away, or is about to; it must not run again
	scheduled             bool                   // a channel that was let run (GPFIFO_SCHEDULE)
	group                 *channelGroup          // of a channel group: what it is a handle of, see groups.go
	userd                 userd                  // of a channel
	runlist               runlist                // of a channel
	flexible              bool                   // of NVLink addresses: memory may be attached by this handle
	engine                uint32                 // of a channel or a channel group: NV2080_ENGINE_TYPE_*, as its maker named it
	streams               *streams               // of a profiler
	dmaMaps               map[dmaPlace][]*dmaMap // of a range of GPU addresses: what is mapped there
	mappedBy              map[*dmaMap]bool       // of memory: where it is mapped
	windows               []*window              // of memory: for the processor
	keptWindows           []*window              // of a channel: the guard's handles on notifiers that are freed
	notifiers             [2]uint32              // of a channel or a group: what it writes errors to
	notifies              map[*object]bool       // of memory, and of a context DMA: the channels that write errors to it
}

// noGPU means that an object does not say by itself which GPU it is on.
const noGPU = -1

// addObject records a new handle. reserved is what reserve took for it and size what it really takes; both are zero for
// objects without device memory. False: the client is gone meanwhile, and the reservation with it.
func (a *account) addObject(clientHandle uint32, o object, gpu int, reserved, size quota.Bytes) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if gpu != noGPU && reserved > 0 {
		a.refund(&charge{gpu: gpu, size: reserved, spilled: o.spilled, host: o.host})
	}
	c := a.clients[clientHandle]
	if c == nil {
		return false
	}
	if size > 0 {
		o.charge = &charge{gpu: gpu, size: size, length: o.length, spilled: o.spilled, host: o.host, page: o.page}
		if o.host {
			a.hostUsed += size
		} else {
			a.gpus[gpu].charge(size, o.spilled)
		}
	}
	a.insertObject(c, &o)
	return true
}

// insertObject replaces a stale record of the same handle, and of all that has ended with it: RM would not have granted a handle that is in
// use.
func (a *account) insertObject(c *client, o *object) {
	for ch := range o.charges {
		a.countReference(ch, &ch.handles, 1)
	}
	o.countFabric(1)
	if old := c.objects[o.handle]; old != nil {
		a.dropTree(c, old)
	}
	c.objects[o.handle] = o
	o.owner = c
	o.doubtful = c.doubts.Load() != 0
	a.books.note(o)
	c.countBelow(o, 1)
	a.objects++
	o.countsOn = c.gpuOf(o)
	a.countObject(o, 1)
	c.index(o)
	a.noteGroup(c, o)
	if o.kind == rm.ClassChannel {
		if x := c.objects[o.parent]; x != nil && x.group != nil && o.contextShare == 0 {
			x.group.legacy = true
			a.noteHandles(x)
		}
		a.countChannel(o.runlist, 1)
		a.noteNotifiers(c, o, true)
	}
}

// index lets a client find what is looked for among its objects.
func (c *client) index(o *object) {
	switch o.kind {
	case rm.ClassChannel:
		c.channels[o.handle] = o
	case rm.ClassSubdevice:
		c.subdevices[o.handle] = o
	}
	if o.isDependant() {
		c.dependants[o.handle] = o
	}
}

// countBelow counts an object as one that ends with others, or one less. It is counted by their handles, whether or not there are records
// of them: what the task was let make may come before its parent, and outlive that.
func (c *client) countBelow(o *object, n int) {
	for _, h := range o.endsWith() {
		if h == 0 {
			continue
		}
		if c.children[h] += n; c.children[h] == 0 {
			delete(c.children, h)
		}
	}
}

// accountsOf lists the accounts of the GPUs that an object counts on.
func (a *account) accountsOf(gpu int) []gpuAccount {
	if gpu == noGPU {
		return a.gpus
	}
	return a.gpus[gpu : gpu+1]
}

// countObject counts an object, or one less. The account is locked.
func (a *account) countObject(o *object, n int) {
	if o.kind == rm.ClassVidmem {
		a.changes++
	}
	for i := range a.accountsOf(o.countsOn) {
		g := &a.accountsOf(o.countsOn)[i]
		if o.kind.InFirmware() {
			g.firmware += n
		}
		switch o.kind {
		case rm.ClassTSG:
			g.tsgs += n
		case rm.ClassVASpace:
			g.vaSpaces += n
		case rm.ClassChannel:
			g.channels += n
		case rm.ClassEvent:
			g.events += n
		case rm.ClassEncoder:
			g.encoders += n
		case rm.ClassSemaphores, rm.ClassMapper:
			g.surfaces += n
		}
	}
}

// countKept counts a channel that is kept, or one less. The account is locked.
func (a *account) countKept(gpu, n int) {
	for i := range a.accountsOf(gpu) {
		a.accountsOf(gpu)[i].keptChannels += n
	}
}

// dupObject records a second handle on what another handle referred to when the driver was asked. It counts as an object of its kind: it
// keeps that alive, and is another object to the GPU's firmware.
func (a *account) dupObject(client, parent, handle uint32, of object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil {
		a.insertObject(c, &object{handle: handle, parent: parent, class: of.class, kind: of.kind, charge: of.chargeNow(),
			gpu: of.gpu, spilled: of.spilled, host: of.host, size: of.size, madeInTask: of.madeInTask, secondCharge: of.secondCharge,
			engine: of.engine, group: of.group})
	}
}

// freeObject drops a handle and all its descendants; of the client's own handle, the client.
func (a *account) freeObject(clientHandle, handle uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil {
		return
	}
	if handle == clientHandle {
		a.dropClient(c)
		return
	}
	if o := c.objects[handle]; o != nil {
		a.dropTree(c, o)
	}
}

// dropTree drops a handle and all its descendants. The account is locked.
func (a *account) dropTree(c *client, o *object) {
	if c.children[o.handle] == 0 {
		a.dropObject(c, o)
		return
	}
	for h := range c.below(o) {
		a.dropObject(c, c.objects[h])
	}
}

// endsWith are the handles of what an object ends with; 0: none. The driver frees a channel with its context share and its address space,
// too; in the account it lives until it is freed itself, or found gone (dependants.go): it is better known too long. What is made under
// its handle then is not taken for it (object.id).
func (o *object) endsWith() [2]uint32 { return [2]uint32{o.parent, o.space} }

// isBelow reports that an object ends with another. The account is locked.
func (c *client) isBelow(o, above *object, depth int) bool {
	if o == nil || o == above || depth == maxDepth {
		return o != nil && o == above
	}
	for _, h := range o.endsWith() {
		if h != 0 && c.isBelow(c.objects[h], above, depth+1) {
			return true
		}
	}
	return false
}

// maxDepth is more than RM_MAX_RESOURCE_DEPTH and what a range and its address space add.
const maxDepth = 8

// below are the handles of an object and of all that ends with it. The account is locked.
func (c *client) below(o *object) map[uint32]bool {
	// Objects count their children but do not list them: a free of an object that has some is rare (a device at the
	// end of a program), frees of memory are not.
	gone := map[uint32]bool{o.handle: true}
	for grew := c.children[o.handle] > 0; grew; {
		grew = false
		for h, x := range c.objects {
			if !gone[h] && (gone[x.parent] || gone[x.space]) {
				gone[h], grew = true, true
			}
		}
	}
	return gone
}

func (a *account) dropObject(c *client, o *object) {
	a.dropMaps(o)
	a.loosenLocked(o.windows...)
	a.loosenLocked(o.keptWindows...)
	if o.kind == rm.ClassChannel {
		a.noteNotifiers(c, o, false)
	}
	a.books.end(o)
	delete(c.objects, o.handle)
	a.forgetGroup(c, o)
	delete(c.channels, o.handle)
	delete(c.subdevices, o.handle)
	delete(c.dependants, o.handle)
	if _, ok := c.policies[o.handle]; ok {
		delete(c.policies, o.handle)
		a.books.note(c)
	}
	delete(c.notified, o)
	c.countBelow(o, -1)
	a.objects--
	a.countObject(o, -1)
	switch {
	case o.kind != rm.ClassChannel:
	case o.retained != nil: // it keeps its number, see releaseChannel
		o.retained.channel, o.retained.runlist, o.retained.countsOn = nil, o.runlist, o.countsOn
		a.books.note(o.retained)
		a.countKept(o.countsOn, 1)
	default:
		a.countChannel(o.runlist, -1)
	}
	if usesGraphics(rm.Class{ID: o.class, Kind: o.kind}) {
		a.engineObjectGone(c, o)
	}
	for ch := range o.charges {
		a.countReference(ch, &ch.handles, -1)
	}
	o.countFabric(-1)
}

// importObject records a handle that was made from an exported file.
func (a *account) importObject(client, parent, handle uint32, e export) {
	o := object{class: classVidmem, kind: rm.ClassVidmem, gpu: noGPU, charge: e.charge}
	switch {
	case e.fabric:
		o.class, o.kind, o.size = classFabric, rm.ClassFabric, e.size
	case e.charge == nil: // it is no device memory; what it is the driver does not say
		o.class, o.kind = 0, rm.ClassPlain
	}
	a.dupObject(client, parent, handle, o)
}

// contextOwner finds what a context on a channel belongs to: the channel's group, or the channel if it is in none. charged
// says that it has been charged for.
func (a *account) contextOwner(clientHandle, channel uint32) (owner uint32, charged bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil {
		return 0, false
	}
	o := c.objects[channel]
	if o == nil {
		return 0, false
	}
	if p := c.objects[o.parent]; p != nil && p.kind == rm.ClassTSG {
		o = p
	}
	return o.handle, o.charge != nil || o.group != nil && o.group.lent()
}

// chargeContext charges an object with what reserve took. False: it is gone.
func (a *account) chargeContext(clientHandle, owner uint32, gpu int, size quota.Bytes) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil {
		return false
	}
	o := c.objects[owner]
	if o == nil || o.charge != nil {
		return false
	}
	o.chargeAll(&charge{gpu: gpu, size: size})
	a.noteHandles(o)
	return true
}

// countPeerMemory counts the objects by which memory is registered for other devices.
func (a *account) countPeerMemory() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.clients {
		for _, o := range c.dependants {
			if o.class == classPeerMemory {
				n++
			}
		}
	}
	return n
}

// lookup copies an object's record.
func (a *account) lookup(clientHandle, handle uint32) (object, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil {
		return object{}, false
	}
	o := c.objects[handle]
	if o == nil {
		return object{}, false
	}
	return *o, true
}

// roomForObject reports whether one more object of a kind may be made, on a GPU if it is of those that count there.
func (a *account) roomForObject(kind rm.ClassKind, gpu, maxTSGs, maxChannels int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, g := range a.accountsOf(gpu) {
		switch {
		case kind.InFirmware() && g.firmware >= maxFirmware,
			kind == rm.ClassVASpace && g.vaSpaces >= vaSpacesPerTSG*maxTSGs,
			kind == rm.ClassTSG && g.tsgs >= maxTSGs,
			kind == rm.ClassEvent && g.events >= maxNotifications,
			kind == rm.ClassEncoder && g.encoders >= maxEncoders,
			(kind == rm.ClassSemaphores || kind == rm.ClassMapper) && g.surfaces >= maxSurfaces,
			kind == rm.ClassChannel && g.channels+g.keptChannels >= maxChannels:
			return false
		}
	}
	return a.objects < maxObjects
}
