// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin serves aliyun.com/gpu-mem and aliyun.com/gpu-core.percentage to the kubelet, for clusters without
// DRA and for pods written for gpushare or for ACK.
//
// The device ids are the booking. Each id is one unit of one GPU, and Allocate answers a share of that GPU alone whose ids
// the kubelet has taken; ids of several GPUs are refused unless the container asked for several. So what is free on a GPU is
// what the kubelet says, over restarts of the kubelet and of the plugin, and the plugin keeps no books that could differ.
// GetPreferredAllocation, which the kubelet follows, does the placing. The API server is asked only for what a device id
// cannot say: which GPU gpushare's extender chose, how many GPUs, what else the container wants.
//
// card.go: ids of a table's GPUs · place.go: which GPU · pods.go: which container · answer.go: what the container gets ·
// share.go: how many containers, which percentages ·
// serve.go: the kubelet's calls · kubelet.go: sockets and registration · annotate.go: gpushare's annotations.
package deviceplugin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Options of Start.
type Options struct {
	// Node is the name of this node in the cluster.
	Node string
	// Client reaches the API server; nil: the plugin goes by device ids alone, writes no annotations of gpushare and no
	// aliyun.com/gpu-count. It needs: patch pods, get nodes, patch nodes/status.
	Client kubernetes.Interface
	// Pods are the node's; false as long as they are not known. Nil: as without a Client.
	Pods func() ([]Pod, bool)
	// Tell warns a pod's people of one of its containers; nil: they are not told.
	Tell func(pod *Pod, container, text string)
	// RunDir keeps deviceplugin.json: unit and order of GPUs, which must not change below running pods.
	RunDir string
	// KubeletDir is the folder of kubelet.sock. The kubelet's PodResources socket is expected in ../pod-resources.
	KubeletDir string
	// Unit of aliyun.com/gpu-mem: whole MiB; GiB where zero.
	Unit quota.Bytes
	// Names are what pods call the resources.
	Names Names
	// GPUs says which GPUs of the table are the plugin's; nil: all.
	GPUs  func(device.GPU) bool
	Table *device.Table
	Log   *slog.Logger // nil: nothing is logged
}

// Plugin is a running device plugin.
type Plugin struct {
	o       Options
	sys     string // /sys
	log     *slog.Logger
	servers []*server
	cancel  context.CancelFunc
	ended   sync.WaitGroup
	// poke wakes the annotator: something was allocated, or the table is another.
	poke      chan struct{}
	annotated annotated

	// calls has one place, which a call of the kubelet holds from its beginning to its end: what one call chose, the next has
	// to know.
	calls      chan struct{}
	allocState allocState

	mu sync.Mutex // of what follows
	// cards are replaced, never changed.
	cards     []card
	placement string
	card      sched.Card    // how GPUs are shared that have no settings of their own
	changed   chan struct{} // closed when cards are others
	withheld  error         // why no GPU is offered
	byLabel   string        // the placement that a label of the node says; empty: none
	faults    map[string]error
}

// Start serves the plugin until ctx ends or Stop is called. The kubelet need not be there yet.
func Start(ctx context.Context, o Options) (*Plugin, error) {
	return start(ctx, o, "/sys")
}

func start(ctx context.Context, o Options, sys string) (*Plugin, error) {
	if o.Unit == 0 {
		o.Unit = quota.GiB
	}
	switch {
	case o.Unit%quota.MiB != 0:
		return nil, fmt.Errorf("deviceplugin: unit %v: want whole MiB", o.Unit)
	case o.Node == "" && o.Client != nil:
		return nil, errors.New("deviceplugin: node: is empty: name the node, to find its pods")
	case !filepath.IsAbs(o.KubeletDir):
		return nil, fmt.Errorf("deviceplugin: kubelet folder %q: want an absolute path, such as /var/lib/kubelet/device-plugins", o.KubeletDir)
	case o.Table == nil:
		return nil, errors.New("deviceplugin: no node table")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Tell == nil {
		o.Tell = func(*Pod, string, string) {}
	}
	p := &Plugin{
		o: o, sys: sys, log: o.Log.With("part", "deviceplugin"), poke: make(chan struct{}, 1), changed: make(chan struct{}),
		faults: map[string]error{}, calls: make(chan struct{}, 1), allocState: newAllocState(),
	}
	if err := p.use(ctx, o.Table); err != nil {
		return nil, err
	}
	ctx, p.cancel = context.WithCancel(ctx)
	for _, resource := range []string{ResourceMemory, ResourcePercent} {
		s := &server{p: p, resource: resource}
		p.servers = append(p.servers, s)
		p.fault(resource, errors.New("the kubelet was not seen yet"))
		p.ended.Go(func() { s.keep(ctx) })
	}
	p.ended.Go(func() { p.annotate(ctx) })
	return p, nil
}

// Update tells the kubelet of another table: a GPU that is gone becomes unhealthy.
func (p *Plugin) Update(ctx context.Context, table *device.Table) error {
	return p.use(ctx, table)
}

// use makes a table the one that is served.
func (p *Plugin) use(ctx context.Context, table *device.Table) error {
	if table == nil {
		return errors.New("deviceplugin: no node table")
	}
	kept, err := readKept(p.o.RunDir)
	if err != nil {
		return err
	}
	if kept.Unit != 0 && kept.Unit != p.o.Unit {
		booked, err := p.booked(ctx, ResourceMemory)
		if err != nil {
			return fmt.Errorf("deviceplugin: unit %v: was %v, and it is not known whether containers of this node hold units of that: %w",
				p.o.Unit, kept.Unit, err)
		}
		if err := p.sameUnit(booked); err != nil {
			return err
		}
	}
	cards, err := makeCards(table, p.o.GPUs, p.o.Unit, p.stays(kept, table))
	if err != nil {
		return err
	}
	for i, c := range cards {
		if !c.gone {
			cards[i].place = readPlace(p.sys, c.GPU)
		}
	}
	if err := fits(devices(ResourceMemory, cards, nil), cards, p.o.Unit); err != nil {
		return err
	}
	now := kept
	now.Unit, now.GPUs = p.o.Unit, nil
	for _, c := range cards {
		now.GPUs = append(now.GPUs, c.UUID)
	}
	if now.Unit != kept.Unit || !slices.Equal(now.GPUs, kept.GPUs) {
		if err := now.write(p.o.RunDir); err != nil {
			return err
		}
	}
	p.mu.Lock()
	p.cards, p.placement, p.card = cards, table.Config.Placement, table.Config.Card()
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	p.wake()
	return nil
}

// stays are the GPUs whose positions stay. A GPU that is in the table, but the plugin's no more, was given to the other
// front end on purpose: it leaves.
func (p *Plugin) stays(k kept, table *device.Table) (uuids []string) {
	for _, uuid := range k.GPUs {
		i := slices.IndexFunc(table.GPUs, func(g device.GPU) bool { return g.UUID == uuid })
		if i < 0 || p.o.GPUs == nil || p.o.GPUs(table.GPUs[i]) {
			uuids = append(uuids, uuid)
		}
	}
	return uuids
}

// Healthy is nil while the kubelet knows the plugin. A node that cannot have shares of it is no fault, and another front end may serve it:
// Limited tells that.
func (p *Plugin) Healthy() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.withheld != nil && !errors.Is(p.withheld, errCRIO) {
		return p.withheld
	}
	for _, resource := range []string{ResourceMemory, ResourcePercent} {
		if err := p.faults[resource]; err != nil {
			return fmt.Errorf("deviceplugin: %s: %w", resource, err)
		}
	}
	return nil
}

