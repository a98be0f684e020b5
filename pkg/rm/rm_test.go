// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"strings"
	"testing"
)

func TestParseVersion(t *testing.T) {
	for s, want := range map[string]Version{"580.159.04": {580, 159, 4}, "580.142": {580, 142, 0}, "515.43.04": {515, 43, 4},
		"595.45.04": {595, 45, 4}} {
		v, err := ParseVersion(s)
		if err != nil || v != want {
			t.Errorf("ParseVersion(%q) = %v, %v", s, v, err)
		}
		if v.String() != s {
			t.Errorf("%v.String() = %q, want %q", want, v.String(), s)
		}
	}
	for _, s := range []string{"", "580", "580.", ".1", "580.1.2.3", "580.x", "580.-1", "580.1 ", "99999.1", "580.12345.1"} {
		if v, err := ParseVersion(s); err == nil {
			t.Errorf("ParseVersion(%q) = %v", s, v)
		}
	}
	if v := (Version{580, 95, 5}); v.Compare(Version{580, 126, 9}) >= 0 || v.Compare(v) != 0 || v.Compare(Version{575, 999, 0}) <= 0 {
		t.Error("Compare")
	}
}

func TestForDriver(t *testing.T) {
	for _, c := range []struct {
		version string
		allow   bool
		branch  int // 0: an error
		guessed bool
	}{
		{"580.159.04", false, 580, false},
		{"515.43.04", false, 515, false},
		{"600.43.02", false, 0, false},
		{"600.43.02", true, 595, true},
		{"610.43.02", false, 0, false},
		{"610.43.02", true, 0, false}, // the guard would look for a channel's memory in the wrong place
		{"615.71.09", true, 0, false},
		{"540.10.1", false, 0, false}, // between known branches is unknown too
		{"540.10.1", true, 535, true},
		{"470.256.02", true, 0, false},
		{"garbage", true, 0, false},
	} {
		a, err := ForDriver(c.version, c.allow)
		if (err == nil) != (c.branch != 0) {
			t.Errorf("ForDriver(%s, %v): %v", c.version, c.allow, err)
			continue
		}
		if err == nil && (a.branch != c.branch || a.Guessed() != c.guessed) {
			t.Errorf("ForDriver(%s, %v): branch %d, guessed %v", c.version, c.allow, a.branch, a.Guessed())
		}
	}
	_, err := ForDriver("600.43.02", false)
	for _, part := range []string{"600.43.02", "580", "595", "allow_unknown_driver"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not name %s", err, part)
		}
	}
}

// A layout that changed inside a branch.
func TestInsideBranch(t *testing.T) {
	for v, want := range map[string]int{"535.54.03": 304, "535.86.05": 360, "535.288.01": 360, "530.41.03": 304, "565.77": 360,
		"570.86.15": 368, "580.142": 368} {
		a, err := ForDriver(v, false)
		if err != nil {
			t.Fatal(err)
		}
		if c, _ := a.Class(0xc86f); c.ParamsSize != want {
			t.Errorf("%s: channel parameters of %d bytes, want %d", v, c.ParamsSize, want)
		}
	}
	a, _ := ForDriver("540.1.0", true)
	if c, _ := a.Class(0xc86f); c.ParamsSize != 360 {
		t.Errorf("a guess takes the end of the lower branch: %d bytes", c.ParamsSize)
	}
}

