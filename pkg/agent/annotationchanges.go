// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// The annotations that change running containers. All but the first count at the start of a container too, where
// cgpu-runtime reads them.
const (
	annotationLimit    = ours + "gpu-mem-limit"
	annotationWeight   = ours + "gpu-schd-weight"
	annotationPercent  = ours + "gpu-core-percentage"
	annotationPriority = ours + "priority"
	annotationHighPrio = ours + "gpu-high-prio"
	annotationSpill    = ours + "gpu-mem-spill"
)

var annotations = []string{annotationLimit, annotationWeight, annotationPercent, annotationPriority, annotationHighPrio, annotationSpill}

// asks: the pod has one of these annotations.
func asks(all map[string]string) bool {
	for _, name := range annotations {
		if _, ok := all[name]; ok {
			return true
		}
	}
	return false
}

// asked are those that the pod has; nil where it has none.
func asked(all map[string]string) (some map[string]string) {
	for _, name := range annotations {
		if value, ok := all[name]; ok {
			if some == nil {
				some = map[string]string{}
			}
			some[name] = value
		}
	}
	return some
}

// annotationChanges are what annotations make of a container, a request for each of its slices. What an annotation says that was not
// there before, or was and is no more, is changed; the latter back to the most that it can be. All else stays: it is the start's,
// or an administrator's. It is all or nothing: one annotation that goes beyond the allocation refuses the others too.
func annotationChanges(record ledger.Record, now map[string]string, free []quota.Choice) (list []ledger.ChangeRequest, err error) {
	for name, value := range now {
		if len(value) > maxAnnotation {
			return nil, fmt.Errorf("agent: annotation %s: has more than %d bytes", name, maxAnnotation)
		}
	}
	q, err := quota.Beside(nil, now)
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	changed := func(names ...string) bool {
		for _, name := range names {
			value, is := now[name]
			old, was := record.ByPod[name]
			if is != was || value != old {
				return true
			}
		}
		return false
	}
	for _, v := range record.VGPUs {
		a, ok := allocation(record, v.UUID)
		if !ok {
			return nil, fmt.Errorf("agent: annotations change only containers whose share of a GPU Kubernetes allocated; this one asked for "+
				"%v itself", v.Limit)
		}
		given, set := most(a)
		choices := slices.DeleteFunc(slices.Clone(free), func(c quota.Choice) bool { return set[c] })
		if !a.Plugin {
			choices = nil // a claim says itself what holds of it
		}
		is := q.Within(given, choices)
		req := ledger.ChangeRequest{GPU: v.UUID}
		if changed(annotationLimit) {
			limit, err := limitOf(now, a)
			if err != nil {
				return nil, err
			}
			req.Limit = &limit
		}
		// part asks for a change of one setting, and refuses what Within did not grant.
		part := func(choice quota.Choice, granted bool, given any, names ...string) (bool, error) {
			if !changed(names...) {
				return false, nil
			}
			for _, name := range names {
				if value, ok := now[name]; ok && !granted {
					return false, fmt.Errorf("agent: annotation %s=%q: %v %s, and this would be more%s", name, value, given, whose(set[choice]),
						remedy(a, choice, set[choice]))
				}
			}
			return true, nil
		}
		if ok, err = part(quota.ChooseWeight, is.Weight == q.Weight, given.Weight, annotationWeight); ok {
			req.Weight = &is.Weight
		}
		if err != nil {
			return nil, err
		}
		// A percentage that was allocated is the scheduler's, which counts it: no choice of the node's goes beyond it.
		beyond := given.Percent > 0 && q.Percent > given.Percent
		if ok, err = part(quota.ChoosePercent, is.Percent == q.Percent && !beyond, percentText(given.Percent), annotationPercent); ok {
			req.Percent = &is.Percent
		}
		if err != nil {
			return nil, err
		}
		if ok, err = part(quota.ChoosePriority, is.Priority == q.Priority, given.Priority, annotationPriority, annotationHighPrio); ok {
			req.Priority = &is.Priority
		}
		if err != nil {
			return nil, err
		}
		if ok, err = part(quota.ChooseSpill, is.Spill == q.Spill, given.Spill, annotationSpill); ok {
			req.Spill = &is.Spill
		}
		if err != nil {
			return nil, err
		}
		list = append(list, req)
	}
	return list, nil
}

