// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestPreload: enforcement = "preload", where the library alone keeps a container's programs within their limit. (With the
// simulated driver a guard is there all the same, which plays the kernel and enforces nothing.) The memory tests run in this
// mode too (eachMode); here is what is different in it.
func TestPreload(t *testing.T) {
	withConfig(t, preloaded.config...)
	noTrace(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"shown", preloadShown},
		{"set", preloadSet},
		{"many processes", preloadProcesses},
		{"managed", preloadManaged},
		{"walked around", preloadWalkedAround},
		{"refused", preloadRefused},
		{"confined", preloadConfined},
		{"removed", preloadRemoved},
	} {
		t.Run(test.name, test.run)
	}
}

// preloadShown: the administrator reads what enforces a container's limit, and what it says of itself.
func preloadShown(t *testing.T) {
	noTrace(t)
	id := preloaded.holding(t, container{env: sizeOf("1GiB")}, "300MiB")
	wantMemory(t, time.Second, id, func(m vgpu) bool {
		return m.Enforcement == "preload" && m.Limit == quota.GiB && m.Used == 300*quota.MiB
	})
	if out := cgpu(t, "smi"); !strings.Contains(out, "preload") {
		t.Errorf("cgpu smi does not say that only the library enforces: %s", out)
	}
	r := preloaded.exec(id, "cgpu-probe", "page")
	if r.Code != 0 || number(t, r.Stdout, "vgpu0_used") != 300*quota.MiB || !strings.Contains(r.Stdout, "writable=yes") {
		t.Error(r)
	}
	for _, args := range [][]string{{"pause", id}, {"set", id, "--spill", "1GiB"}, {"set", id, "--percent", "50"}} {
		wantRefused(t, tryCgpu(args...), "preload")
	}
}

// preloadSet: a changed limit is in effect at the next allocation of a program that runs.
func preloadSet(t *testing.T) {
	noTrace(t)
	id := preloaded.holding(t, container{env: sizeOf("512MiB")}, "300MiB")
	wantRefused(t, preloaded.exec(id, "cgpu-probe", "alloc", "600MiB"), noMemory)
	cgpu(t, "set", id, "--memory", "1GiB")
	r := preloaded.exec(id, "cgpu-probe", "meminfo")
	if got := total(t, r.Stdout); got != quota.GiB {
		t.Errorf("total = %v, want 1GiB", got)
	}
	if r := preloaded.exec(id, "cgpu-probe", "alloc", "600MiB"); r.Code != 0 {
		t.Error(r)
	}
}

// preloadProcesses: many processes at once keep the limit together, and what the killed ones held can be had again.
func preloadProcesses(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}.start(t)
	out := atOnce(t, id, 8, "bytes=|NO_MEMORY", preloaded.words([]string{"cgpu-probe", "hold", "300MiB"})...)
	got, refused := strings.Count(out, "bytes=314572800"), strings.Count(out, "status=NV_ERR_NO_MEMORY")
	if got > 3 || got == 0 || got+refused != 8 {
		t.Errorf("%d of 8 processes had 300MiB of 1GiB at once, %d were refused: %s", got, refused, out)
	}
	for range 3 {
		preloaded.spawn(t, id, "cgpu-probe", "hold", "900MiB")
		eventually(t, 10*time.Second, func() string {
			if got := used(t, preloaded.exec(id, "cgpu-probe", "meminfo").Stdout); got != 900*quota.MiB {
				return fmt.Sprintf("used %v", got)
			}
			return ""
		})
		killIn(t, id, "hold 900MiB")
		if r := preloaded.exec(id, "cgpu-probe", "oom"); r.Code != 0 || number(t, r.Stdout, "bytes") < quota.GiB-slack {
			t.Errorf("after a kill: %s", r)
		}
	}
}

