// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// PageStatus tells from its page what a guard would say of a container in preload mode.
func PageStatus(t *device.Table, r ledger.Record) (api.Status, error) {
	s := api.Status{ID: r.ID, Nonce: r.Nonce, InitPID: r.InitPID}
	p, err := page.Read(r.Page)
	if err != nil {
		return s, err
	}
	for _, g := range t.GPUs {
		slice := slices.IndexFunc(r.VGPUs, func(v ledger.VGPU) bool { return v.UUID == g.UUID })
		i := OnPage(p, g)
		if i < 0 || slice < 0 {
			continue
		}
		used, managed, _ := p.SlotUse(i)
		// The tenant can write any number; more than the card has would only break sums and columns.
		v := api.VGPUStatus{Index: g.Index, UUID: g.UUID, Limit: r.VGPUs[slice].Limit, Used: min(quota.Bytes(used), g.Memory)}
		v.Managed = min(quota.Bytes(managed), v.Used)
		s.VGPUs = append(s.VGPUs, v)
	}
	return s, nil
}

// OnPage is the place of a GPU on a page; -1 where it is not on it.
func OnPage(p *page.Page, g device.GPU) int {
	for i := range int(p.Header().VGPUs) {
		if p.VGPU(i).Minor == uint32(g.Minor) {
			return i
		}
	}
	return -1
}
