// SPDX-License-Identifier: Apache-2.0

package kmfs

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/km"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// file finds a file of the tree as it is now.
func fileOf(n nodetest.Node, s *Source, path string) km.File {
	n.Helper()
	state, err := s.state()
	if err != nil {
		n.Fatal(err)
	}
	for _, f := range state.Files() {
		if f.Path == path {
			return f
		}
	}
	n.Fatalf("no file %s", path)
	return km.File{}
}

// TestKMUnread: whoever reads a file a thousand times that cannot be read does not fill the administrator's journal.
func TestKMUnread(t *testing.T) {
	var out strings.Builder
	s := &Source{Log: &out}
	for i := range 3000 {
		s.complainOfRead(km.File{Path: "0/a/meminfo"}, errors.New("its guard is gone"))
		s.complainOfRead(km.File{Path: "0/b/meminfo"}, errors.New("its guard is gone"))
		if i == 1000 {
			s.complainOfRead(km.File{Path: "0/a/meminfo"}, errors.New("something else"))
		}
	}
	if n := strings.Count(out.String(), "\n"); n != 4 {
		t.Errorf("%d lines: %.500s", n, out.String())
	}
	for i := range 10 * maxSaid {
		s.complainOfRead(km.File{Path: fmt.Sprint(i)}, errors.New("gone"))
	}
	if len(s.said) > maxSaid {
		t.Errorf("%d files are remembered", len(s.said))
	}
}

func TestKMWrite(t *testing.T) {
	const full = "abcdef0123456789abcdef"
	preempt := sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}
	for _, tt := range []struct {
		file, text string
		said       string // in the log; empty: the write is good
		want       ledger.VGPU
		card       sched.Card
	}{
		{"0/abcdef012345/weight", "3\n", "", ledger.VGPU{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB,
			Share: quota.Share{Weight: 3}}}, preempt},
		{"0/abcdef012345/memsize", "6442450944\n", "", ledger.VGPU{UUID: nodetest.T4, Slice: quota.Slice{Limit: 6 * quota.GiB,
			Share: quota.Share{Weight: 1}}}, preempt},
		{"0/abcdef012345/memsize", "3221225472\n", "", ledger.VGPU{UUID: nodetest.T4, Slice: quota.Slice{Limit: 3 * quota.GiB,
			Share: quota.Share{Weight: 1}}}, preempt},
		{"0/policy", "3\n", "", ledger.VGPU{}, sched.Card{Policy: sched.PolicyFixed, MaxInst: 20, PrioRatio: 99}},
		{"0/max_inst", "8\n", "", ledger.VGPU{}, sched.Card{Policy: sched.PolicyPreempt, MaxInst: 8, PrioRatio: 99}},
		{"0/prio_ratio", "80\n", "", ledger.VGPU{}, sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 80}},

		{file: "0/abcdef012345/weight", text: "99\n", said: `cgpu: km: 0/abcdef012345/weight: "99": want a number from 1 to 64`},
		{file: "0/abcdef012345/memsize", text: "1073741824\n",
			said: "cgpu: km: 0/abcdef012345/memsize: 1073741824: container abcdef012345 uses 2048MiB: free some first"},
		{file: "0/abcdef012345/memsize", text: "12884901888\n", said: "asked for 12288MiB, but 11013MiB are free of 15109MiB"},
		{file: "1/abcdef012345/memsize", text: "1073741824\n", said: "", want: ledger.VGPU{UUID: nodetest.H200,
			Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}},
			card: preempt},
		{file: "0/max_inst", text: "1\n", said: "max-inst 1: 2 containers share it"},
		{file: "0/policy", text: "9", said: `"9": want a number from 0 to 5`},
		{file: "version", text: "1", said: "cgpu: km: version: it can be read only"},
	} {
		n := nodetest.New(t)
		r := n.Reserve(ledger.Record{ID: full, VGPUs: []ledger.VGPU{
			{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB}}, {UUID: nodetest.H200, Slice: quota.Slice{Limit: 4 * quota.GiB}}}})
		n.Reserve(ledger.Record{ID: "other", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB}}}})
		s := nodetest.Status(r)
		s.VGPUs[0].Used = 2 * quota.GiB
		nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, s))
		var log strings.Builder
		source := &Source{RunDir: n.Dir, Log: &log}
		err := source.write(fileOf(n, source, tt.file), []byte(tt.text))
		if (err == nil) != (tt.said == "") || !strings.Contains(log.String(), tt.said) || strings.Count(log.String(), "\n") > 1 {
			t.Errorf("%s %q: %v, said %q; want %q", tt.file, tt.text, err, log.String(), tt.said)
		}
		got, err := n.Book.Find(full)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range got.VGPUs {
			want := r.VGPUs[i]
			if tt.want.UUID == v.UUID {
				want.Limit, want.Weight = tt.want.Limit, tt.want.Weight
			}
			if v != want {
				t.Errorf("%s %q: %+v, want %+v", tt.file, tt.text, v, want)
			}
		}
		cards, err := n.Book.Cards()
		if err != nil {
			t.Fatal(err)
		}
		card, changed := cards[nodetest.T4]
		if !changed {
			card = preempt
		}
		if tt.said == "" && card != tt.card || tt.said != "" && changed {
			t.Errorf("%s %q: card %+v, want %+v", tt.file, tt.text, card, tt.card)
		}
	}
}

