// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
)

const gpu0, gpu1 = "GPU-0", "GPU-1"

func tableOf(gpus ...string) *device.Table {
	t := &device.Table{}
	for i, uuid := range gpus {
		t.GPUs = append(t.GPUs, device.GPU{Index: i, UUID: uuid})
	}
	return t
}

// TestClasses: what a tenant's program can cause is not the GPU's fault; what NVIDIA's own device plugin passes over is passed over here;
// what nobody knows is bad.
func TestClasses(t *testing.T) {
	for _, x := range []uint64{8, 13, 31, 32, 39, 43, 45, 68, 69, 94, 109} {
		if classOf(x) != program {
			t.Errorf("%s: want a program's", xidText(x))
		}
	}
	for _, x := range []uint64{63, 92, 154} {
		if classOf(x) != record {
			t.Errorf("%s: want a record", xidText(x))
		}
	}
	for _, x := range []uint64{46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143, 172, 999} {
		if classOf(x) != bad {
			t.Errorf("%s: want bad", xidText(x))
		}
	}
	for i, x := range xids {
		if x.first > x.last || i > 0 && x.first <= xids[i-1].last {
			t.Errorf("row %d: %+v is not behind the one before", i, x)
		}
	}
	for x := range names {
		if classOf(x) != bad {
			t.Errorf("%s has a name for people, and nobody is told of it", xidText(x))
		}
	}
}

// TestStep: what makes a GPU unhealthy, and what makes it healthy again.
func TestStep(t *testing.T) {
	now, s := time.Unix(1000, 0), State{}
	table := tableOf(gpu0, gpu1)
	look := func(seen Seen, pass time.Duration, want ...Kind) {
		t.Helper()
		now = now.Add(pass)
		s = s.Step(table, seen, now)
		var got []Kind
		for _, f := range s.GPUs[gpu0] {
			got = append(got, f.Kind)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("GPU 0: %v, want %v", got, want)
		}
		if len(s.GPUs[gpu1]) > 0 && seen.Hardware != nil && !slices.Contains(want, Driver) {
			t.Fatalf("GPU 1: %+v", s.GPUs[gpu1])
		}
	}
	of := func(h device.Hardware) Seen {
		return Seen{Loaded: "a", Hardware: map[string]device.Hardware{gpu0: h, gpu1: {}}}
	}
	well := of(device.Hardware{})
	look(well, 0)
	look(of(device.Hardware{NewXids: []uint64{31, 45, 63, 154}}), time.Second)
	look(of(device.Hardware{NewXids: []uint64{31, 79}}), time.Second, Xid)
	look(well, time.Hour, Xid)
	look(of(device.Hardware{NewXids: []uint64{79, 48}}), time.Second, Xid, Xid)
	if got := s.Why(gpu0); got != "Xid 79: fallen off the bus; Xid 48: uncorrectable memory error" {
		t.Error(got)
	}
	look(Seen{Loaded: "b", Hardware: well.Hardware}, time.Second) // the driver was loaded anew
	s.Loaded = "a"
	// What ends by itself has to stay away for a while.
	look(of(device.Hardware{Lost: true}), time.Second, Lost)
	look(well, time.Second, Lost)
	look(well, Settle-time.Second, Lost)
	look(of(device.Hardware{Lost: true}), time.Second/2, Lost)
	look(well, time.Second, Lost)
	look(well, Settle)
	look(Seen{Loaded: "a", Hardware: map[string]device.Hardware{gpu1: {}}}, time.Second, Lost) // NVML knows no such GPU
	look(of(device.Hardware{RemapFailed: true, Recovery: "reset the GPU"}), time.Second, Lost, Remap, Recovery)
	look(well, time.Second, Lost, Remap, Recovery)
	look(well, Settle)
	// The clock was set back.
	look(of(device.Hardware{Lost: true}), time.Second, Lost)
	look(well, time.Second, Lost)
	look(well, -time.Hour, Lost)
	look(well, Settle)
	// NVML is silent: for a while that says nothing.
	look(Seen{Loaded: "a", Silent: Patience - 1}, time.Second)
	look(Seen{Silent: Patience}, time.Second, Driver)
	look(Seen{Silent: 2 * Patience}, Patience, Driver)
	look(well, time.Second, Driver)
	look(well, Settle)
	// Of a GPU that is away, what was reported stays.
	look(of(device.Hardware{Lost: true, NewXids: []uint64{79}}), time.Second, Lost, Xid)
	table = tableOf(gpu1)
	look(well, time.Second, Xid)
	table = tableOf(gpu0, gpu1)
	look(well, time.Hour, Xid)
	table.Config.HealthIgnoreXids = []uint64{74}
	look(of(device.Hardware{NewXids: []uint64{74}}), time.Second, Xid)
}

