// SPDX-License-Identifier: Apache-2.0

// Package dra is the driver gpu.cgpu.io of Kubernetes' Dynamic Resource Allocation: it publishes the node's GPUs as devices
// that several claims share, and turns an allocated claim into the CDI spec from which cgpu-runtime takes its quota.
//
// What a claim gets is decided in pure functions (Resources, node.shares, cdiSpec, engine.check); the effects are the files
// in the CDI folder (cdi.go) and the calls of the library kubeletplugin.
package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// DriverName is the name of the driver in slices, claims and classes.
const DriverName = "gpu.cgpu.io"

// callTimeout bounds a call of the API server or of the container runtime.
const callTimeout = 10 * time.Second

// Options say where the driver runs. All folders must be absolute.
type Options struct {
	Node        string               // name of the Node object
	Client      kubernetes.Interface // with the rights that docs/internals/dra.md lists
	RunDir      string               // /run/cgpu, whose ledger tells how each GPU is shared
	CDIDir      string               // a folder that the container runtime reads CDI specs from: /var/run/cdi
	PluginDir   string               // the kubelet's folder of plugins: /var/lib/kubelet/plugins
	RegistryDir string               // the kubelet's folder of registrations: /var/lib/kubelet/plugins_registry
	Hook        string               // path of cgpu-hook on the host; empty: as the table tells
	// CRISocket is where the node's container runtime answers; empty: /run/containerd/containerd.sock where there is one,
	// else what the Node object says of the runtime.
	CRISocket string
	// PodUID is the UID of the agent's pod; set, two agents may run side by side while a DaemonSet is updated.
	PodUID string
	GPUs   func(device.GPU) bool // which GPUs are this front end's; nil: all
	Table  *device.Table
	Log    *slog.Logger  // nil: none
	Sys    fs.ReadLinkFS // sysfs; nil: /sys
}

func (o *Options) complete() error {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Sys == nil {
		o.Sys = os.DirFS("/sys").(fs.ReadLinkFS)
	}
	switch {
	case o.Node == "":
		return errors.New("dra: Node is empty: want the name of the Node object")
	case o.Client == nil:
		return errors.New("dra: Client is nil: want a client of the API server")
	case o.Table == nil:
		return errors.New("dra: Table is nil: want the node's table (cgpu refresh)")
	}
	if o.Hook == "" && o.Table.Hook == "" {
		return errors.New("dra: Hook is empty, and the node table does not tell where cgpu-hook is: run cgpu refresh on the node, or set it")
	}
	for name, path := range map[string]string{"CDIDir": o.CDIDir, "PluginDir": o.PluginDir, "RegistryDir": o.RegistryDir,
		"Hook": o.hook(o.Table)} {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("dra: %s %q: want an absolute path", name, path)
		}
	}
	return nil
}

// hook is the path of cgpu-hook on the host: the table's, which an upgrade may have changed since, unless it was set.
func (o *Options) hook(table *device.Table) string { return cmp.Or(o.Hook, table.Hook) }

// Driver is the running driver.
type Driver struct {
	o      Options
	cdi    cdiFolder
	helper *kubeletplugin.Helper
	cancel context.CancelFunc
	sweeps sync.WaitGroup // the sweep at the start
	parts  sync.WaitGroup // what else runs in the background

	preparing chan struct{} // has one place, for the claim that is read

	files sync.Mutex // for a change of the specs: the sweep looks, and removes what it saw

	publishing sync.Mutex                                   // keeps what is published in the order in which it was learned
	published  *resourceslice.Controller                    // writes the slices
	looks      workqueue.TypedRateLimitingInterface[string] // of pools, for published to look after
	ledger     os.FileInfo                                  // as it was when it was read; lookAtLedger alone has it
	anew       atomic.Bool                                  // what is published is to be another

	done <-chan struct{} // closed by Stop

	mu      sync.Mutex
	table   *device.Table
	changed chan struct{} // closed when there is another table
	// untaintable: the API server drops taints, so that a GPU that is unhealthy is left out.
	untaintable  bool
	limited      string                 // what claims do not get here
	cards        map[string]sched.Card  // settings of GPUs, by UUID
	taken        map[string]quota.Bytes // of GPUs' memory, by containers
	registeredAt time.Time              // when the kubelet last registered the driver
	// failed ends the driver's service; refused is why the kubelet did not register it, invalid why the API server did
	// not take the slices when it was last asked.
	failed, refused, invalid error
	invalidAt                time.Time
}

