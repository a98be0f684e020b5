// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestDriverBranches: each driver branch that the guard knows, played by the simulated driver: structures as that branch has them, a limit
// that holds, time that is given, and calls at random, a third of them wrong. Before 535 NVOS64_PARAMETERS was shorter, and the probe knows
// the longer one only.
func TestDriverBranches(t *testing.T) {
	if lab.Driver != device.DriverSim {
		testenv.Skip(t, "on a GPU: a real driver is of one branch")
	}
	probe := filepath.Join(lab.Bin, "cgpu-probe")
	for _, branch := range rm.KnownBranches() {
		if n, err := strconv.Atoi(branch); err != nil || n < 535 {
			continue
		}
		t.Run(branch, func(t *testing.T) {
			env := branchNode(t, branch+".500.0")
			run := func(args ...string) string {
				t.Helper()
				r := lab.Run(env, append([]string{filepath.Join(lab.Bin, "cgpu"), "run", "--memory", "512MiB", "--", probe}, args...)...)
				if r.Code != 0 {
					t.Fatal(r)
				}
				return r.All()
			}
			if out := run("meminfo"); !strings.Contains(out, "total_mib=512\n") {
				t.Errorf("meminfo: %s", out)
			}
			run("alloc", "400MiB")
			wantRefused(t, lab.Run(env, filepath.Join(lab.Bin, "cgpu"), "run", "--memory", "512MiB", "--", probe, "alloc", "600MiB"), noMemory)
			run("work", "--kernel", "1ms", "--for", "100ms")
			run("walk", "--malformed", "--seed", branch, "--for", "500ms")
			eventually(t, 10*time.Second, func() string {
				if out := lab.Run(env, filepath.Join(lab.Bin, "cgpu"), "smi").All(); !strings.Contains(out, " 0 vGPUs") ||
					!strings.Contains(out, branch+".500.0") {
					return out
				}
				return ""
			})
		})
	}
}

// branchNode is a node of its own, without engines, whose simulated driver is of a version. It is stopped with the test.
func branchNode(t *testing.T, version string) (env []string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cgpu-branch-")
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "cgpu.toml")
	text := "driver = \"sim\"\n[sim]\ndriver_version = " + strconv.Quote(version) + "\n[[sim.gpus]]\nname = \"Tesla T4\"\nmemory = \"4GiB\"\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	mine := "CGPU_RUN_DIR=" + filepath.Join(dir, "run")
	t.Cleanup(func() {
		eventually(t, 30*time.Second, func() string {
			left := holders(mine)
			for _, pid := range left {
				_ = syscall.Kill(pid, syscall.SIGTERM)
			}
			if len(left) > 0 {
				return "processes of " + mine + " are left"
			}
			return ""
		})
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return []string{mine, "CGPU_CONFIG=" + config}
}

// holders are the processes that have a variable in their environment.
func holders(variable string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(append([]byte{0}, text...), []byte("\x00"+variable+"\x00")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
