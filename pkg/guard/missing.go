package guard

import "time"

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
func (x *card) absent(c *client) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.missing[c] != nil
}

// mayLook reports that it is time to look for a client's file.
func (x *card) mayLook(c *client) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	m := x.missing[c]
	return m == nil || !m.off || time.Since(m.looked) >= lookEvery
}

// found notes whether a client's file was found, and turns its channels off and on accordingly.
func (x *card) found(c *client, ok bool) {
	x.mu.Lock()
	m := x.missing[c]
	if m == nil && !ok {
		m = &absence{since: time.Now()}
		x.missing[c] = m
	}
	if ok {
		delete(x.missing, c)
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
	k := x.c
	k.running.Lock()
	defer k.running.Unlock()
	var channels []chanRef
	for _, ch := range k.g.account.channelsOn(x.gpu, false) {
		if ch.client == c.handle {
			channels = append(channels, ch)
		}
	}
	switch {
	case k.closed || len(channels) == 0:
	case ok:
		if !x.off {
			k.letRun(x, channels)
		}
	case k.insure() == nil:
		k.g.logOnce("hidden", "the file of an RM client is in none of the container's processes; its channels are off until it is", "pid", c.tgid)
		if !x.off {
			k.noteHidden(x)
		}
		k.disable(x.gpu, channels, chanPaused)
	}
}

// shown leaves out the channels of clients that are off because their file is not found.
func (x *card) shown(channels []chanRef) []chanRef { return x.split(channels, false) }

func (x *card) split(channels []chanRef, off bool) (list []chanRef) {
	x.mu.Lock()
	defer x.mu.Unlock()
	hidden := map[uint32]bool{}
	for c, m := range x.missing {
		hidden[c.handle] = m.off
	}
	for _, ch := range channels {
		if hidden[ch.client] == off {
			list = append(list, ch)
		}
	}
	return list
}

// noteHidden writes down, for the rescuer, what stays off while the container is on.
func (c *compute) noteHidden(x *card) {
	if c.rescue == nil {
		return
	}
	if list := x.split(c.g.account.channelsOn(x.gpu, false), true); len(list) > 0 {
		c.rescue.keep(x.gpu, list)
		c.rescue.note(c.g, x.gpu, list)
	} else {
		c.rescue.forget(x.gpu)
	}
}
