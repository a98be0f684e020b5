// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// resizer applies what annotations of running pods ask for to their containers' records in the ledger, which guards follow.
//
// Kubernetes resizes CPU and memory of a running pod, but neither claims nor extended resources; annotations are what it
// leaves to change. They are the pod author's, so they move a container within what it was allocated, and beyond that only into what
// no scheduler was told of (headroom in cgpu.toml), as far as the labels of the pod's namespace let them.
type resizer struct {
	book      *ledger.Ledger
	pods      *Pods
	podEvents *podEvents
	metrics   *Metrics
	log       *slog.Logger
	table     atomic.Pointer[device.Table]
	permits   permits
	queue     workqueue.TypedRateLimitingInterface[string]
	status    func(r ledger.Record) (api.Status, error) // what a container uses; tests replace it

	mu      sync.Mutex
	looked  map[types.UID]bool   // pods whose containers were looked up in the ledger once
	refused map[types.UID]string // what was told to a pod last, so that it is told once
}

// retries is how often a change that is refused is tried again by itself, when what its namespace may is asked anew and then after twice as
// long each time, up to ten minutes: memory may be freed. After that it waits for the pod to change.
const retries = 12

func newResizer(runDir string, p *Pods, ask namespaces, n *podEvents, metrics *Metrics, log *slog.Logger) *resizer {
	r := &resizer{book: ledger.Open(runDir), pods: p, podEvents: n, metrics: metrics, log: log, status: api.Ask,
		permits: permits{ask: ask, now: time.Now, known: map[string]permit{}},
		queue:   workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](keepFor, 10*time.Minute)),
		looked:  map[types.UID]bool{}, refused: map[types.UID]string{}}
	p.changed = append(p.changed, func(pod *pod) {
		if asks(pod.Annotations) || !r.done(pod.UID) {
			key := keyOf(pod)
			r.queue.Forget(key) // its tries begin anew
			r.queue.Add(key)
		}
	})
	p.gone = append(p.gone, func(pod *pod) {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.looked, pod.UID)
		delete(r.refused, pod.UID)
	})
	return r
}

func keyOf(pod *pod) string { return pod.Namespace + "/" + pod.Name }

// done: nothing of the pod is to be looked up.
func (r *resizer) done(uid types.UID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.looked[uid]
}

// use takes another table; what it allows may be other than before, so all pods that ask are looked at.
func (r *resizer) use(t *device.Table) {
	r.table.Store(t)
	for _, o := range r.pods.informer.GetStore().List() {
		if p, ok := o.(*pod); ok && (asks(p.Annotations) || !r.done(p.UID)) {
			r.queue.Add(keyOf(p))
		}
	}
}

// changeEvery is how often the ledger is changed, by all pods together: each change has all guards of the node read it. So no pod is
// changed more often either, however fast its annotations change.
const changeEvery = time.Second

// run applies until ctx ends. It does nothing while no pod changes.
func (r *resizer) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, r.queue.ShutDown)
	defer stop()
	if !cache.WaitForCacheSync(ctx.Done(), r.pods.informer.HasSynced) {
		return
	}
	for {
		keys := r.due()
		if keys == nil {
			return
		}
		r.round(ctx, keys)
		select {
		case <-ctx.Done():
			return
		case <-time.After(changeEvery):
		}
	}
}

// due waits for pods that are to be looked at; nil: there come no more.
func (r *resizer) due() (keys []string) {
	for len(keys) == 0 || r.queue.Len() > 0 && len(keys) < maxPods {
		key, down := r.queue.Get()
		if down {
			return nil
		}
		keys = append(keys, key)
	}
	return keys
}

// round applies what is due. Who was refused before and has not changed since is first: there may not be time to ask for all namespaces.
func (r *resizer) round(ctx context.Context, keys []string) {
	slices.SortStableFunc(keys, func(a, b string) int { return cmp.Compare(r.queue.NumRequeues(b), r.queue.NumRequeues(a)) })
	faults := r.apply(ctx, keys)
	for _, key := range keys {
		switch {
		case faults[key] == nil:
			r.queue.Forget(key)
		case r.queue.NumRequeues(key) < retries:
			r.queue.AddRateLimited(key)
		}
		r.queue.Done(key)
	}
}

