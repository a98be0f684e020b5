// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// maxObjects bounds the RM objects of one container, and with them the guard's own memory and the driver's: 1 to 20 KiB of the host's
// kernel memory each. A CUDA context has about 300.
const maxObjects = 1 << 16

// maxFirmware bounds those that the firmware of one GPU has too (rm.ClassKind.InFirmware): its memory is one piece for all containers, and
// when that is full nobody's calls succeed. A CUDA context has about 50,
// and an engine's object on each of its channels.
const maxFirmware = 4096

// What the driver has in lists that it goes through for all of a GPU's users: at interrupts (a notification, a semaphore surface,
// _gpuEngineEventNotificationListNotify), once a second (a session of an encoder). These bound a container's, on each GPU.
const (
	maxNotifications = 512
	maxSurfaces      = 256
	maxEncoders      = 32
)

// maxExported bounds what a container has in files for others: a node has 524,288 handles for that (MAX_OBJ_EXPORT_HANDLES).
const maxExported = 8192

// account is what a container holds: RM clients, their objects, and the device memory charged for them.
//
// A charge is an amount with a number of references, not a handle: memory lives in the driver until its last handle, dup,
// export and UVM mapping is gone (rm-abi 1.6), so adding a reference adds no bytes and only dropping the last one gives
// them back. All methods lock; none calls a driver.
type account struct {
	books    *books
	mu       sync.Mutex
	gpus     []gpuAccount // in the order of Config.GPUs
	clients  map[uint32]*client
	objects  int
	runlists map[runlist]int // channels by engine
	dmaMaps  int
	hostUsed quota.Bytes // memory that the driver made for the container on the host
	osEvents int
	// osEventsSeen is when closed files of events were looked for last.
	osEventsSeen time.Time
	windows      int       // for the processor, see windows.go
	loose        []*window // of these, those that are over, until nobody can see the memory any more
	changes      uint64    // handles on device memory that came or went
	zombies      int       // charges that no handle refers to any more, only UVM mappings or exported files
	// onDenied, if not nil, is told of every denial that counts, with mu held: size did not fit into a GPU's limit, or its spill.
	onDenied func(gpu int, size quota.Bytes, spill bool, state gpuAccount)
	// onLoose, if not nil, is told that windows are over, whatever ended them, with mu held.
	onLoose func()
	// onChannels, if not nil, is told how many channels the container has on the engine of a GPU where it has most, with mu held.
	onChannels func(gpu, n int)
}

// counts are objects on a GPU that all containers there have so many of.
type counts struct {
	firmware     int // in the GPU's firmware, of all kinds
	events       int // notifications (NV01_EVENT)
	encoders     int // sessions
	surfaces     int // of semaphores, and what holds one more handle of one
	tsgs         int
	vaSpaces     int
	channels     int
	keptChannels int // channels that are freed and that a UVM address space keeps, with their numbers on the runlist
}

// client is an RM client. It lives as long as the file it was made on, or until it is freed.
type client struct {
	entry
	handle  uint32
	tgid    int // the process that made it, by which RM accounts
	file    *file
	objects map[uint32]*object
	// groups are its channel groups on the graphics engine, channels all channels; see groups.go.
	groups, channels map[uint32]*object
	subdevices       map[uint32]*object
	dependants       map[uint32]*object // see dependants.go
	children         map[uint32]int     // by handle: how many objects end with it
	notified         map[*object]bool   // memory that channels write errors to
	fileSeenAt       place              // where its file was found last
	euid             int                // the user number that it was made under, by which RM compares users; -1: not known
	policies         map[uint32]policy  // by object that has policies of its own, see share.go
	open             openRights
	ending           bool               // its channels are off for good, see Guard.stop
	unseen           bool               // it has a channel that the guard has not seen made, and is being freed
	wholeAt          int64              // one more than Guard.rootsLet when it had none for sure; see wholeclient.go
	doubts           atomic.Int64       // what is made now may be freed by RM_ALLOC_MEMORY up to this one; see memorycalls.go
	osEvents         map[uint32]weakRef // the files that they came on, with which they end, by descriptor number

	// calls is held over a call that makes, opens or drops objects of the client, from before the driver is asked until the
	// account knows. Otherwise two threads of the container could have a free and an allocation of one handle recorded in
	// another order than the driver saw them, and hold memory that is charged to nobody. RM itself takes a lock per client.
	calls sync.Mutex
}

