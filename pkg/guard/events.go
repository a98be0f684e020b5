// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// What the guard tells the node's events (package event). Those that a tenant can cause are written now and then, with a count;
// those of the ledger as they are.

// noteStart tells that the container runs, and what it has.
func (g *Guard) noteStart(r ledger.Record) {
	var has []string
	for _, x := range g.cfg.GPUs {
		what := "all of GPU " + fmt.Sprint(x.Index)
		if !x.Native {
			what = fmt.Sprintf("%v of GPU %d", x.Limit, x.Index)
		}
		has = append(has, what)
	}
	g.beganAt.Store(time.Now().UnixNano())
	// Not in the way of the container's first call.
	g.events.Begin(event.Event{Kind: event.Start, PID: r.InitPID, Name: r.Name, Text: strings.Join(has, ", ")})
}

// noteEnd is the last word, after everything is given back: news may come late, room for the next container may not.
func (g *Guard) noteEnd() {
	g.events.Close()
	began := g.beganAt.Load()
	if began == 0 {
		return // it never ran: whoever wanted to create it has told why
	}
	var denied uint64
	var peaks []string
	for i, x := range g.cfg.GPUs {
		u := g.account.usage(i)
		denied += u.denied
		peaks = append(peaks, fmt.Sprintf("%s at most on GPU %d", inMiB(u.peak), x.Index))
	}
	text := fmt.Sprintf("after %v, %s", time.Since(time.Unix(0, began)).Round(10*time.Millisecond), strings.Join(peaks, ", "))
	if denied > 0 {
		text += fmt.Sprintf(", %d denied", denied)
	}
	g.events.Write(event.Event{Kind: event.End, Text: text})
}

// noteDenied tells of memory that did not fit. The caller holds the account, so nothing is formatted here.
func (g *Guard) noteDenied(gpu int, size quota.Bytes, spill bool, u gpuAccount) {
	x := g.cfg.GPUs[gpu]
	g.tally.On(gpu).Denied.Add(1)
	g.events.NoteLater(event.Event{Kind: event.Denied, GPU: &event.GPU{Index: x.Index, UUID: x.UUID}}, func() string {
		text := fmt.Sprintf("%s asked for, %s of %s in use", inMiB(size), inMiB(u.used), inMiB(u.limit))
		if spill {
			text += fmt.Sprintf(", %s of %s spilled", inMiB(u.spilled), inMiB(u.spill))
		}
		return text
	})
}

// inMiB rounds up: what shows as 0 is nothing.
func inMiB(b quota.Bytes) string {
	n := b / quota.MiB
	if b%quota.MiB != 0 {
		n++
	}
	return fmt.Sprintf("%dMiB", uint64(n))
}

// noteLedgerChanges tells what is different in the container's record. All changes come through the ledger, whoever makes them.
func (g *Guard) noteLedgerChanges(records []ledger.Record) {
	for _, r := range records {
		if r.Nonce != g.cfg.Nonce {
			continue
		}
		was := g.lastRecord
		g.lastRecord = &r
		if was == nil {
			return
		}
		for _, e := range event.Changes(*was, r) {
			for _, x := range g.cfg.GPUs {
				if e.GPU != nil && e.GPU.UUID == x.UUID {
					e.GPU.Index = x.Index
				}
			}
			g.events.Write(e)
		}
	}
}
