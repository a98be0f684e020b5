// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
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

// allowance is what the author of a pod may have beyond what was allocated.
type allowance struct {
	free     []quota.Choice // of his own choice, beside a device plugin's allocation
	headroom map[string]quota.Bytes
	cores    int // headroom of each GPU's time, in percent
	// beyond is how much of the headroom, and what weight, his namespace's pods may have. It is asked only where that counts.
	beyond func() (beyond, error)
}

// later is an error that time may mend.
type later struct{ error }

func (l *later) Unwrap() error { return l.error }

// annotationChanges are what annotations make of a container, a request for each of its slices. What an annotation says that was not
// there before, or was and is no more, is changed; the latter back to the most that it can be. All else stays: it is the start's,
// or an administrator's. It is all or nothing: one annotation that goes too far refuses the others too.
func annotationChanges(record ledger.Record, now map[string]string, may allowance) (list []ledger.ChangeRequest, err error) {
	for name, value := range now {
		if len(value) > maxAnnotation {
			return nil, fmt.Errorf("agent: annotation %s: has more than %d bytes", name, maxAnnotation)
		}
	}
	q, err := quota.Beside(nil, now)
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	for _, v := range record.VGPUs {
		a, ok := allocation(record, v.UUID)
		if !ok {
			return nil, fmt.Errorf("agent: annotations change only containers whose share of a GPU Kubernetes allocated; this one asked for "+
				"%v itself", v.Limit)
		}
		w := wishes{now: now, was: record.ByPod, q: q, a: a, may: may}
		w.given, w.set = most(a)
		req, err := w.request()
		if err != nil {
			return nil, err
		}
		list = append(list, req)
	}
	return list, nil
}

// wishes are what annotations ask of one slice.
type wishes struct {
	now, was map[string]string
	q        *quota.Quota // what now says
	a        ledger.Allocation
	given    quota.Slice // the most that the author has without anybody's leave
	set      map[quota.Choice]bool
	may      allowance
}

// changed: one of these annotations is not what it was.
func (w *wishes) changed(names ...string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		value, is := w.now[name]
		old, was := w.was[name]
		return is != was || value != old
	})
}

// request is what is asked of the slice.
func (w *wishes) request() (req ledger.ChangeRequest, err error) {
	req.Only = []string{w.a.UUID}
	if w.changed(annotationLimit) {
		limit, err := w.limit()
		if err != nil {
			return req, err
		}
		req.Limit = &limit
	}
	choices := slices.DeleteFunc(slices.Clone(w.may.free), func(c quota.Choice) bool { return w.set[c] })
	if !w.a.Plugin {
		choices = nil // a claim says itself what holds of it
	}
	is := w.q.Within(w.given, choices)
	// A percentage that was allocated is the scheduler's, which counts it: no choice of the node's goes beyond it.
	if w.given.Percent > 0 {
		is.Percent = min(is.Percent, w.given.Percent)
	}
	if err := w.raise(&is); err != nil {
		return req, err
	}
	return req, cmp.Or(
		part(w, quota.ChooseWeight, &req.Weight, is.Weight, w.q.Weight, w.given.Weight, annotationWeight),
		part(w, quota.ChoosePercent, &req.Percent, is.Percent, w.q.Percent, percentText(w.given.Percent), annotationPercent),
		part(w, quota.ChoosePriority, &req.Priority, is.Priority, w.q.Priority, w.given.Priority, annotationPriority, annotationHighPrio),
		part(w, quota.ChooseSpill, &req.Spill, is.Spill, w.q.Spill, w.given.Spill, annotationSpill))
}

// part asks for a change of one setting to what it may be, and refuses where more is wished.
func part[T comparable](w *wishes, choice quota.Choice, to **T, is, wished T, given any, names ...string) error {
	if !w.changed(names...) {
		return nil
	}
	for _, name := range names {
		if value, ok := w.now[name]; ok && is != wished {
			return fmt.Errorf("agent: annotation %s=%q: %v %s, and this would be more%s", name, value, given, whose(w.set[choice]),
				remedy(w.a, choice, w.set[choice]))
		}
	}
	*to = &is
	return nil
}

