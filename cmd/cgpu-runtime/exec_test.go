// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func TestJoins(t *testing.T) {
	for args, want := range map[string][2]string{
		"exec --process /p c1":                                                 {"/p", "c1"},
		"exec -d --process=/p --pid-file x c1":                                 {"/p", "c1"},
		"exec -p /p --console-socket s --tty c1 --process /other":              {"/p", "c1"},
		"exec --cwd --process c1 sh":                                           {"", "c1"},
		"exec -e A=b -u 1:1 c1 sh -p x":                                        {"", "c1"},
		"exec --process":                                                       {"", ""},
		"--root /r --log l exec --process /p --detach --pid-file /pid -- -odd": {"/p", "-odd"},
	} {
		process, id, _ := parse(strings.Fields(args), likeRunc).joins()
		if process != want[0] || id != want[1] {
			t.Errorf("%s: %q, %q, want %q", args, process, id, want)
		}
	}
}

// process writes what an engine gives exec.
func process(t testing.TB, env string) string { return processOf(t, env, "/sweep", "see") }

func processOf(t testing.TB, env string, args ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "process.json")
	text := fmt.Sprintf(`{"terminal":false,"user":{"uid":0,"gid":0},"args":["%s"],"env":[%s],"cwd":"/"}`, strings.Join(args, `","`), env)
	if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestExec starts processes in containers as engines do.
func TestExec(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		n.installLimiter()
		for name, test := range map[string]struct {
			env  []string
			want string
		}{
			"limiter": {[]string{ask}, "LD_PRELOAD=/run/cgpu/libcgpu.so:/mine.so"},
			"off":     {[]string{ask, "CGPU_LIMITER=off"}, "LD_PRELOAD=/mine.so"},
			"foreign": {nil, "LD_PRELOAD=/mine.so"},
		} {
			id := fmt.Sprintf("cgpu-test-exec-%s-%d", name, os.Getpid())
			for _, args := range [][]string{{"create", "--bundle", n.bundle(test.env, "", "sleep"), id}, {"start", id}} {
				if r := n.run(args...); r.err != nil {
					t.Fatalf("%s: %v: %v\n%s", name, args, r.err, r.stderr)
				}
			}
			path := process(t, `"LD_PRELOAD=/mine.so"`)
			before, _ := os.ReadFile(path)
			r := n.run("exec", "--process", path, id)
			if first, _, _ := strings.Cut(r.stdout, "\n"); r.err != nil || first != test.want {
				t.Errorf("%s: %v, %s, want %s\n%s", name, r.err, first, test.want, r.stderr)
			}
			if after, _ := os.ReadFile(path); !bytes.Equal(after, before) {
				t.Errorf("%s: the caller's file: %s", name, after)
			}
			if files, _ := os.ReadDir(filepath.Dir(path)); len(files) != 1 {
				t.Errorf("%s: %v", name, files)
			}
			if r := n.run("delete", "--force", id); r.err != nil {
				t.Errorf("%s: %v\n%s", name, r.err, r.stderr)
			}
		}
	})
}

// limitedContainer makes a container that has the limiter as join sees it, among others, and the call that would join it.
func limitedContainer(t testing.TB, others int) (runDir, root, bundle string) {
	t.Helper()
	runDir, root = t.TempDir(), t.TempDir()
	bundle = page.Bundle(runDir, fmt.Sprintf("%016d", len("web"))) // the one that cgpu-runtime made
	book := ledger.Open(runDir)
	reserve := func(id, bundle string) {
		_, err := book.Reserve(ledger.Request{
			Record: ledger.Record{ID: id, Nonce: fmt.Sprintf("%016d", len(id)), Bundle: bundle, Page: "/run/cgpu/page/n",
				VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.MiB, Share: quota.Share{Weight: 1}}}}},
			GPUs: []ledger.GPU{{UUID: "GPU-a", Memory: 20 * quota.GiB}},
			Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 64, PrioRatio: 99},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range others {
		reserve(fmt.Sprintf("%064d", i), "/run/containerd/io.containerd.runtime.v2.task/moby/x")
	}
	reserve("web", bundle)
	for path, text := range map[string]string{
		filepath.Join(bundle, "config.json"): `{"process":{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so"]}}`,
		filepath.Join(root, "web/state.json"): `{"config":{"Hooks":{"poststop":[{"args":["cgpu-hook","release","--nonce","` +
			filepath.Base(bundle) + `"]}]}}}`,
		filepath.Join(root, "other/state.json"): `{}`,
	} {
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return runDir, root, bundle
}

