// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const gib = quota.GiB

// preempt, fixed and so on are cards for 20 containers.
func card(p sched.Policy, maxInst int) sched.Card {
	return sched.Card{Policy: p, MaxInst: maxInst, PrioRatio: sched.DefaultPrioRatio}
}

var preempt = card(sched.PolicyPreempt, 20)

var twoGPUs = []GPU{{"GPU-a", 0, 16 * gib}, {"GPU-b", 1, 24 * gib}}

func slice(uuid string, limit quota.Bytes) []VGPU {
	return []VGPU{{UUID: uuid, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: 1}}}}
}

func percent(uuid string, n int) []VGPU {
	return []VGPU{{UUID: uuid, Slice: quota.Slice{Limit: gib, Share: quota.Share{Weight: 1, Percent: n}}}}
}

func TestAdmit(t *testing.T) {
	six := []Record{{ID: "one", VGPUs: slice("GPU-a", 6*gib)}}
	for _, c := range []struct {
		name    string
		others  []Record
		req     Request
		refused string // "" when admitted
	}{
		{"empty node", nil, Request{Record: Record{VGPUs: slice("GPU-a", 16*gib)}}, ""},
		{"just fits", six, Request{Record: Record{VGPUs: slice("GPU-a", 10*gib)}}, ""},
		{"others have room", six, Request{Record: Record{VGPUs: slice("GPU-a", 11*gib)}}, "beside 1 container, GPU 1 has "},
		{"others have room, but not for a pod", six,
			Request{Record: Record{VGPUs: slice("GPU-a", 11*gib), Allocated: []Allocation{{UUID: "GPU-a", ID: "c"}}}}, "beside 1 container; "},
		{"one byte too many", six, Request{Record: Record{VGPUs: slice("GPU-a", 10*gib+1)}}, "10240MiB are free of 16384MiB, beside 1 container"},
		{"other GPU", six, Request{Record: Record{VGPUs: slice("GPU-b", 24*gib)}}, ""},
		{"one of two", six, Request{Record: Record{VGPUs: append(slice("GPU-b", 6*gib), slice("GPU-a", 11*gib)...)}},
			"GPU 0 (GPU-a): asked for 11264MiB"},
		{"overcommit", six, Request{Record: Record{VGPUs: slice("GPU-a", 16*gib)}, Overcommit: 1.375}, ""},
		{"overcommit used up", six, Request{Record: Record{VGPUs: slice("GPU-a", 16*gib)}, Overcommit: 1.374}, "free of"},
		{"overcommit lowered", []Record{{ID: "x", VGPUs: slice("GPU-a", 16*gib)}, {ID: "y", VGPUs: slice("GPU-a", 16*gib)}},
			Request{Record: Record{VGPUs: slice("GPU-a", quota.MiB)}}, "0MiB are free"},
		{"instances", six, Request{Record: Record{VGPUs: slice("GPU-a", gib)}, Card: card(sched.PolicyPreempt, 2)}, ""},
		{"instances used up", six, Request{Record: Record{VGPUs: slice("GPU-a", gib)}, Card: card(sched.PolicyPreempt, 1)},
			"1 containers share it already, the most allowed; stop one (cgpu smi lists them), or allow more (cgpu policy 0 --max-inst N"},
		{"instances of this GPU", six, Request{Record: Record{VGPUs: slice("GPU-b", gib)}, Card: card(sched.PolicyPreempt, 1)}, ""},
		{"percent", []Record{{ID: "x", VGPUs: percent("GPU-a", 40)}}, Request{Record: Record{VGPUs: percent("GPU-a", 60)}}, ""},
		{"percent beside weights", six, Request{Record: Record{VGPUs: percent("GPU-a", 100)}}, ""},
		{"percent used up", []Record{{ID: "x", VGPUs: percent("GPU-a", 40)}}, Request{Record: Record{VGPUs: percent("GPU-a", 61)}},
			"GPU 0 (GPU-a): asked for 61 % of the GPU's time, but 60 % are free"},
		{"percent of another GPU", []Record{{ID: "x", VGPUs: percent("GPU-b", 40)}}, Request{Record: Record{VGPUs: percent("GPU-a", 100)}}, ""},
		{"percent of one of two", []Record{{ID: "x", VGPUs: percent("GPU-b", 40)}},
			Request{Record: Record{VGPUs: append(percent("GPU-a", 70), percent("GPU-b", 70)...)}}, "GPU 1 (GPU-b): asked for 70 %"},
		{"weight as a cap", []Record{{ID: "x", VGPUs: percent("GPU-a", 80)}},
			Request{Record: Record{VGPUs: []VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: gib, Share: quota.Share{Weight: 5}}}}},
				Card: card(sched.PolicyFixed, 20)}, "asked for 25 % of the GPU's time, but 20 % are free"},
		{"memory comes first", six, Request{Record: Record{VGPUs: []VGPU{{UUID: "GPU-a",
			Slice: quota.Slice{Limit: 11 * gib, Share: quota.Share{Percent: 10}}}}}, Card: card(sched.PolicyNative, 20)}, "asked for 11264MiB"},
		{"slice of a whole one", []Record{{ID: "w", Name: "job\n", Native: []string{"GPU-a"}}},
			Request{Record: Record{VGPUs: slice("GPU-a", gib)}}, `container "job\n" has the whole GPU`},
		{"whole of a sliced one", six, Request{Record: Record{Native: []string{"GPU-a"}}}, "1 containers have slices of it, such as one"},
		{"whole beside whole", []Record{{ID: "w", Native: []string{"GPU-a"}}}, Request{Record: Record{Native: []string{"GPU-a"}}}, ""},
		{"mixed", six, Request{Record: Record{VGPUs: slice("GPU-a", gib), Native: []string{"GPU-b"}}}, ""},
	} {
		c.req.GPUs = twoGPUs
		if c.req.Card == (sched.Card{}) {
			c.req.Card = preempt
		}
		got, err := admit(&file{Records: c.others}, c.req)
		if c.refused == "" {
			if err != nil || !reflect.DeepEqual(got, c.req.Record.VGPUs) {
				t.Errorf("%s: got %v, %v", c.name, got, err)
			}
			continue
		}
		var refusal *Refusal
		if !errors.As(err, &refusal) || got != nil || !strings.Contains(err.Error(), c.refused) || refusal.Remedy == "" ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, %v; want a refusal with %q", c.name, got, err, c.refused)
		}
	}
}

