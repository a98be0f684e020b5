// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/wire"
)

// pod is what is kept of a pod: who it is, the annotations that are ours or gpushare's, its containers' names and IDs, and what
// the device plugin goes by.
type pod struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	names   []string  // of its containers
	running []running // those that have an ID
	cut     bool      // there were more of these, and of our annotations, than can be kept

	gpu             []deviceplugin.Container // those that ask for units
	more            bool                     // there are more of these
	units           int                      // of memory, of all containers but init ones
	seen            int                      // containers
	phase           string
	started, ending bool
	scheduled       time.Time
}

// DeepCopyObject shares what nobody changes.
func (p *pod) DeepCopyObject() runtime.Object {
	c := *p
	p.ObjectMeta.DeepCopyInto(&c.ObjectMeta)
	return &c
}

// see takes a container of the spec.
func (p *pod) see(c deviceplugin.Container) {
	if len(p.names) < maxContainers {
		p.names = append(p.names, c.Name)
	}
	if !c.Init {
		p.units += c.Memory
	}
	switch {
	case c.Memory+c.Percent == 0:
	case len(p.gpu) < deviceplugin.MaxContainers:
		p.gpu = append(p.gpu, c)
	default:
		p.more = true
	}
}

// size is about how many bytes the pod takes.
func (p *pod) size() int {
	n := 600 + len(p.Name) + len(p.Namespace) + len(p.UID)
	for name, value := range p.Annotations {
		n += 32 + len(name) + len(value)
	}
	for _, name := range p.names {
		n += 16 + len(name)
	}
	for _, c := range p.running {
		n += 32 + len(c.name) + maxID
	}
	return n + len(p.gpu)*(48+maxContainer)
}

// shorten leaves what tells whose it is, and what the device plugin goes by.
func (p *pod) shorten() {
	p.cut, p.names, p.running = true, nil, nil
	maps.DeleteFunc(p.Annotations, func(name, _ string) bool { return strings.HasPrefix(name, ours) })
}

// forPlugin is what the device plugin goes by.
func (p *pod) forPlugin() deviceplugin.Pod {
	return deviceplugin.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Created: p.CreationTimestamp.Time,
		Scheduled: p.scheduled,
		Waiting:   p.phase == string(v1.PodPending) || p.phase == "", Started: p.started, Ending: p.ending,
		Annotations: p.Annotations, Count: p.Labels[deviceplugin.ResourceCount], Memory: p.units, Containers: p.gpu, More: p.more}
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

// Pods knows the pods of this node that have not ended: one watch, of which little is kept.
type Pods struct {
	source   source
	names    deviceplugin.Names
	log      *slog.Logger
	informer cache.SharedIndexInformer
	changed  []func(*pod) // called for each pod that is new or was changed
	gone     []func(*pod)
	news     *podEvents // for Tell; nil before there is one

	mu   sync.Mutex
	late []*pod         // those that are gone since not long ago, the last one last
	left []string       // keys of those that are gone, also longer ago
	size map[string]int // of the pods that are here, by key
	all  int            // their sum
}

const (
	// maxPods bounds how many pods are kept, and what else is remembered of pods. A kubelet runs some hundreds at most; who makes
	// more objects that name the node is one whom it refuses.
	maxPods = 1024
	// maxLate bounds how many pods are known a little longer than they are here: what happened last in a container is told
	// when it has ended, which may have ended its pod.
	maxLate = 64
	// maxPod bounds how much is kept of a pod, and maxAll of all; once there is that much, of a pod that is more than maxThen no more
	// than what tells whose it is and what the device plugin goes by. So nobody's pods push out those that are of usual size.
	maxPod, maxAll, maxThen = 16 << 10, 4 << 20, 2 << 10
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

// NewPods makes the watch of a node's pods, which runs as long as an agent does that is given it. Names are what
// they call the resources of the device plugin.
func NewPods(client kubernetes.Interface, node string, names deviceplugin.Names, log *slog.Logger) *Pods {
	p := newPods(apiServer(client, node), log)
	p.names = names
	return p
}

func newPods(from source, log *slog.Logger) *Pods {
	p := &Pods{source: from, log: log}
	list := &cache.ListWatch{ListWithContextFunc: p.list, WatchFuncWithContext: p.watch}
	p.informer = cache.NewSharedIndexInformerWithOptions(list, &pod{},
		cache.SharedIndexInformerOptions{Indexers: cache.Indexers{byContainer: containersOf}})
	// It fails only for an informer that runs.
	_ = p.informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if ctx.Err() == nil && !errors.Is(err, io.EOF) && !apierrors.IsResourceExpired(err) {
			log.Warn("watch of the node's pods", "err", err)
		}
	})
	p.gone = append(p.gone, p.keepLate)
	return p
}

