// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/device"
)

// eight is a node of eight GPUs: four below each of two sockets, two below each switch, and NVLink as links say.
func eight(links [8]string) (cards []card) {
	for i := range 8 {
		root := fmt.Sprintf("pci0000:%d0", i/4)
		cards = append(cards, card{GPU: device.GPU{UUID: fmt.Sprint("GPU-", i), Index: i, NVLink: links[i]}, position: i, units: 80, most: 80,
			place: place{link: links[i], numa: i / 4, bus: []string{root, fmt.Sprintf("0000:%d%d:01.0", i/4, i/2), fmt.Sprint("port", i)}}})
	}
	return cards
}

// bridges join each GPU to one of another switch, as in machines with NVLink bridges; quads all of one socket.
var (
	bridges = [8]string{"a", "b", "a", "b", "c", "d", "c", "d"}
	quads   = [8]string{"a", "a", "a", "a", "b", "b", "b", "b"}
)

func positions(cards []card) (list []int) {
	for _, c := range cards {
		list = append(list, c.position)
	}
	return list
}

func TestChooseNear(t *testing.T) {
	for what, tt := range map[string]struct {
		links     [8]string
		free      [8]int
		gpus      int
		placement string
		want      []int
	}{
		"a pair joined by NVLink, and not the neighbour":  {bridges, [8]int{80, 80, 80, 80, 80, 80, 80, 80}, 2, binpack, []int{0, 2}},
		"the next pair, where one of the first is taken":  {bridges, [8]int{0, 80, 80, 80, 80, 80, 80, 80}, 2, binpack, []int{1, 3}},
		"one switch, where NVLink joins none of the rest": {bridges, [8]int{0, 80, 80, 0, 80, 80, 0, 0}, 2, binpack, []int{4, 5}},
		"one socket":                              {bridges, [8]int{80, 0, 0, 80, 0, 80, 0, 0}, 2, binpack, []int{0, 3}},
		"what is left":                            {bridges, [8]int{80, 0, 0, 0, 0, 80, 0, 0}, 2, binpack, []int{0, 5}},
		"four of one socket":                      {bridges, [8]int{80, 0, 80, 80, 80, 80, 80, 80}, 4, binpack, []int{4, 5, 6, 7}},
		"four that NVLink joins":                  {quads, [8]int{80, 80, 0, 80, 80, 80, 80, 80}, 4, binpack, []int{4, 5, 6, 7}},
		"one, where a neighbour is taken already": {bridges, [8]int{80, 80, 80, 80, 80, 0, 80, 80}, 1, binpack, []int{7}},
		"one, where most is free around it":       {quads, [8]int{80, 80, 20, 80, 80, 80, 80, 80}, 1, spread, []int{4}},
		"one that is used already":                {quads, [8]int{80, 80, 80, 80, 80, 80, 80, 40}, 1, binpack, []int{7}},
	} {
		r := request{resource: ResourceMemory, need: 20, gpus: tt.gpus, placement: tt.placement, free: map[string]int{}}
		for i, n := range tt.free {
			r.free[fmt.Sprint("GPU-", i)] = n
		}
		got, err := choose(eight(tt.links), r)
		if err != nil || !slices.Equal(positions(got), tt.want) {
			t.Errorf("%s: %v, %v, want %v", what, positions(got), err, tt.want)
		}
	}
}

// Pods come and go on a node of eight GPUs: what part of those with two GPUs has two that NVLink joins, with the placement as it is, and
// without what it knows of NVLink. docs/measurements.md has the figures.
func TestPlacementOfEight(t *testing.T) {
	for _, links := range [][8]string{bridges, quads} {
		near, other := simulate(t, eight(links), true, binpack), simulate(t, eight(links), false, binpack)
		t.Logf("NVLink %v: %v; without NVLink in the node table: %v", links, near, other)
		if near.joined*other.pairs < other.joined*near.pairs || 100*near.joined < 99*near.pairs || near.refused > 20 {
			t.Errorf("NVLink %v: %v, without NVLink %v", links, near, other)
		}
	}
}

