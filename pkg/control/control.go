// SPDX-License-Identifier: Apache-2.0

// Package control changes what containers and GPUs have while they are in use, for cgpu set, policy, pause and km.
package control

import (
	"fmt"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/view"
)

// What cgpu set, cgpu policy and cgpu km change is changed here: in the ledger, in what programs in preload mode look at, and with
// an event. They differ in how they are asked, and how they tell.

// ChangeContainer changes what a container has. A *ledger.Refusal is an error as it is.
func ChangeContainer(runDir string, t *device.Table, old ledger.Record, req ledger.ChangeRequest) (ledger.Record, error) {
	req.GPUs, req.Overcommit, req.Card = node.LedgerGPUs(t), t.Config.Overcommit, t.Config.Card()
	req.MaxSpill = t.Config.MaxSpill.Of(t.HostMemory)
	book := ledger.Open(runDir)
	if !old.DriverLimits || req.Limit == nil {
		return changeLedger(runDir, t, book, old, req)
	}
	// What the ledger has promised to others nobody may hold any more, also if this process is killed on the way: the driver has a lower
	// limit first, and a higher one last.
	changed, err := old, nvmlclient.Tighten(old, req.Changes, *req.Limit)
	if err != nil {
		err = fmt.Errorf("container %s: its limit stays: %w", view.ShortID(old.ID), err)
	} else {
		changed, err = changeLedger(runDir, t, book, old, req)
	}
	last := nvmlclient.Limit(book, old.Nonce) // after a refusal, too: what it was
	switch {
	case last == nil:
		return changed, err
	case err == nil:
		return changed, fmt.Errorf("container %s: it is in the ledger, but not with the driver: %w; set it once more", view.ShortID(old.ID), last)
	}
	return changed, fmt.Errorf("%w; the driver may have a lower limit meanwhile: %w", err, last)
}

// changeLedger changes what a container has in the ledger, and on its page if it has one.
func changeLedger(runDir string, t *device.Table, book *ledger.Ledger, old ledger.Record, req ledger.ChangeRequest) (ledger.Record, error) {
	changed, err := book.Change(old.Nonce, req)
	if err != nil {
		return changed, err
	}
	changed.Name = old.Name
	if err := server.Keep(runDir, changed, req); err != nil {
		return changed, err
	}
	if req.Threads != nil {
		if err := domain.WriteParts(runDir, changed.VGPUs[0].UUID, changed.Domain); err != nil {
			return changed, fmt.Errorf("container %s: its threads are in the ledger, and the domain's server does not know, whose guard tries "+
				"again each second: %w", view.ShortID(old.ID), err)
		}
	}
	if !changed.Preload {
		return changed, nil // its guard looks at the ledger, and tells
	}
	changed.Name = snapshot.Named(old).Name
	tellChanges(runDir, t, old, changed)
	cards, err := book.Cards()
	if err == nil {
		err = updatePage(t, changed, cards)
	}
	if err != nil {
		return changed, fmt.Errorf("container %s: it is in the ledger, but its programs do not know: %w; start it anew",
			view.ShortID(old.ID), err)
	}
	return changed, nil
}

// tellChanges tells the node's events what the guard would tell, for a container without one.
func tellChanges(runDir string, t *device.Table, old, changed ledger.Record) {
	for _, e := range event.Changes(old, changed) {
		for _, g := range t.GPUs {
			if e.GPU != nil && e.GPU.UUID == g.UUID {
				e.GPU.Index = g.Index
			}
		}
		_ = event.Append(runDir, e)
	}
}

// ChangePolicy changes how a GPU is shared, and returns what is different. A GPU has no guard that would tell.
func ChangePolicy(runDir string, t *device.Table, g device.GPU, change func(*sched.Card)) (diffs []string, err error) {
	var was sched.Card
	book := ledger.Open(runDir)
	now, err := book.SetCard(ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory}, t.Config.Card(), func(card *sched.Card) error {
		was = *card
		change(card)
		return nil
	})
	if err != nil {
		return nil, err
	}
	diff := func(what string, before, after any) {
		if before != after {
			diffs = append(diffs, fmt.Sprintf("%s %v → %v", what, before, after))
		}
	}
	diff("policy", was.Policy, now.Policy)
	diff("max-inst", was.MaxInst, now.MaxInst)
	diff("prio-ratio", was.PrioRatio, now.PrioRatio)
	if len(diffs) > 0 {
		_ = event.Append(runDir, event.Event{Kind: event.Policy, GPU: &event.GPU{Index: g.Index, UUID: g.UUID}, Text: strings.Join(diffs, ", ")})
	}
	if err := updatePages(t, book, g.UUID); err != nil {
		return diffs, fmt.Errorf("GPU %d: it is in the ledger, but containers in preload mode keep their timeslices: %w", g.Index, err)
	}
	return diffs, nil
}

// shortage is why a container cannot have less: what it uses of a GPU, or that nobody knows.
type shortage struct {
	Spill   bool // it is about spilled memory, else about the limit
	Use     api.VGPUStatus
	Unknown error
}

// ShortageOf finds what a limit or spill would be below: what the container uses, or what it has when nobody knows its use. nil is
// nothing.
func ShortageOf(t *device.Table, r ledger.Record, req ledger.ChangeRequest) *shortage {
	limit, spill := false, false
	for _, v := range r.VGPUs {
		if req.Changes(v.UUID) {
			limit = limit || req.Limit != nil && *req.Limit < v.Limit
			spill = spill || req.Spill != nil && *req.Spill < v.Spill
		}
	}
	if !limit && !spill {
		return nil
	}
	s, err := StatusOf(t, r)
	if err != nil {
		return &shortage{Spill: !limit, Unknown: err}
	}
	for _, v := range s.VGPUs {
		switch {
		case v.Native || !req.Changes(v.UUID):
		case req.Limit != nil && v.Used > *req.Limit:
			return &shortage{Use: v}
		case req.Spill != nil && v.Spilled > *req.Spill:
			return &shortage{Spill: true, Use: v}
		}
	}
	return nil
}

// StatusOf asks a container's guard, or reads its page where it has none.
func StatusOf(t *device.Table, r ledger.Record) (api.Status, error) {
	if r.DriverOnly {
		return api.Status{}, snapshot.ErrDriverOnly
	}
	if r.Preload {
		return snapshot.PageStatus(t, r)
	}
	return api.Ask(r)
}
