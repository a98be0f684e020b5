// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/node"
)

// quotaBundle makes an OCI bundle whose process asks for a quota.
func quotaBundle(t *testing.T, dir string, env []string, args ...string) {
	t.Helper()
	err := lab.Bundle(dir, func(spec map[string]any) { node.SetProcess(spec, env, args...) })
	if err != nil {
		t.Fatal(err)
	}
}

// withRuntimes is the environment of a cgpu-runtime whose configuration names another low-level runtime.
func withRuntimes(t *testing.T, runtime string) []string {
	t.Helper()
	text, err := os.ReadFile(os.Getenv("CGPU_CONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cgpu.toml")
	text = bytes.Replace(text, []byte(filepath.Join(lab.Dir, "lab", "runc")), []byte(runtime), 1)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	// The node's table follows the configuration last used; the other tests want theirs back.
	t.Cleanup(func() { lab.Run(nil, filepath.Join(lab.Bin, "cgpu-refresh")) })
	return []string{"CGPU_CONFIG=" + path}
}

// TestRuntimes: runc and crun started directly on a bundle, without an engine above.
func TestRuntimes(t *testing.T) {
	for _, runtime := range []string{"runc", "crun"} {
		t.Run(runtime, func(t *testing.T) {
			noTrace(t)
			env := withRuntimes(t, filepath.Join(lab.Dir, "lab", runtime))
			bundle := t.TempDir()
			root := t.TempDir()
			quotaBundle(t, bundle, sixOfFifteen, "cgpu-probe", "meminfo")
			id := fmt.Sprintf("%s%d", runtime, os.Getpid())
			r := lab.Run(env, filepath.Join(lab.Bin, "cgpu-runtime"), "--root", root, "run", "--bundle", bundle, id)
			if r.Code != 0 {
				t.Fatal(r)
			}
			if got, want := total(t, r.Stdout), fraction(t, 6, 15); got != want {
				t.Errorf("total = %v, want %v", got, want)
			}
			text, err := os.ReadFile(filepath.Join(os.Getenv("CGPU_RUN_DIR"), "node.json"))
			if err != nil || !bytes.Contains(text, []byte(`"`+filepath.Join(lab.Dir, "lab", runtime)+`"`)) {
				t.Errorf("another runtime was used: %v, %s", err, text)
			}
		})
	}
}

// TestContainerd: ctr drives containerd's own shim.
func TestContainerd(t *testing.T) {
	noTrace(t)
	args := []string{"ctr", "run", "--rm", "--runc-binary", filepath.Join(lab.Bin, "cgpu-runtime")}
	for _, e := range sixOfFifteen {
		args = append(args, "--env", e)
	}
	id := fmt.Sprintf("ctr%d", os.Getpid())
	out := run(t, append(args, "docker.io/library/"+image+":latest", id, "cgpu-probe", "meminfo")...)
	if got, want := total(t, out), fraction(t, 6, 15); got != want {
		t.Errorf("total = %v, want %v", got, want)
	}
}

// TestNamespaces: containers of one ID in two namespaces of containerd each have a share of their own, and end each by itself.
func TestNamespaces(t *testing.T) {
	noTrace(t)
	const other = "other"
	id, name := fmt.Sprintf("same%d", os.Getpid()), "docker.io/library/"+image+":latest"
	run(t, "sh", "-c", "ctr images export - "+name+" | ctr -n "+other+" images import -")
	t.Cleanup(func() {
		lab.Run(nil, "ctr", "-n", other, "images", "rm", "--sync", name)
		lab.Run(nil, "ctr", "namespaces", "rm", other)
	})
	sizes := map[string]quota.Bytes{"default": quota.GiB, other: 2 * quota.GiB}
	for namespace, size := range sizes {
		args := []string{"ctr", "-n", namespace, "run", "-d", "--runc-binary", filepath.Join(lab.Bin, "cgpu-runtime"), "--cgroup",
			"/" + namespace + "-" + id}
		for _, e := range sizeOf(size.String()) {
			args = append(args, "--env", e)
		}
		run(t, append(args, name, id, "sleep", "600")...)
		t.Cleanup(func() {
			lab.Run(nil, "ctr", "-n", namespace, "tasks", "rm", "-f", id)
			lab.Run(nil, "ctr", "-n", namespace, "containers", "rm", id)
		})
	}
	if r := tryCgpu("inspect", id); r.Code == 0 || !strings.Contains(r.All(), "/"+other) {
		t.Errorf("which one is not asked: %s", r)
	}
	for namespace, size := range sizes {
		out := run(t, "ctr", "-n", namespace, "tasks", "exec", "--exec-id", "e", id, "cgpu-probe", "meminfo")
		if got := total(t, out); got != size {
			t.Errorf("%s: total = %v, want %v", namespace, got, size)
		}
	}
	run(t, "ctr", "-n", other, "tasks", "rm", "-f", id)
	eventually(t, 5*time.Second, func() string {
		if left := records(t); len(left) != 1 || left[0].VGPUs[0].Limit != sizes["default"] {
			return fmt.Sprintf("%+v", left)
		}
		return ""
	})
	if got := total(t, run(t, "ctr", "tasks", "exec", "--exec-id", "e2", id, "cgpu-probe", "meminfo")); got != sizes["default"] {
		t.Errorf("total = %v after the other's end", got)
	}
}

// TestNative: without a quota config.json is not touched by a byte, though everything of ours is broken.
func TestNative(t *testing.T) {
	broken := t.TempDir()
	for _, name := range []string{"cgpu.toml", "node.json", "ledger.json"} {
		if err := os.WriteFile(filepath.Join(broken, name), []byte("{{{ broken"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	environments := map[string][]string{
		"whole":  nil,
		"broken": {"CGPU_RUN_DIR=" + broken, "CGPU_CONFIG=" + filepath.Join(broken, "cgpu.toml")},
	}
	for name, env := range environments {
		t.Run(name, func(t *testing.T) {
			bundle, root := t.TempDir(), t.TempDir()
			quotaBundle(t, bundle, []string{"NVIDIA_VISIBLE_DEVICES=all"}, "true")
			config := filepath.Join(bundle, "config.json")
			before, err := os.ReadFile(config)
			if err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(config)
			if err != nil {
				t.Fatal(err)
			}
			id := fmt.Sprintf("native%d", os.Getpid())
			r := lab.Run(env, filepath.Join(lab.Bin, "cgpu-runtime"), "--root", root, "run", "--bundle", bundle, id)
			if r.Code != 0 {
				t.Fatal(r)
			}
			after, err := os.ReadFile(config)
			if err != nil {
				t.Fatal(err)
			}
			now, err := os.Stat(config)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(before, after) || !os.SameFile(info, now) {
				t.Error("config.json was changed")
			}
		})
	}
	t.Run("broken with a quota", func(t *testing.T) {
		bundle, root := t.TempDir(), t.TempDir()
		quotaBundle(t, bundle, sizeOf("1GiB"), "true")
		r := lab.Run(environments["broken"], filepath.Join(lab.Bin, "cgpu-runtime"), "--root", root, "run", "--bundle", bundle, "broken")
		wantRefused(t, r, `cgpu\.toml|node\.json`)
	})
}

// TestPassThrough: commands that are not ours are the low-level runtime's own, output and status alike.
func TestPassThrough(t *testing.T) {
	for _, args := range [][]string{{"--version"}, {"features"}, {"list"}, {"nonsense"}, {"state", "nobody"}} {
		ours := lab.Run(nil, append([]string{filepath.Join(lab.Bin, "cgpu-runtime")}, args...)...)
		theirs := lab.Run(nil, append([]string{"runc"}, args...)...)
		if ours.Code != theirs.Code || ours.Stdout != theirs.Stdout {
			t.Errorf("%v:\nours: %s\ntheirs: %s", args, ours, theirs)
		}
	}
}
