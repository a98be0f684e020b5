// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

const askHAMi = "CUDA_DEVICE_MEMORY_LIMIT=6g"

// TestDialect starts containers that ask in HAMi's words, on nodes that have that enabled and on others.
func TestDialect(t *testing.T) {
	n := newNode(t, "runc")
	gpu := func(i int) string { return n.table.GPUs[i].UUID }
	slice := func(i int, limit quota.Bytes, percent int) ledger.VGPU {
		return ledger.VGPU{UUID: gpu(i), Slice: quota.Slice{Limit: limit,
			Share: quota.Share{Weight: 1, Percent: percent, Priority: quota.PriorityDefault}}}
	}
	hami, nvidia := quota.DialectHAMi, quota.DialectNVIDIA
	for i, c := range []struct {
		name    string
		enabled []quota.Dialect
		env     []string
		want    []ledger.VGPU // none: handed to runc as it is
		refused string
	}{
		{"enabled", []quota.Dialect{hami}, []string{askHAMi, "CUDA_DEVICE_SM_LIMIT=30", "NVIDIA_VISIBLE_DEVICES=1"},
			[]ledger.VGPU{slice(1, 6*quota.GiB, 30)}, ""},
		{"two GPUs", []quota.Dialect{hami}, []string{"NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT_0=6g",
			"CUDA_DEVICE_MEMORY_LIMIT_1=4g"},
			[]ledger.VGPU{slice(0, 6*quota.GiB, 0), slice(1, 4*quota.GiB, 0)}, ""},
		{"none enabled", nil, []string{askHAMi}, nil, ""},
		{"another enabled", []quota.Dialect{nvidia}, []string{askHAMi}, nil, ""},
		{"disagreement", []quota.Dialect{hami, nvidia}, []string{askHAMi, "NVIDIA_GPU_MEMORY_LIMIT=4096"}, nil, "disagrees"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.table.Config.Dialects = c.enabled
			n.saveTable()
			bundle := n.bundle(c.env, "", "true")
			before, err := os.ReadFile(filepath.Join(bundle, "config.json"))
			if err != nil {
				t.Fatal(err)
			}
			id := "cgpu-test-dialect-" + strconv.Itoa(i)
			r := n.run("create", "--bundle", bundle, id)
			defer n.run("delete", "--force", id)
			if (r.err != nil) != (c.refused != "") || !strings.Contains(r.log, c.refused) {
				t.Fatalf("%v\n%s", r.err, r.log)
			}
			after := n.given(bundle, id)
			var got []ledger.VGPU
			for _, record := range n.records() { // those of containers before may not have gone yet
				if record.ID == id {
					got = record.VGPUs
				}
			}
			if edited := !bytes.Equal(before, after); edited != (c.want != nil) || !slices.Equal(got, c.want) {
				t.Errorf("edited: %v, reserved %+v, want %+v", edited, got, c.want)
			}
		})
	}
}

// TestDialectBrokenNode: with no node table to be had, cgpu.toml says whether a container in a dialect is ours, so that it
// does not start without its limit.
func TestDialectBrokenNode(t *testing.T) {
	n := newNode(t, "runc")
	os.RemoveAll(n.runDir)
	os.WriteFile(n.runDir, nil, 0o644)
	os.Remove(filepath.Join(n.dir, "cgpu-guard"))
	for _, c := range []struct {
		config, env string
		starts      bool
	}{
		{"broken [", askHAMi, true},
		{"dialects = [\"hami\"]\nbroken [", askHAMi, false},
		{"dialects = [\"nvidia\"]\nbroken [", askHAMi, true},
		{"dialects = [\"hami\"]\nbroken [", "CUDA_DEVICE_SM_LIMIT=30", true}, // no memory limit: not ours
		{"dialects = [\"hami\"]\nbroken [", "A=b", true},
	} {
		if err := os.WriteFile(filepath.Join(n.dir, "cgpu.toml"), []byte(c.config), 0o644); err != nil {
			t.Fatal(err)
		}
		r := n.run("run", "--bundle", n.bundle([]string{c.env}, "", "true"), "cgpu-test-dialect")
		if (r.err == nil) != c.starts {
			t.Errorf("%q, %s: %v, want a start: %v\n%s", c.config, c.env, r.err, c.starts, r.stderr)
		}
	}
}

