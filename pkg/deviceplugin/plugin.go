// Package deviceplugin serves aliyun.com/gpu-mem and aliyun.com/gpu-core.percentage to the kubelet, for clusters without
// DRA and for pods written for gpushare or for ACK.
package deviceplugin

import (
	"context"
	"errors"
	"log/slog"

	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Options of Start.
type Options struct {
	// Node is the name of this node in the cluster.
	Node string
	// Client reaches the API server; nil: the plugin goes by device ids alone and writes no annotations of gpushare.
	Client kubernetes.Interface
	// RunDir holds the plugin's own record of what it allocated.
	RunDir string
	// KubeletDir is the folder of kubelet.sock.
	KubeletDir string
	// Unit of aliyun.com/gpu-mem; GiB where zero.
	Unit quota.Bytes
	// GPUs says which GPUs of the table are the plugin's; nil: all.
	GPUs  func(device.GPU) bool
	Table *device.Table
	Log   *slog.Logger // nil: nothing is logged
}

// Plugin is a running device plugin.
type Plugin struct{}

// Start serves the plugin until ctx ends or Stop is called. The kubelet need not be there yet.
func Start(ctx context.Context, o Options) (*Plugin, error) {
	return nil, errors.New("deviceplugin: not yet")
}

// Update tells the kubelet of another table: a GPU that is gone becomes unhealthy.
func (p *Plugin) Update(ctx context.Context, table *device.Table) error {
	return errors.New("deviceplugin: not yet")
}

// Healthy is nil while the kubelet knows the plugin.
func (p *Plugin) Healthy() error { return errors.New("deviceplugin: not yet") }

// Stop ends the plugin; what it allocated stays.
func (p *Plugin) Stop() {}
