// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestDisplayName(t *testing.T) {
	for name, want := range map[string]string{
		"":                                "",
		"ml/train/main":                   "ml/train/main",
		"a\x01\x1b[2J\u202eb":             "a??[2J?b",
		"\xff\xfe/x":                      "??/x",
		strings.Repeat("x", 256):          strings.Repeat("x", 256),
		strings.Repeat("x", 257):          strings.Repeat("x", 253) + "…",
		"xx" + strings.Repeat("é", 200):   "xx" + strings.Repeat("é", 125) + "…", // not in the middle of a rune
		strings.Repeat("\x01", 1<<20):     strings.Repeat("?", 253) + "…",
		strings.Repeat("\u2028", 1<<20):   strings.Repeat("?", 84) + "…",
		strings.Repeat("\x80", 1<<20):     "…",
		strings.Repeat("x", 300) + "\x00": strings.Repeat("x", 253) + "…",
	} {
		got := DisplayName(name)
		if got != want || len(got) > MaxText || !utf8.ValidString(got) {
			t.Errorf("%.20q (%d bytes): %q", name, len(name), got)
		}
		if DisplayName(got) != got {
			t.Errorf("%q is not what it stays", got)
		}
	}
}

// What tenants choose of a record is cut where it is only shown, and refused elsewhere, by whoever writes a record.
func TestBound(t *testing.T) {
	long := strings.Repeat("\x01", 1<<20)
	given := VGPU{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB}}
	for what, change := range map[string]func(*Record){
		"the container's ID":        func(r *Record) { r.ID = strings.Repeat("x", MaxText+1) },
		"the bundle's path":         func(r *Record) { r.Bundle = "/" + strings.Repeat("x", maxPath) },
		"the cgroup's path":         func(r *Record) { r.Cgroup = "/" + strings.Repeat("<", maxPath) },
		"the limited cgroup's path": func(r *Record) { r.LimitedCgroup = "/" + strings.Repeat("x", maxPath) },
		"the path of --root":        func(r *Record) { r.Root = "/" + strings.Repeat("x", maxPath) },
		"the name of an allocation": func(r *Record) { r.Allocated = []Allocation{{ID: "gpushare/" + long, UUID: "GPU-a", Given: given}} },
		"the name of an annotation": func(r *Record) { r.ByPod = map[string]string{long: "1"} },
		"an annotation":             func(r *Record) { r.ByPod = map[string]string{"cgpu.io/gpu-weight": long} },
	} {
		t.Run(what, func(t *testing.T) {
			l := open(t)
			refused := func(err error) {
				t.Helper()
				if err == nil || !strings.HasPrefix(err.Error(), "ledger: "+what+" ") || !strings.Contains(err.Error(), "want at most") ||
					len(err.Error()) > 512 {
					t.Errorf("%.600v", err)
				}
			}
			req := request("c", "n", quota.GiB)
			change(&req.Record)
			_, err := l.Reserve(req)
			refused(err)
			reserve(t, l, request("d", "n", quota.GiB))
			if what != "the container's ID" && what != "the path of --root" { // which Update does not change
				refused(l.Update("n", func(r *Record) error { change(r); return nil }))
			}
			if by := (&Record{}); strings.Contains(what, "annotation") {
				change(by)
				refused(l.ChangeByPods([]PodChange{{Nonce: "n", ByPod: by.ByPod}})[0])
			}
			if got := ids(t, l); got != "d/n" {
				t.Errorf("ledger: %s", got)
			}
			if r, err := l.Find("d"); err != nil || len(fmt.Sprint(r)) > 4096 {
				t.Errorf("%.100v, %v", r, err)
			}
		})
	}
}

// The names of as many containers as share a GPU cost those who read the ledger nothing.
func TestBoundNames(t *testing.T) {
	l := open(t)
	long := strings.Repeat("<", 1<<20) // six bytes each in JSON
	for n := range 20 {
		req := request(fmt.Sprint("c", n), fmt.Sprint("n", n), quota.MiB)
		req.Record.Name = long
		if r := reserve(t, l, req); r.Name != DisplayName(long) {
			t.Fatalf("%.100q", r.Name)
		}
		must(t, l.Update(req.Record.Nonce, func(r *Record) error { r.Name = long; return nil }))
	}
	text, err := os.ReadFile(File(l.dir))
	must(t, err)
	if len(text) > 20*2500 {
		t.Errorf("the ledger has %d bytes", len(text))
	}
}

// What is read and written of the file is bounded, too.
func TestBoundFile(t *testing.T) {
	l := open(t)
	reserve(t, l, request("c", "n", quota.GiB))
	f, err := l.load()
	must(t, err)
	f.Records[0].Name = strings.Repeat("x", maxFile)
	if err := l.store(f); err == nil || !strings.Contains(err.Error(), "cgpu gc") {
		t.Errorf("written: %v", err)
	}
	if got := ids(t, l); got != "c/n" {
		t.Errorf("ledger: %s", got)
	}
	text, err := json.Marshal(f)
	must(t, err)
	must(t, os.WriteFile(File(l.dir), text, 0o600))
	if _, err := l.List(); err == nil || !strings.Contains(err.Error(), "is damaged: it is larger than 16 MiB") {
		t.Errorf("read: %v", err)
	}
}
