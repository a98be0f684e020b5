// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"github.com/opencgpu/cgpu/pkg/device"
)

// sickTable has a second GPU that is unhealthy.
func sickTable(health string) *device.Table {
	t := tableOf(2)
	t.Config.Health, t.GPUs[1].Fault = health, "Xid 79: fallen off the bus"
	return t
}

// TestTaints: an unhealthy GPU is tainted, for new pods alone unless the administrator wants otherwise.
func TestTaints(t *testing.T) {
	for health, want := range map[string]resourceapi.DeviceTaintEffect{"": "NoSchedule", device.HealthOn: "NoSchedule",
		device.HealthEvict: "NoExecute"} {
		devices := Resources(sickTable(health), "n", nil, nil, nil).Pools["n"].Slices[0].Devices
		if taints := devices[1].Taints; len(devices[0].Taints) > 0 || len(taints) != 1 || taints[0].Effect != want ||
			taints[0].Key != "gpu.cgpu.io/unhealthy" {
			t.Errorf("health = %q: %+v, %+v", health, devices[0].Taints, taints)
		}
	}
}

// published waits for the devices in the slices that the API server has, and how many of them are tainted.
func published(t *testing.T, client *fake.Clientset, want, tainted int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n, bad := 0, 0
		for _, s := range list.Items {
			for _, d := range s.Spec.Devices {
				n++
				bad += len(d.Taints)
			}
		}
		if n == want && bad == tainted {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d devices, %d taints; want %d and %d", n, bad, want, tainted)
		}
	}
}

// TestTaintsDropped: where the API server drops taints, an unhealthy GPU is not published.
func TestTaintsDropped(t *testing.T) {
	client := sliceClient()
	o := options(t, client)
	o.Table = sickTable(device.HealthOn)
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	published(t, client, 2, 1)
	slice := func(taints ...resourceapi.DeviceTaint) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Taints: taints}}}}
	}
	dropped := &resourceslice.DroppedFieldsError{PoolName: "n", DesiredSlice: slice(resourceapi.DeviceTaint{Key: "x"}), ActualSlice: slice()}
	d.notPublished(t.Context(), dropped, "in the background")
	published(t, client, 1, 0)
	if err := d.Update(t.Context(), tableOf(2)); err != nil {
		t.Fatal(err)
	}
	published(t, client, 2, 0)
}

// TestSharesDropped: where the API server drops what makes shares, the driver says what claims get.
func TestSharesDropped(t *testing.T) {
	d, err := Start(t.Context(), options(t, sliceClient()))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	if said := d.Limited(); said != "" {
		t.Errorf("at first: %s", said)
	}
	slice := func(shared *bool) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{AllowMultipleAllocations: shared}}}}
	}
	dropped := &resourceslice.DroppedFieldsError{PoolName: "n", DesiredSlice: slice(new(true)), ActualSlice: slice(nil)}
	d.notPublished(t.Context(), dropped, "in the background")
	if said := d.Limited(); !strings.Contains(said, "DRAConsumableCapacity") || d.Healthy() != nil {
		t.Errorf("%q, %v", said, d.Healthy())
	}
}

// healthStream takes what is sent.
type healthStream struct {
	grpc.ServerStreamingServer[drahealth.NodeWatchResourcesResponse]
	ctx  context.Context
	sent chan *drahealth.NodeWatchResourcesResponse
}

func (s healthStream) Context() context.Context { return s.ctx }
func (s healthStream) Send(r *drahealth.NodeWatchResourcesResponse) error {
	select {
	case s.sent <- r:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// TestNodeWatchResources: the kubelet is told of each GPU at once and at each change, for no longer than it is told again, and the driver's
// end ends it.
func TestNodeWatchResources(t *testing.T) {
	o := options(t, fake.NewClientset())
	o.Table = tableOf(2)
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	s := healthStream{ctx: t.Context(), sent: make(chan *drahealth.NodeWatchResourcesResponse)}
	done := make(chan error)
	go func() { done <- plugin{d: d}.NodeWatchResources(nil, s) }()
	told := func(second drahealth.HealthStatus) {
		t.Helper()
		r := <-s.sent
		if len(r.Devices) != 2 || r.Devices[0].Health != drahealth.HealthStatus_HEALTHY || r.Devices[1].Health != second ||
			r.Devices[1].Device.DeviceName != deviceName(o.Table.GPUs[1]) ||
			r.Devices[0].HealthCheckTimeoutSeconds < 2*int64(healthEvery/time.Second) {
			text, _ := json.Marshal(r)
			t.Errorf("%s", text)
		}
	}
	told(drahealth.HealthStatus_HEALTHY)
	if err := d.Update(t.Context(), sickTable(device.HealthOn)); err != nil {
		t.Fatal(err)
	}
	told(drahealth.HealthStatus_UNHEALTHY)
	if err := d.Update(t.Context(), tableOf(2)); err != nil {
		t.Fatal(err)
	}
	told(drahealth.HealthStatus_HEALTHY)
	go func() {
		for range s.sent { // what it was about to tell
		}
	}()
	d.Stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	close(s.sent)
}
