package sched

import "time"

// damping keeps a timeslice that is about right because of what the other containers do. The driver takes up its list of groups
// from the beginning when one is set: with many containers that each follow every change of the others, those at the end of the
// list would never run, and so change again what is right.
type damping struct {
	busy  int           // groups with work when the slice was set
	since time.Duration // since when another slice would be right; 0: it is not
}

// For how long another timeslice must be right before it is set: so long for each container with work, up to dampTime.
const (
	dampEach = 50 * time.Millisecond
	dampTime = time.Second
)

// damped is the slice to set where another one is right.
func (l *Local) damped(now, slice time.Duration, others []Tenant) time.Duration {
	d, old := &l.damping, l.slice
	low, wait := l.timing.Min, 0*time.Second
	for _, o := range others {
		if o.Busy > 0 || o.Lingers {
			wait += dampEach
		}
	}
	near, busy := slice > old-old/32 && slice < old+old/32, max(l.busy, 1)
	switch {
	case near && slice != old && busy == d.busy && old >= low && now >= l.settling:
		d.since = 0
		return old
	case near, busy != d.busy, old < low, slice < low, now < l.settling, slice < old-old/5:
	case d.since == 0:
		d.since = now
		return old
	case now-d.since < min(wait, dampTime):
		return old
	}
	d.since, d.busy = 0, busy
	return slice
}
