// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// ChangeRequest asks for changes of a container that lives. What is nil stays.
type ChangeRequest struct {
	// GPUs are the node's GPUs; Overcommit, Card and MaxSpill are as in Request.
	GPUs       []GPU
	Overcommit float64
	Card       sched.Card
	MaxSpill   quota.Bytes
	// Only has the UUIDs of the GPUs whose slices are changed; none: all slices of the container.
	Only []string
	// Settings are of each of these slices.
	Settings
	// Paused is of the whole container, whatever GPU says; so is Threads, a member's part of the multiprocessors (0: all).
	Paused  *bool
	Threads *int
	// ByPod: the pod's author asks. Any other change is an administrator's, and noted as the most that the author can have.
	ByPod bool
	// Headroom is memory of the GPU, and HeadroomCores percent of its time, that no scheduler was told of. What ByPod asks beyond what was
	// allocated comes out of that.
	Headroom      quota.Bytes
	HeadroomCores int
}

// Change changes the container with a nonce, and returns its record as it is then. It admits as Reserve does, and
// refuses with a *Refusal; all changes are made or none. What asks for no more than before is never refused, also when
// the promises on the GPU are more than it has, because overcommit or a policy of cgpu.toml was changed since.
func (l *Ledger) Change(nonce string, req ChangeRequest) (Record, error) {
	if err := req.validate(); err != nil {
		return Record{}, err
	}
	var changed Record
	err := l.change(func(f *file) error {
		return l.roomy(f, func() error { // which may drop records: the container's place is found each time
			i, err := indexOf(f.Records, nonce)
			if err != nil {
				return err
			}
			others := &file{Cards: f.Cards, Records: slices.Concat(f.Records[:i], f.Records[i+1:])}
			if changed, err = req.apply(others, f.Records[i]); err != nil {
				return err
			}
			f.Records[i] = changed
			return nil
		})
	})
	if err != nil {
		return Record{}, err
	}
	return changed, nil
}

// PodChange is what the annotations of its pod make of a container: all of the requests, or none.
type PodChange struct {
	Nonce    string // of the container's record
	Requests []ChangeRequest
	ByPod    map[string]string // the annotations, which the record then has
}

// ChangeByPods changes containers as Change does, and all of them at once: each guard of the node reads the ledger after each time that it
// is written. A change that does not fit, or has no record, is an error at its place in the list, and no other's.
func (l *Ledger) ChangeByPods(list []PodChange) []error {
	errs := make([]error, len(list))
	for i, p := range list {
		for _, req := range p.Requests {
			errs[i] = errors.Join(errs[i], req.validate())
		}
	}
	err := l.change(func(f *file) error {
		unchanged := errUnchanged
		for i, p := range list {
			if errs[i] == nil {
				errs[i] = l.roomy(f, func() error { return p.apply(f) })
			}
			if errs[i] == nil {
				unchanged = nil
			}
		}
		return unchanged
	})
	for i := range errs {
		if errs[i] == nil {
			errs[i] = err
		}
	}
	return errs
}

func (p *PodChange) apply(f *file) error {
	i, err := indexOf(f.Records, p.Nonce)
	if err != nil {
		return err
	}
	others := &file{Cards: f.Cards, Records: slices.Concat(f.Records[:i], f.Records[i+1:])}
	r := f.Records[i]
	for _, req := range p.Requests {
		if r, err = req.apply(others, r); err != nil {
			return err
		}
	}
	r.ByPod = p.ByPod
	if err := r.bound(); err != nil {
		return err
	}
	f.Records[i] = r
	return nil
}

func (req *ChangeRequest) validate() error {
	switch {
	case req.Weight != nil && (*req.Weight < 1 || *req.Weight > quota.MaxWeight):
		return fmt.Errorf("ledger: weight %d: want 1 to %d", *req.Weight, quota.MaxWeight)
	case req.Percent != nil && (*req.Percent < 0 || *req.Percent > quota.MaxPercent):
		return fmt.Errorf("ledger: percent %d: want 1 to %d, or 0 for none", *req.Percent, quota.MaxPercent)
	case req.Threads != nil && (*req.Threads < 0 || *req.Threads > quota.MaxPercent):
		return fmt.Errorf("ledger: threads %d: want 1 to %d, or 0 for all", *req.Threads, quota.MaxPercent)
	case req.Priority != nil && (*req.Priority < quota.PriorityBestEffort || *req.Priority > quota.PriorityHigh):
		return fmt.Errorf("ledger: priority %d: want %d to %d", *req.Priority, quota.PriorityBestEffort, quota.PriorityHigh)
	}
	if req.ofSlices() {
		if err := req.Card.Validate(); err != nil {
			return fmt.Errorf("ledger: %w", err)
		}
	}
	return nil
}

