// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// examine runs cgpu doctor on the private node.
func examine(t *testing.T, program string, env []string, args ...string) (map[string]doctor.Result, int) {
	t.Helper()
	if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "docker=") }) {
		args = append(args, "--engine", "docker="+filepath.Join(lab.Dir, "docker", "daemon.json"))
	}
	r := lab.Run(env, append([]string{program, "doctor", "-o", "json"}, args...)...)
	var report doctor.Report
	if err := json.Unmarshal([]byte(r.Stdout), &report); err != nil {
		t.Fatalf("%v: %s", err, r)
	}
	results := map[string]doctor.Result{}
	for _, c := range report.Checks {
		results[c.Name] = c
		if (c.Status == doctor.Warn || c.Status == doctor.Fail) != (c.Remedy != "") {
			t.Errorf("want a remedy for what is not well, and for nothing else: %+v", c)
		}
	}
	if failed := report.Count(doctor.Fail) > 0; failed != (r.Code == 1) || r.Code > 1 || failed != (report.Status == doctor.Fail) {
		t.Errorf("%d failures, status %s: %s", report.Count(doctor.Fail), report.Status, r)
	}
	return results, r.Code
}

// ofKernel are checks that an older kernel, or another machine's setting, may leave at a warning.
var ofKernel = []string{"wait-killable", "sync-wake-up", "thread-pidfd", "cgroup", "hmm", "persistence", "gsp"}

// tidy removes what killed guards of other tests have left, which cgpu gc takes away only after a while.
func tidy(t *testing.T) {
	t.Helper()
	known, err := os.ReadFile(filepath.Join(lab.RunDir, "ledger.json"))
	if err != nil && !errors.Is(err, os.ErrNotExist) { // no container yet
		t.Fatal(err)
	}
	for _, folder := range []string{"g", "page"} {
		files, _ := os.ReadDir(filepath.Join(lab.RunDir, folder))
		for _, f := range files {
			if nonce, _, _ := strings.Cut(f.Name(), "."); !strings.Contains(string(known), nonce) {
				_ = os.Remove(filepath.Join(lab.RunDir, folder, f.Name()))
			}
		}
	}
}

// TestDoctorGood: on a node that works nothing fails, and the container that tries to escape does not.
func TestDoctorGood(t *testing.T) {
	noTrace(t)
	tidy(t)
	gpus(t)
	cgpu := filepath.Join(lab.Bin, "cgpu")
	id := holding(t, container{env: sizeOf("512MiB")}, "64MiB")
	again(t, func() string { // what does not answer in time is not well
		results, code := examine(t, cgpu, nil, "--self-test")
		// Of the seven checks about Kubernetes the first says that this is no node of it, and the rest nothing.
		if code != 0 || len(results) != len(doctor.Checks())-6+1 || results["kubernetes"].Status != doctor.Skip {
			return fmt.Sprintf("exit status %d, %d checks: %+v", code, len(results), results)
		}
		for name, r := range results {
			if r.Status == doctor.Fail || r.Status == doctor.Warn && !slices.Contains(ofKernel, name) {
				return fmt.Sprintf("%+v", r)
			}
		}
		for _, name := range []string{"seccomp-notify", "runtime-seccomp", "scheduling", "table", "docker", "guards", "self-test"} {
			if results[name].Status != doctor.OK {
				return fmt.Sprintf("want ok: %+v", results[name])
			}
		}
		return ""
	})
	// The container that runs has noticed nothing, and nothing stays of the self-test.
	if got := execIn(id, "cgpu-probe", "alloc", "64MiB"); got.Code != 0 {
		t.Error(got)
	}
	if logs, _ := filepath.Glob(filepath.Join(lab.RunDir, "log", "doctor-*")); len(logs) > 0 {
		t.Errorf("logs of the self-test are left: %v", logs)
	}
	out := run(t, cgpu, "doctor", "-v", "--engine", "docker="+filepath.Join(lab.Dir, "docker", "daemon.json"))
	if lines := strings.Count(out, "\n"); lines != len(doctor.Checks())-6+1 || !strings.HasPrefix(out, "ok    rights") {
		t.Errorf("%d lines:\n%s", lines, out)
	}
}

