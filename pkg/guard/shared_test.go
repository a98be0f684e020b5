// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestSharedState: calls that would change, or show, what containers share are answered and not executed, with nothing written but the
// status (and zeros); those that are made harmless are, on the guard's copy only.
func TestSharedState(t *testing.T) {
	thermal := func(size, count, opcode uint32) []byte {
		p := make([]byte, 1432)
		rm.PutU32(p, rm.ThermalSizeOf, size)
		rm.PutU32(p, rm.ThermalCount, count)
		for i := range rm.ThermalMax {
			rm.PutU32(p, rm.ThermalList+i*rm.ThermalEntry+rm.ThermalOpcode, 0x1500)
		}
		rm.PutU32(p, rm.ThermalList+rm.ThermalEntry+rm.ThermalOpcode, opcode)
		return p
	}
	ones := func(n int) []byte {
		p := make([]byte, n)
		for i := range p {
			p[i] = 1
		}
		return p
	}
	for _, x := range []struct {
		name   string
		cmd    uint32
		p      []byte
		status uint32
		asked  bool
		seen   byte // what the driver saw at 0
		first  byte // what the task has at 0 afterwards
	}{
		{"clock limit", 0x801909, ones(1), rm.StatusOK, false, 0, 1},
		{"compute mode", 0x20800145, nil, rm.StatusOK, false, 0, 0},
		{"compute mode, released", 0x20800146, nil, rm.StatusOK, false, 0, 0},
		{"ticks", 0x20800407, ones(1), rm.StatusOK, false, 0, 1},
		{"interrupts", 0x20801702, ones(4), rm.StatusOK, false, 0, 1},
		{"boost, as CUDA asks", 0x2080200a, []byte{0x12, 0, 0, 0, 255, 255, 255, 255}, rm.StatusOK, true, 0x12, 0x12},
		{"boost, an unknown command", 0x2080200a, []byte{0x13, 0, 0, 0, 255, 255, 255, 255}, rm.StatusInvalidArgument, false, 0, 0x13},
		{"boost, an unknown flag", 0x2080200a, ones(8), rm.StatusInvalidArgument, false, 0, 1},
		{"boost, another size", 0x2080200a, ones(9), rm.StatusInvalidParamStruct, false, 0, 1},
		{"watchdog, released", 0x2080220c, nil, rm.StatusOK, false, 0, 0},
		{"watchdog", 0x20802210, nil, rm.StatusOK, false, 0, 0},
		{"clocks at base", 0x2080a06f, ones(12), rm.StatusOK, false, 0, 1},
		{"what clocks are at", 0x2080a06e, ones(12), rm.StatusOK, true, 1, 1},
		{"MMU debug mode", 0x83de0307, ones(4), rm.StatusOK, false, 0, 1},
		{"clear colour", 0x90960101, ones(40), rm.StatusInsufficientResources, false, 0, 1},
		{"others' clear colours", 0x90960107, ones(56), rm.StatusNotSupported, false, 0, 1},
		{"InfoROM", 0x208f1105, ones(8), rm.StatusNotSupported, false, 0, 1},
		{"encoders of all", 0x2080016d, ones(12), rm.StatusOK, false, 0, 0},
		{"captures of all", 0x2080017b, ones(12), rm.StatusOK, false, 0, 0},
		{"stop when idle", 0xa06f0112, make([]byte, 1), rm.StatusOK, true, 1, 0},
		{"stop", 0xa06f0112, ones(1), rm.StatusOK, true, 1, 1},
		{"sensors", 0x20800513, thermal(rm.ThermalEntry, 32, 0x100), rm.StatusOK, true, 0, 0},
		{"an unknown instruction", 0x20800513, thermal(rm.ThermalEntry, 2, 0x2000), rm.StatusNotSupported, false, 0, 0},
		{"an unknown one behind the end", 0x20800513, thermal(rm.ThermalEntry, 1, 0x2000), rm.StatusOK, true, 0, 0},
		{"too many", 0x20800513, thermal(rm.ThermalEntry, 33, 0x100), rm.StatusNotSupported, false, 0, 0},
		{"another layout", 0x20800513, thermal(40, 2, 0x100), rm.StatusNotSupported, false, 0, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			var seen byte
			d := answering(0, func(call *rm.Call) {
				if len(call.Blocks[0].Data) > 0 {
					seen = call.Blocks[0].Data[0]
				}
			})
			g := withClient(newFakeGuard(t, d))
			o := fakeControlCall(fakeDevice, x.cmd, x.p)
			rm.PutU32(o, rm.ControlStatus, 0xdead)
			rep := newFakeCall(t, g, fakeControl).escape(rm.EscControl, o, x.p)
			if s := rm.U32(o, rm.ControlStatus); rep != replyDone || s != x.status || (len(d.calls) > 0) != x.asked || seen != x.seen {
				t.Errorf("%v, status %s, %d calls, the driver saw %d", rep, rm.StatusName(s), len(d.calls), seen)
			}
			if len(x.p) > 0 && x.p[0] != x.first {
				t.Errorf("the task reads %d, want %d", x.p[0], x.first)
			}
		})
	}
}

// TestPolledData: what firmware measures for all is not asked for by an allocation, but by a control, which costs (TestSlowCalls).
func TestPolledData(t *testing.T) {
	var mask uint64
	d := answering(0, func(call *rm.Call) { mask = rm.U64(call.Blocks[0].Data, 0) })
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	p := make([]byte, 8)
	rm.PutU64(p, 0, 0x7f)
	o := fakeAlloc(fakeDevice, 0x77, 0xde, p)
	f.escape(rm.EscAlloc, o, p)
	if s := rm.U32(o, 40); s != rm.StatusOK || mask != 0 || rm.U64(p, 0) != 0x7f || len(d.calls) != 1 {
		t.Errorf("alloc: %s, the driver saw %#x, the task reads %#x", rm.StatusName(s), mask, rm.U64(p, 0))
	}
	o = fakeControlCall(0x77, 0xde0001, p)
	if rep := f.escape(rm.EscControl, o, p); rep != replyDone || mask != 0x7f || len(d.calls) != 2 {
		t.Errorf("control: %v, the driver saw %#x", rep, mask)
	}
	for version, want := range map[string]bool{"580.142": false, "595.45.04": true} { // its end walks all objects there
		abi, err := rm.ForDriver(version, false)
		if err != nil {
			t.Fatal(err)
		}
		g.abi, g.slowBucket = abi, bucket{perSecond: 1e-9, burst: 3}
		f.escape(rm.EscAlloc, fakeAlloc(fakeDevice, 0x78, 0xde, p), p)
		if paid := !g.slowBucket.last.IsZero() && g.slowBucket.tokens < 3; paid != want {
			t.Errorf("%s: paid: %v", version, paid)
		}
	}
}
