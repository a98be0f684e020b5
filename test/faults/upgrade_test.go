// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// busy makes driver calls all the time, in one process after another, and says so should one of them fail.
const busy = "cgpu-probe work --for 24h --windows 200ms || echo FAILED work & " +
	"while :; do cgpu-probe alloc 1MiB >/dev/null && echo allocated || echo FAILED alloc; done"

// otherGuard is a copy of the guard's program: another program to a guard.
func (n *node) otherGuard(number int) (path string, err error) {
	path = filepath.Join(n.dir, "guards", fmt.Sprint(number), "cgpu-guard")
	if _, err = os.Stat(path); err == nil {
		return path, nil
	}
	text, err := os.ReadFile(filepath.Join(n.bin, "cgpu-guard"))
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path, text, 0o755)
	}
	return path, err
}

// upgraded is what cgpu upgrade -o json says of a container.
type upgraded struct {
	ID, Outcome, Error string
	StallNs            time.Duration
	Tries              int
}

// upgrade calls cgpu upgrade.
func (n *node) upgrade(args ...string) (list []upgraded, err error) {
	out := n.path("stdout-upgrade")
	_ = os.Remove(out)
	r := new(watch).run(patience, n.env, out, append([]string{filepath.Join(n.bin, "cgpu"), "upgrade", "-o", "json"}, args...)...)
	text, err := os.ReadFile(out)
	var v struct{ Containers []upgraded }
	if err = errors.Join(err, json.Unmarshal(text, &v)); err == nil && r.code != 0 {
		err = fmt.Errorf("%v: %s", r, text)
	}
	return v.Containers, err
}

// said is what a container has printed since an offset.
func (n *node) said(name string, from int) (text string, end int) {
	b, _ := os.ReadFile(n.path("stdout-" + n.id(name)))
	return string(b[min(from, len(b)):]), len(b)
}

// works: since this was called a container has computed, and allocated, and nothing has failed.
func (n *node) works(name string) error {
	_, begin := n.said(name, 0)
	return n.eventually(func() error {
		text, _ := n.said(name, begin)
		if !strings.Contains(text, "allocated") || strings.Count(text, " kernels=") == strings.Count(text, " kernels=0 ") {
			return fmt.Errorf("%s does not work: %s", name, text)
		}
		return nil
	})
}

// TestUpgrade: guards of busy containers become another program, again and again, and no call fails.
func TestUpgrade(t *testing.T) {
	n := newNode(t)
	var guards []string
	for i := range 2 {
		path, err := n.otherGuard(i)
		must(t, err)
		guards = append(guards, path)
	}
	var names []string
	for i := range 3 {
		name := fmt.Sprint("busy", i)
		names = append(names, name)
		n.bundle(t, name, busy, onSecond)
		must(t, n.runtime("create", "--bundle", n.path(name), n.id(name)))
		t.Cleanup(func() { _ = n.runtime("delete", "--force", n.id(name)) })
		must(t, n.runtime("start", n.id(name)))
		must(t, n.works(name))
	}
	before := map[string]ledger.Record{}
	for _, r := range n.records() {
		before[r.ID] = r
	}
	for i := range 10 {
		list, err := n.upgrade("--all", "--program", guards[i%2])
		must(t, err)
		if len(list) != len(before) {
			t.Fatalf("%d containers: %+v", len(list), list)
		}
		for _, x := range list {
			t.Logf("%s: %s, stall %v, tries %d", x.ID, x.Outcome, x.StallNs, x.Tries)
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", before[x.ID].GuardPID))
			if x.Outcome != "upgraded" || err != nil || exe != guards[i%2] {
				t.Errorf("%+v: the guard is %s (%v)", x, exe, err)
			}
		}
		for _, name := range names {
			must(t, n.works(name))
		}
	}
	for _, name := range names {
		if text, _ := n.said(name, 0); strings.Contains(text, "FAILED") {
			t.Errorf("%s: calls have failed: %s", name, text[strings.Index(text, "FAILED"):][:100])
		}
	}
	if list, err := n.upgrade("--all", "--program", guards[1]); err != nil || list[0].Outcome != "already" {
		t.Errorf("again: %+v, %v", list, err)
	}
	for _, name := range names {
		must(t, n.runtime("delete", "--force", n.id(name)))
	}
	must(t, n.eventually(n.quiet))
}
