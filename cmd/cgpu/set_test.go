// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestSet(t *testing.T) {
	const full = "abcdef0123456789"
	is := func(uuid string, gib quota.Bytes, weight, percent int, priority quota.Priority) ledger.VGPU {
		return ledger.VGPU{UUID: uuid, Slice: quota.Slice{Limit: gib * quota.GiB,
			Share: quota.Share{Weight: weight, Percent: percent, Priority: priority}}}
	}
	for _, tt := range []struct {
		args, out string
		want      []ledger.VGPU // nil: refused, and nothing changed
	}{
		{"abc --weight 3", "abcdef012345 (default/web-0/main), GPU 0: weight 1 → 3\nabcdef012345 (default/web-0/main), GPU 1: weight 1 → 3\n",
			[]ledger.VGPU{is(nodetest.T4, 4, 3, 20, 1), is(nodetest.H200, 4, 3, 0, 1)}},
		{"default/web-0/main --memory 8GiB --weight 1 --percent 40 --priority high --gpu 1",
			"GPU 1: memory 4096MiB → 8192MiB, percent none → 40, priority default → high\n",
			[]ledger.VGPU{is(nodetest.T4, 4, 1, 20, 1), is(nodetest.H200, 8, 1, 40, 2)}},
		{"--priority best-effort " + full + " --percent none",
			"GPU 0: percent 20 → none, priority default → best-effort\nabcdef012345 (default/web-0/main), GPU 1: priority default → best-effort\n",
			[]ledger.VGPU{is(nodetest.T4, 4, 1, 0, 0), is(nodetest.H200, 4, 1, 0, 0)}},
		{"abc --percent 20 --gpu GPU-0", "GPU 0: nothing to change\n",
			[]ledger.VGPU{is(nodetest.T4, 4, 1, 20, 1), is(nodetest.H200, 4, 1, 0, 1)}},
		{"abc --memory 3GiB", "GPU 0: memory 4096MiB → 3072MiB\nabcdef012345 (default/web-0/main), GPU 1: memory 4096MiB → 3072MiB\n",
			[]ledger.VGPU{is(nodetest.T4, 3, 1, 20, 1), is(nodetest.H200, 3, 1, 0, 1)}},
		{"abc --memory 2GiB --gpu 1", "GPU 1: memory 4096MiB → 2048MiB\n",
			[]ledger.VGPU{is(nodetest.T4, 4, 1, 20, 1), is(nodetest.H200, 2, 1, 0, 1)}},
		{"abc --memory 2GiB --force", "GPU 0: memory 4096MiB → 2048MiB\n",
			[]ledger.VGPU{is(nodetest.T4, 2, 1, 20, 1), is(nodetest.H200, 2, 1, 0, 1)}},

		{args: "abc --memory 2GiB",
			out: `error: set: --memory "2GiB": container abcdef012345 uses 3072MiB of its 4096MiB on GPU 0: free some first; --force sets`},
		{"abc --weight 3 --gpu 0,1", "GPU 0: weight 1 → 3\nabcdef012345 (default/web-0/main), GPU 1: weight 1 → 3\n",
			[]ledger.VGPU{is(nodetest.T4, 4, 3, 20, 1), is(nodetest.H200, 4, 3, 0, 1)}},
		{"abc --weight 3 -i 1", "GPU 1: weight 1 → 3\n", []ledger.VGPU{is(nodetest.T4, 4, 1, 20, 1), is(nodetest.H200, 4, 3, 0, 1)}},
		{args: "abc --weight 3 --gpu 0,7", out: `error: set: --gpu: GPU "7": there is none`},
		{args: "abc --weight 3 --gpu 0,", out: `error: set: --gpu: GPU "": there is none`},
		{args: "other --weight 3 --gpu 0,1", out: `has no slice of GPU ` + nodetest.H200},
		{args: "abc --memory 15GiB", out: `error: set: --memory "15GiB": is 15360MiB: want 64MiB to the 15109MiB of GPU 0`},
		{args: "abc --memory 6000",
			out: `error: set: --memory "6000": is 6144000MiB: want 64MiB to the 15109MiB of GPU 0; a number alone is GiB, 6000MiB are MiB`},
		{args: "abc --memory 1MiB", out: `error: set: --memory "1MiB": is 1MiB: want 64MiB to`},
		{args: "abc --memory 11GiB", out: `error: set: --memory "11GiB": GPU 0 (` + nodetest.T4 +
			`): asked for 11264MiB, but 11013MiB are free of 15109MiB, beside 1 container; stop`},
		{args: "abc --percent 41", out: `error: set: --percent "41": GPU 0 (` + nodetest.T4 +
			`): asked for 41 % of the GPU's time, but 40 % are free; stop`},
		{args: "abc --gpu 7 --weight 2", out: `error: set: --gpu: GPU "7": there is none`},
		{args: "other --gpu 1 --weight 2", out: `has no slice of GPU ` + nodetest.H200},
		{args: "x --weight 2", out: `no such container`},
	} {
		n := nodetest.New(t)
		r := n.Reserve(ledger.Record{ID: full, Name: "default/web-0/main",
			VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB, Share: quota.Share{Percent: 20}}},
				{UUID: nodetest.H200, Slice: quota.Slice{Limit: 4 * quota.GiB}}}})
		n.Reserve(ledger.Record{ID: "other", VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
			Slice: quota.Slice{Limit: 4 * quota.GiB, Share: quota.Share{Percent: 60}}}}})
		s := nodetest.Status(r)
		s.VGPUs[0].Used = 3 * quota.GiB
		nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, s))
		if out := cgpu("set " + tt.args); !strings.Contains(out, tt.out) {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.out)
		}
		got, err := n.Book.Find(full)
		if err != nil {
			t.Fatal(err)
		}
		if tt.want == nil {
			tt.want = r.VGPUs
		}
		if !reflect.DeepEqual(got.VGPUs, tt.want) {
			t.Errorf("%s: got %+v\nwant %+v", tt.args, got.VGPUs, tt.want)
		}
	}
}

