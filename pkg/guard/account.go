package guard

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
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
	zombies      int       // charges that no handle refers to any more, only UVM mappings or exported files
	// onDenied, if not nil, is told of every denial that counts, with mu held: size did not fit into a GPU's limit, or its spill.
	onDenied func(gpu int, size quota.Bytes, spill bool, state gpuAccount)
	// onLoose, if not nil, is told that windows are over, whatever ended them, with mu held.
	onLoose func()
	// onChannels, if not nil, is told how many channels the container has on the engine of a GPU where it has most, with mu held.
	onChannels func(gpu, n int)
}

type gpuAccount struct {
	limit   quota.Bytes
	native  bool // no limit
	used    quota.Bytes
	peak    quota.Bytes
	denied  uint64
	managed quota.Bytes // the part of used that is managed memory
	spill   quota.Bytes // host memory allowed beyond limit
	spilled quota.Bytes // what is used of it
	windows quota.Bytes // of BAR1
	counts
	show *page.VGPU // nil: nobody is told
}

// counts are objects on a GPU that all containers there have so many of.
type counts struct {
	firmware     int // in the GPU's firmware, of all kinds
	events       int // notifications (NV01_EVENT)
	encoders     int // sessions
	surfaces     int // of semaphores
	tsgs         int
	vaSpaces     int
	channels     int
	keptChannels int // channels that are freed and that a UVM address space keeps, with their numbers on the runlist
}

// client is an RM client. It lives as long as the file it was made on, or until it is freed.
type client struct {
	handle  uint32
	tgid    int // the process that made it, by which RM accounts
	file    *file
	objects map[uint32]*object
	// groups are its channel groups on the graphics engine, channels all channels; see groups.go.
	groups, channels map[uint32]*object
	subdevices       map[uint32]*object
	notified         map[*object]bool  // memory that channels write errors to
	fileSeenAt       place             // where its file was found last
	euid             int               // the user number that it was made under, by which RM compares users; -1: not known
	policies         map[uint32]policy // by object that has policies of its own, see share.go
	open             openRights
	ending           bool               // its channels are off for good, see Guard.stop
	osEvents         map[uint32]weakRef // the files that they came on, with which they end, by descriptor number

	// calls is held over a call that makes, opens or drops objects of the client, from before the driver is asked until the
	// account knows. Otherwise two threads of the container could have a free and an allocation of one handle recorded in
	// another order than the driver saw them, and hold memory that is charged to nobody. RM itself takes a lock per client.
	calls sync.Mutex
}

// callLock holds the calls of one or two clients.
type callLock [2]*client

// lockCalls keeps other calls away from the objects of two clients, which may be the same. False: one of them is gone.
func (a *account) lockCalls(x, y uint32) (callLock, bool) {
	x, y = min(x, y), max(x, y) // always in the same order
	a.mu.Lock()
	l := callLock{a.clients[x], a.clients[y]}
	a.mu.Unlock()
	if l[0] == nil || l[1] == nil {
		return callLock{}, false
	}
	l[0].calls.Lock()
	if l[1] != l[0] {
		l[1].calls.Lock()
	}
	a.mu.Lock()
	same := a.clients[x] == l[0] && a.clients[y] == l[1]
	a.mu.Unlock()
	if !same {
		l.unlock()
		return callLock{}, false
	}
	return l, true
}

// of is the one of the two with a handle.
func (l callLock) of(handle uint32) *client {
	if l[0].handle == handle {
		return l[0]
	}
	return l[1]
}

func (l callLock) unlock() {
	if l[1] != l[0] {
		l[1].calls.Unlock()
	}
	l[0].calls.Unlock()
}

