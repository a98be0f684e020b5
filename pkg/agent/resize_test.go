// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func given() ledger.VGPU {
	return ledger.VGPU{UUID: "GPU-0", Slice: quota.Slice{Limit: 6 * quota.GiB, Spill: quota.GiB,
		Share: quota.Share{Weight: 3, Percent: 30, Priority: quota.PriorityDefault}}}
}

func recordOf(plugin bool) ledger.Record {
	return ledger.Record{ID: "c1", Nonce: "0123456789abcdef", Name: "ns/web/main", VGPUs: []ledger.VGPU{given()},
		Allocated: []ledger.Allocation{{ID: "claim/1", UUID: "GPU-0", Given: given(), Plugin: plugin}}, LauncherPID: os.Getpid()}
}

func TestWish(t *testing.T) {
	all := quota.Choices()
	for what, tt := range map[string]struct {
		now, before map[string]string
		claim       bool
		containers  int // of the share; 0: one
		free        []quota.Choice
		labels      map[string]string // of the namespace, on a node that keeps 4 GiB and 20 percent; nil: of one that keeps none
		want        string            // settings of the request, or what the error has
		refused     bool
	}{
		"nothing":              {want: ""},
		"lower memory":         {now: map[string]string{annotationLimit: "4Gi"}, want: "limit 4096MiB"},
		"our units":            {now: map[string]string{annotationLimit: "4GiB"}, want: "limit 4096MiB"},
		"all of it":            {now: map[string]string{annotationLimit: "6144Mi"}, want: "limit 6144MiB"},
		"more memory":          {now: map[string]string{annotationLimit: "6145Mi"}, free: all, refused: true, want: "6144MiB was allocated"},
		"no unit":              {now: map[string]string{annotationLimit: "6"}, refused: true, want: "want a size"},
		"huge":                 {now: map[string]string{annotationLimit: "99999999999999999999Ei"}, refused: true, want: "annotation"},
		"negative":             {now: map[string]string{annotationLimit: "-1Gi"}, refused: true, want: "want a size"},
		"tiny":                 {now: map[string]string{annotationLimit: "1Ki"}, refused: true, want: "64Mi"},
		"exponents":            {now: map[string]string{annotationLimit: "1e3"}, refused: true, want: "want a size"},
		"garbage":              {now: map[string]string{annotationLimit: "\x00\x1b"}, refused: true, want: "want a size"},
		"long":                 {now: map[string]string{annotationLimit: strings.Repeat("1", 10000)}, refused: true, want: "256 bytes"},
		"weight garbage":       {now: map[string]string{annotationWeight: "x"}, refused: true, want: "gpu-schd-weight"},
		"lower weight":         {now: map[string]string{annotationWeight: "2"}, want: "weight 2"},
		"same weight":          {now: map[string]string{annotationWeight: "3"}, want: "weight 3"},
		"more weight":          {now: map[string]string{annotationWeight: "5"}, refused: true, want: "pod_settings"},
		"more weight, may":     {now: map[string]string{annotationWeight: "5"}, free: all, want: "weight 5"},
		"more weight of claim": {now: map[string]string{annotationWeight: "5"}, free: all, claim: true, refused: true, want: "claim"},
		"lower percent":        {now: map[string]string{annotationPercent: "10"}, want: "percent 10"},
		"percent beyond":       {now: map[string]string{annotationPercent: "40"}, free: all, refused: true, want: "30 percent was allocated"},
		"lower priority":       {now: map[string]string{annotationPriority: "best-effort"}, want: "priority best-effort"},
		"high priority":        {now: map[string]string{annotationPriority: "high"}, refused: true, want: "pod_settings"},
		"high priority, may": {now: map[string]string{annotationPriority: "high"}, free: []quota.Choice{quota.ChoosePriority},
			want: "priority high"},
		"more spill": {now: map[string]string{annotationSpill: "2GiB"}, refused: true, want: "pod_settings"},
		"less spill": {now: map[string]string{annotationSpill: "512MiB"}, want: "spill 512MiB"},
		"raised": {now: map[string]string{annotationLimit: "8Gi", annotationPercent: "40", annotationWeight: "6"}, claim: true,
			labels: map[string]string{labelMaxMemory: "2Gi", labelMaxCores: "10", labelMaxWeight: "6"}, want: "limit 8192MiB weight 6 percent 40"},
		"raised, and what is lower": {now: map[string]string{annotationLimit: "8Gi", annotationPercent: "10"},
			labels: map[string]string{labelMaxMemory: "2Gi"}, want: "limit 8192MiB percent 10"},
		"memory, the node has none": {now: map[string]string{annotationLimit: "7Gi"}, refused: true, want: "headroom in cgpu.toml"},
		"memory, no label": {now: map[string]string{annotationLimit: "7Gi"}, labels: map[string]string{"x": "y"}, refused: true,
			want: "may have 0MiB beyond that for all containers of the share (label cgpu.io/max-resize-memory)"},
		"memory, beyond the label": {now: map[string]string{annotationLimit: "9Gi"},
			labels: map[string]string{labelMaxMemory: "2Gi"}, refused: true,
			want: "may have 2048MiB beyond that"},
		"memory, a label that is none": {now: map[string]string{annotationLimit: "7Gi"},
			labels: map[string]string{labelMaxMemory: "much"}, refused: true,
			want: "label cgpu.io/max-resize-memory"},
		"percent, the node has none": {now: map[string]string{annotationPercent: "31"}, refused: true, want: "headroom_cores in cgpu.toml"},
		"percent, beyond the label": {now: map[string]string{annotationPercent: "36"},
			labels: map[string]string{labelMaxCores: "5"}, refused: true,
			want: "30 percent was allocated, and pods of this namespace may have 5 beyond"},
		"percent, a negative label": {now: map[string]string{annotationPercent: "31"},
			labels: map[string]string{labelMaxCores: "-5"}, refused: true,
			want: "want a quantity"},
		"weight, beyond the label": {now: map[string]string{annotationWeight: "7"}, claim: true, labels: map[string]string{labelMaxWeight: "6"},
			refused: true, want: "may have 6"},
		"weight, any": {now: map[string]string{annotationWeight: "9"}, claim: true,
			labels: map[string]string{labelAllowWeight: "true"}, want: "weight 9"},
		"weight, the label that bounds counts": {now: map[string]string{annotationWeight: "9"}, claim: true,
			labels: map[string]string{labelAllowWeight: "true", labelMaxWeight: "4"}, refused: true, want: "may have 4"},
		"priority is no matter of these": {now: map[string]string{annotationPriority: "high"}, claim: true,
			labels: map[string]string{labelMaxMemory: "2Gi", labelAllowWeight: "true"}, refused: true, want: "default was allocated"},
		"all or nothing": {now: map[string]string{annotationLimit: "4Gi", annotationWeight: "9"}, refused: true, want: "gpu-schd-weight"},
		"forged GPU":     {now: map[string]string{annotationLimit: "4Gi"}, want: "limit 4096MiB"},
		"memory, for two containers": {now: map[string]string{annotationLimit: "8Gi"}, containers: 2,
			labels:  map[string]string{labelMaxMemory: "3Gi"},
			refused: true, want: "may have 3072MiB beyond that for all containers of the share"},
		"percent, for two containers": {now: map[string]string{annotationPercent: "36"}, containers: 2,
			labels:  map[string]string{labelMaxCores: "10"},
			refused: true, want: "may have 10 beyond that for all containers"},
		"only what changed": {now: map[string]string{annotationLimit: "4Gi", annotationWeight: "2"},
			before: map[string]string{annotationLimit: "4Gi"}, want: "weight 2"},
		"taken away": {before: map[string]string{annotationLimit: "4Gi", annotationWeight: "2", annotationPriority: "high"},
			want: "limit 6144MiB weight 3 priority default"},
	} {
		r := recordOf(!tt.claim)
		r.ByPod = tt.before
		r.Allocated[0].Containers = tt.containers
		may := allowance{free: tt.free, beyond: func() (beyond, error) { return beyondOf(tt.labels) }}
		if tt.labels != nil {
			may.headroom, may.cores = map[string]quota.Bytes{"GPU-0": 4 * quota.GiB}, 20
		}
		list, err := annotationChanges(r, tt.now, may)
		if tt.refused {
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: %v, want an error with %q", what, err, tt.want)
			}
			continue
		}
		if err != nil || len(list) != 1 {
			t.Errorf("%s: %v, %v", what, list, err)
			continue
		}
		var parts []string
		q := list[0]
		if q.Limit != nil {
			parts = append(parts, "limit "+q.Limit.String())
		}
		if q.Weight != nil {
			parts = append(parts, "weight "+string(rune('0'+*q.Weight)))
		}
		if q.Percent != nil {
			parts = append(parts, fmt.Sprint("percent ", *q.Percent))
		}
		if q.Priority != nil {
			parts = append(parts, "priority "+q.Priority.String())
		}
		if q.Spill != nil {
			parts = append(parts, "spill "+q.Spill.String())
		}
		if got := strings.Join(parts, " "); got != tt.want || q.Only[0] != "GPU-0" {
			t.Errorf("%s: %q, want %q", what, got, tt.want)
		}
	}
	r := recordOf(true)
	r.Allocated = nil // Docker's, or a pod's where pods = "any"
	if _, err := annotationChanges(r, map[string]string{annotationLimit: "1Gi"}, allowance{free: all}); err == nil {
		t.Error("a container without an allocation is changed")
	}
}

