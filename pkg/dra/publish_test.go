// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"log/slog"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opencgpu/cgpu/pkg/device"
)

// register is what the kubelet says of the registration.
func register(d *Driver, registered bool) {
	_, _ = d.registered(context.Background(), &registration.RegistrationStatus{PluginRegistered: registered}, nil,
		func(context.Context, any) (any, error) { return nil, nil })
}

// TestLookDue: the slices are looked after at each tick once the kubelet has registered the driver, and every now and then.
func TestLookDue(t *testing.T) {
	d := &Driver{o: Options{Log: slog.New(slog.DiscardHandler)}}
	start := time.Now()
	look := func(after time.Duration, want bool) {
		t.Helper()
		if due := d.lookDue(start.Add(after), start); due != want {
			t.Errorf("after %v: %v", after, due)
		}
	}
	look(ledgerEvery, false)
	look(lookEvery, true)
	register(d, false)
	look(ledgerEvery, false)
	register(d, true)
	look(ledgerEvery, true)
	start = start.Add(2 * kubeletSettles)
	look(ledgerEvery, false)
}

// TestSlicesDeleted: the kubelet deletes a slice that was written a moment ago, and it comes again. Of an update the library does not see
// by itself that it is gone.
func TestSlicesDeleted(t *testing.T) {
	t.Parallel()
	client := sliceClient()
	d, err := Start(t.Context(), options(t, client))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	published(t, client, 2, 0)
	if err := d.Update(t.Context(), sickTable(device.HealthOn)); err != nil {
		t.Fatal(err)
	}
	published(t, client, 2, 1)
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := client.ResourceV1().ResourceSlices().Delete(t.Context(), list.Items[0].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	register(d, true)
	published(t, client, 2, 1)
}
