package guard

import (
	"fmt"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// FIFO_DISABLE_CHANNELS stops channels, also in the middle of a kernel, and lets them run again: 0.6 ms and 0.2 ms for one
// CUDA context on an H200. The driver takes channels of any client.
const (
	controlDisableChannels = 0x2080110b
	disableSize            = 536
	disableFlag            = 0
	disableCount           = 4
	disableRewind          = 9
	disableClients         = 24
	disableChannels        = 280
	disableMax             = 64
)

// chanState is what FIFO_DISABLE_CHANNELS makes of a channel.
type chanState uint8

const (
	chanRuns    chanState = iota
	chanPaused            // off until it is let run
	chanStopped           // off, and what is queued is dropped (bRewindGpPut)
)

// duty pauses and resumes the container's channels: in every cycle for a hard cap, until further notice for cgpu pause.
func (c *compute) duty() {
	timer := time.NewTimer(0)
	for {
		select {
		case <-c.stop:
			return
		case <-c.dutyKick:
		case <-timer.C:
		}
		now := monotonic()
		next := time.Duration(-1)
		for _, x := range c.cards {
			off, until := x.wanted(now)
			if !c.turn(x, off) {
				again := monotonic() + resumeAgain
				if off {
					again = monotonic() + pauseAgain
				}
				if until == 0 || again < until {
					until = again
				}
			}
			if until > 0 && (next < 0 || until < next) {
				next = until
			}
		}
		if next >= 0 {
			timer.Reset(max(0, next-monotonic()))
		} else {
			timer.Stop()
		}
	}
}

// wanted says whether the channels should be off at a time of the monotonic clock, and when that changes; 0: not by itself.
func (x *card) wanted(now time.Duration) (off bool, until time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.plan.suspended: // also what has no context on the graphics engine
		return true, 0
	case !x.active.Load():
		return false, 0
	}
	slot, ok := x.slot()
	switch {
	case !ok:
		return false, 0
	case x.busy == 0 && x.source != nil && (x.plan.cap == 0 || now-x.worked > capIdle):
		return false, 0 // nothing to hold back; step kicks when there is work
	}
	if now < x.owing && x.plan.cap > 0 {
		return true, x.owing
	}
	on, until := slot.Phase(now)
	return !on, until
}

const (
	// resumeAgain is when to try again to resume channels that the driver would not, and maxRefused how often.
	resumeAgain = 20 * time.Millisecond
	maxRefused  = 50
	// pauseAgain is when to try again to carry out cgpu pause.
	pauseAgain = time.Second
)

// turn stops the container's channels on a GPU, or lets them run. False: it is not done, or not for all, try again.
func (c *compute) turn(x *card, off bool) bool {
	c.running.Lock()
	defer c.running.Unlock()
	if c.closed {
		return true
	}
	suspended := x.suspended()
	if x.off == off && (!off || !suspended || x.offAll) {
		return off || x.refused == 0 || c.resumeRest(x)
	}
	// A hard cap is of the graphics engine: copies may go on, their queues end by themselves. cgpu pause stops everything; what
	// is resumed may have been paused by it.
	channels := x.shown(c.g.account.channelsOn(x.gpu, !off || suspended))
	if off && len(channels) == 0 && !suspended {
		return true
	}
	begin := time.Now()
	if off {
		// First who would resume, should this process be killed in the middle.
		if err := c.insure(); err != nil {
			c.g.events.Note(event.Event{Kind: event.Warning, Text: "nothing is paused, since there is nobody to resume it if the guard is killed: " + err.Error()})
			c.g.logOnce("rescue", "nothing is paused, since there is nobody to resume it if this process is killed", "err", err)
			return !suspended
		}
		c.rescue.note(c.g, x.gpu, channels)
		if c.disable(x.gpu, channels, chanPaused) == 0 && len(channels) > 0 {
			c.disable(x.gpu, c.mayRun(channels), chanRuns)
			c.noteHidden(x) // nothing else is off, even if the driver refuses this too
			return !suspended
		}
		x.refused = 0
	} else {
		c.letRun(x, channels)
	}
	x.mu.Lock()
	x.off, x.offAll = off, off && suspended
	if off {
		x.counted.pauses++
		x.look(begin, len(x.c.g.account.groupsOn(x.gpu)))
		x.tracker.Paused(x.gpuNow(begin))
	} else if x.busy > 0 {
		x.counted.stopped += time.Since(x.stoppedAt)
	}
	x.stoppedAt = begin
	x.mu.Unlock()
	close(c.turned)
	c.turned = make(chan struct{})
	return off || x.refused == 0
}

