// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Request asks for a reservation.
type Request struct {
	// Record is what to store. Its VGPUs are the slices asked for; with Place they must be empty.
	Record Record
	// GPUs are the node's GPUs.
	GPUs []GPU
	// Place, if set, lets the ledger choose the GPU.
	Place *Placement
	// Overcommit bounds the sum of limits on a GPU to Overcommit × its memory; 0 means 1.
	Overcommit float64
	// Card is how GPUs are shared that have no settings of their own (SetCard).
	Card sched.Card
	// MaxSpill bounds the sum of all containers' spill; 0: there is none.
	MaxSpill quota.Bytes
	// Refuse, if set, may refuse the slices beside the records of others (Within).
	Refuse func(others []Record, vgpus []VGPU) error
}

// GPU is what admission needs to know of a physical GPU.
type GPU struct {
	UUID   string
	Index  int
	Memory quota.Bytes
}

// Placement asks for slices of GPUs that the ledger chooses.
type Placement struct {
	Policy string // PolicyBinpack or PolicySpread; empty means PolicyBinpack
	Memory quota.Memory
	Count  int  // GPUs; 0 means 1
	Slice  VGPU // spill, weight, percent and priority of each slice; UUID and Limit are filled in
	// Avoid are GPUs that are not chosen, by UUID, and why.
	Avoid map[string]string
}

// Placement policies, as in cgpu.toml.
const (
	PolicyBinpack = "binpack" // the GPU with the least free memory that still has room
	PolicySpread  = "spread"  // the GPU with the most free memory
)

// Refusal is a request that is well-formed but does not fit at present.
type Refusal struct {
	GPU         GPU         // the GPU that has no room; zero when none of several had
	Asked, Free quota.Bytes // on that GPU
	Time        bool        // it is the GPU's time that has no room: weight, percent or priority are at fault
	Held        bool        // an allocation of Kubernetes is in use by as many containers as it is for
	Memory      bool        // it is the GPU's memory that has no room: the limit is at fault
	Domain      bool        // the trust domain is at fault
	Spill       bool        // it is the node's spill that has no room; Asked and Free are spill then
	Reason      string
	Remedy      string
}

// Error is one line, for whoever asked.
func (r *Refusal) Error() string {
	s := ""
	if r.GPU.UUID != "" {
		s += r.GPU.String() + ": "
	}
	return s + r.Reason + "; " + r.Remedy
}

// String names the GPU in messages.
func (g GPU) String() string { return fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID) }

const remedyRoom = "stop a container (cgpu smi lists them), ask for less, or raise overcommit in cgpu.toml"

const remedyAvoided = "see cgpu health; a container that names the GPU starts on it"

// validate refuses requests that no state of the ledger could admit.
func (req *Request) validate() error {
	r := req.Record
	switch {
	case r.ID == "" || r.Nonce == "":
		return errors.New("ledger: a reservation needs a container ID and a nonce")
	case req.Place != nil && len(r.VGPUs) > 0:
		return errors.New("ledger: a reservation names its GPUs or is placed, not both")
	case req.Overcommit < 0 || req.Overcommit != req.Overcommit:
		return fmt.Errorf("ledger: overcommit %v: want a ratio such as 1.0", req.Overcommit)
	}
	if err := req.Card.Validate(); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if p := req.Place; p != nil && p.Policy != "" && p.Policy != PolicyBinpack && p.Policy != PolicySpread {
		return fmt.Errorf("ledger: placement %q: want %s or %s", p.Policy, PolicyBinpack, PolicySpread)
	}
	seen := map[string]bool{}
	use := func(uuid string) error {
		if req.gpu(uuid) < 0 {
			return fmt.Errorf("ledger: GPU %q is not on this node", uuid)
		}
		if seen[uuid] {
			return fmt.Errorf("ledger: GPU %q is asked for twice by one container", uuid)
		}
		seen[uuid] = true
		return nil
	}
	for _, v := range r.VGPUs {
		if err := use(v.UUID); err != nil {
			return err
		}
		if g := req.GPUs[req.gpu(v.UUID)]; v.Limit == 0 || v.Limit > g.Memory {
			return badLimit(g, v.Limit)
		}
	}
	for _, uuid := range r.Native {
		if err := use(uuid); err != nil {
			return err
		}
	}
	for _, a := range r.Allocated {
		if placed := req.Place != nil && a.UUID == ""; a.ID == "" || !placed && !seen[a.UUID] {
			return fmt.Errorf("ledger: allocation %q of GPU %q: the reservation has no such GPU", a.ID, a.UUID)
		}
	}
	return nil
}

func badLimit(g GPU, limit quota.Bytes) error {
	return fmt.Errorf("ledger: %s: a limit of %s: want %s to the GPU's %s", g, limit, quota.MinMemory, g.Memory)
}

// gpu finds a GPU of the request by UUID.
func (req *Request) gpu(uuid string) int { return indexGPU(req.GPUs, uuid) }

func indexGPU(gpus []GPU, uuid string) int {
	return slices.IndexFunc(gpus, func(g GPU) bool { return g.UUID == uuid })
}

