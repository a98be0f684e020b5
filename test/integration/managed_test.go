// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// seen is how long the guard may take to see a mapping. It looks once a second, on a machine that has time.
const seen = 30 * time.Second

// killed is the exit status of a process that SIGKILL ended.
const killed = 137

// TestManaged: managed memory, which is mapped without an ioctl that the guard would answer.
func TestManaged(t *testing.T) {
	noTrace(t)
	for _, user := range []string{"0", "1000"} {
		t.Run("user "+user, func(t *testing.T) {
			t.Run("counted", func(t *testing.T) { managedCounts(t, user) })
			t.Run("beyond the limit", func(t *testing.T) { managedBeyond(t, user) })
		})
	}
	t.Run("announced", managedAnnounced)
	t.Run("race", managedRace)
	t.Run("device memory first", managedLate)
	t.Run("deny", managedDeny)
	t.Run("allow", managedAllow)
}

// managedCounts: what is mapped counts against the limit until it is unmapped, though nobody says so to the guard.
func managedCounts(t *testing.T, user string) {
	noTrace(t)
	c := guardOnly.of(container{env: sizeOf("1GiB"), opts: []string{"--user", user},
		cmd: strings.Fields("cgpu-probe managed 300MiB 200MiB --hold 0 --free")})
	id := c.ready(t)
	wantMemory(t, seen, id, func(m vgpu) bool { return m.Managed == 500*quota.MiB && m.Used == 500*quota.MiB })
	if got := used(t, meminfoIn(t, id)); got != 500*quota.MiB {
		t.Errorf("used = %v, want the 500MiB that are mapped", got)
	}
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "600MiB"), noMemory)
	if r := execIn(id, "cgpu-probe", "alloc", "500MiB"); r.Code != 0 {
		t.Errorf("there is room for it: %s", r)
	}
	docker(t, "kill", "-s", "TERM", id)
	wantMemory(t, seen, id, func(m vgpu) bool { return m.Managed == 0 && m.Used == 0 })
	if r := execIn(id, "cgpu-probe", "alloc", "1000MiB"); r.Code != 0 {
		t.Errorf("after the end of the mapping: %s", r)
	}
}

// managedBeyond: a process that maps more than the limit is killed, and no other.
func managedBeyond(t *testing.T, user string) {
	noTrace(t)
	c := guardOnly.of(container{env: sizeOf("1GiB"), opts: []string{"--user", user}})
	id := holding(t, c, "100MiB")
	r := execIn(id, "cgpu-probe", "managed", "3GiB", "--hold", "30", "--hostile")
	if r.Code != killed {
		t.Fatalf("want it killed: %s", r)
	}
	t.Logf("killed after %v, docker exec included", r.Took.Round(time.Millisecond))
	wantMemory(t, seen, id, func(m vgpu) bool {
		return m.Managed == 0 && m.Used == 100*quota.MiB && m.Calls.ProcessesKilled == 1
	})
	if r := execIn(id, "cgpu-probe", "alloc", "900MiB"); r.Code != 0 {
		t.Errorf("the others suffer: %s", r)
	}
	if state := strings.TrimSpace(docker(t, "inspect", "-f", "{{.State.Running}}", id)); state != "true" {
		t.Error("the container's first process is gone too")
	}
}

// managedAnnounced: the limiter asks first, so a program is told at once that there is no room, and lives.
func managedAnnounced(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: playsLimiter("600MiB", "--hold", "0", "--free")}.ready(t)
	if m := smiOf(t, id); m.Managed != 600*quota.MiB {
		t.Errorf("at once: %+v", m)
	}
	r := execIn(id, playsLimiter("500MiB")...)
	wantRefused(t, r, `refused=524288000`)
	if r.Code == killed {
		t.Errorf("it was killed: %s", r)
	}
	if r := execIn(id, playsLimiter("400MiB")...); r.Code != 0 {
		t.Errorf("there is room for it: %s", r)
	}
	docker(t, "kill", "-s", "TERM", id)
	wantMemory(t, 500*time.Millisecond, id, func(m vgpu) bool { return m.Managed == 0 })
	if m := smiOf(t, id); m.Calls.ProcessesKilled != 0 {
		t.Errorf("processes were killed: %+v", m)
	}
}

// managedRace: of processes that want the same room at the same time one gets it.
func managedRace(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}.start(t)
	for range 3 {
		out := atOnce(t, id, 4, "mapped_mib=", append(playsLimiter("600MiB"), "--hold", "0")...)
		if won, lost := strings.Count(out, "mapped_mib=600"), strings.Count(out, "refused="); won != 1 || lost != 3 {
			t.Errorf("%d of 4 had the room that is there for one, %d were refused: %s", won, lost, out)
		}
		wantMemory(t, seen, id, func(m vgpu) bool { return m.Managed == 0 })
	}
}

// atOnce runs n of a command at the same time in a container, which go on until each has said a word. Then they are killed; it returns what
// all said.
func atOnce(t *testing.T, id string, n int, word string, cmd ...string) string {
	t.Helper()
	const script = `n=$1 word=$2; shift 2; pids=
for i in $(busybox seq $n); do "$@" >/tmp/said$i 2>&1 & pids="$pids $!"; done
for i in $(busybox seq $n); do until grep -qE "$word" /tmp/said$i; do sleep 0.05; done; done
kill -9 $pids 2>/dev/null; wait; cat /tmp/said*; busybox rm /tmp/said*`
	r := execIn(id, append([]string{"sh", "-c", script, "sh", strconv.Itoa(n), word}, cmd...)...)
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// managedLate: device memory and managed memory share the limit, whichever comes first.
func managedLate(t *testing.T) {
	noTrace(t)
	id := holding(t, container{env: sizeOf("1GiB")}, "700MiB")
	wantRefused(t, execIn(id, playsLimiter("400MiB")...), "refused=")
	if r := execIn(id, "cgpu-probe", "managed", "400MiB", "--hold", "30"); r.Code != killed {
		t.Errorf("want it killed: %s", r)
	}
}

func managedDeny(t *testing.T) {
	withConfig(t, `managed = "deny"`)
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}.start(t)
	wantRefused(t, execIn(id, playsLimiter("64MiB")...), "refused=")
	if r := execIn(id, "cgpu-probe", "managed", "64MiB", "--hold", "30"); r.Code != killed {
		t.Errorf("want it killed: %s", r)
	}
	if r := execIn(id, "cgpu-probe", "alloc", "1000MiB"); r.Code != 0 {
		t.Errorf("device memory: %s", r)
	}
}

func managedAllow(t *testing.T) {
	withConfig(t, `managed = "allow"`)
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: strings.Fields("cgpu-probe managed 3GiB --hold 0")}.ready(t)
	r := execIn(id, playsLimiter("3GiB", "--hold", "3")...)
	if r.Code != 0 {
		t.Error(r)
	}
	if m := smiOf(t, id); m.Managed != 0 || m.Used != 0 {
		t.Errorf("it is counted: %+v", m)
	}
	if r := execIn(id, "cgpu-probe", "alloc", "1000MiB"); r.Code != 0 {
		t.Errorf("device memory: %s", r)
	}
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", fmt.Sprint(quota.GiB+2*quota.MiB)), noMemory)
}
