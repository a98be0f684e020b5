// SPDX-License-Identifier: Apache-2.0

package guard

import "testing"

// TestLegacyFreed: a group stays in the driver's legacy mode when its channel has gone, so it is not lent; a hand-over keeps that.
func TestLegacyFreed(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	for i := range 12 { // what of the client is dropped first differs
		made := r.server.do("contextin", r.number, 0, engineGR)
		r.server.do("schedule", r.number, made[0])
		r.server.do("free", r.number, made[1])
		if _, err := c.try("dupof", c.do("open")[0], r.client, made[0]); err == nil {
			t.Fatalf("try %d: a group in legacy mode is lent once its channel is freed", i)
		}
		r.survives()
		r.server.do("free", r.number, made[0])
	}
}
