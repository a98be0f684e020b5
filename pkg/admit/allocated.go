// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// Share is a share of a GPU that Kubernetes allocated to the container.
type Share struct {
	alloc.Share
	// Plugin: a device plugin allocated it, and not a claim. A claim says itself what else of it holds; of a plugin's the
	// node may let the pod's author choose some (pod_settings in cgpu.toml).
	Plugin bool
}

// allocated unites the shares of claims and of a device plugin.
//
// A share may come several times: a kubelet that prepares a claim again, after a reboot or a prepare that failed by half, notes
// the claim's CDI devices a second time, and not every engine leaves out the doubles. It is one allocation then. What is in no
// such way the same is refused.
func allocated(claims, plugin []alloc.Share) ([]Share, error) {
	var all []Share
	for i, s := range slices.Concat(claims, plugin) {
		one := Share{s, i >= len(claims)}
		if slices.Contains(all, one) {
			continue
		}
		clash := slices.ContainsFunc(all, func(o Share) bool { return o.UUID == s.UUID })
		if clash && s.UUID != "" {
			return nil, fmt.Errorf("admit: share %s: GPU %s was allocated to this container twice: ask for it in one claim or one limit", s.ID,
				s.UUID)
		}
		all = append(all, one)
	}
	if n := len(all); n > alloc.MaxShares {
		return nil, fmt.Errorf("admit: %d shares of GPUs were allocated to this container: it can have %d", n, alloc.MaxShares)
	}
	return all, nil
}

// Settle decides, once the node is known, what the own words of a pod's container count for, where nothing in its config.json
// was allocated to it. units asks the kubelet what a device plugin allocated to a container. An error refuses the container.
func (a *Ask) Settle(table *device.Table, units func(spec.PodContainer) (quota.Units, error)) error {
	pods := table.Config.Pods
	if !a.Pod || a.Quota == nil || len(a.Shares) > 0 || pods != device.PodsAllocated && pods != device.PodsGPUShare {
		return a.fault
	}
	if pods == device.PodsGPUShare {
		container := spec.ContainerOf(a.annotations)
		if spec.IsCRIO(a.annotations) || container == (spec.PodContainer{}) {
			return errors.New(`admit: pods = "gpushare" in cgpu.toml works below containerd, whose annotations tell which pod it is: set "allocated", and ask with a ResourceClaim`)
		}
		u, err := units(container)
		if err != nil {
			return err
		}
		if u.Memory > 0 {
			return a.counted(container, u, table)
		}
	}
	if a.fault != nil {
		return a.fault
	}
	return a.Quota.RefuseUnallocated()
}

// counted makes a share of what a device plugin allocated by counting.
func (a *Ask) counted(container spec.PodContainer, u quota.Units, table *device.Table) error {
	var known []quota.GPU
	for _, g := range table.GPUs {
		known = append(known, quota.GPU{Index: g.Index, UUID: g.UUID, Memory: g.Memory})
	}
	q, err := quota.FromUnits(a.env, a.annotations, u, known)
	if err != nil {
		return err
	}
	grants, _, err := q.Resolve(known)
	if err != nil {
		return err
	}
	s := alloc.Share{ID: "gpushare/" + container.UID + "/" + container.Container, Containers: 1}
	s.Limit, s.Percent, s.Priority = grants[0].Limit, u.Percent, quota.PriorityDefault
	for _, g := range table.GPUs {
		if g.Index == grants[0].Index {
			s.UUID = g.UUID
		}
	}
	// What was read of the container's own words before may be refused, or nonsense.
	a.Shares, a.fault = []Share{{s, true}}, nil
	a.Quota, err = quota.Beside(a.env, a.annotations)
	return err
}

// allot puts the shares into a reservation.
func (a *Ask) allot(request *ledger.Request, table *device.Table) error {
	r := &request.Record
	for _, s := range a.Shares {
		if r.Preload {
			if err := s.refuseUnguarded(a.Quota, table.Config.Unguarded(), r.DriverOnly); err != nil {
				return err
			}
		}
		known := slices.ContainsFunc(table.GPUs, func(g device.GPU) bool { return g.UUID == s.UUID })
		if s.UUID != "" && !known {
			return fmt.Errorf("admit: share %s: GPU %s is not among the %d of this node: is it broken, or was it taken out? cgpu refresh, then "+
				"delete the pod", s.ID, s.UUID, len(table.GPUs))
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
			request.Place = &ledger.Placement{Policy: table.Config.Placement, Memory: quota.Memory{Fixed: s.Limit}, Slice: slice,
				Avoid: unhealthy(table)}
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
	v := ledger.VGPU{UUID: s.UUID, Slice: s.Slice}
	v.Weigh()
	return v
}

// slice is the share in the ledger's terms, with what the container may choose of it.
func (s Share) slice(wish *quota.Quota, free []quota.Choice) ledger.VGPU {
	if !s.Plugin {
		free = nil
	}
	v := ledger.VGPU{UUID: s.UUID, Slice: wish.Within(s.Slice, free)}
	v.Weigh()
	return v
}

// refuseUnguarded refuses a share of which something needs a guard that by this setting the container does not have, or not even the
// library. What weight a share has counts for nothing without the library: a claim always has one.
func (s Share) refuseUnguarded(wish *quota.Quota, setting string, driverOnly bool) error {
	q := quota.Quota{NoLimiter: wish.NoLimiter}
	q.Spill, q.Percent, q.Priority = s.Spill, s.Percent, s.Priority
	misfit, ok := errors.AsType[*quota.Error](q.RefuseUnguarded(setting, driverOnly))
	if !ok {
		return nil
	}
	return fmt.Errorf("admit: share %s: %s; %s", s.ID, misfit.Reason, misfit.Remedy)
}
