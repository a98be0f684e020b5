// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"
)

// run is a time of one process on the engine.
type run struct {
	pid      int
	from, to time.Duration
}

// records writes runs as the driver does; one that ends never is under way.
func records(runs ...run) (list []Switch) {
	for _, r := range runs {
		list = append(list, Switch{At: r.from, PID: r.pid, Context: 1, On: true})
		if r.to > 0 {
			list = append(list, Switch{At: r.to, PID: r.pid, Context: 1})
		}
	}
	return list
}

func TestObserver(t *testing.T) {
	owner := func(pid int) string { return map[int]string{1: "a", 2: "b"}[pid] }
	never := Seen{Burst: unending}
	busy := func(ran time.Duration) Seen { return Seen{Busy: 1, Endless: 1, Ran: ran, Burst: unending} }
	for _, c := range []struct {
		name   string
		before func(o *Observer)
		runs   []run
		lost   bool
		want   map[string]Seen // Cuts apart
	}{
		{"nothing", nil, nil, false, map[string]Seen{"a": never}},
		{"a loop and a hog", nil, []run{
			{1, 0, ms}, {2, 1130 * us, 3130 * us}, {1, 3320 * us, 4320 * us}, {2, 4450 * us, 6450 * us}, {1, 6640 * us, 7640 * us},
		}, false, map[string]Seen{
			"a": {Busy: 1, Ran: 3 * ms, Burst: 953 * us, Gap: 2320 * us}, "b": busy(4 * ms)}},
		{"a burst in two turns", nil, []run{
			{1, 0, 100 * us}, {1, 200 * us, 2200 * us}, {2, 2400 * us, 4400 * us}, {1, 4600 * us, 5600 * us},
		}, false, map[string]Seen{
			"a": {Busy: 1, Ran: 3100 * us, Burst: 2846 * us, Gap: 100 * us}}},
		{"who is alone may be idle", nil, []run{{1, 0, 9 * ms}}, false, map[string]Seen{"a": busy(9 * ms)}},
		{"under way", nil, []run{{1, 4 * ms, 0}}, false, map[string]Seen{"a": busy(6 * ms)}},
		{"nobody's process", nil, []run{{3, 0, ms}}, false, map[string]Seen{"a": never, "b": never}},
		{"the slice of before", func(o *Observer) { o.Applied("a", Row{Slice: 500 * us}, 4*ms) }, []run{
			{1, 0, 100 * us}, {1, 200 * us, 1200 * us}, {1, 3 * ms, 5 * ms}, {1, 6 * ms, 6100 * us},
		}, false, map[string]Seen{
			"a": {Busy: 1, Ran: 3200 * us, Burst: 1449500, Gap: 950 * us}}},
		{"a turn that a timeslice ended, whosever that is, is no block",
			func(o *Observer) { o.Sliced("b", Setting{2 * ms, 9 * ms, 9 * ms}) }, []run{
				{1, 0, 100 * us}, {1, 200 * us, 1200 * us}, {1, 3 * ms, 4 * ms}, {1, 5 * ms, 5100 * us}, {1, 9 * ms, 9500 * us},
			}, false, map[string]Seen{
				"a": {Busy: 1, Ran: 2700 * us, Burst: 953 * us, Gap: 966666}}},
		{"one that is being set", func(o *Observer) { o.Sliced("b", Setting{2 * ms, 9 * ms, 0}) }, []run{
			{1, 0, 100 * us}, {1, 200 * us, 1200 * us}, {1, 3 * ms, 4 * ms}, {1, 9 * ms, 9500 * us},
		}, false, map[string]Seen{
			"a": {Busy: 1, Ran: 2600 * us, Burst: 953 * us, Gap: 2300 * us}}},
		{"the slice of before, until its guard says that it has set another", func(o *Observer) {
			o.Sliced("a", Setting{2 * ms, -time.Second, -time.Second})
			o.Applied("a", Row{Slice: 500 * us}, 0)
		}, []run{{1, 0, 100 * us}, {1, 200 * us, 700 * us}, {1, 3 * ms, 3500 * us}}, false, map[string]Seen{
			"a": {Busy: 1, Ran: 1100 * us, Burst: 453 * us, Gap: 1200 * us}}},
		{"a pause is no block", func(o *Observer) { o.Applied("a", Row{2 * ms, Slot{0, 3 * ms, 10 * ms}}, 0) }, []run{
			{1, 0, 100 * us}, {1, 2 * ms, 3600 * us},
		}, false, map[string]Seen{
			"a": {Busy: 1, Endless: 1, Ran: 1700 * us, Burst: unending, Gap: 1900 * us}}},
		{"records are lost", func(o *Observer) { o.Add(records(run{1, 0, ms}), 2*ms, owner, false) }, []run{
			{1, 8 * ms, 9 * ms},
		}, true, map[string]Seen{"a": busy(ms)}},
		{"gone", func(o *Observer) {
			o.Add(records(run{1, 0, 2 * ms}), 3*ms, owner, false)
			o.Forget("a")
		}, nil, false, map[string]Seen{"a": never}},
	} {
		o := NewObserver()
		o.Applied("a", Row{Slice: 2 * ms}, 0)
		o.Applied("b", Row{Slice: 2 * ms}, 0)
		if c.before != nil {
			c.before(o)
		}
		o.Add(records(c.runs...), 10*ms, owner, c.lost)
		for id, want := range c.want {
			got := o.Seen(id, 200*ms)
			got.Cuts = 0
			if got != want {
				t.Errorf("%s: %s %+v, want %+v", c.name, id, got, want)
			}
		}
	}
}

