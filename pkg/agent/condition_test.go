// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetest "k8s.io/client-go/testing"

	"github.com/opencgpu/cgpu/pkg/device"
)

var silent = slog.New(slog.DiscardHandler)

func tableOf(pods string, gpus ...device.GPU) *device.Table {
	return &device.Table{Version: device.TableVersion, Driver: device.DriverSim, DriverVersion: "580.159.04", GPUs: gpus,
		Config: device.Config{Pods: pods, Overcommit: 1, MaxInst: 20}}
}

func TestJudge(t *testing.T) {
	good := tableOf(device.PodsAllocated, device.GPU{UUID: "GPU-0"})
	driver := func(edit func(*device.Table)) State {
		t := *good
		t.Driver, t.DriverVersion = device.DriverNVIDIA, "600.1.2"
		edit(&t)
		return State{Table: &t}
	}
	for what, tt := range map[string]struct {
		state  State
		status v1.ConditionStatus
		reason string
		text   string
	}{
		"not looked":     {State{}, v1.ConditionFalse, ReasonNoTable, "not looked at"},
		"missing":        {State{TableErr: fmt.Errorf("x: %w", device.ErrMissing)}, v1.ConditionFalse, ReasonNoTable, "cgpu refresh"},
		"stale":          {State{TableErr: fmt.Errorf("x: %w", device.ErrStale)}, v1.ConditionFalse, ReasonStaleTable, "cgpu refresh"},
		"no driver":      {State{TableErr: errors.New("the NVIDIA driver is not loaded")}, v1.ConditionFalse, ReasonNoDriver, "not loaded"},
		"no GPU":         {State{Table: tableOf("")}, v1.ConditionFalse, ReasonNoGPUs, "doctor"},
		"unknown driver": {driver(func(*device.Table) {}), v1.ConditionFalse, ReasonUnknownDriver, "branch 600 is not known (known: 515"},
		"too old": {driver(func(t *device.Table) { t.DriverVersion = "470.1.2"; t.Config.AllowUnknownDriver = true }),
			v1.ConditionFalse, ReasonUnknownDriver, "update the driver"},
		"no version": {driver(func(t *device.Table) { t.DriverVersion = "" }), v1.ConditionFalse, ReasonUnknownDriver,
			"want two or three numbers"},
		"simulated": {driver(func(t *device.Table) { t.Driver = device.DriverSim; t.Config.Enforcement = device.EnforcePreload }),
			v1.ConditionFalse, ReasonUnknownDriver, "600"},
		"let in": {driver(func(t *device.Table) { t.Config.AllowUnknownDriver = true }), v1.ConditionTrue, ReasonReady, "600.1.2"},
		"no guard": {driver(func(t *device.Table) { t.Config.Enforcement = device.EnforcePreload }), v1.ConditionTrue, ReasonReady,
			"600.1.2"},
		"ready":           {State{Table: good, Runtime: "containerd://2.0.5"}, v1.ConditionTrue, ReasonReady, "1 GPUs, driver 580.159.04"},
		"open":            {State{Table: tableOf(device.PodsAny, good.GPUs...)}, v1.ConditionTrue, ReasonPodsOpen, `pods = "allocated"`},
		"open by default": {State{Table: tableOf("", good.GPUs...)}, v1.ConditionTrue, ReasonPodsOpen, `pods = "allocated"`},
		"gpushare":        {State{Table: tableOf(device.PodsGPUShare, good.GPUs...)}, v1.ConditionTrue, ReasonReady, ""},
		"front end": {State{Table: good, Fronts: []FrontState{{Name: "dra", Err: errors.New("no kubelet")}}}, v1.ConditionFalse,
			ReasonFrontEnd, "dra: no kubelet"},
		"old containerd": {State{Table: good, Runtime: "containerd://1.6.20", Fronts: []FrontState{{Name: "dra", Err: errors.New("x")}}},
			v1.ConditionFalse, ReasonOldRuntime, "1.7"},
		"old, plugin": {State{Table: good, Runtime: "containerd://1.6.20", Fronts: []FrontState{{Name: "deviceplugin"}}}, v1.ConditionTrue,
			ReasonReady, ""},
		"two": {State{Table: good, Fronts: []FrontState{{Name: "dra", Shared: []int{0}}}}, v1.ConditionFalse, ReasonSharedGPUs, "[0]"},
		"limited": {State{Table: good, Fronts: []FrontState{{Name: "dra", Limited: "whole GPUs alone"}}}, v1.ConditionTrue, ReasonLimited,
			"dra: whole GPUs alone"},
		"one unhealthy": {State{Table: tableOf(device.PodsAny, device.GPU{UUID: "GPU-0"},
			device.GPU{UUID: "GPU-1", Index: 1, Fault: "Xid 79"})}, v1.ConditionTrue, ReasonUnhealthy, "of 2 GPUs: GPU 1 (Xid 79)"},
		"all unhealthy": {State{Table: tableOf(device.PodsAllocated, device.GPU{UUID: "GPU-0", Fault: "lost"})}, v1.ConditionFalse,
			ReasonUnhealthy, "GPU 0 (lost)"},
		"long": {State{TableErr: errors.New(strings.Repeat("\x1b[2J", 10000))}, v1.ConditionFalse, ReasonNoDriver, "?[2J"},
	} {
		c := judge(tt.state)
		if c.Status != tt.status || c.Reason != tt.reason || !strings.Contains(c.Message, tt.text) {
			t.Errorf("%s: %s %s %q, want %s %s %q", what, c.Status, c.Reason, c.Message, tt.status, tt.reason, tt.text)
		}
		if len(c.Message) > maxConditionMessage || strings.ContainsRune(c.Message, '\x1b') {
			t.Errorf("%s: message %q", what, c.Message)
		}
	}
}

