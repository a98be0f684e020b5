// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// Labels of a node. labelShared is gpushare's for one without isolation; the others are ACK's, which say how its GPUs are given out, and in
// which order.
const (
	labelShared    = "cgpu.disable.isolation"
	labelSchedule  = "ack.node.gpu.schedule"
	labelPlacement = "ack.node.gpu.placement"
)

// unserved is why labels of the node want something else of its GPUs than shares with limits; nil: they do not.
func unserved(labels map[string]string) error {
	if labels[labelShared] == "true" {
		return errShared
	}
	switch mode, there := labels[labelSchedule]; {
	case !there, mode == "cgpu", mode == "core_mem":
		return nil
	default:
		return fmt.Errorf("deviceplugin: the node's label %s=%.63s: shares with limits are cgpu and core_mem, and the node was given to "+
			"something else: change the label, or leave the node to that", labelSchedule, mode)
	}
}

const (
	// annotateEvery catches what a poke did not: pods that the kubelet booked after the plugin looked, a node object made
	// anew, another label.
	annotateEvery = 30 * time.Second
	// bookingDelay is how long the kubelet may take from Allocate's answer to its own books, and gathers pods that start together.
	bookingDelay = 300 * time.Millisecond
)

// annotate writes gpushare's annotations and the node's count of GPUs, until ctx ends. It goes by what the kubelet says it
// booked for whom (PodResources), not by whom Allocate took it to be for; so it can be wrong about no pod, and what a
// plugin that died left undone the next one does.
func (p *Plugin) annotate(ctx context.Context) {
	if p.o.Client == nil {
		return
	}
	for {
		if err := p.tellNode(ctx); err != nil && ctx.Err() == nil {
			p.log.Warn("node status", "err", err)
		}
		if err := p.tellPods(ctx); err != nil && ctx.Err() == nil {
			p.log.Warn("gpushare's annotations", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(annotateEvery):
		case <-p.poke:
			select {
			case <-ctx.Done():
				return
			case <-time.After(bookingDelay):
			}
		}
	}
}

// notOffered is why a node cannot have shares by a device plugin; nil: it can.
func notOffered(node *corev1.Node) error {
	if err := unserved(node.Labels); err != nil {
		return err
	}
	if strings.HasPrefix(node.Status.NodeInfo.ContainerRuntimeVersion, "cri-o://") {
		return errCRIO
	}
	return nil
}

// tellNode reads of the node whether GPUs are offered, and patches the number of GPUs into its status.
func (p *Plugin) tellNode(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	node, err := p.o.Client.CoreV1().Nodes().Get(ctx, p.o.Node, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	p.follow(notOffered(node), placementOf(node.Labels[labelPlacement]))
	cards, _, _, _, _ := p.state()
	patch := countPatch(node, len(cards))
	if patch == nil {
		return nil
	}
	_, err = p.o.Client.CoreV1().Nodes().Patch(ctx, p.o.Node, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// countPatch is nil where the node already has n GPUs. The extender takes the node's units divided by this number for
// what one GPU has, so those that are gone count: their units do.
func countPatch(node *corev1.Node, n int) []byte {
	have := func(list corev1.ResourceList) bool {
		q, ok := list[ResourceCount]
		return ok && q.Value() == int64(n)
	}
	if have(node.Status.Capacity) && have(node.Status.Allocatable) {
		return nil
	}
	number := map[string]string{ResourceCount: strconv.Itoa(n)}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": number, "allocatable": number}})
	if err != nil {
		panic(err) // strings and maps
	}
	return patch
}

// tellPods annotates each pod whose containers have all they asked for. Pods that need no more are not looked at again until
// one of their units is allocated anew.
func (p *Plugin) tellPods(ctx context.Context) error {
	since := p.annotated.now()
	booked, err := p.booked(ctx, ResourceMemory)
	if err != nil {
		return err
	}
	p.annotated.keep(booked)
	here := map[string]*Pod{}
	if p.o.Pods != nil {
		pods, _ := p.o.Pods()
		for i := range pods {
			if !pods[i].Ended {
				here[pods[i].name()] = &pods[i]
			}
		}
	}
	var faults []error
	cards, _, _, _, _ := p.state()
	for name, containers := range booked {
		if p.annotated.has(name, containers) {
			continue
		}
		pod := here[name]
		if pod == nil {
			continue // it has ended, or the watch has not told of it yet
		}
		patch, done := podPatch(pod, containers, cards, time.Now())
		if patch != nil {
			err = p.patchPod(ctx, pod, patch)
		}
		if err != nil { // of one pod, which may be its author's doing
			faults = append(faults, fmt.Errorf("%s: %w", name, err))
			continue
		}
		if done {
			p.annotated.add(name, containers, since)
			if container, text := unlike(pod, containers, cards); text != "" {
				p.log.Warn(text, "pod", name, "container", container)
				p.o.Tell(pod, container, text)
			}
		}
	}
	return errors.Join(faults...)
}

// unlike says which container has its units of another number of GPUs than the pod's label asks for. Allocate had to guess whose they are
// (match), and the kubelet books them whatever is found out later; so it is told, and its owner makes the pod again.
func unlike(pod *Pod, booked map[string][]string, cards []card) (container, text string) {
	for _, name := range slices.Sorted(maps.Keys(booked)) {
		_, used, err := count(cards, ResourceMemory, booked[name])
		if err == nil && len(used) != pod.gpus() {
			return name, fmt.Sprintf("the pod's label %s asks for %d GPUs, and the container has its %d units of %d: another pod that asked for "+
				"as many units was started at the same time, and the kubelet does not say for which it asks: make the pod again",
				ResourceCount, pod.gpus(), len(booked[name]), len(used))
		}
	}
	return "", ""
}

// patchPod leaves the answer alone, which is the pod: that may be of more than a megabyte, and as an object of Go thirty times that. A
// client without an API server, of a test, has no such pods.
func (p *Plugin) patchPod(ctx context.Context, pod *Pod, patch []byte) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	core := p.o.Client.CoreV1()
	if c, ok := core.RESTClient().(*rest.RESTClient); ok && c != nil {
		return c.Patch(types.StrategicMergePatchType).Namespace(pod.Namespace).Resource("pods").Name(pod.Name).Body(patch).Do(ctx).Error()
	}
	_, err := core.Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	return err
}

// annotated are pods whose annotations are as they should be, by the least id of each of their containers.
type annotated struct {
	mu  sync.Mutex
	ids map[string]string // "namespace/name" of the pod
	// drops counts calls of drop: what was seen before one may be of pods that are gone.
	drops int
}

func (s *annotated) now() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.drops
}

func (s *annotated) has(name string, containers map[string][]string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ids := range containers {
		if s.ids[slices.Min(ids)] != name {
			return false
		}
	}
	return true
}

func (s *annotated) add(name string, containers map[string][]string, since int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drops != since {
		return
	}
	if s.ids == nil {
		s.ids = map[string]string{}
	}
	for _, ids := range containers {
		s.ids[slices.Min(ids)] = name
	}
}

// drop forgets pods that had these ids, since another has them now, perhaps of the same name.
func (s *annotated) drop(ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drops++
	for _, id := range ids {
		delete(s.ids, id)
	}
}

// keep forgets all but the pods that have units.
func (s *annotated) keep(booked map[string]map[string][]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.ids, func(_, name string) bool { return booked[name] == nil })
}

// booked are the device ids of a resource by "namespace/name" and container.
func (p *Plugin) booked(ctx context.Context, resource string) (map[string]map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	list, err := p.list(ctx)
	all := map[string]map[string][]string{}
	for name, containers := range list {
		for container, has := range containers {
			if ids := has[resource]; len(ids) > 0 {
				if all[name] == nil {
					all[name] = map[string][]string{}
				}
				all[name][container] = ids
			}
		}
	}
	return all, err
}

// podPatch is what the annotations of a pod lack; nil for nothing. settled: that will not change.
//
// A pod that the extender placed gets ASSIGNED=true; its index is never changed, since the extender books a pod where it
// first saw it, and frees where its annotation then points. A pod that nobody placed gets all of gpushare's annotations, if
// all its units are of one GPU: they hold one index.
func podPatch(pod *Pod, booked map[string][]string, cards []card, now time.Time) (patch []byte, settled bool) {
	if pod.Ending || pod.Annotations[annotationAssigned] == "true" {
		return nil, true
	}
	var ids []string
	for _, of := range booked {
		ids = append(ids, of...)
	}
	if len(ids) != pod.Memory {
		return nil, false // the kubelet is not done with it
	}
	_, used, err := count(cards, ResourceMemory, ids)
	if err != nil || len(used) == 0 {
		return nil, false
	}
	stamp := strconv.FormatInt(now.UnixNano(), 10)
	set := map[string]string{annotationAssigned: "true", annotationAssignTime: stamp}
	if pod.index() == noIndex {
		if len(used) != 1 {
			return nil, true
		}
		set[annotationIndex] = strconv.Itoa(used[0].position)
		set[annotationPod] = strconv.Itoa(len(ids))
		set[annotationDev] = strconv.Itoa(used[0].units)
		set[annotationAssumeTime] = stamp
	}
	// The UID: a pod of this name may be another by now.
	patch, err = json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": set}})
	if err != nil {
		panic(err) // strings and maps
	}
	return patch, true
}
