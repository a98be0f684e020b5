// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// place is where a GPU sits in the machine.
type place struct {
	link string   // the same for GPUs that NVLink joins; empty: joined to none
	numa int      // -1: unknown
	bus  []string // root and bridges above the GPU, such as "pci0000:40", "0000:40:01.1", "0000:41:00.0"; empty: unknown
}

// readPlace asks the node table and sysfs. What they do not tell is unknown.
func readPlace(sys string, g device.GPU) place {
	p := place{link: g.NVLink, numa: -1}
	folder := filepath.Join(sys, "bus/pci/devices", strings.ToLower(g.BusID))
	if text, err := os.ReadFile(filepath.Join(folder, "numa_node")); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
			p.numa = n
		}
	}
	if target, err := filepath.EvalSymlinks(folder); err == nil {
		if _, below, ok := strings.Cut(filepath.Dir(target), "/pci"); ok {
			p.bus = strings.Split(below, "/")
		}
	}
	return p
}

// apart is the distance of GPUs that nothing is known to join.
const apart = 4

// distance of two GPUs: 0 joined by NVLink, 1 below one port or switch, 2 below one root, 3 in one NUMA node, 4 apart or unknown.
func (p place) distance(q place) int {
	if p.link != "" && p.link == q.link {
		return 0
	}
	common := 0
	for common < min(len(p.bus), len(q.bus)) && p.bus[common] == q.bus[common] {
		common++
	}
	switch {
	case common > 1:
		return 1
	case common == 1:
		return 2
	case p.numa >= 0 && p.numa == q.numa:
		return 3
	}
	return apart
}

// The placements of cgpu.toml.
const (
	binpack = ledger.PolicyBinpack // the GPU with the least room that has enough
	spread  = ledger.PolicySpread  // the one with the most
)

// request is what the kubelet wants to place: each of gpus GPUs is to have need units.
type request struct {
	resource  string
	need      int
	gpus      int
	free      map[string]int    // units of this resource that each GPU (UUID) has
	must      []string          // GPUs that have to be among the chosen ones
	like      func(card) int    // the lower the better, before all else; nil: all alike
	placement string            // binpack or spread
	barred    map[string]string // GPUs (UUID) that are not for it, and why
}

// choose picks the GPUs. A container gets its units from as many GPUs as it asks for, never from one more because no single
// one has room: its limit would be a sum that no program can use.
func choose(cards []card, r request) ([]card, error) {
	var able []card
	for _, c := range cards {
		if !c.gone && c.Fault == "" && r.barred[c.UUID] == "" && r.free[c.UUID] >= r.need && (r.resource != ResourceMemory || r.need <= c.most) {
			able = append(able, c)
		}
	}
	for _, uuid := range r.must {
		if !slices.ContainsFunc(able, func(c card) bool { return c.UUID == uuid }) {
			able = nil
		}
	}
	if len(able) < r.gpus || len(r.must) > r.gpus {
		return nil, r.noRoom(cards)
	}
	var best []card
	var bestRank []int
	eachSet(able, r.gpus, func(set []card) {
		for _, uuid := range r.must {
			if !slices.ContainsFunc(set, func(c card) bool { return c.UUID == uuid }) {
				return
			}
		}
		if rank := r.rank(set, cards); best == nil || slices.Compare(rank, bestRank) < 0 {
			best, bestRank = slices.Clone(set), rank
		}
	})
	return best, nil
}

// rank orders sets of GPUs, the lowest first: what is liked, then near each other, then the placement; equals by what is free around
// them, so that GPUs that are near each other fill up together, and others stay free together for who wants several.
func (r request) rank(set, cards []card) []int {
	like, distance, free, around := 0, 0, 0, 0
	for i, c := range set {
		if r.like != nil {
			like += r.like(c)
		}
		for _, d := range set[:i] {
			distance += c.place.distance(d.place)
		}
		free += r.free[c.UUID]
		for _, d := range cards {
			around += r.free[d.UUID] * (apart - c.place.distance(d.place))
		}
	}
	if r.placement == spread {
		free, around = -free, -around
	}
	return []int{like, distance, free, around}
}

