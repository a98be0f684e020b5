// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestSparse: page tables of sparse UVM mappings are charged until the mapping or its address space ends.
func TestSparse(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	c, _ := newFakeUVMCall(t, g)
	var uuid gpuUUID
	uuid[15] = 1 // GPU-…-000000000001
	sparse := func(base, length uint64) (uint32, []byte) {
		d.calls = nil
		form, _ := g.abi.UVM(rm.UVMMapSparse)
		o := make([]byte, form.Size)
		rm.PutU64(o, form.Base, base)
		rm.PutU64(o, form.Length, length)
		copy(o[uvmSparseGPU:], uuid[:])
		c.do(rm.UVMMapSparse, o)
		return rm.U32(o, form.Status), o
	}
	tables := func(length uint64) quota.Bytes { return quota.Bytes(rm.UVMTables(length, 64<<10)) }
	if s, _ := sparse(1<<40, 1<<40); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	wantUsage(t, g.account, 0, 8*quota.MiB+tables(1<<40))
	for _, length := range []uint64{1<<40 + 1, ^uint64(0)} {
		if s, _ := sparse(1<<41, length); s != rm.StatusInvalidLimit || len(d.calls) != 0 {
			t.Errorf("%#x: %s", length, rm.StatusName(s))
		}
	}
	for base := uint64(2 << 40); ; base += 1 << 40 {
		if s, _ := sparse(base, 1<<40); s != rm.StatusOK {
			if s != rm.StatusNoMemory || len(d.calls) != 0 {
				t.Errorf("full: %s", rm.StatusName(s))
			}
			break
		}
	}
	if used := g.account.usage(0).used; used > testLimit+tableSlack {
		t.Errorf("%v of %v", used, testLimit)
	}
	full := g.account.usage(0).used
	o, _ := uvmCall(g, rm.UVMFree, 2<<40, 1<<40, 0)
	c.do(rm.UVMFree, o)
	wantUsage(t, g.account, 0, full-tables(1<<40))
	d.answer = func(_ Target, call *rm.Call) syscall.Errno {
		if form, ok := g.abi.UVM(call.Cmd); ok && call.Cmd == rm.UVMMapSparse {
			rm.PutU32(call.Outer, form.Status, rm.StatusInvalidAddress)
		}
		return 0
	}
	sparse(2<<40, 1<<40)
	wantUsage(t, g.account, 0, full-tables(1<<40)) // refused, and nothing is charged
	g.endUVM(c.file)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	if g.account.hasZombies() || g.account.zombies != 0 {
		t.Error("zombies")
	}
}

// TestMapTables: mappings of host memory are charged their page tables, those of device memory from the second on.
func TestMapTables(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	c, ctl := newFakeUVMCall(t, g)
	const host, length = 0x5c0000ff, 8 << 20
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	newFakeCall(t, g, fakeControl).taskMemory(host, length)
	do := func(memory uint32, base uint64) {
		t.Helper()
		o, form := uvmCall(g, rm.UVMMapExternal, base, length, ctl)
		rm.PutU32(o, form.Object, memory)
		if c.do(rm.UVMMapExternal, o); rm.U32(o, form.Status) != rm.StatusOK {
			t.Fatal(rm.StatusName(rm.U32(o, form.Status)))
		}
	}
	big, small := quota.Bytes(rm.UVMTables(length, 64<<10)), quota.Bytes(rm.UVMTables(length, 4096))
	do(fakeMemory, 1<<32)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	do(fakeMemory, 2<<32)
	wantUsage(t, g.account, 0, 8*quota.MiB+big)
	do(host, 3<<32)
	wantUsage(t, g.account, 0, 8*quota.MiB+big+small)
	do(host, 3<<32) // in its own place
	wantUsage(t, g.account, 0, 8*quota.MiB+big+small)
	o, _ := uvmCall(g, rm.UVMUnmapExternal, 3<<32, length, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 8*quota.MiB+big)
	g.endUVM(c.file)
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

// TestMapPage: UVM maps what is not aligned in smaller pages, whatever the memory's are.
func TestMapPage(t *testing.T) {
	const big = uint64(pageHuge)
	for _, x := range []struct {
		page                 quota.Bytes
		base, length, offset uint64
		want                 quota.Bytes
	}{
		{pageHuge, 1 << 32, 4 * big, 0, pageHuge}, {pageHuge, 1<<32 | 1<<16, 4 * big, 0, pageSmall},
		{pageHuge, 1<<32 | 4096, 4 * big, 0, pageHost},
		{pageHuge, 1 << 32, 4 * big, 4096, pageHost}, {pageSmall, 1<<32 | 4096, big, 0, pageHost}, {0, 1 << 32, big, 0, 0},
		{0, 1<<32 | 1<<16, big, 0, 0}, {0, 1<<32 | 4096, big, 0, pageHost}, {0, 1 << 32, 1 << 16, 0, pageSmall},
		{pageHost, 1 << 32, big, 0, pageHost},
	} {
		if got := mapPageAt(x.page, x.base, x.length, x.offset); got != x.want {
			t.Errorf("%+v: %v", x, got)
		}
	}
}
