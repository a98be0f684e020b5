package gpusched

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// work is seen without context switches. They tell it too late of a high-priority container: who waits for the engine is not switched in.
type work interface {
	// look reports that there was some since the last look, and that some waits now.
	look() (worked, waiting bool)
	blind() bool // it cannot be seen; then context switches must do
	Release()    // lets go of all that is looked at
	forget()     // lets go of what is looked at in channels that are gone
}

const (
	// pressEvery is how often a high-priority container is looked at, pressFor for how long it presses after its last work.
	pressEvery = 2 * time.Millisecond
	pressFor   = 100 * time.Millisecond
)

// priority looks every pressEvery whether a high-priority container has work, while that is wanted.
type priority struct {
	x    *gpuScheduler
	work work

	mu     sync.Mutex
	wanted bool
	alive  bool
	last   atomic.Int64 // monotonic time of the last work
	load   float64      // of the last looks, those that found work waiting
	much   atomic.Bool
}

func newPriority(x *gpuScheduler, w work) *priority { return &priority{x: x, work: w} }

// Of the last 32 looks or so, the part with work waiting above which a container saturates, and below which it does no more.
const (
	saturates  = 0.7
	desaturate = 0.4
	loadMemory = 32
)

// saturating reports that the container has work all the time.
func (p *priority) saturating() bool { return p.pressing() && p.much.Load() }

// note takes in what a look found.
func (p *priority) note(waiting bool) {
	x := 0.0
	if waiting {
		x = 1
	}
	p.load += (x - p.load) / loadMemory
	if p.load > saturates || p.load < desaturate {
		p.much.Store(p.load > saturates)
	}
}

func (p *priority) pressing() bool {
	last := time.Duration(p.last.Load())
	return last > 0 && p.x.s.Now()-last < pressFor
}

// follow starts to look, or stops: it is needed only while others have work that should give way.
func (p *priority) follow(self sched.Tenant, others []sched.Tenant) {
	wanted := false
	if self.Priority == quota.PriorityHigh && p.x.active.Load() {
		for _, o := range others {
			wanted = wanted || o.Priority < quota.PriorityHigh && o.Busy > 0
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = wanted
	if wanted && !p.alive {
		p.alive = true
		go p.run()
	}
}

func (p *priority) run() {
	for was, much := p.pressing(), p.saturating(); ; {
		if p.unwanted() {
			p.work.Release() // before anybody else may begin to look
			if p.rests() {
				return
			}
		}
		select {
		case <-p.x.s.stop:
			p.work.Release()
			return
		default:
		}
		worked, waiting := p.work.look()
		if worked {
			p.last.Store(int64(p.x.s.Now()))
		}
		p.note(waiting)
		if p.pressing() != was || p.saturating() != much {
			was, much = p.pressing(), p.saturating()
			kick(p.x.kick)
		}
		time.Sleep(pressEvery)
	}
}

func (p *priority) unwanted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.wanted
}

// rests lets the next one who is wanted begin anew, unless that came meanwhile.
func (p *priority) rests() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alive = p.wanted
	return !p.alive
}

// SimWork is what only a simulated driver has: whether processes have work.
type SimWork interface {
	Pending(minor int, pids []int) (bool, error)
}

// simWork asks the simulated driver.
type simWork struct {
	x *gpuScheduler
	d SimWork
}

func (w *simWork) look() (worked, waiting bool) {
	var pids []int
	for pid := range w.x.s.Container.Owners() {
		pids = append(pids, pid)
	}
	busy, err := w.d.Pending(w.x.s.Config.GPUs[w.x.gpu].Minor, pids)
	return err == nil && busy, err == nil && busy
}

func (*simWork) blind() bool { return false }
func (*simWork) Release()    {}
func (*simWork) forget()     {}
