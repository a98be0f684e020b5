// SPDX-License-Identifier: Apache-2.0

package sched_test

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// TestCrowd: a program that waits for each kernel has beside a container with many groups that never block what it has beside one with one
// such group, and waits no longer for its turn than they need to lose no more than max_loss.
func TestCrowd(t *testing.T) {
	for _, c := range []struct {
		kernel time.Duration
		loop   float64
	}{{100 * us, 5.5}, {ms, 40}, {5 * ms, 40}} {
		for _, k := range []int{3, 4, 8, 64} {
			w := newWhole(0.15)
			loop := w.add(weight(1)).loop(c.kernel, think)
			w.add(weight(1)).busy(k, 1200*us)
			w.run(7 * time.Second)
			loop.waits = nil
			m := w.measure(5 * time.Second)
			worst := slices.Max(loop.waits)
			what := fmt.Sprintf("kernels of %v beside %d: loop %.1f, others %.1f, preemptions took %.1f, worst wait %v, pace %v, %+v",
				c.kernel, k, m.parts[0], m.parts[1], m.preempted, worst, w.state.Pace(), w.vgpus[1].row)
			t.Log(what)
			if m.parts[0] < c.loop || m.parts[1] < 40 || m.preempted > 16 {
				t.Error(what)
			}
			if round := time.Duration(k+1) * switchCost * 100 / 15; worst > c.kernel+3*round {
				t.Errorf("%s: want at most three rounds of %v", what, round)
			}
			loop.groups[0].Stop()
			w.run(w.gpu.Now() + time.Second)
			if alone := w.measure(time.Second); w.vgpus[1].row.Slot.Cycle > 0 || alone.parts[1] < 85 {
				t.Errorf("kernels of %v beside %d: alone those have %.1f, %+v", c.kernel, k, alone.parts[1], w.vgpus[1].row)
			}
		}
	}
}

// TestCrowdRests: where those that wait leave the GPU idle by themselves, nobody is off for them, but for a second now and then.
func TestCrowdRests(t *testing.T) {
	w := newWhole(0.15)
	w.add(weight(4)).loop(1600*us, 24*ms)
	w.add(weight(3)).loop(200*us, 2300*us)
	w.add(weight(1)).busy(5, ms)
	apart, off := false, time.Duration(0)
	for w.gpu.Now() < 60*time.Second {
		w.run(w.gpu.Now() + 100*ms)
		if w.vgpus[2].row.Slot.Cycle > 0 {
			apart = true
			off += 100 * ms
		}
	}
	m := w.measure(5 * time.Second)
	t.Logf("slots for %v, then %.1f, %.1f %%", off, m.parts, m.sum)
	if !apart || off > 4*time.Second {
		t.Errorf("it had a slot for %v of 60 s", off)
	}
}
