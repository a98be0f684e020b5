// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"encoding/csv"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestEffects: testdata/effects.csv says of each call that is let through what it takes of device memory, host memory and numbered things,
// how long it holds the driver's locks, whom else it touches, and where 580.142 says so (R/ is src/nvidia/src/kernel, K/ is
// kernel-open/nvidia-uvm). Who allows another call has to find that out first.
func TestEffects(t *testing.T) {
	lines := readEffects(t)
	known := map[string]map[uint32]bool{"control": {}, "class": {}, "uvm": {}, "escape": {}}
	for i, l := range lines[1:] {
		if l[1] == "mmap" || l[1] == "open" || l[1] == "fault" { // no ioctl
			continue
		}
		n, err := strconv.ParseUint(l[1], 0, 32)
		if err != nil || known[l[0]] == nil {
			t.Errorf("line %d: %s %s", i+2, l[0], l[1])
			continue
		}
		for j, name := range lines[0] {
			if l[j] == "" && name != "remark" {
				t.Errorf("%s %s has no %s", l[0], l[1], name)
			}
		}
		known[l[0]][uint32(n)] = true
	}
	abi, err := ForDriver("580.142", false)
	if err != nil {
		t.Fatal(err)
	}
	ids := slices.Concat(gssAllowed, gssSwallowed)
	for _, c := range controls {
		ids = append(ids, c.id)
	}
	for _, id := range ids {
		if c, ok := abi.Control(id); ok && c.Kind != ControlDeny && !c.Profiling && !known["control"][id] {
			t.Errorf("control %#x %s is let through, and nobody has said what it does", id, c.Name)
		}
	}
	for _, row := range classes {
		c, ok := abi.Class(row.id)
		if c.Kind == ClassMulticast || c.Kind == ClassFD { // which the guard denies
			continue
		}
		if ok && c.Kind != ClassDeny && !c.Profiling && !known["class"][row.id] {
			t.Errorf("class %#x %s is let through, and nobody has said what it does", row.id, c.Name)
		}
	}
}

func readEffects(t *testing.T) [][]string {
	t.Helper()
	file, err := os.Open("testdata/effects.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// executedShared are the controls that reach what containers share, or may, and are executed as they come all the same. GSS calls that
// firmware alone knows are not in it: gss.go says who was seen to make them.
var executedShared = map[uint32]string{
	0x80028b:   "no header has it; one byte, and gVisor lets it pass",
	0xde0001:   "only adds to what firmware reads anyway for the node's monitoring; the walk over all clients is paid for (locks)",
	0xfd0102:   "its class, NV_MEMORY_MULTICAST_FABRIC, is denied",
	0x20810108: "libcuda does not start without; no header has it",
	0x20810110: "libcuda does not start without; no header has it",
	0x20810111: "nvidia-smi does not start without; no header has it",
	0x83de030c: "reads the errors of the session's context, which is the container's",
	0x83de0317: "the session's own context; paid for (locks)",
	0x83de0318: "the session's own context; paid for (locks)",
	0x90960106: "reads how many clear colours there are",
	0x2080a06e: "reads",
}

// TestShared: what changes or shows what containers share is not executed as it comes.
func TestShared(t *testing.T) {
	abi, err := ForDriver("580.142", false)
	if err != nil {
		t.Fatal(err)
	}
	lines := readEffects(t)
	shared := slices.Index(lines[0], "shared")
	used := map[uint32]bool{}
	for _, l := range lines[1:] {
		if l[0] != "control" || l[shared] == "no" || l[shared] == "none" {
			continue
		}
		n, err := strconv.ParseUint(l[1], 0, 32)
		if err != nil {
			t.Fatal(err)
		}
		id := uint32(n)
		c, ok := abi.Control(id)
		if !ok || c.Kind != ControlFlat || executedShared[id] == "" && id&gssBit != 0 && strings.HasPrefix(l[shared], "? firmware") {
			continue
		}
		if used[id] = true; executedShared[id] == "" {
			t.Errorf("control %s %s is executed as it comes, and it touches what containers share: %s", l[1], l[2], l[shared])
		}
	}
	for id := range executedShared {
		if !used[id] {
			t.Errorf("%#x need not be in the list", id)
		}
	}
	for id, want := range map[uint32]ControlKind{
		0x801909: ControlSwallow, 0x20800145: ControlSwallow, 0x20800146: ControlSwallow, 0x20800407: ControlSwallow, 0x20801702: ControlSwallow,
		0x2080200a: ControlBoost, 0x2080220c: ControlSwallow, 0x20802210: ControlSwallow, 0x83de0307: ControlSwallow, 0x2080a06f: ControlSwallow,
		0x2080110b: ControlDisable, 0x90960101: ControlSwallow, 0x90960107: ControlDeny, 0x208f1105: ControlDeny, 0xa06f0112: ControlStopChannel,
		0x2080016d: ControlHide, 0x2080017b: ControlHide, 0x20800513: ControlThermal,
	} {
		if c, _ := abi.Control(id); c.Kind != want || (c.Answer != StatusOK) != (id == 0x90960101) {
			t.Errorf("%#x %s has kind %d, want %d; answer %#x", id, c.Name, c.Kind, want, c.Answer)
		}
	}
}

// TestNativeEffects: what the filter lets run without the guard takes nothing of what is bounded. A row's first word says so.
func TestNativeEffects(t *testing.T) {
	harmless := regexp.MustCompile(`^(none|no|releases|managed|bounded)\b`) // managed memory is counted otherwise (ADR 7)
	lines := readEffects(t)
	column := map[string]int{}
	for i, name := range lines[0] {
		column[name] = i
	}
	for _, l := range lines[1:] {
		n, err := strconv.ParseUint(l[1], 0, 32)
		if err != nil {
			continue // no ioctl
		}
		trapped := l[0] == "control" || l[0] == "class" || l[0] == "escape" && Trapped(uint32(n)|0x4600) || l[0] == "uvm" && UVMShaped(uint32(n))
		executor := l[column["executor"]]
		if !slices.Contains([]string{"guard", "task", "native", "answered", "denied"}, executor) || trapped == (executor == "native") {
			t.Errorf("%s %s %s: executor %q, and the filter traps it: %v", l[0], l[1], l[2], executor, trapped)
		}
		for _, name := range []string{"device_memory", "host_memory", "ids", "shared"} {
			if executor == "native" && !harmless.MatchString(l[column[name]]) {
				t.Errorf("%s %s %s runs natively, and its %s is %q", l[0], l[1], l[2], name, l[column[name]])
			}
		}
	}
}

// TestInFirmware: testdata/firmware.csv lists the classes of which the driver makes an object in the GPU's firmware too, by the flag that
// says so in resource_list.h (535.54.03, 550.54.14, 580.142 and 595.45.04). Those that are made by an RPC of their own are not in it.
func TestInFirmware(t *testing.T) {
	file, err := os.Open("testdata/firmware.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines[1:] {
		id, err := strconv.ParseUint(l[0], 0, 32)
		row := findClass(uint32(id))
		if err != nil || row == nil || row.name != l[1] {
			t.Errorf("%v: %v, %+v", l, err, row)
			continue
		}
		if row.kind != ClassDeny && row.kind != ClassFD && !row.kind.InFirmware() {
			t.Errorf("%s is in firmware (%s) and does not count there", l[1], l[2])
		}
	}
	for _, id := range []uint32{0x5, 0x79, 0x80, 0x2080, 0x90f1, 0xa06c, 0xc86f} { // by RPCs of their own
		if !findClass(id).kind.InFirmware() {
			t.Errorf("class %#x does not count", id)
		}
	}
}