// TestJoinLeavesAlone: where anything is not as it should be, the file stays as it is.
func TestJoinLeavesAlone(t *testing.T) {
	runDir, root, bundle := limitedContainer(t, 0)
	path := process(t, `"A=b"`)
	before, _ := os.ReadFile(path)
	try := func(name string, changed bool, root, option, path, id string) {
		t.Helper()
		args := append([]string{"--root", root, "exec"}, strings.Fields(option+path+" -d "+id)...)
		got := join(parse(args, likeRunc), runDir)
		if slices.Equal(got, args) == changed {
			t.Errorf("%s: %q", name, got)
		}
		i := slices.IndexFunc(got, func(arg string) bool { return strings.Contains(arg, "/proc/self/fd/") })
		if !changed || i < 0 {
			return
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(after, before) {
			t.Errorf("%s: the caller's file: %s", name, after)
		}
		_, file, _ := strings.Cut(got[i], "=")
		if file == "" {
			file = got[i]
		}
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "LD_PRELOAD=") {
			t.Errorf("%s: %s: %s, %v", name, got, text, err)
		}
		if got[i] = strings.Replace(got[i], file, path, 1); !slices.Equal(got, args) {
			t.Errorf("%s: other arguments changed: %q", name, got)
		}
	}
	try("not in the ledger", false, root, "--process ", path, "other")
	try("another engine's container", false, t.TempDir(), "--process ", path, "web")
	try("odd id", false, root, "--process ", path, "../web")
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	try("a pipe", false, root, "--process ", pipe, "web")
	odd := filepath.Join(t.TempDir(), "odd")
	if err := os.WriteFile(odd, []byte(`{"env":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	try("not an environment", false, root, "--process ", odd, "web")
	try("ours", true, root, "--process ", path, "web")
	try("ours", true, root, "-p=", path, "web")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	try("a link", true, root, "--process=", link, "web")
	os.WriteFile(filepath.Join(bundle, "config.json"), []byte(`{"process":{"env":["LD_PRELOAD=/mine.so"]}}`), 0o600)
	try("no limiter", false, root, "--process ", path, "web")
}

// BenchmarkJoin is what cgpu adds to a health check, with 20 containers in the ledger.
func BenchmarkJoin(b *testing.B) {
	runDir, root, _ := limitedContainer(b, 20)
	for _, id := range []string{"web", "other"} {
		b.Run(id, func(b *testing.B) {
			path := process(b, `"A=b"`)
			c := parse([]string{"--root", root, "exec", "--process", path, id}, likeRunc)
			for b.Loop() {
				join(c, runDir)
			}
		})
	}
	b.Run("no ledger", func(b *testing.B) {
		c := parse([]string{"--root", root, "exec", "--process", "/p", "web"}, likeRunc)
		dir := b.TempDir()
		for b.Loop() {
			join(c, dir)
		}
	})
}

// TestStartedByItself: a runtime that becomes cgpu-runtime again is refused, by no mark that hooks would inherit.
func TestStartedByItself(t *testing.T) {
	n := newNode(t, "runc")
	script := filepath.Join(n.dir, "wrapper")
	text := fmt.Sprintf("#!/bin/sh\nenv >%s/env\nexec %s/cgpu-runtime \"$@\"\n", n.runDir, n.dir)
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	n.table.Config.Runtimes = []string{script}
	n.saveTable()
	r := n.run("state", "c1")
	if r.err == nil || !strings.Contains(r.log, "started by itself") {
		t.Errorf("%v: %s", r.err, r.log)
	}
	if env, err := os.ReadFile(filepath.Join(n.runDir, "env")); err != nil || strings.Contains(string(env), "CGPU_RUNTIME") {
		t.Errorf("%v: %s", err, env)
	}
}
