// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

func PoliciesOf(node *device.Table, gpus []device.GPU, book *ledger.Ledger) ([]schema.Policy, error) {
	records, cards, err := book.State()
	if err != nil {
		return nil, err
	}
	list := []schema.Policy{}
	for _, g := range gpus {
		s := snapshot.SharingOf(g.UUID, node.Config.Card(), records, cards)
		by := "cgpu.toml"
		if s.Set {
			by = "cgpu policy"
		}
		list = append(list, schema.Policy{GPU: g.Index, Name: g.Name, UUID: g.UUID, Policy: s.Effect.String(), SetBy: by,
			MaxInst: s.Card.MaxInst, PrioRatio: schema.Percent(s.Card.PrioRatio), Containers: s.Containers, Promised: schema.PercentOf(s.Promised)})
	}
	return list, nil
}

func PrintPolicies(w io.Writer, list []schema.Policy) error {
	t := newTable(w)
	t.row("GPU", "NAME", "UUID", "POLICY", "SET BY", "MAX-INST", "PRIO-RATIO", "CONTAINERS", "PROMISED")
	for _, c := range list {
		t.row(c.GPU, short(c.Name), ShortUUID(c.UUID), c.Policy, c.SetBy, c.MaxInst, fmt.Sprintf("%g%%", c.PrioRatio), c.Containers,
			fmt.Sprintf("%g%%", c.Promised))
	}
	return t.Flush()
}
