// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/event"
)

// component is who reports, in Events.
const component = "cgpu-agent"

// What becomes a pod's Event, and as which. Starts and ends are not news: the kubelet tells of them.
var reasons = map[event.Kind]struct{ kind, reason string }{
	event.Refused: {v1.EventTypeWarning, "GPURefused"},
	event.Denied:  {v1.EventTypeWarning, "GPUMemoryDenied"},
	event.Killed:  {v1.EventTypeWarning, "GPUProcessKilled"},
	event.Freed:   {v1.EventTypeWarning, "GPUMemoryFreed"},
	event.Held:    {v1.EventTypeWarning, "GPUHeld"},
	event.Let:     {v1.EventTypeNormal, "GPUReleased"},
	event.Paused:  {v1.EventTypeNormal, "GPUPaused"},
	event.Resumed: {v1.EventTypeNormal, "GPUResumed"},
	event.Set:     {v1.EventTypeNormal, "GPUChanged"},
	event.Warning: {v1.EventTypeWarning, "GPUWarning"},

	event.Unhealthy: {v1.EventTypeWarning, "GPUUnhealthy"},
	event.Healthy:   {v1.EventTypeNormal, "GPUHealthy"},
}

// Reasons of Events that the agent itself has to tell.
const (
	reasonChangeRefused = "GPUChangeRefused"
)

const (
	// A pod may have podBurst Events at once and then one each podEvery, all pods of a namespace spaceBurst and then one each
	// spaceEvery, all of the node nodeBurst and then nodeRate a second. Whoever has a million allocations refused, in however many
	// pods, fills neither etcd nor his neighbours' part.
	podBurst   = 10
	podEvery   = 30 * time.Second
	spaceBurst = 20
	spaceEvery = 4 * time.Second
	nodeBurst  = 50
	nodeRate   = 2
	// maxMessage bounds an Event's text in bytes; the API server takes 1024.
	maxMessage = 768
)

// podEvents tells the API server's users what happened to their pods.
type podEvents struct {
	known    *Pods
	metrics  *Metrics
	log      *slog.Logger
	recorder record.EventRecorder
	nodeName string

	mu     sync.Mutex
	all    flowcontrol.PassiveRateLimiter
	pod    map[types.UID]flowcontrol.PassiveRateLimiter
	spaces map[string]flowcontrol.PassiveRateLimiter // by namespace
}

// newPodEvents makes the sender, which ends with ctx. client-go's recorder counts what repeats, tries again while the API server
// does not answer, and drops what is more than a thousand behind.
func newPodEvents(ctx context.Context, client kubernetes.Interface, node string, p *Pods, metrics *Metrics, log *slog.Logger) *podEvents {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{LRUCacheSize: 512}))
	broadcaster.StartRecordingToSink(&typedcore.EventSinkImpl{Interface: client.CoreV1().Events("")})
	context.AfterFunc(ctx, broadcaster.Shutdown)
	n := &podEvents{known: p, metrics: metrics, log: log, nodeName: node, recorder: broadcaster.NewRecorder(scheme.Scheme,
		v1.EventSource{Component: component, Host: node}),
		all: flowcontrol.NewTokenBucketPassiveRateLimiter(nodeRate, nodeBurst), pod: map[types.UID]flowcontrol.PassiveRateLimiter{},
		spaces: map[string]flowcontrol.PassiveRateLimiter{}}
	p.gone = append(p.gone, n.forget)
	p.news = n
	return n
}