// What an administrator has lowered is the most that an author gets, also of what the node leaves to authors.
func TestWishBelowAdministrator(t *testing.T) {
	weight, none, percent, spill, high, best := 2, 0, 10, quota.Bytes(0), quota.PriorityHigh, quota.PriorityBestEffort
	for what, tt := range map[string]struct {
		set     ledger.Settings
		now     map[string]string
		refused bool
	}{
		"weight beyond":           {ledger.Settings{Weight: &weight}, map[string]string{annotationWeight: "3"}, true},
		"weight":                  {ledger.Settings{Weight: &weight}, map[string]string{annotationWeight: "2"}, false},
		"another setting is free": {ledger.Settings{Weight: &weight}, map[string]string{annotationPriority: "high"}, false},
		"percent beyond":          {ledger.Settings{Percent: &percent}, map[string]string{annotationPercent: "20"}, true},
		"percent":                 {ledger.Settings{Percent: &percent}, map[string]string{annotationPercent: "10"}, false},
		"no percentage set":       {ledger.Settings{Percent: &none}, map[string]string{annotationPercent: "20"}, false},
		"spill":                   {ledger.Settings{Spill: &spill}, map[string]string{annotationSpill: "512MiB"}, true},
		"priority":                {ledger.Settings{Priority: &best}, map[string]string{annotationPriority: "default"}, true},
		"no lower":                {ledger.Settings{Priority: &high}, map[string]string{annotationPriority: "high"}, false},
	} {
		r := recordOf(true)
		r.Allocated[0].Set = tt.set
		everything := allowance{free: quota.Choices(), headroom: map[string]quota.Bytes{"GPU-0": 16 * quota.GiB}, cores: 100,
			beyond: func() (beyond, error) { return beyond{16 * quota.GiB, 100, 64}, nil }}
		if _, err := annotationChanges(r, tt.now, everything); (err != nil) != tt.refused || err != nil &&
			!strings.Contains(err.Error(), "administrator") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The weight that a namespace may have is that of all containers of a share, as in a claim.
func TestWeightOfContainers(t *testing.T) {
	r := recordOf(false)
	r.Allocated[0].Containers = 3
	for weight, refused := range map[string]bool{"4": false, "5": true} {
		may := allowance{beyond: func() (beyond, error) { return beyond{weight: 12}, nil }}
		if _, err := annotationChanges(r, map[string]string{annotationWeight: weight}, may); (err != nil) != refused {
			t.Errorf("%s each of 12: %v", weight, err)
		}
	}
}

// bench is an agent's resizer over a ledger with one container, without its loop.
type bench struct {
	*resizer
	t    *testing.T
	used quota.Bytes
	pod  *v1.Pod
	// labels are those of the pod's namespace, asked how often it was asked for them.
	labels map[string]string
	down   error // of the API server
	asked  int
}

func newBench(t *testing.T, dir string) *bench {
	t.Helper()
	p := newPods(answer(t), silent)
	m := NewMetrics()
	b := &bench{resizer: newResizer(dir, p, nil, newPodEvents(t.Context(), fake.NewClientset(), "n", p, m, silent), m, silent), t: t}
	b.permits.ask = func(_ context.Context, name string) (map[string]string, error) {
		b.asked++
		if name != "ns" {
			t.Errorf("asked for namespace %s", name)
		}
		return b.labels, b.down
	}
	b.status = func(r ledger.Record) (api.Status, error) {
		if b.used == 0 {
			return api.Status{}, errors.New("no answer")
		}
		return api.Status{VGPUs: []api.VGPUStatus{{UUID: "GPU-0", Used: b.used}}}, nil
	}
	table := tableOf(device.PodsAllocated, device.GPU{UUID: "GPU-0", Memory: 16 * quota.GiB})
	table.Config.Policy, table.Config.PrioRatio, table.Config.CapCycle = sched.PolicyPreempt, sched.DefaultPrioRatio, 100*time.Millisecond
	table.Config.MaxSpill, table.HostMemory = device.Part{Percent: 50}, 64*quota.GiB
	b.use(table)
	b.pod = &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "u"},
		Spec:   v1.PodSpec{Containers: []v1.Container{{Name: "main"}}},
		Status: v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: "main", ContainerID: "containerd://c1"}}}}
	b.put(nil)
	return b
}

