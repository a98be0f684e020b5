// SPDX-License-Identifier: Apache-2.0

package rmclient

import "testing"

func TestParseAddress(t *testing.T) {
	for _, c := range []struct {
		bus  string
		want uint32
		ok   bool
	}{{"0000:01:00.0", 0x100, true}, {"00000000:41:00.0", 0x4100, true}, {"0001:C1:1F.0", 0x1c11f, true}, {"x", 0, false}, {"", 0, false}} {
		a, err := ParseAddress(c.bus)
		if (err == nil) != c.ok || c.ok && a.ID() != c.want {
			t.Errorf("%q: %#x, %v", c.bus, a.ID(), err)
		}
	}
}
