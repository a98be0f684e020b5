// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestSize: every way of asking gives the size it promises.
func TestSize(t *testing.T) {
	card := gpus(t)[0].Memory
	tests := []struct {
		name string
		env  []string
		want quota.Bytes
	}{
		{"fraction", sixOfFifteen, (card * 6 / 15).FloorMiB()},
		{"GiB", quotaOf("2", "", "0"), 2 * quota.GiB},
		{"MiB with unit", sizeOf("777MiB"), 777 * quota.MiB},
		{"half a GiB more", sizeOf("1.5GiB"), 1536 * quota.MiB},
		{"whole card", quotaOf("15", "15", "0"), card.FloorMiB()},
		{"by UUID", quotaOf("1", "", gpus(t)[0].UUID), quota.GiB},
		{"NVIDIA_VISIBLE_DEVICES names it", append(quotaOf("1", "", ""), "NVIDIA_VISIBLE_DEVICES=0"), quota.GiB},
		{"nothing names it", quotaOf("1", "", ""), quota.GiB},
	}
	eachMode(t, func(t *testing.T, m mode) {
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				noTrace(t)
				if got := total(t, m.of(container{env: test.env, cmd: []string{"cgpu-probe", "meminfo"}}).run(t)); got != test.want {
					t.Errorf("total = %v, want %v", got, test.want)
				}
			})
		}
	})
	if lab.Driver == device.DriverSim {
		if got, want := fraction(t, 6, 15), 6043*quota.MiB; got != want {
			t.Errorf("6/15 of a T4 = %v, want %v", got, want)
		}
	}
}

// TestSecondGPU: the container that asked for the second card has that card and no other.
func TestSecondGPU(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		if len(gpus(t)) < 2 {
			testenv.Lacks(t, "needs two GPUs")
		}
		noTrace(t)
		checkGPUs(t, m.of(container{env: quotaOf("1", "", "1"), cmd: []string{"cgpu-probe", "gpus"}}).run(t), 1)
		checkGPUs(t, m.of(container{env: quotaOf("1", "", "0,1"), cmd: []string{"cgpu-probe", "gpus"}}).run(t), 0, 1)
	})
}

// TestMixed: a GPU in NVIDIA_VISIBLE_DEVICES and not in ALIYUN_COM_GPU_VISIBLE_DEVICES comes whole beside the slice.
func TestMixed(t *testing.T) {
	all := gpus(t)
	if len(all) < 2 {
		testenv.Lacks(t, "needs two GPUs")
	}
	noTrace(t)
	c := container{env: append(quotaOf("2", "", "0"), "NVIDIA_VISIBLE_DEVICES=1"), cmd: []string{"cgpu-probe", "meminfo"}}
	if got := total(t, c.run(t)); got != 2*quota.GiB {
		t.Errorf("total of the slice = %v, want 2GiB", got)
	}
	c.cmd = []string{"cgpu-probe", "gpus"}
	checkGPUs(t, c.run(t), 0, 1)
	// The whole one excludes slices of it, and the other way round.
	id := container{env: c.env, cmd: []string{"sleep", "600"}}.start(t)
	wantRefused(t, container{env: quotaOf("1", "", "1"), cmd: []string{"true"}}.try(t), all[1].UUID)
	docker(t, "rm", "-f", id)
}

// TestLimitExact: the last byte of the limit can be had and the next cannot; a failure leaves nothing charged.
func TestLimitExact(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		id := m.of(container{env: sizeOf("64MiB"), cmd: []string{"sleep", "600"}}).start(t)
		if r := m.exec(id, "cgpu-probe", "alloc", "64MiB"); r.Code != 0 {
			t.Errorf("the whole limit must be had: %s", r)
		}
		wantRefused(t, m.exec(id, "cgpu-probe", "alloc", "65MiB"), noMemory)
		if r := m.exec(id, "cgpu-probe", "alloc", "64MiB"); r.Code != 0 {
			t.Errorf("after a refusal the whole limit must still be had: %s", r)
		}
	})
}

// TestTwoContainers: two containers share a card, each with its size, and neither sees or takes from the other.
func TestTwoContainers(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		a := m.holding(t, container{name: "first", env: sizeOf("1GiB")}, "600MiB")
		b := m.holding(t, container{name: "second", env: sizeOf("2GiB")}, "1500MiB")
		for _, c := range []struct {
			id          string
			limit, held quota.Bytes
		}{{a, quota.GiB, 600 * quota.MiB}, {b, 2 * quota.GiB, 1500 * quota.MiB}} {
			r := m.exec(c.id, "cgpu-probe", "meminfo")
			if got := total(t, r.Stdout); got != c.limit {
				t.Errorf("total = %v, want %v", got, c.limit)
			}
			if got := free(t, r.Stdout); got > c.limit-c.held || got < c.limit-c.held-64*quota.MiB {
				t.Errorf("free = %v, want about %v: only its own use counts", got, c.limit-c.held)
			}
			// Nobody hides neighbours' processes in preload mode.
			if got := pids(t, m.exec(c.id, "cgpu-probe", "pids")); got > 2 && !m.preload {
				t.Errorf("%d processes seen, want its own only", got)
			}
		}
		wantRefused(t, m.exec(a, "cgpu-probe", "alloc", "600MiB"), noMemory)
		if r := m.exec(b, "cgpu-probe", "alloc", "400MiB"); r.Code != 0 {
			t.Errorf("b has room of its own: %s", r)
		}
	})
}

