// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"slices"
	"time"
)

// A timeslice can be set only on the file that a client was made on. A program that sends that file to itself through a socket and
// leaves it there would keep what it has, and run on: work is put into channels without a file. So the channels of a client whose
// file is nowhere to be found are off until it is.

// absence is a client's.
type absence struct {
	since, looked time.Time
	off           bool // its channels are
}

const (
	// absentAfter leaves a process the time to end: its files close before it is gone.
	absentAfter = 300 * time.Millisecond
	// lookEvery is how often a file that is not found is looked for; that can take long in a container with many descriptors.
	lookEvery = time.Second
)

// absent reports that a client's file was not found the last time.
func (x *gpuScheduler) absent(c Client) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.lost[c] != nil
}

// mayLook reports that it is time to look for a client's file.
func (x *gpuScheduler) mayLook(c Client) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	m := x.lost[c]
	return m == nil || !m.off || time.Since(m.looked) >= lookEvery
}

// found notes whether a client's file was found, and turns its channels off and on accordingly.
func (x *gpuScheduler) found(c Client, ok bool) {
	x.mu.Lock()
	m := x.lost[c]
	if m == nil && !ok {
		m = &absence{since: time.Now()}
		x.lost[c] = m
	}
	if ok {
		delete(x.lost, c)
	}
	change := false
	if m != nil {
		m.looked = time.Now()
		change = m.off == ok && (ok || time.Since(m.since) >= absentAfter)
		m.off = m.off != change
	}
	x.mu.Unlock()
	if !change {
		return
	}
	x.turnClient(c, ok)
}

// turnClient lets the channels of a client run, or stops them.
func (x *gpuScheduler) turnClient(c Client, on bool) {
	s := x.s
	s.Lock()
	defer s.Unlock()
	channels := slices.DeleteFunc(s.Container.Channels(x.gpu, false), func(ch Channel) bool { return ch.Client != c.Handle() })
	switch {
	case s.closed || len(channels) == 0:
	case on:
		if !x.off {
			s.letRun(x, channels)
		}
	case s.insure() == nil:
		s.LogOnce("hidden", "the file of an RM client is in none of the container's processes; its channels are off until it is", "pid", c.PID())
		if !x.off {
			s.noteHidden(x)
		}
		s.disable(x.gpu, channels, chanPaused)
	}
}

// shown leaves out the channels of clients that are off because their file is not found.
func (x *gpuScheduler) shown(channels []Channel) []Channel { return x.split(channels, false) }

func (x *gpuScheduler) split(channels []Channel, off bool) (list []Channel) {
	x.mu.Lock()
	defer x.mu.Unlock()
	hidden := map[uint32]bool{}
	for c, m := range x.lost {
		hidden[c.Handle()] = m.off
	}
	for _, ch := range channels {
		if hidden[ch.Client] == off {
			list = append(list, ch)
		}
	}
	return list
}

// noteHidden writes down, for the rescuer, what stays off while the container is on.
func (s *Scheduler) noteHidden(x *gpuScheduler) {
	if s.rescue == nil {
		return
	}
	if list := x.split(s.Container.Channels(x.gpu, false), true); len(list) > 0 {
		s.rescue.keep(x.gpu, list)
		s.note(x.gpu, list)
	} else {
		s.rescue.forget(x.gpu)
	}
}
