// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// A scheduler counts what it has allocated, and takes the rest for free. What a running container has beyond its allocation it does not
// know of; so that comes out of what it was never told of, the headroom. The sum of what is beyond allocations on a GPU is at
// most the headroom, and allocations are at most the rest, so that what was allocated always finds its room.

// allocation is that of a GPU; zero where nothing was allocated.
func (r Record) allocation(uuid string) Allocation {
	i := slices.IndexFunc(r.Allocated, func(a Allocation) bool { return a.UUID == uuid })
	if i < 0 {
		return Allocation{}
	}
	return r.Allocated[i]
}

// refuseBeyond says why a slice cannot be raised beyond what was allocated; nil where it is not raised, or not beyond.
func (req *ChangeRequest) refuseBeyond(others *file, r Record, old, v VGPU) error {
	a := r.allocation(v.UUID)
	given := a.Given
	memory, cores := quota.Bytes(0), 0
	for _, o := range others.Records {
		for _, has := range o.VGPUs {
			if has.UUID == v.UUID {
				was := o.allocation(v.UUID).Given
				memory += has.Limit - min(has.Limit, was.Limit)
				cores += max(has.Percent-was.Percent, 0)
			}
		}
	}
	g := req.GPUs[indexGPU(req.GPUs, v.UUID)]
	if err := refuseSet(g, a.Set, old, v); err != nil {
		return err
	}
	if free := req.Headroom - min(memory, req.Headroom); v.Limit > max(old.Limit, given.Limit) && v.Limit-given.Limit > free {
		return &Refusal{GPU: g, Asked: v.Limit, Free: free, Memory: true, Remedy: remedyHeadroom,
			Reason: fmt.Sprintf("asked for %s, which is %s beyond what was allocated, but of the %s that no scheduler gives out %s are left",
				v.Limit, v.Limit-given.Limit, req.Headroom.FloorMiB(), free.FloorMiB())}
	}
	// Where no percentage was allocated none is a bound, and the node says whether the pod may set one (pod_settings).
	free, more := max(req.HeadroomCores-cores, 0), v.Percent-given.Percent
	if given.Percent > 0 && v.Percent > max(old.Percent, given.Percent) && more > free {
		return &Refusal{GPU: g, Time: true, Remedy: remedyHeadroom,
			Reason: fmt.Sprintf("asked for %d %% of the GPU's time, which is %d beyond what was allocated, but of the %d that no scheduler "+
				"gives out %d are left", v.Percent, more, req.HeadroomCores, free)}
	}
	if v.Weight > max(old.Weight, given.Weight) && v.Percent == 0 && others.card(v.UUID, req.Card).Policy == sched.PolicyFixed {
		return &Refusal{GPU: g, Time: true, Remedy: "ask for no more weight, or have another policy set (cgpu policy)",
			Reason: fmt.Sprintf("asked for weight %d, which under policy fixed is a hard cap that no scheduler counted", v.Weight)}
	}
	return nil
}

// refuseSet says why a slice cannot be raised beyond what an administrator has set of it, who may have done so since its pod was looked at.
func refuseSet(g GPU, set Settings, old, v VGPU) error {
	const remedy = "ask for less, or have an administrator set more (cgpu set)"
	if n := set.Limit; n != nil && v.Limit > max(old.Limit, *n) {
		return &Refusal{GPU: g, Asked: v.Limit, Memory: true, Remedy: remedy,
			Reason: fmt.Sprintf("asked for %s, but an administrator has set %s", v.Limit, *n)}
	}
	if n := set.Weight; n != nil && v.Weight > max(old.Weight, *n) {
		return &Refusal{GPU: g, Time: true, Remedy: remedy,
			Reason: fmt.Sprintf("asked for weight %d, but an administrator has set %d", v.Weight, *n)}
	}
	if n := set.Percent; n != nil && *n > 0 && v.Percent != old.Percent && (v.Percent == 0 || v.Percent > *n) {
		return &Refusal{GPU: g, Time: true, Remedy: remedy,
			Reason: fmt.Sprintf("asked for %d %% of the GPU's time (0: all), but an administrator has set %d", v.Percent, *n)}
	}
	return nil
}

const remedyHeadroom = "ask for less, or have headroom and headroom_cores raised in the node's cgpu.toml"
