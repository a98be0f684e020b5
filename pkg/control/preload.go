// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/view"
)

// A container in preload mode has no guard that answers. What it uses stands in its vGPU page, which the container's processes write
// themselves: it is shown, and nothing is decided by it but what its own administrator is told. One that the driver alone limits has no
// page either.

// updatePage writes a changed record into the page of its container, where its processes look.
func updatePage(t *device.Table, r ledger.Record, cards map[string]sched.Card) error {
	if r.DriverOnly {
		return nil
	}
	var missing error
	err := page.Update(r.Page, func(p *page.Page) {
		for _, g := range t.GPUs {
			slice := slices.IndexFunc(r.VGPUs, func(v ledger.VGPU) bool { return v.UUID == g.UUID })
			i := snapshot.OnPage(p, g)
			if slice < 0 {
				continue
			}
			if i < 0 {
				missing = fmt.Errorf("%s: GPU %d is not on this page", r.Page, g.Index)
				continue
			}
			v, to := r.VGPUs[slice], p.VGPU(i)
			to.Limit, to.Weight = uint64(v.Limit), uint32(v.Weight)
			card, ok := cards[v.UUID]
			if !ok {
				card = t.Config.Card()
			}
			to.TimesliceMicros = uint64(card.PreloadSlice(v.Share, t.Config.BaseTimeslice).Microseconds())
		}
	})
	return errors.Join(err, missing)
}

// updatePages does so for every container on a GPU.
func updatePages(t *device.Table, book *ledger.Ledger, uuid string) error {
	records, cards, err := book.State()
	if err != nil {
		return err
	}
	for _, r := range records {
		if r.Preload && slices.ContainsFunc(r.VGPUs, func(v ledger.VGPU) bool { return v.UUID == uuid }) {
			err = errors.Join(err, updatePage(t, r, cards))
		}
	}
	return err
}

// RefusePreload refuses what only a guard could carry out; nil for a container that has one. flag is of cgpu set, or empty
// for another command.
func RefusePreload(r ledger.Record, command, flag, cannot string) error {
	if !r.Preload {
		return nil
	}
	if flag != "" {
		command += ": --" + flag
	}
	who, key := "the preload library", "enforcement"
	if r.DriverOnly {
		who, key = "NVIDIA's driver", "limits"
	}
	return fmt.Errorf("%s: container %s%s: only %s enforces its limits (%s in cgpu.toml), and it cannot %s; "+
		`with %[5]s = "guard" the next container can`, command, view.ShortID(r.ID), view.Label(r), who, key, cannot)
}
