// SPDX-License-Identifier: Apache-2.0

// Package health keeps which GPUs of the node are unhealthy, and why. `cgpu health watch` asks NVML (or the simulated driver) once a
// second, steps the state, and writes it to health.json in the run directory; whoever gives out GPUs reads that (Mark). It is a judgement
// about new containers: those that run are told of and left alone.
//
// Without a file every GPU is healthy, as on a node where nobody watches.
package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
)

// Kind is why a GPU is unhealthy. The kinds are an interface.
type Kind string

const (
	Xid      Kind = "xid"      // the driver reported an error: stays until the driver is loaded anew, or Clear
	Lost     Kind = "lost"     // the driver cannot reach it
	Remap    Kind = "remap"    // a bad row of its memory could not be replaced
	Recovery Kind = "recovery" // the driver says that it has to be reset, or the node booted
	Driver   Kind = "driver"   // NVML does not answer
)

// Fault is one thing that is wrong with a GPU.
type Fault struct {
	Kind  Kind      `json:"kind"` // xid, lost, remap, recovery or driver
	Xid   uint64    `json:"xid,omitempty"`
	Text  string    `json:"text"`
	Since time.Time `json:"since"`
	Ended time.Time `json:"ended,omitzero"` // when it was first not seen any more; it counts for 10 s longer
}

// same says whether two faults are one that goes on.
func (f Fault) same(g Fault) bool { return f.Kind == g.Kind && f.Xid == g.Xid }

// State is what is wrong with GPUs, by UUID. A GPU with which nothing is wrong is not in it.
type State struct {
	Loaded string             `json:"loaded,omitempty"` // tells one load of the driver from the next
	GPUs   map[string][]Fault `json:"gpus"`
}

// Settle is how long what ends by itself has to stay away before it is over, and Patience how long NVML may be silent.
const (
	Settle   = 10 * time.Second
	Patience = time.Minute
)

// Seen is one look at the GPUs.
type Seen struct {
	Loaded   string
	Hardware map[string]device.Hardware // by UUID; while there is no answer what the driver told by itself, Xids
	Silent   time.Duration              // how long there has been no answer; 0: there is one
}

// Step is the state after a look, at the GPUs of a table.
func (s State) Step(t *device.Table, seen Seen, now time.Time) State {
	next := State{Loaded: cmp.Or(seen.Loaded, s.Loaded), GPUs: map[string][]Fault{}}
	for uuid, faults := range s.GPUs {
		next.GPUs[uuid] = slices.Clone(faults)
	}
	if next.Loaded != s.Loaded { // what was reported is of another load
		for uuid := range next.GPUs {
			next.drop(uuid, func(f Fault) bool { return f.Kind == Xid })
		}
	}
	waiting := (seen.Hardware == nil || seen.Silent > 0) && seen.Silent < Patience
	known := map[string]bool{}
	for _, g := range t.GPUs {
		known[g.UUID] = true
		if !waiting {
			next.update(g.UUID, faultsOf(g.UUID, seen), now)
		}
		next.add(g.UUID, xidsOf(t.Config, seen.Hardware[g.UUID]), now)
	}
	if waiting {
		return next
	}
	for uuid := range next.GPUs { // of one that is away the reports stay
		if !known[uuid] {
			next.drop(uuid, func(f Fault) bool { return f.Kind != Xid })
		}
	}
	return next
}

// xidsOf are those of the reported Xids that count.
func xidsOf(c device.Config, h device.Hardware) (list []Fault) {
	for _, xid := range h.NewXids {
		if classOf(xid) == bad && !slices.Contains(c.HealthIgnoreXids, xid) {
			list = append(list, Fault{Kind: Xid, Xid: xid, Text: xidText(xid)})
		}
	}
	return list
}

// faultsOf is what a look finds wrong with a GPU, beside Xids.
func faultsOf(uuid string, seen Seen) (list []Fault) {
	if seen.Silent > 0 {
		return []Fault{{Kind: Driver, Text: "NVML does not answer"}}
	}
	h, ok := seen.Hardware[uuid]
	if !ok || h.Lost {
		list = append(list, Fault{Kind: Lost, Text: "the driver cannot reach the GPU"})
	}
	if h.RemapFailed {
		list = append(list, Fault{Kind: Remap, Text: "a bad row of its memory could not be replaced"})
	}
	if h.Recovery != "" {
		list = append(list, Fault{Kind: Recovery, Text: "the driver wants it to be mended: " + h.Recovery})
	}
	return list
}

// maxFaults bounds what is kept of a GPU.
const maxFaults = 16

// update brings a GPU's faults to what was found now.
func (s State) update(uuid string, found []Fault, now time.Time) {
	faults := s.GPUs[uuid]
	for i := range faults {
		f := &faults[i]
		goesOn := slices.ContainsFunc(found, f.same)
		switch {
		case goesOn || f.Kind == Xid:
			f.Ended = time.Time{}
		case f.Ended.IsZero() || f.Ended.After(now): // the clock may have been set back
			f.Ended = now
		}
	}
	faults = slices.DeleteFunc(faults, func(f Fault) bool { return !f.Ended.IsZero() && now.Sub(f.Ended) >= Settle })
	s.GPUs[uuid] = faults
	s.add(uuid, found, now)
	s.drop(uuid, func(Fault) bool { return false })
}

// add adds what was not known.
func (s State) add(uuid string, found []Fault, now time.Time) {
	for _, f := range found {
		if len(s.GPUs[uuid]) < maxFaults && !slices.ContainsFunc(s.GPUs[uuid], f.same) {
			f.Since = now
			s.GPUs[uuid] = append(s.GPUs[uuid], f)
		}
	}
}

// drop takes faults away, and the GPU with its last one.
func (s State) drop(uuid string, gone func(Fault) bool) {
	if s.GPUs[uuid] = slices.DeleteFunc(s.GPUs[uuid], gone); len(s.GPUs[uuid]) == 0 {
		delete(s.GPUs, uuid)
	}
}

// Why is what is wrong with a GPU, for people; empty: nothing.
func (s State) Why(uuid string) string {
	var list []string
	for _, f := range s.GPUs[uuid] {
		list = append(list, f.Text)
	}
	return strings.Join(list, "; ")
}

func (s State) equal(o State) bool {
	return s.Loaded == o.Loaded && maps.EqualFunc(s.GPUs, o.GPUs, slices.Equal[[]Fault])
}

// Mark is a table whose GPUs say what is wrong with them, for those who give them out.
func (s State) Mark(t *device.Table) *device.Table {
	if t == nil || t.Config.Health == device.HealthOff {
		return t
	}
	return s.Show(t)
}

// Show is the same for those who tell of them, whatever follows.
func (s State) Show(t *device.Table) *device.Table {
	if t == nil || len(s.GPUs) == 0 {
		return t
	}
	marked := *t
	marked.GPUs = slices.Clone(t.GPUs)
	for i := range marked.GPUs {
		marked.GPUs[i].Fault = s.Why(marked.GPUs[i].UUID)
	}
	return &marked
}

// Unhealthy lists the GPUs of a marked table about which something is wrong.
func Unhealthy(t *device.Table) (list []string) {
	for _, g := range t.GPUs {
		if g.Fault != "" {
			list = append(list, fmt.Sprintf("GPU %d (%s)", g.Index, g.Fault))
		}
	}
	return list
}
