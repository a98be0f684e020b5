// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// charge is device memory held by the container.
type charge struct {
	entry
	gpu        int
	size       quota.Bytes
	handles    int         // RM handles
	references int         // UVM mappings, exported files and windows
	calls      int         // under way that refer to it
	windows    int         // of these, windows
	length     quota.Bytes // as the driver counts it, for the audit
	spilled    bool        // it is host memory, out of the spill
	host       bool        // it is host memory, of which the driver makes so much for a container
	tables     bool        // it is page tables of UVM's, which never have a handle
	page       quota.Bytes // that device memory is mapped in; 0: not known
	fabric     bool        // it has, or had, NVLink addresses
	fabrics    int         // handles on them, and calls under way that make some
	flexible   quota.Bytes // of NVLink addresses that have no memory of their own
	attached   int         // to these: pieces of memory, at most
}

// onOtherGPU reports device memory that is not on a GPU. The driver never compares: it takes the address of the memory for one on the GPU
// that a call names, where a neighbour's may be. The handle's own device counts too: memory below another's is that one's to some of the
// driver.
func (a *account) onOtherGPU(client, handle uint32, gpu int) bool {
	o, ok := a.lookup(client, handle)
	if o.kind == rm.ClassContextDMA {
		handle = o.space
		o, ok = a.lookup(client, handle)
	}
	return ok && (o.charge.onOtherGPU(gpu) || o.charge.onOtherGPU(a.gpuOf(client, handle)))
}

// isDeviceMemory reports a charge for memory of a GPU.
func (ch *charge) isDeviceMemory() bool { return ch != nil && !ch.host && !ch.spilled }

// onOtherGPU reports a charge for memory of another GPU.
func (ch *charge) onOtherGPU(gpu int) bool { return ch.isDeviceMemory() && ch.gpu != gpu }

// charges are what an object keeps alive.
func (o *object) charges(yield func(*charge) bool) {
	_ = (o.charge == nil || yield(o.charge)) && (o.secondCharge == nil || yield(o.secondCharge))
}

// countReference changes one of a charge's numbers of references, and gives its bytes back once nothing refers to it. The account is
// locked.
func (a *account) countReference(ch *charge, references *int, by int) {
	was := ch.zombie()
	*references += by
	switch is := ch.zombie(); {
	case is && !was:
		a.zombies++
	case was && !is:
		a.zombies--
	}
	if ch.handles == 0 && ch.references == 0 && ch.calls == 0 {
		a.refund(ch)
		a.books.end(ch)
	}
}

// zombie reports that only UVM mappings, exported files or windows refer to what has had a handle.
func (ch *charge) zombie() bool { return ch.handles == 0 && ch.references > 0 && !ch.tables }

func (a *account) refund(ch *charge) {
	if g := &a.gpus[ch.gpu]; ch.flexible > 0 {
		g.flexible -= min(ch.flexible, g.flexible)
		g.attached -= min(ch.attached, g.attached)
	}
	if ch.host {
		a.hostUsed -= min(ch.size, a.hostUsed)
	} else {
		a.gpus[ch.gpu].refund(ch.size, ch.spilled)
	}
}

// acquireObject looks up an object that a call refers to, and keeps its charge until releaseObject. An object that is not known has no
// handle. False: the client is gone, so that what is there under its handles is nobody's any more.
func (a *account) acquireObject(c *client, handle uint32) (object, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := c.objects[handle]
	if a.clients[c.handle] != c || o == nil {
		return object{gpu: noGPU}, a.clients[c.handle] == c
	}
	for ch := range o.charges {
		a.countReference(ch, &ch.calls, 1)
	}
	return *o, true
}

func (a *account) releaseObject(o object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for ch := range o.charges {
		a.countReference(ch, &ch.calls, -1)
	}
}

// maxReferences bounds the handles, mappings, files and calls that refer to a piece of memory. The driver counts them in a byte
// (MEMORY_DESCRIPTOR.Allocated, memCopyConstruct_IMPL); when that comes around to 0 the memory is never given back, to nobody
// (memdescFree). The rest is for what the driver adds itself: an engine's context, a page table that UVM keeps.
const maxReferences = 192

// roomForReferences reports that memory may be referred to as often as it is, calls under way with it, and more times besides, which count
// as calls from then on.
func (a *account) roomForReferences(ch *charge, more int) bool {
	if ch == nil {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n := ch.handles + ch.references + ch.calls
	if n == 0 || n+more > maxReferences { // none: it has ended meanwhile
		return false
	}
	ch.calls += more
	return true
}

// roomForReferences is the account's, for a call that has acquired the memory as often as it refers to it, but for more times.
func (c *trappedCall) roomForReferences(ch *charge, more int) bool {
	if !c.guard.account.roomForReferences(ch, more) {
		return false
	}
	for range more {
		c.acquired = append(c.acquired, object{charge: ch})
	}
	return true
}

func (c *trappedCall) denyReferences() reply {
	return c.deny(rm.StatusInsufficientResources, "references", "denied one more handle, mapping or file of memory that has as many as it may",
		"max", maxReferences)
}

func (c *trappedCall) denyUserShared() reply {
	return c.deny(rm.StatusNotSupported, "usershared", "denied a second handle on the page that all users of the GPU share "+
		"(RM_USER_SHARED_DATA): the driver counts them for good, and after 255 no CUDA program starts on the GPU")
}

// addReference adds a reference that is no handle (a UVM mapping, an exported file), if there is something to refer to. The caller has
// another one.
func (a *account) addReference(ch *charge) *charge {
	if ch == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.countReference(ch, &ch.references, 1)
	return ch
}

// dropReference drops a reference of addReference, if there is one.
func (a *account) dropReference(ch *charge) {
	if ch == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.countReference(ch, &ch.references, -1)
}

func (a *account) hasZombies() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.zombies > 0
}

// memoryChanges counts handles on device memory that came or went.
func (a *account) memoryChanges() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changes
}

// expectedLengths sums, per GPU, the device memory that the driver should count for some processes: each handle. One below another GPU's
// device the driver counts nowhere, nor other names of memory.
func (a *account) expectedLengths(tgids map[int]bool) []quota.Bytes {
	a.mu.Lock()
	defer a.mu.Unlock()
	sum := make([]quota.Bytes, len(a.gpus))
	for _, c := range a.clients {
		if !tgids[c.tgid] {
			continue
		}
		for _, o := range c.objects {
			if ch := o.charge; ch != nil && !ch.spilled && o.kind == rm.ClassVidmem && c.gpuOf(o) == ch.gpu {
				sum[ch.gpu] += ch.length
			}
		}
	}
	return sum
}