func TestRMShaped(t *testing.T) {
	for _, c := range []struct {
		cmd  uint32
		want bool
		what string
	}{
		{0xC030462B, true, "NVOS64"},
		{0xC020462B, true, "NVOS21"},
		{0xC028462B, true, "NVOS64 before 535"},
		{0xC02C462B, false, "RM_ALLOC of a size that no driver has"},
		{0x0030002B, true, "any type and direction"},
		{0xC020462A, true, "RM_CONTROL"},
		{0x8020FF2A, true, "RM_CONTROL, other type"},
		{0xC021462A, false, "RM_CONTROL, one byte more"},
		{0x5401, false, "TCGETS"},
		{0x5421, false, "FIONBIO"},
		{0x5427, false, "TIOCSBRK: the number of RM_ALLOC_MEMORY without a size"},
		{0x5429, false, "TIOCGSID: the number of RM_FREE without a size"},
		{33, false, "UVM_MAP_EXTERNAL_ALLOCATION"},
		{34, false, "UVM_FREE"},
		{66, false, "UVM_UNMAP_EXTERNAL"},
		{78, false, "UVM_ALLOC_DEVICE_P2P"},
		{0xC038464E, true, "RM_MAP_MEMORY"},
		{0xC020464F, true, "RM_UNMAP_MEMORY"},
		{0xC028465E, true, "RM_UPDATE_DEVICE_MAPPING_INFO"},
		{0xC030465E, false, "RM_UPDATE_DEVICE_MAPPING_INFO of another size"},
		{0xC04846D2, true, "CHECK_VERSION_STR"},
		{0xC04946D2, false, "CHECK_VERSION_STR of another size"},
		{0xC01046D3, true, "XFER"},
		{0xC01146D3, false, "XFER of another size"},
		{72<<16 | 0xC8, true, "one card"},
		{32*72<<16 | 0xC8, true, "32 cards"},
		{100<<16 | 0xC8, true, "no multiple; accepted before 595"},
		{71<<16 | 0xC8, false, "less than a card"},
		{4<<16 | 0xD4, true, "one GPU"},
		{128<<16 | 0xD4, true, "32 GPUs"},
		{5<<16 | 0xD4, false, "no multiple"},
		{0xD4, false, "no GPU"},
		{4<<16 | 0xC9, true, "REGISTER_FD"},
		{8<<16 | 0xD5, true, "QUERY_DEVICE_INTR"},
		{64<<16 | 0xD5, true, "QUERY_DEVICE_INTR, larger; accepted before 595"},
		{2600<<16 | 0xD9, true, "dma-buf"},
		{2608<<16 | 0xD9, true, "dma-buf since 570"},
	} {
		if got := RMShaped(c.cmd); got != c.want {
			t.Errorf("RMShaped(%#x) = %v: %s", c.cmd, got, c.what)
		}
	}
	// A driver sees the low 32 bits only.
	wide := uint64(0xffffffffc030462b)
	if !RMShaped(uint32(wide)) {
		t.Error("upper bits")
	}
	// Type and direction never matter.
	for cmd := uint32(0); cmd < 1<<14; cmd++ {
		base := cmd<<16 | EscAlloc
		if RMShaped(base) != RMShaped(base|0x4600|0xC0000000) {
			t.Fatalf("%#x: depends on type or direction", base)
		}
	}
	// An unknown driver may have other sizes.
	a, _ := ForDriver("600.43.02", true)
	for cmd, want := range map[uint32]bool{0xC034462A: true, 0xC020462A: true, 0x5427: false, 0xC0384621: false,
		0xC038464E: true, 0xC0104644: false} {
		if a.RMShaped(cmd) != want {
			t.Errorf("unknown driver: RMShaped(%#x) = %v", cmd, !want)
		}
	}
}

// TestTrapped: what a driver does not dispatch on is no way around the filter; a terminal's or a socket's number is not trapped for
// the sake of UVM, which compares all of it.
func TestTrapped(t *testing.T) {
	for cmd, want := range map[uint32]bool{
		UVMRegisterGPUVASpace: true, UVMUnregisterGPU: true, UVMMapExternal: true,
		0x541b: false, 0x5421: false, // FIONREAD, FIONBIO
		0xc030462b: true, 0xffffffff&^0xff | EscAlloc: true, 0x542b: true, EscXferCmd: true,
	} {
		if Trapped(cmd) != want {
			t.Errorf("Trapped(%#x) = %v", cmd, !want)
		}
	}
	for cmd := range uint32(1 << 16) {
		if UVMShaped(cmd) && !Trapped(cmd) || RMShaped(cmd<<16|cmd&0xff) && !Trapped(cmd<<16|cmd&0xff) {
			t.Fatalf("%#x is not trapped", cmd)
		}
	}
}

// Everything that is trapped as an escape has a size that counts; otherwise the guard would let it run.
func TestTrappedHaveShapes(t *testing.T) {
	for _, nr := range TrappedNRs {
		if UVMShaped(uint32(nr)) {
			continue
		}
		shaped := false
		for size := uint32(0); size < 1<<14; size++ {
			shaped = shaped || RMShaped(size<<16|uint32(nr))
		}
		if !shaped {
			t.Errorf("%#x is trapped but never RM-shaped", nr)
		}
	}
}

