// SPDX-License-Identifier: Apache-2.0

// Package gpusched gives a container its share of its GPUs' time: it sets the timeslices of the container's channel groups, and pauses
// and resumes its channels. What to set, pkg/sched decides; how much to promise, the ledger. Nothing of it is on the way of a kernel
// launch. It knows a container by the interface Container; see docs/internals/sched.md.
//
// It has goroutines for each GPU (gpu.go, leader.go) and one for pauses (pauses.go), and sleeps while the container has no context on a
// graphics engine.
//
// Locks, in the order in which they are taken: a client's calls, which the container holds over calls of the scheduler's; Scheduler.Lock;
// gpuScheduler.mu; priority.mu. UserPages.viewing is taken with none of them but a client's calls. With any of them held the container may
// take its own locks to answer, and with those channelCount.mu.
package gpusched

import (
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Options are what a Scheduler works with.
type Options struct {
	Config    guardcfg.Config
	Container Container
	Driver    rmclient.Driver
	ABI       *rm.ABI
	Log       *slog.Logger
	LogOnce   func(key, msg string, args ...any) // writes a line the first time that something happens
	Warn      func(text string)                  // tells whoever watches the node
	Now       func() time.Duration               // the clock; nil: Monotonic
	Sleep     func(time.Duration)                // nil: time.Sleep
	// StartRescuer starts the process that resumes when this one is killed; nil: this program, as RescueName.
	StartRescuer func(path string, gone *atomic.Bool) (*os.Process, *os.File, error)
	// StartArbiter starts who decides about a GPU's time, unless somebody does; nil: nobody is started. It is set before Begin.
	StartArbiter func(runDir, uuid string, config []byte) error
}

// Scheduler is a container's share of GPU time.
type Scheduler struct {
	Options
	timing sched.Timing
	gpus   []*gpuScheduler // the sliced ones
	gang   uint64          // which they are
	stop   chan struct{}
	once   sync.Once

	// running is held over calls that stop channels or let them run, see Lock.
	running    sync.Mutex
	resting    sync.RWMutex  // held by who changes something of itself; see Rest. It comes before all others
	turned     chan struct{} // closed, and made anew, when channels were stopped or let run
	pausesKick chan struct{}
	closed     bool    // with running held: the container is over
	rescue     *rescue // the process that resumes when this one is killed; nil before the first pause, and at the end
}

// TimingOf is what the node's settings say of GPU time.
func TimingOf(cfg guardcfg.Config) sched.Timing {
	s := cfg.Settings
	loss := float64(s.MaxLoss) / 100
	if loss == 0 {
		loss = sched.DefaultTiming().MaxLoss
	}
	return sched.Timing{Base: s.BaseTimeslice, Min: s.MinTimeslice, MaxRound: s.MaxRound, HighPrio: s.HighPrioTimeslice,
		Cycle: s.CapCycle, MaxLoss: loss}
}

// New makes a scheduler that does nothing yet.
func New(o Options) *Scheduler {
	if o.Now == nil {
		o.Now = Monotonic
	}
	if o.Sleep == nil {
		o.Sleep = time.Sleep
	}
	if o.StartRescuer == nil {
		o.StartRescuer = startRescuer
	}
	s := &Scheduler{Options: o, timing: TimingOf(o.Config),
		stop: make(chan struct{}), turned: make(chan struct{}), pausesKick: make(chan struct{}, 1)}
	s.gang = gang(o.Config.GPUs)
	for i, x := range o.Config.GPUs {
		if !x.Native {
			s.gpus = append(s.gpus, newGPUScheduler(s, i))
		}
	}
	return s
}

// Arm takes what needs root's powers, before they are dropped.
func (s *Scheduler) Arm() {
	begin := time.Now()
	for _, x := range s.gpus {
		if sim, ok := s.Driver.(SimWork); ok {
			x.priority = newPriority(x, &simWork{x: x, d: sim})
			continue
		}
		if _, err := s.Container.RM(); err != nil {
			s.Log.Error("cannot schedule GPU time", "err", err)
			return
		}
		x.priority = newPriority(x, newUserPages(x))
	}
	s.Log.Info("ready to schedule", "took", time.Since(begin))
}

// Begin starts to schedule.
func (s *Scheduler) Begin() {
	if len(s.gpus) == 0 {
		return
	}
	go s.runPauses()
	for _, x := range s.gpus {
		go x.run()
	}
}

// lastRecords is how long to wait for the records of what ended just now: they come every sched.Tick, and are read soon after.
const lastRecords = 3 * sched.Tick

// lastSamples bounds how long to wait for the samples of the GPU's load of that time.
const lastSamples = 1200 * time.Millisecond

// AwaitLast is called when nothing of the container's is on the GPUs any more, before End: when it returns the arbiters have counted
// that, if there are some.
func (s *Scheduler) AwaitLast() {
	await := false
	for _, x := range s.gpus {
		await = x.tellLast() || await
	}
	for begun := s.Now(); await && s.Now()-begun < lastSamples; {
		s.Sleep(lastRecords)
		await = slices.ContainsFunc(s.gpus, (*gpuScheduler).unsettled)
	}
}

// End gives up the container's places.
func (s *Scheduler) End() {
	s.once.Do(func() { close(s.stop) })
	for _, x := range s.gpus {
		x.leavePage()
	}
	s.Lock()
	defer s.Unlock()
	s.closed = true
	for _, x := range s.gpus {
		if x.off { // who still has them must not find them off, nor run what a process that has ended left in them
			channels := s.Container.Channels(x.gpu, true)
			s.disable(x.gpu, channels, chanStopped)
			s.disable(x.gpu, s.mayRun(channels), chanRuns)
		}
	}
	if s.rescue != nil {
		s.rescue.close()
		s.rescue = nil
	}
}

func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Schedules reports that the container has a GPU which it shares.
func (s *Scheduler) Schedules() bool { return len(s.gpus) > 0 }

// onGPU is the scheduler of a GPU; nil for a native one.
func (s *Scheduler) onGPU(gpu int) *gpuScheduler {
	for _, x := range s.gpus {
		if x.gpu == gpu {
			return x
		}
	}
	return nil
}

// Made is told of a new channel group on a GPU.
func (s *Scheduler) Made(gpu int) {
	if x := s.onGPU(gpu); x != nil {
		x.awake()
	}
}

// Started is told, with Lock held, that a trapped call let channels of the container run which are on a graphics engine, and in which
// groups. Those get their timeslice before the first work can come, by control.
func (s *Scheduler) Started(gpu int, groups []Group, control Control) {
	x := s.onGPU(gpu)
	if x == nil {
		return
	}
	for _, r := range groups {
		x.mu.Lock()
		slice, set := x.local.Slice(), x.set[r]
		x.mu.Unlock()
		if set == 0 {
			x.setSlice(control, r, slice)
		}
	}
	x.awake()
}

// Adopt puts in force what the ledger says of a GPU.
func (s *Scheduler) Adopt(gpu int, p sched.Plan) {
	x := s.onGPU(gpu)
	if x == nil {
		return
	}
	x.mu.Lock()
	changed := x.local.Adopt(p, s.Now())
	x.mu.Unlock()
	if changed {
		kick(x.kick)
		kick(s.pausesKick)
	}
}

// Hold pauses the container's GPU work for the guard's own reasons, or no longer.
func (s *Scheduler) Hold(on bool) {
	for _, x := range s.gpus {
		x.mu.Lock()
		x.local.Hold(on, s.Now())
		x.mu.Unlock()
		kick(x.kick)
	}
	kick(s.pausesKick)
}

// Plan is what is in force on a GPU, and whether a pause that cgpu pause or Hold asked for is.
func (s *Scheduler) Plan(gpu int) sched.Plan {
	x := s.onGPU(gpu)
	if x == nil {
		return sched.Plan{}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	plan, _ := x.local.Plan()
	return plan
}

// LetGo lets go of what the scheduler has of channels that are gone: it takes memory.
func (s *Scheduler) LetGo() {
	for _, x := range s.gpus {
		if x.priority != nil {
			x.priority.work.forget()
		}
	}
}
