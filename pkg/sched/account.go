// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Usage is what a vGPU used of a GPU.
type Usage struct {
	GPUTime     time.Duration // on the engine
	Waiting     time.Duration // from a preemption to the next switch in
	Switches    uint64        // switches in
	Preemptions uint64        // switches out at the end of a timeslice
}

// Account is the GPU time of a vGPU up to a time of the GPU's clock: who reads the records after that can go on from there.
type Account struct {
	UpTo time.Duration
	Usage
	Granted time.Duration // what its share of the GPU's busy time would have been
	Resident
}

// Resident is the context of a vGPU that is on the engine.
type Resident struct {
	On      bool // there is one
	PID     int
	Context uint32
	Since   time.Duration // its time is in the account until then
	Resting bool          // it has no work, as the GPU says (Observer.Settle)
}

// span is a time of the GPU's clock.
type span struct{ from, to time.Duration }

func (s span) overlap(o span) time.Duration { return max(0, min(s.to, o.to)-max(s.from, o.from)) }

// Resume goes on with the account of a vGPU that another Observer kept. It comes before the first Add: what that is told of the time
// before is only seen, and not counted again.
func (o *Observer) Resume(vgpu string, a Account) {
	h := o.habit(vgpu)
	h.account, h.from, h.grantable = a, a.UpTo, a.Granted
	if a.On && (o.running == nil || a.Since > o.since) {
		o.running = &runner{vgpu: vgpu, group: group{a.PID, a.Context}, last: a.Since, worked: a.Since, resting: a.Resting}
		o.since, o.settled = a.Since, a.Since
		o.groups[o.running.group] = o.running
		h.runners = append(h.runners, o.running)
	}
	// Whoever ended between two accounts had told one of them more.
	if !o.begun && (o.upTo == 0 || a.UpTo < o.upTo) {
		o.upTo = a.UpTo
	}
}

// UpTo is how far accounts go.
func (o *Observer) UpTo() time.Duration { return o.upTo }

// Book is the account of a vGPU until UpTo. It counts what the vGPU was entitled to: a part of the time in which anybody was on the engine;
// if it is capped, of all time. The part is that of the time since the last Book, of which it had work for worked. That bounds what it was
// entitled to: a context that has no work any more may have been on the engine for long, until now. Records come late, so the bound is of
// the sums.
func (o *Observer) Book(vgpu string, part float64, capped bool, since, worked time.Duration) Account {
	h := o.habit(vgpu)
	a := &h.account
	h.part, h.parts = h.part+part*float64(since), h.parts+float64(since)
	h.grantable += time.Duration(part * float64(worked))
	if o.upTo > a.UpTo {
		passed := o.upTo - a.UpTo
		if !capped {
			passed = o.busySince(a.UpTo)
		}
		if h.parts > 0 {
			part = h.part / h.parts
		}
		a.Granted += time.Duration(part * float64(passed))
		a.UpTo, h.part, h.parts = o.upTo, 0, 0
	}
	a.Granted = min(a.Granted, h.grantable)
	o.booked = true
	a.Resident = o.resident(vgpu)
	return *a
}

// resident is the context of a vGPU that was on the engine at the time until which accounts go.
func (o *Observer) resident(vgpu string) Resident {
	for _, e := range o.entries {
		switch {
		case e.from > o.upTo:
			return Resident{}
		case e.to > o.upTo && e.vgpu == vgpu:
			return Resident{true, e.pid, e.context, e.from, false}
		}
	}
	if r := o.running; r != nil && r.vgpu == vgpu && o.settled <= o.upTo {
		return Resident{true, r.pid, r.context, o.settled, r.resting}
	}
	return Resident{}
}

// busySince is for how long anybody was on the engine from a time on, of what was counted since accounts were booked.
func (o *Observer) busySince(from time.Duration) (sum time.Duration) {
	for _, s := range o.runs {
		sum += s.overlap(span{from, o.upTo})
	}
	return sum
}

// Parts are what of the GPU's time the vGPUs with work are entitled to beside each other; that of others is 0. Hard caps are apart.
func (c Card) Parts(vgpus []VGPU) []float64 {
	parts, level := make([]float64, len(vgpus)), quota.PriorityBestEffort
	for _, v := range vgpus {
		if v.Busy > 0 {
			level = max(level, min(v.Priority, quota.PriorityDefault))
		}
	}
	var sum [2]float64 // of those of high priority, and of the others
	first := func(v VGPU) int {
		if v.high() && c.Policy != PolicyNative {
			return 0
		}
		return 1
	}
	for i, v := range vgpus {
		if v.Busy > 0 {
			parts[i] = c.weightAt(level, v)
			sum[first(v)] += parts[i]
		}
	}
	for i, v := range vgpus {
		if v.Busy == 0 {
			continue
		}
		parts[i] /= sum[first(v)]
		switch {
		case sum[0] == 0 || sum[1] == 0:
		case first(v) == 0:
			parts[i] *= float64(c.PrioRatio) / 100
		default:
			parts[i] *= float64(100-c.PrioRatio) / 100
		}
	}
	return parts
}