// The order that the binary searches rely on, and what every row has to have.
func TestTables(t *testing.T) {
	checkSizes := func(name string, list []since) {
		for i, s := range list {
			if s.value < 0 || s.value > MaxControlParams || (i == 0) != (s.from == 0) || i > 0 && s.from <= list[i-1].from {
				t.Errorf("%s: sizes %v", name, list)
			}
		}
	}
	for i := range classes {
		r := &classes[i]
		if i > 0 && r.id <= classes[i-1].id {
			t.Errorf("class %#x is out of order", r.id)
		}
		if r.name == "" || r.source == "" {
			t.Errorf("class %#x: no name or source", r.id)
		}
		checkSizes(r.name, r.sizes)
		for _, s := range r.sizes {
			for _, off := range r.clients {
				if off < 0 || off+4 > s.value {
					t.Errorf("%s: client handle at %d of %d", r.name, off, s.value)
				}
			}
			for _, off := range r.clear {
				if off < 0 || off+8 > s.value {
					t.Errorf("%s: pointer at %d of %d", r.name, off, s.value)
				}
			}
		}
		switch r.kind {
		case ClassEvent, ClassDebugger, ClassProfiler:
			if len(r.clients) == 0 {
				t.Errorf("%s names no client", r.name)
			}
		case ClassMulticast, ClassFD:
			if r.fd == nil {
				t.Errorf("%s has no descriptor", r.name)
			}
		}
	}
	for i := range controls {
		r := &controls[i]
		if i > 0 {
			p := &controls[i-1]
			if r.id < p.id || r.id == p.id && (p.to == 0 || r.from <= p.to) {
				t.Errorf("control %#x is out of order", r.id)
			}
		}
		if r.name == "" || r.source == "" && r.kind != ControlDeny {
			t.Errorf("control %#x: no name or source", r.id)
		}
		if r.id&gssBit != 0 && r.kind != ControlDeny {
			t.Errorf("control %#x goes to firmware; it belongs into gssAllowed", r.id)
		}
		checkSizes(r.name, r.sizes)
		layout := len(r.pointers) + len(r.clients) + len(r.clear)
		if r.kind != ControlFlat && r.kind != ControlDeny || layout > 0 {
			if len(r.sizes) == 0 {
				t.Errorf("%s: layout without a size", r.name)
			}
		}
		for _, s := range r.sizes {
			for _, p := range r.pointers {
				if p.Off < 0 || p.Off+8 > s.value || p.CountOff+4 > s.value || p.MaxBytes <= 0 || p.CountOff < 0 && p.Fixed > p.MaxBytes ||
					p.CountOff >= 0 && p.ElemSize <= 0 {
					t.Errorf("%s: pointer %+v in %d bytes", r.name, p, s.value)
				}
			}
			for _, off := range r.clients {
				if off < 0 || off+4 > s.value {
					t.Errorf("%s: client handle at %d of %d", r.name, off, s.value)
				}
			}
			for _, off := range r.clear {
				if off < 0 || off+8 > s.value {
					t.Errorf("%s: pointer at %d of %d", r.name, off, s.value)
				}
			}
			if r.fd > 0 && r.fd+4 > s.value {
				t.Errorf("%s: descriptor at %d of %d", r.name, r.fd, s.value)
			}
		}
	}
	for i := 1; i < len(statusNames); i++ {
		if statusNames[i].code <= statusNames[i-1].code {
			t.Errorf("%s is out of order", statusNames[i].name)
		}
	}
	for _, list := range [][]uint32{gssAllowed, gssSwallowed, gssProfiling} {
		for i, id := range list {
			if id&gssBit == 0 || i > 0 && id <= list[i-1] {
				t.Errorf("gss.go: %#x", id)
			}
		}
	}
}