// preloadManaged: the library keeps account of managed memory by itself.
func preloadManaged(t *testing.T) {
	noTrace(t)
	id := preloaded.of(container{env: sizeOf("1GiB"), cmd: strings.Fields("cgpu-probe managed 300MiB 200MiB --hold 0 --free")}).ready(t)
	wantMemory(t, time.Second, id, func(m vgpu) bool { return m.Managed == 500*quota.MiB && m.Used == 500*quota.MiB })
	wantRefused(t, preloaded.exec(id, "cgpu-probe", "managed", "600MiB"), "refused=")
	wantRefused(t, preloaded.exec(id, "cgpu-probe", "alloc", "600MiB"), noMemory)
	docker(t, "kill", "-s", "TERM", id)
	wantMemory(t, time.Second, id, func(m vgpu) bool { return m.Managed == 0 && m.Used == 0 })
	for range 3 {
		// Two that come at the same time may both be told that there is no room; never do both have it.
		out := atOnce(t, id, 4, "mapped_mib=", preloaded.words([]string{"cgpu-probe", "managed", "600MiB", "--hold", "0"})...)
		if won, lost := strings.Count(out, "mapped_mib=600"), strings.Count(out, "refused="); won > 1 || won+lost != 4 {
			t.Errorf("%d of 4 had the room that is there for one, %d were refused: %s", won, lost, out)
		}
	}
}

// preloadWalkedAround: a program that makes its own system calls is not held to anything. That is what the documentation
// says of preload mode; where it is not so any more, the documentation must change.
func preloadWalkedAround(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("256MiB"), cmd: []string{"sleep", "600"}}.start(t)
	if r := execIn(id, "cgpu-probe", "alloc", "400MiB"); r.Code != 0 {
		t.Errorf("a static program: %s", r)
	}
	if r := execIn(id, "cgpu-probe", "managed", "1GiB", "--hold", "3"); r.Code != 0 {
		t.Errorf("managed memory of a static program: %s", r)
	}
	if r := execIn(id, "cgpu-probe-libc", "managed", "1GiB", "--hostile"); r.Code != 0 {
		t.Errorf("managed memory by plain system calls: %s", r)
	}
	// Each is a defence of the guard's.
	for _, name := range []string{"page", "announce", "managed", "managed-pieces"} {
		if r := execIn(id, "cgpu-probe", "hostile", name, "--tries", "100"); r.Code == 0 || !strings.Contains(r.Stdout, "FAIL "+name) {
			t.Errorf("the case %s must fail without a guard: %s", name, r)
		}
	}
}

// preloadRefused: what nobody could hold a container to is refused when it is created.
func preloadRefused(t *testing.T) {
	for _, test := range []struct{ variable, value string }{
		{"CGPU_MEM_SPILL", "1"},
		{"CGPU_LIMITER", "off"},
		{"ALIYUN_COM_GPU_CORE_PERCENTAGE", "50"},
		{"ALIYUN_COM_GPU_HIGH_PRIO", "1"},
	} {
		t.Run(test.variable, func(t *testing.T) {
			noTrace(t)
			c := container{env: append(sizeOf("1GiB"), test.variable+"="+test.value), cmd: []string{"true"}}
			r := c.try(t)
			wantRefused(t, r, test.variable, `enforcement = "guard"`)
			if line, _, _ := strings.Cut(r.Stderr, "\n"); !strings.Contains(line, "enforcement") {
				t.Errorf("want the remedy in the same line: %s", r)
			}
		})
	}
	for _, policy := range []string{"fair", "fixed", "soft"} {
		t.Run(policy, func(t *testing.T) {
			noTrace(t)
			cgpu(t, "policy", "0", policy)
			defer cgpu(t, "policy", "0", "preempt")
			wantRefused(t, container{env: sizeOf("1GiB"), cmd: []string{"true"}}.try(t), policy, "cgpu policy", `enforcement = "guard"`)
		})
	}
}

// preloadRemoved: the record and the page go with the container, whichever way it goes.
func preloadRemoved(t *testing.T) {
	noTrace(t)
	for _, remove := range [][]string{{"rm", "-f"}, {"kill"}, {"stop", "-t", "0"}} {
		id := preloaded.holding(t, container{env: sizeOf("1GiB")}, "300MiB")
		r, ok := recordOf(t, id)
		if !ok || !r.Preload || r.Page == "" {
			t.Fatalf("record %+v, %v", r, ok)
		}
		if _, err := os.Stat(r.Page); err != nil {
			t.Fatal(err)
		}
		docker(t, append(remove, id)...)
		eventually(t, 2*time.Second, func() string {
			if left, _ := filepath.Glob(filepath.Join(lab.RunDir, "page", "*")); len(left) > 0 || len(records(t)) > 0 {
				return fmt.Sprintf("after docker %s: %v, %+v", remove[0], left, records(t))
			}
			return ""
		})
	}
}
