package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// pod is what is kept of a pod: who it is, our annotations, its containers' names and IDs.
type pod struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	names   []string  // of its containers
	running []running // those that have an ID
}

func (p *pod) DeepCopyObject() runtime.Object {
	c := &pod{TypeMeta: p.TypeMeta, names: slices.Clone(p.names), running: slices.Clone(p.running)}
	p.ObjectMeta.DeepCopyInto(&c.ObjectMeta)
	return c
}

type podList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []*pod
}

func (l *podList) DeepCopyObject() runtime.Object {
	c := &podList{TypeMeta: l.TypeMeta, ListMeta: l.ListMeta}
	for _, p := range l.Items {
		c.Items = append(c.Items, p.DeepCopyObject().(*pod))
	}
	return c
}

// pods knows the pods of this node that have not ended: one watch, of which little is kept.
type pods struct {
	source   source
	log      *slog.Logger
	informer cache.SharedIndexInformer
	changed  []func(*pod) // called for each pod that is new or was changed
	gone     []func(*pod)

	mu   sync.Mutex
	late []*pod // those that are gone since not long ago, the last one last
}

const (
	// maxPods bounds how many pods are kept, and what else is remembered of pods. A kubelet runs some hundreds at most; who makes
	// more objects that name the node is one whom it refuses.
	maxPods = 1024
	// maxLate bounds how many pods are known a little longer than they are here: what happened last in a container is told
	// when it has ended, which may have ended its pod.
	maxLate = 64
)

// Indices of the informer.
const byContainer = "container"

// ours is the beginning of the annotations that are looked at.
const ours = "cgpu.io/"

// source opens a list, or a watch, of the node's pods, as the API server sends it in protocol buffers.
type source func(ctx context.Context, o metav1.ListOptions) (io.ReadCloser, error)

// apiServer is the source of a node. Pods that have ended are not asked for: those that a kubelet refused stay in the API server for
// long, and anybody can have any number of them.
func apiServer(client kubernetes.Interface, node string) source {
	selector := fields.AndSelectors(fields.OneTermEqualSelector("spec.nodeName", node),
		fields.OneTermNotEqualSelector("status.phase", "Succeeded"), fields.OneTermNotEqualSelector("status.phase", "Failed")).String()
	return func(ctx context.Context, o metav1.ListOptions) (io.ReadCloser, error) {
		o.FieldSelector = selector
		c, ok := client.CoreV1().RESTClient().(*rest.RESTClient)
		if !ok || c == nil {
			return nil, errors.New("agent: a client without an API server")
		}
		accept := runtime.ContentTypeProtobuf
		if o.Watch {
			accept += ";stream=watch"
		}
		r := c.Get().Resource("pods").VersionedParams(&o, scheme.ParameterCodec).SetHeader("Accept", accept)
		if o.TimeoutSeconds != nil {
			r = r.Timeout(time.Duration(*o.TimeoutSeconds) * time.Second)
		}
		return r.Stream(ctx)
	}
}

func newPods(from source, log *slog.Logger) *pods {
	p := &pods{source: from, log: log}
	list := &cache.ListWatch{ListWithContextFunc: p.list, WatchFuncWithContext: p.watch}
	p.informer = cache.NewSharedIndexInformerWithOptions(list, &pod{}, cache.SharedIndexInformerOptions{Indexers: cache.Indexers{byContainer: containersOf}})
	// It fails only for an informer that runs.
	_ = p.informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if ctx.Err() == nil && !errors.Is(err, io.EOF) && !apierrors.IsResourceExpired(err) {
			log.Warn("watch of the node's pods", "err", err)
		}
	})
	p.gone = append(p.gone, p.keepLate)
	return p
}

func (p *pods) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	r, err := p.source(ctx, o)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	list, err := readList(r, maxPods)
	if err != nil {
		return nil, err
	}
	if len(list.Items) == maxPods {
		p.tooMany()
	}
	return list, nil
}

func (p *pods) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	ctx, cancel := context.WithCancel(ctx)
	r, err := p.source(ctx, o)
	if err != nil {
		cancel()
		return nil, err
	}
	d := &decoder{p: p, body: r, r: bufio.NewReaderSize(r, 32<<10), cancel: cancel}
	return watch.NewStreamWatcher(d, statusReporter{}), nil
}