// Packed, a node has GPUs left that nobody uses, for who wants much of one; spread, who is alone on a GPU more often, and they have not.
func TestBinpackAgainstSpread(t *testing.T) {
	packed, apart := simulate(t, eight(quads), true, binpack), simulate(t, eight(quads), true, spread)
	t.Logf("binpack: %.2f of 8 GPUs unused, %d pods alone on theirs, %d refused; spread: %.2f, %d, %d", packed.meanUnused(), packed.alone,
		packed.refused, apart.meanUnused(), apart.alone, apart.refused)
	if packed.meanUnused() < apart.meanUnused()+1 || packed.alone >= apart.alone {
		t.Errorf("binpack %+v, spread %+v", packed, apart)
	}
}

type outcome struct{ pairs, joined, fours, together, refused, placed, unused, alone int }

func (o outcome) String() string {
	return fmt.Sprintf("%d of %d pairs joined, %d of %d fours on one socket, %d refused", o.joined, o.pairs, o.together, o.fours, o.refused)
}

// meanUnused is how many GPUs nobody used, in the mean over all moments after a pod was placed.
func (o outcome) meanUnused() float64 { return float64(o.unused) / float64(o.placed) }

// simulate places 4000 pods, of which 70 % want a part of one GPU, 20 % of two and 10 % of four. About half of the node is in use.
func simulate(t *testing.T, cards []card, known bool, placement string) (o outcome) {
	if !known {
		cards = slices.Clone(cards)
		for i := range cards {
			cards[i].place.link = ""
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	free := map[string]int{}
	for _, c := range cards {
		free[c.UUID] = c.units
	}
	type pod struct {
		need int
		on   []card
	}
	var pods []pod
	for range 4000 {
		for used := 0; ; {
			used = 8 * 80
			for _, n := range free {
				used -= n
			}
			if used <= 8*80/2 {
				break
			}
			i := rng.IntN(len(pods))
			for _, c := range pods[i].on {
				free[c.UUID] += pods[i].need
			}
			pods = slices.Delete(pods, i, i+1)
		}
		r := request{resource: ResourceMemory, need: 8 + 8*rng.IntN(5), gpus: 1, placement: placement, free: free}
		switch n := rng.IntN(10); {
		case n == 9:
			r.gpus = 4
		case n >= 7:
			r.gpus = 2
		}
		on, err := choose(cards, r)
		if err != nil {
			o.refused++
			continue
		}
		if !slices.ContainsFunc(on, func(c card) bool { return free[c.UUID] < c.units }) {
			o.alone++
		}
		for _, c := range on {
			if free[c.UUID] -= r.need; free[c.UUID] < 0 {
				t.Fatalf("%s has %d units too few", c.UUID, -free[c.UUID])
			}
		}
		pods = append(pods, pod{r.need, on})
		o.placed++
		for _, c := range cards {
			if free[c.UUID] == c.units {
				o.unused++
			}
		}
		switch {
		case r.gpus == 2:
			o.pairs++
			if on[0].NVLink == on[1].NVLink {
				o.joined++
			}
		case r.gpus == 4:
			o.fours++
			if on[0].place.numa == on[3].place.numa {
				o.together++
			}
		}
	}
	return o
}

// A pod's own wish goes before the node's placement; where another pod may be meant that wishes otherwise, the node's counts.
func TestPodsPlacement(t *testing.T) {
	client := fake.NewClientset(node())
	k := newKubelet(t)
	k.start()
	k.begin(Options{Client: client, Table: table(binpack, t4, t4)})
	k.until(ResourceMemory, 28, 0)
	admit := func(name, wish string, units, want int) {
		t.Helper()
		p := podOf(name, [2]int{units, 0})
		if wish != "" {
			p.Annotations[annotationPlacement] = wish
		}
		bind(t, client, p, noIndex)
		k.mustAdmit(p)
		if got := k.gpuOf(p, "c0"); got != uuid(want) {
			t.Errorf("%s is on %s, want GPU %d", name, got, want)
		}
		started(t, client, p, corev1.PodRunning)
	}
	admit("first", "", 2, 0)
	admit("packed", "", 2, 0)
	admit("apart", "spread", 2, 1)
	admit("misspelt", "Spread", 2, 0)
	other := podOf("other", [2]int{3, 0})
	other.Annotations[annotationPlacement] = "spread"
	bind(t, client, other, noIndex)
	admit("beside it", "", 3, 0)
}
