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
	index           int // position of the GPU that the extender chose; noIndex
	since           time.Time
	// Set by match. sure: it is a container of this pod; exact: it is this one, or one with the same limits.
	sure, exact bool
}

// noIndex is want.index of a pod that the extender did not place.
const noIndex = -1

// key names the container and the resource that it was served.
type key struct{ pod, container, resource string }

// candidates are the containers of a node that the kubelet has not admitted yet.
//
// The kubelet reports a start time with the first status of a pod that it has admitted or refused.
func candidates(pods []corev1.Pod, node string) []want {
	var all []want
	for i := range pods {
		p := &pods[i]
		if p.Spec.NodeName != node || p.Status.Phase != corev1.PodPending && p.Status.Phase != "" || p.Status.StartTime != nil || p.DeletionTimestamp != nil {
			continue
		}
		before := len(all)
		base := want{
			pod: string(p.UID), name: p.Namespace + "/" + p.Name, podMemory: podMemory(p), gpus: podGPUs(p), index: podIndex(p), since: bound(p),
		}
		for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
			for _, c := range list {
				w := base
				w.container = c.Name
				w.limits = map[string]int{ResourceMemory: limit(c, ResourceMemory), ResourcePercent: limit(c, ResourcePercent)}
				if w.limits[ResourceMemory]+w.limits[ResourcePercent] > 0 && len(all)-before < containersMost {
					all = append(all, w)
				}
			}
		}
	}
	return all
}

// containersMost bounds what is kept of one pod, which may have thousands of containers.
const containersMost = 64

// inOrder sorts as the kubelet will probably admit: as pods were bound. gpushare's extender binds one pod of a node after the
// other, and its ASSUME_TIME has nanoseconds; Kubernetes' own times have seconds.
func inOrder(all []want) {
	slices.SortStableFunc(all, func(a, b want) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.name, b.name))
	})
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

// podIndex reads what the extender wrote. A pod's author can write it too, so what the extender would not have written is
// nobody's choice.
func podIndex(p *corev1.Pod) int {
	assumed, err := strconv.ParseInt(p.Annotations[annotationAssumeTime], 10, 64)
	if err != nil || assumed <= 0 || p.Annotations[annotationAssigned] != "false" || p.Annotations[annotationPod] != strconv.Itoa(podMemory(p)) {
		return noIndex
	}
	n, err := strconv.Atoi(p.Annotations[annotationIndex])
	if err != nil || n < 0 {
		return noIndex
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

// mark says that a container was served a resource; sure: it was known to be this one.
type mark struct {
	at   time.Time
	sure bool
}

// match finds the container that the kubelet asks n units of a resource for: one that has this limit and was not surely
// served.
//
// Where these are of one pod, it is that pod, since the one that is asked for is among them: sure is set. Else it is a guess,
// and anybody may have made a pod of this size, with labels and annotations as he likes, so that it is taken for another's.
// What the pods then do not agree on is left out. The GPU that an extender chose stays, as a wish: that of the first, or of
// the one whose GPU it is (position, which Allocate knows): pods of one size that the extender placed on several GPUs come
// to be where it thinks, as long as there is room.
func match(all []want, served map[key]mark, resource string, n, position int) *want {
	var open []*want
	var found *want
	best := 0
	guessed, equal := false, true
	for i := range all {
		w := &all[i]
		m, done := served[key{w.pod, w.container, resource}]
		if m.sure || w.limits[resource] != n {
			continue
		}
		open = append(open, w)
		guessed = guessed || done
		equal = equal && w.limits[other(resource)] == open[0].limits[other(resource)]
		rank := 0
		if !done {
			rank += 3
		}
		switch {
		case position < 0: // the first
		case w.index == position:
			rank += 2
		case w.index < 0:
			rank++
		}
		if found == nil || rank > best {
			found, best = w, rank
		}
	}
	if found == nil {
		return nil
	}
	w := *found
	w.sure = true
	for _, x := range open {
		w.sure = w.sure && x.pod == w.pod
	}
	w.exact = w.sure && (equal || !guessed)
	if w.sure {
		return &w
	}
	w.name = "a pod" // its status says why it was refused, and is not to name another's
	for _, x := range open {
		if x.gpus != w.gpus {
			w.gpus = 1
		}
		if x.podMemory != w.podMemory {
			w.podMemory = 0
		}
	}
	return &w
}
