// Package dra is the driver gpu.cgpu.io of Kubernetes' Dynamic Resource Allocation: it publishes the node's GPUs as devices
// that several claims share, and turns an allocated claim into the CDI spec from which cgpu-runtime takes its quota.
package dra

import (
	"context"
	"errors"
	"log/slog"

	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/device"
)

// DriverName is the name of the driver in slices, claims and classes.
const DriverName = "gpu.cgpu.io"

// Options say where the driver runs. All folders must be absolute.
type Options struct {
	Node        string               // name of the Node object
	Client      kubernetes.Interface // with the rights that docs/internals/dra.md lists
	RunDir      string               // /run/cgpu
	CDIDir      string               // a folder that the container runtime reads CDI specs from: /var/run/cdi
	PluginDir   string               // the kubelet's folder of plugins: /var/lib/kubelet/plugins
	RegistryDir string               // the kubelet's folder of registrations: /var/lib/kubelet/plugins_registry
	Hook        string               // path of cgpu-hook on the host
	// CRISocket is where the node's container runtime answers; empty: /run/containerd/containerd.sock where there is one,
	// else what the Node object says of the runtime.
	CRISocket string
	// PodUID is the UID of the agent's pod; set, two agents may run side by side while a DaemonSet is updated.
	PodUID string
	GPUs   func(device.GPU) bool // which GPUs are this front end's; nil: all
	Table  *device.Table
	Log    *slog.Logger
}

// Driver is the running driver.
type Driver struct{}

// Start registers the driver with the kubelet and publishes the GPUs. It fails where the node's container runtime would
// ignore CDI devices.
func Start(ctx context.Context, o Options) (*Driver, error) {
	return nil, errors.New("dra: is not built yet")
}

// Update publishes the GPUs of another table.
func (d *Driver) Update(ctx context.Context, table *device.Table) error { return nil }

// Healthy is nil as long as the driver serves claims; else it says why it does not.
func (d *Driver) Healthy() error { return nil }

// Stop ends the driver. Its slices stay, so that a restart of the agent changes nothing for the scheduler.
func (d *Driver) Stop() {}
