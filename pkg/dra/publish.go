// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// A slice that somebody deletes the library writes again 30 seconds after it hears of that (DefaultSyncDelay). But what it wrote itself
// it takes to be there for a while (MutationCacheTTL, a minute by default), and after an update it does not look again: a slice that is
// deleted just after one never comes back (Kubernetes' pull request 140063, in the library since 1.37). The kubelet deletes all slices of
// its node when it starts (wipeResourceSlices in its dra_plugin_manager.go), which it tries again for minutes, and those of a driver that
// was away for 30 seconds. So the driver has the library look, which costs no call where all is as it should be.
const (
	// writtenFor is how long the library believes what it wrote. A watch that lags more makes a slice twice, and the library deletes one.
	writtenFor = 10 * time.Second
	// lookEvery is how often the library looks by itself.
	lookEvery = 30 * time.Second
	// kubeletSettles is how long after a registration the library looks at each tick. Not before it: a pod that comes to the node then waits
	// for more than a minute, since the kubelet cannot prepare its claim.
	kubeletSettles = time.Minute
	// The library tries a write that failed again after retryFirst, and at last every retryMost.
	retryFirst, retryMost = 100 * time.Millisecond, 30 * time.Second
	// invalidFor is how long slices count as refused that are not refused again: the library does not tell of a success.
	invalidFor = 4 * retryMost
)

// startPublishing publishes the GPUs, and waits until the API server has told what is published.
func (d *Driver) startPublishing(ctx context.Context) error {
	d.looks = workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryMost))
	resources, believed := d.resources(), writtenFor
	var err error
	d.published, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:       DriverName,
		KubeClient:       d.o.Client,
		Owner:            &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: d.o.Node},
		Resources:        &resources,
		Queue:            d.looks,
		MutationCacheTTL: &believed,
		ErrorHandler:     d.notPublished,
	})
	if err != nil {
		return fmt.Errorf("dra: publish the GPUs: %w", err)
	}
	return nil
}

func (d *Driver) publish() {
	d.publishing.Lock()
	defer d.publishing.Unlock()
	resources := d.resources()
	d.published.Update(&resources)
}

func (d *Driver) resources() resourceslice.DriverResources {
	n := d.node()
	d.mu.Lock()
	table := inOrder(n.table, d.taken)
	d.mu.Unlock()
	return Resources(table, n.name, d.offered(n.ours), Places(d.o.Sys, table), n.cards)
}

// offered are the GPUs that are published: ours, without those that are unhealthy where nobody would be told.
func (d *Driver) offered(ours func(device.GPU) bool) func(device.GPU) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.untaintable {
		return ours
	}
	return func(g device.GPU) bool { return g.Fault == "" && (ours == nil || ours(g)) }
}

// ledgerEvery is how often the driver looks whether a GPU is shared in another way, or by others. Nobody tells it.
const ledgerEvery = 5 * time.Second

// follow publishes the GPUs anew where cgpu policy has changed one or their order is another, and looks after what is published.
func (d *Driver) follow(ctx context.Context) {
	tick := time.NewTicker(ledgerEvery)
	defer tick.Stop()
	var told error
	looked := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		changed, err := d.lookAtLedger()
		if d.anew.Swap(false) || changed {
			d.publish()
		}
		if now := time.Now(); d.lookDue(now, looked) {
			looked = now
			d.looks.Add(d.o.Node)
		}
		if err != nil && (told == nil || told.Error() != err.Error()) { // once for each thing that is wrong
			d.o.Log.Error("settings of the GPUs are not followed", "error", err)
		}
		told = err
	}
}

// lookDue says whether the library is to look after the slices, which it last did at that time.
func (d *Driver) lookDue(now, looked time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return now.Sub(looked) >= lookEvery || now.Sub(d.registeredAt) < kubeletSettles
}

// lookAtLedger reads the settings of the GPUs, and what containers have of them, if the ledger is another than when they were read.
func (d *Driver) lookAtLedger() (changed bool, err error) {
	now, err := os.Stat(ledger.File(d.o.RunDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("dra: %w", err)
	}
	if was := d.ledger; err != nil && was == nil || err == nil && was != nil && os.SameFile(was, now) && was.ModTime().Equal(now.ModTime()) {
		return false, nil
	}
	records, cards, err := ledger.Open(d.o.RunDir).State()
	if err != nil {
		return false, fmt.Errorf("dra: %w", err)
	}
	d.ledger = now
	d.mu.Lock()
	defer d.mu.Unlock()
	taken := takenOf(records)
	sameGPU := func(a, b device.GPU) bool { return a.UUID == b.UUID }
	changed = !maps.Equal(d.cards, cards) || !slices.EqualFunc(inOrder(d.table, d.taken).GPUs, inOrder(d.table, taken).GPUs, sameGPU)
	d.cards, d.taken = cards, taken
	return changed, nil
}

// notPublished is called for faults of what publishes the slices.
func (d *Driver) notPublished(_ context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped) && slices.Equal(dropped.DisabledFeatures(), []string{"DRADeviceTaints"}):
		d.mu.Lock()
		d.untaintable = true
		d.mu.Unlock()
		d.anew.Store(true)
		d.o.Log.Warn("the API server drops taints of devices: unhealthy GPUs leave the slices instead (feature gate DRADeviceTaints, on " +
			"by default since Kubernetes 1.36)")
		return
	case errors.As(err, &dropped):
		// Not unhealthy: without shares each claim has a GPU alone.
		d.mu.Lock()
		d.limited = fmt.Sprintf("the API server drops what makes shares (feature gates %s), so a claim of any size gets a whole GPU: turn the "+
			"gates on, as they are by default since Kubernetes 1.36, and restart cgpu-agent", strings.Join(dropped.DisabledFeatures(), ", "))
		d.mu.Unlock()
		d.o.Log.Error("the API server drops fields of the slices: GPUs are given out whole only, until the feature gate "+
			"DRAConsumableCapacity is on (as it is by default since Kubernetes 1.36)", "features", dropped.DisabledFeatures(), "error", err)
		return
	case apierrors.IsInvalid(err) || apierrors.IsForbidden(err):
		d.mu.Lock()
		d.invalid, d.invalidAt = fmt.Errorf("dra: %s: %w", msg, err), time.Now()
		d.mu.Unlock()
	}
	d.o.Log.Error(msg, "error", err)
}
