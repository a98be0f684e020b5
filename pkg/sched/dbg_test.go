package sched_test

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"
)

func TestDbg(t *testing.T) {
	for _, a := range []string{os.Getenv("SEED")} {
		sd, _ := strconv.Atoi(a)
		seed := uint64(sd)
		rnd := rand.New(rand.NewPCG(seed, 5))
		w := newWhole(0.15)
		n := 2 + rnd.IntN(8)
		if seed%4 == 0 {
			n = 64
		}
		for range n {
			w.at(time.Duration(rnd.Int64N(int64(time.Second))), func() { w.mixed(rnd, false) })
		}
		for range n / 2 {
			w.at(time.Second+time.Duration(rnd.Int64N(int64(2*time.Second))), func() { w.remove(w.vgpus[rnd.IntN(len(w.vgpus))]); w.mixed(rnd, false) })
		}
		w.run(6 * time.Second)
		m := w.measure(4 * time.Second)
		t.Logf("pace %v lost %.1f costs %v", w.state.Pace(), m.preempted, w.observer.Costs())
		for i, v := range w.vgpus {
			s := w.observer.Seen(v.id, 200*ms)
			t.Logf("%s %+v groups %d slice %v: %.1f %% burst %v gap %v busy %d lag %v kind %v", v.id, v.share, len(v.groups), v.row.Slice, m.parts[i], s.Burst, s.Gap, s.Busy, w.state.Lag(v.id), v.kinds)
			for _, g := range v.groups {
				a := g.Account()
				t.Logf("      kernels %d switches %d preempted %d ran %v waited %v", a.Kernels, a.Switches, a.Preemptions, a.GPUTime, a.Waiting)
			}
		}
	}
}
