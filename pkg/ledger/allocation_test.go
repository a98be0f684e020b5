// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// claimed is a request for a share of GPU-a.
func claimed(id, share string, containers int) Request {
	req := request(id, id, gib)
	req.Record.Allocated = []Allocation{{ID: share, UUID: "GPU-a", Containers: containers}}
	return req
}

func refused(t *testing.T, err error, want string) {
	t.Helper()
	if _, ok := errors.AsType[*Refusal](err); !ok || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v, want %q", err, want)
	}
}

// Ten containers that name one claim hold as much of it as it is for.
func TestAllocationIsHeldOnce(t *testing.T) {
	for most := range 4 {
		l := open(t)
		started := 0
		for i := range 10 {
			r, err := l.Reserve(claimed(fmt.Sprint("c", i), "claim/1", most))
			if err == nil {
				started++
				if len(r.Allocated) != 1 || !r.Holds("claim/1") || r.Holds("claim") {
					t.Errorf("%+v", r)
				}
				continue
			}
			refused(t, err, "allocation claim/1 is held by")
		}
		if started != max(most, 1) {
			t.Errorf("%d containers have a share that is for %d", started, most)
		}
		// Another share of the same claim is another one; and a restart takes its predecessor's place.
		reserve(t, l, claimed("other", "claim/2", 1))
		again := claimed("c0", "claim/1", most)
		again.Record.Nonce = "n2"
		again.Record.LauncherPID = 1
		reserve(t, l, again)
		// What is given back can be held by the next one.
		must(t, l.Release("n2"))
		reserve(t, l, claimed("next", "claim/1", most))
	}
}

// Processes that reserve at once do not get more than one alone does.
func TestAllocationIsHeldOnceAtOnce(t *testing.T) {
	l := open(t)
	var started atomic.Int32
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if _, err := l.Reserve(claimed(fmt.Sprint("c", i), "claim/1", 2)); err == nil {
				started.Add(1)
			}
		})
	}
	wg.Wait()
	if n := started.Load(); n != 2 {
		t.Errorf("%d containers have a share that is for 2", n)
	}
}

// A dead container holds nothing, even if nobody has released it.
func TestAllocationOfTheDead(t *testing.T) {
	l := open(t)
	req := claimed("old", "claim/1", 1)
	req.Record.GuardPID, req.Record.InitPID, req.Record.LauncherPID = 100, 101, 102
	reserve(t, l, req)
	reserve(t, l, claimed("new", "claim/1", 1))
	if got := ids(t, l); got != "new/new" {
		t.Error(got)
	}
}

// The container has ended, its guard still gives back: the next one waits for that, whether it is the share or the memory that
// it lacks. It does not wait for one that lives, nor for a stranger.
func TestReserveWaitsForTheDying(t *testing.T) {
	for name, tt := range map[string]struct {
		init, launcher int
		limit          quota.Bytes
		share          string
		waits          bool
	}{
		"ended":              {init: 100, launcher: 101, limit: gib, share: "claim/1", waits: true},
		"has all the memory": {init: 100, launcher: 101, limit: 15 * gib, share: "claim/1", waits: true},
		"create failed":      {launcher: 101, limit: gib, share: "claim/1", waits: true},
		"lives":              {init: 50, launcher: 101, limit: gib, share: "claim/1"},
		"is being created":   {launcher: 50, limit: gib, share: "claim/1"},
		// Its pod was deleted by force.
		"another allocation":       {init: 50, launcher: 101, limit: 15 * gib, share: "claim/9", waits: true},
		"another allocation, dead": {init: 100, launcher: 101, limit: 15 * gib, share: "claim/9", waits: true},
		"none of Kubernetes":       {init: 100, launcher: 101, limit: 15 * gib},
	} {
		l := open(t)
		l.dyingTime = time.Minute
		old := claimed("old", tt.share, 1)
		old.Record.VGPUs[0].Limit = tt.limit
		if tt.share == "" {
			old.Record.Allocated = nil
		}
		old.Record.GuardPID, old.Record.InitPID, old.Record.LauncherPID = 40, tt.init, tt.launcher
		reserve(t, l, old)
		released := make(chan struct{})
		if tt.waits {
			time.AfterFunc(50*time.Millisecond, func() { l.Release("old"); close(released) })
		} else {
			close(released)
		}
		next := claimed("next", "claim/1", 1)
		next.Record.VGPUs[0].Limit = 2 * gib
		begin := time.Now()
		_, err := l.Reserve(next)
		<-released
		if tt.waits != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(begin); took > l.dyingTime/2 {
			t.Errorf("%s: %v", name, took)
		}
	}
	// A guard that never ends is not waited for without end.
	l := open(t)
	l.dyingTime = 50 * time.Millisecond
	old := claimed("old", "claim/1", 1)
	old.Record.GuardPID, old.Record.InitPID = 40, 100
	reserve(t, l, old)
	_, err := l.Reserve(claimed("next", "claim/1", 1))
	refused(t, err, "is held by 1 containers")
}

// A GPU that was allocated whole is for one container alone. Without allocations several may have one whole, as ever.
func TestWholeAllocation(t *testing.T) {
	whole := func(id, share string) Request {
		req := request(id, id, gib)
		req.Record.VGPUs, req.Record.Native = nil, []string{"GPU-a"}
		if share != "" {
			req.Record.Allocated = []Allocation{{ID: share, UUID: "GPU-a"}}
		}
		return req
	}
	l := open(t)
	l.dyingTime = 0
	reserve(t, l, whole("claimed", "claim/1"))
	_, err := l.Reserve(whole("docker", ""))
	refused(t, err, "Kubernetes allocates a whole GPU to one alone")
	_, err = l.Reserve(whole("other", "claim/2"))
	refused(t, err, "Kubernetes allocates a whole GPU to one alone")
	_, err = l.Reserve(claimed("slice", "claim/3", 1))
	refused(t, err, "has the whole GPU")

	l = open(t)
	reserve(t, l, whole("docker", ""))
	reserve(t, l, whole("docker2", ""))
	_, err = l.Reserve(whole("claimed", "claim/1"))
	refused(t, err, "Kubernetes allocates a whole GPU to one alone")

	l = open(t)
	reserve(t, l, claimed("slice", "claim/3", 1))
	_, err = l.Reserve(whole("claimed", "claim/1"))
	refused(t, err, "containers have slices of it")
}

// An allocation without a GPU is of the one that the ledger chose, and one of a GPU that the container does not get is a fault.
func TestAllocationIsOfAGPU(t *testing.T) {
	l := open(t)
	req := request("c", "n", gib)
	req.Record.VGPUs = nil
	req.Record.Allocated = []Allocation{{ID: "s"}}
	req.Place = &Placement{Memory: quota.Memory{Fixed: gib}, Policy: PolicySpread}
	r := reserve(t, l, req)
	if r.Allocated[0].UUID == "" || r.Allocated[0].UUID != r.VGPUs[0].UUID || req.Record.Allocated[0].UUID != "" {
		t.Errorf("%+v", r)
	}
	for _, a := range []Allocation{{ID: "s"}, {ID: "s", UUID: "GPU-b"}, {UUID: "GPU-a"}} {
		req := request("d", "n", gib)
		req.Record.Allocated = []Allocation{a}
		if _, err := l.Reserve(req); err == nil {
			t.Errorf("%+v", a)
		}
	}
}