// TestDoctorBroken breaks one thing after the other: the check that is about it says so, and says what to do.
func TestDoctorBroken(t *testing.T) {
	noTrace(t)
	gpus(t)
	cgpu := filepath.Join(lab.Bin, "cgpu")
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	want := func(t *testing.T, results map[string]doctor.Result, name string, status doctor.Status, found, remedy string) {
		t.Helper()
		if r := results[name]; r.Status != status || !strings.Contains(r.Found, found) || !strings.Contains(r.Remedy, remedy) {
			t.Errorf("got %+v\nwant %s: …%s… → …%s…", r, status, found, remedy)
		}
	}
	t.Run("configuration", func(t *testing.T) {
		results, _ := examine(t, cgpu, []string{"CGPU_CONFIG=" + write("bad.toml", "max_isnt = 3\n")})
		want(t, results, "config", doctor.Fail, "max_isnt", "configs/cgpu.toml")
		want(t, results, "table", doctor.Warn, "stale", "cgpu refresh")
		want(t, results, "scheduling", doctor.Skip, "table", "")
	})
	t.Run("stale table", func(t *testing.T) {
		withConfig(t, "max_inst = 7")
		later := time.Now().Add(time.Hour)
		if err := os.Chtimes(os.Getenv("CGPU_CONFIG"), later, later); err != nil {
			t.Fatal(err)
		}
		results, code := examine(t, cgpu, nil)
		want(t, results, "table", doctor.Warn, "was changed", "cgpu refresh")
		if code != 0 {
			t.Errorf("exit status %d", code)
		}
	})
	t.Run("no table", func(t *testing.T) {
		results, _ := examine(t, cgpu, []string{"CGPU_RUN_DIR=" + dir})
		want(t, results, "table", doctor.Warn, "not made yet", "cgpu refresh")
	})
	t.Run("runtime", func(t *testing.T) {
		config, err := os.ReadFile(os.Getenv("CGPU_CONFIG"))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Replace(string(config), filepath.Join(lab.Dir, "lab", "runc"), "/nowhere/runc", 1)
		results, _ := examine(t, cgpu, []string{"CGPU_CONFIG=" + write("runtime.toml", text)})
		want(t, results, "runtime", doctor.Fail, "/nowhere/runc", "install runc")
		want(t, results, "runtime-seccomp", doctor.Skip, "", "")
	})
	t.Run("engine", func(t *testing.T) {
		for text, status := range map[string]doctor.Status{"{": doctor.Fail, "{}": doctor.Skip,
			`{"runtimes":{"cgpu":{"path":"/nowhere/cgpu-runtime"}}}`: doctor.Fail} {
			results, _ := examine(t, cgpu, nil, "--engine", "docker="+write("daemon.json", text))
			want(t, results, "docker", status, "", "")
		}
		results, _ := examine(t, cgpu, nil, "--engine",
			"docker="+write("daemon.json", `{"runtimes":{"new":{"path":"`+filepath.Join(lab.Bin, "cgpu-runtime")+`"}}}`))
		want(t, results, "docker", doctor.Warn, "does not know it", "reload") // the dockerd that runs has another file
		results, _ = examine(t, cgpu, nil, "--engine", "docker="+write("daemon.json", "{}"))
		want(t, results, "engines", doctor.Warn, "none", "cgpu install")
	})
	t.Run("programs", func(t *testing.T) {
		run(t, "cp", cgpu, filepath.Join(dir, "cgpu"))
		results, _ := examine(t, filepath.Join(dir, "cgpu"), nil, "--self-test")
		want(t, results, "programs", doctor.Fail, "lacks cgpu-runtime", "make install")
		want(t, results, "limiter", doctor.Warn, "libcgpu.so", "make install")
		want(t, results, "self-test", doctor.Fail, "cgpu-probe", "cgpu-probe")
		want(t, results, "docker", doctor.OK, "", "") // nothing beside this cgpu to compare it with
	})
	t.Run("preload", func(t *testing.T) {
		withConfig(t, `enforcement = "preload"`)
		results, code := examine(t, cgpu, nil, "--self-test")
		want(t, results, "enforcement", doctor.Warn, "walked around", "guard")
		want(t, results, "self-test", doctor.Skip, "preload", "")
		if code != 0 {
			t.Errorf("exit status %d", code)
		}
	})
	t.Run("guard killed", func(t *testing.T) {
		noTrace(t)
		id := container{env: sizeOf("256MiB"), cmd: []string{"sleep", "600"}}.start(t)
		killGuard(t, id)
		eventually(t, 5*time.Second, func() string {
			if results, _ := examine(t, cgpu, nil); results["guards"].Status != doctor.Fail || !strings.Contains(results["guards"].Found, id[:12]) {
				return results["guards"].Found
			}
			return ""
		})
	})
	t.Run("dead record", func(t *testing.T) {
		ended := exec.Command("true")
		if err := ended.Run(); err != nil {
			t.Fatal(err)
		}
		g := gpus(t)[1%len(gpus(t))]
		book := ledger.Open(lab.RunDir)
		if _, err := book.Reserve(ledger.Request{GPUs: []ledger.GPU{{UUID: g.UUID, Index: g.Index, Memory: g.Memory}},
			Record: ledger.Record{ID: "left", Nonce: "00000000000000aa", LauncherPID: ended.ProcessState.Pid(),
				VGPUs: []ledger.VGPU{{UUID: g.UUID, Slice: quota.Slice{Limit: quota.MiB}}}},
			Card: mustTable(t).Config.Card()}); err != nil {
			t.Fatal(err)
		}
		tidy(t)
		left := filepath.Join(lab.RunDir, "page", "00000000000000bb")
		if err := os.WriteFile(left, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		old := time.Now().Add(-time.Hour)
		if err := os.Chtimes(left, old, old); err != nil {
			t.Fatal(err)
		}
		results, _ := examine(t, cgpu, nil)
		want(t, results, "ledger", doctor.Warn, "left", "cgpu gc")
		want(t, results, "leftovers", doctor.Warn, "00000000000000bb", "cgpu gc")
		run(t, cgpu, "gc") // the remedy
		results, _ = examine(t, cgpu, nil)
		want(t, results, "ledger", doctor.OK, "", "")
		want(t, results, "leftovers", doctor.OK, "", "")
	})
	t.Run("no room", func(t *testing.T) {
		var ids []string
		for _, g := range gpus(t) {
			env := quotaOf(strconv.FormatUint(uint64(g.Memory/quota.MiB)-256, 10)+"MiB", "", strconv.Itoa(g.Index))
			ids = append(ids, container{env: env, cmd: []string{"sleep", "600"}}.start(t))
		}
		results, code := examine(t, cgpu, nil, "--self-test")
		want(t, results, "self-test", doctor.Skip, "cgpu smi", "")
		if code != 0 {
			t.Errorf("exit status %d", code)
		}
		docker(t, append([]string{"rm", "-f"}, ids...)...)
	})
}

// TestDoctorMeasure: each GPU that nobody uses is measured, in all parts, and nothing stays of it. Where somebody has work nothing is
// started, and he is named.
func TestDoctorMeasure(t *testing.T) {
	simOnly(t)
	noTrace(t)
	list := gpus(t)
	if len(list) < 2 {
		testenv.Lacks(t, "one GPU cannot be both in use and not")
	}
	id := busy(t, on(list[0].Index))
	results, code := examine(t, filepath.Join(lab.Bin, "cgpu"), nil, "--measure")
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
	for _, part := range []struct {
		name    string
		figures int
	}{{"measure-weights", 1}, {"measure-waiting", 1}, {"measure-pause", 2}, {"measure-switch", 2}} {
		r := results[part.name]
		if (r.Status != doctor.OK && r.Status != doctor.Warn) || !strings.Contains(r.Found, id[:12]) ||
			len(r.Figures) != part.figures*(len(list)-1) {
			t.Errorf("%s: %+v", part.name, r)
		}
		for _, f := range r.Figures {
			if f.GPU == list[0].Index || f.Value < 0 || f.Unit == "" {
				t.Errorf("%s: %+v", part.name, f)
			}
		}
	}
	eventually(t, 5*time.Second, func() string {
		if all := records(t); len(all) != 1 {
			return fmt.Sprintf("what is left: %+v", all)
		}
		return ""
	})
}

func mustTable(t *testing.T) *device.Table {
	t.Helper()
	table, err := device.Load(lab.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// TestSelf: what cgpu-probe self says from inside is what holds it.
func TestSelf(t *testing.T) {
	noTrace(t)
	for _, tt := range []struct {
		name, verdict string
		c             container
		code          int
	}{
		{"guard", "enforcement=guard", container{env: sizeOf("512MiB"), cmd: []string{"cgpu-probe", "self", "--limit", "512MiB"}}, 0},
		{"guard, unprivileged", "enforcement=guard",
			container{env: sizeOf("512MiB"), opts: []string{"--user", "1000", "--cap-drop", "ALL"}, cmd: []string{"cgpu-probe-libc", "self"}}, 0},
		{"guard, unconfined", "enforcement=guard", container{env: sizeOf("512MiB"), opts: []string{"--security-opt", "seccomp=unconfined"},
			cmd: []string{"cgpu-probe", "self"}}, 0},
		{"another size", "want 1024MiB", container{env: sizeOf("512MiB"), cmd: []string{"cgpu-probe", "self", "--limit", "1024MiB"}}, 1},
		{"no quota", "is this a GPU container?", container{cmd: []string{"cgpu-probe", "self"}}, 1},
	} {
		if r := tt.c.try(t); r.Code != tt.code || !strings.Contains(r.All(), tt.verdict) {
			t.Errorf("%s: want %d, %s: %s", tt.name, tt.code, tt.verdict, r)
		}
	}
	withConfig(t, preloaded.config...)
	static := container{env: sizeOf("512MiB"), cmd: []string{"cgpu-probe", "self"}}.try(t)
	if static.Code != 1 || !strings.Contains(static.All(), "has not loaded libcgpu.so") {
		t.Errorf("preload mode, a static program: %s", static)
	}
	if r := (container{env: sizeOf("512MiB"), cmd: []string{"cgpu-probe-libc", "self"}}).try(t); r.Code != 0 ||
		!strings.Contains(r.All(), "can walk around") {
		t.Errorf("preload mode: %s", r)
	}
}
