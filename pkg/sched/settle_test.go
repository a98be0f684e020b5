// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

// TestSettle: what single samples do to accounts.
func TestSettle(t *testing.T) {
	owner := func(pid int) string { return map[int]string{1: "a", 2: "b"}[pid] }
	const begin = 10 * time.Second
	at := func(d time.Duration) time.Duration { return begin + d }
	runs := func(list ...run) []Switch {
		for i := range list {
			list[i].from += begin
			if list[i].to > 0 {
				list[i].to += begin
			}
		}
		return records(list...)
	}
	for _, c := range []struct {
		name     string
		before   func(o *Observer)
		runs     []run
		samples  []Sample
		want     map[string]time.Duration
		switches uint64 // of a
	}{
		{"alone, and at work all the time", nil, []run{{1, 0, 0}}, []Sample{{at(200 * ms), 1}, {at(400 * ms), 1}},
			map[string]time.Duration{"a": 400 * ms}, 1},
		{"alone, and at rest", nil, []run{{1, 0, 0}}, []Sample{{at(200 * ms), 0.1}, {at(400 * ms), 0.0002}},
			map[string]time.Duration{"a": 20 * ms}, 1},
		{"a switch in just when the sample is taken", nil, []run{{1, 0, 100 * ms}, {1, 200 * ms, 0}}, []Sample{{at(200 * ms), 0.5}},
			map[string]time.Duration{"a": 100 * ms}, 2},
		{"who had a break comes last", nil, []run{{1, 0, 300 * ms}, {2, 300 * ms, 0}}, []Sample{{at(200 * ms), 0.1}, {at(400 * ms), 0.1}},
			map[string]time.Duration{"a": 20 * ms, "b": 20 * ms}, 1},
		{"two that are new have the same", nil, []run{{1, 0, 100 * ms}, {2, 100 * ms, 200 * ms}}, []Sample{{at(200 * ms), 0.5}},
			map[string]time.Duration{"a": 50 * ms, "b": 50 * ms}, 1},
		{"more load than there can be", nil, []run{{1, 0, 0}}, []Sample{{at(200 * ms), 7}}, map[string]time.Duration{"a": 200 * ms}, 1},
		{"a sample that began before what is settled", func(o *Observer) {
			o.Add(records(run{1, begin - 100*ms, at(100 * ms)}), at(100*ms), owner, false)
			o.SettleAll()
		}, []run{{2, 100 * ms, 200 * ms}}, []Sample{{at(200 * ms), 0.5}}, map[string]time.Duration{"a": 200 * ms, "b": 50 * ms}, 1},
		{"one account goes further than the other", func(o *Observer) {
			o.Resume("a", Account{UpTo: at(400 * ms), Usage: Usage{GPUTime: time.Second}})
			o.Resume("b", Account{UpTo: begin, Resident: Resident{On: true, PID: 2, Context: 1, Since: begin}})
		}, nil, []Sample{{at(200 * ms), 0}, {at(400 * ms), 0}, {at(600 * ms), 0}}, map[string]time.Duration{"a": time.Second, "b": 0}, 0},
	} {
		o := NewObserver()
		if c.before != nil {
			c.before(o)
		}
		o.Add(runs(c.runs...), at(time.Second), owner, false)
		o.Settle(c.samples, at(900*ms))
		for id, want := range c.want {
			a := o.Book(id, 0, false, 0, 0)
			if off := a.GPUTime - want; off > us || off < -us {
				t.Errorf("%s: %s has %v, want %v", c.name, id, a.GPUTime, want)
			}
			if id == "a" && a.Switches != c.switches {
				t.Errorf("%s: %d switches, want %d", c.name, a.Switches, c.switches)
			}
		}
	}
}

// TestLevel: what is divided is never more than there is, and who needs less has that.
func TestLevel(t *testing.T) {
	for _, c := range []struct {
		times      []time.Duration
		of         time.Duration
		most, left time.Duration
	}{
		{nil, 5, 0, 5}, {[]time.Duration{3}, 5, 3, 2}, {[]time.Duration{9}, 5, 5, 0}, {[]time.Duration{9, 1, 9}, 11, 5, 0},
		{[]time.Duration{2, 2}, -7, 0, 0},
	} {
		if most, left := level(c.times, c.of); most != c.most || left != c.left {
			t.Errorf("%v of %v: %v each and %v left, want %v and %v", c.times, c.of, most, left, c.most, c.left)
		}
	}
}
