// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// A GPU has room for so many containers (max_inst), whatever memory is left, and its policy may enforce no percentage, or no
// large one. The ledger refuses what is beyond that when the container starts, and the kubelet would start it again for ever.
// So it is looked at here, where another GPU can be chosen, or the pod refused once and with the reason.

// holder is a container that has units of gpu-mem.
type holder struct {
	// replaced: another container of its pod took over some of its units, so it is an init container that has ended.
	replaced bool
}

// holders says which container has a unit. The kubelet names no containers, but what it allocated is a set of ids, and ids that
// it has not are free again; so the number of sets is that of the containers.
type holders map[string]*holder

// allocate books ids for one container.
func (h holders) allocate(ids []string) {
	now := &holder{}
	for _, id := range ids {
		if was := h[id]; was != nil {
			was.replaced = true
		}
		h[id] = now
	}
}

// adopt books what the kubelet says that a container has, where that is not known: what was allocated before this plugin
// started.
func (h holders) adopt(ids []string) {
	if !slices.ContainsFunc(ids, func(id string) bool { return h[id] != nil }) {
		h.allocate(ids)
	}
}

// free drops the units that the kubelet has, except those that go to the container that is asked for.
func (h holders) free(available, except []string) {
	kept := map[string]*holder{}
	for _, id := range except {
		if was := h[id]; was != nil {
			kept[id] = was
		}
	}
	for _, id := range available {
		delete(h, id)
	}
	for id, was := range kept {
		h[id] = was
	}
}

// count is the number of containers on each GPU, without those that make way for one with the ids in except.
func (h holders) count(except []string) map[string]int {
	going := map[*holder]bool{}
	for _, id := range except {
		going[h[id]] = true
	}
	type pair struct {
		uuid string
		h    *holder
	}
	seen := map[pair]bool{}
	number := map[string]int{}
	for id, one := range h {
		uuid, _, _, _ := parseID(id)
		if p := (pair{uuid, one}); !one.replaced && !going[one] && !seen[p] {
			seen[p] = true
			number[uuid]++
		}
	}
	return number
}

// sharing is how each GPU is shared, and by how many.
type sharing struct {
	cards  map[string]sched.Card
	def    sched.Card
	number map[string]int
}

// sharing asks the ledger for the GPUs' settings and for the containers that no device plugin served, such as Docker's. Where
// it cannot be read, the node's defaults hold; the ledger decides when the container starts.
func (c *call) sharing(except []string) sharing {
	s := sharing{def: c.card, number: c.p.allocState.holders.count(except)}
	records, cards, err := ledger.Open(c.p.o.RunDir).State()
	if err != nil {
		c.p.log.Warn("containers on each GPU", "err", err)
		return s
	}
	s.cards = cards
	plugin := map[string]int{}
	for _, r := range records {
		for _, v := range r.VGPUs {
			if slices.ContainsFunc(r.Allocated, func(a ledger.Allocation) bool { return a.Plugin && a.UUID == v.UUID }) {
				plugin[v.UUID]++
			} else {
				s.number[v.UUID]++
			}
		}
	}
	if !c.p.allocState.adopted {
		// What an earlier plugin allocated is not known, but what has started of it is.
		for uuid, n := range plugin {
			s.number[uuid] = max(s.number[uuid], n)
		}
	}
	return s
}

// of is how a GPU is shared. MaxInst is 0 where nobody has said it.
func (s sharing) of(uuid string) sched.Card {
	if card, ok := s.cards[uuid]; ok {
		return card
	}
	return s.def
}

// full says that a GPU has no place for another container; empty where it has.
func (s sharing) full(uuid string) string {
	if most := s.of(uuid).MaxInst; most > 0 && s.number[uuid] >= most {
		return fmt.Sprintf("%d containers share it, the most allowed (max_inst)", s.number[uuid])
	}
	return ""
}

// percent says why a GPU's policy promises no such percentage to any container; empty where it does.
func (s sharing) percent(uuid string, percent int) string {
	if percent == 0 {
		return ""
	}
	if err := s.of(uuid).Admit(nil, sched.Share{Weight: 1, Percent: percent}); err != nil {
		return err.Error()
	}
	return ""
}

// barred says which GPUs are not for a container that is to have need units of a resource, and why, whatever is free there.
// beside are the GPUs where it has its other resource, and so its place.
func (s sharing) barred(cards []card, resource string, need int, beside []string) map[string]string {
	all := map[string]string{}
	for _, k := range cards {
		why := ""
		if resource == ResourcePercent {
			why = s.percent(k.UUID, need)
		}
		if why == "" && !(resource == ResourcePercent && slices.Contains(beside, k.UUID)) {
			why = s.full(k.UUID)
		}
		if why != "" {
			all[k.UUID] = why
		}
	}
	return all
}

// meet asks the kubelet, before a registration, which containers have units. Those of another size are refused: the kubelet
// would count the present ones beside them, all of each GPU. What containers have is learnt once.
//
// A kubelet that does not answer is not waited for. Should its containers have units of another size, it admits none of them
// again, since it finds their ids in the list no more.
func (p *Plugin) meet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, meetTimeout)
	defer cancel()
	booked, err := p.booked(ctx, ResourceMemory)
	if err != nil {
		p.log.Warn("containers of an earlier time are not known", "err", err)
		return nil
	}
	if err := p.sameUnit(booked); err != nil {
		return err
	}
	select {
	case p.calls <- struct{}{}:
		defer func() { <-p.calls }()
	case <-ctx.Done():
		return nil
	}
	if p.allocState.adopted {
		return nil
	}
	for _, containers := range booked {
		for _, ids := range containers {
			p.allocState.holders.adopt(ids)
		}
	}
	p.allocState.adopted = true
	return nil
}

// sameUnit refuses to serve beside containers that have units of another size.
func (p *Plugin) sameUnit(booked map[string]map[string][]string) error {
	n, was := 0, quota.Bytes(0)
	for _, containers := range booked {
		for _, ids := range containers {
			if _, unit, _, ok := parseID(ids[0]); ok && unit != p.o.Unit {
				n, was = n+1, unit
			}
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("deviceplugin: unit %v: was %v, and %d containers of this node hold units of that: drain the node first, or keep "+
		"the unit", p.o.Unit, was, n)
}
