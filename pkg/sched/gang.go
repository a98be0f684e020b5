// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Gang says which GPUs a container has, if it has several.
type Gang struct {
	GPUs  uint64 // the same number for all containers that have the same GPUs; 0: only one
	Order uint64 // the container's own, the same on all of its GPUs
	Kept  bool   // it keeps a gang's slots: its rows do not differ in them
}

// gangs is what is done where all that have work share several GPUs with each other. A program on several GPUs waits on each of them, in
// kernels that spin, for what it does on the others: a turn on one GPU without the turn on the others is lost. No record tells a kernel
// that spins from one that computes.
//
// So turns are short, as then a wait for the other GPU's turn is. Where all saturate the GPU they have turns by the machine's clock: a slot
// each by weight, at the same time on all of their GPUs. Each GPU's arbiter comes to the same slots by itself; where one does not, for
// others have work on its GPU or somebody leaves it idle, slots are kept on none (Agree), and the pace is what it would be without.
type gangs struct {
	order  []uint64        // of those who have work, in the order of their slots; none: they are no gang
	full   time.Duration   // since when all saturate; 0: they do not
	slots  map[string]Slot // none: they take turns by the pace
	since  time.Duration   // of slots
	barred time.Duration   // until when there are none
	bar    time.Duration   // for how long there were none the last time
}

// Ganged reports that the slots of the rows are for all of a vGPU's GPUs, or for none.
func (s State) Ganged() bool { return len(s.gangs.slots) > 0 }

const (
	// gangTime is for how long all must saturate the GPU before they have slots.
	gangTime = habitTime
	// gangBurst is the burst of one that saturates, in slices.
	gangBurst = 16
	// gangTurn is the least that a slot is made for, a pause and a resume of which take a millisecond on each GPU.
	gangTurn = 25 * time.Millisecond
	// gangLoad is the least load in slots: by the pace a preemption of 0.19 ms is lost in each slice.
	gangLoad = 0.915
	// gangBar is for how long there are no slots where it was less; twice as long each time, up to crowdBar.
	gangBar = 8 * time.Second
)

// follow decides who has slots.
func (old gangs) follow(t Timing, vgpus []VGPU, r round, now time.Duration) gangs {
	next := gangs{barred: old.barred, bar: old.bar}
	members := r.gang(vgpus)
	for _, x := range members {
		next.order = append(next.order, vgpus[x.vgpu].Gang.Order)
	}
	if len(members) == 0 || !r.saturates(members) {
		return next
	}
	if next.full = old.full; next.full == 0 || !slices.Equal(old.order, next.order) {
		next.full = now
	}
	if now-next.full < gangTime || now < next.barred {
		return next
	}
	if next.slots, next.since = t.gangSlots(members, vgpus), old.since; len(old.slots) == 0 {
		next.since = now
	}
	return next
}

// gang is the turns of all that have work, if each of them has the same GPUs, several, and none gives way or has a cap.
func (r round) gang(vgpus []VGPU) []turn {
	members := slices.Clone(r.turns)
	for _, x := range members {
		if v := vgpus[x.vgpu]; v.Gang.GPUs == 0 || v.Gang.GPUs != vgpus[members[0].vgpu].Gang.GPUs || x.capped || x.gives > 0 {
			return nil
		}
	}
	if len(members) < 2 {
		return nil
	}
	slices.SortFunc(members, func(x, y turn) int { return cmp.Compare(vgpus[x.vgpu].Gang.Order, vgpus[y.vgpu].Gang.Order) })
	return members
}

// saturates reports that none of them blocks, or seldom.
func (r round) saturates(members []turn) bool {
	return !slices.ContainsFunc(members, func(x turn) bool {
		return x.endless < x.groups && x.burst < gangBurst*NativeTimeslice.Seconds()
	})
}

// judge is Judge of slots that were kept. All may just have ended their work, so the first time they are soon tried again.
func (g gangs) judge(load float64, now time.Duration) gangs {
	switch {
	case load < 0:
		return gangs{barred: math.MaxInt64}
	case load < gangLoad:
		bar := min(max(gangBar, 2*g.bar), crowdBar)
		return gangs{barred: now + bar, bar: bar}
	}
	g.bar = 0
	return g
}

// gangSlots is a slot for each, by weight; none: one's would be too short.
func (t Timing) gangSlots(members []turn, vgpus []VGPU) map[string]Slot {
	sum, least := 0.0, math.Inf(1)
	for _, x := range members {
		sum, least = sum+x.weight, min(least, x.weight)
	}
	cycle := min(max(t.Cycle, time.Duration(float64(gangTurn)*sum/least)), maxCycle)
	slots, at := map[string]Slot{}, 0.0
	for _, x := range members {
		start := time.Duration(at / sum * float64(cycle))
		at += x.weight
		on := time.Duration(at/sum*float64(cycle)) - start
		if on < minSlot {
			return nil
		}
		slots[vgpus[x.vgpu].ID] = Slot{Start: start, On: on, Cycle: cycle}
	}
	return slots
}

// place puts their slots into rows.
func (g gangs) place(vgpus []VGPU, rows []Row) {
	for i, v := range vgpus {
		if slot, ok := g.slots[v.ID]; ok {
			rows[i].Slot = slot
		}
	}
}

// gang decides about gangs, and what the target for the pace is then: what the driver has by default, for the smallest weight.
func (s *State) gang(t Timing, vgpus []VGPU, r round, target, now time.Duration) time.Duration {
	if s.gangs = s.gangs.follow(t, vgpus, r, now); len(s.gangs.order) == 0 {
		return target
	}
	if s.Ganged() {
		s.crowds = crowds{barred: s.crowds.barred}
	}
	least := math.Inf(1)
	for _, x := range r.turns {
		least = min(least, x.weight)
	}
	return min(target, time.Duration(float64(NativeTimeslice)/least))
}

// Agree is told of a vGPU's parts on all of its GPUs. Gangs' slots are kept where they are the same on all on which it has work.
func Agree(parts []*Local, now time.Duration) (agreed bool) {
	var slots []Slot
	for _, l := range parts {
		if l.row.Busy > 0 && l.Ruled(now) {
			slot := l.row.Slot
			if !l.row.Gang {
				slot = Slot{}
			}
			slots = append(slots, slot)
		}
	}
	agreed = len(slices.Compact(slots)) == 1
	for _, l := range parts {
		l.agreed = agreed
	}
	return agreed
}