// letRun resumes channels of a GPU, with running held. What the driver would not resume stays noted, and is tried again.
func (c *compute) letRun(x *card, channels []chanRef) {
	channels = c.mayRun(x.shown(channels))
	switch {
	case c.disable(x.gpu, channels, chanRuns) < len(channels):
		x.refused = maxRefused
		kick(c.dutyKick)
	case x.refused == 0:
		c.noteHidden(x)
	}
}

// resumeRest tries again to resume what the driver would not.
func (c *compute) resumeRest(x *card) bool {
	channels := c.mayRun(x.shown(c.g.account.channelsOn(x.gpu, true)))
	if x.refused--; c.disable(x.gpu, channels, chanRuns) == len(channels) || x.refused == 0 {
		x.refused = 0
		c.noteHidden(x)
	}
	return x.refused == 0
}

func (x *card) suspended() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.plan.suspended
}

// disable stops channels of a GPU or lets them run, 64 at a time, and counts those that the driver did so with. One that is gone
// meanwhile makes it refuse the whole list: then they are taken one by one. What is gone counts too.
func (c *compute) disable(gpu int, channels []chanRef, to chanState) (done int) {
	if len(channels) == 0 {
		return 0
	}
	own, err := c.g.ownClient()
	if err != nil {
		c.g.logOnce("own", "cannot pause or resume", "err", err)
		return 0
	}
	for len(channels) > 0 {
		list := channels[:min(len(channels), disableMax)]
		channels = channels[len(list):]
		if s, e := disable(own, gpu, list, to); e == 0 && s == rm.StatusOK {
			done += len(list)
			continue
		}
		for i := range list {
			s, e := disable(own, gpu, list[i:i+1], to)
			if e == 0 && (s == rm.StatusOK || gone(s)) {
				if done++; s != rm.StatusOK && c.g.account != nil {
					c.g.account.freedWith(list[i])
				}
				continue
			}
			c.g.events.Note(event.Event{Kind: event.Warning, Text: "the driver refuses to " + to.verb() + " a channel: " + rm.StatusName(s)})
			c.g.logOnce(fmt.Sprint("disable", to, s), "the driver refuses to pause or resume a channel", "off", to != chanRuns, "status", rm.StatusName(s), "errno", e)
		}
	}
	return done
}

func (s chanState) verb() string {
	switch s {
	case chanRuns:
		return "resume"
	case chanPaused:
		return "pause"
	}
	return "stop"
}

// gone reports a status that says that a channel is not there any more.
func gone(status uint32) bool {
	switch status {
	case statusInvalidChannel, rm.StatusInvalidClient, rm.StatusInvalidObjectHandle, rm.StatusObjectNotFound:
		return true
	}
	return false
}

const statusInvalidChannel = 0x21 // NV_ERR_INVALID_CHANNEL

func disable(own *rmclient.Client, gpu int, channels []chanRef, to chanState) (uint32, syscall.Errno) {
	p := make([]byte, disableSize)
	if to != chanRuns {
		p[disableFlag] = 1
	}
	if to == chanStopped {
		p[disableRewind] = 1
	}
	rm.PutU32(p, disableCount, uint32(len(channels)))
	for i, ch := range channels {
		rm.PutU32(p, disableClients+4*i, ch.client)
		rm.PutU32(p, disableChannels+4*i, ch.handle)
	}
	return own.Control(own.Subdevice(gpu), controlDisableChannels, p)
}
