// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"math/rand/v2"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// mapDMA is RM_MAP_MEMORY_DMA of the driver that tests have; address is where the driver puts it.
func mapDMA(client, mapper, memory uint32, offset, length uint64) []byte {
	o := make([]byte, 64)
	rm.PutU32(o, rm.DMAClient, client)
	rm.PutU32(o, rm.DMADevice, fakeDevice)
	rm.PutU32(o, rm.DMAMapper, mapper)
	rm.PutU32(o, rm.DMAMemory, memory)
	rm.PutU64(o, rm.DMAMapOffset, offset)
	rm.PutU64(o, rm.DMAMapLength, length)
	return o
}

func unmapDMA(mapper uint32, address, length uint64) []byte {
	o := make([]byte, 48)
	rm.PutU32(o, rm.DMAClient, fakeClient)
	rm.PutU32(o, rm.DMADevice, fakeDevice)
	rm.PutU32(o, rm.DMAMapper, mapper)
	rm.PutU64(o, 24, address)
	rm.PutU64(o, 32, length)
	return o
}

// dmaGuard has a lazy range, and memory of 8 MiB that the driver maps at dmaBase.
const dmaBase = 1 << 40

func dmaGuard(t *testing.T) (*Guard, *fakeDriver, *fakeCall) {
	d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscMapDMA {
			rm.PutU64(call.Outer, 48, dmaBase)
		}
		return 0
	}}
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxHostMemory.Bytes = 64 * quota.MiB
	g.account.addObject(fakeClient, object{handle: fakeRange, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU},
		noGPU, 0, 0)
	o := g.account.clients[fakeClient].objects[fakeMemory]
	o.size = 8 * quota.MiB
	return g, d, newFakeCall(t, g, fakeControl)
}

// TestMapDMALength: what is longer than its memory never reaches the driver, which would take page tables for it.
func TestMapDMALength(t *testing.T) {
	for _, c := range []struct {
		name                   string
		client, mapper, memory uint32
		offset, length         uint64
		status                 uint32
	}{
		{"all of it", fakeClient, fakeRange, fakeMemory, 0, 8 << 20, 0},
		{"a part", fakeClient, fakeRange, fakeMemory, 4 << 20, 4 << 20, 0},
		{"a byte more", fakeClient, fakeRange, fakeMemory, 0, 8<<20 + 1, rm.StatusInvalidLimit},
		{"beyond the end", fakeClient, fakeRange, fakeMemory, 8 << 20, 4096, rm.StatusInvalidLimit},
		{"1 TiB", fakeClient, fakeRange, fakeMemory, 0, 1 << 40, rm.StatusInvalidLimit},
		{"wraps around", fakeClient, fakeRange, fakeMemory, 4096, ^uint64(0) - 4095, rm.StatusInvalidLimit},
		{"of the task's own making", fakeClient, fakeRange, 0x77, 0, 4 << 20, 0},
		{"of the task's own making, too long", fakeClient, fakeRange, 0x77, 0, 64<<30 + 1, rm.StatusInvalidLimit},
		{"that is not there", fakeClient, fakeRange, 0x78, 0, 4 << 20, rm.StatusObjectNotFound},
		{"into nothing", fakeClient, 0x99, fakeMemory, 0, 4096, rm.StatusInvalidObjectHandle},
		{"another container's client", 0xc1d00000, fakeRange, fakeMemory, 0, 4096, rm.StatusInvalidClient},
	} {
		g, d, f := dmaGuard(t)
		g.slowBucket = slowCalls()
		f.taskMemory(0x77, 4*quota.MiB)
		o := mapDMA(c.client, c.mapper, c.memory, c.offset, c.length)
		f.escape(rm.EscMapDMA, o)
		if s := rm.U32(o, 56); s != c.status || (len(d.calls) == 0) != (c.status != 0) {
			t.Errorf("%s: %s, %d driver calls", c.name, rm.StatusName(s), len(d.calls))
		}
		want := 8 * quota.MiB
		if c.status == 0 {
			want += quota.Bytes(rm.PageTables(c.length, false))
		}
		wantUsage(t, g.account, 0, want)
	}
	_, d, f := dmaGuard(t)
	if rep := f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, 4096)[:56]); rep.errno != unix.EINVAL || len(d.calls) != 0 {
		t.Errorf("another driver's size: %+v", rep)
	}
}

