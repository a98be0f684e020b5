// SPDX-License-Identifier: Apache-2.0

// Package nri is the front end for schedulers that are not Kubernetes' own: it gives a container what such a scheduler decided (package
// decision), as the container engine creates it.
//
// It is a plugin of the engine's NRI (containerd, CRI-O). The engine says which container of which pod it is, which no tenant can; the API
// server says what the scheduler wrote into that pod, and whether anybody else could have. What comes of it is the hook in config.json by
// which a claim's share travels (package alloc), so cgpu-runtime, and any other runtime, does with it what it does with a claim's.
//
// It only ever adds a share. Where it is not there, or does not answer, a container has none, and with it no GPU of cgpu's.
package nri

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
)

// Options of Start.
type Options struct {
	Node   string // this node in the cluster
	Client kubernetes.Interface
	// Socket is the engine's, such as /var/run/nri/nri.sock.
	Socket    string
	Scheduler *decision.Scheduler
	RunDir    string // refusals are events there, which the agent tells the pod
	Hook      string // path of cgpu-hook on the host; empty: as the table tells
	Table     *device.Table
	Log       *slog.Logger
}

const (
	// askAtMost is less than the two seconds that engines wait for a plugin unless they are told otherwise.
	askAtMost = 1500 * time.Millisecond
	// checkEvery is how often the policy is looked at, so that the node says that it is missing before a pod is refused for it.
	checkEvery = 30 * time.Second
	// An engine that cannot take the plugin in is asked again after retryAfter, then after twice as long, up to retryAtMost: each try
	// has it send all that it runs, and some versions end of that (docs/schedulers.md).
	retryAfter  = 2 * time.Second
	retryAtMost = 5 * time.Minute
	// maxNothing bounds what is remembered of containers that get nothing.
	maxNothing = 4096
)

// Plugin is a running front end.
type Plugin struct {
	o      Options
	cancel context.CancelFunc
	ended  sync.WaitGroup

	mu        sync.Mutex
	table     *device.Table
	connected error // nil: it is
	guarded   error // nil: the policy is in force, as far as the API server told last
	nothing   map[containerOf]bool
}

// containerOf is a container of a pod, by the pod's UID.
type containerOf struct{ uid, name string }

// Start connects to the engine, now and whenever it is there again, until ctx ends or Stop is called.
func Start(ctx context.Context, o Options) (*Plugin, error) {
	if !filepath.IsAbs(o.Socket) {
		return nil, fmt.Errorf("nri: socket %q: want an absolute path, such as /var/run/nri/nri.sock", o.Socket)
	}
	p := &Plugin{o: o, connected: errors.New("nri: is being started"),
		guarded: fmt.Errorf("nri: policy %s: is not read yet: can the API server be reached?", o.Scheduler.PolicyName())}
	if err := p.Update(ctx, o.Table); err != nil {
		return nil, err
	}
	ctx, p.cancel = context.WithCancel(ctx)
	p.ended.Go(func() { p.serve(ctx) })
	p.ended.Go(func() { p.watchPolicy(ctx) })
	return p, nil
}

// Update has another table go by.
func (p *Plugin) Update(_ context.Context, table *device.Table) error {
	if len(table.GPUs) > 0 && table.Config.Pods != device.PodsAllocated {
		return fmt.Errorf(`nri: pods = %q in cgpu.toml: want "allocated", or authors of pods take GPUs past the scheduler: `+
			"cgpu install containerd --kubernetes", table.Config.Pods)
	}
	if len(table.GPUs) > 0 && cmp.Or(p.o.Hook, table.Hook) == "" {
		return errors.New("nri: the node table does not tell where cgpu-hook is: run cgpu refresh on the node, or set --hook")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table = table
	return nil
}

// Healthy is nil while pods are given what was decided.
func (p *Plugin) Healthy() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return cmp.Or(p.guarded, p.connected)
}

// Stop ends the plugin. Containers keep what they have.
func (p *Plugin) Stop() {
	p.cancel()
	p.ended.Wait()
}

// set notes how one of the two things is that pods depend on.
func (p *Plugin) set(to *error, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && fmt.Sprint(*to) != err.Error() {
		p.o.Log.Warn("not served", "err", err)
	}
	*to = err
}

// serve is connected to the engine whenever that is there.
func (p *Plugin) serve(ctx context.Context) {
	for wait := time.Duration(0); ctx.Err() == nil; {
		registered, err := p.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		p.set(&p.connected, fmt.Errorf("nri: %s: %w", p.o.Socket, err))
		wait = nextWait(wait, registered, err)
		pause(ctx, wait)
	}
}

// nextWait is how long to wait before the next connection: the longer, the more often the engine did not take the plugin in. That it is
// away changes nothing: it may be away because of that.
func nextWait(last time.Duration, registered bool, err error) time.Duration {
	switch {
	case registered || last == 0:
		return retryAfter
	case errors.Is(err, errNotTaken):
		return min(2*last, retryAtMost)
	default:
		return last
	}
}

// errNotTaken is of an engine that was there, and did not take the plugin in.
var errNotTaken = errors.New("the engine ended the connection before it had sent what runs on the node: its log has the reason; " +
	"do containers have very large environments?")

