// SPDX-License-Identifier: Apache-2.0

package event

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestChanges(t *testing.T) {
	was := ledger.Record{ID: "c", Nonce: "n", Name: "web", VGPUs: []ledger.VGPU{
		{UUID: "GPU-0", Slice: quota.Slice{Limit: 6 * quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}},
		{UUID: "GPU-1", Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1, Percent: 30}}}}}
	change := func(f func(*ledger.Record)) ledger.Record {
		r := was
		r.VGPUs = append([]ledger.VGPU(nil), was.VGPUs...)
		f(&r)
		return r
	}
	about := func(kind Kind, uuid, text string) Event {
		e := Event{Kind: kind, Container: "c", Nonce: "n", Name: "web", Text: text}
		if uuid != "" {
			e.GPU = &GPU{UUID: uuid}
		}
		return e
	}
	for what, tt := range map[string]struct {
		from, to ledger.Record
		want     []Event
	}{
		"nothing":     {was, was, nil},
		"the guard's": {was, change(func(r *ledger.Record) { r.InitPID = 7 }), nil},
		"pause":       {was, change(func(r *ledger.Record) { r.Paused = true }), []Event{about(Paused, "", "all GPU work stops")}},
		"resume":      {change(func(r *ledger.Record) { r.Paused = true }), was, []Event{about(Resumed, "", "GPU work goes on")}},
		"threads":     {was, change(func(r *ledger.Record) { r.Threads = 30 }), []Event{about(Set, "", "threads of new programs all → 30%")}},
		"memory, weight": {was, change(func(r *ledger.Record) { r.VGPUs[0].Limit, r.VGPUs[0].Weight = 8*quota.GiB, 3 }),
			[]Event{about(Set, "GPU-0", "memory 6144MiB → 8192MiB, weight 1 → 3")}},
		"two GPUs": {was, change(func(r *ledger.Record) {
			r.VGPUs[0].Priority, r.VGPUs[1].Percent, r.VGPUs[1].Spill = quota.PriorityHigh, 0, quota.MiB
		}), []Event{about(Set, "GPU-0", "priority default → high"), about(Set, "GPU-1", "spill 0MiB → 1MiB, percent 30 → none")}},
	} {
		if diff := cmp.Diff(tt.want, Changes(tt.from, tt.to)); diff != "" {
			t.Errorf("%s:\n%s", what, diff)
		}
	}
}
