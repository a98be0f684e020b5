// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"sync"
	"sync/atomic"
	"time"
)

// work is seen without context switches. They tell it too late of a high-priority container: who waits for the engine is not switched in.
type work interface {
	hadWork() bool // reports that there was some since the last look
	Release()      // lets go of all that is looked at
	forget()       // lets go of what is looked at in channels that are gone
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
}

func newPriority(x *gpuScheduler, w work) *priority { return &priority{x: x, work: w} }

func (p *priority) pressing() bool {
	last := time.Duration(p.last.Load())
	return last > 0 && p.x.s.Now()-last < pressFor
}

// follow starts to look, or stops: it is needed only while others have work that should give way.
func (p *priority) follow(wanted bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = wanted && p.x.active.Load()
	if p.wanted && !p.alive {
		p.alive = true
		go p.run()
	}
}

func (p *priority) run() {
	for was := p.pressing(); ; {
		if p.unwanted() {
			p.x.s.active(p.work.Release) // before anybody else may begin to look
			if p.rests() {
				return
			}
		}
		select {
		case <-p.x.s.stop:
			p.x.s.active(p.work.Release)
			return
		default:
		}
		worked := false
		p.x.s.active(func() { worked = p.work.hadWork() })
		if worked {
			p.last.Store(int64(p.x.s.Now()))
		}
		if p.pressing() != was {
			was = p.pressing()
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

func (w *simWork) hadWork() bool {
	var pids []int
	for pid := range w.x.s.Container.Owners() {
		pids = append(pids, pid)
	}
	busy, err := w.d.Pending(w.x.s.Config.GPUs[w.x.gpu].Minor, pids)
	return err == nil && busy
}

func (*simWork) Release() {}
func (*simWork) forget()  {}