// raise raises weight and percentage beyond the allocation, where the namespace may.
func (w *wishes) raise(is *quota.Slice) error {
	asks := func(choice quota.Choice, name string) bool {
		_, ok := w.now[name]
		return ok && w.changed(name) && !w.set[choice]
	}
	if asks(quota.ChooseWeight, annotationWeight) && w.q.Weight > is.Weight {
		may, err := w.may.beyond()
		switch {
		case err != nil:
			return &later{err}
		case w.q.Weight*max(w.a.Containers, 1) > may.weight:
			return w.refuse(annotationWeight, "%d was allocated, and the namespace may have %d for all containers of the share (label %s)%s",
				w.given.Weight, may.weight, labelMaxWeight, remedy(w.a, quota.ChooseWeight, false))
		}
		is.Weight = w.q.Weight
	}
	if asks(quota.ChoosePercent, annotationPercent) && w.given.Percent > 0 && w.q.Percent > w.given.Percent && w.may.cores > 0 {
		may, err := w.may.beyond()
		switch {
		case err != nil:
			return &later{err}
		case (w.q.Percent-w.given.Percent)*max(w.a.Containers, 1) > may.percent:
			return w.refuse(annotationPercent,
				"%d percent was allocated, and pods of this namespace may have %d beyond that for all containers of the share (label %s)",
				w.given.Percent, may.percent, labelMaxCores)
		}
		is.Percent = w.q.Percent
	}
	return nil
}

// refuse says why the namespace may not have what an annotation asks; its label may be changed.
func (w *wishes) refuse(name, format string, args ...any) error {
	return &later{fmt.Errorf("agent: annotation %s=%q: "+format, append([]any{name, w.now[name]}, args...)...)}
}

// most is the most that a pod's author can have but for what the node leaves him to choose: what was allocated, or the less that an
// administrator has set since. What one has lowered is in set, and no more the author's choice.
func most(a ledger.Allocation) (given quota.Slice, set map[quota.Choice]bool) {
	given, set = a.Given.Slice, map[quota.Choice]bool{}
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
	text := ": ask for less"
	if choice == quota.ChoosePercent && a.Given.Percent > 0 {
		return text + "; the node keeps none that no scheduler gives out (headroom_cores in cgpu.toml)"
	}
	if a.Plugin {
		return text + fmt.Sprintf(", or have %q in pod_settings of the node's cgpu.toml", choice)
	}
	return text + "; a claim's own configuration says how much it is"
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

// limit is the memory that annotations ask for: without one, the most that it can be.
func (w *wishes) limit() (quota.Bytes, error) {
	given, set := w.a.Given.Limit, false
	if n := w.a.Set.Limit; n != nil {
		given, set = min(given, *n), *n < given
	}
	text, ok := w.now[annotationLimit]
	if !ok {
		return given, nil
	}
	limit, err := sizeOf("annotation "+annotationLimit, text)
	switch {
	case err != nil:
		return 0, err
	case limit < quota.MinMemory:
		return 0, fmt.Errorf("agent: annotation %s=%q: want at least 64Mi", annotationLimit, text)
	case limit <= given:
		return limit, nil
	case set:
		return 0, fmt.Errorf("agent: annotation %s=%q: %v %s, and this would be more", annotationLimit, text, given, whose(set))
	case w.may.headroom[w.a.UUID] == 0:
		return 0, fmt.Errorf("agent: annotation %s=%q: %v %s, and this would be more: ask for less; the node keeps nothing that no scheduler "+
			"gives out (headroom in cgpu.toml)", annotationLimit, text, given, whose(set))
	}
	may, err := w.may.beyond()
	switch {
	case err != nil:
		return 0, &later{err}
	case (limit-given)*quota.Bytes(max(w.a.Containers, 1)) > may.memory:
		return 0,
			w.refuse(annotationLimit,
				"%v was allocated, and pods of this namespace may have %v beyond that for all containers of the share (label %s)", given, may.memory,
				labelMaxMemory)
	}
	return limit, nil
}

// sizeOf reads a size as cgpu has it (6GiB), or as Kubernetes has it (6Gi). Without a unit it is refused: it would be bytes to
// one and GiB to the other.
func sizeOf(what, text string) (quota.Bytes, error) {
	bad := fmt.Errorf("agent: %s=%q: want a size such as 6Gi or 6144Mi", what, text)
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
