// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestCompute: what containers get of a GPU's time, on the simulated driver, in real time. Each case has a GPU for itself.
func TestCompute(t *testing.T) {
	simOnly(t)
	noTrace(t)
	free := newLanes(t)
	for _, test := range []struct {
		name string
		run  func(t *testing.T, gpu int)
	}{
		{"weights", weights},
		{"equal weights", equalWeights},
		{"fork bomb", forkBomb},
		{"waiting beside many", waitingBesideMany},
		{"idle neighbour", idleNeighbour},
		{"exec", execCounts},
		{"fixed", fixedCaps},
		{"cap beside weights", capBeside},
		{"bursts", bursts},
		{"fair", fair},
		{"soft", soft},
		{"native", native},
		{"high priority", highPriority},
		{"priority ratio", priorityRatio},
		{"best effort", bestEffort},
		{"set", setLive},
		{"policy", policyLive},
		{"pause", pauseResume},
		{"killed while paused", killedWhilePaused},
		{"guard killed", guardKilled},
		{"arbiter killed", arbiterKilled},
		{"arbiter killed at rest", arbiterKilledAtRest},
		{"counted to the end", countedToTheEnd},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, free.take(t))
		})
	}
}

func weights(t *testing.T, gpu int) {
	one := busy(t, on(gpu))
	three := busy(t, on(gpu, "SCHD_WEIGHT=3"))
	wantOf(t, gpu, []string{one, three}, 25, 75)
	docker(t, "rm", "-f", one, three)
	var ids []string
	for _, w := range []int{1, 2, 4, 8} {
		ids = append(ids, busy(t, on(gpu, fmt.Sprint("SCHD_WEIGHT=", w))))
	}
	wantOf(t, gpu, ids, 100./15, 200./15, 400./15, 800./15)
}

// equalWeights: neither contexts nor processes make a container's share larger, nor do long kernels.
func equalWeights(t *testing.T, gpu int) {
	ids := []string{busy(t, on(gpu), "--kernel", "100ms"), busy(t, on(gpu), "--groups", "8"),
		busy(t, on(gpu), "--processes", "8", "--kernel", "10us")}
	wantOf(t, gpu, ids, 33.3, 33.3, 33.3)
}

// forkBomb: a container with all the contexts that it may have, and one that makes new ones all the time, get no more than
// a neighbour with one.
func forkBomb(t *testing.T, gpu int) {
	victim := busy(t, on(gpu))
	bomb := busy(t, on(gpu), "--processes", "4", "--groups", "8")
	wantOf(t, gpu, []string{victim, bomb}, 50, 50)
	docker(t, "rm", "-f", bomb)
	bomb = container{env: on(gpu), cmd: []string{"sh", "-c", "while true; do cgpu-probe work --for 60ms --groups 8; done"}}.start(t)
	computes(t, bomb)
	// On the whole of a window, and not in a moment of it. Among so many contexts alone it would have a small part.
	measuringOver(t, 2*measured, attempts, gpu, []string{victim}, func(s spent) string {
		if share := 100 * float64(s.gpuTime[0]) / float64(s.busy); share < 40 {
			return fmt.Sprintf("beside a container that makes contexts all the time a neighbour has %.1f %%", share)
		}
		return ""
	})
}

// waitingBesideMany: a program that waits for each kernel has not much less beside a container with many processes that never wait than
// beside one with a single such process; by slices alone it would have an eighth.
func waitingBesideMany(t *testing.T, gpu int) {
	loop, many := busy(t, on(gpu), "--kernel", "1ms", "--gap", "15us"), busy(t, on(gpu), "--processes", "6")
	for range 2 { // and goes on to have it when the arbiter has asked for the GPU's load
		measuring(t, gpu, []string{loop, many}, func(s spent) string {
			if a, b := s.percent(s.gpuTime[0]), s.percent(s.gpuTime[1]); a < 28 || b < 25 {
				return fmt.Sprintf("the one has %.1f %%, the other %.1f", a, b)
			}
			return ""
		})
	}
}