func (p *Pods) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	r, err := p.source(ctx, o)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	p.forgetAll()
	list, err := readList(p.names, r, maxPods, p.bound)
	if err != nil {
		return nil, err
	}
	if len(list.Items) == maxPods {
		p.tooMany()
	}
	return list, nil
}

func (p *Pods) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	ctx, cancel := context.WithCancel(ctx)
	r, err := p.source(ctx, o)
	if err != nil {
		cancel()
		return nil, err
	}
	if o.SendInitialEvents != nil && *o.SendInitialEvents {
		p.forgetAll()
	}
	d := &decoder{p: p, body: r, r: wire.NewReader(r), cancel: cancel}
	return watch.NewStreamWatcher(d, statusReporter{}), nil
}

func (p *Pods) tooMany() {
	p.log.Warn("the node has more pods than the agent knows", "most", maxPods, "effect",
		"what happens to the others is not told as Events, and their annotations change nothing")
}

// bound keeps a pod that was read within what may be kept.
func (p *Pods) bound(one *pod) {
	key, n := keyOf(one), one.size()
	p.mu.Lock()
	p.all -= p.size[key]
	if n > maxPod || n > maxThen && p.all+n > maxAll {
		one.shorten()
		n = one.size()
	}
	if p.size == nil {
		p.size = map[string]int{}
	}
	p.size[key] = n
	p.all += n
	p.mu.Unlock()
	if was := p.get(key); one.cut && (was == nil || !was.cut) {
		p.log.Warn("a pod is larger than what is kept of one", "pod", tidy(key, 2*maxName),
			"effect", "what happens to it is not told as Events, and its annotations change nothing")
	}
}

func (p *Pods) forget(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all -= p.size[key]
	delete(p.size, key)
}

// forgetAll: all that is here comes anew.
func (p *Pods) forgetAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.size, p.all = nil, 0
}

// decoder reads a watch.
type decoder struct {
	p      *Pods
	body   io.Closer
	r      *bufio.Reader
	cancel context.CancelFunc
	first  int // new pods of those that the watch begins with; -1 after them
	told   bool
}

// Decode returns the next event. Those of pods that are too many are left out.
func (d *decoder) Decode() (watch.EventType, runtime.Object, error) {
	for {
		f, err := readFrame(d.p.names, d.r)
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
		if kind != watch.Bookmark {
			d.p.bound(f.pod)
		}
		if kind == watch.Deleted {
			d.p.forget(keyOf(f.pod))
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
func (p *Pods) run(ctx context.Context) {
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

// GPU are the pods as the device plugin sees them; false as long as they are not known.
func (p *Pods) GPU() ([]deviceplugin.Pod, bool) {
	if !p.informer.HasSynced() {
		return nil, false
	}
	var all []deviceplugin.Pod
	for _, o := range p.informer.GetStore().List() {
		if one, ok := o.(*pod); ok {
			all = append(all, one.forPlugin())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range p.left {
		namespace, name, _ := strings.Cut(key, "/")
		all = append(all, deviceplugin.Pod{Namespace: namespace, Name: name, Ended: true})
	}
	return all, true
}

// synced waits until the pods are known, but not longer than most.
func (p *Pods) synced(ctx context.Context, most time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	return cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced)
}

// keepLate remembers a pod that is gone.
func (p *Pods) keepLate(gone *pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.late) == maxLate {
		p.late = slices.Delete(p.late, 0, 1)
	}
	p.late = append(p.late, gone)
	if len(p.left) == maxPods {
		p.left = slices.Delete(p.left, 0, 1)
	}
	p.left = append(p.left, keyOf(gone))
}

// lately returns one that is gone by a container's ID.
func (p *Pods) lately(id string) (*pod, string) {
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
func (p *Pods) get(key string) *pod {
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
func (p *Pods) owner(id, name string) (owner *pod, container string) {
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
