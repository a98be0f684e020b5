// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/tally"
)

// arbiterKilled: whoever is killed of a GPU's arbiters, shares and accounts go on; with the last container they end.
func arbiterKilled(t *testing.T, gpu int) {
	uuid := gpus(t)[gpu].UUID
	ids := []string{busy(t, on(gpu)), busy(t, on(gpu, "SCHD_WEIGHT=3"))}
	wantOf(t, gpu, ids, 25, 75)
	again(t, func() string {
		account := accountOf(t, gpu, ids)
		old := 0
		for range 5 {
			// What is computed while there is neither a leader nor a standby is on nobody's account.
			eventually(t, 30*time.Second, func() string {
				if n := len(arbiters(t, uuid)); n < 2 {
					return fmt.Sprintf("%d processes have the GPU's lock open, want a leader and a standby", n)
				}
				return ""
			})
			time.Sleep(measured / 5) // until it has the records
			old = killArbiter(t, uuid, old)
		}
		wantOf(t, gpu, ids, 25, 75)
		return account()
	})

	killArbiters(t, uuid)
	decides(t, uuid, 0)
	wantOf(t, gpu, ids, 25, 75)

	docker(t, append([]string{"rm", "-f"}, ids...)...)
	eventually(t, time.Minute, func() string {
		if left := arbiters(t, uuid); len(left) > 0 {
			return fmt.Sprintf("%v are left", left)
		}
		return ""
	})
}

// accountOf begins a comparison of what guards say of GPU time with what the driver says. Asked later, it complains where they differ.
func accountOf(t *testing.T, gpu int, ids []string) func() string {
	t.Helper()
	before := spentBy(t, gpu, ids...)
	var told []time.Duration
	for _, id := range ids {
		told = append(told, smiOf(t, id).Compute.GPUTime.Duration())
	}
	return func() string {
		t.Helper()
		for i, id := range ids {
			// The guard knows it some tens of milliseconds later.
			least := spentBy(t, gpu, id).gpuTime[0] - before.gpuTime[i]
			got := smiOf(t, id).Compute.GPUTime.Duration() - told[i]
			most := spentBy(t, gpu, id).gpuTime[0] - before.gpuTime[i]
			if slack := least/20 + 500*time.Millisecond; got < least-slack || got > most+slack {
				return fmt.Sprintf("%v by its account, %v to %v by the driver's", got, least, most)
			}
		}
		return ""
	}
}

// again tries a few times what a machine that is busy at a bad moment makes fail.
func again(t *testing.T, try func() (complaint string)) {
	t.Helper()
	var complaints []string
	for range 3 {
		complaint := try()
		if complaint == "" {
			return
		}
		t.Log(complaint)
		complaints = append(complaints, complaint)
	}
	t.Error(strings.Join(complaints, "\n"))
}

// arbiterKilledAtRest: where both are killed while the GPU rests, a container that was there has others started when it works again.
func arbiterKilledAtRest(t *testing.T, gpu int) {
	uuid := gpus(t)[gpu].UUID
	id := container{env: on(gpu), cmd: []string{"sleep", "1h"}}.start(t)
	docker(t, "exec", id, "cgpu-probe", "work", "--for", "1s")
	decides(t, uuid, 0)
	time.Sleep(3 * time.Second) // the row then holds for ever
	killArbiters(t, uuid)
	docker(t, "exec", "-d", id, "cgpu-probe", "work", "--for", "1m") // a guard asks for one every 10 s
	decides(t, uuid, 0)
	docker(t, "rm", "-f", id)
}

// countedToTheEnd: the node's counters have all of the GPU time of containers that have ended.
func countedToTheEnd(t *testing.T, gpu int) {
	uuid := gpus(t)[gpu].UUID
	counted := func() time.Duration {
		n, err := tally.Read(lab.RunDir)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(n.Sum.GPUs[uuid].Time)
	}
	again(t, func() string {
		counts, computed := counted(), spentBy(t, gpu).busy
		for range 2 {
			container{env: on(gpu), cmd: []string{"cgpu-probe", "work", "--for", "4s", "--windows", "1h"}}.run(t)
		}
		computed = spentBy(t, gpu).busy - computed
		var got time.Duration
		for begin := time.Now(); time.Since(begin) < 30*time.Second; time.Sleep(100 * time.Millisecond) {
			if got = counted() - counts; (got - computed).Abs() <= computed/20 {
				return ""
			}
		}
		return fmt.Sprintf("%v are counted, of %v", got, computed)
	})
}

// killArbiters kills both at once: a guard starts others.
func killArbiters(t *testing.T, uuid string) {
	t.Helper()
	for _, pid := range arbiters(t, uuid) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// killArbiter kills the one that decides and returns it, when it is not the one given.
func killArbiter(t *testing.T, uuid string, old int) int {
	t.Helper()
	pid := decides(t, uuid, old)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	return pid
}

// decides waits for an arbiter, which is not the one given.
func decides(t *testing.T, uuid string, old int) (pid int) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		l, lives, err := process.Find(lab.RunDir, uuid)
		if err != nil {
			t.Fatal(err)
		}
		if pid = l.PID; !lives || pid == old {
			return "nobody decides about the GPU"
		}
		return ""
	})
	return pid
}

// arbiters are the processes that have a GPU's lock open.
func arbiters(t *testing.T, uuid string) (pids []int) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		file, err := os.Readlink(link)
		if err != nil || file != filepath.Join(lab.RunDir, "board", uuid+".arbiter") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(strings.TrimPrefix(link, "/proc/"), "%d/", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
