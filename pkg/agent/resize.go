package agent

import (
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
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// resizer applies what annotations of running pods ask for to their containers' records in the ledger, which guards follow.
//
// Kubernetes resizes CPU and memory of a running pod, but neither claims nor extended resources; annotations are what it
// leaves to change. They are the pod author's, so they move a container only within what it was allocated.
type resizer struct {
	book    *ledger.Ledger
	pods    *pods
	news    *news
	metrics *Metrics
	log     *slog.Logger
	table   atomic.Pointer[device.Table]
	queue   workqueue.TypedRateLimitingInterface[string]
	status  func(r ledger.Record) (guard.Status, error) // what a container uses; tests replace it

	mu      sync.Mutex
	looked  map[types.UID]bool   // pods whose containers were looked up in the ledger once
	refused map[types.UID]string // what was told to a pod last, so that it is told once
}

// retries is how often a change that is refused is tried again by itself, after half a minute and then twice as long each
// time, up to ten minutes: memory may be freed. After that it waits for the pod to change.
const retries = 12

func newResizer(runDir string, p *pods, n *news, metrics *Metrics, log *slog.Logger) *resizer {
	r := &resizer{book: ledger.Open(runDir), pods: p, news: n, metrics: metrics, log: log, status: snapshot.Ask,
		queue:  workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](30*time.Second, 10*time.Minute)),
		looked: map[types.UID]bool{}, refused: map[types.UID]string{}}
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

// run applies until ctx ends. It does nothing while no pod changes.
func (r *resizer) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, r.queue.ShutDown)
	defer stop()
	if !cache.WaitForCacheSync(ctx.Done(), r.pods.informer.HasSynced) {
		return
	}
	for {
		key, down := r.queue.Get()
		if down {
			return
		}
		switch err := r.apply(key); {
		case err == nil:
			r.queue.Forget(key)
		case r.queue.NumRequeues(key) < retries:
			r.queue.AddRateLimited(key)
		}
		r.queue.Done(key)
	}
}

// apply brings the containers of a pod to its annotations. An error is one that time may mend.
func (r *resizer) apply(key string) error {
	pod, t := r.pods.get(key), r.table.Load()
	if pod == nil || t == nil {
		return nil // gone; or use comes
	}
	records, err := r.book.List()
	if err != nil {
		return err
	}
	var again error
	byPod := false
	for _, c := range pod.running {
		i := slices.IndexFunc(records, func(rec ledger.Record) bool { return rec.ID == c.id })
		if i < 0 {
			continue
		}
		record := records[i]
		byPod = byPod || len(record.ByPod) > 0
		if err := r.change(t, record, pod.Annotations); err != nil {
			again = err
			r.refuse(pod, c.name, err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// One that asks now may ask no more at its next change, which is to be looked at then.
	r.looked[pod.UID] = !asks(pod.Annotations) && !(byPod && again != nil)
	if again == nil {
		delete(r.refused, pod.UID)
	}
	var lasting *wrong
	if errors.As(again, &lasting) {
		return nil // no time mends it
	}
	return again
}

// refuse tells the pod what was refused, once.
func (r *resizer) refuse(pod *pod, container string, err error) {
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
	r.news.send(pod, container, v1.EventTypeWarning, reasonChangeRefused, text)
}

// change brings one container to the annotations.
func (r *resizer) change(t *device.Table, record ledger.Record, annotations map[string]string) error {
	now := asked(annotations)
	if maps.Equal(now, record.ByPod) {
		return nil
	}
	if record.Preload {
		return &wrong{errors.New(`agent: with enforcement = "preload" in cgpu.toml annotations change no running container: use cgpu set on the node`)}
	}
	wishes, err := wish(record, now, t.Config.PodSettings)
	if err != nil {
		return &wrong{err}
	}
	if err := r.room(record, wishes); err != nil {
		return err
	}
	for _, w := range wishes {
		w.ByPod, w.Overcommit, w.Card, w.MaxSpill = true, t.Config.Overcommit, t.Config.Card(), t.Config.MaxSpill.Of(t.HostMemory)
		for _, g := range t.GPUs {
			w.GPUs = append(w.GPUs, ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory})
		}
		// The nonce is checked below: between List and here the ID may have become another create's, whose slices have the
		// same bounds, for they are the same allocation's.
		if _, err := r.book.Change(record.ID, w); err != nil {
			return fmt.Errorf("agent: %w", err)
		}
	}
	err = r.book.Update(record.ID, record.Nonce, func(rec *ledger.Record) error {
		rec.ByPod = now
		return nil
	})
	switch {
	case errors.Is(err, ledger.ErrNotFound): // it has ended
	case err != nil:
		return fmt.Errorf("agent: %w", err)
	default:
		r.metrics.Add("resizes_total", 1)
		r.log.Info("container changed by its pod's annotations", "name", tidy(record.Name, 256), "id", record.ID)
	}
	return nil
}

// room refuses a limit below what the container uses: its next allocations would fail until it has freed the rest.
func (r *resizer) room(record ledger.Record, wishes []ledger.ChangeRequest) error {
	var s *guard.Status
	for _, w := range wishes {
		i := slices.IndexFunc(record.VGPUs, func(v ledger.VGPU) bool { return v.UUID == w.GPU })
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
			case v.UUID != w.GPU:
			case less && v.Used > *w.Limit:
				return fmt.Errorf("agent: annotation %s: the container uses %v on GPU %d, more than the %v wanted: free some first", annotationLimit, v.Used, v.Index, *w.Limit)
			case lessSpill && v.Spilled > *w.Spill:
				return fmt.Errorf("agent: annotation %s: the container has spilled %v on GPU %d, more than the %v wanted: free some first", annotationSpill, v.Spilled, v.Index, *w.Spill)
			}
		}
	}
	return nil
}

// wrong is an error that is the same at the next try.
type wrong struct{ error }

func (w *wrong) Unwrap() error { return w.error }