// eachSet calls f with each set of n cards, those of low positions first. A machine with 16 GPUs has 12870 sets of 8.
func eachSet(cards []card, n int, f func([]card)) {
	set := make([]card, 0, n)
	var add func(from int)
	add = func(from int) {
		if len(set) == n {
			f(set)
			return
		}
		for i := from; i <= len(cards)-(n-len(set)); i++ {
			set = append(set, cards[i])
			add(i + 1)
			set = set[:len(set)-1]
		}
	}
	add(0)
}

// noRoom says what is free where.
func (r request) noRoom(cards []card) error {
	var each []string
	barred := 0
	for _, c := range cards {
		state := fmt.Sprintf("GPU %d: %d of %d", c.position, r.free[c.UUID], c.amount(r.resource))
		switch why := r.barred[c.UUID]; {
		case c.gone:
			state = fmt.Sprintf("GPU %d: gone", c.position)
		case c.Fault != "":
			state = fmt.Sprintf("GPU %d: unhealthy, %s", c.position, c.Fault)
		case why != "":
			state += ", " + why
			barred++
		}
		each = append(each, state)
	}
	what := "no GPU of this node has"
	switch {
	case len(r.must) > 0:
		what = "the GPU that this container is bound to has not"
	case r.gpus > 1:
		what = fmt.Sprintf("no %d GPUs of this node have each", r.gpus)
	}
	remedy := "the node has room only in sum; ask for less, or let gpushare's scheduler extender or DRA place such pods"
	if barred > 0 {
		remedy = "stop a container, or ask for what the GPUs' settings allow (cgpu policy shows and changes them)"
	}
	return fmt.Errorf("deviceplugin: %s=%d: %s %d units free (%s): %s", r.resource, r.need*r.gpus, what, r.need, strings.Join(each, ", "),
		remedy)
}

// pick takes ids: all of must, then the lowest numbers that are available, need on each of the chosen GPUs.
func pick(chosen []card, resource string, need int, available, must []string) []string {
	taken, in := map[string]int{}, make(map[string]bool, len(must))
	ids := slices.Clone(must)
	for _, id := range must {
		uuid, _, _, _ := parseID(id)
		taken[uuid]++
		in[id] = true
	}
	numbers := map[string][]int{}
	for _, id := range available {
		if uuid, _, n, ok := parseID(id); ok && !in[id] {
			numbers[uuid] = append(numbers[uuid], n)
		}
	}
	for _, c := range chosen {
		slices.Sort(numbers[c.UUID])
		for _, n := range numbers[c.UUID][:max(0, min(need-taken[c.UUID], len(numbers[c.UUID])))] {
			ids = append(ids, c.id(resource, n))
		}
	}
	return ids
}

// count sorts ids by GPU: how many of each, and the GPUs in order of position. It refuses ids that are nobody's.
func count(cards []card, resource string, ids []string) (per map[string]int, used []card, err error) {
	per = map[string]int{}
	seen := make(map[string]bool, len(ids))
	byUUID := map[string]card{}
	for _, c := range cards {
		byUUID[c.UUID] = c
	}
	for _, id := range ids {
		uuid, _, n, ok := parseID(id)
		c, known := byUUID[uuid]
		switch {
		case !ok || !known || id != c.id(resource, n) || seen[id] || n < 0 || !c.gone && n >= c.amount(resource):
			return nil, nil, fmt.Errorf("deviceplugin: %s: the kubelet names %.80q, which is no device of this node: was the unit or the "+
				"table changed?", resource, id)
		case c.gone:
			return nil, nil, fmt.Errorf("deviceplugin: %s: GPU %s is gone from the node: the pod has to be placed anew", resource, uuid)
		}
		seen[id] = true
		if per[uuid]++; per[uuid] == 1 {
			used = append(used, c)
		}
	}
	slices.SortFunc(used, func(a, b card) int { return cmp.Compare(a.position, b.position) })
	return per, used, nil
}
