// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"slices"
	"strconv"
	"strings"
)

// NeedsPlacement reports that no GPU was named, so that the node chooses one (ledger.Placement).
func (q *Quota) NeedsPlacement() bool { return q.Visible.IsZero() }

// NamesGPUs reports that the GPUs to slice were named, by more than NVIDIA's variable.
func (q *Quota) NamesGPUs() bool { return q.said(visibleDevices, memIdx) }

// Resolve binds q to the GPUs of a node: the sliced ones with their limits, and the indices of those given whole, both
// ascending by index. When q needs placement, grants is empty and the caller chooses.
func (q *Quota) Resolve(gpus []GPU) (grants []Grant, native []int, err error) {
	if q.NeedsPlacement() {
		if _, err := q.Placed(); err != nil {
			return nil, nil, err
		}
	}
	visible, err := q.pick(q.Visible, gpus, visibleDevices, memIdx, nvidiaVisible)
	if err != nil {
		return nil, nil, err
	}
	whole, err := q.pick(q.Native, gpus, nvidiaVisible)
	if err != nil {
		return nil, nil, err
	}
	for _, g := range whole {
		if slices.ContainsFunc(visible, func(v GPU) bool { return v.Index == g.Index }) {
			name, value := q.source(nvidiaVisible)
			return nil, nil, &Error{name, value, "names " + describe(g) + ", which is to be sliced too", oneList}
		}
		native = append(native, g.Index)
	}
	if len(visible) > 0 {
		if err := q.fits(len(visible), len(whole)); err != nil {
			return nil, nil, err
		}
	}
	for n, g := range visible {
		memory, err := q.limitOf(n)
		if err != nil {
			return nil, nil, err
		}
		limit, err := memory.Limit(g.Memory)
		if err != nil {
			if refused, ok := errors.AsType[*Error](err); ok {
				err = q.Misfit(refused, "on "+describe(g)+" ")
			}
			return nil, nil, err
		}
		grants = append(grants, Grant{Index: g.Index, Limit: limit})
	}
	return grants, native, nil
}

// pick finds the GPUs that s names; keys are where s may have come from.
func (q *Quota) pick(s Selector, gpus []GPU, keys ...key) ([]GPU, error) {
	if s.IsZero() {
		return nil, nil
	}
	bad := func(reason, remedy string) ([]GPU, error) {
		name, value := q.source(keys...)
		return nil, &Error{name, value, reason, remedy}
	}
	if len(gpus) == 0 {
		return bad("this machine has no GPU", "check with nvidia-smi, or see driver in cgpu.toml")
	}
	var picked []GPU
	if s.All {
		picked = slices.Clone(gpus)
	}
	for _, id := range s.IDs {
		g, reason := find(id, gpus)
		if reason != "" {
			return bad(reason, seeGPUs)
		}
		if slices.ContainsFunc(picked, func(p GPU) bool { return p.Index == g.Index }) {
			return bad("names "+describe(g)+" twice", "name each GPU once")
		}
		picked = append(picked, g)
	}
	// A general sort of few GPUs would be 10 KB of every cgpu-runtime.
	for i := range picked {
		for j := i; j > 0 && picked[j-1].Index > picked[j].Index; j-- {
			picked[j-1], picked[j] = picked[j], picked[j-1]
		}
	}
	return picked, nil
}

// find returns the one GPU that id names, or the reason why there is none. A whole UUID wins over being the beginning
// of another.
func find(id string, gpus []GPU) (GPU, string) {
	if isDigits(id) {
		if n, ok := digits(id); ok {
			for _, g := range gpus {
				if uint64(g.Index) == n {
					return g, ""
				}
			}
		}
		return GPU{}, "there is no GPU " + show(id) + " among the " + strconv.Itoa(len(gpus)) + " of this machine"
	}
	var found []GPU
	for _, g := range gpus {
		switch {
		case strings.EqualFold(g.UUID, id):
			return g, ""
		case isGPUID(id) && len(g.UUID) > len(id) && strings.EqualFold(g.UUID[:len(id)], id):
			found = append(found, g)
		}
	}
	switch len(found) {
	case 0:
		return GPU{}, "there is no GPU " + show(id) + " on this machine"
	case 1:
		return found[0], ""
	}
	return GPU{}, show(id) + " is the beginning of more than one UUID: " + describe(found[0]) + " and " + describe(found[1])
}

// describe names a GPU in a message.
func describe(g GPU) string {
	s := "GPU " + strconv.Itoa(g.Index)
	if g.UUID != "" {
		s += " (" + g.UUID + ")"
	}
	return s
}
