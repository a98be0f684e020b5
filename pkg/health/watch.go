// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Watcher looks at the GPUs.
type Watcher struct {
	RunDir string
	// Load is the node's table; one that is stale serves too.
	Load func(runDir string) (*device.Table, error)
	// Ask asks the driver, and returns in a time that is bounded. Xids that came meanwhile are told with an error, too, and once.
	Ask func() (map[string]device.Hardware, error)
	// Complain is called once for each thing that is wrong.
	Complain func(error)

	answered time.Time           // when the driver did last
	away     map[string]bool     // GPUs that its last answer said were lost, by UUID
	xids     map[string][]uint64 // that are not written yet, by UUID
	told     string              // the last error
}

// every is how often a watcher looks.
const every = time.Second

// Run watches until ctx ends. There is one watcher of a node.
func (w *Watcher) Run(ctx context.Context) error {
	only, err := watchAlone(w.RunDir)
	if err != nil {
		return err
	}
	defer only.Close()
	tick := time.NewTicker(every)
	defer tick.Stop()
	w.answered = time.Now()
	for {
		w.complain(w.poll(time.Now()))
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// complain tells what is wrong, once for each thing.
func (w *Watcher) complain(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != w.told && text != "" {
		w.Complain(err)
	}
	w.told = text
}

// poll asks the driver once, and writes what follows from it.
func (w *Watcher) poll(now time.Time) error {
	t, err := w.Load(w.RunDir)
	if t == nil || err != nil && !errors.Is(err, device.ErrStale) {
		return err
	}
	seen := Seen{Loaded: Loaded(t, w.RunDir)}
	all, silence := w.Ask()
	seen.Hardware = w.withXids(all)
	if silence == nil {
		w.answered = now
		w.confirm(t, seen.Hardware)
	} else {
		seen.Silent = max(now.Sub(w.answered), 1)
	}
	before, after, err := Change(w.RunDir, func(s State) State { return s.Step(t, seen, now) })
	if err != nil {
		return err
	}
	w.xids = nil
	if err := Tell(w.RunDir, t, before, after); err != nil {
		return err
	}
	return silence
}

// maxXids bounds the Xids of a GPU that are not written yet.
const maxXids = 64

// withXids adds the Xids that could not be written to what was seen: the driver tells of each once.
func (w *Watcher) withXids(all map[string]device.Hardware) map[string]device.Hardware {
	seen, xids := map[string]device.Hardware{}, map[string][]uint64{}
	maps.Copy(seen, all)
	for uuid, list := range w.xids {
		h, ok := seen[uuid]
		h.Lost, h.NewXids = h.Lost || !ok, slices.Compact(slices.Sorted(slices.Values(append(list, h.NewXids...))))
		seen[uuid] = h
	}
	for uuid, h := range seen {
		if len(h.NewXids) > 0 {
			xids[uuid] = h.NewXids[:min(len(h.NewXids), maxXids)]
		}
	}
	w.xids = xids
	return seen
}

// Tell writes the events of a change: of each GPU whose faults are others, and of each container that has it.
func Tell(runDir string, t *device.Table, before, after State) error {
	var records []ledger.Record
	var failed error
	for _, g := range t.GPUs {
		kind, text := news(before.GPUs[g.UUID], after.GPUs[g.UUID])
		if kind == "" {
			continue
		}
		about := &event.GPU{Index: g.Index, UUID: g.UUID}
		_ = event.Append(runDir, event.Event{Kind: kind, GPU: about, Text: text})
		if records == nil && failed == nil {
			records, failed = ledger.Open(runDir).List()
		}
		for _, r := range Holders(records, g.UUID) {
			_ = event.Append(runDir, event.Event{Kind: kind, Container: r.ID, Nonce: r.Nonce, Name: r.Name, GPU: about, Text: text})
		}
	}
	if failed != nil {
		return fmt.Errorf("health: who has the GPU: %w", failed)
	}
	return nil
}

// news is what is to be told of a GPU: faults that are new, or that all are over.
func news(before, after []Fault) (kind event.Kind, text string) {
	if len(after) == 0 && len(before) > 0 {
		return event.Healthy, "healthy again"
	}
	for _, f := range after {
		if !slices.ContainsFunc(before, f.same) {
			if kind != "" {
				text += "; "
			}
			kind, text = event.Unhealthy, text+f.Text
		}
	}
	return kind, text
}

// Holders are the containers that have a GPU.
func Holders(records []ledger.Record, uuid string) (list []ledger.Record) {
	for _, r := range records {
		if slices.Contains(r.Native, uuid) || slices.ContainsFunc(r.VGPUs, func(v ledger.VGPU) bool { return v.UUID == uuid }) {
			list = append(list, r)
		}
	}
	return list
}

// Warn writes an event for each GPU of a new container that is unhealthy: whoever names a GPU gets it.
func Warn(runDir string, marked *device.Table, r ledger.Record) {
	for _, g := range marked.GPUs {
		if g.Fault != "" && len(Holders([]ledger.Record{r}, g.UUID)) > 0 {
			_ = event.Append(runDir, event.Event{Kind: event.Warning, Container: r.ID, Nonce: r.Nonce, Name: r.Name,
				GPU:  &event.GPU{Index: g.Index, UUID: g.UUID},
				Text: "started on a GPU that is unhealthy: " + g.Fault})
		}
	}
}

// confirm leaves a GPU lost that was lost in the answer before this one as well: a single look can fall into a moment in which the driver
// is loaded, or resets the GPU.
func (w *Watcher) confirm(t *device.Table, seen map[string]device.Hardware) {
	away := map[string]bool{}
	for _, g := range t.GPUs {
		h, ok := seen[g.UUID]
		if ok && !h.Lost {
			continue
		}
		away[g.UUID] = true
		h.Lost = w.away[g.UUID]
		seen[g.UUID] = h
	}
	w.away = away
}
