// SPDX-License-Identifier: Apache-2.0

//go:build integration

package slurm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/test/node"
)

func TestSlurm(t *testing.T) {
	if _, err := os.Stat("/run/cgpu"); os.IsNotExist(err) {
		t.Cleanup(func() { _ = os.Remove("/run/cgpu") }) // where tasks have their page mounted
	}
	c := start(t)
	for _, test := range []struct {
		name string
		do   func(*testing.T, *cluster)
	}{
		{"tasks", tasks},
		{"refused", refused},
		{"without", without},
		{"batch", batch},
		{"allocation", allocation},
		{"gres", gres},
		{"limits", limits},
		{"environment", environment},
		{"attacks", attacks},
		{"cancelled", cancelled},
		{"broken", broken},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.do(t, c)
			c.limits(t, "")
			c.empty(t)
		})
	}
}

// wantTotals compares the sizes of cards that probes have printed.
func wantTotals(t *testing.T, r node.Result, want ...string) {
	t.Helper()
	var got []string
	for line := range strings.Lines(r.Stdout) {
		if total, ok := strings.CutPrefix(line, "total_mib="); ok {
			got = append(got, strings.TrimSpace(total))
		}
	}
	if r.Code != 0 || strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("cards of %v MiB, want %v: %v", got, want, r)
	}
}

func wantRefused(t *testing.T, r node.Result, why string) {
	t.Helper()
	if r.Code != 125 || !strings.Contains(r.Stderr, why) {
		t.Errorf("want exit 125 and %q: %v", why, r)
	}
}

// look is a script that prints which file system its /dev is, and that it has no GPU. The simulated driver's nodes are not in the host's
// /dev either, so that there is none is not enough.
const look = "stat -c %d /dev; ls -d /dev/nvidia* 2>/dev/null"

// wantHidden: that was not the host's /dev, and had no GPU.
func wantHidden(t *testing.T, r node.Result) {
	t.Helper()
	host := lab.Run(nil, "stat", "-c", "%d", "/dev")
	if r.Stdout == host.Stdout || strings.Count(r.Stdout, "\n") != 1 {
		t.Errorf("want a /dev without GPUs, not the host's (%s): %v", strings.TrimSpace(host.Stdout), r)
	}
}

// tasks: each has a slice, and whatever it starts is inside.
func tasks(t *testing.T, c *cluster) {
	wantTotals(t, c.srun("-n", "2", "--gpu-mem=6GiB", c.probe(), "meminfo"), "6144", "6144")
	r := c.srun("--gpu-mem=1GiB", "--gpu-weight=3", "--gpu-percent=40", "sh", "-c",
		"id -u; ls -d /dev/nvidia?; grep -e Seccomp: -e NoNew /proc/self/status; "+
			c.probe()+" alloc 1100MiB || echo no more")
	if want := "65534\n/dev/nvidia0\nNoNewPrivs:\t1\nSeccomp:\t2\n"; r.Code != 0 || !strings.HasPrefix(r.Stdout, want) ||
		!strings.Contains(r.Stdout, "no more") {
		t.Error(r)
	}
	held, end := c.hold(t, "--gpu-mem=1GiB", "--gpu-weight=3", "--gpu-percent=40")
	if v := held.VGPUs[0]; v.Weight != 3 || v.Percent != 40 || !strings.HasPrefix(held.Name, "slurm-") || held.Owners[0] != "user:65534" {
		t.Errorf("%+v", held)
	}
	end()
	wantTotals(t, c.srun("--gpu-mem=1GiB", "--chdir=/dev", c.probe(), "meminfo"), "1024")
	if r := c.as(ann, nil, "script", "-qec", "srun --pty --gpu-mem=1GiB sh -c 'tty && stty -a && ls -d /dev/nvidia?'",
		"/dev/null"); r.Code != 0 ||
		!strings.Contains(r.Stdout, "/dev/pts/") || !strings.Contains(r.Stdout, "/dev/nvidia0") {
		t.Errorf("a terminal: %v", r)
	}
}

