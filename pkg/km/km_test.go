// SPDX-License-Identifier: Apache-2.0

package km

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const (
	gpu0 = "GPU-00000000-0000-0000-0000-000000000000"
	gpu1 = "GPU-11111111-1111-1111-1111-111111111111"
	web  = "3f2a9c01d4e5aaaaaaaaaaaaaaaaaaaa"
	job  = "77777777777711111111111111111111"
)

func record(id string, vgpus ...ledger.VGPU) ledger.Record {
	return ledger.Record{ID: id, Nonce: "nonce-" + id, VGPUs: vgpus}
}

func slice(uuid string, limit quota.Bytes, weight int) ledger.VGPU {
	return ledger.VGPU{UUID: uuid, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: weight}}}
}

func node(records ...ledger.Record) Node {
	t := &device.Table{
		GPUs:   []device.GPU{{Index: 0, UUID: gpu0, Memory: 15109 * quota.MiB}, {Index: 1, UUID: gpu1, Memory: 23028 * quota.MiB}},
		Config: device.Config{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
	}
	return Node{Version: "v1.2.3-4-gabcdef0", Table: t, Records: records, Slots: Slots(nil).Next(records)}
}

// used is the same for all containers of the tests, and not known of the one called job.
func used(r ledger.Record, uuid string) (Use, error) {
	if r.ID == job {
		return Use{}, errors.New("its guard does not answer")
	}
	return Use{Used: 3 * quota.MiB, Processes: []Process{{PID: 4711, Used: 2 * quota.MiB}, {PID: 4712}, {PID: 5000, Used: quota.MiB}}}, nil
}

// tree is all of it, a line for each line of a file.
func tree(n Node) string {
	var b strings.Builder
	for _, f := range n.Files() {
		text, err := n.Text(f, used)
		if err != nil {
			text = "error: " + err.Error() + "\n"
		}
		if !strings.HasSuffix(text, "\n") {
			text += "(no newline)\n"
		}
		for line := range strings.Lines(text) {
			fmt.Fprintf(&b, "%v %s:%s", f.Kind.Mode(), f.Path, line)
		}
	}
	return b.String()
}

func TestTree(t *testing.T) {
	whole := ledger.Record{ID: "dddddddddddddddd", Native: []string{gpu1}}
	n := node(record(web, slice(gpu0, 6043*quota.MiB, 1), slice(gpu1, quota.GiB, 3)), whole, record(job, slice(gpu0, quota.GiB, 1)))
	n.Cards = map[string]sched.Card{gpu1: {Policy: sched.PolicyFixed, MaxInst: 8, PrioRatio: 80}}
	want := `-rw-rw-rw- 0/3f2a9c01d4e5/weight:1
-r--r--r-- 0/777777777777/id:1
-r--r--r-- 0/777777777777/meminfo:error: its guard does not answer
-rw-rw-rw- 0/777777777777/memsize:1073741824
-rw-rw-rw- 0/777777777777/weight:1
-r--r--r-- 0/free_weight:18
-rw-rw-rw- 0/max_inst:20
-rw-rw-rw- 0/policy:1
-rw-rw-rw- 0/prio_ratio:99
-r--r--r-- 1/3f2a9c01d4e5/id:64
-r--r--r-- 1/3f2a9c01d4e5/meminfo:Free: 1070596096
-r--r--r-- 1/3f2a9c01d4e5/meminfo:PID: 4711 Mem: 2097152
-r--r--r-- 1/3f2a9c01d4e5/meminfo:PID: 5000 Mem: 1048576
-rw-rw-rw- 1/3f2a9c01d4e5/memsize:1073741824
-rw-rw-rw- 1/3f2a9c01d4e5/weight:3
-r--r--r-- 1/free_weight:5
-rw-rw-rw- 1/max_inst:8
-rw-rw-rw- 1/policy:3
-rw-rw-rw- 1/prio_ratio:80
-r--r--r-- version:1.2.3
`
	first := `-r--r--r-- 0/3f2a9c01d4e5/id:0
-r--r--r-- 0/3f2a9c01d4e5/meminfo:Free: 6333399040
-r--r--r-- 0/3f2a9c01d4e5/meminfo:PID: 4711 Mem: 2097152
-r--r--r-- 0/3f2a9c01d4e5/meminfo:PID: 5000 Mem: 1048576
-rw-rw-rw- 0/3f2a9c01d4e5/memsize:6336544768
`
	if diff := cmp.Diff(first+want, tree(n)); diff != "" {
		t.Error(diff)
	}
}

// TestText: the values that need thought.
func TestText(t *testing.T) {
	for _, tt := range []struct {
		name string
		node Node
		path string
		want string
	}{
		{"no container", node(), "0/free_weight", "20\n"},
		{"a weight makes preempt weighted, as in cGPU", node(record(web, slice(gpu0, quota.GiB, 2))), "0/policy", "2\n"},
		{"the other GPU's policy is its own", node(record(web, slice(gpu0, quota.GiB, 2))), "1/policy", "1\n"},
		{"weights beyond max_inst", node(record(web, slice(gpu0, quota.GiB, 30))), "0/free_weight", "0\n"},
		{"less than what is used", node(record(web, slice(gpu0, 2*quota.MiB, 1))), "0/3f2a9c01d4e5/meminfo",
			"Free: 0\nPID: 4711 Mem: 2097152\nPID: 5000 Mem: 1048576\n"},
		{"a short ID", node(record("web", slice(gpu0, quota.GiB, 1))), "0/web/id", "0\n"},
		{"no release", Node{Version: "21bb9b8-dirty", Table: &device.Table{}}, "version", "0.0.0\n"},
		{"a release", Node{Version: "v0.10.2", Table: &device.Table{}}, "version", "0.10.2\n"},
	} {
		got := "no such file"
		for _, f := range tt.node.Files() {
			if f.Path == tt.path {
				text, err := tt.node.Text(f, used)
				got = text
				if err != nil {
					got = err.Error()
				}
			}
		}
		if got != tt.want {
			t.Errorf("%s: %s: %q, want %q", tt.name, tt.path, got, tt.want)
		}
	}
}

// TestNames: whoever may choose IDs gets no folder that is another's, nor breaks the tree.
func TestNames(t *testing.T) {
	var records []ledger.Record
	for _, id := range []string{"trainer-node-1", "trainer-node-2", "trainer-nod", "policy", "..", "a/b", "x\x00y", "max_inst"} {
		records = append(records, record(id, slice(gpu0, quota.GiB, 1)))
	}
	records = append(records, record(strings.Repeat("long", 100), slice(gpu0, quota.GiB, 1)))
	for _, nonce := range []string{"0123456789abcdef", "fedcba9876543210"} { // two engines' container of one name
		web := record("web", slice(gpu0, quota.GiB, 1))
		web.Nonce = nonce
		records = append(records, web)
	}
	got := map[string]string{}
	for name, s := range named(gpu0, records) {
		got[name] = strings.TrimPrefix(s.Nonce, "nonce-")
	}
	want := map[string]string{"trainer-node-1": "trainer-node-1", "trainer-node-2": "trainer-node-2", "trainer-nod": "trainer-nod",
		"longlonglong": strings.Repeat("long", 100), "0123456789abcdef": "0123456789abcdef", "fedcba9876543210": "fedcba9876543210"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestGone(t *testing.T) {
	old := node(record(web, slice(gpu0, quota.GiB, 1)))
	again := record(web, slice(gpu0, quota.GiB, 1))
	again.Nonce = "another"
	for name, now := range map[string]Node{"ended": node(), "restarted": node(again), "no GPU": {Table: &device.Table{}}} {
		for _, f := range old.Files() {
			if f.Slice.Nonce == "" {
				continue
			}
			if text, err := now.Text(f, used); !errors.Is(err, ErrGone) {
				t.Errorf("%s: %s: %q, %v; want %v", name, f.Path, text, err, ErrGone)
			}
		}
	}
}

func TestSlots(t *testing.T) {
	a, b, c := record("a", slice(gpu0, 1, 1)), record("b", slice(gpu0, 1, 1), slice(gpu1, 1, 1)), record("c", slice(gpu0, 1, 1))
	at := func(r ledger.Record, uuid string) Slice { return Slice{uuid, r.Nonce} }
	s := Slots(nil).Next([]ledger.Record{a, b})
	if diff := cmp.Diff(Slots{at(a, gpu0): 0, at(b, gpu0): 1, at(b, gpu1): 0}, s); diff != "" {
		t.Error(diff)
	}
	s = s.Next([]ledger.Record{b, c}) // a has ended: c has its number, b keeps its own
	if diff := cmp.Diff(Slots{at(c, gpu0): 0, at(b, gpu0): 1, at(b, gpu1): 0}, s); diff != "" {
		t.Error(diff)
	}
	b.Nonce = "restarted"
	s = s.Next([]ledger.Record{b, c, a})
	if diff := cmp.Diff(Slots{at(c, gpu0): 0, at(b, gpu0): 1, at(b, gpu1): 0, at(a, gpu0): 2}, s); diff != "" {
		t.Error(diff)
	}
}

func TestChange(t *testing.T) {
	s := Slice{gpu0, "nonce"}
	for _, tt := range []struct {
		kind Kind
		text string
		want string // an error begins with "error: "
	}{
		{Weight, "3\n", "weight 3"},
		{Weight, "64", "weight 64"},
		{Weight, "0", `error: "0": want a number from 1 to 64`},
		{Weight, "65\n", `error: "65": want a number from 1 to 64`},
		{Weight, "-1\n", `error: "-1": want a number from 1 to 64`},
		{Weight, "3x\n", `error: "3x": want a number from 1 to 64`},
		{Weight, "", `error: "": want a number from 1 to 64`},
		{Weight, "1\n2\n", `error: "1\n2": want a number from 1 to 64`},
		{MemSize, "6336544768\n", "limit 6336544768"},
		{MemSize, "6GiB\n", `error: "6GiB": want a number from 1048576 to 1125899906842624`},
		{MemSize, "1048575\n", `error: "1048575": want a number from 1048576 to 1125899906842624`},
		{MemSize, "1234567890123456", "error: 16 characters: want a number of 15 at most"},
		{MaxInst, "64\n", "card {preempt 64 99}"},
		{MaxInst, "0\n", `error: "0": want a number from 1 to 64`},
		{Policy, "3\n", "card {fixed 20 99}"},
		{Policy, "0\x00", "card {fair 20 99}"}, // a C program's string
		{Policy, "6\n", `error: "6": want a number from 0 to 5`},
		{Policy, "fair\n", `error: "fair": want a number from 0 to 5`},
		{PrioRatio, "20\n", "card {preempt 20 20}"},
		{PrioRatio, "19\n", `error: "19": want a number from 20 to 99`},
		{ID, "1\n", "error: it can be read only"},
		{MemInfo, "1\n", "error: it can be read only"},
		{FreeWeight, "1\n", "error: it can be read only"},
		{Version, "1\n", "error: it can be read only"},
	} {
		c, err := File{Kind: tt.kind, Slice: s}.Change([]byte(tt.text))
		got := ""
		switch req := c.Request(); {
		case err != nil:
			got = "error: " + err.Error()
		case c.Slice != s || !slices.Equal(req.Only, []string{gpu0}):
			t.Errorf("%s %q: about %+v", tt.kind, tt.text, c.Slice)
		case c.Card != nil:
			card := sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}
			c.Card(&card)
			got = fmt.Sprintf("card %v", card)
		case req.Limit != nil:
			got = fmt.Sprintf("limit %d", uint64(*req.Limit))
		case req.Weight != nil:
			got = fmt.Sprintf("weight %d", *req.Weight)
		}
		if got != tt.want {
			t.Errorf("%s %q: %s, want %s", tt.kind, tt.text, got, tt.want)
		}
	}
}
