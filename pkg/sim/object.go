// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// Handles as RM chooses them: clients consecutively from firstClient (RS_CLIENT_HANDLE_BASE), objects of a client from
// firstObject (RS_UNIQUE_HANDLE_BASE) when the caller does not name one.
const (
	firstClient = 0xc1d00000
	lastClient  = 0xc1dfffff
	firstObject = 0xcaf00000
)

// client is an RM client: the root of a tree of objects, bound to the file it was made on.
type client struct {
	handle  uint32
	file    *file
	pid     int32 // ProcID: the process that everything below is accounted to
	objects map[uint32]*object
	root    *object
	next    uint32 // next handle for an object without a name
}

// object is one RM object. Which of the pointers are set depends on the class.
type object struct {
	client   *client
	handle   uint32
	class    uint32
	parent   *object
	children map[uint32]*object // by handle
	gpu      *gpu               // of the device above; nil for objects outside of a device
	memory   *memory            // device memory (class 0x40)
	pages    *hostPages         // host memory (class 0x3e)
	group    *group             // channel group (class 0xa06c)
	channel  *channel           // *_CHANNEL_GPFIFO
	vaspace  *vaspace           // class 0x90f1; of a device: the one of what names none, made when it is first used
	spaceOf  uint32             // of a device: the client whose address space it uses, hClientShare
	shared   bool               // it has policies of its own
	shares   []policy
	tables   *memory                // page tables taken when it was made (classes 0x50a0 and 0x90f1); nil: none
	size     quota.Bytes            // of memory, or of a range of addresses
	maps     map[uint64]*dmaMapping // of a range of addresses: what is mapped there
	mapped   map[*dmaMapping]bool   // of memory: where it is mapped
	windows  []*window              // of memory: for the processor
	ranges   map[*object]bool       // of an address space: ranges of addresses, of memory: context DMAs, which end with it
	space    *object                // of a range of addresses: its address space; nil: the device's. Of a context DMA: its memory
	within   *vaspace               // of a range at an address of its maker's choice
	address  uint64                 // where that is
}

// hostPages is a piece of host memory. It lives as long as a handle, or a file that shows it (nv_free_pages).
type hostPages struct{ size quota.Bytes }

// memory is a piece of device memory. It lives until its last reference is gone: handles in any client, exports, and what UVM address
// spaces hold.
type memory struct {
	gpu    *gpu
	size   quota.Bytes // as taken from the card
	refs   int
	lost   bool  // it is never given back, see ref
	pid    int32 // who allocated it
	attr   uint32
	hidden bool // a context's, or page tables of UVM's
	mapped int  // UVM mappings
}

// group is a channel group (TSG). It lives until its last handle is gone.
type group struct {
	handles     map[*object]bool
	engineType  uint32
	timesliceUs uint64
	context     *memory // hidden memory; nil: it has none
	gfxp        *memory // that of graphics preemption
	others      *memory // that of its second client and all others
	preempts    uint64
	objects     bool         // an engine object below it has made one, without compute preemption
	cilp        bool         // which it has since
	draws       bool         // and a 2D or 3D object, with which it cannot have it
	vaspace     *vaspace     // of its channels that name none
	notifier    uint32       // that too
	tsg         *runlist.TSG // on the graphics engine; else nil
}

// channel is a channel; a stand-alone one has no group.
type channel struct {
	group      *object
	engineType uint32
	enabled    bool // by GPFIFO_SCHEDULE; a new one is not
	disabled   bool // FIFO_DISABLE_CHANNELS
	vaspace    *vaspace
	id         uint32  // never given again
	notifier   *memory // hObjectError, which it has no reference on; nil: none, or host memory
}

// vaspace is an address space of RM; it can be one UVM file's. Of its ranges those are known whose makers chose the address.
type vaspace struct {
	taken bool
	fixed map[*object]bool
}

// client finds a client that the calling file may use: RM's strict client validation (rmclientValidate_IMPL) compares
// the file, so that a guessed handle is worth nothing.
func (r *request) client(handle uint32) (*client, uint32) {
	c := r.d.clients[handle]
	if c == nil || c.file != r.f.owner() {
		return nil, rm.StatusInvalidClient
	}
	return c, rm.StatusOK
}