// TestSetThreads: a member's part of the multiprocessors is changed in the ledger, and where its server's gate looks; nobody else has one.
func TestSetThreads(t *testing.T) {
	n := nodetest.New(t)
	slice := []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}
	member := n.Reserve(ledger.Record{ID: "member", Domain: "team", Threads: 30, VGPUs: slice})
	n.Reserve(ledger.Record{ID: "server", Domain: "team", DomainServer: true, VGPUs: slice})
	n.Reserve(ledger.Record{ID: "alone", VGPUs: slice})
	folder := page.Pipes(n.Dir, nodetest.T4, "team")
	if err := errors.Join(os.MkdirAll(folder, 0o755), domain.MakeParts(folder)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args, out string
		part      byte // at the gate, then
	}{
		{"member --threads 60", "GPU 0: threads of new programs 30% → 60%\n", 60},
		{"member --threads all --memory 2GiB", "GPU 0: memory 1024MiB → 2048MiB, threads of new programs 60% → all\n", 100},
		{"member --threads 101", `set: --threads "101": want 1 to 100, or all`, 100},
		{"member --threads 0", `set: --threads "0": want 1 to 100, or all`, 100},
		{"member --threads 30%", `set: --threads "30%": want 1 to 100, or all`, 100},
		{"member --threads 7 --gpu 1", `has no slice of GPU ` + nodetest.H200, 100},
		{"alone --threads 7", `set: --threads "7": it is in no trust domain`, 100},
		{"server --threads 7", `set: --threads "7": it is a domain's MPS server`, 100},
		{"member --threads 7", "GPU 0: threads of new programs all → 7%\n", 7},
		{"member --threads 7", "nothing to change", 7},
	} {
		if out := cgpu("set " + c.args); !strings.Contains(out, c.out) {
			t.Errorf("%s: printed %s\nwant %s", c.args, out, c.out)
		}
		parts, err := os.ReadFile(filepath.Join(folder, page.Parts))
		if err != nil || parts[member.Seat] != c.part {
			t.Errorf("%s: the gate has %v, %v, want %d", c.args, parts, err, c.part)
		}
	}
	if err := os.Truncate(filepath.Join(folder, page.Parts), 0); err != nil {
		t.Fatal(err)
	}
	if out := cgpu("set member --threads 8"); !strings.Contains(out, "its threads are in the ledger, and the domain's server does not know") {
		t.Errorf("where the file is broken: %s", out)
	}
}