func TestIgnoresCDI(t *testing.T) {
	for runtime, want := range map[string]bool{"": false, "containerd://1.6.20~ds1": true, "containerd://1.7.0": false,
		"containerd://2.4.2":     false,
		"containerd://1.5.0-rc1": true, "containerd://v1.6": true, "containerd://x.y": false, "cri-o://1.30.0": false, "containerd://": false} {
		if got := ignoresCDI(runtime); got != want {
			t.Errorf("%q: %v", runtime, got)
		}
	}
}

// The condition is written on change and now and then, not at each look; and what failed is tried again with what is true then.
func TestReporter(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	then := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
	client := fake.NewClientset(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "u"}, Status: v1.NodeStatus{
		NodeInfo: v1.NodeSystemInfo{ContainerRuntimeVersion: "containerd://2.0.5"},
		Conditions: []v1.NodeCondition{{Type: "Ready", Status: v1.ConditionTrue}, {Type: Condition, Status: v1.ConditionTrue, Reason: "Ready",
			LastTransitionTime: then}}}})
	patches, down := 0, false
	client.PrependReactor("patch", "nodes", func(kubetest.Action) (bool, runtime.Object, error) {
		if down {
			return true, nil, errors.New("API server is away")
		}
		patches++
		return false, nil, nil
	})
	p := newPods(answer(t), silent)
	m := NewMetrics()
	r := newReporter(client, "n", newPodEvents(ctx, client, "n", p, m, silent), m, silent)
	get := func() (c v1.NodeCondition, others int) {
		t.Helper()
		n, err := client.CoreV1().Nodes().Get(ctx, "n", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range n.Status.Conditions {
			if one.Type == Condition {
				c = one
			} else {
				others++
			}
		}
		return c, others
	}
	good := State{Table: tableOf(device.PodsAllocated, device.GPU{UUID: "GPU-0"})}
	r.state = good
	if err := r.write(ctx); err != nil {
		t.Fatal(err)
	}
	if c, others := get(); others != 1 || !c.LastTransitionTime.Equal(&then) || c.LastHeartbeatTime.IsZero() || c.Reason != ReasonReady {
		t.Errorf("an agent that starts again: %+v, %d other conditions", c, others)
	}
	if r.differs() {
		t.Error("nothing changed, and yet it differs")
	}
	r.state.TableErr = errors.New("gone")
	if down = true; r.write(ctx) == nil || !r.differs() {
		t.Error("what was not written counts as written")
	}
	down = false
	if err := r.write(ctx); err != nil {
		t.Fatal(err)
	}
	if c, _ := get(); c.Status != v1.ConditionFalse || c.LastTransitionTime.Equal(&then) {
		t.Errorf("after a change: %+v", c)
	}

	// The loop: a thousand looks of which nothing is new are one write.
	r = newReporter(client, "n", r.podEvents, m, silent)
	patches = 0
	done := make(chan struct{})
	go func() { defer close(done); r.run(ctx) }()
	for range 1000 {
		r.report(good)
	}
	for range 6000 {
		if c, _ := get(); c.Reason == ReasonReady {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(50 * time.Millisecond)
	stop()
	<-done
	if patches != 1 {
		t.Errorf("%d patches, want 1", patches)
	}
}