// Changes says whether the slice of a GPU is among those to change.
func (req *ChangeRequest) Changes(uuid string) bool {
	return len(req.Only) == 0 || slices.Contains(req.Only, uuid)
}

// ofSlices: something of the slices is to change.
func (req *ChangeRequest) ofSlices() bool {
	return req.Limit != nil || req.Spill != nil || req.Weight != nil || req.Percent != nil || req.Priority != nil
}

// apply returns r with the changes, or why they do not fit beside the others.
func (req *ChangeRequest) apply(others *file, r Record) (Record, error) {
	if refusal := req.refuseDomain(&r, others.Records); refusal != nil {
		return r, refusal
	}
	before := spillOf(r.VGPUs)
	r.VGPUs = slices.Clone(r.VGPUs)
	if req.Paused != nil {
		r.Paused = *req.Paused
	}
	assign(&r.Threads, req.Threads)
	for _, uuid := range req.Only {
		if !slices.ContainsFunc(r.VGPUs, func(v VGPU) bool { return v.UUID == uuid }) {
			return Record{}, fmt.Errorf("ledger: container %s has no slice of GPU %s: cgpu smi shows what it has", r.label(), uuid)
		}
	}
	if !req.ofSlices() {
		return r, nil
	}
	matched := false
	for i, old := range r.VGPUs {
		if !req.Changes(old.UUID) {
			continue
		}
		matched = true
		v, err := req.slice(others, old)
		if err == nil && req.ByPod {
			err = req.refuseBeyond(others, r, old, v)
		}
		if err != nil {
			return Record{}, err
		}
		r.VGPUs[i] = v
		if !req.ByPod {
			r.Allocated = req.note(r.Allocated, old.UUID)
		}
	}
	if !matched {
		return Record{}, fmt.Errorf("ledger: container %s has no slice of a GPU", r.label())
	}
	if spillOf(r.VGPUs) > before {
		if err := refuseSpill(others.Records, r.VGPUs, req.MaxSpill); err != nil {
			return Record{}, err
		}
	}
	return r, nil
}

// note returns allocations with what is set now of that of a GPU.
func (req *ChangeRequest) note(list []Allocation, uuid string) []Allocation {
	list = slices.Clone(list)
	for i := range list {
		if s := &list[i].Set; list[i].UUID == uuid {
			last(&s.Limit, req.Limit)
			last(&s.Spill, req.Spill)
			last(&s.Weight, req.Weight)
			last(&s.Percent, req.Percent)
			last(&s.Priority, req.Priority)
		}
	}
	return list
}

func last[T any](to **T, set *T) {
	if set != nil {
		value := *set
		*to = &value
	}
}

// slice returns one slice with the changes.
func (req *ChangeRequest) slice(others *file, old VGPU) (VGPU, error) {
	v := old
	assign(&v.Limit, req.Limit)
	assign(&v.Spill, req.Spill)
	assign(&v.Weight, req.Weight)
	assign(&v.Percent, req.Percent)
	assign(&v.Priority, req.Priority)
	if v == old {
		return v, nil
	}
	i := indexGPU(req.GPUs, v.UUID)
	if i < 0 {
		return VGPU{}, fmt.Errorf("ledger: GPU %q is not on this node any more", v.UUID)
	}
	g := req.GPUs[i]
	l := loadOf(others, g, req.Overcommit, req.Card)
	if v.Limit != old.Limit && (v.Limit < quota.MinMemory || v.Limit > g.Memory) {
		return VGPU{}, badLimit(g, v.Limit)
	}
	if v.Limit > old.Limit && v.Limit > l.free {
		return VGPU{}, l.noRoom(v.Limit)
	}
	if v.Share == old.Share || l.lowers(old.Share, v.Share) {
		return v, nil
	}
	if refusal := l.refuseShare(v.Share); refusal != nil {
		return VGPU{}, refusal
	}
	return v, nil
}

func assign[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// lowers: both shares have a hard cap, the new one is no higher, and it would do on an empty GPU.
func (l load) lowers(from, to sched.Share) bool {
	was, ok := l.card.Cap(from)
	is, capped := l.card.Cap(to)
	return ok && capped && is <= was && l.card.Admit(nil, to) == nil
}