// TestDialectOff: a container that has words of a dialect which the node has not enabled does not wait for a cgpu-refresh, and
// is not decoded. Only the text of its config.json is looked at.
func TestDialectOff(t *testing.T) {
	n := newNode(t, "runc")
	low, refreshed := filepath.Join(t.TempDir(), "runc"), filepath.Join(t.TempDir(), "refreshed")
	copyFile(t, "/bin/true", low)
	n.table.Config.Runtimes = []string{low}
	script := "#!/bin/sh\n: >" + refreshed + "\nexit 1\n"
	if err := os.WriteFile(filepath.Join(n.dir, "cgpu-refresh"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(n.dir, "cgpu.toml")
	for _, c := range []struct {
		name, config       string
		table              bool // good as it is
		enabled            []quota.Dialect
		starts, hasRefresh bool
	}{
		{"good table", "", true, nil, true, false},
		{"good table, enabled", "", true, []quota.Dialect{quota.DialectHAMi}, false, false},
		{"stale table", "dialects = []\n", false, nil, true, false},
		{"stale table, another enabled", "dialects = [\"mps\"]\n", false, nil, true, false},
		{"stale table says otherwise", "dialects = []\n", false, []quota.Dialect{quota.DialectHAMi}, true, false},
		{"stale table, enabled", "dialects = [\"hami\"]\n", false, nil, false, true},
	} {
		os.Remove(refreshed)
		os.Remove(config)
		n.table.Config.Dialects = c.enabled
		n.saveTable()
		if !c.table {
			if err := os.WriteFile(config, []byte(c.config), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		bundle := t.TempDir()
		raw := `{"process": {"env": ["` + askHAMi + `", 5]}}` // no list of texts: what we decode we refuse
		if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(raw), 0o644); err != nil {
			t.Fatal(err)
		}
		r := n.run("create", "--bundle", bundle, "cgpu-test-dialect-off")
		if (r.err == nil) != c.starts {
			t.Errorf("%s: %v, want a start: %v\n%s%s", c.name, r.err, c.starts, r.stderr, r.log)
		}
		if _, err := os.Stat(refreshed); (err == nil) != c.hasRefresh {
			t.Errorf("%s: refreshed: %v, want %v", c.name, err == nil, c.hasRefresh)
		}
	}
}

func TestEnables(t *testing.T) {
	for text, want := range map[string]bool{
		`dialects = ["hami"]`:                                      true,
		`dialects=['nvidia','hami']`:                               true,
		"x = 1\n  dialects = [\n  \"nvidia\",\n  \"hami\"]":        true,
		"dialects = [\n\"hami\"\n":                                 true, // not closed
		"#dialects = [\n#  \"nvidia\",\n#]\ndialects = [\"hami\"]": true,
		"dialects = [ # [these]\n  \"hami\",\n]":                   true,
		`"dialects" = ["hami"]`:                                    true,
		"dialects = []\n[x]\ndialects = [\"hami\"]":                true,
		`Dialects = ["hami"]`:                                      true,
		`dialects = ["h\u0061mi"]`:                                 true,
		`"d\u0069alects" = ["hami"]`:                               true,
		`driver = "nvidia" dialects = ["hami"]`:                    true, // broken
		`dialects = []`:                                            false,
		`dialects = ["nvidia"]` + "\nx = [\"hami\"]":               true, // a wrong yes
		`#dialects = ["hami"]`:                                     false,
		"dialects = []\n  # such as [\"hami\"]":                    false,
		`driver = "hami"`:                                          false,
		"":                                                         false,
	} {
		if got := enables(text, quota.DialectHAMi); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	for text, want := range map[string]bool{
		"driver = \"nvidia\" # the default\ndialects = [\"hami\"]": false,
		"driver = \"nvidia\"\ndialects = [\n\"nvidia\"]":           true,
		"driver = 'nvidia'\n": false,
		"driver = \"nvidia\", \"nvidia\"\ndialects = [\"hami\"]": true, // broken
	} {
		if got := enables(text, quota.DialectNVIDIA); got != want {
			t.Errorf("nvidia: %q: %v, want %v", text, got, want)
		}
	}
}

// TestNamed: only a file that is not there enables nothing.
func TestNamed(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cgpu.toml")
	if err := os.WriteFile(file, []byte(`dialects = ["mps", "hami"]`), 0o644); err != nil {
		t.Fatal(err)
	}
	may := []quota.Dialect{quota.DialectHAMi, quota.DialectPAI}
	for path, want := range map[string][]quota.Dialect{
		file:                          {quota.DialectHAMi},
		filepath.Join(dir, "missing"): nil,
		dir:                           may, // EISDIR
		filepath.Join(file, "x"):      may, // ENOTDIR
	} {
		t.Setenv("CGPU_CONFIG", path)
		if got := named(may); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
	}
}

// BenchmarkCreateOthers is what a create costs for containers that are none of our business: with no word of ours, and with
// one of a dialect that is not enabled, for which the node table is read. See docs/dialects.md.
func BenchmarkCreateOthers(b *testing.B) {
	n := newNode(b, "runc")
	low := filepath.Join(b.TempDir(), "runc")
	copyFile(b, "/bin/true", low)
	n.table.Config.Runtimes = []string{low}
	n.saveTable()
	for _, way := range []struct{ name, env string }{{"no-word", "A=b"}, {"dialect-off", askHAMi}} {
		bundle := n.bundle([]string{way.env}, "", "true")
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				cmd := exec.Command(filepath.Join(n.dir, "cgpu-runtime"), "create", "--bundle", bundle, "x")
				cmd.Env = []string{"PATH=/usr/bin:/bin", "CGPU_RUN_DIR=" + n.runDir, "CGPU_CONFIG=" + filepath.Join(n.dir, "cgpu.toml")}
				if err := cmd.Run(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