// object is one handle of a client.
type object struct {
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
	children              int                    // handles of what ends with this
	space                 uint32                 // handle of a range's address space (0: the device's own), of a context DMA's memory: it ends with that
	secondCharge          *charge                // of a second memory of which it is another name; nil: there is none
	contextShare          uint32                 // of a channel: handle, 0: none
	retained              *retained              // of a channel that a UVM address space keeps
	unbound               bool                   // of a channel: UVM has taken its context away, or is about to; it must not run again
	scheduled             bool                   // a channel, or a channel group, that was let run (GPFIFO_SCHEDULE)
	graphics              bool                   // a channel group on the graphics engine
	context               bool                   // a channel group that has a context there: an object of the engine was made below it
	gfxp                  bool                   // and the buffers of graphics preemption, which are charged
	preempts              bool                   // and a context that is switched in the middle of a kernel; see preemption.go
	userd                 userd                  // of a channel
	runlist               runlist                // of a channel
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

// charge is device memory held by the container.
type charge struct {
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
}

func newAccount(gpus []GPU) *account {
	a := &account{clients: map[uint32]*client{}, runlists: map[runlist]int{}}
	for _, g := range gpus {
		a.gpus = append(a.gpus, gpuAccount{limit: g.Limit, native: g.Native, spill: g.Spill})
	}
	return a
}

// reserve takes memory from the limit of a GPU before the driver is asked. False: it does not fit, and the denial is counted
// if count is set.
func (a *account) reserve(want cost, count bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	gpu, size := want.gpu, want.size
	g := &a.gpus[gpu]
	if !g.native && !g.fitsWithSlack(size, want.slack) {
		if count {
			a.deny(gpu, size, false)
		}
		return false
	}
	if g.used+size < g.used { // a native card has no limit that would have refused this
		return false
	}
	g.addUsed(size)
	return true
}

// fits subtracts on the side that cannot wrap: size comes from the container and may be 2⁶⁴−1.
func (g *gpuAccount) fits(size quota.Bytes) bool { return g.fitsWithSlack(size, 0) }

func (g *gpuAccount) fitsWithSlack(size, slack quota.Bytes) bool {
	most := g.limit + slack
	return g.used <= most && size <= most-g.used
}

// deny counts a denial and tells of it. The caller holds mu.
func (a *account) deny(gpu int, size quota.Bytes, spill bool) {
	a.gpus[gpu].denied++
	if a.onDenied != nil {
		a.onDenied(gpu, size, spill, a.gpus[gpu])
	}
}

func (g *gpuAccount) addUsed(size quota.Bytes) {
	g.used += size
	g.peak = max(g.peak, g.used)
	g.publish()
}

// publish writes use into the vGPU page.
func (g *gpuAccount) publish() {
	if g.show == nil {
		return
	}
	atomic.StoreUint64(&g.show.Used, uint64(g.used))
	atomic.StoreUint64(&g.show.Managed, uint64(g.managed))
	atomic.StoreUint64(&g.show.Spilled, uint64(g.spilled))
}

// unreserve gives back what reserve took.
func (a *account) unreserve(what cost) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refund(&charge{gpu: what.gpu, size: what.size, host: what.host})
}

func (g *gpuAccount) subUsed(size quota.Bytes) {
	g.used -= min(size, g.used)
	g.publish()
}

// publishTo has use and limits written into a page from now on.
func (a *account) publishTo(p *page.Page) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range min(len(a.gpus), page.MaxVGPUs) {
		a.gpus[i].show = p.VGPU(i)
		a.gpus[i].publish()
	}
}

// total and free are what the container sees of a GPU: its limit, and host memory behind it.
func (g *gpuAccount) total() quota.Bytes { return g.limit + g.spill }
func (g *gpuAccount) free() quota.Bytes {
	return g.limit - min(g.used, g.limit) + g.spill - min(g.spilled, g.spill)
}

// setLimits changes a GPU's limit and spill. One below what is used refuses new memory until enough is freed.
func (a *account) setLimits(gpu int, limit, spill quota.Bytes) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := &a.gpus[gpu]
	if g.native || limit == 0 || g.limit == limit && g.spill == spill {
		return
	}
	g.limit, g.spill = limit, spill
	if g.show != nil {
		atomic.StoreUint64(&g.show.Limit, uint64(limit))
		atomic.StoreUint64(&g.show.Spill, uint64(spill))
	}
}

// addClient records a verified client.
func (a *account) addClient(handle uint32, tgid int, f *file) *client {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old := a.clients[handle]; old != nil {
		a.dropClient(old)
	}
	c := &client{handle: handle, tgid: tgid, euid: -1, file: f, objects: map[uint32]*object{}, groups: map[uint32]*object{}, channels: map[uint32]*object{}, subdevices: map[uint32]*object{}}
	a.clients[handle] = c
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

// onOtherGPU reports device memory that is not on a GPU. The driver never compares: it takes the address of the memory for one on the GPU that
// a call names, where a neighbour's may be. The handle's own device counts too: memory below another's is that one's to some of the driver.
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

// insertObject replaces a stale record of the same handle: RM would not have granted a handle that is in use.
func (a *account) insertObject(c *client, o *object) {
	for ch := range o.charges {
		a.countReference(ch, &ch.handles, 1)
	}
	o.countFabric(1)
	if old := c.objects[o.handle]; old != nil {
		a.dropObject(c, old)
	}
	c.objects[o.handle] = o
	for _, h := range o.endsWith() {
		if p := c.objects[h]; p != nil && p != o {
			p.children++
		}
	}
	a.objects++
	o.countsOn = c.gpuOf(o)
	a.countObject(o, 1)
	switch o.kind {
	case rm.ClassChannel:
		a.countChannel(o.runlist, 1)
		c.channels[o.handle] = o
		c.noteNotifiers(o, true)
	case rm.ClassSubdevice:
		c.subdevices[o.handle] = o
	}
	if o.graphics {
		c.groups[o.handle] = o
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
		case rm.ClassSemaphores:
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
		a.insertObject(c, &object{handle: handle, parent: parent, class: of.class, kind: of.kind, charge: of.charge, gpu: of.gpu, spilled: of.spilled,
			host: of.host, size: of.size, madeInTask: of.madeInTask, secondCharge: of.secondCharge})
	}
}

// charges are what an object keeps alive.
func (o *object) charges(yield func(*charge) bool) {
	_ = (o.charge == nil || yield(o.charge)) && (o.secondCharge == nil || yield(o.secondCharge))
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

// dropFreedChannel drops a channel that the driver has freed with something else, and all its descendants. Its handle may be another object's
// by now.
func (a *account) dropFreedChannel(ch gpusched.Channel) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[ch.Client]; c != nil && c.channels[ch.Handle] == ch.Object {
		a.dropTree(c, objectOf(ch))
	}
}

// dropTree drops a handle and all its descendants. The account is locked.
func (a *account) dropTree(c *client, o *object) {
	if o.children == 0 {
		a.dropObject(c, o)
		return
	}
	for h := range c.below(o) {
		a.dropObject(c, c.objects[h])
	}
}

// endsWith are the handles of what an object ends with; 0: none. The driver frees a channel with its context share and its address space,
// too; in the account it lives until it is freed itself, or found gone: it is better known too long.
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
	for grew := o.children > 0; grew; {
		grew = false
		for h, x := range c.objects {
			if !gone[h] && (gone[x.parent] || gone[x.space]) {
				gone[h], grew = true, true
			}
		}
	}
	return gone
}

