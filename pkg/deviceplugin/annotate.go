package deviceplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// labelShared is gpushare's label for nodes without isolation.
const labelShared = "cgpu.disable.isolation"

// api is the API server, as seen by the kubelet's calls: it fails fast after it failed.
type api struct {
	client kubernetes.Interface
	node   string

	mu     sync.Mutex
	failed time.Time
	err    error
}

// Bounds of what is read at once. Who may make a pod may make it of more than a megabyte, and bind any number of such to a
// node; those that the kubelet refused stay in the API server. So only such pods are asked for as can be meant, few at a
// time, and little is kept of each.
const (
	podsPage = 8
	podsMost = 512
)

// pending are the containers of the node's pods that wait.
func (a *api) pending(ctx context.Context) ([]want, error) {
	var all []want
	selector := fields.Set{"spec.nodeName": a.node, "status.phase": string(corev1.PodPending)}
	// No resource version: the pod that the kubelet asks for is in etcd, and may not yet be in a watch cache.
	err := a.list(ctx, metav1.NamespaceAll, metav1.ListOptions{FieldSelector: selector.String(), Limit: podsPage}, func(pods []corev1.Pod) {
		all = append(all, candidates(pods, a.node)...)
	})
	inOrder(all)
	return all, err
}

// pod calls f with the pod of this name, where there is one.
func (a *api) pod(ctx context.Context, namespace, name string, f func(*corev1.Pod)) error {
	selector := fields.Set{"metadata.name": name, "spec.nodeName": a.node}
	return a.list(ctx, namespace, metav1.ListOptions{FieldSelector: selector.String(), Limit: 1}, func(pods []corev1.Pod) {
		for i := range pods {
			if pods[i].Name == name {
				f(&pods[i])
			}
		}
	})
}

// list reads pods page by page; f must keep nothing of them.
func (a *api) list(ctx context.Context, namespace string, o metav1.ListOptions, f func([]corev1.Pod)) error {
	a.mu.Lock()
	failed, err := a.failed, a.err
	a.mu.Unlock()
	if err != nil && time.Since(failed) < apiPause {
		return fmt.Errorf("not asked again for %v: %w", apiPause, err)
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	err = a.pages(ctx, namespace, o, f)
	a.mu.Lock()
	a.failed, a.err = time.Now(), err
	a.mu.Unlock()
	return err
}

func (a *api) pages(ctx context.Context, namespace string, o metav1.ListOptions, f func([]corev1.Pod)) error {
	for n := 0; n < podsMost; {
		list, err := a.client.CoreV1().Pods(namespace).List(ctx, o)
		if err != nil {
			return err
		}
		f(list.Items)
		if list.Continue == "" {
			return nil
		}
		n += max(len(list.Items), 1)
		o.Continue = list.Continue
	}
	return fmt.Errorf("more than %d pods wait on this node", podsMost)
}

const (
	// annotateEvery catches what a poke did not: pods that the kubelet booked after the plugin looked, a node object made
	// anew, another label.
	annotateEvery = 30 * time.Second
	// settle is how long the kubelet may take from Allocate's answer to its own books, and gathers pods that start together.
	settle = 300 * time.Millisecond
)

// annotate writes gpushare's annotations and the node's count of GPUs, until ctx ends. It goes by what the kubelet says it
// booked for whom (PodResources), not by whom Allocate took it to be for; so it can be wrong about no pod, and what a
// plugin that died left undone the next one does.
func (p *Plugin) annotate(ctx context.Context) {
	if p.api == nil {
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
			case <-time.After(settle):
			}
		}
	}
}

