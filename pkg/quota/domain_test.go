// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"strings"
	"testing"
)

// TestDomain: a domain is a short plain name.
func TestDomain(t *testing.T) {
	for name, good := range map[string]bool{
		"team-a": true, "A": true, "0": true, strings.Repeat("a", 63): true,
		"": true, "-a": false, "a-": true, "a/b": false, "a b": false, "a.b": false, "ä": false, "..": false, strings.Repeat("a", 64): false,
	} {
		q, err := FromSpec([]string{"CGPU_MEM=1", "CGPU_DOMAIN=" + name}, nil)
		if (err == nil) != good || good && q.Domain != name {
			t.Errorf("%q: %v, %v", name, q, err)
		}
	}
	if q, err := Beside([]string{"CGPU_DOMAIN=a"}, nil); err != nil || q.Domain != "a" {
		t.Errorf("beside an allocation: %v, %v", q, err)
	}
}

// TestThreads: a part is a whole percentage, of a variable or an annotation.
func TestThreads(t *testing.T) {
	for value, want := range map[string]int{"1": 1, "30": 30, "100": 100, "0": 0, "101": 0, "-1": 0, "2.5": 0, "": 0, "30%": 0} {
		q, err := FromSpec([]string{"CGPU_MEM=1", "CGPU_DOMAIN=a", "CGPU_THREADS=" + value}, nil)
		if (err == nil) != (want != 0) || want != 0 && q.Threads != want {
			t.Errorf("%q: %v, %v", value, q, err)
		}
	}
	if _, err := FromSpec([]string{"CGPU_MEM=1", "CGPU_THREADS=30"}, nil); err == nil ||
		!strings.Contains(err.Error(), `CGPU_THREADS="30": counts in`) {
		t.Errorf("without a domain: %v", err)
	}
	q, err := Beside([]string{"CGPU_THREADS=40", "CGPU_DOMAIN=a"}, map[string]string{"cgpu.io/threads": "30"})
	if err != nil || q.Threads != 30 {
		t.Errorf("by annotation, beside an allocation: %v, %v", q, err)
	}
}