// apply is one round for a pod.
func (b *bench) apply(key string) error { return b.resizer.apply(b.t.Context(), []string{key})[key] }

// put gives the pod annotations.
func (b *bench) put(annotations map[string]string) {
	b.t.Helper()
	pod := b.pod.DeepCopy()
	pod.Annotations = annotations
	if err := b.pods.informer.GetStore().Update(read(b.t, pod)); err != nil {
		b.t.Fatal(err)
	}
}

func reserved(t *testing.T, book *ledger.Ledger, r ledger.Record) {
	t.Helper()
	_, err := book.Reserve(ledger.Request{Record: r, GPUs: []ledger.GPU{{UUID: "GPU-0", Memory: 16 * quota.GiB}}, Overcommit: 1,
		Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio}, MaxSpill: 8 * quota.GiB})
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bench) slice() ledger.VGPU {
	b.t.Helper()
	r, err := b.book.Find("c1")
	if err != nil {
		b.t.Fatal(err)
	}
	return r.VGPUs[0]
}

func TestApply(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	b := newBench(t, dir)
	if err := b.apply("ns/web"); err != nil {
		t.Errorf("no ledger yet: %v", err)
	}
	reserved(t, b.book, recordOf(true))
	write := func() time.Time {
		info, err := os.Stat(ledger.File(dir))
		if err != nil {
			t.Fatal(err)
		}
		return info.ModTime()
	}

	b.put(map[string]string{annotationLimit: "4Gi", annotationWeight: "1"})
	if err := b.apply("ns/web"); err == nil || b.slice() != given() {
		t.Errorf("what it uses is not known: %v, %+v", err, b.slice())
	}
	b.used = 5 * quota.GiB
	if err := b.apply("ns/web"); err == nil || !strings.Contains(err.Error(), "free some first") || b.slice() != given() {
		t.Errorf("it uses more: %v, %+v", err, b.slice())
	}
	b.used = quota.GiB
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 4*quota.GiB || b.slice().Weight != 1 || b.slice().Percent != 30 {
		t.Errorf("lower: %v, %+v", err, b.slice())
	}
	at := write()
	for range 10 {
		if err := b.apply("ns/web"); err != nil {
			t.Error(err)
		}
	}
	if write() != at {
		t.Error("nothing changed, and the ledger was written")
	}

	// An administrator's change stands until the pod's author changes something.
	limit := 2 * quota.GiB
	if _, err := b.book.Change("0123456789abcdef", ledger.ChangeRequest{GPUs: []ledger.GPU{{UUID: "GPU-0", Memory: 16 * quota.GiB}},
		Overcommit: 1, Card: b.table.Load().Config.Card(), Settings: ledger.Settings{Limit: &limit}}); err != nil {
		t.Fatal(err)
	}
	b = newBench(t, dir) // an agent that starts again
	b.used = quota.GiB
	b.put(map[string]string{annotationLimit: "4Gi", annotationWeight: "1"})
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 2*quota.GiB {
		t.Errorf("a new agent undid cgpu set: %v, %+v", err, b.slice())
	}
	b.put(map[string]string{annotationLimit: "5Gi", annotationWeight: "1"})
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 2*quota.GiB || b.metrics.Get("resizes_refused_total") != 1 {
		t.Errorf("raised beyond what an administrator left: %v, %+v", err, b.slice())
	}
	b.put(map[string]string{annotationLimit: "1Gi", annotationWeight: "1"})
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != quota.GiB {
		t.Errorf("lowered further: %v, %+v", err, b.slice())
	}
	b.put(map[string]string{annotationWeight: "1"})
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 2*quota.GiB {
		t.Errorf("taken away: %v, %+v, want what the administrator left", err, b.slice())
	}
	limit = 6 * quota.GiB // who gives it back
	if _, err := b.book.Change("0123456789abcdef", ledger.ChangeRequest{GPUs: []ledger.GPU{{UUID: "GPU-0", Memory: 16 * quota.GiB}},
		Overcommit: 1, Card: b.table.Load().Config.Card(), Settings: ledger.Settings{Limit: &limit}}); err != nil {
		t.Fatal(err)
	}
	b.put(map[string]string{annotationLimit: "5Gi", annotationWeight: "1"})
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 5*quota.GiB {
		t.Errorf("raised within the allocation: %v, %+v", err, b.slice())
	}
	// What was taken away while no agent ran is set back by the next.
	b = newBench(t, dir)
	if err := b.apply("ns/web"); err != nil || b.slice() != given() {
		t.Errorf("taken away: %v, %+v", err, b.slice())
	}
	if r, _ := b.book.Find("c1"); len(r.ByPod) != 0 {
		t.Errorf("by pod: %v", r.ByPod)
	}
	if !b.done("u") {
		t.Error("a pod that asks for nothing is looked up again at each of its changes")
	}

	b.put(map[string]string{annotationLimit: "8Gi"})
	for range 3 {
		if err := b.apply("ns/web"); err != nil {
			t.Errorf("no time mends it, so it is not tried again: %v", err)
		}
	}
	if n := b.metrics.Get("resizes_refused_total"); n != 1 || b.slice() != given() {
		t.Errorf("told %d times, want once; %+v", n, b.slice())
	}
}

