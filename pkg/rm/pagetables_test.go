// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"math"
	"testing"
)

// TestPageTables compares with what was measured on an H200 (docs/measurements.md): four ranges of 1 TiB took 8225 MiB.
func TestPageTables(t *testing.T) {
	const mib, gib, tib = 1 << 20, 1 << 30, 1 << 40
	for _, c := range []struct {
		size uint64
		any  bool
		mib  float64 // ± 0.05
	}{
		{tib, false, 2056.04},
		{4 * tib, false, 8224.04},
		{8 * tib, false, 16448.15},
		{64 * gib, false, 128.5},
		{gib, false, 2.03},
		{tib, true, 2184.04},
		{2 * mib, false, 0.02},
		{4096, false, 0.02},
		{1, false, 0.02},
		{0, false, 0},
	} {
		if got := float64(PageTables(c.size, c.any)) / mib; math.Abs(got-c.mib) > 0.05 {
			t.Errorf("%d, any %v: %.3f MiB, want %.2f", c.size, c.any, got, c.mib)
		}
	}
	if got := float64(4*PagePool(tib, false)) / mib; math.Abs(got-8225) > 1 {
		t.Errorf("four of 1 TiB: %.1f MiB, measured were 8225", got)
	}
	for _, c := range []struct {
		length, page uint64
		want         uint64
	}{
		{0, 4096, 0},
		{4096, 4096, 2 * 4096},            // a table and a directory
		{gib, 4096, 512*4096 + 2*4096},    // 1/512
		{tib, 64 << 10, 128*mib + 8*mib},  // 1/8192 and 1/131072
		{141 * gib, 2 << 20, 1128 * 1024}, // cudaMalloc of a whole card
		{64 * gib, 4096, 128*mib + mib/2}, // pinned host memory
		{1, 64 << 10, 4096},               // no less than a page
		{4 * tib, 64 << 10, 512*mib + 32*mib},
	} {
		if got := UVMTables(c.length, c.page); got != c.want {
			t.Errorf("UVM: %d in pages of %d: %d, want %d", c.length, c.page, got, c.want)
		}
	}
}

// Whatever size a container names: no less than for a smaller one, and no overflow.
func FuzzPageTables(f *testing.F) {
	f.Add(uint64(1<<21), uint64(4096))
	f.Add(^uint64(0), uint64(2<<20))
	f.Fuzz(func(t *testing.T, size, page uint64) {
		if size == 0 {
			return
		}
		if a, b := PageTables(size-1, false), PageTables(size, false); b < a || PageTables(size, true) < b || PagePool(size, false) < b {
			t.Errorf("%d: %d after %d", size, b, a)
		}
		if PageTables(size, false) < size>>9 || UVMTables(size, 4096) < size>>9 || UVMTables(size, 64<<10) < size>>13 {
			t.Errorf("%d: too little", size)
		}
		if UVMTables(size, page) > UVMTables(size, 4096) {
			t.Errorf("%d in pages of %d: more than in small ones", size, page)
		}
	})
}

func TestVirtualSize(t *testing.T) {
	const small, big, huge = 1 << MemoryAttrPageShift, 2 << MemoryAttrPageShift, 3 << MemoryAttrPageShift
	for _, c := range []struct {
		size        uint64
		attr, attr2 uint32
		granted     uint64
		any, ok     bool
	}{
		{1, small, 0, 4096, false, true},
		{1, 0, 0, 128 << 10, true, true},
		{1, big, 0, 128 << 10, false, true},
		{1, huge, 0, 2 << 20, false, true},
		{1, huge, 1 << 20, 2 << 20, false, true},
		{1, huge, 2 << 20, 512 << 20, false, true},
		{1, huge, 3 << 20, 256 << 30, false, true},
		{^uint64(0), small, 0, ^uint64(0), false, false},
		{^uint64(0) - 1<<30, huge, 3 << 20, ^uint64(0), false, false},
	} {
		if granted, any, ok := VirtualSize(c.size, c.attr, c.attr2); granted != c.granted || any != c.any || ok != c.ok {
			t.Errorf("%+v: %d, %v, %v", c, granted, any, ok)
		}
	}
}

// TestDMAForms: both calls grew, and the driver takes its own size only.
func TestDMAForms(t *testing.T) {
	for version, want := range map[string][2]int{"515.43.04": {56, 40}, "545.29.06": {56, 40}, "550.40.07": {56, 48}, "575.51.02": {56, 48},
		"580.65.06": {64, 48}, "595.45.04": {64, 48}} {
		a, err := ForDriver(version, false)
		if err != nil {
			t.Fatal(err)
		}
		for size := range 100 {
			form, ok := a.MapDMA(size)
			if off, known := a.StatusOff(EscMapDMA, size); ok != (size == want[0]) || ok && (!known || off != form.Status) {
				t.Errorf("%s: mapping of %d bytes: %+v, %v", version, size, form, ok)
			}
			form, ok = a.UnmapDMA(size)
			if off, known := a.StatusOff(EscUnmapDMA, size); ok != (size == want[1]) || ok && (!known || off != form.Status) {
				t.Errorf("%s: unmapping of %d bytes: %+v, %v", version, size, form, ok)
			}
		}
	}
}
