// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"time"

	"google.golang.org/grpc"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
)

const (
	// healthTimeout is for how long the kubelet believes what it was told; healthEvery is how often it is told.
	healthTimeout = 30 * time.Second
	healthEvery   = 10 * time.Second
)

// NodeWatchResources tells the kubelet how the devices are, at once and whenever it changes: it writes that into the status of
// the pods that have them (feature gate ResourceHealthStatus).
func (p plugin) NodeWatchResources(_ *drahealth.NodeWatchResourcesRequest,
	stream grpc.ServerStreamingServer[drahealth.NodeWatchResourcesResponse]) error {
	for {
		p.d.mu.Lock()
		changed := p.d.changed
		p.d.mu.Unlock()
		if err := stream.Send(healthOf(p.d.node(), time.Now())); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-p.d.done:
			return nil
		case <-changed:
		case <-time.After(healthEvery):
		}
	}
}

// healthOf is the health of all devices.
func healthOf(n node, now time.Time) *drahealth.NodeWatchResourcesResponse {
	r := &drahealth.NodeWatchResourcesResponse{}
	for _, g := range n.table.GPUs {
		if n.ours != nil && !n.ours(g) {
			continue
		}
		h := &drahealth.DeviceHealth{Device: &drahealth.DeviceIdentifier{PoolName: n.name, DeviceName: deviceName(g)},
			Health:          drahealth.HealthStatus_HEALTHY,
			LastUpdatedTime: now.Unix(), HealthCheckTimeoutSeconds: int64(healthTimeout / time.Second), Message: g.Fault}
		if g.Fault != "" {
			h.Health = drahealth.HealthStatus_UNHEALTHY
		}
		r.Devices = append(r.Devices, h)
	}
	return r
}