// place puts a new object into its client's tree, choosing a handle if o has none.
func (d *Driver) place(c *client, parent *object, o *object) uint32 {
	if d.objects >= maxObjects {
		return rm.StatusInsufficientResources
	}
	if o.handle == 0 {
		for c.objects[c.next] != nil {
			c.next++
		}
		o.handle = c.next
		c.next++
	} else if c.objects[o.handle] != nil {
		return rm.StatusInsertDuplicateName
	}
	o.client, o.parent = c, parent
	if parent != nil {
		if parent.children == nil {
			parent.children = map[uint32]*object{}
		}
		parent.children[o.handle] = o
		if o.gpu == nil {
			o.gpu = parent.gpu
		}
	}
	c.objects[o.handle] = o
	d.objects++
	return rm.StatusOK
}

// freeObject frees an object and everything below it.
func (d *Driver) freeObject(o *object) {
	last := o.group != nil && len(o.group.handles) == 1
	if last && o.group.tsg != nil {
		o.gpu.engine.remove(o.group.tsg) // before its channels, whose end would only pause it
		o.group.tsg = nil
	}
	for _, child := range o.children {
		d.freeObject(child)
	}
	for x := range o.ranges {
		d.freeObject(x)
	}
	if o.space != nil {
		delete(o.space.ranges, o)
	}
	if o.within != nil {
		delete(o.within.fixed, o)
	}
	for _, m := range o.maps {
		m.drop()
	}
	for m := range o.mapped {
		m.drop()
	}
	for _, w := range o.windows {
		w.end()
	}
	if o.memory != nil {
		d.unref(o.memory)
	}
	if o.group != nil {
		delete(o.group.handles, o)
	}
	if last && o.group.context != nil {
		d.unref(o.group.context)
	}
	if last && o.group.gfxp != nil {
		d.unref(o.group.gfxp)
	}
	if last && o.group.others != nil {
		d.unref(o.group.others)
	}
	if o.tables != nil {
		d.unref(o.tables)
	}
	if o.parent != nil {
		delete(o.parent.children, o.handle)
		if o.channel != nil && o.parent.group != nil {
			repause(o.parent)
		}
		if o.parent.channel != nil && o.parent.channel.group != nil {
			endContext(o.parent.channel.group.group)
		}
	}
	delete(o.client.objects, o.handle)
	d.objects--
}

func (d *Driver) freeClient(c *client) {
	d.events = slices.DeleteFunc(d.events, func(e osEvent) bool { return e.client == c.handle })
	d.freeObject(c.root)
	delete(d.clients, c.handle)
	c.file.clients = slices.DeleteFunc(c.file.clients, func(o *client) bool { return o == c })
}

// ref is one more that holds memory. The driver counts in a byte (MEMORY_DESCRIPTOR.Allocated), and what has come around to 0 it takes for
// freed: it counts no more (memCopyConstruct_IMPL), and the memory is never given back (memdescFree).
func (m *memory) ref() {
	m.refs++
	m.lost = m.lost || m.refs > math.MaxUint8
}

func (d *Driver) unref(m *memory) {
	if m.refs--; m.refs > 0 || m.lost {
		return
	}
	m.gpu.used -= m.size
	if m.hidden {
		m.gpu.hidden -= m.size
	} else {
		m.gpu.allocated -= m.size
	}
}

// free is RM_FREE: of an object with all below it, or of the client when the object is the client itself. An object that
// is not there is no error.
func (r *request) free() uint32 {
	out := r.call.Outer
	c, st := r.client(rm.U32(out, rm.FreeRoot))
	if st != rm.StatusOK {
		return st
	}
	o := c.objects[rm.U32(out, rm.FreeObject)]
	switch o {
	case nil:
		// RM says OK (RS_COMPATABILITY_MODE in serverFreeResourceTreeLockAndFindResource; seen on 580.159.04).
	case c.root:
		r.d.freeClient(c)
	default:
		r.d.freeObject(o)
	}
	return rm.StatusOK
}
