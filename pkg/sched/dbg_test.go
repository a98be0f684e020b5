package sched_test

import (
	"os"
	"strconv"
	"testing"
	"time"
)

func TestDbg(t *testing.T) {
	sd, _ := strconv.Atoi(os.Getenv("SEED"))
	w := crowd(uint64(sd), os.Getenv("APART") != "")
	until := 10 * time.Second
	if s := os.Getenv("AT"); s != "" {
		until, _ = time.ParseDuration(s)
	}
	w.run(until - until/3)
	m := w.measure(until / 3)
	t.Logf("pace %v lost %.1f costs %v %v", w.state.Pace(), m.preempted, w.observer.Costs(), w.paces)
	for i, v := range w.vgpus {
		s := w.observer.Seen(v.id, 200*ms)
		t.Logf("%s %+v groups %d row %v: %.1f %% burst %v gap %v busy %d lag %v", v.id, v.share, len(v.groups), v.row, m.parts[i], s.Burst, s.Gap, s.Busy, w.state.Lag(v.id))
		for _, g := range v.groups {
			a := g.Account()
			t.Logf("      kernels %d switches %d preempted %d ran %v waited %v mean %v", a.Kernels, a.Switches, a.Preemptions, a.GPUTime, a.Waiting, a.GPUTime/time.Duration(a.Kernels+1))
		}
	}
}
