// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func given() ledger.VGPU {
	return ledger.VGPU{UUID: "GPU-0", Limit: 6 * quota.GiB, Weight: 3, Percent: 30, Priority: quota.PriorityDefault, Spill: quota.GiB}
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
		free        []quota.Choice
		want        string // settings of the request, or what the error has
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
		"more spill":     {now: map[string]string{annotationSpill: "2GiB"}, refused: true, want: "pod_settings"},
		"less spill":     {now: map[string]string{annotationSpill: "512MiB"}, want: "spill 512MiB"},
		"all or nothing": {now: map[string]string{annotationLimit: "4Gi", annotationWeight: "9"}, refused: true, want: "gpu-schd-weight"},
		"forged GPU":     {now: map[string]string{annotationLimit: "4Gi"}, want: "limit 4096MiB"},
		"only what changed": {now: map[string]string{annotationLimit: "4Gi", annotationWeight: "2"},
			before: map[string]string{annotationLimit: "4Gi"}, want: "weight 2"},
		"taken away": {before: map[string]string{annotationLimit: "4Gi", annotationWeight: "2", annotationPriority: "high"},
			want: "limit 6144MiB weight 3 priority default"},
	} {
		r := recordOf(!tt.claim)
		r.ByPod = tt.before
		list, err := annotationChanges(r, tt.now, tt.free)
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
			parts = append(parts, "percent "+map[int]string{10: "10"}[*q.Percent])
		}
		if q.Priority != nil {
			parts = append(parts, "priority "+q.Priority.String())
		}
		if q.Spill != nil {
			parts = append(parts, "spill "+q.Spill.String())
		}
		if got := strings.Join(parts, " "); got != tt.want || q.GPU != "GPU-0" {
			t.Errorf("%s: %q, want %q", what, got, tt.want)
		}
	}
	r := recordOf(true)
	r.Allocated = nil // Docker's, or a pod's where pods = "any"
	if _, err := annotationChanges(r, map[string]string{annotationLimit: "1Gi"}, all); err == nil {
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
		if _, err := annotationChanges(r, tt.now, quota.Choices()); (err != nil) != tt.refused || err != nil &&
			!strings.Contains(err.Error(), "administrator") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// bench is an agent's resizer over a ledger with one container, without its loop.
type bench struct {
	*resizer
	t    *testing.T
	used quota.Bytes
	pod  *v1.Pod
}

func newBench(t *testing.T, dir string) *bench {
	t.Helper()
	p := newPods(answer(t), silent)
	m := NewMetrics()
	b := &bench{resizer: newResizer(dir, p, newPodEvents(t.Context(), fake.NewClientset(), "n", p, m, silent), m, silent), t: t}
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
func (b *bench) apply(key string) error { return b.resizer.apply([]string{key})[key] }

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
		Overcommit: 1, Card: b.table.Load().Config.Card(), Limit: &limit}); err != nil {
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
		Overcommit: 1, Card: b.table.Load().Config.Card(), Limit: &limit}); err != nil {
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
		b.round(b.due())
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