// connect is one connection, from its beginning to its end, and whether the engine took the plugin in. An engine that knows of it lets a
// container fail whose request the plugin did not answer.
//
// Before that the engine sends all pods and containers that it has, with their variables and annotations, and ends the connection where
// it cannot. It tells nobody when it is done, but gives itself no more than the time of a request. (A handler of what is sent would be
// told, but for that the library keeps everything in memory.)
func (p *Plugin) connect(ctx context.Context) (registered bool, err error) {
	lost, once := make(chan struct{}), sync.Once{}
	s, err := stub.New(&handler{p}, stub.WithPluginName("cgpu"), stub.WithPluginIdx("90"), stub.WithSocketPath(p.o.Socket),
		stub.WithLogger(quiet{p.o.Log}), stub.WithOnClose(func() { once.Do(func() { close(lost) }) }),
		stub.WithFailurePolicy(&api.FailurePolicy{FailRequest: true, KeepConnected: true}))
	if err != nil {
		return false, err
	}
	if err := s.Start(ctx); err != nil {
		return false, fmt.Errorf("%w: is NRI switched on in the engine? containerd 1.7 has it off", err)
	}
	defer s.Stop()
	select {
	case <-lost:
		return false, errNotTaken
	case <-ctx.Done():
		return false, ctx.Err()
	case <-time.After(2 * s.RequestTimeout()): // it may begin a moment late
	}
	p.set(&p.connected, nil)
	p.o.Log.Info("connected to the engine", "socket", p.o.Socket, "scheduler", p.o.Scheduler.Name)
	select {
	case <-lost:
		return true, errors.New("the connection is lost: does the engine run?")
	case <-ctx.Done():
		return true, ctx.Err()
	}
}

func (p *Plugin) watchPolicy(ctx context.Context) {
	for ctx.Err() == nil {
		asked, cancel := context.WithTimeout(ctx, askAtMost)
		_, _ = p.since(asked)
		cancel()
		pause(ctx, checkEvery)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// handler answers the engine.
type handler struct{ p *Plugin }

// CreateContainer adds what was decided. An error keeps the container from being created, and the kubelet tries again.
func (h *handler) CreateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment,
	[]*api.ContainerUpdate, error) {
	// These are the annotations that the pod had when the kubelet was given it. They say whether there is anything to ask for, and no more.
	if !h.p.o.Scheduler.Decides(pod.GetAnnotations(), c.GetName()) || h.p.hasNothing(pod, c) {
		return nil, nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askAtMost)
	defer cancel()
	shares, err := h.p.decided(ctx, pod.GetNamespace(), pod.GetName(), pod.GetUid(), c.GetName())
	if err != nil {
		h.p.refuse(pod, c, err)
		return nil, nil, err
	}
	if len(shares) == 0 {
		h.p.remember(pod, c)
		return nil, nil, nil
	}
	hooks := &api.Hooks{}
	for _, s := range shares {
		hooks.CreateRuntime = append(hooks.CreateRuntime, &api.Hook{Path: h.p.hook(), Args: alloc.HookArgs(s)})
	}
	adjust := &api.ContainerAdjustment{}
	adjust.AddHooks(hooks)
	h.p.o.Log.Info("given", "pod", pod.GetNamespace()+"/"+pod.GetName(), "container", c.GetName(), "shares", alloc.Annotate(shares))
	return adjust, nil, nil
}

// hasNothing says whether it is known that the container gets nothing: its pod has a decision, and another container has the GPU. The
// engine creates one container at a time, and would wait for the API server each time this one restarts.
func (p *Plugin) hasNothing(pod *api.PodSandbox, c *api.Container) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nothing[containerOf{pod.GetUid(), c.GetName()}]
}

func (p *Plugin) remember(pod *api.PodSandbox, c *api.Container) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.nothing == nil || len(p.nothing) >= maxNothing {
		p.nothing = map[containerOf]bool{}
	}
	p.nothing[containerOf{pod.GetUid(), c.GetName()}] = true
}

func (p *Plugin) hook() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return cmp.Or(p.o.Hook, p.table.Hook)
}

// refuse tells the pod's people. The kubelet tells them too, but of its last try only.
func (p *Plugin) refuse(pod *api.PodSandbox, c *api.Container, err error) {
	name := strings.Join([]string{pod.GetNamespace(), pod.GetName(), c.GetName()}, "/")
	p.o.Log.Warn("refused", "container", name, "err", err)
	if err := event.Refuse(p.o.RunDir, event.Event{Container: c.GetId(), Name: name, Text: err.Error()}); err != nil {
		p.o.Log.Warn("an event is lost", "err", err)
	}
}

// decided is what the scheduler gave to a container, as the API server has it now.
func (p *Plugin) decided(ctx context.Context, namespace, name, uid, container string) ([]alloc.Share, error) {
	since, err := p.since(ctx)
	if err != nil {
		return nil, err
	}
	pod, err := getPod(ctx, p.o.Client, p.o.Scheduler, namespace, name)
	if err != nil {
		return nil, err
	}
	if pod.UID != uid {
		return nil, fmt.Errorf("nri: pod %s/%s: the API server has another one of this name", namespace, name)
	}
	if err := p.o.Scheduler.Old(pod, since); err != nil {
		return nil, err
	}
	p.mu.Lock()
	gpus := slices.Clone(p.table.GPUs)
	p.mu.Unlock()
	return p.o.Scheduler.Shares(pod, container, p.o.Node, gpus)
}

// quiet has the library's news in the agent's log, at a level that is not shown.
type quiet struct{ log *slog.Logger }

func (q quiet) Debugf(ctx context.Context, format string, args ...any) {
	q.log.DebugContext(ctx, fmt.Sprintf(format, args...))
}
func (q quiet) Infof(ctx context.Context, format string, args ...any) { q.Debugf(ctx, format, args...) }
func (q quiet) Warnf(ctx context.Context, format string, args ...any) { q.Debugf(ctx, format, args...) }
func (q quiet) Errorf(ctx context.Context, format string, args ...any) {
	q.Debugf(ctx, format, args...)
}
