// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// pressTime is for how long several vGPUs give way after the last work of one with high priority.
const pressTime = 2 * time.Second

func (v VGPU) high() bool { return v.Priority == quota.PriorityHigh }

// pressing reports that it has work that goes before the others'.
func (v VGPU) pressing() bool { return v.high() && (v.Pressing || v.Busy > 0) }

// gives reports that it has work and gives way.
func (v VGPU) gives() bool { return !v.high() && v.Busy > 0 }

// precedence is what the vGPUs of high priority do together.
type precedence struct {
	last       time.Duration // when one had work; 0: never
	at         time.Duration
	load       float64 // the part of the GPU's time that they have
	saturating bool    // they leave nothing to others by themselves
}

func (h precedence) follow(vgpus []VGPU, now time.Duration) precedence {
	const memory, much, little = 8, 0.7, 0.4
	ran, endless := 0.0, false
	for _, v := range vgpus {
		if v.pressing() {
			h.last = now
		}
		if v.high() {
			ran += float64(v.Ran)
			endless = endless || v.Endless > 0
		}
	}
	if dt := now - h.at; dt > 0 {
		load := min(1, ran/float64(dt))
		if endless { // it has all the time that it is given, which may be little
			load = 1
		}
		h.load += (load - h.load) / memory
	}
	h.at, h.saturating = now, h.load > much || h.saturating && h.load > little
	return h
}

// press makes the rows beside vGPUs of high priority. False: there is none that the others give way to.
func (t Timing) press(c Card, vgpus []VGPU, rows []Row, s *State, now time.Duration) bool {
	s.high = s.high.follow(vgpus, now)
	saturating, idle, giving := s.high.saturating, false, 0
	for _, v := range vgpus {
		idle = idle || v.high() && v.Contexts > 0
		if v.gives() {
			giving += v.Busy
		}
	}
	// One group alone is not switched at the end of its slices, so short ones cost nothing while nobody comes.
	if giving == 0 || !idle || giving > 1 && (s.high.last == 0 || now-s.high.last > pressTime) {
		return false
	}
	yielding := 0.0
	for i, v := range vgpus {
		switch {
		case v.high():
			continue
		case saturating:
			// Of many each has less, or a round, most of which is the high-priority one's, would be seconds long.
			rows[i].Slice = max(t.HighPrio/time.Duration(max(v.Busy, 1)*max(1, giving/8)), shortest)
		default:
			rows[i].Slice = max(lone, shortest*time.Duration(min(v.Busy-1, 1)))
		}
		if left := float64(100-c.PrioRatio) / 100; saturating && float64(v.Slot.On) >= left*float64(v.Slot.Cycle) {
			rows[i].Slot = Slot{} // the cap is out of reach, and its turn could come while it is off for long
		}
		yielding += float64(v.Busy) * rows[i].Slice.Seconds()
	}
	t.share(c, vgpus, rows, yielding)
	if 100*s.high.load < float64(c.PrioRatio) { // so it is by themselves that they have no more than that: their bursts are not cut
		for i, v := range vgpus {
			if v.high() && v.Endless == 0 {
				rows[i].Slice = max(rows[i].Slice, min(s.room(v), t.MaxRound))
			}
		}
	}
	if saturating {
		return true
	}
	s.turns = s.turns.follow(c, vgpus, now)
	for i, v := range vgpus {
		if slot, ok := s.turns.slots[v.ID]; ok && v.gives() {
			rows[i].Slot = slot
		}
	}
	return true
}

// share gives those of high priority what PrioRatio says beside a round of the others, or less, so that the others have turns in every
// MaxRound.
func (t Timing) share(c Card, vgpus []VGPU, rows []Row, yielding float64) {
	sum := 0.0
	for _, v := range vgpus {
		if v.pressing() {
			sum += c.weight(v.Share)
		}
	}
	round := min(float64(c.PrioRatio)/float64(100-c.PrioRatio)*yielding, t.MaxRound.Seconds())
	for i, v := range vgpus {
		if v.high() {
			part := c.weight(v.Share) / max(sum, c.weight(v.Share)) / float64(max(v.Busy, 1))
			rows[i].Slice = max(time.Duration(part*round*float64(time.Second)), shortest)
		}
	}
}

// turns are slots in which vGPUs take turns that give way to one with high priority.
type turns struct {
	since time.Duration
	cycle time.Duration
	slots map[string]Slot
}

const (
	// shortTurn is the shortest turn in which one that waits for those of high priority comes to run, after a pause and a resume.
	shortTurn = 5 * time.Millisecond
	// manyTurn is what turns of many would have in the mean without that bound; with it 64 have theirs in half a second.
	manyTurn = 3 * time.Millisecond
)

// follow makes turns for those who give way. If all of them ran by timeslices short enough for one of high priority, they would spend more
// time in switches among themselves than in work; so only one of them is on at a time. Other turns are made when everybody had one: who
// came meanwhile has none and is on, and who went leaves a gap.
func (old turns) follow(c Card, vgpus []VGPU, now time.Duration) turns {
	level, sum, takers := quota.PriorityBestEffort, 0.0, []VGPU{}
	same := true
	for _, v := range vgpus {
		if v.gives() && v.Slot.Cycle == 0 {
			takers, level = append(takers, v), max(level, v.Priority)
			same = same && old.slots[v.ID].Cycle > 0
		}
	}
	if same && len(takers) == len(old.slots) || now-old.since < 2*old.cycle {
		return old
	}
	next := turns{since: now, slots: map[string]Slot{}}
	if len(takers) < 2 {
		return next
	}
	for _, v := range takers {
		sum += c.weightAt(level, v)
	}
	many := time.Duration(len(takers))
	all := many * min(max(maxCycle/2/many, manyTurn), maxTurn)
	for _, v := range takers {
		on := max(shortTurn, time.Duration(c.weightAt(level, v)/sum*float64(all)))
		next.slots[v.ID] = Slot{Start: next.cycle, On: on}
		next.cycle += on
	}
	for id, slot := range next.slots {
		slot.Cycle = next.cycle
		next.slots[id] = slot
	}
	return next
}
