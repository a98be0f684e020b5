// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// guardOf waits for a container's guard and returns its pid.
func guardOf(t *testing.T, id string) int {
	t.Helper()
	var pid int
	eventually(t, 5*time.Second, func() string {
		r, ok := recordOf(t, id)
		if !ok || r.GuardPID == 0 {
			return "no guard in the ledger for " + id
		}
		pid = r.GuardPID
		return ""
	})
	return pid
}

// killGuard kills a container's guard and waits until it is dead.
func killGuard(t *testing.T, id string) {
	t.Helper()
	pid := guardOf(t, id)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, func() string {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return ""
		}
		return fmt.Sprintf("guard %d does not die", pid)
	})
}

// TestFirstContainer: on a fresh node the first container has the table made, and it is made once.
func TestFirstContainer(t *testing.T) {
	noTrace(t)
	table := filepath.Join(lab.RunDir, "node.json")
	if err := os.Remove(table); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	c := container{env: sizeOf("64MiB"), cmd: []string{"true"}}
	c.run(t)
	first, err := os.Stat(table)
	if err != nil {
		t.Fatal(err)
	}
	c.run(t)
	if second, err := os.Stat(table); err != nil || !os.SameFile(first, second) {
		t.Errorf("the table was made again: %v", err)
	}
}

// TestRestart: docker restart and stop/start give the same size again and leave no trace of the first life.
func TestRestart(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}.start(t)
	first := docker(t, "diff", id)
	for _, again := range [][]string{{"restart", "-t", "0", id}, {"restart", "-t", "0", id}, {"stop", "-t", "0", id}, {"start", id}} {
		docker(t, again...)
		if again[0] == "stop" {
			eventually(t, 2*time.Second, func() string {
				if _, ok := recordOf(t, id); ok {
					return "a stopped container still has a reservation"
				}
				return ""
			})
			continue
		}
		r := execIn(id, "cgpu-probe", "alloc", "1000MiB")
		if r.Code != 0 {
			t.Fatalf("after docker %s: %s", again[0], r)
		}
		wantRefused(t, execIn(id, "cgpu-probe", "alloc", "1100MiB"), noMemory)
		eventually(t, 2*time.Second, func() string { // the guard of the first life may still be there
			if n := len(records(t)); n != 1 {
				return fmt.Sprintf("after docker %s: %d records, want 1", again[0], n)
			}
			return ""
		})
	}
	// Restarts must not pile files up in the container's layer.
	if changed := docker(t, "diff", id); strings.Count(changed, "\n") > strings.Count(first, "\n") {
		t.Errorf("docker diff: %s\nafter the first start: %s", changed, first)
	}
}

// TestKilledProgram: a killed program's memory is back within a second, for its container and for the card.
func TestKilledProgram(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		id := m.of(container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}).start(t)
		m.spawn(t, id, "cgpu-probe", "hold", "900MiB")
		eventually(t, 10*time.Second, func() string {
			if used(t, m.exec(id, "cgpu-probe", "meminfo").Stdout) < 900*quota.MiB {
				return "not holding yet"
			}
			return ""
		})
		wantRefused(t, m.exec(id, "cgpu-probe", "alloc", "200MiB"), noMemory)
		killIn(t, id, "hold")
		// In preload mode the processes of the container notice it, when they need the room.
		if !m.preload {
			eventually(t, time.Second, func() string {
				if u := smiOf(t, id).Used; u > 0 {
					return fmt.Sprintf("cgpu smi says %v in use", u)
				}
				return ""
			})
		}
		if lab.Driver == device.DriverSim {
			eventually(t, time.Second, func() string {
				if u := driverUsed(t); u > 0 {
					return fmt.Sprintf("the driver holds %v", u)
				}
				return ""
			})
		}
		if r := m.exec(id, "cgpu-probe", "alloc", "1000MiB"); r.Code != 0 {
			t.Error(r)
		}
	})
}

// killIn kills the container's first process that runs a command of the probe, as the kernel does when memory is short.
func killIn(t *testing.T, id, command string) {
	t.Helper()
	script := fmt.Sprintf("kill -9 $(ps | grep 'cgpu-probe.* %s' | grep -v grep | { read pid rest; echo $pid; })", command)
	run(t, "docker", "exec", id, "sh", "-c", script)
}

// TestKilledContainer: docker kill frees the reservation and the memory within a second.
func TestKilledContainer(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		id := m.holding(t, container{env: sizeOf("1GiB")}, "900MiB")
		docker(t, "kill", id)
		eventually(t, time.Second, func() string {
			if _, ok := recordOf(t, id); ok {
				return "still reserved"
			}
			return ""
		})
	})
}

// TestKilledGuard: without its guard a container has no GPU: calls fail, nothing hangs, neighbours do not notice.
func TestKilledGuard(t *testing.T) {
	noTrace(t)
	neighbour := holding(t, container{env: sizeOf("512MiB")}, "100MiB")
	id := holding(t, container{env: sizeOf("1GiB")}, "500MiB")
	killGuard(t, id)
	// The listener is gone, so runc cannot bring a further process in, or that process gets no GPU.
	if r := execIn(id, "cgpu-probe", "alloc", "1MiB"); r.Code == 0 {
		t.Errorf("an allocation without a guard: %s", r)
	} else if r.Code < 0 {
		t.Errorf("it hangs: %s", r)
	}
	if r := execIn(neighbour, "cgpu-probe", "alloc", "300MiB"); r.Code != 0 {
		t.Errorf("the neighbour suffers: %s", r)
	}
	docker(t, "rm", "-f", id)
	eventually(t, 5*time.Second, func() string {
		if kinds := kindsOf(eventsOf(t, "--container", id)); !strings.HasSuffix(kinds, "start warning end deleted") {
			return "nobody tells of the guard's end: " + kinds
		}
		return ""
	})
	cgpu(t, "gc")
	if _, ok := recordOf(t, id); ok {
		t.Error("still in the ledger after removal and cgpu gc")
	}
}