func TestPlace(t *testing.T) {
	three := append(twoGPUs[:2:2], GPU{"GPU-c", 2, 16 * gib})
	fixed := func(n quota.Bytes) quota.Memory { return quota.Memory{Fixed: n} }
	for _, c := range []struct {
		name    string
		others  []Record
		place   Placement
		native  []string
		card    sched.Card
		cards   map[string]sched.Card
		want    []VGPU
		refused string
	}{
		{name: "binpack on an empty node: the smallest, lowest", place: Placement{Memory: fixed(4 * gib)}, want: slice("GPU-a", 4*gib)},
		{name: "spread on an empty node: the largest", place: Placement{Policy: PolicySpread, Memory: fixed(4 * gib)},
			want: slice("GPU-b", 4*gib)},
		{name: "binpack: the fullest", others: []Record{{VGPUs: slice("GPU-c", gib)}},
			place: Placement{Policy: PolicyBinpack, Memory: fixed(4 * gib)}, want: slice("GPU-c", 4*gib)},
		{name: "binpack: the fullest that has room", others: []Record{{VGPUs: slice("GPU-c", 13*gib)}}, place: Placement{Memory: fixed(4 * gib)},
			want: slice("GPU-a", 4*gib)},
		{name: "spread: the emptiest", others: []Record{{VGPUs: slice("GPU-b", 9*gib)}, {VGPUs: slice("GPU-a", gib)}},
			place: Placement{Policy: PolicySpread, Memory: fixed(4 * gib)}, want: slice("GPU-c", 4*gib)},
		{name: "only a large one will do", place: Placement{Memory: fixed(20 * gib)}, want: slice("GPU-b", 20*gib)},
		{name: "a fraction depends on the card", others: []Record{{VGPUs: slice("GPU-a", 9*gib)}, {VGPUs: slice("GPU-c", 9*gib)}},
			place: Placement{Memory: quota.Memory{Num: 1, Den: 2}}, want: slice("GPU-b", 12*gib)},
		{name: "not on a whole one", others: []Record{{Native: []string{"GPU-a"}}}, place: Placement{Memory: fixed(4 * gib)},
			want: slice("GPU-c", 4*gib)},
		{name: "not on its own whole one", native: []string{"GPU-a"}, place: Placement{Memory: fixed(4 * gib)}, want: slice("GPU-c", 4*gib)},
		{name: "instances", others: []Record{{VGPUs: slice("GPU-a", gib)}}, card: card(sched.PolicyPreempt, 1),
			place: Placement{Memory: fixed(4 * gib)}, want: slice("GPU-c", 4*gib)},
		{name: "not on one to avoid", place: Placement{Memory: fixed(4 * gib), Avoid: map[string]string{"GPU-a": "unhealthy: lost"}},
			want: slice("GPU-c", 4*gib)},
		{name: "all to avoid", place: Placement{Memory: fixed(4 * gib),
			Avoid: map[string]string{"GPU-a": "unhealthy: lost", "GPU-b": "unhealthy", "GPU-c": "unhealthy"}},
			refused: "GPU 0: unhealthy: lost"},
		{name: "two", place: Placement{Memory: fixed(4 * gib), Count: 2}, want: append(slice("GPU-a", 4*gib), slice("GPU-c", 4*gib)...)},
		{name: "slice settings", place: Placement{Memory: fixed(gib),
			Slice: VGPU{Slice: quota.Slice{Share: quota.Share{Weight: 3, Percent: 4, Priority: 2}}}}, want: []VGPU{vgpu("GPU-a", gib, 3, 4, 2)}},
		{name: "instances of one GPU", others: []Record{{VGPUs: slice("GPU-a", gib)}},
			cards: map[string]sched.Card{"GPU-a": card(sched.PolicyPreempt, 1)},
			place: Placement{Memory: fixed(4 * gib)}, want: slice("GPU-c", 4*gib)},
		{name: "not where its share is not free", others: []Record{{VGPUs: percent("GPU-a", 70)}, {VGPUs: percent("GPU-c", 40)}},
			place: Placement{Memory: fixed(gib), Slice: VGPU{Slice: quota.Slice{Share: quota.Share{Percent: 50}}}},
			want:  []VGPU{vgpu("GPU-c", gib, 1, 50, 0)}},
		{name: "not where the policy refuses", cards: map[string]sched.Card{"GPU-a": card(sched.PolicyNative, 20),
			"GPU-c": card(sched.PolicyFair, 20)}, place: Placement{Memory: fixed(gib),
			Slice: VGPU{Slice: quota.Slice{Share: quota.Share{Percent: 50}}}},
			want: []VGPU{vgpu("GPU-b", gib, 1, 50, 0)}},
		{name: "no share free", others: []Record{{VGPUs: append(append(percent("GPU-a", 70), percent("GPU-b", 60)...), percent("GPU-c", 51)...)}},
			place: Placement{Memory: fixed(gib), Slice: VGPU{Slice: quota.Slice{Share: quota.Share{Percent: 50}}}},
			refused: "GPU 0: asked for 50 % of the GPU's time, but 30 % are free, GPU 1: asked for 50 % of the GPU's time, but 40 % are free, GPU " +
				"2: asked for 50 % of the GPU's time, but 49 % are free; stop a container (cgpu smi lists them), ask for less (ALIYUN"},
		{name: "larger than any", place: Placement{Memory: fixed(25 * gib)}, refused: "more than the GPU's"},
		{name: "no room", others: []Record{{VGPUs: slice("GPU-a", 16*gib)}, {VGPUs: slice("GPU-b", 23*gib)}, {Native: []string{"GPU-c"}}},
			place: Placement{Memory: fixed(4 * gib)},
			refused: "0 of the 1 GPUs asked for have room: GPU 0: asked for 4096MiB, but 0MiB are free of 16384MiB, beside 1 container, GPU 1: " +
				"asked for 4096MiB, but 1024MiB"},
		{name: "no room on the only large one", others: []Record{{VGPUs: slice("GPU-b", 23*gib)}}, place: Placement{Memory: fixed(20 * gib)},
			refused: "GPU 1 (GPU-b): asked for 20480MiB"},
		{name: "more than there are", place: Placement{Memory: fixed(gib), Count: 4}, refused: "has only 3"},
	} {
		if c.place.Slice.Weight == 0 {
			c.place.Slice.Weight = 1
		}
		if c.card == (sched.Card{}) {
			c.card = preempt
		}
		got, err := admit(&file{Records: c.others, Cards: c.cards},
			Request{Record: Record{Native: c.native}, GPUs: three, Place: &c.place, Card: c.card})
		if c.refused == "" {
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s: got %v, %v; want %v", c.name, got, err, c.want)
			}
		} else if err == nil || !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: got %v, %v; want %q", c.name, got, err, c.refused)
		}
	}
}