// hold has ann hold a slice, the only one, and returns it and how it ends.
func (c *cluster) hold(t *testing.T, args ...string) (ledger.Record, func()) {
	t.Helper()
	c.empty(t)
	file := filepath.Join(c.dir, "out", "ends")
	done := make(chan node.Result, 1)
	go func() {
		done <- c.srun(append(args, "sh", "-c", "until [ -e "+file+" ]; do sleep 0.1; done")...)
	}()
	return c.only(t), func() {
		must(t, os.WriteFile(file, nil, 0o644))
		if r := <-done; r.Code != 0 {
			t.Error(r)
		}
		must(t, os.Remove(file))
	}
}

// empty waits until all slices have come back.
func (c *cluster) empty(t *testing.T) {
	t.Helper()
	c.wait(t, "the ledger still has slices", func() bool { return len(records(t)) == 0 })
}

// only waits for the node's only slice to have its task.
func (c *cluster) only(t *testing.T) ledger.Record {
	t.Helper()
	var list []ledger.Record
	c.wait(t, "the slice is not there", func() bool {
		list = records(t)
		return len(list) == 1 && list[0].InitPID != 0
	})
	return list[0]
}

func refused(t *testing.T, c *cluster) {
	wantRefused(t, c.srun("--gpu-mem=60GiB", "true"), `cgpu: --gpu-mem "60GiB": the limit 61440MiB is more than the GPU's 23028MiB`)
	wantRefused(t, c.srun("--gpu-mem=6XiB", "true"), `--gpu-mem "6XiB": is no size`)
	wantRefused(t, c.srun("--gpu-mem=6GiB", "--gpu-weight=65", "true"), "--gpu-weight 65: want 1 to 64")
	for _, args := range [][]string{{"--gpu-mem=x"}, {"--gpu-mem=" + strings.Repeat("1", 40)}, {"--gpu-weight=3"}} {
		if r := c.srun(append(args, "true")...); r.Code == 0 || !strings.Contains(r.Stderr, "want") {
			t.Error(r)
		}
	}
}

// without: a step that asks for nothing.
func without(t *testing.T, c *cluster) {
	wantHidden(t, c.srun("sh", "-c", look))
	if r := c.srun(c.probe(), "meminfo"); r.Code == 0 || !strings.Contains(r.Stderr, "/dev/nvidiactl: no such file") {
		t.Error(r)
	}
	c.limits(t, `without = "refuse"`)
	wantRefused(t, c.srun("true"), "--gpu-mem: must be given on this node")
	c.limits(t, `without = "open"`)
	here := lab.Run(nil, "stat", "-c", "%d", "/dev")
	if r := c.srun("stat", "-c", "%d", "/dev"); r.Code != 0 || r.Stdout != here.Stdout {
		t.Errorf("another /dev than the node's: %v", r)
	}
}

// script runs a batch script of ann's to its end, and returns what it has printed.
func (c *cluster) script(t *testing.T, text string, args ...string) node.Result {
	t.Helper()
	file := filepath.Join(c.dir, "out", "job")
	defer os.Remove(file)
	r := c.as(ann, nil, append(append([]string{"sbatch", "--parsable", "--output=" + file}, args...), "--wrap", text)...)
	job := strings.TrimSpace(r.Stdout)
	// Not sbatch --wait, which asks after 2 s, 4 s, ….
	c.wait(t, "the job does not end", func() bool {
		r = c.as(nil, nil, "scontrol", "--oneliner", "show", "job", job)
		return !strings.Contains(r.Stdout, "JobState=PENDING") && !strings.Contains(r.Stdout, "JobState=RUNNING") &&
			!strings.Contains(r.Stdout, "JobState=COMPLETING")
	})
	_, code, _ := strings.Cut(r.Stdout, " ExitCode=")
	if _, err := fmt.Sscanf(code, "%d:", &r.Code); err != nil {
		t.Fatal(r)
	}
	out, _ := os.ReadFile(file)
	r.Stdout = string(out)
	return r
}

