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

// pressed is when a vGPU of high priority had work last.
func pressed(vgpus []VGPU, last, now time.Duration) time.Duration {
	for _, v := range vgpus {
		if v.pressing() {
			return now
		}
	}
	return last
}

// press makes the rows beside vGPUs of high priority. False: there is none that the others give way to.
func (t Timing) press(c Card, vgpus []VGPU, rows []Row, last, now time.Duration) bool {
	idle, saturating, giving := false, false, 0 // a vGPU of high priority
	for _, v := range vgpus {
		idle = idle || v.high() && v.Contexts > 0
		saturating = saturating || v.high() && v.Busy > 0 && v.Burst == unending
		if v.gives() {
			giving += v.Busy
		}
	}
	// One group alone is not switched at the end of its slices, so short ones cost nothing while nobody comes.
	if giving == 0 || !idle || giving > 1 && (last == 0 || now-last > pressTime) {
		return false
	}
	yielding := 0.0
	for i, v := range vgpus {
		switch {
		case v.high():
			continue
		case saturating:
			rows[i].Slice = max(t.HighPrio/time.Duration(max(v.Busy, 1)), shortest)
		default:
			rows[i].Slice = max(lone, shortest*time.Duration(min(v.Busy-1, 1)))
		}
		yielding += float64(v.Busy) * rows[i].Slice.Seconds()
	}
	if !saturating {
		c.takeTurns(vgpus, rows)
	}
	c.share(vgpus, rows, yielding)
	return true
}

// share gives those of high priority what PrioRatio says beside a round of the others.
func (c Card) share(vgpus []VGPU, rows []Row, yielding float64) {
	sum := 0.0
	for _, v := range vgpus {
		if v.pressing() {
			sum += c.weight(v.Share)
		}
	}
	for i, v := range vgpus {
		if v.high() {
			slice := float64(c.PrioRatio) / float64(100-c.PrioRatio) * yielding * c.weight(v.Share) / max(sum, c.weight(v.Share)) / float64(max(v.Busy, 1))
			rows[i].Slice = min(max(time.Duration(slice*float64(time.Second)), shortest), longest)
		}
	}
}

// takeTurns lets only one of several be on at a time that give way to one with high priority. If all of them ran by timeslices short
// enough for that, they would spend more time in switches among themselves than in work.
func (c Card) takeTurns(vgpus []VGPU, rows []Row) {
	many, sum := 0, 0.0
	level := quota.PriorityBestEffort
	for _, v := range vgpus {
		if v.gives() {
			many, level = many+1, max(level, v.Priority)
		}
	}
	for _, v := range vgpus {
		if v.gives() {
			sum += c.weightAt(level, v)
		}
	}
	if many < 2 || c.Policy == PolicyFair || c.Policy == PolicyFixed { // whose slots are turns already
		return
	}
	cycle := time.Duration(many) * min(max(maxCycle/time.Duration(many), minTurn), maxTurn)
	before := 0.0
	for i, v := range vgpus {
		if v.gives() {
			part := c.weightAt(level, v) / sum
			rows[i].Slot = Slot{Start: time.Duration(before * float64(cycle)), On: time.Duration(part * float64(cycle)), Cycle: cycle}
			before += part
		}
	}
}