// idleNeighbour: who has no work takes no time, with a context and without, whatever its weight.
func idleNeighbour(t *testing.T, gpu int) {
	idle := container{env: on(gpu, "SCHD_WEIGHT=9"), cmd: []string{"cgpu-probe", "context"}}.start(t)
	one := busy(t, on(gpu))
	wantAll(t, gpu, one)
	docker(t, "exec", "-d", idle, "cgpu-probe", "work", "--for", "0", "--windows", "1h")
	computes(t, idle)
	wantOf(t, gpu, []string{one, idle}, 10, 90)
	for pid := range pidsOf(t, idle) {
		if pid != initOf(t, idle) {
			if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
	}
	wantAll(t, gpu, one)
}

// initOf is a container's first process.
func initOf(t *testing.T, id string) int {
	t.Helper()
	r, ok := recordOf(t, id)
	if !ok {
		t.Fatalf("%s is not in the ledger", id)
	}
	return r.InitPID
}

// execCounts: what docker exec brings in shares the container's part.
func execCounts(t *testing.T, gpu int) {
	alone, many := busy(t, on(gpu)), busy(t, on(gpu))
	for range 3 {
		docker(t, "exec", "-d", many, "cgpu-probe", "work", "--for", "0", "--windows", "1h")
	}
	eventually(t, 10*time.Second, func() string {
		if n := len(pidsOf(t, many)); n != 4 {
			return fmt.Sprintf("%d processes compute", n)
		}
		return ""
	})
	wantOf(t, gpu, []string{alone, many}, 50, 50)
}

func fixedCaps(t *testing.T, gpu int) {
	cgpu(t, "policy", strconv.Itoa(gpu), "fixed")
	half := busy(t, on(gpu, "CORE_PERCENTAGE=50"))
	wantCaps(t, gpu, []string{half}, 50)
	wantRefused(t, container{env: on(gpu, "CORE_PERCENTAGE=51"), cmd: []string{"true"}}.try(t), "CORE_PERCENTAGE", "50 %")
	docker(t, "rm", "-f", half)
	ids := []string{busy(t, on(gpu, "CORE_PERCENTAGE=30"), "--kernel", "120ms"), busy(t, on(gpu, "CORE_PERCENTAGE=70"))}
	wantCaps(t, gpu, ids, 30, 70)
}

// capBeside: under the other policies a percentage is a cap as well, and what it leaves is the neighbours'.
func capBeside(t *testing.T, gpu int) {
	capped, rest := busy(t, on(gpu, "CORE_PERCENTAGE=20")), busy(t, on(gpu))
	measuring(t, gpu, []string{capped, rest}, func(s spent) string {
		if a, b := s.percent(s.gpuTime[0]), s.percent(s.gpuTime[1]); a > 20+tolerance || a < 8 || a+b < 85 {
			return fmt.Sprintf("with a cap of 20 %% %.1f, beside it %.1f", a, b)
		}
		return ""
	})
}

// bursts: a cap also holds for who has work now and then.
func bursts(t *testing.T, gpu int) {
	id := busy(t, on(gpu, "CORE_PERCENTAGE=10"), "--kernel", "90ms", "--gap", "210ms")
	measuring(t, gpu, []string{id}, func(s spent) string {
		if share := s.percent(s.gpuTime[0]); share > 10+tolerance {
			return fmt.Sprintf("%.1f %% in bursts with a cap of 10 %%", share)
		}
		return ""
	})
}

func fair(t *testing.T, gpu int) {
	cgpu(t, "policy", strconv.Itoa(gpu), "fair", "--max-inst", "4")
	ids := []string{busy(t, on(gpu)), busy(t, on(gpu, "SCHD_WEIGHT=3"))}
	wantCaps(t, gpu, ids, 25, 25)
}

func soft(t *testing.T, gpu int) {
	cgpu(t, "policy", strconv.Itoa(gpu), "soft")
	small := busy(t, on(gpu, "CORE_PERCENTAGE=20"))
	wantAll(t, gpu, small)
	large := busy(t, on(gpu, "CORE_PERCENTAGE=60"))
	wantOf(t, gpu, []string{small, large}, 25, 75)
}

func native(t *testing.T, gpu int) {
	cgpu(t, "policy", strconv.Itoa(gpu), "native")
	wantRefused(t, container{env: on(gpu, "CORE_PERCENTAGE=50"), cmd: []string{"true"}}.try(t), "CORE_PERCENTAGE", "native")
	ids := []string{busy(t, on(gpu)), busy(t, on(gpu, "SCHD_WEIGHT=3"))}
	wantOf(t, gpu, ids, 50, 50)
	for _, id := range ids {
		if s := smiOf(t, id).Compute.Slice.Duration(); s != sched.NativeTimeslice {
			t.Errorf("a timeslice of %v, want %v", s, sched.NativeTimeslice)
		}
	}
}

// highPriority: a service's kernels do not wait for the turns of who computes all the time, who still gets nearly all that
// the service leaves.
func highPriority(t *testing.T, gpu int) {
	others := busy(t, on(gpu))
	service := busy(t, on(gpu, "HIGH_PRIO=1"), "--kernel", "140us", "--gap", "2ms")
	measuring(t, gpu, []string{service, others}, func(s spent) string {
		slice := smiOf(t, others).Compute.Slice.Duration()
		wait := s.waiting[0] / time.Duration(max(s.kernels[0], 1))
		if slice > 200*time.Microsecond || s.percent(s.gpuTime[1]) < 70 || wait > 700*time.Microsecond {
			return fmt.Sprintf("slice of the others %v, they have %.1f %%, each of %d kernels waits %v", slice,
				s.percent(s.gpuTime[1]), s.kernels[0], wait)
		}
		return ""
	})
	docker(t, "rm", "-f", service)
	eventually(t, 3*time.Second, func() string {
		if s := smiOf(t, others).Compute.Slice.Duration(); s != time.Millisecond { // as of whoever is alone
			return fmt.Sprintf("without the service the others' slice is %v", s)
		}
		return ""
	})
}

// priorityRatio: high priority is not all of the GPU.
func priorityRatio(t *testing.T, gpu int) {
	cgpu(t, "policy", strconv.Itoa(gpu), "--prio-ratio", "60")
	ids := []string{busy(t, on(gpu, "HIGH_PRIO=1")), busy(t, on(gpu, "SCHD_WEIGHT=9"))}
	measuring(t, gpu, ids, func(s spent) string {
		// Of 200 µs slices the switches take a good part.
		sum := s.gpuTime[0] + s.gpuTime[1]
		return differs([]float64{100 * float64(s.gpuTime[0]) / float64(sum)}, []float64{60})
	})
}

// bestEffort: the lowest priority gets what others leave.
func bestEffort(t *testing.T, gpu int) {
	ids := []string{busy(t, on(gpu)), busy(t, on(gpu))}
	cgpu(t, "set", ids[1], "--priority", "best-effort")
	measuring(t, gpu, ids, func(s spent) string {
		if share := s.percent(s.gpuTime[0]); share < 85 {
			return fmt.Sprintf("%.1f %% beside one of best effort, which has %.1f %%", share, s.percent(s.gpuTime[1]))
		}
		return ""
	})
}

// setLive: cgpu set changes containers that run.
func setLive(t *testing.T, gpu int) {
	ids := []string{busy(t, on(gpu)), busy(t, on(gpu))}
	cgpu(t, "set", ids[0], "--weight", "4")
	wantOf(t, gpu, ids, 80, 20)
	cgpu(t, "set", ids[0], "--weight", "1", "--percent", "30")
	measuring(t, gpu, ids, func(s spent) string {
		if share := s.percent(s.gpuTime[0]); share > 30+tolerance {
			return fmt.Sprintf("%.1f %% after --percent 30", share)
		}
		return ""
	})
	wantRefused(t, tryCgpu("set", ids[1], "--percent", "71"), "70 %")
	cgpu(t, "set", ids[0], "--percent", "none", "--priority", "high")
	v := smiOf(t, ids[0])
	if v.Percent != 0 || v.Priority != "high" || v.Weight != 1 {
		t.Errorf("cgpu smi: %+v", v)
	}
	measuring(t, gpu, ids, func(s spent) string {
		if share := s.percent(s.gpuTime[0]); share < 85 {
			return fmt.Sprintf("%.1f %% after --priority high", share)
		}
		return ""
	})
}

// policyLive: cgpu policy changes what containers that run get.
func policyLive(t *testing.T, gpu int) {
	name := strconv.Itoa(gpu)
	ids := []string{busy(t, on(gpu)), busy(t, on(gpu, "SCHD_WEIGHT=3"))}
	cgpu(t, "policy", name, "fixed", "--max-inst", "10")
	wantCaps(t, gpu, ids, 10, 30)
	wantRefused(t, tryCgpu("policy", name, "--max-inst", "1"), "share it|free|asked")
	wantRefused(t, tryCgpu("policy", name, "--max-inst", "3"), "asked")
	if out := cgpu(t, "policy", name); !strings.Contains(out, "fixed") || !strings.Contains(out, "40%") {
		t.Errorf("cgpu policy shows %s", out)
	}
	cgpu(t, "policy", name, "2")
	wantOf(t, gpu, ids, 25, 75)
	cgpu(t, "set", ids[0], "--percent", "40")
	wantRefused(t, tryCgpu("policy", name, "native"), "40 %", "native")
}

// pauseResume: what is paused does nothing, holds what it has, and goes on where it was.
func pauseResume(t *testing.T, gpu int) {
	const kernel = 5 * time.Millisecond
	ids := []string{busy(t, on(gpu), "--kernel", kernel.String(), "--groups", "3"), busy(t, on(gpu))}
	held := smiOf(t, ids[0]).Used
	cgpu(t, "pause", ids[0])
	if d := during(t, time.Second, gpu, ids...); d.gpuTime[0] != 0 {
		t.Errorf("paused: %v of GPU time", d.gpuTime[0])
	}
	wantAll(t, gpu, ids[1])
	if v := smiOf(t, ids[0]); !v.Paused || !v.Compute.Paused || v.Used != held {
		t.Errorf("cgpu smi: %+v, used %v before", v, held)
	}
	if out := cgpu(t, "pause", ids[0]); !strings.Contains(out, "already") {
		t.Errorf("the second cgpu pause said %s", out)
	}
	before := spentBy(t, gpu, ids...)
	cgpu(t, "resume", ids[0])
	wantOf(t, gpu, ids, 50, 50)
	// A kernel that was interrupted went on: all of the time went into kernels that are done, but for one on the way in each
	// context.
	after := spentBy(t, gpu, ids...)
	if lost := after.gpuTime[0] - time.Duration(after.kernels[0])*kernel; lost < 0 || lost > 3*kernel ||
		after.kernels[0] <= before.kernels[0] {
		t.Errorf("%d kernels of %v in %v; %d when it was paused", after.kernels[0], kernel, after.gpuTime[0], before.kernels[0])
	}
}

func missing(want, text string) string {
	if strings.Contains(text, want) {
		return ""
	}
	return fmt.Sprintf("no %q in %s", want, text)
}

// killedWhilePaused: a paused container ends like any other.
func killedWhilePaused(t *testing.T, gpu int) {
	id := busy(t, on(gpu))
	cgpu(t, "pause", id)
	docker(t, "kill", id)
	nothingOf(t, gpu, id)
}

// nothingOf waits until nothing is left of a container: no record, no context, nothing paused, and nobody to resume it.
func nothingOf(t *testing.T, gpu int, id string) {
	t.Helper()
	eventually(t, 5*time.Second, func() string {
		if r, ok := recordOf(t, id); ok {
			return fmt.Sprintf("still in the ledger: %+v", r)
		}
		if g := drivers(t).GPUs[gpu]; g.Used != 0 || len(g.TSGs) != 0 {
			return fmt.Sprintf("the driver has %+v", g)
		}
		return ""
	})
}

// guardKilled: the ledger and cgpu say what is the matter, and nothing is left. (The simulated driver takes a killed guard's
// contexts with it, so nothing can stay paused; test/gpu/shares.py has the real one.)
func guardKilled(t *testing.T, gpu int) {
	paused := busy(t, on(gpu))
	cgpu(t, "pause", paused)
	afterKilledGuard(t, gpu, paused)
	capped := busy(t, on(gpu, "CORE_PERCENTAGE=10")) // so it is in an off phase, probably
	eventually(t, 5*time.Second, func() string {
		if smiOf(t, capped).Compute.Pauses < 5 {
			return "it is not paused yet"
		}
		return ""
	})
	afterKilledGuard(t, gpu, capped)
}

func afterKilledGuard(t *testing.T, gpu int, id string) {
	t.Helper()
	killGuard(t, id)
	r, ok := recordOf(t, id)
	if !ok {
		t.Fatal("the record is gone while the container is there")
	}
	wantRefused(t, tryCgpu("pause", id), "guard is gone")
	wantRefused(t, tryCgpu("resume", id), "guard is gone")
	neighbour := busy(t, on(gpu))
	wantAll(t, gpu, neighbour)
	docker(t, "rm", "-f", neighbour, id)
	cgpu(t, "gc")
	nothingOf(t, gpu, id)
	if left := gpusched.LeftoversFile(r.Socket); exists(left) {
		t.Errorf("left behind: %v", left)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestObserved: what containers get does not depend on whether somebody looks.
func TestObserved(t *testing.T) {
	simOnly(t)
	noTrace(t)
	gpus(t)
	observe(t)
	var complaints []string
	for held := 0; len(complaints) <= attempts/2; { // from the beginning each time: later all is well again
		id := busy(t, on(0, "CORE_PERCENTAGE=30"))
		s := during(t, measured, 0, id)
		docker(t, "rm", "-f", id)
		if s.percent(s.gpuTime[0]) <= 30+2*tolerance {
			if held++; held > len(complaints) { // of the first, or of the most
				return
			}
			continue
		}
		complaints = append(complaints, fmt.Sprintf("%.1f %% of the GPU (late %.1f %% of the time)", s.percent(s.gpuTime[0]), 100*s.late))
	}
	t.Errorf("with a cap of 30 %%: %s", strings.Join(complaints, ", "))
}

// observe asks all guards all the time, until the test's end.
func observe(t *testing.T) {
	t.Helper()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				tryCgpu("smi", "--json")
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-stopped
	})
}

// TestHostilePause: nothing that a container can do makes it compute while it is paused. Controls take the time here that
// they take on an H200, since in it a container could gain something.
func TestHostilePause(t *testing.T) {
	simOnly(t)
	noTrace(t)
	id := container{env: on(0), cmd: []string{"cgpu-probe", "hostile", "paused", "--paused"}}.start(t)
	eventually(t, 20*time.Second, func() string {
		return missing("ready=1", lab.Run(nil, "docker", "logs", id).All())
	})
	run(t, filepath.Join(lab.Bin, "cgpu-sim"), "delay", "--control", "500us")
	t.Cleanup(func() { run(t, filepath.Join(lab.Bin, "cgpu-sim"), "delay") })
	cgpu(t, "pause", id)
	if code := strings.TrimSpace(docker(t, "wait", id)); code != "0" {
		t.Error(lab.Run(nil, "docker", "logs", id))
	}
}

// TestSetMemory: the limit of a container that runs, up and down.
func TestSetMemory(t *testing.T) {
	noTrace(t)
	id := holding(t, container{env: sizeOf("1GiB")}, "600MiB")
	set := func(args ...string) string { return cgpu(t, append([]string{"set", id}, args...)...) }
	wantRefused(t, tryCgpu("set", id, "--memory", "500MiB"), "--memory", "uses 6..MiB", "--force")
	wantRefused(t, tryCgpu("set", id, "--memory", "9999GiB"), "--memory|limit")
	if got := total(t, execIn(id, "cgpu-probe", "meminfo").Stdout); got != quota.GiB {
		t.Fatalf("after refusals total = %v", got)
	}
	set("--memory", "2GiB")
	eventually(t, 2*time.Second, func() string {
		if got := total(t, execIn(id, "cgpu-probe", "meminfo").Stdout); got != 2*quota.GiB {
			return fmt.Sprintf("total = %v, want 2GiB", got)
		}
		return ""
	})
	if r := execIn(id, "cgpu-probe", "alloc", "1200MiB"); r.Code != 0 {
		t.Error(r)
	}
	// Below what is in use: nothing is taken, nothing new is given.
	set("--memory", "500MiB", "--force")
	eventually(t, 2*time.Second, func() string {
		if r := execIn(id, "cgpu-probe", "alloc", "1MiB"); r.Code == 0 {
			return "an allocation above the limit: " + r.String()
		}
		return ""
	})
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "1MiB"), noMemory)
	if got := smiOf(t, id).Used; got < 600*quota.MiB {
		t.Errorf("%v in use, 600MiB before", got)
	}
	if err := syscall.Kill(initOf(t, id), 0); err != nil {
		t.Errorf("the program: %v", err)
	}
	set("--memory", "700MiB")
	eventually(t, 2*time.Second, func() string {
		if r := execIn(id, "cgpu-probe", "alloc", "30MiB"); r.Code != 0 {
			return r.String()
		}
		return ""
	})
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "200MiB"), noMemory)
}

