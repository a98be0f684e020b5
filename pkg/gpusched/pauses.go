// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/proc"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Lock is held over calls that stop channels or let them run, and by trapped calls that would let some run. So a pause cannot be undone
// behind the scheduler's back.
func (s *Scheduler) Lock() { s.running.Lock() }

// Unlock undoes Lock.
func (s *Scheduler) Unlock() { s.running.Unlock() }

// IsOff reports, with Lock held, that channels on a GPU's graphics engine, or on others, must not begin to run now.
func (s *Scheduler) IsOff(gpu int, graphics bool) bool {
	x := s.onGPU(gpu)
	return x != nil && x.off && (graphics || x.offAll)
}

// Turned is closed when channels are stopped or let run the next time. It is asked for with Lock held.
func (s *Scheduler) Turned() <-chan struct{} { return s.turned }

// Still stops channels of a GPU, with Lock held, until resume is called. False: there would be nobody to resume them, should this process
// be killed.
func (s *Scheduler) Still(gpu int, channels []Channel) (resume func(), ok bool) {
	x := s.onGPU(gpu)
	if x == nil || len(channels) == 0 {
		return func() {}, true
	}
	if s.insure() != nil {
		return nil, false
	}
	s.note(gpu, channels)
	s.disable(gpu, channels, chanPaused)
	return func() {
		if !x.off { // else they are resumed with all others
			s.letRun(x, channels)
		}
	}, true
}

// Stop takes channels off a GPU for good, with Lock held: on return none is on the hardware, and what was queued is dropped. The container
// has noted that they do not go on.
func (s *Scheduler) Stop(gpu int, channels []Channel) {
	s.disable(gpu, channels, chanStopped)
	s.keepNotes(gpu)
}

// Forget has nobody resume what does not go on, with Lock held.
func (s *Scheduler) Forget() {
	for _, x := range s.gpus {
		s.keepNotes(x.gpu)
	}
}

// LetRun lets channels of a GPU run that go on again, with Lock held: now, or with all others.
func (s *Scheduler) LetRun(gpu int, channels []Channel) {
	x := s.onGPU(gpu)
	switch {
	case s.closed || x == nil || len(channels) == 0:
	case x.off:
		s.note(gpu, channels)
	default:
		s.letRun(x, channels)
	}
}

// runPauses pauses and resumes the container's channels: in every cycle for a hard cap, until further notice for cgpu pause.
func (s *Scheduler) runPauses() {
	timer := time.NewTimer(0)
	for {
		select {
		case <-s.stop:
			return
		case <-s.pausesKick:
		case <-timer.C:
		}
		var next time.Duration
		s.active(func() { next = s.turnAll() })
		if next >= 0 {
			timer.Reset(max(0, next-s.Now()))
		} else {
			timer.Stop()
		}
	}
}

// turnAll does on each GPU what is wanted now. It returns when to look again; -1: when kicked.
func (s *Scheduler) turnAll() time.Duration {
	now := s.Now()
	next := time.Duration(-1)
	s.agree(now)
	for _, x := range s.gpus {
		off, until := x.wanted(now)
		if !s.turn(x, off) {
			again := s.Now() + resumeAgain
			if off {
				again = s.Now() + pauseAgain
			}
			if until == 0 || again < until {
				until = again
			}
		}
		if until > 0 && (next < 0 || until < next) {
			next = until
		}
	}
	return next
}

// wanted says whether the channels should be off, and when that changes; 0: not by itself.
func (x *gpuScheduler) wanted(now time.Duration) (off bool, until time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.receiveRow()
	return x.local.Off(now, x.active.Load())
}

const (
	// resumeAgain is when to try again to resume channels that the driver would not, and maxRefused how often.
	resumeAgain = 20 * time.Millisecond
	maxRefused  = 50
	// pauseAgain is when to try again to carry out cgpu pause.
	pauseAgain = time.Second
)

// Turn stops the container's channels on a GPU, or lets them run, whatever is wanted. False: it is not done, or not for all, try again.
func (s *Scheduler) Turn(gpu int, off bool) bool {
	x := s.onGPU(gpu)
	return x == nil || s.turn(x, off)
}

