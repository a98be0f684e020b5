package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

const askHAMi = "CUDA_DEVICE_MEMORY_LIMIT=6g"

// TestDialect starts containers that ask in HAMi's words, on nodes that have that enabled and on others.
func TestDialect(t *testing.T) {
	n := newNode(t, "runc")
	run := func(enabled []quota.Dialect, env ...string) (edited bool, r result) {
		t.Helper()
		n.table.Config.Dialects = enabled
		n.saveTable()
		bundle := n.bundle(env, "", "true")
		before, err := os.ReadFile(filepath.Join(bundle, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		r = n.run("create", "--bundle", bundle, "cgpu-test-dialect")
		after, err := os.ReadFile(filepath.Join(bundle, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		return !bytes.Equal(before, after), r
	}
	remove := func() { n.run("delete", "--force", "cgpu-test-dialect") }
	hami := []quota.Dialect{quota.DialectHAMi}

	edited, r := run(hami, askHAMi, "CUDA_DEVICE_SM_LIMIT=30", "NVIDIA_VISIBLE_DEVICES=1")
	if r.err != nil || !edited {
		t.Fatalf("enabled: edited %v, %v\n%s", edited, r.err, r.stderr)
	}
	records := n.records()
	if len(records) != 1 || len(records[0].VGPUs) != 1 || records[0].VGPUs[0].Limit != 6*quota.GiB || records[0].VGPUs[0].Percent != 30 ||
		records[0].VGPUs[0].UUID != n.table.GPUs[1].UUID {
		t.Errorf("enabled: %+v", records)
	}
	remove()

	edited, r = run(hami, "NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT_0=6g", "CUDA_DEVICE_MEMORY_LIMIT_1=4g")
	if r.err != nil || !edited {
		t.Fatalf("two GPUs: edited %v, %v\n%s", edited, r.err, r.stderr)
	}
	if records := n.records(); len(records) != 1 || len(records[0].VGPUs) != 2 || records[0].VGPUs[0].Limit != 6*quota.GiB || records[0].VGPUs[1].Limit != 4*quota.GiB {
		t.Errorf("two GPUs: %+v", records)
	}
	remove()

	for name, enabled := range map[string][]quota.Dialect{"none enabled": nil, "another enabled": {quota.DialectNVIDIA}} {
		if edited, r := run(enabled, askHAMi); r.err != nil || edited || len(n.records()) != 0 {
			t.Errorf("%s: edited %v, %v\n%s", name, edited, r.err, r.stderr)
		}
		remove()
	}
	if _, r := run([]quota.Dialect{quota.DialectHAMi, quota.DialectNVIDIA}, askHAMi, "NVIDIA_GPU_MEMORY_LIMIT=4096"); r.err == nil || !strings.Contains(r.log, "disagrees") {
		t.Errorf("dialects that disagree: %v\n%s", r.err, r.log)
	}
	remove()
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

func TestEnables(t *testing.T) {
	for text, want := range map[string]bool{
		`dialects = ["hami"]`:                               true,
		`dialects=['nvidia','hami']`:                        true,
		"x = 1\n  dialects = [\n  \"nvidia\",\n  \"hami\"]": true,
		"dialects = [\n\"hami\"\n":                          true, // not closed
		`dialects = []`:                                     false,
		`dialects = ["nvidia"]` + "\nx = [\"hami\"]":        false,
		`#dialects = ["hami"]`:                              false,
		`driver = "hami"`:                                   false,
		"":                                                  false,
	} {
		if got := enables(text, quota.DialectHAMi); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
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
