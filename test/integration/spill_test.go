// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/node"
)

// wantMemory waits until cgpu smi shows what a container should have.
func wantMemory(t *testing.T, limit time.Duration, id string, right func(vgpu) bool) {
	t.Helper()
	eventually(t, limit, func() string {
		if m := smiOf(t, id); !right(m) {
			return fmt.Sprintf("cgpu smi says %+v", m)
		}
		return ""
	})
}

func withSpill(size, spill string) []string { return append(sizeOf(size), "CGPU_MEM_SPILL="+spill) }

// meminfoIn is what a program in a running container is told.
func meminfoIn(t *testing.T, id string) string {
	t.Helper()
	r := execIn(id, "cgpu-probe", "meminfo")
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// freed is how long spilled memory of a killed process may take to come back: the driver gives it back to the host page by page.
const freed = 5 * time.Second

// TestSpill: host memory that a container has as device memory beyond its limit.
func TestSpill(t *testing.T) {
	noTrace(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"sizes", spillSizes},
		{"probe cases", spillCases},
		{"apart", spilledApart},
		{"set", setSpill},
		{"a full card", spillOnFullCard},
		{"max_spill", maxSpill},
		{"spill_reserve", spillReserve},
	} {
		t.Run(test.name, test.run)
	}
}

// spillSizes: a program is told the sum of limit and spill, and gets it.
func spillSizes(t *testing.T) {
	for _, probe := range []string{"cgpu-probe", "cgpu-probe-libc"} {
		noTrace(t)
		c := container{env: withSpill("2GiB", "1"), cmd: []string{probe, "meminfo"}}
		if got := total(t, c.run(t)); got != 3*quota.GiB {
			t.Errorf("%s: total = %v, want 3GiB", probe, got)
		}
		c.cmd = []string{probe, "oom"}
		checkOOM(t, c.try(t), 3*quota.GiB)
		// None means none.
		c = container{env: withSpill("1GiB", "0"), cmd: []string{probe, "oom"}}
		checkOOM(t, c.try(t), quota.GiB)
	}
}

// spillCases: what holds for device memory holds for spilled memory, by the probe's own checks.
func spillCases(t *testing.T) {
	for _, args := range []string{"threads 8 100MiB", "fork 4 200MiB", "dup", "dup 400MiB", "export",
		"signals --seconds 2 --size 400MiB", "guess --clients 64",
		"alloc --count 50 --free 250MiB", "hostile spill", "hostile sizes", "hostile bad-pointers", "hostile heap", "hostile huge-params"} {
		t.Run(args, func(t *testing.T) {
			noTrace(t)
			c := container{env: withSpill("256MiB", "256MiB"), cmd: append([]string{"cgpu-probe"}, strings.Fields(args)...)}
			if strings.HasPrefix(args, "dup 400") || strings.Contains(args, "--size 400") {
				c.env = withSpill("256MiB", "512MiB") // one allocation is spilled as a whole
			}
			r := c.try(t)
			if r.Code != 0 {
				t.Error(r)
			}
			if args == "export" && !strings.Contains(r.Stdout, "export=NV_ERR_NOT_SUPPORTED") {
				t.Errorf("want spilled memory refused with NOT_SUPPORTED: %s", r)
			}
		})
	}
}

// spilledApart: the GPU's part and the host's are shown apart, and all of it comes back when its process is killed.
func spilledApart(t *testing.T) {
	noTrace(t)
	id := holding(t, container{env: withSpill("1GiB", "1")}, "1GiB")
	docker(t, "exec", "-d", id, "cgpu-probe", "hold", "500MiB")
	wantMemory(t, 5*time.Second, id, func(m vgpu) bool {
		return m.Used == quota.GiB && m.Spilled == 500*quota.MiB && m.Spill == quota.GiB && m.Limit == quota.GiB
	})
	if got, want := free(t, meminfoIn(t, id)), 524*quota.MiB; got != want {
		t.Errorf("free = %v, want %v", got, want)
	}
	if got := driverUsed(t); lab.Driver == device.DriverSim && got != quota.GiB {
		t.Errorf("the driver has given out %v of device memory, want the limit", got)
	}
	// One allocation goes to one place.
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "600MiB"), noMemory)
	killIn(t, id, "hold 500MiB")
	wantMemory(t, freed, id, func(m vgpu) bool { return m.Used == quota.GiB && m.Spilled == 0 })
	if r := execIn(id, "cgpu-probe", "alloc", "1000MiB"); r.Code != 0 {
		t.Errorf("what the killed process held: %s", r)
	}
}