// tellNode reads the node's label, and patches the number of GPUs into its status.
func (p *Plugin) tellNode(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	node, err := p.api.client.CoreV1().Nodes().Get(ctx, p.o.Node, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	p.setShared(node.Labels[labelShared] == "true")
	cards, _, _, _, _ := p.state()
	patch := countPatch(node, len(cards))
	if patch == nil {
		return nil
	}
	_, err = p.api.client.CoreV1().Nodes().Patch(ctx, p.o.Node, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
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
	since := p.settled.now()
	booked, err := p.booked(ctx, ResourceMemory)
	if err != nil {
		return err
	}
	p.settled.keep(booked)
	var faults []error
	cards, _, _, _, _ := p.state()
	for name, containers := range booked {
		if p.settled.has(name, containers) {
			continue
		}
		namespace, podName, _ := strings.Cut(name, "/")
		var patch []byte
		done := false
		err := p.api.pod(ctx, namespace, podName, func(pod *corev1.Pod) {
			patch, done = podPatch(pod, containers, cards, time.Now())
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if patch != nil {
			one, cancel := context.WithTimeout(ctx, apiTimeout)
			_, err = p.api.client.CoreV1().Pods(namespace).Patch(one, podName, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			cancel()
		}
		if err != nil { // of one pod, which may be its author's doing
			faults = append(faults, fmt.Errorf("%s: %w", name, err))
			continue
		}
		if done {
			p.settled.add(name, containers, since)
		}
	}
	return errors.Join(faults...)
}

// settled are pods whose annotations are as they should be, by the least id of each of their containers.
type settled struct {
	mu  sync.Mutex
	ids map[string]string // "namespace/name" of the pod
	// drops counts calls of drop: what was seen before one may be of pods that are gone.
	drops int
}

func (s *settled) now() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.drops
}

func (s *settled) has(name string, containers map[string][]string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ids := range containers {
		if s.ids[slices.Min(ids)] != name {
			return false
		}
	}
	return true
}

func (s *settled) add(name string, containers map[string][]string, since int) {
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
func (s *settled) drop(ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drops++
	for _, id := range ids {
		delete(s.ids, id)
	}
}

// keep forgets all but the pods that have units.
func (s *settled) keep(booked map[string]map[string][]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.ids, func(_, name string) bool { return booked[name] == nil })
}

// booked are the device ids of a resource by "namespace/name" and container.
func (p *Plugin) booked(ctx context.Context, resource string) (map[string]map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	conn, err := dial(filepath.Join(p.o.KubeletDir, "..", "pod-resources", kubeletSocket), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	list, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("the kubelet's PodResources: %w", err)
	}
	all := map[string]map[string][]string{}
	for _, pod := range list.GetPodResources() {
		name := pod.GetNamespace() + "/" + pod.GetName()
		for _, c := range pod.GetContainers() {
			for _, d := range c.GetDevices() {
				if d.GetResourceName() != resource || len(d.GetDeviceIds()) == 0 {
					continue
				}
				if all[name] == nil {
					all[name] = map[string][]string{}
				}
				all[name][c.GetName()] = append(all[name][c.GetName()], d.GetDeviceIds()...)
			}
		}
	}
	return all, nil
}

// holder is the container that a step was for, as the kubelet says; empty where it does not. The kubelet is in the middle of
// an admission, but holds no lock for that which it needs to answer; should it be otherwise one day, this is not waited for.
func (p *Plugin) holder(ctx context.Context, s *step) (name, container string) {
	ctx, cancel := context.WithTimeout(ctx, holderTimeout)
	defer cancel()
	booked, err := p.booked(ctx, s.resource)
	if err != nil {
		p.log.Warn("whose units these are", "resource", s.resource, "err", err)
		return "", ""
	}
	for name, containers := range booked {
		for container, ids := range containers {
			if slices.Contains(ids, s.id) {
				return name, container
			}
		}
	}
	return "", ""
}

// podPatch is what the annotations of a pod lack; nil for nothing. settled: that will not change.
//
// A pod that the extender placed gets ASSIGNED=true; its index is never changed, since the extender books a pod where it
// first saw it, and frees where its annotation then points. A pod that nobody placed gets all of gpushare's annotations, if
// all its units are of one GPU: they hold one index.
func podPatch(pod *corev1.Pod, booked map[string][]string, cards []card, now time.Time) (patch []byte, settled bool) {
	if pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed || pod.Annotations[annotationAssigned] == "true" {
		return nil, true
	}
	var ids []string
	for _, c := range pod.Spec.Containers {
		n := limit(c, ResourceMemory)
		if len(booked[c.Name]) != n {
			return nil, false // the kubelet is not done with it
		}
		ids = append(ids, booked[c.Name]...)
	}
	_, used, err := count(cards, ResourceMemory, ids)
	if err != nil || len(used) == 0 {
		return nil, false
	}
	stamp := strconv.FormatInt(now.UnixNano(), 10)
	set := map[string]string{annotationAssigned: "true", annotationAssignTime: stamp}
	if podIndex(pod) == noIndex {
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
