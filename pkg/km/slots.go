// SPDX-License-Identifier: Apache-2.0

package km

import (
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Slots numbers the slices of each GPU from 0. cGPU's `id` is the minor number of the instance's device node, of which cgpu
// has none; what is left of it is a small number that no other slice of the node has and that stays while the container
// lives.
type Slots map[Slice]int

// Next gives slices that are new the lowest number that is free; the others keep theirs, and those of ended ones are free.
func (old Slots) Next(records []ledger.Record) Slots {
	next := Slots{}
	type place struct {
		gpu  string
		slot int
	}
	taken := map[place]bool{}
	each := func(f func(Slice)) {
		for _, r := range records {
			for _, v := range r.VGPUs {
				f(Slice{GPU: v.UUID, Nonce: r.Nonce})
			}
		}
	}
	each(func(s Slice) {
		if slot, ok := old[s]; ok {
			next[s] = slot
			taken[place{s.GPU, slot}] = true
		}
	})
	each(func(s Slice) {
		if _, ok := next[s]; ok {
			return
		}
		slot := 0
		for taken[place{s.GPU, slot}] {
			slot++
		}
		next[s] = slot
		taken[place{s.GPU, slot}] = true
	})
	return next
}

// number is a slice's `id`: no GPU has more slices than MaxMaxInst.
func number(gpuIndex, slot int) int { return gpuIndex*sched.MaxMaxInst + slot }