func (s *Scheduler) turn(x *gpuScheduler, off bool) bool {
	s.Lock()
	defer s.Unlock()
	if s.closed {
		return true
	}
	suspended := x.suspended()
	if x.off == off && (!off || !suspended || x.offAll) {
		return off || x.refused == 0 || s.resumeRest(x)
	}
	// A hard cap is of the graphics engine: copies may go on, their queues end by themselves. cgpu pause stops everything; what
	// is resumed may have been paused by it.
	channels := x.shown(s.Container.Channels(x.gpu, !off || suspended))
	if off && len(channels) == 0 && !suspended {
		return true
	}
	begin := s.Now()
	if !off {
		s.letRun(x, channels)
	} else if !s.pause(x, channels) {
		return !suspended
	}
	x.mu.Lock()
	x.off, x.offAll = off, off && suspended
	if off {
		x.local.Paused(begin)
	} else {
		x.local.Resumed(s.Now())
	}
	x.mu.Unlock()
	close(s.turned)
	s.turned = make(chan struct{})
	return off || x.refused == 0
}

// pause stops channels, with running held. False: they run.
func (s *Scheduler) pause(x *gpuScheduler, channels []Channel) bool {
	// First who would resume, should this process be killed in the middle.
	if err := s.insure(); err != nil {
		s.Warn("nothing is paused, since there is nobody to resume it if the guard is killed: " + err.Error())
		s.LogOnce("rescue", "nothing is paused, since there is nobody to resume it if this process is killed", "err", err)
		return false
	}
	s.note(x.gpu, channels)
	if s.disable(x.gpu, channels, chanPaused) == 0 && len(channels) > 0 {
		s.disable(x.gpu, s.mayRun(channels), chanRuns)
		s.noteHidden(x) // nothing else is off, even if the driver refuses this too
		return false
	}
	x.refused = 0
	return true
}

// letRun resumes channels of a GPU, with running held. What the driver would not resume stays noted, and is tried again.
func (s *Scheduler) letRun(x *gpuScheduler, channels []Channel) {
	channels = s.mayRun(x.shown(channels))
	switch {
	case s.disable(x.gpu, channels, chanRuns) < len(channels):
		x.refused = maxRefused
		kick(s.pausesKick)
	case x.refused == 0:
		s.noteHidden(x)
	}
}

// resumeRest tries again to resume what the driver would not.
func (s *Scheduler) resumeRest(x *gpuScheduler) bool {
	channels := s.mayRun(x.shown(s.Container.Channels(x.gpu, true)))
	if x.refused--; s.disable(x.gpu, channels, chanRuns) == len(channels) || x.refused == 0 {
		x.refused = 0
		s.noteHidden(x)
	}
	return x.refused == 0
}

func (x *gpuScheduler) suspended() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	plan, _ := x.local.Plan()
	return plan.Suspended
}

// mayRun leaves out the channels that do not go on, and those of processes that end or have: UVM ends theirs, too.
func (s *Scheduler) mayRun(channels []Channel) []Channel { return ofLiving(s.Container.GoOn(channels)) }

// ofLiving leaves out the channels of processes that end or have.
func ofLiving(channels []Channel) []Channel {
	over := map[int]bool{}
	return slices.DeleteFunc(channels, func(ch Channel) bool {
		ended, known := over[ch.PID]
		if !known {
			ended = proc.Exiting(ch.PID)
			over[ch.PID] = ended
		}
		return ended
	})
}

// disable stops channels of a GPU or lets them run, and counts those that are so now or gone.
func (s *Scheduler) disable(gpu int, channels []Channel, to chanState) (done int) {
	if len(channels) == 0 {
		return 0
	}
	own, err := s.Container.RM()
	if err != nil {
		s.LogOnce("own", "cannot pause or resume", "err", err)
		return 0
	}
	return disableAll(own, gpu, channels, to, s.Container.Gone, func(status uint32, e syscall.Errno) {
		s.Warn("the driver refuses to " + to.verb() + " a channel: " + rm.StatusName(status))
		s.LogOnce(fmt.Sprint("disable", to, status), refusedMessage, "off", to != chanRuns,
			"status", rm.StatusName(status), "errno", e)
	})
}
