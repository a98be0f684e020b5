package guard

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// pressure tells whether a high-priority container has work. Context switches tell it too late: a container that waits for
// the engine is not switched in.
type pressure interface {
	pressing() bool
	saturating() bool // it has work all the time
	blind() bool      // it cannot be seen; then context switches must do
	// follow starts to look, or stops: it is needed only while others have work that should give way.
	follow(self sched.Tenant, others []sched.Tenant)
	// forget lets go of what is looked at in channels that are gone.
	forget()
}

const (
	// pressEvery is how often a high-priority container is looked at, pressFor for how long it presses after its last work.
	pressEvery = 2 * time.Millisecond
	pressFor   = 100 * time.Millisecond
)

// presser looks every pressEvery while it is wanted.
type presser struct {
	mu     sync.Mutex
	wanted bool
	alive  bool
	last   atomic.Int64 // monotonic time of the last work
	load   float64      // of the last looks, those that found work waiting
	much   atomic.Bool
	unseen atomic.Bool
}

// Of the last 32 looks or so, the part with work waiting above which a container saturates, and below which it does no more.
const (
	saturates  = 0.7
	desaturate = 0.4
	loadMemory = 32
)

func (p *presser) saturating() bool { return p.pressing() && p.much.Load() }

// note takes in what a look found.
func (p *presser) note(waiting bool) {
	x := 0.0
	if waiting {
		x = 1
	}
	p.load += (x - p.load) / loadMemory
	if p.load > saturates || p.load < desaturate {
		p.much.Store(p.load > saturates)
	}
}

func (p *presser) pressing() bool {
	last := time.Duration(p.last.Load())
	return last > 0 && monotonic()-last < pressFor
}

func (p *presser) want(x *card, self sched.Tenant, others []sched.Tenant, look func() (worked, waiting bool), release func()) {
	wanted := false
	if self.Priority == quota.PriorityHigh && x.active.Load() {
		for _, o := range others {
			wanted = wanted || o.Priority < quota.PriorityHigh && o.Busy > 0
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = wanted
	if wanted && !p.alive {
		p.alive = true
		go p.run(x, look, release)
	}
}

func (p *presser) run(x *card, look func() (worked, waiting bool), release func()) {
	for was, much := p.pressing(), p.saturating(); ; {
		if p.unwanted() {
			release() // before anybody else may begin to look
			if p.rests() {
				return
			}
		}
		select {
		case <-x.c.stop:
			release()
			return
		default:
		}
		worked, waiting := look()
		if worked {
			p.last.Store(int64(monotonic()))
		}
		p.note(waiting)
		if p.pressing() != was || p.saturating() != much {
			was, much = p.pressing(), p.saturating()
			kick(x.kick)
		}
		time.Sleep(pressEvery)
	}
}

func (p *presser) unwanted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.wanted
}

// rests lets the next one who is wanted begin anew, unless that came meanwhile.
func (p *presser) rests() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alive = p.wanted
	return !p.alive
}

func (p *presser) blind() bool { return p.unseen.Load() }

// simPressure asks the simulated driver.
type simPressure struct {
	presser
	x *card
	d SimSwitches
}

func (p *simPressure) follow(self sched.Tenant, others []sched.Tenant) {
	p.want(p.x, self, others, func() (bool, bool) {
		var pids []int
		for pid := range p.x.c.g.account.owners() {
			pids = append(pids, pid)
		}
		busy, err := p.d.Pending(p.x.c.g.cfg.GPUs[p.x.gpu].Minor, pids)
		return err == nil && busy, err == nil && busy
	}, func() {})
}

func (p *simPressure) forget() {}

// userd is where a channel's user-driver page is: a memory object of its client, and an offset in it. The page holds GP_GET
// and GP_PUT, how far the GPU has come in the channel's queue and how far the program has filled it.
type userd struct {
	memory uint32
	offset uint64
}

// Offsets in the page (Nvc36fControl to Nvc86fControl, class/clc36f.h) and in the channel's parameters.
const (
	userdGPGet = 0x88
	userdGPPut = 0x8c
	userdPage  = 4096
)

// userdPressure reads the user-driver pages of the container's channels: work is there when the program has put in more than
// the GPU has got. libcuda keeps these pages in device memory; a read over the bus takes 1 µs (H200).
type userdPressure struct {
	presser
	x       *card
	next    time.Duration          // when to look for new channels
	viewing sync.Mutex             // pages
	pages   map[*object]*userdView // by channel
}

type userdView struct {
	mem      []byte
	off      int
	handle   uint32  // the guard's own, of the memory
	charge   *charge // of the memory, which the handle keeps; nil: it has none
	get, put uint32
}

func newUserdPressure(x *card) *userdPressure {
	return &userdPressure{x: x, pages: map[*object]*userdView{}}
}

func (p *userdPressure) follow(self sched.Tenant, others []sched.Tenant) {
	p.want(p.x, self, others, p.look, p.release)
}

func (v *userdView) word(at int) uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&v.mem[v.off+at])).Load()
}