// TestKilledGuardInside: the same for a program that runs on while its guard dies.
func TestKilledGuardInside(t *testing.T) {
	noTrace(t)
	name := fmt.Sprintf("inside%d", os.Getpid())
	id := container{name: name, env: sizeOf("1GiB"), cmd: []string{"sh", "-c",
		"while [ ! -e /tmp/go ]; do sleep 0.1; done; cgpu-probe alloc 1MiB; echo $? >/tmp/code; sleep 600"}}.start(t)
	killGuard(t, id)
	root := fmt.Sprintf("/proc/%s/root/tmp/", strings.TrimSpace(docker(t, "inspect", "-f", "{{.State.Pid}}", id)))
	if err := os.WriteFile(root+"go", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, func() string {
		text, err := os.ReadFile(root + "code")
		if err != nil || len(text) == 0 {
			return "the program hangs"
		}
		if strings.TrimSpace(string(text)) == "0" {
			t.Fatal("a GPU call succeeded without a guard")
		}
		return ""
	})
	docker(t, "rm", "-f", id)
	cgpu(t, "gc")
}

// TestKilledRuntime: runc killed at a random moment of create leaves nothing behind that gc does not take.
func TestKilledRuntime(t *testing.T) {
	for _, m := range []mode{guarded, preloaded} {
		t.Run(m.name, func(t *testing.T) {
			withConfig(t, m.config...)
			killedRuntime(t)
		})
	}
}

func killedRuntime(t *testing.T) {
	noTrace(t)
	gpus(t)
	for i := range 20 {
		bundle := filepath.Join(t.TempDir(), "b")
		id := fmt.Sprintf("killed%d-%d", os.Getpid(), i)
		quotaBundle(t, bundle, sizeOf("1GiB"), "sleep", "600")
		root := filepath.Join(lab.Dir, "runc-killed")
		cmd := exec.Command(filepath.Join(lab.Bin, "cgpu-runtime"), "--root", root, "create", "--bundle", bundle, id)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		// It is runc by now, or still ours: both the same pid.
		if err := cmd.Process.Kill(); err != nil && !strings.Contains(err.Error(), "finished") {
			t.Fatal(err)
		}
		cmd.Wait() //nolint:errcheck // it was killed
		lab.Run(nil, "runc", "--root", root, "delete", "--force", id)
		orphans(t, root, id)
	}
	eventually(t, 10*time.Second, func() string {
		tryCgpu("gc")
		if left := records(t); len(left) > 0 {
			return fmt.Sprintf("%+v", left)
		}
		if pids := guards(t); len(pids) > 0 {
			return fmt.Sprintf("guards still run: %v", pids)
		}
		return ""
	})
	// A page that nobody removed is collected once it is half a minute old.
	ageLeftovers()
	cgpu(t, "gc")
	container{env: quotaOf("15", "15", "0"), cmd: []string{"true"}}.run(t)
}

// orphans kills a runc init that the killed runc left waiting on its exec fifo.
func orphans(t *testing.T, root, id string) {
	t.Helper()
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*/" + id)
	more, _ := filepath.Glob("/sys/fs/cgroup/" + id)
	for _, dir := range append(dirs, more...) {
		text, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		for _, field := range strings.Fields(string(text)) {
			pid := 0
			fmt.Sscan(field, &pid)
			if pid > 1 {
				syscall.Kill(pid, syscall.SIGKILL) //nolint:errcheck // it may be gone
			}
		}
		eventually(t, 3*time.Second, func() string {
			if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
				return err.Error()
			}
			return ""
		})
	}
	if err := os.RemoveAll(filepath.Join(root, id)); err != nil {
		t.Fatal(err)
	}
}

// TestDockerdRestart: live containers keep their size and their memory while dockerd is stopped, or killed, and started.
func TestDockerdRestart(t *testing.T) {
	noTrace(t)
	id := holding(t, container{env: sizeOf("1GiB")}, "600MiB")
	guard := guardOf(t, id)
	t.Cleanup(func() {
		// A failure here must not fail all tests that come after.
		if lab.Run(nil, "docker", "info").Code != 0 {
			lab.Run(nil, lab.Script, "start", lab.Dir)
			lab.Run(nil, "docker", "rm", "-f", id)
		}
	})
	for _, verb := range []string{"stop", "kill"} {
		run(t, lab.Script, verb, lab.Dir)
		run(t, lab.Script, "start", lab.Dir)
		if state := strings.TrimSpace(docker(t, "inspect", "-f", "{{.State.Running}}", id)); state != "true" {
			t.Fatalf("after %s: running = %s", verb, state)
		}
		if now := guardOf(t, id); now != guard {
			t.Errorf("after %s: guard %d, was %d", verb, now, guard)
		}
		wantRefused(t, execIn(id, "cgpu-probe", "alloc", "600MiB"), noMemory)
		if r := execIn(id, "cgpu-probe", "alloc", "300MiB"); r.Code != 0 {
			t.Errorf("after %s: %s", verb, r)
		}
	}
}