func (p *pods) tooMany() {
	p.log.Warn("the node has more pods than the agent knows", "most", maxPods, "effect", "what happens to the others is not told as Events, and their annotations change nothing")
}

// decoder reads a watch.
type decoder struct {
	p      *pods
	body   io.Closer
	r      *bufio.Reader
	cancel context.CancelFunc
	first  int // new pods of those that the watch begins with; -1 after them
	told   bool
}

// Decode returns the next event. Those of pods that are too many are left out.
func (d *decoder) Decode() (watch.EventType, runtime.Object, error) {
	for {
		f, err := readFrame(d.r)
		if err != nil {
			return "", nil, err
		}
		kind := watch.EventType(f.kind)
		if f.status != nil {
			o, _, err := scheme.Codecs.UniversalDeserializer().Decode(f.status, nil, nil)
			if err != nil {
				return "", nil, fmt.Errorf("agent: %w", err)
			}
			return kind, o, nil
		}
		switch {
		case kind == watch.Bookmark:
			d.first = -1 // what the watch began with is over
		case (kind == watch.Added || kind == watch.Modified) && d.tooMany(f.pod):
			continue
		}
		return kind, f.pod, nil
	}
}

// tooMany: the pod is one more than are kept. The informer takes what a watch begins with all at once, and has none of it
// until then, so those are counted here.
func (d *decoder) tooMany(one *pod) bool {
	if d.p.get(keyOf(one)) != nil {
		return false
	}
	if d.first >= 0 {
		d.first++
	}
	if max(d.first-1, len(d.p.informer.GetStore().ListKeys())) < maxPods {
		return false
	}
	if !d.told {
		d.told = true
		d.p.tooMany()
	}
	return true
}

func (d *decoder) Close() {
	d.cancel()
	d.body.Close()
}

// statusReporter makes an API error of one of the stream's.
type statusReporter struct{}

func (statusReporter) AsObject(err error) runtime.Object {
	s := apierrors.NewInternalError(err).Status()
	return &s
}

// run watches until ctx ends. What is in changed and gone must be there before.
func (p *pods) run(ctx context.Context) {
	all := func(list []func(*pod), o any) {
		if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = last.Obj
		}
		if known, ok := o.(*pod); ok {
			for _, f := range list {
				f(known)
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

// keepLate remembers a pod that is gone.
func (p *pods) keepLate(gone *pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.late) == maxLate {
		p.late = slices.Delete(p.late, 0, 1)
	}
	p.late = append(p.late, gone)
}

// lately returns one that is gone by a container's ID.
func (p *pods) lately(id string) (*pod, string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range slices.Backward(p.late) {
		if name, ok := o.has(id); ok {
			return o, name
		}
	}
	return nil, ""
}

// has returns the name of the container with an ID.
func (p *pod) has(id string) (string, bool) {
	for _, c := range p.running {
		if c.id == id {
			return c.name, true
		}
	}
	return "", false
}

func containersOf(o any) (ids []string, err error) {
	if p, ok := o.(*pod); ok {
		for _, c := range p.running {
			ids = append(ids, c.id)
		}
	}
	return ids, nil
}

// get returns a pod of this node; nil where there is none.
func (p *pods) get(key string) *pod {
	o, ok, err := p.informer.GetStore().GetByKey(key)
	if err != nil || !ok {
		return nil
	}
	found, _ := o.(*pod)
	return found
}

// owner returns the pod that has a container, and the container's name in it; nil where none of this node has.
//
// The kubelet writes IDs of containers into the pod, and no tenant does. Before it has done so, or where the container was
// refused, there is only the name that the ledger and events have from the CRI, which counts if such a pod is here and has
// such a container.
func (p *pods) owner(id, name string) (owner *pod, container string) {
	if id == "" {
		return nil, ""
	}
	found, err := p.informer.GetIndexer().ByIndex(byContainer, id)
	if err == nil && len(found) == 1 {
		if owner, ok := found[0].(*pod); ok {
			if container, ok := owner.has(id); ok {
				return owner, container
			}
		}
	}
	if owner, container := p.lately(id); owner != nil {
		return owner, container
	}
	namespace, rest, ok1 := strings.Cut(name, "/")
	podName, container, ok2 := strings.Cut(rest, "/")
	if !ok1 || !ok2 {
		return nil, ""
	}
	owner = p.get(namespace + "/" + podName)
	if owner == nil || !slices.Contains(owner.names, container) {
		return nil, ""
	}
	return owner, container
}