// What must never be let through, whatever else changes.
func TestNeverAllowed(t *testing.T) {
	for _, b := range KnownBranches() {
		a, err := ForDriver(b+".500.0", false)
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []uint32{0x80170f, 0x2080111a, 0x20801121, 0x20801210 | gssBit, 0x2080a083, 0x901, 0x902, 0xb03, 0xb04,
			0x20801231, 0x20801238, 0xa06c0107, 0xa06c0110, 0xa06f0111, 0x801714, 0x801711, 0x50800101, 0x20801123, 0x20801124,
			0xe00101, 0x278, 0xdeadbeef, 0} {
			if c, ok := a.Control(id); ok && c.Kind != ControlDeny {
				t.Errorf("%s: control %#x is allowed", b, id)
			}
		}
		if c, _ := a.Control(0x20800122); c.Kind != ControlRegOps { // flat, it would reach registers that all contexts share
			t.Errorf("%s: EXEC_REG_OPS is not checked", b)
		}
		for _, id := range []uint32{0xc2, 0x81, 0x82, 0x83, 0x90cd, 0x90ce, 0x5080, 0xe0, 0xf9, 0xfb, 0x2082, 0xcbca, 0xc574,
			0x7e, 0x78, 0xdeadbeef} {
			if c, ok := a.Class(id); ok && c.Kind != ClassDeny {
				t.Errorf("%s: class %#x is allowed", b, id)
			}
		}
		if c, ok := a.Control(0xa06c0103); !ok || c.Kind != ControlSwallow {
			t.Errorf("%s: SET_TIMESLICE is %v", b, c.Kind)
		}
	}
}

// What a profiler needs and others do not is the node's choice, in every branch: hardware counters count what neighbours do.
func TestProfiling(t *testing.T) {
	for _, b := range KnownBranches() {
		a, err := ForDriver(b+".500.0", false)
		if err != nil {
			t.Fatal(err)
		}
		for id := uint32(0x90cc0000); id < 0x90cd0000; id++ {
			for _, id := range []uint32{id, id&0xffff | 0xb0cc0000} {
				if c, ok := a.Control(id); ok && c.Kind != ControlDeny && !c.Profiling {
					t.Errorf("%s: %s is allowed to all", b, c.Name)
				}
			}
		}
		for _, id := range []uint32{0x2080130e, 0x2080a06d, 0x2080a0c8, 0xb0cc0101, 0xb0cc0105, 0xb0cc010a} {
			if c, ok := a.Control(id); !ok || c.Kind == ControlDeny || !c.Profiling {
				t.Errorf("%s: control %#x: %+v", b, id, c)
			}
		}
		for _, id := range []uint32{0x90cc, 0xb2cc} {
			if c, ok := a.Class(id); !ok || c.Kind == ClassDeny || !c.Profiling {
				t.Errorf("%s: class %#x: %+v", b, id, c)
			}
		}
		for _, id := range []uint32{0xb0cc0201, 0xb0cc0203, 0xb0cc0204} { // the driver's own
			if c, ok := a.Control(id); ok {
				t.Errorf("%s: %s is allowed", b, c.Name)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		ClassName(0x40): "NV01_MEMORY_LOCAL_USER", ClassName(0x12345): "class 0x12345",
		ControlName(0x20801303): "NV2080_CTRL_CMD_FB_GET_INFO_V2", ControlName(0x12345): "control 0x12345",
		EscapeName(EscAlloc): "NV_ESC_RM_ALLOC", EscapeName(0x99): "escape 0x99",
		StatusName(0x51): "NV_ERR_NO_MEMORY", StatusName(0xabc): "status 0xabc",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestPointerBytes(t *testing.T) {
	params := make([]byte, 176)
	list := Pointer{Off: 8, CountOff: 0, ElemSize: 8, MaxBytes: 64 << 10}
	matrix := Pointer{Off: 160, CountOff: 128, ElemSize: 4, Squared: true, MaxBytes: 4096}
	for _, c := range []struct {
		p     Pointer
		count uint32
		want  int
		ok    bool
	}{
		{list, 0, 0, true}, {list, 3, 24, true}, {list, 8192, 65536, true}, {list, 8193, 0, false},
		{list, 0x20000000, 0, false}, // × 8 = 2³²
		{list, 0xffffffff, 0, false},
		{matrix, 32, 4096, true}, {matrix, 33, 0, false}, {matrix, 0x10000, 0, false}, {matrix, 0xffffffff, 0, false},
		{Pointer{Off: 16, CountOff: -1, Fixed: 128, MaxBytes: 128}, 7, 128, true},
		{Pointer{Off: 169, CountOff: -1, Fixed: 128, MaxBytes: 128}, 0, 0, false},
		{Pointer{Off: 8, CountOff: 173, ElemSize: 1, MaxBytes: 128}, 0, 0, false},
	} {
		PutU32(params, 0, c.count)
		PutU32(params, 128, c.count)
		if n, ok := c.p.Bytes(params); n != c.want || ok != c.ok {
			t.Errorf("%+v, count %#x: %d, %v", c.p, c.count, n, ok)
		}
	}
}

// The runtime links this package for a list of numbers; looking things up must not allocate, nor may start-up cost.
func TestNoAllocations(t *testing.T) {
	a, err := ForDriver("580.159.04", false)
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		a.Control(0x20801303)
		a.Class(0xc86f)
		a.AllocForm(48)
		a.StatusOff(EscControl, 32)
	}); n != 0 {
		t.Errorf("%v allocations per look-up", n)
	}
}

func FuzzPointerBytes(f *testing.F) {
	f.Add(8, 0, 8, false, 0, 65536, []byte{1, 0, 0, 0})
	f.Add(-1, -5, 1<<30, true, -1, 1<<40, []byte{255, 255, 255, 255, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, off, countOff, elem int, squared bool, fixed, max int, params []byte) {
		p := Pointer{Off: off, CountOff: countOff, ElemSize: elem, Squared: squared, Fixed: fixed, MaxBytes: max}
		if n, ok := p.Bytes(params); n < 0 || ok && n > max {
			t.Errorf("%+v: %d, %v", p, n, ok)
		}
	})
}

func FuzzAccess(f *testing.F) {
	f.Add([]byte{1, 2, 3}, 0, uint64(1))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8}, 1<<62, uint64(1))
	f.Fuzz(func(t *testing.T, b []byte, off int, v uint64) {
		U16(b, off)
		PutU32(b, off, uint32(v))
		if off >= 0 && off <= len(b)-4 && U32(b, off) != uint32(v) {
			t.Error("u32")
		}
		PutU64(b, off, v)
		if off >= 0 && off <= len(b)-8 && U64(b, off) != v {
			t.Error("u64")
		}
	})
}

