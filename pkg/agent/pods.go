package agent

import (
	"context"
	"log/slog"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// pods knows the pods of this node: one watch, of which little is kept.
type pods struct {
	informer cache.SharedIndexInformer
	changed  []func(*v1.Pod) // called for each pod that is new or was changed
	gone     []func(*v1.Pod)
}

// Indices of the informer.
const byContainer = "container"

// ours is the beginning of the annotations that are looked at.
const ours = "cgpu.io/"

// maxAnnotation bounds the values that are kept: none of ours needs more.
const maxAnnotation = 256

func newPods(client kubernetes.Interface, node string, log *slog.Logger) *pods {
	selector := fields.OneTermEqualSelector("spec.nodeName", node).String()
	list := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = selector
			return client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = selector
			return client.CoreV1().Pods(metav1.NamespaceAll).Watch(ctx, o)
		},
	}
	p := &pods{informer: cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(list, client), &v1.Pod{},
		cache.SharedIndexInformerOptions{Indexers: cache.Indexers{byContainer: containersOf}})}
	// Both fail only for an informer that runs.
	_ = p.informer.SetTransform(func(o any) (any, error) {
		if pod, ok := o.(*v1.Pod); ok {
			return slim(pod), nil
		}
		return o, nil
	})
	_ = p.informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if ctx.Err() == nil {
			log.Warn("watch of the node's pods", "err", err)
		}
	})
	return p
}

// run watches until ctx ends. What is in changed and gone must be there before.
func (p *pods) run(ctx context.Context) {
	all := func(list []func(*v1.Pod), o any) {
		if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = last.Obj
		}
		if pod, ok := o.(*v1.Pod); ok {
			for _, f := range list {
				f(pod)
			}
		}
	}
	_, _ = p.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { all(p.changed, o) },
		UpdateFunc: func(_, o any) { all(p.changed, o) },
		DeleteFunc: func(o any) { all(p.gone, o) },
	})
	p.informer.RunWithContext(ctx)
}

// synced waits until the pods are known, but not longer than most.
func (p *pods) synced(ctx context.Context, most time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	return cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced)
}

// slim is what is kept of a pod: who it is, our annotations, its containers' names and IDs.
func slim(pod *v1.Pod) *v1.Pod {
	kept := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion}}
	for key, value := range pod.Annotations {
		if strings.HasPrefix(key, ours) && len(key) < 128 {
			if kept.Annotations == nil {
				kept.Annotations = map[string]string{}
			}
			kept.Annotations[strings.Clone(key)] = strings.Clone(value[:min(len(value), maxAnnotation+1)])
		}
	}
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range list {
			kept.Spec.Containers = append(kept.Spec.Containers, v1.Container{Name: c.Name})
		}
	}
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, s := range list {
			if id := idOf(s.ContainerID); id != "" {
				kept.Status.ContainerStatuses = append(kept.Status.ContainerStatuses, v1.ContainerStatus{Name: s.Name, ContainerID: id})
			}
		}
	}
	return kept
}

// idOf is the runtime's ID of a container: the kubelet writes "containerd://…".
func idOf(containerID string) string {
	_, id, _ := strings.Cut(containerID, "://")
	return id
}

func containersOf(o any) ([]string, error) {
	var ids []string
	if pod, ok := o.(*v1.Pod); ok {
		for _, s := range pod.Status.ContainerStatuses {
			ids = append(ids, s.ContainerID)
		}
	}
	return ids, nil
}

// get returns a pod of this node; nil where there is none.
func (p *pods) get(key string) *v1.Pod {
	o, ok, err := p.informer.GetStore().GetByKey(key)
	if err != nil || !ok {
		return nil
	}
	pod, _ := o.(*v1.Pod)
	return pod
}

// owner returns the pod that has a container, and the container's name in it; nil where none of this node has.
//
// The kubelet writes IDs of containers into the pod, and no tenant does. Before it has done so, or where the container was
// refused, there is only the name that the ledger and events have from the CRI, which counts if such a pod is here and has
// such a container.
func (p *pods) owner(id, name string) (pod *v1.Pod, container string) {
	if id == "" {
		return nil, ""
	}
	found, err := p.informer.GetIndexer().ByIndex(byContainer, id)
	if err == nil && len(found) == 1 {
		pod, _ = found[0].(*v1.Pod)
		for _, s := range pod.Status.ContainerStatuses {
			if s.ContainerID == id {
				return pod, s.Name
			}
		}
	}
	namespace, rest, ok1 := strings.Cut(name, "/")
	podName, container, ok2 := strings.Cut(rest, "/")
	if !ok1 || !ok2 {
		return nil, ""
	}
	pod = p.get(namespace + "/" + podName)
	if pod == nil {
		return nil, ""
	}
	for _, c := range pod.Spec.Containers {
		if c.Name == container {
			return pod, container
		}
	}
	return nil, ""
}