// admit decides on req beside the records of f and returns its slices. It changes nothing.
//
// A whole (native) GPU and slices of it exclude each other, because the whole one has no limit and would break the
// others' promise. Several containers may have the same GPU whole, as they would without cgpu, but not beside one to which
// Kubernetes allocated it.
func admit(f *file, req Request) ([]VGPU, error) {
	if refusal := refuseHeld(f.Records, req); refusal != nil {
		return nil, refusal
	}
	vgpus, err := admitGPUs(f, req)
	if err != nil {
		return nil, err
	}
	if err := refuseSpill(f.Records, vgpus, req.MaxSpill); err != nil {
		return nil, err
	}
	if req.Refuse != nil {
		if err := req.Refuse(f.Records, vgpus); err != nil {
			return nil, err
		}
	}
	return vgpus, nil
}

// admitGPUs decides on what is a matter of each GPU.
func admitGPUs(f *file, req Request) ([]VGPU, error) {
	for _, uuid := range req.Record.Native {
		g := req.GPUs[req.gpu(uuid)]
		l := loadOf(f, g, req.Overcommit, req.Card)
		if len(l.shares) > 0 {
			return nil, &Refusal{GPU: g, Asked: g.Memory, Free: l.free,
				Reason: fmt.Sprintf("asked for whole, but %d containers have slices of it, such as %s", len(l.shares), l.holder),
				Remedy: "ask for a slice, or stop those containers"}
		}
		if l.exclusive || l.whole > 0 && req.Record.exclusive(uuid) {
			return nil, &Refusal{GPU: g, Asked: g.Memory,
				Reason: fmt.Sprintf("asked for whole, but container %s has it, and Kubernetes allocates a whole GPU to one alone", l.holder),
				Remedy: "name another GPU, or stop that container"}
		}
	}
	if req.Place != nil {
		return place(f, req)
	}
	for _, v := range req.Record.VGPUs {
		g := req.GPUs[req.gpu(v.UUID)]
		if refusal := loadOf(f, g, req.Overcommit, req.Card).refuse(v, req.Record.Preload); refusal != nil {
			if refusal.Memory && len(req.Record.Allocated) == 0 { // a pod's author is not told of other GPUs than his
				refusal.Reason += req.elsewhere(f, g)
			}
			return nil, refusal
		}
	}
	return req.Record.VGPUs, nil
}

// mostGPUs bounds how many GPUs a message tells of: it is one line of a log.
const mostGPUs = 4

// elsewhere tells what the GPUs beside g have free, but for those that somebody has whole.
func (req *Request) elsewhere(f *file, g GPU) string {
	s := ""
	told := 0
	for _, other := range req.GPUs {
		l := loadOf(f, other, req.Overcommit, req.Card)
		if other.UUID == g.UUID || l.whole > 0 || told == mostGPUs {
			continue
		}
		told++
		s += fmt.Sprintf(", GPU %d has %s", other.Index, l.free.FloorMiB())
	}
	return s
}

// load is what other containers have of one GPU.
type load struct {
	gpu    GPU
	card   sched.Card
	free   quota.Bytes   // of Overcommit × memory
	shares []sched.Share // of those with a slice
	whole  int           // containers that have all of it
	holder string        // one of them, for messages
	// exclusive: one of them has it by an allocation, which is for it alone.
	exclusive bool
}

func loadOf(f *file, g GPU, overcommit float64, def sched.Card) load {
	free := g.Memory
	if overcommit != 0 && overcommit != 1 {
		free = quota.Bytes(min(float64(g.Memory)*overcommit, 1<<62))
	}
	l := load{gpu: g, card: f.card(g.UUID, def), free: free}
	for _, r := range f.Records {
		for _, v := range r.VGPUs {
			if v.UUID == g.UUID {
				l.shares = append(l.shares, v.Share)
				l.holder = r.label()
				// Overcommit may have been lowered since: then nothing is free.
				l.free -= min(l.free, v.Limit)
			}
		}
		if slices.Contains(r.Native, g.UUID) {
			l.whole++
			l.holder = r.label()
			l.exclusive = l.exclusive || r.exclusive(g.UUID)
		}
	}
	return l
}

// refuse says why a slice does not fit; nil when it does. preload: the container has no guard.
func (l load) refuse(v VGPU, preload bool) *Refusal {
	r := &Refusal{GPU: l.gpu, Asked: v.Limit, Free: l.free}
	switch {
	case l.whole > 0:
		r.Reason = fmt.Sprintf("asked for %s, but container %s has the whole GPU", v.Limit, l.holder)
		r.Remedy = "name another GPU, or stop that container"
	case len(l.shares) >= l.card.MaxInst:
		r.Reason = fmt.Sprintf("asked for %s, but %d containers share it already, the most allowed", v.Limit, len(l.shares))
		r.Remedy = fmt.Sprintf("stop one (cgpu smi lists them), or allow more (cgpu policy %d --max-inst N, max_inst in cgpu.toml)", l.gpu.Index)
	case v.Limit > l.free:
		return l.noRoom(v.Limit)
	default:
		if preload {
			if refusal := l.refusePreload(); refusal != nil {
				return refusal
			}
		}
		return l.refuseShare(v.Share)
	}
	return r
}

