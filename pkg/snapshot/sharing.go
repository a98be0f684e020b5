// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Sharing is how a GPU is shared at present.
type Sharing struct {
	Card       sched.Card
	Set        bool // with cgpu policy
	Effect     sched.Policy
	Containers int
	Promised   sched.Permille
}

// SharingOf looks at the ledger's state from a GPU.
func SharingOf(uuid string, def sched.Card, records []ledger.Record, cards map[string]sched.Card) Sharing {
	s := Sharing{Card: def}
	if c, ok := cards[uuid]; ok {
		s.Card, s.Set = c, true
	}
	var shares []sched.Share
	for _, r := range records {
		for _, v := range r.VGPUs {
			if v.UUID == uuid {
				shares = append(shares, v.Share)
				promised, _ := s.Card.Cap(v.Share)
				s.Promised += promised
			}
		}
	}
	s.Containers, s.Effect = len(shares), s.Card.Effective(shares)
	return s
}
