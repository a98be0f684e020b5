package sched

import "time"

// resident corrects for a context that has been alone on the GPU without a break: it stays switched in when its work is done, and no
// record tells. The driver's samples say how much of the time the GPU computed.
type resident struct {
	corrected time.Duration // the GPU's time up to which samples were asked for
	lately    Permille      // the GPU's load then
}

// SamplePeriod is how far the driver's samples of the GPU's load are apart.
const SamplePeriod = 200 * time.Millisecond

// works takes the time in which the GPU was idle, up to now on its clock, out of what the records say. It reports whether the GPU computed
// for the vGPU lately.
func (r *resident) works(t *Tracker, now time.Duration, load func(from, to time.Duration) (time.Duration, bool)) bool {
	since, ok := t.Running()
	if !ok {
		return false
	}
	from := max(since, r.corrected)
	if now-from < 2*SamplePeriod {
		return true
	}
	// The newest sample may be younger than a period: leave the rest for the next time.
	to := now - SamplePeriod
	busy, ok := load(from, to)
	if !ok {
		return true
	}
	// The edges fall between samples: what is less than one sample short of the whole is the whole.
	if idle := to - from - busy; idle > SamplePeriod {
		t.Idle(idle - SamplePeriod/2)
	}
	r.corrected = to
	r.lately = Permille(busy * time.Duration(Whole) / (to - from))
	return busy > 0
}
