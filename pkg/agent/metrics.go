// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"io"
	"runtime/metrics"
	"slices"
	"sync"
)

// Source writes figures in the text format of Prometheus (version 0.0.4): whole families, each with # HELP and # TYPE.
type Source func(w io.Writer) error

// Metrics are the figures of /metrics: the agent's own counters, and what parts of the agent register. It is safe for many
// goroutines.
type Metrics struct {
	mu      sync.Mutex
	counts  map[string]uint64
	sources []Source
}

// own are the agent's counters, with what they count.
var own = map[string]string{
	"events_total":                   "Events of pods that were handed to the API server's client.",
	"events_dropped_total":           "Events of pods that were not sent, because there were too many or the pods are not known.",
	"condition_write_failures_total": "Tries to write the node's condition that failed.",
	"resizes_total":                  "Changes of running containers by annotations of their pods.",
	"resizes_refused_total":          "Such changes that were refused.",
}

// NewMetrics has the agent's counters, at zero.
func NewMetrics() *Metrics { return &Metrics{counts: map[string]uint64{}} }

// Add counts.
func (m *Metrics) Add(name string, n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts[name] += n
}

// Get returns a counter.
func (m *Metrics) Get(name string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.counts[name]
}

// Register adds a source. It is asked at each scrape, by one goroutine at a time.
func (m *Metrics) Register(s Source) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sources = append(m.sources, s)
}

// write writes everything. A source that fails does not hide the others.
func (m *Metrics) write(w io.Writer) error {
	m.mu.Lock()
	counts, sources := map[string]uint64{}, slices.Clone(m.sources)
	for name := range own {
		counts[name] = m.counts[name]
	}
	m.mu.Unlock()
	var names []string
	for name := range counts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := family(w, "cgpu_agent_"+name, "counter", own[name], counts[name]); err != nil {
			return err
		}
	}
	heap := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(heap)
	err := family(w, "cgpu_agent_heap_bytes", "gauge", "Memory of the agent's living objects.", heap[0].Value.Uint64())
	for _, s := range sources {
		if e := s(w); e != nil && err == nil {
			err = e
		}
	}
	return err
}

func family(w io.Writer, name, kind, help string, value uint64) error {
	_, err := fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n%s %d\n", name, help, name, kind, name, value)
	return err
}