// Whatever number a container sends: no panic, and what the tables answer can be used without a further look.
func FuzzLookups(f *testing.F) {
	f.Add("580.159.04", true, uint32(0x20801303), 48)
	f.Add("600.1.0", true, uint32(0x127), 40)
	f.Fuzz(func(t *testing.T, version string, allow bool, id uint32, size int) {
		a, err := ForDriver(version, allow)
		if err != nil {
			return
		}
		if RMShaped(id) && !a.RMShaped(id) {
			t.Errorf("%s: %#x would run natively, and known drivers take it for an RM call", version, id)
		}
		if off, ok := a.StatusOff(id&0xff, size); ok && (off < 0 || off+4 > size) {
			t.Errorf("StatusOff(%#x, %d) = %d", id&0xff, size, off)
		}
		if form, ok := a.AllocForm(size); ok && (form.Size != size || form.StatusOff+4 > size) {
			t.Errorf("AllocForm(%d) = %+v", size, form)
		}
		a.Class(id)
		a.UVM(id)
		ControlName(id)
		ClassName(id)
		if c, ok := a.Control(id); ok {
			params := make([]byte, c.Size)
			for i := range params {
				params[i] = 0xff
			}
			for _, p := range c.Pointers {
				if n, ok := p.Bytes(params); ok && n > p.MaxBytes {
					t.Errorf("%s: %d", c.Name, n)
				}
			}
		}
	})
}

// TestTrappedWhole: what the driver would dispatch is trapped, whatever the bits are that it does not look at.
func TestTrappedWhole(t *testing.T) {
	guessed, err := ForDriver("600.1", true)
	if err != nil {
		t.Fatal(err)
	}
	for nr := range uint32(256) {
		for size := range uint32(1 << 14) {
			for _, kind := range []uint32{0, 'F', 0x40, 0xbf, 0xff} {
				cmd := size<<16 | kind<<8 | nr
				if RMShaped(cmd) && (!Trapped(cmd) || !guessed.RMShaped(cmd)) {
					t.Fatalf("%s (%#x) passes", EscapeName(nr), cmd)
				}
			}
		}
	}
	for _, nr := range TrappedNRs {
		if UVMShaped(uint32(nr)) && !Trapped(uint32(nr)) {
			t.Errorf("UVM call %d passes", nr)
		}
	}
}