// TestStepAlways holds in every sequence of looks: who has had a bad Xid since the driver was loaded stays unhealthy; who was well for long
// and has had none is healthy; what is kept is bounded; a look changes no state but its own.
func TestStepAlways(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		now, s, table := time.Unix(1000, 0), State{}, tableOf(gpu0, gpu1)
		reported := map[string]bool{}
		lastBad := map[string]time.Time{}
		loaded := 0
		for step := range 200 {
			now = now.Add(time.Duration(r.IntN(4000)) * time.Millisecond)
			seen := Seen{}
			if r.IntN(40) == 0 {
				loaded++
				clear(reported)
			}
			seen.Loaded = fmt.Sprint("load ", loaded)
			if r.IntN(8) == 0 {
				seen.Silent = time.Duration(r.IntN(120)) * time.Second
				if seen.Silent >= Patience {
					lastBad[gpu0], lastBad[gpu1] = now, now
				}
			} else {
				seen.Hardware = map[string]device.Hardware{}
				for _, uuid := range []string{gpu0, gpu1} {
					h := device.Hardware{Lost: r.IntN(10) == 0, RemapFailed: r.IntN(20) == 0}
					if r.IntN(15) == 0 {
						h.NewXids = []uint64{uint64(r.IntN(200))}
						reported[uuid] = reported[uuid] || classOf(h.NewXids[0]) == bad
					}
					if h.Lost || h.RemapFailed {
						lastBad[uuid] = now
					}
					seen.Hardware[uuid] = h
				}
			}
			was := fmt.Sprintf("%+v", s)
			next := s.Step(table, seen, now)
			if fmt.Sprintf("%+v", s) != was {
				t.Fatal("the state before is another")
			}
			s = next
			for _, uuid := range []string{gpu0, gpu1} {
				unhealthy := len(s.GPUs[uuid]) > 0
				at := fmt.Sprintf("seed %d, step %d, %s: %+v", seed, step, uuid, s.GPUs[uuid])
				switch {
				case reported[uuid] && !unhealthy:
					t.Fatal("a bad Xid is forgotten: ", at)
				case lastBad[uuid].Equal(now) && !unhealthy:
					t.Fatal("what is wrong now does not count: ", at)
				case len(s.GPUs[uuid]) > maxFaults:
					t.Fatal("too many: ", at)
				}
			}
		}
		for range 20 { // all is well for long
			now = now.Add(time.Second)
			s = s.Step(table, Seen{Loaded: s.Loaded, Hardware: map[string]device.Hardware{gpu0: {}, gpu1: {}}}, now)
		}
		for _, uuid := range []string{gpu0, gpu1} {
			if unhealthy := len(s.GPUs[uuid]) > 0; unhealthy != reported[uuid] {
				t.Fatalf("seed %d, at the end %s: %+v, a bad Xid was reported: %v", seed, uuid, s.GPUs[uuid], reported[uuid])
			}
		}
	}
}

// TestMark: whoever gives out GPUs is told, unless cgpu.toml says otherwise; the table that was read stays as it is.
func TestMark(t *testing.T) {
	table := tableOf(gpu0, gpu1)
	s := State{GPUs: map[string][]Fault{gpu1: {{Kind: Lost, Text: "away"}}}}
	marked := s.Mark(table)
	if got := Unhealthy(marked); !reflect.DeepEqual(got, []string{"GPU 1 (away)"}) || len(Unhealthy(table)) > 0 {
		t.Errorf("%v, %v", got, table.GPUs)
	}
	table.Config.Health = device.HealthOff
	if marked := s.Mark(table); marked != table {
		t.Error("marked, and off")
	}
	if s.Mark(nil) != nil {
		t.Error("a table of nothing")
	}
}
