package deviceplugin

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// gpushare's annotations of a pod, and the variables of the same names.
const (
	annotationIndex      = "ALIYUN_COM_GPU_MEM_IDX"
	annotationPod        = "ALIYUN_COM_GPU_MEM_POD"
	annotationDev        = "ALIYUN_COM_GPU_MEM_DEV"
	annotationAssigned   = "ALIYUN_COM_GPU_MEM_ASSIGNED"
	annotationAssumeTime = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
	annotationAssignTime = "ALIYUN_COM_GPU_MEM_ASSIGN_TIME"
)

// want is a container that the kubelet may be asking for. The kubelet does not say for which container it asks, only for how
// many units; which one it is has to be guessed. Nothing that holds an amount depends on the guess: it is the device ids
// that book.
type want struct {
	pod             string // UID
	name, container string // "namespace/name"
	limits          map[string]int
	podMemory       int // units of the whole pod, without init containers, as gpushare counts
	gpus            int // as many GPUs as ACK's label on the pod says; else 1
	index           int // position of the GPU that the extender chose; noIndex, badIndex
	since           time.Time
}

// Values of want.index that are no index.
const (
	noIndex  = -1 // the extender did not place the pod
	badIndex = -2 // it did, but on no GPU
)

// key names the container and the resource that it was served.
type key struct{ pod, container, resource string }

// candidates are the containers of a node that the kubelet has not admitted yet, in the order in which it probably will:
// that in which they were bound. gpushare's extender binds one pod of a node after the other, and its ASSUME_TIME has
// nanoseconds; Kubernetes' own times have seconds.
//
// The kubelet reports a start time with the first status of a pod that it has admitted or refused.
func candidates(pods []corev1.Pod, node string) []want {
	var all []want
	for i := range pods {
		p := &pods[i]
		if p.Spec.NodeName != node || p.Status.Phase != corev1.PodPending && p.Status.Phase != "" || p.Status.StartTime != nil || p.DeletionTimestamp != nil {
			continue
		}
		base := want{
			pod: string(p.UID), name: p.Namespace + "/" + p.Name, podMemory: podMemory(p), gpus: podGPUs(p), index: podIndex(p), since: bound(p),
		}
		for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
			for _, c := range list {
				w := base
				w.container = c.Name
				w.limits = map[string]int{ResourceMemory: limit(c, ResourceMemory), ResourcePercent: limit(c, ResourcePercent)}
				if w.limits[ResourceMemory]+w.limits[ResourcePercent] > 0 {
					all = append(all, w)
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b want) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.name, b.name))
	})
	return all
}

// limit is how many units a container asks for; 0 for none, and for what is no number of units.
func limit(c corev1.Container, resource string) int {
	q, ok := c.Resources.Limits[corev1.ResourceName(resource)]
	if !ok || q.Value() < 0 || q.Value() > 1<<30 {
		return 0
	}
	return int(q.Value())
}

func podMemory(p *corev1.Pod) (sum int) {
	for _, c := range p.Spec.Containers {
		sum += limit(c, ResourceMemory)
	}
	return sum
}

// podGPUs reads ACK's label for a share on several GPUs.
func podGPUs(p *corev1.Pod) int {
	n, err := strconv.Atoi(p.Labels[ResourceCount])
	if err != nil || n < 1 || n > 64 {
		return 1
	}
	return n
}

// podIndex reads what the extender wrote. A pod's author can write it too: it steers where the pod's own share lies, and
// nothing else.
func podIndex(p *corev1.Pod) int {
	if p.Annotations[annotationAssumeTime] == "" || p.Annotations[annotationAssigned] != "false" {
		return noIndex
	}
	n, err := strconv.Atoi(p.Annotations[annotationIndex])
	if err != nil || n < 0 {
		return badIndex
	}
	return n
}

// bound is when a pod was bound, as well as it can be known. An assume time from before the pod's creation is made up, and
// would let its pod go before all others.
func bound(p *corev1.Pod) time.Time {
	created := p.CreationTimestamp.Time
	if podIndex(p) != noIndex {
		if n, err := strconv.ParseInt(p.Annotations[annotationAssumeTime], 10, 64); err == nil && n > 0 {
			if t := time.Unix(0, n); !t.Before(created) {
				return t
			}
		}
		return created
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue && !c.LastTransitionTime.Time.Before(created) {
			return c.LastTransitionTime.Time
		}
	}
	return created
}

// match finds the container that the kubelet asks n units of a resource for: the first that has this limit and was not
// served. In Allocate, which comes when the GPU is known, those go first whose GPU it is: two pods of one size that the
// extender placed on two GPUs are not exchanged.
//
// strangers reports that there are candidates, but the extender placed all of them elsewhere.
func match(all []want, served map[key]time.Time, resource string, n, position int) (found *want, strangers bool) {
	var placed, free, other *want
	for i := range all {
		w := &all[i]
		if _, done := served[key{w.pod, w.container, resource}]; done || w.limits[resource] != n {
			continue
		}
		switch {
		case w.index == noIndex && free == nil:
			free = w
		case position >= 0 && w.index == position && placed == nil:
			placed = w
		case w.index != noIndex && other == nil:
			other = w
		}
	}
	switch {
	case position < 0:
		return first(free, other), false
	case placed != nil:
		return placed, false
	case free != nil:
		return free, false
	}
	return other, other != nil
}

// first is the one that was bound first.
func first(a, b *want) *want {
	if a == nil || b != nil && b.since.Before(a.since) {
		return b
	}
	return a
}
