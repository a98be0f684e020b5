// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
)

// fakeFront counts what the agent does with it.
type fakeFront struct {
	starts, updates, stops int
	startErr, updateErr    error
	sick                   error
	gpus                   int // of the last table
	sickGPUs               int // of these
}

func (f *fakeFront) frontEnd() FrontEnd {
	return FrontEnd{Name: "fake", Start: func(_ context.Context, t *device.Table, _ func(device.GPU) bool) (Server, error) {
		f.starts++
		f.gpus = len(t.GPUs)
		return f, f.startErr
	}}
}

func (f *fakeFront) Update(_ context.Context, t *device.Table) error {
	f.updates++
	f.gpus, f.sickGPUs = len(t.GPUs), len(health.Unhealthy(t))
	return f.updateErr
}
func (f *fakeFront) Healthy() error { return f.sick }
func (f *fakeFront) Stop()          { f.stops++ }

func TestFront(t *testing.T) {
	ctx := t.Context()
	fake := &fakeFront{startErr: errors.New("no kubelet")}
	f := &front{FrontEnd: fake.frontEnd()}
	table := tableOf("", device.GPU{UUID: "GPU-0"})
	step := func(table *device.Table, changed bool, wantErr string) {
		t.Helper()
		f.follow(ctx, table, changed, nil, silent)
		if wantErr == "" && f.err != nil || wantErr != "" && (f.err == nil || !strings.Contains(f.err.Error(), wantErr)) {
			t.Errorf("error %v, want %q", f.err, wantErr)
		}
	}
	step(nil, true, "waits")
	step(table, true, "no kubelet")
	step(table, false, "no kubelet") // too early for another try
	if fake.starts != 1 {
		t.Errorf("%d starts, want 1", fake.starts)
	}
	fake.startErr, f.next = nil, time.Now()
	step(table, false, "")
	step(table, false, "")
	if fake.starts != 2 || fake.updates != 0 || fake.gpus != 1 {
		t.Errorf("started: %+v", fake)
	}
	fake.sick = errors.New("kubelet is gone")
	step(table, false, "kubelet is gone")
	fake.sick = nil
	// The driver goes: no GPU is offered any more, and it is said so once.
	step(nil, true, "")
	step(nil, false, "")
	if fake.updates != 1 || fake.gpus != 0 {
		t.Errorf("driver gone: %+v", fake)
	}
	fake.updateErr = errors.New("API server is away")
	step(table, true, "away")
	step(table, false, "away")
	fake.updateErr, f.next = nil, time.Now()
	step(table, false, "")
	if fake.updates != 3 || fake.gpus != 1 {
		t.Errorf("driver back: %+v", fake)
	}
	if f.stop(silent); fake.stops != 1 {
		t.Error("not stopped")
	}
}

// failerFront is a front end that can end for good.
type failerFront struct {
	fakeFront
	dead error
}

func (f *failerFront) Failed() error { return f.dead }

// One that has ended for good is stopped and another started, less and less often if that ends too.
func TestFrontFailed(t *testing.T) {
	one := &failerFront{}
	f := &front{FrontEnd: FrontEnd{Name: "fake", Start: func(context.Context, *device.Table, func(device.GPU) bool) (Server, error) {
		one.starts++
		one.dead = nil
		return one, nil
	}}}
	table := tableOf("", device.GPU{UUID: "GPU-0"})
	f.follow(t.Context(), table, true, nil, silent)
	for n := 1; n <= 3; n++ {
		one.dead, one.sick = errors.New("socket lost"), errors.New("socket lost")
		f.follow(t.Context(), table, false, nil, silent)
		if wait := time.Until(f.next); f.err == nil || one.stops != n || one.starts != n || wait > retry(n-1) || wait < retry(n-1)/2 {
			t.Errorf("ended: %v, %d stops, %d starts, %v to wait", f.err, one.stops, one.starts, wait)
		}
		f.follow(t.Context(), table, false, nil, silent) // too early
		one.sick, f.next = nil, time.Now()
		f.follow(t.Context(), table, false, nil, silent)
		if f.err != nil || one.starts != n+1 {
			t.Errorf("started again: %v, %d starts", f.err, one.starts)
		}
	}
	f.began = time.Now().Add(-lived)
	one.dead = errors.New("socket lost")
	if f.follow(t.Context(), table, false, nil, silent); time.Until(f.next) > retry(0) {
		t.Errorf("after a long life %v to wait", time.Until(f.next))
	}
	// Without a table it is not started again, and not forgotten.
	f.next = time.Now()
	f.follow(t.Context(), nil, true, nil, silent)
	if f.err == nil || one.starts != 4 {
		t.Errorf("without a table: %v, %d starts", f.err, one.starts)
	}
	if f.follow(t.Context(), table, true, nil, silent); f.err != nil || one.starts != 5 {
		t.Errorf("table back: %v, %d starts", f.err, one.starts)
	}
}

func TestRetry(t *testing.T) {
	for n, want := range map[int]time.Duration{0: time.Second, 3: 8 * time.Second, 6: time.Minute, 1000000: time.Minute} {
		if got := retry(n); got != want {
			t.Errorf("%d: %v, want %v", n, got, want)
		}
	}
}

// No GPU is offered by two front ends, also where one list has an index and the other the UUID.
func TestDivision(t *testing.T) {
	dra, err := ParseSelection([]string{"0", "GPU-1"})
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := ParseSelection([]string{"1", "2"})
	if err != nil {
		t.Fatal(err)
	}
	f := &front{FrontEnd: FrontEnd{Name: "dra", Mine: dra.Has, Others: plugin.Has}}
	table := tableOf("", device.GPU{Index: 0, UUID: "GPU-0"}, device.GPU{Index: 1, UUID: "GPU-1"}, device.GPU{Index: 2, UUID: "GPU-2"},
		device.GPU{Index: 3, UUID: "GPU-3"})
	var has []int
	for _, g := range table.GPUs {
		if f.has(g) {
			has = append(has, g.Index)
		}
	}
	if len(has) != 1 || has[0] != 0 {
		t.Errorf("has %v, want [0]", has)
	}
	if shared := f.shared(table); len(shared) != 1 || shared[0] != 1 {
		t.Errorf("shared %v, want [1]", shared)
	}
	same, _ := ParseSelection([]string{"GPU-1", "5"})
	if got := dra.Meets(same); len(got) != 1 || got[0] != "GPU-1" {
		t.Errorf("meets %v", got)
	}
	for _, bad := range []string{"", "x", "-1", "GPU-", "99999", "1-3"} {
		if _, err := ParseSelection([]string{bad}); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
