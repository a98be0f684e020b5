// SPDX-License-Identifier: Apache-2.0

// Package agent is the node's part of cgpu in a Kubernetes cluster: it runs the front ends through which pods are allocated
// shares of GPUs, tells the API server how the node is, and applies what annotations of running pods ask for.
//
// It is in nobody's way: guards and containers live without it. What it knows is in the API server, the ledger and the CDI
// files of the front ends, so it can be killed and started at any moment.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/exporter"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/web"
)

// Options of Run.
type Options struct {
	Node   string // name of the Node object
	Client kubernetes.Interface
	RunDir string
	// Pods are the node's, if a front end is given them too; nil: the agent makes the watch of them.
	Pods *Pods
	// FrontEnds are started once there is a table of the node.
	FrontEnds []FrontEnd
	// Division says which has which GPU; nil: the front ends know.
	Division *Division
	// Health is where /healthz, /readyz and /metrics answer, such as ":9470"; empty: nowhere.
	Health string
	// Probe is the socket at which AskProbe asks; empty: none.
	Probe string
	// SMI: who reaches Health may ask /v1/smi too, and is told of containers in /metrics: names, limits and use.
	SMI bool
	// Web: and look at the page of `cgpu web` there, at /web/.
	Web     bool
	Version string
	Log     *slog.Logger
	// Metrics are the figures of /metrics; nil: the agent's own alone. A part that has figures registers a source.
	Metrics *Metrics
}

// lookEvery is how often the agent looks at the node table, the driver and the front ends. It costs a stat and two reads of
// kernel files; a driver that goes away sends no message. Whether GPUs are said to be unhealthy costs a stat, and is looked at
// more often.
const (
	lookEvery   = 5 * time.Second
	faultsEvery = time.Second
)

// Run is the agent, until ctx ends. What fails is tried again: an agent that exits because a table or an API server is not
// there yet would only be started again.
func Run(ctx context.Context, o Options) error {
	metrics := metricsOf(o)
	a := &agent{Options: o, metrics: metrics, started: time.Now()}
	a.looked.Store(time.Now())

	var parts sync.WaitGroup
	defer parts.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // before the wait

	if o.Web {
		a.page = pageOf(o)
		parts.Go(func() { a.page.Run(ctx) })
	}
	if o.Health != "" {
		stop, err := serveHealth(o.Health, a)
		if err != nil {
			return err
		}
		defer stop()
	}
	if o.Probe != "" {
		parts.Go(func() { serveProbe(ctx, o.Probe, a) })
	}
	pods := o.Pods
	if pods == nil {
		pods = NewPods(o.Client, o.Node, deviceplugin.Names{}, o.Log)
	}
	news := newPodEvents(ctx, o.Client, o.Node, pods, metrics, o.Log)
	resizer := newResizer(o.RunDir, pods, namespacesOf(o.Client), news, metrics, o.Log)
	conditions := newReporter(o.Client, o.Node, news, metrics, o.Log)
	a.reporter, a.resizer = conditions, resizer

	parts.Go(func() { pods.run(ctx) })
	parts.Go(func() { news.follow(ctx, o.RunDir) })
	parts.Go(func() { resizer.run(ctx) })
	parts.Go(func() { conditions.run(ctx) })

	a.watchNode(ctx)
	// The front ends end last: what they serve outlives them, but a kubelet that asks is answered as long as can be.
	for _, f := range a.running {
		f.stop(a.Log)
	}
	return nil
}

// metricsOf are the figures of an agent, with those of the node's containers where they may be told.
func metricsOf(o Options) *Metrics {
	m := o.Metrics
	if m == nil {
		m = NewMetrics()
	}
	if o.SMI {
		m.Register(exporter.New(exporter.Options{RunDir: o.RunDir, Version: o.Version}).Text)
	}
	return m
}

// pageOf is the page of `cgpu web`. It has no names: requests are for an address, or for localhost, where kubectl port-forward
// begins.
func pageOf(o Options) *web.Page {
	names := new(snapshot.Names)
	return web.New(web.Options{Host: o.Node, Version: o.Version,
		Look: func() (snapshot.View, error) { return snapshot.Look(o.RunDir, nil, names) }})
}

// agent is what Run keeps between two looks.
type agent struct {
	Options
	metrics  *Metrics
	reporter *reporter
	resizer  *resizer
	started  time.Time
	page     *web.Page // nil: none
	looked   clock     // when keep last looked
	running  []*front
	table    *watcher
	faults   *faults
	apart    bool // the table's GPUs are divided among the front ends

	mu    sync.Mutex
	state State // of the last look
}

// watchNode follows the node until ctx ends.
func (a *agent) watchNode(ctx context.Context) {
	a.table = newWatcher(a.RunDir)
	for _, f := range a.FrontEnds {
		a.running = append(a.running, &front{FrontEnd: f})
	}
	tick := time.NewTicker(faultsEvery)
	defer tick.Stop()
	for n := 0; ; n++ {
		if n%int(lookEvery/faultsEvery) == 0 || a.faults.differs() {
			a.refresh(ctx)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// refresh takes one look: at the table, then at what hangs on it.
func (a *agent) refresh(ctx context.Context) {
	table, changed, err := a.table.load()
	s := State{Table: table, TableErr: err}
	if changed {
		a.logTable(table, err)
		a.resizer.use(table)
	}
	if a.faults == nil {
		a.faults = &faults{runDir: a.RunDir, log: a.Log}
	}
	undivided := a.divide(table, changed)
	marked, sick := a.faults.mark(table)
	s.Table = marked
	offered := offered(marked)
	for _, f := range a.running {
		f.follow(ctx, offered, changed || sick, undivided, a.Log)
		s.Fronts = append(s.Fronts, FrontState{Name: f.Name, Err: f.err, Limited: f.limited(), Shared: f.shared(table)})
	}
	a.mu.Lock()
	a.state = s
	a.mu.Unlock()
	a.looked.Store(time.Now())
	a.reporter.report(s)
}

// divide has it looked up whose the GPUs of a table are, until that has gone well once.
func (a *agent) divide(table *device.Table, changed bool) error {
	a.apart = a.apart && !changed
	if a.Division == nil || table == nil || a.apart {
		return nil
	}
	if err := a.Division.Resolve(table.GPUs); err != nil {
		return err
	}
	a.apart = true
	return nil
}

// logTable logs another table, or that there is none.
func (a *agent) logTable(table *device.Table, err error) {
	if err != nil {
		a.Log.Warn("no usable node table", "err", err, "remedy", refreshRemedy)
		return
	}
	a.Log.Info("node table", "driver", table.DriverVersion, "gpus", len(table.GPUs))
	if podsOpen(table) {
		a.Log.Warn(openText)
	}
	if err := unknownDriver(table); err != nil {
		a.Log.Warn("no GPU is offered", "err", err)
	}
}

// ready is nil when every front end serves.
func (a *agent) ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state.TableErr != nil {
		return a.state.TableErr
	}
	if a.state.Table == nil {
		return errors.New("agent: the node was not looked at yet")
	}
	for _, f := range a.state.Fronts {
		if f.Err != nil {
			return fmt.Errorf("agent: front end %s: %w", f.Name, f.Err)
		}
	}
	return nil
}

// stuck is how long a look may take before the agent counts as hung. A front end's start waits for the API server.
const stuck = 5 * time.Minute

// alive is nil as long as the agent looks after its node.
func (a *agent) alive() error {
	if age := time.Since(a.looked.Load()); age > stuck {
		return fmt.Errorf("agent: has not looked at the node for %v", age.Round(time.Second))
	}
	return nil
}