// TestSet: what cgpu set and cgpu policy refuse on whatever driver, and that a name is as good as an ID.
func TestSet(t *testing.T) {
	noTrace(t)
	name := fmt.Sprintf("set%d", os.Getpid())
	id := holding(t, container{name: name, env: sizeOf("256MiB")}, "16MiB")
	t.Cleanup(func() { tryCgpu("policy", "0", "preempt", "--max-inst", "20", "--prio-ratio", "99") })
	for _, test := range []struct{ args, reason string }{
		{"set nobody --weight 2", "nobody"},
		{"set " + id, "nothing to change"},
		{"set " + id + " --weight 0", "weight"},
		{"set " + id + " --weight 65", "weight"},
		{"set " + id + " --percent 101", "percent"},
		{"set " + id + " --priority top", "priority"},
		{"set " + id + " --gpu 99 --weight 2", "--gpu"},
		{"policy 0 sixth", "policy"},
		{"policy 0 --max-inst 65", "max-inst"},
		{"policy 0 --prio-ratio 10", "prio-ratio"},
		{"policy 99 fair", "99"},
		{"pause nobody", "nobody"},
	} {
		wantRefused(t, tryCgpu(strings.Fields(test.args)...), test.reason)
	}
	cgpu(t, "set", id[:12], "--weight", "3")
	cgpu(t, "set", name, "--percent", "50")
	docker(t, "rename", name, name+"-too")
	cgpu(t, "set", name+"-too", "--priority", "high")
	wantRefused(t, tryCgpu("set", name, "--weight", "2"), "no such container")
	if v := smiOf(t, id); v.Weight != 3 || v.Percent != 50 || v.Priority != "high" || v.Name != name+"-too" {
		t.Errorf("cgpu smi: %+v", v)
	}
	wantRefused(t, container{env: append(sizeOf("256MiB"), "ALIYUN_COM_GPU_CORE_PERCENTAGE=51"), cmd: []string{"true"}}.try(t),
		"CORE_PERCENTAGE", "50 %")
	wantRefused(t, tryCgpu("policy", "0", "native"), "50 %")
	cgpu(t, "policy", "0", "fixed", "--max-inst", "1")
	wantRefused(t, container{env: sizeOf("256MiB"), cmd: []string{"true"}}.try(t), "max-inst")
	for _, step := range []struct {
		verb   string
		paused bool
	}{{"pause", true}, {"resume", false}} {
		cgpu(t, step.verb, id)
		if v := smiOf(t, id); v.Paused != step.paused {
			t.Errorf("after cgpu %s: %+v", step.verb, v)
		}
	}
}
