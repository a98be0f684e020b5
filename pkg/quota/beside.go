// SPDX-License-Identifier: Apache-2.0

package quota

import "slices"

// Choice is a setting that a node can leave to the authors of pods (pod_settings in cgpu.toml).
type Choice string

// The choices.
const (
	ChooseWeight   Choice = "weight"
	ChoosePriority Choice = "priority"
	ChooseSpill    Choice = "spill"
	ChoosePercent  Choice = "percent"
)

// Choices are all of them.
func Choices() []Choice {
	return []Choice{ChooseWeight, ChoosePriority, ChooseSpill, ChoosePercent}
}

// Beside reads what a container says of itself whose GPUs were allocated (package alloc). All of it is the author's of a pod:
// variables, and the annotations below cgpu.io/, which containerd passes on from the pod. So nothing of it says which GPUs or
// how much memory, nor does CGPU_DISABLE count; Within says what the rest can do.
func Beside(env []string, annotations map[string]string) (*Quota, error) {
	s := gather(env, annotations)
	s.beside = true
	q := &Quota{Asked: map[string]string{}, Ignored: s.ignored(env, annotations, nil)}
	q.Priority = PriorityDefault
	for _, read := range []func(*Quota, *settings) error{readSpill, readCompute, readLimiter, readDomain} {
		if err := read(q, s); err != nil {
			return nil, err
		}
	}
	return q, nil
}

// Within is the allocated slice as the container wishes it. What is in free it may choose; all else it can only lower.
//
// A percentage where none was allocated is no lower one: it is a promise, which leaves less to promise to others, and under
// policy soft a guarantee.
func (q *Quota) Within(allocated Slice, free []Choice) Slice {
	s := allocated
	if q.said(schdWeight) && (slices.Contains(free, ChooseWeight) || q.Weight < s.Weight) {
		s.Weight = q.Weight
	}
	if q.said(corePercentage) && (slices.Contains(free, ChoosePercent) || q.Percent < s.Percent) {
		s.Percent = q.Percent
	}
	if q.said(priority, highPrio) && (slices.Contains(free, ChoosePriority) || q.Priority < s.Priority) {
		s.Priority = q.Priority
	}
	if q.said(memSpill) && (slices.Contains(free, ChooseSpill) || q.Spill < s.Spill) {
		s.Spill = q.Spill
	}
	return s
}

// said reports that one of keys was set.
func (q *Quota) said(keys ...key) bool {
	return slices.ContainsFunc(keys, func(k key) bool {
		_, ok := q.askedBy(k)
		return ok
	})
}

// RefuseUnallocated makes the error for a request of a pod that its own container makes, on nodes where only what Kubernetes
// allocated counts.
func (q *Quota) RefuseUnallocated() error {
	return q.refuse("in a pod of this node only what was allocated counts (pods in cgpu.toml)",
		"ask with a limit of aliyun.com/gpu-mem, or with a ResourceClaim", memContainer)
}