// TestKMGone: who still has a container's file open changes nothing of the next container with its ID.
func TestKMGone(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "web", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	source := &Source{RunDir: n.Dir, Log: new(strings.Builder)}
	f := fileOf(n, source, "0/web/weight")
	if err := n.Book.Release(r.Nonce); err != nil {
		t.Fatal(err)
	}
	if err := source.write(f, []byte("3")); !errors.Is(err, km.ErrGone) {
		t.Errorf("ended: %v, want %v", err, km.ErrGone)
	}
	n.Reserve(ledger.Record{ID: "web", Nonce: "later", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	if err := source.write(f, []byte("5")); !errors.Is(err, km.ErrGone) {
		t.Errorf("restarted: %v, want %v", err, km.ErrGone)
	}
	if err := source.write(fileOf(n, source, "0/web/weight"), []byte("3")); err != nil {
		t.Error(err)
	}
	if got, err := n.Book.Find("web"); err != nil || got.VGPUs[0].Weight != 3 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestKMPreload: without a guard the container's page has to learn of a change, and tells what is used.
func TestKMPreload(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "friend", Preload: true, VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB,
		Share: quota.Share{Weight: 1}}}}})
	source := &Source{RunDir: n.Dir, Log: os.Stderr}
	for file, text := range map[string]string{"0/friend/weight": "4", "0/friend/memsize": "2147483648"} {
		if err := source.write(fileOf(n, source, file), []byte(text)); err != nil {
			t.Error(err)
		}
	}
	p, err := page.Read(r.Page)
	if err != nil {
		t.Fatal(err)
	}
	if v := p.VGPU(0); v.Limit != uint64(2*quota.GiB) || v.Weight != 4 {
		t.Errorf("page has %+v", v)
	}
	if text, err := source.text(fileOf(n, source, "0/friend/meminfo")); err != nil || text != "Free: 2147483648\n" {
		t.Errorf("meminfo %q, %v", text, err)
	}
}

// TestKMTells: what is written leaves the events that cgpu set and cgpu policy leave.
func TestKMTells(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "guarded", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	n.Reserve(nodetest.Docker{Name: "/web"}.Make(t, ledger.Record{ID: "preload", Preload: true,
		VGPUs: []ledger.VGPU{{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB}}}}))
	source := &Source{RunDir: n.Dir, Log: os.Stderr}
	for _, w := range [][2]string{{"1/policy", "2"}, {"1/policy", "2"}, {"1/max_inst", "8"}, {"0/guarded/weight", "2"},
		{"1/preload/weight", "2"}, {"1/preload/memsize", "2147483648"}} {
		if err := source.write(fileOf(n, source, w[0]), []byte(w[1])); err != nil {
			t.Errorf("%s: %v", w, err)
		}
	}
	list, err := event.Read(n.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, e := range list {
		fmt.Fprintf(&got, "%s %q %q GPU %d: %s\n", e.Kind, e.Container, e.Name, e.GPU.Index, e.Text)
	}
	const want = `policy "" "" GPU 1: policy preempt → weight-preempt
policy "" "" GPU 1: max-inst 20 → 8
set "preload" "web" GPU 1: weight 1 → 2
set "preload" "web" GPU 1: memory 1024MiB → 2048MiB
`
	if got.String() != want {
		t.Errorf("told\n%s\nwant\n%s", got.String(), want)
	}
}

// TestKMInode: numbers that go-fuse and the kernel have for themselves are not given out.
func TestKMInode(t *testing.T) {
	seen := map[uint64]string{}
	for _, path := range []string{"version", "0", "0/policy", "0/web", "0/web/id", "1/web/id"} {
		for _, nonce := range []string{"", "a", "b"} {
			ino := inode(path, nonce)
			if ino < 2 || ino >= 1<<63 || seen[ino] != "" {
				t.Errorf("%s %s: %d, which %q has", path, nonce, ino, seen[ino])
			}
			seen[ino] = path + " " + nonce
		}
	}
}
