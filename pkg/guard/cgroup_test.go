// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

func TestCPUUsage(t *testing.T) {
	for _, c := range []struct {
		name, file, text string
		want             time.Duration
		ok               bool
	}{
		{"v1", "cpuacct.usage", "1234567890\n", 1234567890, true},
		{"v1, damaged", "cpuacct.usage", "\n", 0, false},
		{"v2", "cpu.stat", "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n", 1500 * time.Microsecond, true},
		{"v2, elsewhere in the file", "cpu.stat", "core_sched.force_idle_usec 1\nusage_usec 7\n", 7 * time.Microsecond, true},
		{"v2, damaged", "cpu.stat", "usage_usec x\n", 0, false},
		{"v2, without it", "cpu.stat", "user_usec 1\n", 0, false},
		{"neither", "other", "", 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if got, ok := cpuUsage(dir); ok != c.ok || ok && got != c.want {
				t.Errorf("%v %v, want %v %v", got, ok, c.want, c.ok)
			}
		})
	}
	if c := cgroupsOf(1 << 30); c != (cgroups{}) || len(c.processes()) > 0 {
		t.Errorf("of a process that is not there: %+v", c)
	}
}

// TestManyProcesses: a container cannot hide a process behind others.
func TestManyProcesses(t *testing.T) {
	dir := t.TempDir()
	var text []byte
	for pid := range 5000 {
		text = fmt.Appendln(text, pid+1)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if list := (cgroups{procs: dir}).processes(); len(list) != 5000 {
		t.Errorf("%d of 5000 processes", len(list))
	}
}

// TestHeadlessMember: cgroup v1 shows a process whose first thread has ended in the root.
func TestHeadlessMember(t *testing.T) {
	c := startPlain(t)
	c.do("pid")
	inCgroup(t, "devices", c.pid())
	g := &Guard{cgroups: cgroupsOf(c.pid())}
	c.headless()
	if !g.inCgroup(c.pid()) || len(g.cgroups.processes()) != 1 {
		t.Error("it is not the container's any more")
	}
	c.kill() // or its cgroup stays
}

// inCgroup puts a process into a cgroup of its own in a v1 hierarchy.
func inCgroup(t *testing.T, controller string, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/sys/fs/cgroup/%s/cgpu-test-%d", controller, pid)
	if err := os.Mkdir(dir, 0o755); err != nil {
		testenv.Lacks(t, "%v", err)
	}
	t.Cleanup(func() {
		// Empty only when the process is gone, and the kernel takes a moment.
		for range 100 {
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
		testenv.Lacks(t, "%v", err)
	}
}

// TestCgroup: the processes and the CPU time of a real cgroup.
func TestCgroup(t *testing.T) {
	for _, controller := range []string{"cpuacct", "devices"} {
		if _, err := os.Stat("/sys/fs/cgroup/" + controller + "/cgroup.procs"); err != nil {
			testenv.Skip(t, "no cgroup v1 with cpuacct and devices", err)
		}
	}
	pids := make([]int, 2)
	cmds := make([]*exec.Cmd, 2)
	for i := range cmds {
		cmds[i] = sleeper(t, 0)
		pids[i] = cmds[i].Process.Pid
	}
	inCgroup(t, "cpuacct", pids[0])
	inCgroup(t, "devices", pids[0])
	c := cgroupsOf(pids[0])
	used, ok := cpuUsage(c.cpu)
	if !ok || used < 0 {
		t.Errorf("CPU time %v %v", used, ok)
	}
	for tries := 100; ; tries-- { // it may still be starting
		time.Sleep(10 * time.Millisecond)
		again, _ := cpuUsage(c.cpu)
		if again == used {
			break
		}
		if used = again; tries == 0 {
			t.Fatalf("a process that sleeps uses time: %v", used)
		}
	}
	if got := c.processes(); !slices.Equal(got, pids[:1]) {
		t.Errorf("processes %v, want %v", got, pids[:1])
	}
	for _, cmd := range cmds {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}