// A running pod gets more than was allocated, where the node has kept something from the scheduler and the namespace may have it; and
// never what the scheduler believes is there.
func TestRaise(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	b := newBench(t, dir)
	b.used = quota.GiB
	reserved(t, b.book, recordOf(false))
	more := map[string]string{annotationLimit: "8Gi", annotationPercent: "40"}
	b.put(more)
	if err := b.apply("ns/web"); err != nil || b.slice() != given() || b.asked != 0 || b.metrics.Get("resizes_refused_total") != 1 {
		t.Errorf("the node keeps nothing: %v, %+v, asked %d times", err, b.slice(), b.asked)
	}
	table := *b.table.Load()
	table.Config.Headroom, table.Config.HeadroomCores = device.Part{Bytes: 3 * quota.GiB}, 20
	b.use(&table)
	if err := b.apply("ns/web"); err == nil || b.slice() != given() {
		t.Errorf("the namespace may not: %v, %+v", err, b.slice())
	}
	b.down = errors.New("no answer")
	clear(b.permits.known) // a while later
	if err := b.apply("ns/web"); !errors.Is(err, b.down) || b.slice() != given() {
		t.Errorf("what it may is not known: %v, %+v", err, b.slice())
	}
	b.down, b.asked, b.labels = nil, 0, map[string]string{labelMaxMemory: "4Gi", labelMaxCores: "15"}
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 8*quota.GiB || b.slice().Percent != 40 || b.asked != 1 {
		t.Errorf("raised: %v, %+v, asked %d times", err, b.slice(), b.asked)
	}
	if err := b.apply("ns/web"); err != nil || b.asked != 1 {
		t.Errorf("it is so: %v, asked %d times", err, b.asked)
	}
	b.put(map[string]string{annotationLimit: "10Gi", annotationPercent: "40"}) // of which the namespace may have 4, and the node has 3
	if err := b.apply("ns/web"); err == nil || !strings.Contains(err.Error(), "that no scheduler gives out") ||
		b.slice().Limit != 8*quota.GiB {
		t.Errorf("the scheduler's: %v, %+v", err, b.slice())
	}
	b = newBench(t, dir) // an agent that starts again, on a node that keeps nothing any more
	b.used = 7 * quota.GiB
	b.put(more)
	if err := b.apply("ns/web"); err != nil || b.slice().Limit != 8*quota.GiB {
		t.Errorf("a new agent takes back what a pod has: %v, %+v", err, b.slice())
	}
	b.put(nil)
	if err := b.apply("ns/web"); err == nil || b.slice().Limit != 8*quota.GiB {
		t.Errorf("it uses more than was allocated: %v, %+v", err, b.slice())
	}
	b.used = quota.GiB
	if err := b.apply("ns/web"); err != nil || b.slice() != given() {
		t.Errorf("set back: %v, %+v", err, b.slice())
	}
}