// attempt is to bring the containers of a pod to its annotations.
type attempt struct {
	pod   *pod
	byPod bool // annotations have changed a container of it
	err   error
}

// batch is what several attempts change of the ledger.
type batch struct {
	changes []ledger.PodChange
	of      []target // of each change
	may     func(namespace string) (beyond, error)
}

// target is a container that is to be changed; record and id are its name and its ID in the ledger.
type target struct {
	a                     *attempt
	container, record, id string
}

// apply brings the containers of pods to their annotations, in one change of the ledger. An error of a pod's is one that time may mend.
func (r *resizer) apply(ctx context.Context, keys []string) map[string]error {
	t := r.table.Load()
	if t == nil {
		return nil // use comes
	}
	faults := map[string]error{}
	records, err := r.book.List()
	if err != nil {
		for _, key := range keys {
			faults[key] = err
		}
		return faults
	}
	byID := make(map[string][]ledger.Record, len(records))
	for _, record := range records {
		byID[record.ID] = append(byID[record.ID], record)
	}
	ctx, cancel := context.WithTimeout(ctx, namespaceTimeout)
	defer cancel()
	b := batch{may: func(namespace string) (beyond, error) { return r.permits.of(ctx, namespace) }}
	var all []*attempt
	for _, key := range keys {
		if pod := r.pods.get(key); pod != nil { // else it is gone
			a := &attempt{pod: pod}
			all = append(all, a)
			r.gather(&b, a, t, byID)
		}
	}
	r.change(b)
	for _, a := range all {
		if err := r.end(a); err != nil {
			faults[keyOf(a.pod)] = err
		}
	}
	return faults
}

// gather plans for the containers of one pod.
func (r *resizer) gather(b *batch, a *attempt, t *device.Table, records map[string][]ledger.Record) {
	for _, c := range a.pod.running {
		if len(records[c.id]) == 0 {
			continue
		}
		if len(records[c.id]) > 1 {
			r.refuse(a, c.name, errors.New("agent: another engine of the node has a container of the same ID: use cgpu set on the node"))
			continue
		}
		record := records[c.id][0]
		a.byPod = a.byPod || len(record.ByPod) > 0
		change, err := r.plan(t, record, a.pod.Annotations, func() (beyond, error) { return b.may(a.pod.Namespace) })
		if err != nil {
			r.refuse(a, c.name, err)
		} else if change != nil {
			b.changes, b.of = append(b.changes, *change), append(b.of, target{a, c.name, record.Name, record.ID})
		}
	}
}

// change makes what was planned.
func (r *resizer) change(b batch) {
	if len(b.changes) == 0 {
		return
	}
	for i, err := range r.book.ChangeByPods(b.changes) {
		of := b.of[i]
		switch {
		case errors.Is(err, ledger.ErrNotFound): // it has ended
		case err != nil:
			r.refuse(of.a, of.container, fmt.Errorf("agent: %w", err))
		default:
			r.metrics.Add("resizes_total", 1)
			r.log.Info("container changed by its pod's annotations", "name", tidy(of.record, 256), "id", of.id)
		}
	}
}

// end notes what became of an attempt, and returns the error that time may mend.
func (r *resizer) end(a *attempt) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	// One that asks now may ask no more at its next change, which is to be looked at then.
	r.looked[a.pod.UID] = !asks(a.pod.Annotations) && !(a.byPod && a.err != nil)
	if a.err == nil {
		delete(r.refused, a.pod.UID)
	}
	var lasting *wrong
	if errors.As(a.err, &lasting) {
		return nil // no time mends it
	}
	return a.err
}

