// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestBusyGuard: whatever a container does that is no successful driver call, its guard uses a twentieth of a core for it, once the burst
// is used up, with all that Go needs for it. The bound here leaves room for the short time that it is measured. Without a bill it is 0.5
// and more.
func TestBusyGuard(t *testing.T) {
	const most = 0.08
	noTrace(t)
	for _, way := range []string{"strangers", "others", "refused", "roots", "files", "threads", "processes"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			share := guardShare(t, container{env: sizeOf("256MiB"), cmd: []string{"cgpu-probe", "hostile", "busy-" + way, "--busy", "2m"}}, most)
			t.Logf("%.3f of a core", share)
			if share > most {
				t.Errorf("the guard uses %.3f of a core", share)
			}
		})
	}
}

// TestBusyQuota: a container with a CPU quota makes its guard use no more than that, even where a twentieth of a core would be free. It
// is 0.02 and what Go needs, 0.047 on a busy machine; without a bill 0.8.
func TestBusyQuota(t *testing.T) {
	noTrace(t)
	c := container{env: sizeOf("256MiB"), opts: []string{"--cpus", "0.02"},
		cmd: []string{"cgpu-probe", "hostile", "busy-files", "--busy", "2m"}}
	const most = 0.10
	share := guardShare(t, c, most)
	t.Logf("%.3f of a core", share)
	if share > most {
		t.Errorf("the guard of a container with a fiftieth of a CPU uses %.3f of a core", share)
	}
}

// guardShare starts a container and tells what part of a core its guard uses over some seconds, once the burst is used up. Where that is
// more than it may be, the machine was busy perhaps, and the guard uses what it had not got: again then, a few times. Without a bill it is
// as much each time.
func guardShare(t *testing.T, c container, most float64) float64 {
	t.Helper()
	id := c.start(t)
	pid := guardOf(t, id)
	const burst = 1500 * time.Millisecond // a second, and what is gained meanwhile
	for begin := time.Now(); time.Since(begin) < time.Minute &&
		(cpuTime(t, pid) < burst || !strings.Contains(guardLog(t, id), "calls wait")); {
		time.Sleep(50 * time.Millisecond)
	}
	share := 1.0
	for try := 0; try < 5 && share > most; try++ {
		before, begin := cpuTime(t, pid), time.Now()
		time.Sleep(4 * time.Second)
		share = (cpuTime(t, pid) - before).Seconds() / time.Since(begin).Seconds()
	}
	if docker(t, "inspect", "-f", "{{.State.Running}}", id) != "true\n" {
		t.Fatalf("the container is over: %s", lab.Run(nil, "docker", "logs", id))
	}
	return share
}

// guardLog is the log of a container's guard.
func guardLog(t *testing.T, id string) string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(lab.RunDir, "log", id[:12]+"-*.log"))
	if err != nil || len(paths) > 1 {
		t.Fatal(paths, err)
	}
	if len(paths) == 0 {
		return "" // nothing to tell yet
	}
	text, err := os.ReadFile(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// cpuTime is what a process has used of the CPUs.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	var ticks int
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
