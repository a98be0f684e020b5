// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// Policy is how a GPU is shared. Its JSON form is an interface: fields may be added, none renamed.
type Policy struct {
	GPU        int     `json:"gpu"`
	Name       string  `json:"name"`
	UUID       string  `json:"uuid"`
	Policy     string  `json:"policy"` // in effect
	SetBy      string  `json:"setBy"`  // "cgpu policy" or "cgpu.toml"
	MaxInst    int     `json:"maxInst"`
	PrioRatio  int     `json:"prioRatio"` // percent
	Containers int     `json:"containers"`
	Promised   float64 `json:"promisedPercent"` // sum of the hard caps
}

func PoliciesOf(node *device.Table, gpus []device.GPU, book *ledger.Ledger) ([]Policy, error) {
	records, cards, err := book.State()
	if err != nil {
		return nil, err
	}
	list := []Policy{}
	for _, g := range gpus {
		s := snapshot.SharingOf(g.UUID, node.Config.Card(), records, cards)
		by := "cgpu.toml"
		if s.Set {
			by = "cgpu policy"
		}
		list = append(list, Policy{g.Index, g.Name, g.UUID, s.Effect.String(), by, s.Card.MaxInst, s.Card.PrioRatio, s.Containers,
			float64(s.Promised) / 10})
	}
	return list, nil
}

func PrintPolicies(w io.Writer, list []Policy) error {
	t := newTable(w)
	t.row("GPU", "NAME", "UUID", "POLICY", "SET BY", "MAX-INST", "PRIO-RATIO", "CONTAINERS", "PROMISED")
	for _, c := range list {
		t.row(c.GPU, short(c.Name), ShortUUID(c.UUID), c.Policy, c.SetBy, c.MaxInst, fmt.Sprintf("%d%%", c.PrioRatio), c.Containers,
			fmt.Sprintf("%g%%", c.Promised))
	}
	return t.Flush()
}