func setSpill(t *testing.T) {
	noTrace(t)
	id := holding(t, container{env: withSpill("1GiB", "1")}, "1GiB")
	cgpu(t, "set", id, "--spill", "2GiB")
	eventually(t, 2*time.Second, func() string {
		if got := total(t, meminfoIn(t, id)); got != 3*quota.GiB {
			return fmt.Sprintf("total = %v, want 3GiB", got)
		}
		return ""
	})
	docker(t, "exec", "-d", id, "cgpu-probe", "hold", "1500MiB")
	wantMemory(t, 5*time.Second, id, func(m vgpu) bool { return m.Spilled == 1500*quota.MiB })
	for _, spill := range []string{"none", "1GiB"} {
		r := tryCgpu("set", id, "--spill", spill)
		wantRefused(t, r, "--spill", spill, "1500MiB")
		if lines := strings.Count(strings.TrimSpace(r.Stderr), "\n"); lines > 0 {
			t.Errorf("want one line: %s", r)
		}
	}
	killIn(t, id, "hold 1500MiB")
	begin := time.Now()
	wantMemory(t, freed, id, func(m vgpu) bool { return m.Spilled == 0 })
	t.Logf("1500MiB of spilled memory were back %v after the kill", time.Since(begin).Round(time.Millisecond))
	cgpu(t, "set", id, "--spill", "none")
	eventually(t, 2*time.Second, func() string {
		if got := total(t, meminfoIn(t, id)); got != quota.GiB {
			return fmt.Sprintf("total = %v, want 1GiB", got)
		}
		return ""
	})
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "2MiB"), noMemory)
}

// spillOnFullCard: two containers whose limits are the whole card have more than that together.
func spillOnFullCard(t *testing.T) {
	noTrace(t)
	half := gpus(t)[0].Memory / 2
	if lab.Driver != device.DriverSim {
		half = half / 100 * 96 // the driver needs some for itself
	}
	half = half / (2 * quota.MiB) * (2 * quota.MiB) // in whole pages, since it is allocated at once
	size := fmt.Sprintf("%dMiB", half/quota.MiB)
	var ids []string
	for range 2 {
		ids = append(ids, holding(t, container{env: withSpill(size, "512MiB")}, size))
	}
	var wg sync.WaitGroup
	results := make([]node.Result, len(ids))
	for i, id := range ids {
		wg.Go(func() { results[i] = execIn(id, "cgpu-probe", "oom") })
	}
	wg.Wait()
	for _, r := range results {
		if r.Code != 0 {
			t.Error(r)
		} else if got := number(t, r.Stdout, "bytes"); got < 512*quota.MiB-slack || got > 512*quota.MiB {
			t.Errorf("got %v beyond the limit, want 512MiB: %s", got, r)
		}
	}
	for _, id := range ids {
		wantMemory(t, time.Second, id, func(m vgpu) bool { return m.Used == half && m.Spilled == 0 })
	}
}

func maxSpill(t *testing.T) {
	withConfig(t, `max_spill = "1GiB"`)
	noTrace(t)
	c := container{env: withSpill("1GiB", "2"), cmd: []string{"true"}}
	r := c.try(t)
	wantRefused(t, r, `CGPU_MEM_SPILL`, `"2"`, `max_spill`, `1024MiB`)
	if line, _, _ := strings.Cut(r.Stderr, "\n"); !strings.Contains(line, "max_spill") {
		t.Errorf("want the reason in one line: %s", r)
	}
	first := container{env: withSpill("1GiB", "600MiB"), cmd: []string{"sleep", "600"}}.start(t)
	c.env = withSpill("1GiB", "600MiB")
	wantRefused(t, c.try(t), `CGPU_MEM_SPILL`, `max_spill`, `424MiB`)
	wantRefused(t, tryCgpu("set", first, "--spill", "1025MiB"), `max_spill`)
	docker(t, "rm", "-f", first)
	noRecord(t, first)
	c.run(t)
}

// spillReserve: what the host keeps for itself is not spilled into, and the container goes on within its limit.
func spillReserve(t *testing.T) {
	withConfig(t, `spill_reserve = "9999GiB"`)
	noTrace(t)
	id := holding(t, container{env: withSpill("256MiB", "1")}, "200MiB")
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "100MiB"), noMemory)
	if r := execIn(id, "cgpu-probe", "alloc", "56MiB"); r.Code != 0 {
		t.Errorf("within the limit: %s", r)
	}
	wantMemory(t, time.Second, id, func(m vgpu) bool { return m.Used == 200*quota.MiB && m.Spilled == 0 })
}