// refuse tells the pod what was refused, once. That its namespace could not be asked for is worth telling only where it stays so.
func (r *resizer) refuse(a *attempt, container string, err error) {
	a.err = err
	pod := a.pod
	if _, is := errors.AsType[*unasked](err); is && r.queue.NumRequeues(keyOf(pod)) == 0 {
		return
	}
	text := strings.TrimPrefix(err.Error(), "agent: ")
	r.mu.Lock()
	told := r.refused[pod.UID] == container+text
	r.refused[pod.UID] = container + text
	r.mu.Unlock()
	if told {
		return
	}
	r.metrics.Add("resizes_refused_total", 1)
	r.log.Info("change refused", "pod", keyOf(pod), "container", container, "err", tidy(text, maxMessage))
	r.podEvents.send(pod, container, v1.EventTypeWarning, reasonChangeRefused, text)
}

// plan is how one container comes to the annotations; nil where it is there.
func (r *resizer) plan(t *device.Table, record ledger.Record, annotations map[string]string,
	may func() (beyond, error)) (*ledger.PodChange, error) {
	now := asked(annotations)
	if maps.Equal(now, record.ByPod) {
		return nil, nil
	}
	if record.Preload || record.DriverLimits { // whose page, or driver, would have to be told
		return nil, &wrong{errors.New(`agent: with enforcement = "preload", or limits, in cgpu.toml annotations change no running container: ` +
			`use cgpu set on the node`)}
	}
	headroom := map[string]quota.Bytes{}
	for _, g := range t.GPUs {
		headroom[g.UUID] = device.HeadroomOf(t.Config, g)
	}
	changes, err := annotationChanges(record, now, allowance{t.Config.PodSettings, headroom, t.Config.HeadroomCores, may})
	if _, mends := errors.AsType[*later](err); err != nil && !mends {
		return nil, &wrong{err}
	}
	if err != nil {
		return nil, err
	}
	if err := r.room(record, changes); err != nil {
		return nil, err
	}
	for i := range changes {
		w := &changes[i]
		w.ByPod, w.Overcommit, w.Card, w.MaxSpill = true, t.Config.Overcommit, t.Config.Card(), t.Config.MaxSpill.Of(t.HostMemory)
		w.Headroom, w.HeadroomCores = headroom[w.Only[0]], t.Config.HeadroomCores
		for _, g := range t.GPUs {
			w.GPUs = append(w.GPUs, ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory})
		}
	}
	return &ledger.PodChange{Nonce: record.Nonce, Requests: changes, ByPod: now}, nil
}

// room refuses a limit below what the container uses: its next allocations would fail until it has freed the rest.
func (r *resizer) room(record ledger.Record, changes []ledger.ChangeRequest) error {
	var s *api.Status
	for _, w := range changes {
		i := slices.IndexFunc(record.VGPUs, func(v ledger.VGPU) bool { return v.UUID == w.Only[0] })
		less := w.Limit != nil && *w.Limit < record.VGPUs[i].Limit
		lessSpill := w.Spill != nil && *w.Spill < record.VGPUs[i].Spill
		if !less && !lessSpill {
			continue
		}
		if s == nil {
			got, err := r.status(record)
			if err != nil {
				return fmt.Errorf("agent: what the container uses is not known, because its guard does not answer (%w)", err)
			}
			s = &got
		}
		for _, v := range s.VGPUs {
			switch {
			case !w.Changes(v.UUID):
			case less && v.Used > *w.Limit:
				return fmt.Errorf("agent: annotation %s: the container uses %v on GPU %d, more than the %v wanted: free some first",
					annotationLimit, v.Used, v.Index, *w.Limit)
			case lessSpill && v.Spilled > *w.Spill:
				return fmt.Errorf("agent: annotation %s: the container has spilled %v on GPU %d, more than the %v wanted: free some first",
					annotationSpill, v.Spilled, v.Index, *w.Spill)
			}
		}
	}
	return nil
}

// wrong is an error that is the same at the next try.
type wrong struct{ error }

func (w *wrong) Unwrap() error { return w.error }