// batch: the script has a slice, and so have its steps, as large unless they say otherwise.
func batch(t *testing.T, c *cluster) {
	wantTotals(t, c.script(t, fmt.Sprintf("%[1]s meminfo; srun --overlap %[1]s meminfo; srun --overlap --gpu-mem=3GiB %[1]s meminfo",
		c.probe()), "--gpu-mem=2GiB"), "2048", "2048", "3072")
	wantTotals(t, c.script(t, fmt.Sprintf("%[1]s meminfo; srun --overlap --gpu-mem=3GiB %[1]s meminfo", c.probe())), "3072")
	if r := c.script(t, "true", "--gpu-mem=2GiB", "--input=/dev"); r.Code != 125 ||
		!strings.Contains(r.All(), "standard input, output or error is a folder") {
		t.Errorf("a folder came in as standard input: %v", r)
	}
	if r := c.script(t, "true", "--gpu-mem=60GiB"); r.Code != 125 || !strings.Contains(r.All(), "ask for less") {
		t.Error(r)
	}
}

func allocation(t *testing.T, c *cluster) {
	wantTotals(t, c.as(ann, nil, "salloc", "--gpu-mem=2GiB", "srun", c.probe(), "meminfo"), "2048")
}

// gres: the slice is on the GPU that Slurm has allotted.
func gres(t *testing.T, c *cluster) {
	c.limits(t, `gpus = "gres"`)
	count := []string{"sh", "-c", "ls -d /dev/nvidia?"}
	for gpus, want := range map[string]string{"gpu:1": "/dev/nvidia0\n", "gpu:2": "/dev/nvidia0\n/dev/nvidia1\n",
		"shard:1": "/dev/nvidia0\n"} {
		if r := c.srun(append([]string{"--gpu-mem=1GiB", "--gres=" + gpus}, count...)...); r.Code != 0 || r.Stdout != want {
			t.Errorf("--gres=%s: %v", gpus, r)
		}
	}
	if out := c.script(t, "ls -d /dev/nvidia?", "--gpu-mem=1GiB", "--gres=gpu:1").Stdout; out != "/dev/nvidia0\n" {
		t.Errorf("batch: %q", out)
	}
	wantRefused(t, c.as(ann, []string{"SLURM_STEP_GPUS=1", "SLURM_JOB_GPUS=1", "CUDA_VISIBLE_DEVICES=1"}, "srun", "--gpu-mem=1GiB", "true"),
		"the step has no GPU of Slurm's")
}

// limits: what users and accounts may have.
func limits(t *testing.T, c *cluster) {
	c.limits(t, `
[everyone]
memory = "5GiB"
[user.nobody]
memory = "3GiB"
weight = 2
percent = 50
[account.physics]
memory = "4GiB"
`)
	wantRefused(t, c.srun("--gpu-mem=1GiB", "--gpu-weight=3", "true"), "--gpu-weight 3: user:65534 may have at most 2")
	wantRefused(t, c.srun("--gpu-mem=1GiB", "--gpu-percent=51", "true"), "--gpu-percent 51: user:65534 may have at most 50")
	held, end := c.hold(t, "--gpu-mem=2GiB", "--account=physics")
	if held.VGPUs[0].Percent != 50 {
		t.Errorf("who asks for no percentage is not limited: %+v", held)
	}
	wantRefused(t, c.srun("--gpu-mem=2GiB", "true"), "user:65534 may have 3072MiB on this node, of which 1024MiB are free")
	physics := []string{"srun", "--gpu-mem=3GiB", "--account=physics", "true"}
	wantRefused(t, c.as(bob, nil, physics...), "account:physics may have 4096MiB on this node, of which 2048MiB are free")
	wantRefused(t, c.as(bob, []string{"SLURM_JOB_ACCOUNT=art", "SBATCH_ACCOUNT=art"}, physics...), "account:physics may have")
	wantRefused(t, c.as(bob, nil, "srun", "--gpu-mem=3GiB", "--account=physics", "--job-name=x Account=art", "true"),
		"account:physics may have")
	wantTotals(t, c.as(bob, nil, "srun", "--gpu-mem=3GiB", c.probe(), "meminfo"), "3072")
	end()
	must(t, os.Chmod(c.policy, 0o666))
	wantRefused(t, c.srun("--gpu-mem=1GiB", "true"), "that nobody else may write")
	must(t, os.Chmod(c.policy, 0o644))
	c.limits(t, "memroy = 1")
	wantRefused(t, c.srun("--gpu-mem=1GiB", "true"), "there is no such key")
}

