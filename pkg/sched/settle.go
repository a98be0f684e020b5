// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"
)

// A context stays on the engine when its work is done, until another one has some, and no record tells. So records alone would have two
// services of which each computes for 20 ms now and then use all of a GPU together. How long the GPU computed for anybody the driver's
// samples say, to some 0.1 % (H200); so accounts go as far as there are samples. Of the runs in a sample
//  1. those that their slices ended had work all the time,
//  2. those that have had no break yet come next: a context is switched in for work that it has, and what it has no work for comes after,
//  3. the others have what is left.
// Those of a kind get the same, up to their lengths: how much of it each needed nobody knows.

// Sample is the GPU's load since the one before.
type Sample struct {
	At   time.Duration // the GPU's clock
	Load float64       // the part of that time in which the GPU computed
}

// SamplePeriod is how far the driver's samples of the GPU's load are apart.
const SamplePeriod = 200 * time.Millisecond

// entry is what records add to the account of a vGPU.
type entry struct {
	vgpu string
	group
	span                 // what is not settled yet of a time on the engine; empty: a switch in
	sure   bool          // there was work until its end
	rested bool          // there was none at the end of what is settled of it
	gap    time.Duration // of a switch in: what it took since the context before
	usage  Usage         // beside GPUTime
}

// noLoad is what samples have of a GPU without work.
const noLoad = 3e-4

// maxEntries bounds what waits for samples.
const maxEntries = 1 << 14

// Unsettled counts what records have told since UpTo.
func (o *Observer) Unsettled() int { return len(o.entries) }

// Alone reports that there is a vGPU's context on the engine, which may have no work.
func (o *Observer) Alone() bool { return o.running != nil && o.running.vgpu != "" }

// Load is the part of a vGPU's time on the engine in which the GPU computed, by the samples that came last.
func (o *Observer) Load(vgpu string) float64 { return o.habit(vgpu).load }

// Open is for how long a vGPU has been on the engine since UpTo, until now.
func (o *Observer) Open(vgpu string, now time.Duration) time.Duration {
	sum := o.habit(vgpu).open
	if r := o.running; r != nil && r.vgpu == vgpu && !r.resting {
		sum += max(0, now-o.settled)
	}
	return sum
}

// SettleAll has accounts go up to the newest record, where nobody tells the GPU's load.
func (o *Observer) SettleAll() {
	for _, e := range o.entries {
		o.count(e, span{e.to, e.to}, 0)
	}
	o.entries, o.upTo = o.entries[:0], max(o.upTo, o.last)
	for _, h := range o.vgpus {
		h.load = 1
	}
	if o.running != nil {
		o.running.resting = false
	}
}

// Settle has accounts go up to the newest sample until a time of which all records have come. What is older than samples reach back is
// settled without.
func (o *Observer) Settle(samples []Sample, until time.Duration) {
	for _, h := range o.vgpus {
		h.on, h.computed = 0, 0
	}
	for i, s := range samples {
		if s.At <= o.upTo || s.At > until {
			continue
		}
		from := s.At - SamplePeriod
		if i > 0 && from-samples[i-1].At < SamplePeriod/2 {
			from = samples[i-1].At
		}
		o.settle(span{max(from, o.upTo), s.At}, s.Load)
	}
	if len(o.entries) > maxEntries || len(o.entries) > 0 && until-o.upTo > staleSamples {
		o.SettleAll()
	}
	if r := o.running; r != nil {
		if r.resting = o.settled-r.worked >= loneTime; !r.resting {
			r.last = o.counted
		}
	}
	for _, h := range o.vgpus {
		if h.on > 0 {
			h.load = float64(h.computed) / float64(h.on)
		}
	}
}

const (
	// loneTime is after how long without a switch a context without work is seen to have none.
	loneTime = time.Second
	// staleSamples is longer than the driver keeps samples.
	staleSamples = 15 * time.Second
)

// settle books what was on the engine until the end of a sample.
func (o *Observer) settle(s span, load float64) {
	there := -1
	if r := o.running; r != nil && o.settled < s.to {
		there = len(o.entries)
		o.enter(entry{vgpu: r.vgpu, group: r.group, span: span{o.settled, s.to}, rested: r.rested})
		o.settled = s.to
	}
	var busy time.Duration
	if load > noLoad {
		busy = time.Duration(load * float64(s.to-s.from))
	}
	var kinds [3][]time.Duration
	for _, e := range o.entries {
		if e.from >= s.from && e.to <= s.to {
			busy -= e.gap
		}
		if on := e.overlap(s); on > 0 {
			kinds[e.kind()] = append(kinds[e.kind()], on)
		}
	}
	var levels [3]time.Duration
	for i, list := range kinds {
		levels[i], busy = level(list, busy)
	}
	left := o.entries[:0]
	for i, e := range o.entries {
		on := e.overlap(s)
		computed := min(on, levels[e.kind()])
		if e.from <= s.to {
			o.count(e, s, computed)
		}
		if on > 0 {
			e.rested = computed < on-on/50
		}
		if i == there {
			o.running.rested = e.rested
			if computed > 0 {
				o.running.worked = s.to
			}
		}
		if e.to > s.to {
			e.from = max(e.from, s.to)
			left = append(left, e)
		}
	}
	o.entries, o.upTo = left, s.to
}

// kind is how sure it is that there was work.
func (e entry) kind() int {
	switch {
	case e.sure:
		return 0
	case !e.rested:
		return 1
	}
	return 2
}

// level is the most that each of some times gets of what there is, and what is left of that.
func level(times []time.Duration, of time.Duration) (most, left time.Duration) {
	slices.Sort(times)
	for i, t := range times {
		if n := time.Duration(len(times) - i); (t-most)*n > of {
			return most + max(0, of)/n, 0
		} else {
			most, of = t, of-(t-most)*n
		}
	}
	return most, max(0, of)
}

// enter adds an entry, until there are samples.
func (o *Observer) enter(e entry) {
	o.entries = append(o.entries, e)
	if h := o.vgpus[e.vgpu]; h != nil {
		h.open += e.to - e.from
	}
}

// count adds to an account what an entry has until the end of a sample, of which the GPU computed for some time for it.
func (o *Observer) count(e entry, s span, computed time.Duration) {
	from, to := e.from, min(e.to, s.to)
	h := o.vgpus[e.vgpu]
	if h != nil {
		h.open -= to - from
		from = max(from, h.from)
	}
	on, sampled := max(0, to-from), span{from, to}.overlap(s)
	computed = on - sampled + min(computed, sampled)
	if o.booked {
		o.runs, o.booked = o.runs[:0], false
	}
	if computed > 0 {
		o.runs = append(o.runs, span{to - computed, to})
	}
	if h == nil { // the vGPU is gone
		return
	}
	h.account.GPUTime += computed
	h.on, h.computed = h.on+on, h.computed+computed
	if e.to <= s.to && e.to > h.from {
		h.account.add(e.usage)
	}
}

func (u *Usage) add(x Usage) {
	u.Waiting, u.Switches, u.Preemptions = u.Waiting+x.Waiting, u.Switches+x.Switches, u.Preemptions+x.Preemptions
}