// Start registers the driver with the kubelet and publishes the GPUs. It fails where the node's container runtime would
// ignore CDI devices.
func Start(ctx context.Context, o Options) (*Driver, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	o.Client = slim(o.Client)
	e, err := askEngine(ctx, o.Client, o.Node, o.CRISocket)
	if err != nil {
		return nil, err
	}
	if err := e.check(o.CDIDir); err != nil {
		return nil, err
	}
	if e.believed {
		o.Log.Warn("the container runtime was not asked whether it takes CDI devices, and is taken to be as it is by default",
			"runtime", e.name+" "+e.version, "remedy", "mount its socket: deploy/components/cri-socket")
	}
	dir := filepath.Join(o.PluginDir, DriverName)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("dra: %w", err)
	}
	if err := os.MkdirAll(o.CDIDir, 0o755); err != nil {
		return nil, fmt.Errorf("dra: %w", err)
	}
	if err := removeDead(o.RegistryDir, dir, o.Log); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	d := &Driver{o: o, cdi: cdiFolder{dir: o.CDIDir}, cancel: cancel, table: o.Table, changed: make(chan struct{}), done: ctx.Done(),
		preparing: make(chan struct{}, 1)}
	if _, err := d.lookAtLedger(); err != nil {
		// Prepared with the node's defaults, a claim may be refused by the ledger, which is no reason to serve none.
		o.Log.Error("settings of the GPUs are not known", "error", err)
	}
	d.helper, err = kubeletplugin.Start(ctx, plugin{d: d},
		kubeletplugin.DriverName(DriverName),
		kubeletplugin.NodeName(o.Node),
		kubeletplugin.KubeClient(o.Client),
		kubeletplugin.PluginDataDirectoryPath(dir),
		kubeletplugin.RegistrarDirectoryPath(o.RegistryDir),
		kubeletplugin.RollingUpdate(types.UID(o.PodUID)),
		kubeletplugin.GRPCInterceptor(d.registered),
		kubeletplugin.GRPCInterceptor(d.oneByOne),
		kubeletplugin.NodeV1beta1(false), // kubelets that speak it alone are older than what the driver needs
	)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("dra: %w", err)
	}
	if err := d.startPublishing(ctx); err != nil {
		d.Stop()
		return nil, err
	}
	d.sweeps.Go(func() { d.sweep(ctx) })
	d.parts.Go(func() { d.follow(ctx) })
	o.Log.Info("driver runs", "driver", DriverName, "node", o.Node, "runtime", e.name+" "+e.version)
	return d, nil
}

// Update publishes the GPUs of another table. A GPU that vanished from it goes from the slice, and claims that have it are
// refused from now on.
func (d *Driver) Update(_ context.Context, table *device.Table) error {
	if table == nil {
		return errors.New("dra: table is nil")
	}
	d.mu.Lock()
	d.table, d.invalid = table, nil
	close(d.changed)
	d.changed = make(chan struct{})
	d.mu.Unlock()
	d.publish()
	return nil
}

func (d *Driver) node() node {
	d.mu.Lock()
	defer d.mu.Unlock()
	return node{d.o.Node, d.table, d.o.GPUs, d.cards}
}

// Healthy is nil as long as the driver serves claims; else it says why it does not.
func (d *Driver) Healthy() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.invalidAt) > invalidFor {
		d.invalid = nil
	}
	return errors.Join(d.failed, d.refused, d.invalid)
}

// Limited says what claims do not get from a driver that serves them, or nothing.
func (d *Driver) Limited() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limited
}

// Failed is not nil once a server of the driver has ended for good: only stopping it and starting another mends that. What else
// Healthy says, a restart does not mend.
func (d *Driver) Failed() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

// Stop ends the driver. Its slices stay, so that a restart of the agent changes nothing for the scheduler.
func (d *Driver) Stop() {
	d.cancel()
	d.helper.Stop()
	d.published.Stop()
	d.sweeps.Wait()
	d.parts.Wait()
}

// registered looks at what the kubelet says of the registration; the library keeps it where reading it would be a race.
func (d *Driver) registered(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if s, ok := req.(*registration.RegistrationStatus); ok {
		d.mu.Lock()
		if d.refused = nil; s.PluginRegistered {
			d.registeredAt = time.Now()
		} else {
			d.refused = fmt.Errorf("dra: the kubelet does not register the driver: %s", s.Error)
		}
		d.mu.Unlock()
		d.o.Log.Info("registration", "registered", s.PluginRegistered, "error", s.Error)
	}
	return handler(ctx, req)
}

// HandleError is called for faults of the library's servers.
func (p plugin) HandleError(_ context.Context, err error, msg string) {
	d := p.d
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.mu.Lock()
		d.failed = fmt.Errorf("dra: %s: %w", msg, err)
		d.mu.Unlock()
	}
	d.o.Log.Error(msg, "error", err)
}
