// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// spilling is a request for slices of a GiB with so much spill on each.
func spilling(id string, most quota.Bytes, spill ...quota.Bytes) Request {
	req := Request{Record: Record{ID: id, Nonce: id, LauncherPID: 1}, GPUs: twoGPUs, Card: preempt, MaxSpill: most}
	for i, s := range spill {
		req.Record.VGPUs = append(req.Record.VGPUs, VGPU{UUID: twoGPUs[i].UUID,
			Slice: quota.Slice{Limit: gib, Spill: s, Share: quota.Share{Weight: 1}}})
	}
	return req
}

func TestSpill(t *testing.T) {
	for _, c := range []struct {
		name    string
		req     Request
		free    quota.Bytes
		refused string // "" when admitted
	}{
		{"none where there is none", spilling("c", 0, 0), 0, ""},
		{"none where too much is promised", spilling("c", 2*gib, 0, 0), 0, ""},
		{"just fits", spilling("c", 10*gib, 4*gib), 0, ""},
		{"one byte too many", spilling("c", 10*gib, 4*gib+1), 4 * gib,
			"asked for 4294967297B of spill, but 4096MiB are free of the node's 10240MiB; ask for less (CGPU_MEM_SPILL, cgpu set --spill), or " +
				"raise max_spill in cgpu.toml"},
		{"each GPU counts", spilling("c", 10*gib, 2*gib, 3*gib), 4 * gib, "asked for 5120MiB of spill on 2 GPUs together, but 4096MiB are free"},
		{"max_spill lowered since", spilling("c", 5*gib, quota.MiB), 0, "but 0MiB are free of the node's 5120MiB"},
		{"switched off", spilling("c", 0, quota.MiB), 0, "asked for 1MiB of spill, but this node allows none; do without"},
		{"more than there are numbers", spilling("c", 10*gib, math.MaxUint64, math.MaxUint64), 4 * gib, "are free of"},
		{"memory comes first", func() Request { r := spilling("c", gib, 8*gib); r.Record.VGPUs[0].Limit = 16 * gib; return r }(), 0,
			"GPU 0 (GPU-a): asked for 16384MiB"},
	} {
		l := open(t)
		reserve(t, l, spilling("a", 16*gib, gib, 2*gib))
		reserve(t, l, spilling("b", 16*gib, 3*gib))
		got, err := l.Reserve(c.req)
		if c.refused == "" {
			if err != nil || got.VGPUs[0].Spill != c.req.Record.VGPUs[0].Spill {
				t.Errorf("%s: got %+v, %v", c.name, got, err)
			}
			continue
		}
		var refusal *Refusal
		if !errors.As(err, &refusal) || !strings.Contains(err.Error(), c.refused) || refusal.Time {
			t.Errorf("%s: got %v, want %q", c.name, err, c.refused)
			continue
		}
		if refusal.Spill != (refusal.GPU.UUID == "") || refusal.Spill && refusal.Free != c.free {
			t.Errorf("%s: %+v", c.name, refusal)
		}
	}
}

func TestSpillIsPlaced(t *testing.T) {
	l := open(t)
	req := spilling("a", 4*gib)
	req.Place = &Placement{Memory: quota.Memory{Fixed: gib}, Count: 2, Slice: VGPU{Slice: quota.Slice{Spill: 2 * gib}}}
	if r := reserve(t, l, req); len(r.VGPUs) != 2 || r.VGPUs[0].Spill != 2*gib || r.VGPUs[1].Spill != 2*gib {
		t.Errorf("placed %+v", r.VGPUs)
	}
	req.Record.ID, req.Place.Count, req.Place.Slice.Spill = "b", 1, quota.MiB
	var refusal *Refusal
	if _, err := l.Reserve(req); !errors.As(err, &refusal) || !refusal.Spill {
		t.Errorf("no spill left: %v", err)
	}
	// The dead give theirs back, and a restart does not count its own old amount twice.
	must(t, l.Update("a", func(r *Record) error { r.LauncherPID = 100; return nil }))
	reserve(t, l, req)
	req.Place.Slice.Spill = 4 * gib
	reserve(t, l, req)
}

func TestChangeSpill(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  ChangeRequest
		a, b    quota.Bytes // spill of the container's slices then
		refused string
	}{
		{"more", ChangeRequest{Only: []string{"GPU-a"}, Settings: Settings{Spill: new(2 * gib)}}, 2 * gib, 2 * gib, ""},
		{"all that is free", ChangeRequest{Settings: Settings{Spill: new(7 * gib / 2)}}, 7 * gib / 2, 7 * gib / 2, ""},
		{"too much", ChangeRequest{Settings: Settings{Spill: new(4 * gib)}}, 0, 0,
			"asked for 8192MiB of spill on 2 GPUs together, but 7168MiB are free of the node's 10240MiB; ask for less"},
		{"none", ChangeRequest{Settings: Settings{Spill: new(quota.Bytes(0))}}, 0, 0, ""},
		{"less where too much is promised", ChangeRequest{Settings: Settings{Spill: new(gib)}, MaxSpill: gib}, gib, gib, ""},
		{"no more where too much is promised", ChangeRequest{Only: []string{"GPU-b"}, Settings: Settings{Spill: new(2 * gib)}, MaxSpill: gib},
			gib, 2 * gib, ""},
		{"more where too much is promised", ChangeRequest{Only: []string{"GPU-b"}, Settings: Settings{Spill: new(2*gib + quota.MiB)},
			MaxSpill: gib}, 0, 0, "but 0MiB are free of the node's 1024MiB"},
		{"one up, the other down", ChangeRequest{Settings: Settings{Spill: new(3 * gib / 2)}, MaxSpill: gib}, 3 * gib / 2, 3 * gib / 2, ""},
		{"with too much memory", ChangeRequest{Settings: Settings{Spill: new(3 * gib), Limit: new(16 * gib)}}, 0, 0,
			"GPU 0 (GPU-a): asked for 16384MiB"},
	} {
		l := open(t)
		reserve(t, l, spilling("a", 16*gib, gib, 2*gib))
		reserve(t, l, spilling("b", 16*gib, 3*gib))
		c.change.GPUs, c.change.Card = twoGPUs, preempt
		if c.change.MaxSpill == 0 {
			c.change.MaxSpill = 10 * gib
		}
		r, err := l.Change("a", c.change)
		if c.refused != "" {
			var refusal *Refusal
			if !errors.As(err, &refusal) || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%s: got %v, want %q", c.name, err, c.refused)
			}
			continue
		}
		if err != nil || r.VGPUs[0].Spill != c.a || r.VGPUs[1].Spill != c.b {
			t.Errorf("%s: got %+v, %v", c.name, r.VGPUs, err)
		}
	}
}
