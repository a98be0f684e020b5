// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/quota"
)

const hook = "/usr/local/bin/cgpu-hook"

// twoShares is a claim of a share and of a whole GPU.
func twoShares() []allocated {
	return []allocated{
		{request: "gpu", share: alloc.Share{ID: claimUID + "/" + shareA, UUID: uuid(0), Slice: quota.Slice{Limit: 6 * quota.GiB,
			Share: quota.Share{Percent: 30, Weight: 1, Priority: quota.PriorityDefault}}, Containers: 1}},
		{request: "whole", share: alloc.Share{ID: claimUID + "/" + shareB, UUID: uuid(1), Whole: true, Containers: 1,
			Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}},
	}
}

func TestCDISpec(t *testing.T) {
	spec := cdiSpec("team", "claim", hook, twoShares())
	golden(t, "cdi.json", spec)
	// As a container runtime looks at it.
	dir := t.TempDir()
	if err := (cdiFolder{dir: dir}).write(claimUID, spec); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if faults := cache.GetErrors(); len(faults) != 0 {
		t.Errorf("%v", faults)
	}
	want := []string{cdiKind + "=" + claimUID + "." + shareA, cdiKind + "=" + claimUID + "." + shareB}
	if got := cache.ListDevices(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if minimum, err := specs.MinimumRequiredVersion(spec); err != nil || minimum != cdiVersion {
		t.Errorf("it needs version %s, has %s: %v", minimum, cdiVersion, err)
	}
	for i, d := range spec.Devices {
		if s, ours, err := alloc.FromHookArgs(d.ContainerEdits.Hooks[0].Args); err != nil || !ours || s != twoShares()[i].share {
			t.Errorf("%+v, %v, %v", s, ours, err)
		}
	}
}

// stopAt makes a folder whose n-th effect is not done any more.
func stopAt(dir string, n int, err error) cdiFolder {
	return cdiFolder{dir: dir, step: func(string) error {
		if n--; n < 0 {
			return err
		}
		return nil
	}}
}

// TestKilledAnywhere: after each effect of a prepare or an unprepare there is the old spec, the new one or none, nothing else
// that a container runtime would read, and doing it again gets there.
func TestKilledAnywhere(t *testing.T) {
	older, newer := cdiSpec("team", "claim", "/old/cgpu-hook", twoShares()), cdiSpec("team", "claim", hook, twoShares())
	contents := func(spec *specs.Spec) []byte {
		dir := t.TempDir()
		if err := (cdiFolder{dir: dir}).write(claimUID, spec); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(cdiFolder{dir: dir}.path(claimUID))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	oldText, newText := contents(older), contents(newer)
	for _, first := range []bool{true, false} {
		for _, fault := range []error{errKilled, errors.New("no space left on device")} {
			done := false
			for n := 0; !done; n++ {
				if n > 20 {
					t.Fatal("the steps have no end")
				}
				dir := t.TempDir()
				f := cdiFolder{dir: dir}
				if !first {
					if err := f.write(claimUID, older); err != nil {
						t.Fatal(err)
					}
				}
				where := fmt.Sprintf("first %v, %v at step %d", first, fault, n)
				err := stopAt(dir, n, fault).write(claimUID, newer)
				if done = err == nil; !done && !errors.Is(err, fault) {
					t.Fatalf("%s: %v", where, err)
				}
				text, err := os.ReadFile(f.path(claimUID))
				switch {
				case bytes.Equal(text, newText):
				case !first && bytes.Equal(text, oldText) && !done:
				case first && errors.Is(err, os.ErrNotExist) && !done:
				default:
					t.Errorf("%s: %v: %s", where, err, text)
				}
				for _, name := range names(t, dir) {
					if name == filepath.Base(f.path(claimUID)) {
						continue
					}
					if ext := filepath.Ext(name); ext == ".json" || ext == ".yaml" {
						t.Errorf("%s: a container runtime would read %s", where, name)
					}
					if !errors.Is(fault, errKilled) {
						t.Errorf("%s: left %s", where, name)
					}
					// The draft of a killed agent goes when it is old.
					past := time.Now().Add(-time.Hour)
					if err := os.Chtimes(filepath.Join(dir, name), past, past); err != nil {
						t.Fatal(err)
					}
				}
				if list, err := f.list(); err != nil || len(list) != 0 && list[0] != (prepared{claimUID, "team", "claim"}) {
					t.Errorf("%s: %v, %v", where, list, err)
				}
				if err := f.write(claimUID, newer); err != nil {
					t.Errorf("%s: again: %v", where, err)
				}
				if got := names(t, dir); !slices.Equal(got, []string{filepath.Base(f.path(claimUID))}) {
					t.Errorf("%s: again: %v", where, got)
				}
				for step := range 3 {
					if err := stopAt(dir, step, fault).remove(claimUID); err != nil && !errors.Is(err, fault) {
						t.Errorf("%s: remove: %v", where, err)
					}
					if err := f.remove(claimUID); err != nil || len(names(t, dir)) != 0 {
						t.Errorf("%s: remove again: %v, %v", where, err, names(t, dir))
					}
				}
			}
		}
	}
}

func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// TestList: only files that are ours and tell whose they are.
func TestList(t *testing.T) {
	dir := t.TempDir()
	f := cdiFolder{dir: dir}
	if list, err := (cdiFolder{dir: dir + "/none"}).list(); list != nil || err != nil {
		t.Errorf("%v, %v", list, err)
	}
	if err := f.write(claimUID, cdiSpec("team", "claim", hook, twoShares())); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nvidia.yaml":                             "kind: nvidia.com/gpu",
		"gpu.cgpu.io-share_.json":                 "{}",
		"gpu.cgpu.io-share_a b.json":              "{}",
		"gpu.cgpu.io-share_dead.json":             "torn",
		"gpu.cgpu.io-share_beef.json":             `{"cdiVersion":"0.5.0","kind":"gpu.cgpu.io/share","devices":[]}`,
		"gpu.cgpu.io-share_cafe.json":             `{"kind":"gpu.example.com/share","containerEdits":{"env":["CGPU_CLAIM=a/b"]}}`,
		".gpu.cgpu.io-share_new.123.tmp":          "young",
		"gpu.cgpu.io-other_" + claimUID + ".json": "{}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	before := names(t, dir)
	list, err := f.list()
	if !slices.Equal(list, []prepared{{claimUID, "team", "claim"}}) {
		t.Errorf("%v", list)
	}
	for _, odd := range []string{"dead", "beef", "cafe"} {
		if err == nil || !strings.Contains(err.Error(), "gpu.cgpu.io-share_"+odd+".json") {
			t.Errorf("%s: %v", odd, err)
		}
	}
	if after := names(t, dir); !slices.Equal(before, after) {
		t.Errorf("%v, before %v", after, before)
	}
}