func (l load) noRoom(limit quota.Bytes) *Refusal {
	return &Refusal{GPU: l.gpu, Asked: limit, Free: l.free, Remedy: remedyRoom, Memory: true,
		Reason: fmt.Sprintf("asked for %s, but %s are free of %s, beside %s", limit, l.free.FloorMiB(), l.gpu.Memory.FloorMiB(),
			terminal.Plural(len(l.shares), "container"))}
}

// refuseShare says why a share of the GPU's time cannot be promised beside the others; nil when it can.
func (l load) refuseShare(s sched.Share) *Refusal {
	err := l.card.Admit(l.shares, s)
	if err == nil {
		return nil
	}
	r := &Refusal{GPU: l.gpu, Free: l.free, Time: true, Reason: err.Error()}
	if why, ok := errors.AsType[*sched.Reason](err); ok {
		r.Reason, r.Remedy = why.Reason, why.Remedy
	}
	return r
}

// place chooses GPUs with room, by policy, equals by index.
func place(f *file, req Request) ([]VGPU, error) {
	type candidate struct {
		index  int
		joined int // -1: where others of its domain are, who can only compute side by side there
		slice  VGPU
		free   quota.Bytes
	}
	var (
		fit      []candidate
		refusals []*Refusal
		tooSmall error
	)
	count := max(req.Place.Count, 1)
	for _, g := range req.GPUs {
		if slices.Contains(req.Record.Native, g.UUID) {
			continue // the container has it whole
		}
		if why := req.Place.Avoid[g.UUID]; why != "" {
			refusals = append(refusals, &Refusal{GPU: g, Reason: why, Remedy: remedyAvoided})
			continue
		}
		limit, err := req.Place.Memory.Limit(g.Memory)
		if err != nil {
			tooSmall = err
			continue
		}
		l := loadOf(f, g, req.Overcommit, req.Card)
		slice := req.Place.Slice
		slice.UUID, slice.Limit = g.UUID, limit
		if refusal := l.refuse(slice, req.Record.Preload); refusal != nil {
			refusals = append(refusals, refusal)
			continue
		}
		c := candidate{g.Index, 0, slice, l.free}
		if HasMembers(f.Records, req.Record.Domain, g.UUID) {
			c.joined = -1
		}
		fit = append(fit, c)
	}
	if len(fit) < count {
		return nil, notPlaced(count, len(fit), refusals, tooSmall)
	}
	// The best of what is left, as often as needed: a general sort would be much code for a few GPUs.
	better := func(a, b candidate) int {
		free := cmp.Compare(a.free, b.free)
		if req.Place.Policy == PolicySpread {
			free = -free
		}
		return cmp.Or(a.joined-b.joined, free, a.index-b.index)
	}
	vgpus := make([]VGPU, 0, count)
	for range count {
		best := 0
		for i := range fit {
			if better(fit[i], fit[best]) < 0 {
				best = i
			}
		}
		vgpus = append(vgpus, fit[best].slice)
		fit = slices.Delete(fit, best, best+1)
	}
	return vgpus, nil
}

// notPlaced explains why too few GPUs had room. When all that there are were too small, that is the reason.
func notPlaced(count, fit int, refusals []*Refusal, tooSmall error) error {
	switch {
	case len(refusals) == 0 && fit == 0 && tooSmall != nil:
		return tooSmall
	case len(refusals) == 0:
		return fmt.Errorf("ledger: %d GPUs asked for, but the node has only %d that can be sliced", count, fit)
	case len(refusals) == 1 && count == 1:
		return refusals[0]
	}
	var reasons []string
	for _, r := range refusals[:min(len(refusals), mostGPUs)] {
		reasons = append(reasons, fmt.Sprintf("GPU %d: %s", r.GPU.Index, r.Reason))
	}
	if more := len(refusals) - mostGPUs; more > 0 {
		reasons = append(reasons, fmt.Sprintf("and %d more", more))
	}
	all := &Refusal{Reason: fmt.Sprintf("%d of the %d GPUs asked for have room: %s", fit, count, strings.Join(reasons, ", ")),
		Remedy: remedyRoom}
	all.Memory = !slices.ContainsFunc(refusals, func(r *Refusal) bool { return !r.Memory })
	if !slices.ContainsFunc(refusals, func(r *Refusal) bool { return !r.Time }) {
		all.Time, all.Remedy = true, refusals[0].Remedy
	}
	if !slices.ContainsFunc(refusals, func(r *Refusal) bool { return r.Remedy != refusals[0].Remedy }) {
		all.Remedy = refusals[0].Remedy
	}
	return all
}

// label names a container in messages. Names come from annotations and are quoted.
func (r Record) label() string {
	if r.Name != "" {
		return strconv.Quote(r.Name[:min(len(r.Name), 64)])
	}
	return r.ID[:min(len(r.ID), 12)]
}