// A namespace is asked for once in a while, however many pods of it are due, and the labels alone of what is told are kept.
func TestNamespaces(t *testing.T) {
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		if r.URL.Path != "/api/v1/namespaces/ns" || r.Header.Get("Accept") != runtime.ContentTypeProtobuf {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns", Labels: map[string]string{labelMaxMemory: "2Gi", labelMaxCores: "10"}}}
		for i := range 5000 {
			metav1.SetMetaDataLabel(&ns.ObjectMeta, fmt.Sprint("other-", i), strings.Repeat("x", 63))
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		w.Write(encoded(t, ns))
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	labels, err := namespacesOf(client)(t.Context(), "ns")
	if err != nil || !maps.Equal(labels, map[string]string{labelMaxMemory: "2Gi", labelMaxCores: "10"}) {
		t.Errorf("%v, %v", labels, err)
	}
	now := time.Now()
	p := permits{ask: namespacesOf(client), now: func() time.Time { return now }, known: map[string]permit{}}
	asked = 0
	for range 3 {
		if may, err := p.of(t.Context(), "ns"); err != nil || may != (beyond{2 * quota.GiB, 10, 0}) {
			t.Errorf("%+v, %v", may, err)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	if _, err := p.of(t.Context(), "other"); err == nil {
		t.Error("a namespace that is not there may something")
	}
	now = now.Add(keepFor)
	if _, err := p.of(t.Context(), "ns"); err != nil || asked != 3 {
		t.Errorf("what it may is not asked anew: %v, %d times", err, asked)
	}
	// The agent's other requests leave these alone, and these them.
	slow, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: 0.001, Burst: 1})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), namespaceTimeout)
	defer cancel()
	for range 3 {
		if _, err := namespacesOf(slow)(ctx, "ns"); err != nil {
			t.Error(err)
		}
	}
}