func TestSetSpill(t *testing.T) {
	for _, tt := range []struct {
		args, out string
		want      [2]quota.Bytes // spill of both slices then
	}{
		{"abc --spill 2GiB", "GPU 0: spill 1024MiB → 2048MiB\nabc, GPU 1: spill none → 2048MiB\n", [2]quota.Bytes{2 * quota.GiB, 2 * quota.GiB}},
		{"abc --spill 512MiB --gpu 1", "abc, GPU 1: spill none → 512MiB\n", [2]quota.Bytes{quota.GiB, 512 * quota.MiB}},
		{"abc --spill none --gpu 1", "nothing to change", [2]quota.Bytes{quota.GiB, 0}},
		{"abc --spill 3GiB", "", [2]quota.Bytes{3 * quota.GiB, 3 * quota.GiB}},
		{"abc --spill 4GiB",
			`error: set: --spill "4GiB": asked for 8192MiB of spill on 2 GPUs together, but 6144MiB are free of the node's 8192MiB; ask for less`,
			[2]quota.Bytes{quota.GiB, 0}},
		{"abc --spill 512MiB", `error: set: --spill "512MiB": container abc has spilled 768MiB on GPU 0: free some first; --force`,
			[2]quota.Bytes{quota.GiB, 0}},
		{"abc --spill none", `error: set: --spill "none": container abc has spilled 768MiB on GPU 0`, [2]quota.Bytes{quota.GiB, 0}},
		{"abc --spill 0 --force", "GPU 0: spill 1024MiB → none\n", [2]quota.Bytes{0, 0}},
		{"abc --spill 800MiB", "GPU 0: spill 1024MiB → 800MiB\n", [2]quota.Bytes{800 * quota.MiB, 800 * quota.MiB}},
		{"abc --spill 2GiB --memory 1GiB", `error: set: --memory "1GiB": container abc uses 2048MiB of its 4096MiB on GPU 0`,
			[2]quota.Bytes{quota.GiB, 0}},
		{"mute --spill 1GiB",
			`error: set: --spill "1GiB": container mute has more, and what it uses is not known, because its guard does not answer`,
			[2]quota.Bytes{quota.GiB, 0}},
	} {
		n := nodetest.New(t)
		r := n.Reserve(ledger.Record{ID: "abc", VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
			Slice: quota.Slice{Limit: 4 * quota.GiB, Spill: quota.GiB}}, {UUID: nodetest.H200, Slice: quota.Slice{Limit: 4 * quota.GiB}}}})
		n.Reserve(ledger.Record{ID: "mute", VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
			Slice: quota.Slice{Limit: quota.GiB, Spill: 2 * quota.GiB}}}})
		s := nodetest.Status(r)
		s.VGPUs[0].Used, s.VGPUs[0].Spilled = 2*quota.GiB, 768*quota.MiB
		nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, s))
		if out := cgpu("set " + tt.args); !strings.Contains(out, tt.out) {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.out)
		}
		got, err := n.Book.Find("abc")
		if err != nil || got.VGPUs[0].Spill != tt.want[0] || got.VGPUs[1].Spill != tt.want[1] {
			t.Errorf("%s: got %+v, %v\nwant %v", tt.args, got.VGPUs, err, tt.want)
		}
	}
}

// Without a guard nobody knows what is in use: only more is given without --force.
func TestSetMemoryWithoutGuard(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "abc", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB}},
		{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB}}}})
	for _, tt := range []struct{ args, out string }{
		{"--memory 3GiB", `its guard does not answer`},
		{"--memory 5GiB", `memory 4096MiB → 5120MiB`},
		{"--memory 3GiB --force", `memory 5120MiB → 3072MiB`},
		{"--memory 2GiB --gpu 1 --force", `GPU 1: memory 3072MiB → 2048MiB`},
		{"--memory 2560MiB --gpu 1", `GPU 1: memory 2048MiB → 2560MiB`},
		{"--weight 2", `weight 1 → 2`},
	} {
		if out := cgpu("set abc " + tt.args); !strings.Contains(out, tt.out) {
			t.Errorf("%s: printed %s\nwant %s", tt.args, out, tt.out)
		}
	}
}
