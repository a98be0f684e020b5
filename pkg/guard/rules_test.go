// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/csv"
	"os"
	"strconv"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestRules: who makes a call is what pkg/rm's table of effects says, and each call that is let through has a rule.
func TestRules(t *testing.T) {
	file, err := os.Open("../rm/testdata/effects.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for _, l := range lines[1:] {
		n, err := strconv.ParseUint(l[1], 0, 32)
		if err != nil {
			continue
		}
		said[l[0]+strconv.Itoa(int(n))] = l[3]
	}
	check := func(kind string, nr uint32, r rule, ok bool) {
		want := said[kind+strconv.Itoa(int(nr))]
		got := "denied"
		switch {
		case ok && r.inTask:
			got = "task"
		case ok:
			got = "guard"
		}
		if want != got && !(want == "answered" && got == "guard") && !(want == "denied" && got == "guard") && !(want == "" && got == "denied") {
			t.Errorf("%s %#x: the table of effects says %q, the rules %q", kind, nr, want, got)
		}
	}
	for _, nr := range rm.TrappedNRs {
		switch uint32(nr) {
		case rm.EscAlloc, rm.EscControl, rm.EscXferCmd: // by class, by control, by what it holds
			continue
		case rm.EscAllocMemory, rm.EscContextDMA: // by class, and as RM_ALLOC
			continue
		}
		if r, ok := uvmCalls[uint32(nr)]; ok || rm.UVMShaped(uint32(nr)) {
			check("uvm", uint32(nr), r, ok)
		}
		if r, ok := escapes[uint32(nr)]; ok || rm.TrapMask(nr) == 0xff {
			check("escape", uint32(nr), r, ok)
		}
	}
}