// Whoever makes namespaces, or none that can be asked for, fills no memory.
func TestPermitsBounded(t *testing.T) {
	now := time.Now()
	p := permits{now: func() time.Time { return now }, known: map[string]permit{},
		ask: func(context.Context, string) (map[string]string, error) { return nil, nil }}
	for i := range 3 * maxPods {
		if _, err := p.of(t.Context(), fmt.Sprint(i)); err != nil || len(p.known) > maxPods {
			t.Fatalf("%v, %d are known", err, len(p.known))
		}
	}
	now = now.Add(keepFor)
	if _, err := p.of(t.Context(), "late"); err != nil || len(p.known) != 1 {
		t.Errorf("%v, %d are known", err, len(p.known))
	}
}

// That a namespace could not be asked for is told when it stays so, and its pod is the first for which it is tried again.
func TestUnasked(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "run"))
	b.used = quota.GiB
	table := *b.table.Load()
	table.Config.Headroom = device.Part{Bytes: 3 * quota.GiB}
	b.use(&table)
	second := recordOf(false)
	second.ID, second.Nonce, second.Allocated = "c2", "0123456789abcdee", slices.Clone(second.Allocated)
	second.Allocated[0].ID = "claim/2"
	reserved(t, b.book, recordOf(false))
	reserved(t, b.book, second)
	pod := b.pod.DeepCopy()
	pod.Namespace, pod.UID, pod.Annotations = "flaps", "v", map[string]string{annotationLimit: "8Gi"}
	pod.Status.ContainerStatuses[0].ContainerID = "containerd://c2"
	if err := b.pods.informer.GetStore().Add(read(t, pod)); err != nil {
		t.Fatal(err)
	}
	b.put(map[string]string{annotationLimit: "8Gi"})
	var asked []string
	b.permits.ask = func(_ context.Context, name string) (map[string]string, error) {
		asked = append(asked, name)
		return nil, errors.New("no time")
	}
	told := func() uint64 { return b.metrics.Get("resizes_refused_total") }
	b.round(t.Context(), []string{"ns/web"})
	if told() != 0 {
		t.Error("told at the first try")
	}
	b.round(t.Context(), []string{"flaps/web", "ns/web"})
	if !slices.Equal(asked, []string{"ns", "ns", "flaps"}) || told() != 1 {
		t.Errorf("asked for %v, told %d times", asked, told())
	}
}