// TestMapDMAEnds: the tables' charge ends with the mapping, the memory, the range, the device or the client, and with a refusal.
func TestMapDMAEnds(t *testing.T) {
	const length = 4 << 20
	tables := quota.Bytes(rm.PageTables(length, false))
	for name, end := range map[string]func(f *fakeCall) quota.Bytes{
		"unmapped": func(f *fakeCall) quota.Bytes {
			f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase, 0))
			return 8 * quota.MiB
		},
		"elsewhere": func(f *fakeCall) quota.Bytes {
			f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase+4096, 0))
			return 8*quota.MiB + tables
		},
		"memory freed": func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeMemory)); return 0 },
		"range freed":  func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeRange)); return 8 * quota.MiB },
		"device freed": func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeDevice)); return 0 },
		"client freed": func(f *fakeCall) quota.Bytes { f.escape(rm.EscFree, fakeFree(fakeClient)); return 0 },
		"taken back":   func(f *fakeCall) quota.Bytes { f.undo(); return 8 * quota.MiB },
	} {
		g, _, f := dmaGuard(t)
		f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
		wantUsage(t, g.account, 0, 8*quota.MiB+tables)
		want := end(f)
		if used := g.account.usage(0).used; used != want {
			t.Errorf("%s: %v charged, want %v", name, used, want)
		}
		if n := g.account.dmaMaps; (n == 0) == (name == "elsewhere") {
			t.Errorf("%s: %d mappings remembered", name, n)
		}
	}
	g, d, f := dmaGuard(t)
	d.answer = func(_ Target, call *rm.Call) syscall.Errno { rm.PutU32(call.Outer, 56, rm.StatusNoMemory); return 0 }
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
	wantUsage(t, g.account, 0, 8*quota.MiB)
	// Memory that the task made ends the mapping as well.
	g, _, f = dmaGuard(t)
	f.taskMemory(0x77, length)
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, 0x77, 0, length))
	wantUsage(t, g.account, 0, 8*quota.MiB+tables)
	f.escape(rm.EscFree, fakeFree(0x77))
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

// TestMapDMACharged: a range that was charged as a whole has its tables.
func TestMapDMACharged(t *testing.T) {
	g, _, f := dmaGuard(t)
	g.account.addObject(fakeClient, object{handle: fakeRange + 1, parent: fakeDevice, kind: rm.ClassVirtual, gpu: noGPU}, 0, 0, 3*quota.MiB)
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange+1, fakeMemory, 0, 4<<20))
	wantUsage(t, g.account, 0, 11*quota.MiB)
	if g.account.dmaMaps != 1 {
		t.Error("the mapping is not counted")
	}
}

// TestUnmapDMAParts: pieces of a mapping end one by one, whatever their order, and the last takes the rest of the charge along.
func TestUnmapDMAParts(t *testing.T) {
	const length, piece = 8 << 20, 1 << 20
	for seed := range uint64(50) {
		g, _, f := dmaGuard(t)
		f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
		before := g.account.usage(0).used
		order := rand.New(rand.NewPCG(seed, 0)).Perm(length / piece)
		for _, i := range order {
			f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase+uint64(i)*piece, piece))
			if now := g.account.usage(0).used; now > before {
				t.Fatalf("seed %d: charged %v after %v", seed, now, before)
			} else {
				before = now
			}
		}
		wantUsage(t, g.account, 0, 8*quota.MiB)
		if g.account.dmaMaps != 0 {
			t.Errorf("seed %d: %d mappings left", seed, g.account.dmaMaps)
		}
	}
	// One that covers several at once, and a piece of nothing.
	g, _, f := dmaGuard(t)
	f.escape(rm.EscMapDMA, mapDMA(fakeClient, fakeRange, fakeMemory, 0, length))
	f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase+2*piece, piece))
	f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, 0, 4096))
	f.escape(rm.EscUnmapDMA, unmapDMA(fakeRange, dmaBase-piece, 20*piece))
	wantUsage(t, g.account, 0, 8*quota.MiB)
}

func TestMapDMACount(t *testing.T) {
	g, d, f := dmaGuard(t)
	g.account.dmaMaps = maxDMAMaps
	o := mapDMA(fakeClient, fakeRange, fakeMemory, 0, 4096)
	if f.escape(rm.EscMapDMA, o); rm.U32(o, 56) != rm.StatusInsufficientResources || len(d.calls) != 0 {
		t.Errorf("one too many: %s", rm.StatusName(rm.U32(o, 56)))
	}
}
