// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"strings"
	"testing"
)

func FuzzFromSpec(f *testing.F) {
	for _, seed := range [][3]string{
		{"C=6 A_MEM_DEV=15", "", ""},
		{"C=1.5GiB A_VISIBLE_DEVICES=0,GPU-aaaab N=all N=void", "", ""},
		{"C=6 A_VISIBLE_DEVICES=1 N=0,2", "", ""},
		{"C=6 A_MEM_DEV=15 A_MEM_IDX=1 A_MEM_POD=6 A_MEM_UNIT=GiB N=1 CGPU_DISABLE=false", "", ""},
		{"C=6 A_SCHD_WEIGHT=64 A_HIGH_PRIO=1 A_CORE_PERCENTAGE=50", "cgpu.io/gpu-mem-container", "3"},
		{"C=6 A_HIGH_PRIO=1", "cgpu.io/priority", "best-effort"},
		{"C=6144MiB", "cgpu.io/gpu-visible-devices", "all"},
		{"C=6 A_MEM_DEV=15 CGPU_MEM_SPILL=4 CGPU_LIMITER=off", "", ""},
		{"C=6 CGPU_MEM_SPILL=1.5GiB", "cgpu.io/limiter", "on"},
		{"C=6 CGPU_LIMITER=0", "cgpu.io/gpu-mem-spill", "0"},
	} {
		f.Add(strings.Join(expand(seed[0]), "\xff"), seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, env, name, value string) {
		// \xff parts entries, so that values can hold anything else.
		q, err := FromSpec(strings.Split(env, "\xff"), map[string]string{name: value})
		if err != nil {
			checkMessage(t, err)
			if q != nil {
				t.Fatal("a quota and an error")
			}
			return
		}
		if q == nil {
			return
		}
		if q.Weight < 0 || q.Weight > MaxWeight || q.Percent < 0 || q.Percent > MaxPercent || q.Priority < PriorityBestEffort ||
			q.Priority > PriorityHigh {
			t.Fatalf("out of range: %+v", q)
		}
		if q.Memory.Fixed%MiB != 0 || (q.Memory.Fixed == 0) == (q.Memory.Den == 0) {
			t.Fatalf("memory: %+v", q.Memory)
		}
		if q.Spill%MiB != 0 || (q.RefuseSpill("x", "") == nil) != (q.Spill == 0) {
			t.Fatalf("spill: %+v", q)
		}
		if err := q.RefuseUnguarded(`enforcement = "preload"`, false); err != nil {
			checkMessage(t, err)
		} else if q.Spill != 0 || q.Percent != 0 || q.Priority != PriorityDefault || q.NoLimiter {
			t.Fatalf("not refused in preload mode: %+v", q)
		}
		grants, native, err := q.Resolve(node)
		if err != nil {
			checkMessage(t, err)
			return
		}
		if q.NeedsPlacement() != (len(grants) == 0) {
			t.Fatalf("placement: %v, grants %v", q.NeedsPlacement(), grants)
		}
		checkGrants(t, grants, native)
	})
}

// checkGrants: each GPU has a limit that it can hold, once, or is whole.
func checkGrants(t *testing.T, grants []Grant, native []int) {
	t.Helper()
	seen := map[int]bool{}
	for _, g := range grants {
		if g.Limit == 0 || g.Limit%MiB != 0 || g.Limit > node[g.Index].Memory || seen[g.Index] {
			t.Fatalf("grants %v", grants)
		}
		seen[g.Index] = true
	}
	for _, i := range native {
		if seen[i] {
			t.Fatalf("GPU %d sliced and whole", i)
		}
		seen[i] = true
	}
}

func FuzzLimit(f *testing.F) {
	f.Add(uint64(0), uint64(6), uint64(15), uint64(t4))
	f.Add(uint64(6*GiB), uint64(0), uint64(0), uint64(t4))
	f.Add(uint64(0), uint64(1<<64-1), uint64(1<<64-1), uint64(1<<64-1))
	f.Fuzz(func(t *testing.T, fixed, num, den, card uint64) {
		m := Memory{Fixed: Bytes(fixed), Num: num, Den: den}
		limit, err := m.Limit(Bytes(card))
		if err != nil {
			checkMessage(t, err)
			return
		}
		if limit == 0 || limit%MiB != 0 || uint64(limit) > card {
			t.Fatalf("%+v of %d: %d", m, card, limit)
		}
	})
}