// look reports that some channel has had work since the last look, and that some has work now.
func (p *userdPressure) look() (worked, waiting bool) {
	if now := monotonic(); now >= p.next {
		p.next = now + pressFor
		p.sync()
	}
	p.viewing.Lock()
	defer p.viewing.Unlock()
	for _, v := range p.pages {
		put := v.word(userdGPPut)
		if put != v.put || v.get != put {
			get := v.word(userdGPGet)
			worked = worked || put != v.put || get != put
			waiting = waiting || get != put
			v.get, v.put = get, put
		}
	}
	return worked || waiting, waiting
}

// sync maps the pages of new channels and lets go of those that are gone.
func (p *userdPressure) sync() {
	p.forget()
	channels, seen := p.x.c.g.account.channelsOn(p.x.gpu, false), 0
	for _, ch := range channels {
		if p.sees(ch) {
			seen++
		}
	}
	p.unseen.Store(len(channels) > 0 && seen == 0)
}

// sees reports that a channel's page is mapped, now if it can be. Who holds the calls of a client may be in forget, so viewing is not
// held over open.
func (p *userdPressure) sees(ch chanRef) bool {
	p.viewing.Lock()
	seen := p.pages[ch.object] != nil
	p.viewing.Unlock()
	if seen || ch.object.userd.memory == 0 {
		return seen
	}
	v, err := p.open(ch)
	if err != nil {
		p.x.c.g.logOnce("userd", "cannot see in a channel when a high-priority container has work", "err", err)
		return false
	}
	p.viewing.Lock()
	defer p.viewing.Unlock()
	p.pages[ch.object] = v
	return true
}

// forget is called where memory is needed, too: a page keeps its memory.
func (p *userdPressure) forget() {
	p.viewing.Lock()
	defer p.viewing.Unlock()
	if len(p.pages) == 0 {
		return
	}
	live := map[*object]bool{}
	for _, ch := range p.x.c.g.account.channelsOn(p.x.gpu, false) {
		live[ch.object] = true
	}
	maps.DeleteFunc(p.pages, func(ch *object, v *userdView) bool {
		if !live[ch] {
			p.close(v)
		}
		return !live[ch]
	})
}

var errNoUserd = errors.New("the channel has no page of its own that could be read")

func refused(what string, status uint32, errno unix.Errno) error {
	return fmt.Errorf("%s: %s, errno %d", what, rm.StatusName(status), errno)
}

// open gets a handle of the guard's own on the memory, as for a UVM mapping (uvm.go), and maps the page. The channel named the memory
// when it was made. If its handle is another object's by now, the guard must not keep that: it is not what the channel is charged for.
func (p *userdPressure) open(ch chanRef) (*userdView, error) {
	g, memory := p.x.c.g, ch.object.userd.memory
	start := ch.object.userd.offset &^ (userdPage - 1)
	off := int(ch.object.userd.offset - start)
	own, err := g.ownClient()
	if err != nil {
		return nil, err
	}
	c := g.account.client(ch.client)
	if c == nil {
		return nil, errNoUserd
	}
	t, ok := g.fileOf(c)
	if !ok {
		return nil, errNoUserd
	}
	defer t.Done()
	// Or the handle is another object's by the time of the dup. A call that takes long is not waited for: other channels are to be seen.
	if !c.tryCalls() {
		return nil, errNoUserd
	}
	defer c.calls.Unlock()
	obj, ok := g.account.refer(c, memory)
	defer g.account.letGo(obj)
	if !ok || obj.handle == 0 || obj.charge != ch.object.charge || off > userdPage-userdGPPut-4 {
		return nil, errNoUserd
	}
	var handle, s uint32
	var e unix.Errno
	if status, errno := g.whileShared(t, ch.client, []openRight{{memory, accessDup}}, func() {
		handle, s, e = own.Dup(own.Device(p.x.gpu), ch.client, memory)
	}); errno != 0 || status != rm.StatusOK {
		return nil, refused("open a channel's page", status, errno)
	}
	if e != 0 || s != rm.StatusOK {
		return nil, refused("refer to a channel's page", s, e)
	}
	v := &userdView{off: off, handle: handle, charge: g.account.hold(obj.charge)}
	node := ""
	if obj.class == classVidmem {
		node = g.cfg.GPUs[p.x.gpu].Node.HostPath
	}
	if v.mem, err = own.Map(own.Device(p.x.gpu), handle, start, userdPage, node); err != nil {
		p.close(v)
		return nil, err
	}
	v.put, v.get = v.word(userdGPPut), v.word(userdGPGet)
	return v, nil
}

// close lets go of a page. What cannot be freed stays charged.
func (p *userdPressure) close(v *userdView) {
	g := p.x.c.g
	_ = unix.Munmap(v.mem)
	own, err := g.ownClient()
	if err != nil {
		return
	}
	if s, e := own.Free(v.handle); e != 0 || s != rm.StatusOK {
		g.logOnce("userdend", "cannot let go of a channel's page", "status", rm.StatusName(s), "errno", e)
		return
	}
	g.account.unhold(v.charge)
}

// release lets go of all pages: they hold memory of the container.
func (p *userdPressure) release() {
	p.viewing.Lock()
	defer p.viewing.Unlock()
	for _, v := range p.pages {
		p.close(v)
	}
	clear(p.pages)
	p.next = 0
}