// Limited is what pods do not get on this node, for its condition.
func (p *Plugin) Limited() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if errors.Is(p.withheld, errCRIO) {
		return errCRIO.Error()
	}
	return ""
}

// Stop ends the plugin. What it allocated stays, and the kubelet keeps it booked.
func (p *Plugin) Stop() {
	p.cancel()
	p.ended.Wait()
}

// errShared answers gpushare's label for nodes without isolation. There the limit is a mere number: pods share the whole
// GPU. A share of cgpu is a limit, so it is either the pod's own or no promise at all; and giving out limits where a node
// says that there are none would break pods that rely on the label.
var errShared = errors.New("deviceplugin: the node's label cgpu.disable.isolation=true asks for GPUs shared without isolation, " +
	"which cgpu does not give: remove the label, or leave the node to gpushare's own device plugin")

// errCRIO: cgpu-runtime refuses what a device plugin allocates below CRI-O, which hands all annotations of a pod to it, so that those
// by which that is told could be the author's. The node offers no unit, instead of pods that are placed there and fail.
var errCRIO = errors.New("below CRI-O no pod can have aliyun.com/gpu-mem, so none is offered: its author could write what was allocated; " +
	"use claims there (--frontends dra)")

// fault notes why the kubelet does not know a resource; nil: it does.
func (p *Plugin) fault(resource string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && fmt.Sprint(p.faults[resource]) != err.Error() {
		p.log.Warn("not served", "resource", resource, "err", err)
	}
	p.faults[resource] = err
}

// state is what one call goes by.
func (p *Plugin) state() (cards []card, placement string, def sched.Card, changed chan struct{}, withheld error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cards, cmp.Or(p.byLabel, p.placement), p.card, p.changed, p.withheld
}

// follow does as the node says: withholds its GPUs for a reason, or offers them again if it is nil, placed so.
func (p *Plugin) follow(withheld error, placement string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if fmt.Sprint(p.withheld) == fmt.Sprint(withheld) && p.byLabel == placement {
		return
	}
	p.withheld, p.byLabel = withheld, placement
	if withheld != nil {
		p.log.Error("no GPU is offered", "err", withheld)
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Plugin) wake() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// kept is deviceplugin.json in the run dir. It goes with the boot, as the run dir does.
type kept struct {
	Unit quota.Bytes `json:"unit"`
	GPUs []string    `json:"gpus"` // UUIDs by position
}

func keptFile(runDir string) string { return filepath.Join(runDir, "deviceplugin.json") }

func readKept(runDir string) (k kept, err error) {
	text, err := os.ReadFile(keptFile(runDir))
	if errors.Is(err, fs.ErrNotExist) {
		return kept{}, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &k)
	}
	if err != nil {
		return kept{}, fmt.Errorf("deviceplugin: %s: %w", keptFile(runDir), err)
	}
	return k, nil
}

func (k kept) write(runDir string) error {
	text, err := json.Marshal(k)
	if err != nil {
		return fmt.Errorf("deviceplugin: %w", err)
	}
	if err := device.MakeRunDir(runDir); err != nil {
		return err
	}
	if err := atomicfile.Write(keptFile(runDir), text, 0o600); err != nil { // there is one agent
		return fmt.Errorf("deviceplugin: %w", err)
	}
	return nil
}

// How long things may take. The kubelet admits one pod at a time, and waits for each call without a limit of its own.
const (
	apiTimeout = 3 * time.Second
	// holderTimeout: a list of 180,000 to 240,000 containers took 0.8 to 2.1 s on two busy cores.
	holderTimeout = 3 * time.Second
	meetTimeout   = time.Second // before a registration: while it waits, the kubelet refuses pods
	callTimeout   = 8 * time.Second
)