func newAccount(gpus []GPU) *account {
	a := &account{clients: map[uint32]*client{}, runlists: map[runlist]int{}}
	for _, g := range gpus {
		a.gpus = append(a.gpus, gpuAccount{limit: g.Limit, native: g.Native, spill: g.Spill})
	}
	return a
}

// addClient records a verified client.
func (a *account) addClient(handle uint32, tgid int, f *file) *client {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old := a.clients[handle]; old != nil {
		a.dropClient(old)
	}
	c := &client{handle: handle, tgid: tgid, euid: -1, file: f, objects: map[uint32]*object{}, groups: map[uint32]*object{},
		channels: map[uint32]*object{}, subdevices: map[uint32]*object{}, dependants: map[uint32]*object{}, children: map[uint32]int{}}
	a.clients[handle] = c
	a.books.note(c)
	return c
}

// removeClient forgets a client. False: it is not there, though perhaps another one with its handle.
func (a *account) removeClient(c *client) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.clients[c.handle] != c {
		return false
	}
	a.dropClient(c)
	return true
}

// client finds a client; nil if it is not the container's.
func (a *account) client(handle uint32) *client {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.clients[handle]
}

// hasClientOn reports that a client is known to be on a file.
func (a *account) hasClientOn(f *file, handle uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[handle]
	return c != nil && c.file == f
}

// ownsClient reports that a client is the container's.
func (a *account) ownsClient(handle uint32) bool { return a.client(handle) != nil }

func (a *account) clientCount() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.clients)
}

func (a *account) objectCount() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.objects
}

// gpuOf finds the GPU that an object of a client is on, by its ancestors; noGPU if it is on none.
func (a *account) gpuOf(clientHandle, handle uint32) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil {
		return noGPU
	}
	for range 64 { // a chain of handles can be made long, but no real one is
		o := c.objects[handle]
		if o == nil {
			return noGPU
		}
		if o.gpu != noGPU {
			return o.gpu
		}
		handle = o.parent
	}
	return noGPU
}

func (a *account) dropClient(c *client) {
	for _, o := range c.objects {
		a.dropObject(c, o)
	}
	for number := range c.osEvents {
		a.dropEvent(c, number)
	}
	delete(a.clients, c.handle)
	a.books.end(c)
}

// dropFile forgets the clients of a file that is closed for good.
func (a *account) dropFile(f *file) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.clients {
		if c.file == f {
			a.dropClient(c)
		}
	}
}

// usage is a copy of a GPU's numbers.
func (a *account) usage(gpu int) gpuAccount {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gpus[gpu]
}

// processUse is what the clients of a process hold, per GPU, each charge once.
type processUse struct {
	clients int
	used    []quota.Bytes
	seen    map[*charge]bool
}

// byProcess sums what processes with clients hold.
func (a *account) byProcess() map[int]*processUse {
	a.mu.Lock()
	defer a.mu.Unlock()
	uses := map[int]*processUse{}
	for _, c := range a.clients {
		u := uses[c.tgid]
		if u == nil {
			u = &processUse{used: make([]quota.Bytes, len(a.gpus)), seen: map[*charge]bool{}}
			uses[c.tgid] = u
		}
		u.clients++
		for _, o := range c.objects {
			if o.charge != nil && !o.charge.spilled && !o.charge.host && !u.seen[o.charge] {
				u.seen[o.charge] = true
				u.used[o.charge.gpu] += o.charge.size
			}
		}
	}
	return uses
}

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