// TestCosts: what switches take is measured, on any GPU.
func TestCosts(t *testing.T) {
	o := NewObserver()
	o.Applied("a", Row{Slice: ms}, 0)
	o.Applied("b", Row{Slice: ms}, 0)
	owner := func(pid int) string { return map[int]string{1: "a", 2: "b"}[pid] }
	at := time.Duration(0)
	for range 1000 {
		o.Add(records(run{1, at, at + ms}, run{2, at + 1080*us, at + 1380*us}, run{1, at + 1430*us, at + 1950*us}), at+2*ms, owner, false)
		at += 2 * ms
	}
	c := o.Costs()
	if c.Preempt < 186*us || c.Preempt > 188*us || c.Yield < 96*us || c.Yield > 98*us {
		t.Errorf("%+v", c)
	}
	if s := o.Seen("a", 200*ms); s.Cuts < 480 || s.Cuts > 520 {
		t.Errorf("%g preemptions a second, want 500", s.Cuts)
	}
}

// TestSetAllTheTime: a vGPU whose guard sets timeslices all the time, as for new contexts, does not keep it from being seen for long that
// another one blocks.
func TestSetAllTheTime(t *testing.T) {
	o := NewObserver()
	o.Applied("a", Row{Slice: 2 * ms}, 0)
	owner := func(pid int) string { return map[int]string{1: "a", 2: "b"}[pid] }
	seen := 0
	for now := Tick; now < 3*time.Second; now += Tick {
		o.Sliced("b", Setting{2 * ms, now - Tick, now - ms})
		var runs []run
		for at := now - Tick; at < now-2*ms; at += 2 * ms {
			runs = append(runs, run{1, at, at + ms}, run{2, at + 1080*us, at + 1380*us})
		}
		if o.Add(records(runs...), now, owner, false); o.Seen("a", 200*ms).Endless == 0 {
			seen++
		}
	}
	if seen < 30 {
		t.Errorf("it was seen in %d of 90 looks", seen)
	}
}

// TestH200Records: groups that always have work are seen to be such by what an H200 wrote down for them, and what switches take is
// measured.
func TestH200Records(t *testing.T) {
	text, err := os.ReadFile("testdata/h200-hogs.txt")
	if err != nil {
		t.Fatal(err)
	}
	var list []Switch
	for pid := 1; pid <= 4; pid++ { // each begins with short ones that block, as CUDA programs do
		for i := range 3 {
			at := time.Duration(-10*pid+2*i) * ms
			list = append(list, Switch{at, pid, 1, true}, Switch{at + 61*us, pid, 1, false})
		}
	}
	sort.Slice(list, func(i, j int) bool { return list[i].At < list[j].At })
	for line := range strings.Lines(string(text)) {
		var pid, at, on int
		if n, _ := fmt.Sscan(line, &pid, &at, &on); n == 3 {
			list = append(list, Switch{At: time.Duration(at) * us, PID: pid, Context: 1, On: on == 1})
		}
	}
	o := NewObserver()
	slices := []time.Duration{0, 75 * us, 50 * us, 150 * us, 50 * us}
	for pid, slice := range slices[1:] {
		o.Applied(strconv.Itoa(pid+1), Row{Slice: slice}, -time.Second)
	}
	end := list[len(list)-1].At
	o.Add(list, end, strconv.Itoa, false)
	for pid := 1; pid < len(slices); pid++ {
		if s := o.Seen(strconv.Itoa(pid), 200*ms); s.Endless != 1 {
			t.Errorf("group %d: %+v", pid, s)
		}
	}
	if c := o.Costs(); c.Preempt < 185*us || c.Preempt > 195*us {
		t.Errorf("%+v", c)
	}
}