// follow tells what is new among the node's events, until ctx ends. What was written before is not told: that was another
// agent's, and cgpu events shows it.
func (n *podEvents) follow(ctx context.Context, runDir string) {
	for tries := 0; ; tries++ {
		err := event.FollowNew(ctx, runDir, func(list []event.Event) error {
			for _, e := range list {
				n.forward(ctx, e)
			}
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		if tries == 0 {
			n.log.Warn("the node's events cannot be followed", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookEvery): // there may be no run directory yet
		}
	}
}

// forward makes a pod's Event of an event.
func (n *podEvents) forward(ctx context.Context, e event.Event) {
	as, ok := reasons[e.Kind]
	if !ok {
		return
	}
	if !n.known.synced(ctx, time.Minute) {
		n.metrics.Add("events_dropped_total", 1)
		return
	}
	pod, container := n.known.owner(e.Container, e.Name)
	if pod == nil {
		return // Docker's, or a pod's that is gone
	}
	n.send(pod, container, as.kind, as.reason, message(e))
}

// message is an event as a line.
func message(e event.Event) string {
	text := e.Text
	if e.GPU != nil {
		text = fmt.Sprintf("GPU %d: %s", e.GPU.Index, text)
	}
	if e.Count > 1 {
		text += fmt.Sprintf(" (%d times)", e.Count)
	}
	return text
}

// send tells about a container of a pod, unless the pod, or all of the node, has told too much.
func (n *podEvents) send(pod *pod, container, kind, reason, text string) {
	if !n.may(pod.Namespace, pod.UID) {
		n.metrics.Add("events_dropped_total", 1)
		return
	}
	n.metrics.Add("events_total", 1)
	n.recorder.Event(reference(pod, container), kind, reason, tidy(text, maxMessage))
}

// Tell warns of a container of a pod, as long as the pod is here. It is for front ends, which Run starts.
func (p *Pods) Tell(of *deviceplugin.Pod, container, text string) {
	one := p.get(of.Namespace + "/" + of.Name)
	if one == nil || string(one.UID) != of.UID || p.news == nil {
		return
	}
	as := reasons[event.Warning]
	p.news.send(one, container, as.kind, as.reason, text)
}

// reference names a container of a pod, as the kubelet does.
func reference(pod *pod, container string) runtime.Object {
	r := &v1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		ResourceVersion: pod.ResourceVersion}
	if container != "" {
		r.FieldPath = "spec.containers{" + container + "}"
	}
	return r
}

// may counts an Event of a pod against all bounds, the narrowest first: who is over his own takes nothing of the others'.
func (n *podEvents) may(namespace string, uid types.UID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.prune()
	return limiter(n.pod, uid, podEvery, podBurst).TryAccept() && limiter(n.spaces, namespace, spaceEvery, spaceBurst).TryAccept() &&
		n.all.TryAccept()
}

func limiter[K comparable](all map[K]flowcontrol.PassiveRateLimiter, of K, every time.Duration, burst int) flowcontrol.PassiveRateLimiter {
	if all[of] == nil {
		all[of] = flowcontrol.NewTokenBucketPassiveRateLimiter(float32(1/every.Seconds()), burst)
	}
	return all[of]
}

// prune forgets pods that are not here once they are many, and so of namespaces. An Event that was under way when its pod was deleted
// leaves such a one.
func (n *podEvents) prune() {
	if len(n.pod) < maxPods && len(n.spaces) < maxPods {
		return
	}
	pods, spaces := map[types.UID]bool{}, map[string]bool{}
	for _, o := range n.known.informer.GetStore().List() {
		if p, ok := o.(*pod); ok {
			pods[p.UID], spaces[p.Namespace] = true, true
		}
	}
	if len(n.pod) >= maxPods {
		maps.DeleteFunc(n.pod, func(uid types.UID, _ flowcontrol.PassiveRateLimiter) bool { return !pods[uid] })
	}
	if len(n.spaces) >= maxPods {
		maps.DeleteFunc(n.spaces, func(name string, _ flowcontrol.PassiveRateLimiter) bool { return !spaces[name] })
	}
}

func (n *podEvents) forget(pod *pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pod, pod.UID)
}

// node tells that the node's condition changed.
func (n *podEvents) node(uid types.UID, c v1.NodeCondition) {
	kind := v1.EventTypeNormal
	if c.Status != v1.ConditionTrue || c.Reason != ReasonReady {
		kind = v1.EventTypeWarning
	}
	n.recorder.Event(&v1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: n.nodeName, UID: uid}, kind, "CGPU"+
		c.Reason, tidy(c.Message, maxMessage))
}