func TestValidate(t *testing.T) {
	for name, req := range map[string]Request{
		"no ID":            {Record: Record{Nonce: "n"}},
		"no nonce":         {Record: Record{ID: "i"}},
		"unknown GPU":      {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-z", gib)}},
		"unknown whole":    {Record: Record{ID: "i", Nonce: "n", Native: []string{"GPU-z"}}},
		"twice":            {Record: Record{ID: "i", Nonce: "n", VGPUs: append(slice("GPU-a", gib), slice("GPU-a", gib)...)}},
		"sliced and whole": {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-a", gib), Native: []string{"GPU-a"}}},
		"no limit":         {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-a", 0)}},
		"over the card":    {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-a", 17*gib)}, Overcommit: 9},
		"named and placed": {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-a", gib)}, Place: &Placement{}},
		"policy":           {Record: Record{ID: "i", Nonce: "n"}, Place: &Placement{Policy: "x"}},
		"no card":          {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-a", gib)}, Card: sched.Card{Policy: 1, MaxInst: 20}},
		"overcommit":       {Record: Record{ID: "i", Nonce: "n", VGPUs: slice("GPU-a", gib)}, Overcommit: -1},
	} {
		req.GPUs = twoGPUs
		if name != "no card" {
			req.Card = preempt
		}
		l := Open(t.TempDir() + "/run")
		if _, err := l.Reserve(req); err == nil || !strings.HasPrefix(err.Error(), "ledger: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
