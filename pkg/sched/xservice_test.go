package sched_test

import (
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

func pct(w []time.Duration, p float64) time.Duration {
	return w[int(float64(len(w)-1)*p)].Round(100 * us)
}

// training stands in for a trainer: steps of kernels, launched a little more slowly than they run, then a pause.
func (v *vgpu) training(n int, kernel, gap, pause time.Duration) *vgpu {
	g := v.process()
	at, i := v.w.gpu.Now(), 0
	g.Arrive(func() (time.Duration, time.Duration, bool) {
		i++
		at += gap
		if i%n == 0 {
			at += pause
		}
		return at, kernel, true
	})
	return v
}

func TestXService(t *testing.T) {
	for _, beside := range []string{"hog", "train"} {
		for _, load := range []int{20, 50} {
			for _, way := range []string{"alone", "default", "ours"} {
				w := newWhole(0.15)
				client := w.add(weight(1)).service(7, 2*ms*100/time.Duration(load), 2*ms)
				var other *vgpu
				if way != "alone" {
					other = w.add(weight(1))
					if beside == "hog" {
						other.hog()
					} else {
						other.process().Submit(runlist.Work{Length: 40 * us, Gap: 8 * us})
					}
				}
				if way == "default" {
					for _, v := range w.vgpus {
						for _, g := range v.groups {
							g.SetTimeslice(2048 * us)
						}
					}
					w.tick = never
				}
				w.run(2 * time.Second)
				client.waits = nil
				w.paces = nil
				m := w.measure(16 * time.Second)
				slices.Sort(client.waits)
				n := 0
				if len(w.paces) > 0 {
					n = min(len(w.paces), 60)
				}
				t.Logf("%s load %d %s: p50 %v p90 %v p99 %v max %v; parts %.1f; %d paces %v", beside, load, way, pct(client.waits, .5), pct(client.waits, .9), pct(client.waits, .99), pct(client.waits, 1), m.parts, len(w.paces), w.paces[:n])
				_ = other
			}
		}
	}
}
