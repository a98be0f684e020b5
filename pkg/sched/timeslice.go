// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// Timing are the scheduler's constants (cgpu.toml).
type Timing struct {
	Base     time.Duration // timeslice of a container of weight 1
	Min      time.Duration // no timeslice is made shorter to keep a round short
	MaxRound time.Duration // in which every container with work has its turn
	HighPrio time.Duration // timeslice of the others while a high-priority container has work
	Cycle    time.Duration // of hard caps, in which every capped container has its slot
	// MaxLoss is the part of the GPU's time that preemptions may take, so that programs which wait for each kernel come up with those that
	// do not (Decide).
	MaxLoss float64
}

// DefaultTiming holds the defaults. Base is a trade: two saturating containers lose 9 % of an H200 to context switches with
// CUDA's own 2 ms, 4 % with 5 ms, 1 to 2 % with 10 ms.
func DefaultTiming() Timing {
	return Timing{Base: 10 * time.Millisecond, Min: time.Millisecond, MaxRound: 100 * time.Millisecond,
		HighPrio: 200 * time.Microsecond, Cycle: 100 * time.Millisecond, MaxLoss: 0.15}
}

const (
	// NativeTimeslice is what libcuda asks for each context (NVA06C_CTRL_CMD_SET_TIMESLICE, traced). The guard does not carry
	// that call out, so PolicyNative sets it.
	NativeTimeslice = 2048 * time.Microsecond
	// shortest is the shortest timeslice that is ever set: a context switch of an H200 takes 83 µs.
	shortest = 50 * time.Microsecond
	// lone is the timeslice of a single group that gives way to a high-priority container which has work now and then. Alone it is
	// not switched at the end of its slices, so short ones cost it nothing, and what comes in between waits the shorter.
	lone = 10 * time.Microsecond
	// longest keeps a high-priority container within the watchdogs of desktop cards.
	longest = time.Second
)

// weight in slots. Under PolicySoft a percentage takes as many slots as it is percent of the GPU.
func (c Card) weight(s Share) float64 {
	switch {
	case c.Policy == PolicySoft && s.Percent > 0:
		return float64(s.Percent) * float64(c.MaxInst) / 100
	case c.Policy == PolicyFair:
		return 1
	}
	return float64(max(s.Weight, 1))
}

// How much longer slices and rounds get while every container with work has more than it can get done.
const (
	maxStretch = 3.5
	longRound  = 2.0
)

const (
	// yields is by how much a best-effort container's turn is shorter than a default one's: as their timeslices are.
	yields  = 50
	maxTurn = 25 * time.Millisecond
)
