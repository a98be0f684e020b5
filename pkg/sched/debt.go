// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// debt is the account of a hard cap. What a container used beyond it, because it was idle and its first work was noticed late, or because
// a pause takes a moment, it does without later: in the long run it gets its percentage and no more.
type debt struct {
	budget time.Duration // GPU time that it may still use
	spent  time.Duration // GPU time at the last look
	at     time.Duration // of the last look; 0: there was none
	pauses uint64        // how often it had been paused then
	owing  time.Duration // until when it stays off to make up for what it used too much
}

// pauseCost is what a context is on the engine longer than its channels are: until it is saved, and while it is restored (H200).
const pauseCost = 1200 * time.Microsecond

const (
	maxDebt = 20                     // slots
	maxOff  = 500 * time.Millisecond // what programs and the driver do not take for a hang
)

// spend takes in how much GPU time the container has used up to now. It reports that the container now has to be off.
func (d *debt) spend(now, gpuTime time.Duration, pauses uint64, p Plan, exact bool) bool {
	used, passed := gpuTime-d.spent-time.Duration(pauses-d.pauses)*pauseCost, now-d.at
	first := d.at == 0 || p.Cap == 0
	d.spent, d.at, d.pauses = gpuTime, now, pauses
	if first || p.Slot.Cycle == 0 || !exact {
		d.budget, d.owing = 0, 0
		return false
	}
	d.budget += passed*time.Duration(p.Cap)/time.Duration(Whole) - used
	d.budget = max(min(d.budget, p.Slot.On), -maxDebt*p.Slot.On)
	// Records come late: only a debt of a whole slot is surely one.
	if d.budget >= -p.Slot.On || d.owing >= now {
		return false
	}
	d.owing = now + min(-d.budget*time.Duration(Whole)/time.Duration(p.Cap), maxOff-p.Slot.Cycle)
	return true
}