// most is the most that a pod's author can have but for what the node leaves him to choose: what was allocated, or the less that an
// administrator has set since. What one has lowered is in set, and no more the author's choice.
func most(a ledger.Allocation) (given quota.Slice, set map[quota.Choice]bool) {
	given = quota.Slice{Weight: a.Given.Weight, Percent: a.Given.Percent, Priority: a.Given.Priority, Spill: a.Given.Spill}
	set = map[quota.Choice]bool{}
	if n := a.Set.Weight; n != nil && *n < given.Weight {
		given.Weight, set[quota.ChooseWeight] = *n, true
	}
	if n := a.Set.Percent; n != nil && *n > 0 && (given.Percent == 0 || *n < given.Percent) { // none is the most
		given.Percent, set[quota.ChoosePercent] = *n, true
	}
	if n := a.Set.Priority; n != nil && *n < given.Priority {
		given.Priority, set[quota.ChoosePriority] = *n, true
	}
	if n := a.Set.Spill; n != nil && *n < given.Spill {
		given.Spill, set[quota.ChooseSpill] = *n, true
	}
	return given, set
}

// whose says where the most comes from.
func whose(set bool) string {
	if set {
		return "is what an administrator of the node left of it"
	}
	return "was allocated"
}

// remedy is what can be done about a change that goes beyond that.
func remedy(a ledger.Allocation, choice quota.Choice, set bool) string {
	if set {
		return ": ask for less"
	}
	if a.Plugin {
		return fmt.Sprintf(": ask for less, or have %q in pod_settings of the node's cgpu.toml", choice)
	}
	return ": ask for less; a claim's own configuration says how much it is"
}

func percentText(n int) string {
	if n == 0 {
		return "no percentage"
	}
	return fmt.Sprintf("%d percent", n)
}

// allocation is that by which the container has a slice of a GPU.
func allocation(record ledger.Record, uuid string) (ledger.Allocation, bool) {
	for _, a := range record.Allocated {
		if a.UUID == uuid && a.Given.Limit > 0 {
			return a, true
		}
	}
	return ledger.Allocation{}, false
}

// limitOf is the limit that annotations ask for: without one, the most that it can be.
func limitOf(now map[string]string, a ledger.Allocation) (quota.Bytes, error) {
	given, set := a.Given.Limit, false
	if n := a.Set.Limit; n != nil {
		given, set = min(given, *n), *n < given
	}
	text, ok := now[annotationLimit]
	if !ok {
		return given, nil
	}
	limit, err := sizeOf(text)
	switch {
	case err != nil:
		return 0, err
	case limit < quota.MinMemory:
		return 0, fmt.Errorf("agent: annotation %s=%q: want at least 64Mi", annotationLimit, text)
	case limit > given:
		return 0, fmt.Errorf("agent: annotation %s=%q: %v %s, and this would be more", annotationLimit, text, given, whose(set))
	}
	return limit, nil
}

// sizeOf reads a size as cgpu has it (6GiB), or as Kubernetes has it (6Gi). Without a unit it is refused: it would be bytes to
// one and GiB to the other.
func sizeOf(text string) (quota.Bytes, error) {
	bad := fmt.Errorf("agent: annotation %s=%q: want a size such as 6Gi or 6144Mi", annotationLimit, text)
	if text == "" || len(text) > 32 || text[len(text)-1] >= '0' && text[len(text)-1] <= '9' {
		return 0, bad
	}
	if size, err := quota.ParseSize(text); err == nil {
		return size, nil
	}
	q, err := resource.ParseQuantity(text)
	if err != nil || q.Sign() <= 0 {
		return 0, bad
	}
	n, exact := q.AsInt64()
	if !exact {
		return 0, bad
	}
	return quota.Bytes(n) / quota.MiB * quota.MiB, nil
}