// Which of two containers of one ID is the pod's nobody can tell: neither is changed, and the pod is told without a word of the other.
func TestApplySameID(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "run"))
	b.used = quota.MiB
	for i, root := range []string{"/run/a", "/run/b"} {
		r := recordOf(true)
		r.Root, r.Nonce, r.Allocated[0].ID = root, fmt.Sprint("nonce", i), root
		r.VGPUs[0].Limit, r.VGPUs[0].Spill, r.VGPUs[0].Percent = quota.GiB, 0, 10
		r.Allocated[0].Given = r.VGPUs[0]
		reserved(t, b.book, r)
	}
	b.put(map[string]string{annotationWeight: "1"})
	if err := b.apply("ns/web"); err == nil || !strings.Contains(err.Error(), "of the same ID") || strings.Contains(err.Error(), "nonce") {
		t.Error(err)
	}
	records, err := b.book.List()
	if err != nil || len(records) != 2 || records[0].VGPUs[0].Weight != 3 || records[1].VGPUs[0].Weight != 3 {
		t.Errorf("%+v, %v", records, err)
	}
}

// Annotations that change as fast as can be, of as many pods as there are, change the ledger once each time that it is their turn, to
// what they are then; a pod whose change does not fit is none of the others' concern.
func TestFlapping(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	b := newBench(t, dir)
	b.used = quota.MiB
	for i := range 8 {
		r := recordOf(true)
		r.ID, r.Nonce, r.Name, r.Allocated[0].ID = fmt.Sprint("c", i), fmt.Sprint("n", i), "", fmt.Sprint("claim/", i)
		r.VGPUs[0].Limit, r.Allocated[0].Given.Limit = quota.GiB, quota.GiB
		r.VGPUs[0].Spill, r.Allocated[0].Given.Spill = 0, 0
		r.VGPUs[0].Percent, r.Allocated[0].Given.Percent = 10, 10
		reserved(t, b.book, r)
	}
	writes := writesOf(t, dir)
	pod := func(i, weight int) *pod {
		p := podOf("ns", fmt.Sprint("p", i), "main", fmt.Sprint("c", i))
		p.Annotations = map[string]string{annotationWeight: fmt.Sprint(weight)}
		return read(t, p)
	}
	for round := range 3 {
		for flap := range 50 {
			for i := range 8 {
				p := pod(i, 1+(flap+round)%2)
				if i == 5 {
					p.Annotations[annotationWeight] = "9" // more than was allocated
				}
				if err := b.pods.informer.GetStore().Update(p); err != nil {
					t.Fatal(err)
				}
				for _, f := range b.pods.changed {
					f(p)
				}
			}
		}
		b.round(t.Context(), b.due())
		if n := writes(); n != 1 {
			t.Fatalf("400 patches of annotations are %d changes of the ledger, want 1", n)
		}
		for i := range 8 {
			want := 1 + (49+round)%2
			if i == 5 {
				want = 3
			}
			if r, err := b.book.Find(fmt.Sprint("c", i)); err != nil || r.VGPUs[0].Weight != want {
				t.Errorf("round %d: container %d: %+v, %v, want weight %d", round, i, r.VGPUs, err, want)
			}
		}
	}
	if n := b.queue.Len(); n != 0 {
		t.Errorf("%d pods are still due", n)
	}
}

