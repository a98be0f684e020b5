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
		o.running = &runner{vgpu: vgpu, group: group{a.PID, a.Context}, last: a.Since, resting: a.Resting}
		o.since, o.settled = a.Since, a.Since
		o.groups[o.running.group] = o.running
		h.runners = append(h.runners, o.running)
	}
	o.upTo = max(o.upTo, a.UpTo)
}

// UpTo is how far accounts go.
func (o *Observer) UpTo() time.Duration { return o.upTo }

// Book is the account of a vGPU up to the last record. It counts what the vGPU was entitled to since the last time: a part of the time in
// which anybody was on the engine, or a hard cap's of all. Worked is for how long it had work since the last time, and bounds that: a
// context that has no work any more may have been on the engine for long, until now. Records come late, so the bound is of the sums.
func (o *Observer) Book(vgpu string, part float64, limit Permille, worked time.Duration) Account {
	h := o.habit(vgpu)
	a := &h.account
	granted := time.Duration(part * float64(o.busySince(a.UpTo)))
	if limit > 0 {
		part = float64(limit) / float64(Whole)
		granted = time.Duration(part * float64(max(0, o.upTo-a.UpTo)))
	}
	h.grantable += time.Duration(part * float64(worked))
	a.Granted = min(a.Granted+granted, h.grantable)
	o.booked = true
	a.UpTo, a.Resident = max(a.UpTo, o.upTo), Resident{}
	if r := o.running; r != nil && r.vgpu == vgpu {
		a.Resident = Resident{true, r.pid, r.context, o.settled, r.resting}
	}
	return *a
}

// busySince is for how long anybody was on the engine from a time on, of what was counted since accounts were booked.
func (o *Observer) busySince(from time.Duration) (sum time.Duration) {
	for _, s := range o.runs {
		sum += s.overlap(span{from, o.upTo})
	}
	return sum
}

// SamplePeriod is how far the driver's samples of the GPU's load are apart.
const SamplePeriod = 200 * time.Millisecond

// Alone is a context that has been on the engine without a break since a time that Settle knows nothing of yet. It stays switched in
// when its work is done, and no record tells.
func (o *Observer) Alone() (pid int, since time.Duration, ok bool) {
	if o.running == nil || o.running.vgpu == "" {
		return 0, 0, false
	}
	return o.running.pid, o.settled, true
}

// Settle says for how long the GPU computed for the context that is alone, from what Alone said until a time of which all records have
// come.
func (o *Observer) Settle(to, computed time.Duration) {
	r, from := o.running, o.settled
	r.resting = computed == 0
	// The edges fall between samples: what is less than one sample short of the whole is the whole.
	if idle := to - from - computed; idle <= SamplePeriod {
		computed = to - from
	} else if computed > 0 {
		computed += SamplePeriod / 2
	}
	o.count(r, to-computed, to)
	o.settled, o.upTo = to, max(o.upTo, to)
}

// count counts a time on the engine.
func (o *Observer) count(r *runner, from, to time.Duration) {
	h := o.habit(r.vgpu)
	h.account.GPUTime += max(0, to-max(from, h.from))
	if o.booked {
		o.runs, o.booked = o.runs[:0], false
	}
	o.runs = append(o.runs, span{from, to})
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
