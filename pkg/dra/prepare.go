// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"os"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	"tags.cncf.io/container-device-interface/specs-go"
)

// plugin is what the kubelet calls. It keeps nothing between two calls but the files: while a DaemonSet is updated, one agent
// may prepare a claim and another unprepare it.
type plugin struct {
	drahealth.UnimplementedDRAResourceHealthServer
	d *Driver
}

// The kubelet tries a prepare that failed again only after a minute or more, so what may pass is waited for.
const (
	apiPatience = 2 * time.Second // for an answer of the API server
	// tablePatience is for a node table with GPUs: while the driver is loaded anew there is none, and the agent looks for one
	// every five seconds.
	tablePatience = 6 * time.Second
	patiencePause = 200 * time.Millisecond
)

// withGPUs is the node as soon as it has GPUs, or as it is at last.
func (d *Driver) withGPUs(ctx context.Context) node {
	for deadline := time.Now().Add(tablePatience); ; {
		n := d.node()
		if len(n.table.GPUs) > 0 || time.Now().After(deadline) || !pause(ctx) {
			return n
		}
	}
}

// pause is false where ctx has ended.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(patiencePause):
		return true
	}
}

// PrepareResourceClaims writes the CDI spec of each claim. Preparing a claim again writes the same.
func (p plugin) PrepareResourceClaims(ctx context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	n := p.d.withGPUs(ctx)
	for _, c := range claims {
		start := time.Now()
		devices, err := p.d.prepare(n, c)
		if err != nil {
			err = fmt.Errorf("dra: claim %s/%s: %w", c.Namespace, c.Name, err)
			p.d.o.Log.Error("claim is not prepared", "claim", c.Namespace+"/"+c.Name, "uid", c.UID, "error", err)
		} else {
			p.d.o.Log.Info("claim is prepared", "claim", c.Namespace+"/"+c.Name, "uid", c.UID, "shares", len(devices), "took", time.Since(start))
		}
		results[c.UID] = kubeletplugin.PrepareResult{Err: err, Devices: devices}
	}
	return results, nil
}

func (d *Driver) prepare(n node, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	list, err := n.shares(c)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		// A claim may have devices of several drivers, and the kubelet asks all of them.
		return nil, nil
	}
	if err := d.write(c.UID, cdiSpec(c.Namespace, c.Name, d.o.hook(n.table), list)); err != nil {
		return nil, err
	}
	var devices []kubeletplugin.Device
	for _, a := range list {
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{a.request},
			PoolName:     n.name,
			DeviceName:   a.device,
			ShareID:      a.shareID,
			CDIDeviceIDs: []string{cdiKind + "=" + cdiDevice(a.share)},
		})
	}
	return devices, nil
}

func (d *Driver) write(uid types.UID, spec *specs.Spec) error {
	d.files.Lock()
	defer d.files.Unlock()
	return d.cdi.write(uid, spec)
}

func (d *Driver) remove(uid types.UID) error {
	d.files.Lock()
	defer d.files.Unlock()
	return d.cdi.remove(uid)
}

// UnprepareResourceClaims removes the CDI specs.
func (p plugin) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, c := range claims {
		err := isUID(c.UID)
		if err == nil {
			err = p.d.remove(c.UID)
		}
		if err != nil {
			err = fmt.Errorf("dra: claim %s/%s: %w", c.Namespace, c.Name, err)
			p.d.o.Log.Error("claim is not unprepared", "claim", c.Namespace+"/"+c.Name, "uid", c.UID, "error", err)
		} else {
			p.d.o.Log.Info("claim is unprepared", "claim", c.Namespace+"/"+c.Name, "uid", c.UID)
		}
		results[c.UID] = err
	}
	return results, nil
}

// sweep removes the specs of claims that are gone: an agent that was killed, or a kubelet that lost its state, leaves them.
// One goes only if the API server has said that there is no such claim, or that it has no device of this node.
func (d *Driver) sweep(ctx context.Context) {
	list, err := d.cdi.list()
	if err != nil {
		d.o.Log.Warn("some CDI specs are left alone", "dir", d.cdi.dir, "error", err)
	}
	for _, p := range list {
		seen := d.cdi.seen(p.uid)
		gone, err := d.gone(ctx, p)
		if err == nil && gone {
			gone, err = d.removeSeen(p.uid, seen)
		}
		switch claim := p.namespace + "/" + p.name; {
		case err != nil:
			d.o.Log.Warn("whether a claim is still there is not known: its CDI spec stays", "claim", claim, "uid", p.uid, "error", err)
		case gone:
			d.o.Log.Info("CDI spec of a claim that is gone: removed", "claim", claim, "uid", p.uid)
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// removeSeen removes a claim's spec unless it was prepared again while the API server was asked: what that said is of a claim
// that was not allocated yet, or anew.
func (d *Driver) removeSeen(uid types.UID, seen os.FileInfo) (removed bool, err error) {
	d.files.Lock()
	defer d.files.Unlock()
	if now := d.cdi.seen(uid); seen == nil || now == nil || !os.SameFile(seen, now) || !seen.ModTime().Equal(now.ModTime()) {
		return false, nil
	}
	return true, d.cdi.remove(uid)
}

// gone asks for single claims: a node has few, the cluster may have many thousands.
func (d *Driver) gone(ctx context.Context, p prepared) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	claim, err := d.o.Client.ResourceV1().ResourceClaims(p.namespace).Get(ctx, p.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, err
	case claim.UID != p.uid || claim.Status.Allocation == nil:
		return true, nil
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver == DriverName && r.Pool == d.o.Node {
			return false, nil
		}
	}
	return true, nil
}
