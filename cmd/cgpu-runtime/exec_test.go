package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
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
		process, id := parse(strings.Fields(args), likeRunc).joins()
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
			if after, _ := os.ReadFile(path); string(after) != strings.Replace(string(before), "LD_PRELOAD=/mine.so", test.want, 1) {
				t.Errorf("%s: %s", name, after)
			}
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
				t.Errorf("%s: %v, %v", name, info.Mode(), err)
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
	runDir, root, bundle = t.TempDir(), t.TempDir(), t.TempDir()
	book := ledger.Open(runDir)
	reserve := func(id, bundle string) {
		_, err := book.Reserve(ledger.Request{
			Record: ledger.Record{ID: id, Nonce: fmt.Sprintf("%016d", len(id)), Bundle: bundle, Page: "/run/cgpu/page/n",
				VGPUs: []ledger.VGPU{{UUID: "GPU-a", Limit: quota.MiB, Weight: 1}}},
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
		filepath.Join(bundle, "config.json"):    `{"process":{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so"]}}`,
		filepath.Join(root, "web/state.json"):   `{"config":{"labels":["bundle=` + bundle + `"]}}`,
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
	do := func(root, path, id string) {
		join(parse([]string{"--root", root, "exec", "--process", path, id}, likeRunc), runDir)
	}
	path := process(t, `"A=b"`)
	before, _ := os.ReadFile(path)
	try := func(name string, changed bool) {
		t.Helper()
		after, _ := os.ReadFile(path)
		if (string(after) != string(before)) != changed {
			t.Errorf("%s: %s", name, after)
		}
	}
	do(root, path, "other")
	try("not in the ledger", false)
	do(t.TempDir(), path, "web")
	try("another engine's container", false)
	do(root, path, "../web")
	try("odd id", false)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	do(root, link, "web")
	try("a link", false)
	if err := os.WriteFile(path, []byte(`{"env":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	do(root, path, "web")
	if after, _ := os.ReadFile(path); string(after) != `{"env":"x"}` {
		t.Errorf("not an environment: %s", after)
	}
	os.WriteFile(path, before, 0o600)

	// What lies where the new file is to be written is not written through.
	victim := filepath.Join(t.TempDir(), "victim")
	os.WriteFile(victim, []byte("safe"), 0o600)
	os.Symlink(victim, fmt.Sprintf("%s.cgpu-%d", path, os.Getpid()))
	do(root, path, "web")
	try("ours", true)
	if text, _ := os.ReadFile(victim); string(text) != "safe" {
		t.Errorf("the link's target has %q", text)
	}
	os.WriteFile(path, before, 0o600)
	os.WriteFile(filepath.Join(bundle, "config.json"), []byte(`{"process":{"env":["LD_PRELOAD=/mine.so"]}}`), 0o600)
	do(root, path, "web")
	try("no limiter", false)
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
