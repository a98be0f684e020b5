package admit

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Share is a share of a GPU that Kubernetes allocated to the container.
type Share struct {
	alloc.Share
	// Plugin: a device plugin allocated it, and not a claim. A claim says itself what else of it holds; of a plugin's the
	// node may let the pod's author choose some (pod_settings in cgpu.toml).
	Plugin bool
}

// allocated unites the shares of claims and of a device plugin.
func allocated(claims, plugin []alloc.Share) ([]Share, error) {
	var all []Share
	for i, s := range slices.Concat(claims, plugin) {
		clash := slices.ContainsFunc(all, func(o Share) bool { return o.UUID == s.UUID })
		if clash && s.UUID != "" {
			return nil, fmt.Errorf("admit: share %s: GPU %s was allocated to this container twice: ask for it in one claim or one limit", s.ID, s.UUID)
		}
		all = append(all, Share{s, i >= len(claims)})
	}
	if n := len(all); n > alloc.MaxShares {
		return nil, fmt.Errorf("admit: %d shares of GPUs were allocated to this container: it can have %d", n, alloc.MaxShares)
	}
	return all, nil
}

// RefuseUnallocated refuses a container of a pod that names itself a GPU, on nodes where allocations alone count. It is nil
// for every other container.
func (a *Ask) RefuseUnallocated(table *device.Table) error {
	if !a.Unallocated(table) {
		return nil
	}
	return a.Quota.RefuseUnallocated()
}

// Unallocated says whether the container is a pod's, asks for a GPU, was allocated none that config.json tells of, and lies on
// a node on which that counts for nothing.
func (a *Ask) Unallocated(table *device.Table) bool {
	switch table.Config.Pods {
	case device.PodsAllocated, device.PodsGPUShare:
		return a.Pod && a.Quota != nil && len(a.Shares) == 0
	}
	return false
}

// allot puts the shares into a reservation.
func (a *Ask) allot(request *ledger.Request, table *device.Table) error {
	r := &request.Record
	for _, s := range a.Shares {
		if r.Preload {
			if err := s.refusePreload(a.Quota); err != nil {
				return err
			}
		}
		known := slices.ContainsFunc(table.GPUs, func(g device.GPU) bool { return g.UUID == s.UUID })
		if s.UUID != "" && !known {
			return fmt.Errorf("admit: share %s: GPU %s is not among the %d of this node: is it broken, or was it taken out? cgpu refresh, then delete the pod", s.ID, s.UUID, len(table.GPUs))
		}
		r.Allocated = append(r.Allocated, ledger.Allocation{ID: s.ID, UUID: s.UUID, Containers: s.Containers, Given: s.given(), Plugin: s.Plugin})
		if s.Whole {
			r.Native = append(r.Native, s.UUID)
			continue
		}
		slice := s.slice(a.Quota, table.Config.PodSettings)
		switch {
		case s.UUID != "":
			r.VGPUs = append(r.VGPUs, slice)
		case request.Place != nil:
			return errors.New("admit: two shares of the container name no GPU: let the allocator name them")
		default:
			slice.Limit = 0
			request.Place = &ledger.Placement{Policy: table.Config.Placement, Memory: quota.Memory{Fixed: s.Memory}, Slice: slice}
		}
	}
	if request.Place != nil && len(r.VGPUs) > 0 {
		return errors.New("admit: one share of the container names no GPU, and others do: let the allocator name all")
	}
	return nil
}

// given is the share in the ledger's terms, as it was allocated; nothing for a whole GPU.
func (s Share) given() ledger.VGPU {
	if s.Whole {
		return ledger.VGPU{}
	}
	return ledger.VGPU{UUID: s.UUID, Limit: s.Memory, Weight: max(s.Weight, 1), Percent: s.Percent, Priority: s.Priority, Spill: s.Spill}
}

// slice is the share in the ledger's terms, with what the container may choose of it.
func (s Share) slice(wish *quota.Quota, free []quota.Choice) ledger.VGPU {
	if !s.Plugin {
		free = nil
	}
	is := wish.Within(quota.Slice{Weight: s.Weight, Percent: s.Percent, Priority: s.Priority, Spill: s.Spill}, free)
	return ledger.VGPU{UUID: s.UUID, Limit: s.Memory, Weight: max(is.Weight, 1), Percent: is.Percent, Priority: is.Priority, Spill: is.Spill}
}

// refusePreload refuses a share of which the preload library alone cannot enforce something.
func (s Share) refusePreload(wish *quota.Quota) error {
	var what string
	switch {
	case s.Spill != 0:
		what = "no spill"
	case s.Percent != 0:
		what = "no percentage of a GPU's time"
	case s.Priority != quota.PriorityDefault:
		what = "no priority"
	case wish.NoLimiter:
		what = "nothing at all without the limiter (CGPU_LIMITER=off)"
	default:
		return nil
	}
	return fmt.Errorf(`admit: share %s: with enforcement = "preload" in cgpu.toml %s can be enforced: allocate none, or set enforcement = "guard"`, s.ID, what)
}