// environment: whatever a user sets is his program's, and not the plugin's.
func environment(t *testing.T, c *cluster) {
	c.limits(t, "[everyone]\nmemory = \"3GiB\"\n")
	evil := []string{"CGPU_RUN_DIR=/tmp", "CGPU_CONFIG=/dev/null", "LD_LIBRARY_PATH=/tmp", "SLURM_JOB_UID=0", "SLURM_JOB_USER=root",
		"SUDO_UID=0", "LD_PRELOAD=/nowhere.so"}
	wantTotals(t, c.as(ann, evil, "srun", "--gpu-mem=2GiB", c.probe(), "meminfo"), "2048")
	if r := c.as(ann, evil, "srun", "--gpu-mem=2GiB", "sh", "-c", "echo $LD_PRELOAD"); r.Stdout != "/run/cgpu/libcgpu.so:/nowhere.so\n" {
		t.Error(r)
	}
	if r := c.as(ann, []string{"CUDA_VISIBLE_DEVICES=7"}, "srun", "--gpu-mem=2GiB", "sh", "-c",
		"echo $CUDA_VISIBLE_DEVICES"); r.Stdout != "\n" {
		t.Error(r)
	}
	// Options come in the environment, too.
	wantRefused(t, c.as(ann, []string{"_SLURM_SPANK_OPTION_cgpu_gpu_mem=14GiB", "SLURM_SPANK__SLURM_SPANK_OPTION_cgpu_gpu_mem=14GiB"},
		"srun", "true"), "user:65534 may have 3072MiB")
	// A task prolog of his own is inside.
	prolog := filepath.Join(c.dir, "out", "prolog")
	must(t, os.WriteFile(prolog, []byte("#!/bin/sh\ngrep Seccomp: /proc/self/status >"+prolog+".out\nls -d /dev/nvidia? >>"+prolog+".out\n"),
		0o755))
	if r := c.srun("--gpu-mem=2GiB", "--task-prolog="+prolog, "true"); r.Code != 0 {
		t.Error(r)
	}
	if out, err := os.ReadFile(prolog + ".out"); err != nil || string(out) != "Seccomp:\t2\n/dev/nvidia0\n" {
		t.Errorf("task prolog: %q, %v", out, err)
	}
}

// attacks: a plugin stack of the user's own, and those on the driver that a container is held against.
func attacks(t *testing.T, c *cluster) {
	own := filepath.Join(c.dir, "out")
	conf, err := os.ReadFile(c.conf)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(own, "slurm.conf"), []byte(strings.ReplaceAll(string(conf), c.stack, own+"/plugstack.conf")), 0o644))
	must(t, os.WriteFile(filepath.Join(own, "plugstack.conf"), nil, 0o644))
	mine := []string{"SLURM_CONF=" + own + "/slurm.conf"}
	wantHidden(t, c.as(ann, mine, "srun", "sh", "-c", look))
	if r := c.as(ann, mine, "srun", "--gpu-mem=2GiB", "true"); r.Code == 0 {
		t.Errorf("the stack was not his own: %v", r)
	}
	wantHidden(t, c.srun("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "umount -l /dev 2>/dev/null; "+look))
	if r := c.srun("--gpu-mem=256MiB", c.probe(), "hostile", "all", "--tries", "50"); r.Code != 0 {
		t.Error(r)
	}
}

// cancelled: the slice of a step that is killed comes back (TestSlurm looks).
func cancelled(t *testing.T, c *cluster) {
	done := make(chan node.Result, 1)
	c.empty(t)
	go func() { done <- c.srun("--gpu-mem=2GiB", c.probe(), "hold", "1GiB") }()
	c.only(t)
	if r := c.as(nil, nil, "scancel", "--user="+ann.name); r.Code != 0 {
		t.Error(r)
	}
	if r := <-done; !strings.Contains(r.Stderr, "CANCELLED") {
		t.Error(r)
	}
}

// broken: whatever fails ends the task.
func broken(t *testing.T, c *cluster) {
	for _, how := range []string{"required", "optional"} {
		for _, cgpu := range []string{"/nowhere", "/bin/true"} {
			c.plugin(t, how, cgpu)
			for _, args := range [][]string{{"--gpu-mem=1GiB", "echo", "ran"}, {"echo", "ran"}} {
				if r := c.srun(args...); r.Code != 125 || r.Stdout != "" {
					t.Errorf("%s, %s: %v", how, cgpu, r)
				}
			}
		}
	}
}
