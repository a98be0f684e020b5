// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"
)

// Claim is what one container may have of each of its GPUs in a cycle. GPUs without a hard cap are not in it.
type Claim struct {
	ID   string
	Caps map[string]Permille // by GPU
}

// Slot is when a capped container's channels are on: from Start for On, in every Cycle of the machine's monotonic clock.
type Slot struct {
	Start, On, Cycle time.Duration
}

const (
	// minSlot is the shortest time that a container is on: to pause and to resume takes 0.8 ms of an H200's driver.
	minSlot = 5 * time.Millisecond
	// maxCycle keeps the time that a container is off below what programs and the driver take for a hang.
	maxCycle = 500 * time.Millisecond
)

// CycleOf is the cycle's length: the one configured, or longer where a small cap would get less than minSlot.
func (t Timing) CycleOf(claims []Claim) time.Duration {
	cycle := t.Cycle
	for _, c := range claims {
		for _, p := range c.Caps {
			if need := minSlot * time.Duration(Whole) / time.Duration(p); need > cycle {
				cycle = need
			}
		}
	}
	return max(t.Cycle, min(cycle, maxCycle))
}

// Layout places every container's slots in the cycle, so that no two of one GPU overlap: two containers of 50 % that are on
// at the same time would get a quarter each. A container's slots start together on all its GPUs, because processes that talk
// to each other (NCCL) wait for the slowest.
//
// Every guard computes it by itself from the ledger; the same claims in the same order give the same layout. Where the caps
// of a GPU add up to more than the cycle, or the slots of containers on several GPUs leave gaps too short, a slot is put
// where it overlaps least.
func (t Timing) Layout(claims []Claim) map[string]map[string]Slot {
	cycle := t.CycleOf(claims)
	taken := map[string][]span{}
	all := map[string]map[string]Slot{}
	for _, c := range claims {
		if len(c.Caps) == 0 {
			continue
		}
		lengths := map[string]time.Duration{}
		longest := time.Duration(0)
		for gpu, p := range c.Caps {
			lengths[gpu] = cycle * time.Duration(p) / time.Duration(Whole)
			longest = max(longest, lengths[gpu])
		}
		start := place(taken, lengths, cycle-longest)
		slots := map[string]Slot{}
		for gpu, on := range lengths {
			taken[gpu] = append(taken[gpu], span{start, start + on})
			slots[gpu] = Slot{Start: start, On: on, Cycle: cycle}
		}
		all[c.ID] = slots
	}
	return all
}

// place finds the first start, not after last, where spans of the given lengths overlap what is taken least.
func place(taken map[string][]span, lengths map[string]time.Duration, last time.Duration) time.Duration {
	starts := []time.Duration{0, last}
	for gpu, on := range lengths {
		for _, s := range taken[gpu] {
			starts = append(starts, s.to, s.from-on)
		}
	}
	slices.Sort(starts)
	best, least := time.Duration(0), time.Duration(-1)
	for _, start := range starts {
		if start < 0 || start > last {
			continue
		}
		sum := time.Duration(0)
		for gpu, on := range lengths {
			for _, s := range taken[gpu] {
				sum += s.overlap(span{start, start + on})
			}
		}
		if least < 0 || sum < least {
			best, least = start, sum
		}
	}
	return best
}

// Phase tells whether the slot is on at a time of the machine's monotonic clock, and when that changes next.
func (s Slot) Phase(now time.Duration) (on bool, until time.Duration) {
	begin := now - now%s.Cycle
	for _, edge := range []struct {
		at time.Duration
		on bool
	}{{begin + s.Start, false}, {begin + s.Start + s.On, true}, {begin + s.Cycle + s.Start, false}} {
		if now < edge.at {
			return edge.on, edge.at
		}
	}
	return true, begin + s.Cycle + s.Start + s.On
}