func (a *account) dropClient(c *client) {
	for _, o := range c.objects {
		a.dropObject(c, o)
	}
	for number := range c.osEvents {
		a.dropEvent(c, number)
	}
	delete(a.clients, c.handle)
}

func (a *account) dropObject(c *client, o *object) {
	a.dropMaps(o)
	a.loosenLocked(o.windows...)
	a.loosenLocked(o.keptWindows...)
	if o.kind == rm.ClassChannel {
		c.noteNotifiers(o, false)
	}
	delete(c.objects, o.handle)
	delete(c.groups, o.handle)
	delete(c.channels, o.handle)
	delete(c.subdevices, o.handle)
	delete(c.policies, o.handle)
	delete(c.notified, o)
	for _, h := range o.endsWith() {
		if p := c.objects[h]; p != nil {
			p.children--
		}
	}
	a.objects--
	a.countObject(o, -1)
	switch {
	case o.kind != rm.ClassChannel:
	case o.retained != nil: // it keeps its number, see releaseChannel
		o.retained.channel, o.retained.runlist, o.retained.countsOn = nil, o.runlist, o.countsOn
		a.countKept(o.countsOn, 1)
	default:
		a.countChannel(o.runlist, -1)
	}
	if usesGraphics(rm.Class{ID: o.class, Kind: o.kind}) {
		c.engineObjectGone(o)
	}
	for ch := range o.charges {
		a.countReference(ch, &ch.handles, -1)
	}
	o.countFabric(-1)
}

// countReference changes one of a charge's numbers of references, and gives its bytes back once nothing refers to it. The account is locked.
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
	}
}

// zombie reports that only UVM mappings, exported files or windows refer to what has had a handle.
func (ch *charge) zombie() bool { return ch.handles == 0 && ch.references > 0 && !ch.tables }

func (a *account) refund(ch *charge) {
	if ch.host {
		a.hostUsed -= min(ch.size, a.hostUsed)
	} else {
		a.gpus[ch.gpu].refund(ch.size, ch.spilled)
	}
}

// acquireObject looks up an object that a call refers to, and keeps its charge until releaseObject. An object that is not known has no handle. False: the
// client is gone, so that what is there under its handles is nobody's any more.
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

// addReference adds a reference that is no handle (a UVM mapping, an exported file), if there is something to refer to. The caller has another one.
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
	return o.handle, o.charge != nil
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
	o.charge = &charge{gpu: gpu, size: size, handles: 1}
	return true
}

// classVidmem is NV01_MEMORY_LOCAL_USER.
const classVidmem = 0x40

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
			kind == rm.ClassSemaphores && g.surfaces >= maxSurfaces,
			kind == rm.ClassChannel && g.channels+g.keptChannels >= maxChannels:
			return false
		}
	}
	return a.objects < maxObjects
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

// expectedLengths sums, per GPU, the device memory that the driver should count for the container: each handle. One below another GPU's device the
// driver counts nowhere, nor other names of memory.
func (a *account) expectedLengths() []quota.Bytes {
	a.mu.Lock()
	defer a.mu.Unlock()
	sum := make([]quota.Bytes, len(a.gpus))
	for _, c := range a.clients {
		for _, o := range c.objects {
			if ch := o.charge; ch != nil && !ch.spilled && o.kind == rm.ClassVidmem && c.gpuOf(o) == ch.gpu {
				sum[ch.gpu] += ch.length
			}
		}
	}
	return sum
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

func (a *account) hasZombies() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.zombies > 0
}