// writesOf counts how often the ledger was written since it was last asked.
func writesOf(t *testing.T, dir string) func() int {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO); err != nil {
		t.Fatal(err)
	}
	return func() (count int) {
		buf := make([]byte, 64<<10)
		n, _ := unix.Read(fd, buf)
		return strings.Count(string(buf[:max(n, 0)]), filepath.Base(ledger.File(dir))+"\x00")
	}
}

// Whom the ID does not belong to, whatever his name is, is not changed.
func TestApplyForgedName(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "run"))
	b.used = quota.MiB
	r := recordOf(true)
	r.ID = "docker1" // which a user of Docker named like the pod's container
	reserved(t, b.book, r)
	b.put(map[string]string{annotationLimit: "1Gi"})
	if err := b.apply("ns/web"); err != nil {
		t.Fatal(err)
	}
	if got, _ := b.book.Find("docker1"); got.VGPUs[0] != given() {
		t.Errorf("%+v", got.VGPUs)
	}
}

func TestAsked(t *testing.T) {
	if asked(map[string]string{"cgpu.io/gpu-mem-container": "15", "x": "y"}) != nil ||
		asks(map[string]string{"cgpu.io/gpu-visible-devices": "all"}) {
		t.Error("annotations that change nothing are taken for some that do")
	}
	in := map[string]string{annotationLimit: "1Gi", annotationHighPrio: "1", "x": "y"}
	if got := asked(in); !maps.Equal(got, map[string]string{annotationLimit: "1Gi", annotationHighPrio: "1"}) {
		t.Error(got)
	}
}
