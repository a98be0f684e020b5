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
		"": false, "-a": false, "a-": true, "a/b": false, "a b": false, "a.b": false, "ä": false, "..": false, strings.Repeat("a", 64): false,
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