// TestFourProcesses: all processes of a container share one limit, in one exec and in many.
func TestFourProcesses(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		id := m.of(container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}).start(t)
		for i := range 3 {
			m.spawn(t, id, "cgpu-probe", "hold", "300MiB")
			want := quota.Bytes(i+1) * 300 * quota.MiB
			eventually(t, 10*time.Second, func() string {
				if got := used(t, m.exec(id, "cgpu-probe", "meminfo").Stdout); got < want {
					return fmt.Sprintf("used %v, want %v", got, want)
				}
				return ""
			})
		}
		wantRefused(t, m.exec(id, "cgpu-probe", "alloc", "300MiB"), noMemory)
		if r := m.exec(id, "cgpu-probe", "alloc", "64MiB"); r.Code != 0 {
			t.Errorf("what is left must still be had: %s", r)
		}
	})
}

// TestProbeCases: the probe's own cases, each of which checks itself, in a plain container.
func TestProbeCases(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		for _, test := range []struct{ args, notPreloaded string }{
			{args: "self --limit 512MiB"}, {args: "threads 8 100MiB"}, {args: "dup"}, {args: "dup 100MiB"}, {args: "guess"},
			{args: "signals --seconds 4"}, {args: "context 0.1"}, {args: "alloc --count 100 --free 500MiB"},
			{args: "fork 4 200MiB", notPreloaded: "what killed processes held counts until somebody needs the room"},
			{args: "export", notPreloaded: "what is exported and freed counts no more, though the descriptor keeps it"},
		} {
			t.Run(test.args, func(t *testing.T) {
				if test.notPreloaded != "" {
					m.cannot(t, test.notPreloaded)
				}
				t.Parallel()
				c := m.of(container{env: sizeOf("512MiB"), cmd: append([]string{"cgpu-probe"}, strings.Fields(test.args)...)})
				if r := c.try(t); r.Code != 0 {
					t.Error(r)
				}
			})
		}
	})
}

// TestForeignHandles: the handles of a neighbour, told outright, are worth nothing in another container.
func TestForeignHandles(t *testing.T) {
	noTrace(t)
	neighbour := holding(t, container{env: sizeOf("512MiB")}, "200MiB")
	logs := docker(t, "logs", neighbour)
	handle := func(key string) string {
		m := regexp.MustCompile(`(?m)^` + key + `=(0x[0-9a-f]+)`).FindStringSubmatch(logs)
		if m == nil {
			t.Fatalf("no %s in %q", key, logs)
		}
		return m[1]
	}
	client, object := handle("client"), handle("object")
	for _, cmd := range [][]string{{"client-foreign", client}, {"dup-foreign", client, object}} {
		for _, opts := range [][]string{nil, {"--privileged"}} {
			c := container{env: sizeOf("512MiB"), opts: opts, cmd: append([]string{"cgpu-probe"}, cmd...)}
			if r := c.try(t); r.Code != 0 {
				t.Error(r)
			}
		}
	}
	if got := used(t, execIn(neighbour, "cgpu-probe", "meminfo").Stdout); got < 200*quota.MiB {
		t.Errorf("the neighbour has %v left of its 200MiB", got)
	}
}

// TestCrowd: twenty containers and more at once, each with its own size, then none and nothing left.
func TestCrowd(t *testing.T) {
	noTrace(t)
	// max_inst is 20 for one card; with two the node places them.
	crowd, visible := 24, ""
	if len(gpus(t)) == 1 {
		crowd, visible = 20, "0"
	}
	type end struct {
		i   int
		out string
		err string
	}
	ends := make(chan end)
	for i := range crowd {
		go func() {
			c := container{env: quotaOf(fmt.Sprintf("%dMiB", 100+i), "", visible),
				cmd: []string{"sh", "-c", "cgpu-probe meminfo && cgpu-probe oom >/dev/null; sleep 3"}}
			r := lab.Run(nil, c.args("--rm")...)
			e := end{i: i, out: r.Stdout}
			if r.Code != 0 {
				e.err = r.String()
			}
			ends <- e
		}()
	}
	for range crowd {
		e := <-ends
		if e.err != "" {
			t.Error(e.err)
			continue
		}
		if got, want := total(t, e.out), quota.Bytes(100+e.i)*quota.MiB; got != want {
			t.Errorf("container %d: total = %v, want %v", e.i, got, want)
		}
	}
}
