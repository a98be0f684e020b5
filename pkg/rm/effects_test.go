package rm

import (
	"encoding/csv"
	"os"
	"slices"
	"strconv"
	"testing"
)

// TestEffects: testdata/effects.csv says of each call that is let through what it takes of device memory, host memory and numbered things,
// how long it holds the driver's locks, whom else it touches, and where 580.142 says so (R/ is src/nvidia/src/kernel, K/ is
// kernel-open/nvidia-uvm). Who allows another call has to find that out first.
func TestEffects(t *testing.T) {
	file, err := os.Open("testdata/effects.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
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
	ids := slices.Clone(gssAllowed)
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
