// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/event"
)

func podOf(namespace, name string, container string, id string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name),
		Annotations: map[string]string{"cgpu.io/priority": "high", "other": strings.Repeat("x", 10000)}},
		Spec:   v1.PodSpec{NodeName: "n", Containers: []v1.Container{{Name: container, Image: "big", Env: []v1.EnvVar{{Name: "A", Value: "b"}}}}},
		Status: v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: container, ContainerID: "containerd://" + id}}}}
}

func TestOwner(t *testing.T) {
	p := newPods(answer(t), silent)
	for _, pod := range []*v1.Pod{podOf("a", "web", "main", "id1"), podOf("b", "db", "main", "id2")} {
		if err := p.informer.GetIndexer().Add(read(t, pod)); err != nil {
			t.Fatal(err)
		}
	}
	for what, tt := range map[string]struct{ id, name, want string }{
		"by ID":             {"id1", "", "a/web main"},
		"the ID counts":     {"id1", "b/db/main", "a/web main"},
		"not yet known":     {"id9", "b/db/main", "b/db main"},
		"no such container": {"id9", "b/db/other", ""},
		"no such pod":       {"id9", "b/nodb/main", ""},
		"Docker's":          {"id9", "web", ""},
		"slashes":           {"id9", "a/web/main/x", ""},
		"no ID":             {"", "a/web/main", ""},
		"nothing":           {"id9", "", ""},
	} {
		got := ""
		if pod, container := p.owner(tt.id, tt.name); pod != nil {
			got = keyOf(pod) + " " + container
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", what, got, tt.want)
		}
	}
}

// From the file to the API server: bounded, without control signs, about pods that are here.
func TestFollowEvents(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	dir := t.TempDir()
	client := fake.NewClientset()
	p, m := newPods(answer(t, podOf("a", "web", "main", "id1")), silent), NewMetrics()
	n := newPodEvents(ctx, client, "n", p, m, silent)
	go p.run(ctx)
	if !p.synced(ctx, time.Minute) {
		t.Fatal("pods are not known")
	}
	if err := event.Append(dir, event.Event{Kind: event.Killed, Container: "id1", Text: "of yesterday"}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); n.follow(ctx, dir) }()
	sent := func() (list []string) {
		events, err := client.CoreV1().Events("").List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			list = append(list, fmt.Sprintf("%s/%s %s %s %s %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.InvolvedObject.FieldPath,
				e.Type, e.Reason, e.Message))
		}
		return list
	}
	// It is not told when it has begun to follow.
	for deadline := time.Now().Add(time.Minute); len(sent()) == 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no Event")
		}
		if err := event.Append(dir, event.Event{Kind: event.Paused, Container: "id1", Text: "hello"}); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.OpenFile(event.File(dir), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(f, `{"time":"2026-01-01T00:00:00Z","kind":"killed","container":"id1","text":"%s"}`+"\n", strings.Repeat("A", 3<<20))
	fmt.Fprintln(f, `{"time":"not a time","kind":"killed"}`)
	f.Close()
	for _, e := range []event.Event{
		{Kind: event.Start, Container: "id1", Text: "no news"},
		{Kind: event.Denied, Container: "docker", Name: "web", Text: "not a pod's"},
		{Kind: event.Denied, Container: "x", Name: "kube-system/web/main", Text: "a forged name"},
		{Kind: event.Killed, Container: "id1", GPU: &event.GPU{Index: 2}, Count: 3, Text: "process \x1b[2J\u202e" + strings.Repeat("é", 400)},
	} {
		if err := event.Append(dir, e); err != nil {
			t.Fatal(err)
		}
	}
	killed := ""
	for deadline := time.Now().Add(time.Minute); killed == ""; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no Event of a kill: %v", sent())
		}
		for _, s := range sent() {
			if strings.Contains(s, "GPUProcessKilled") {
				killed = s
			}
		}
	}
	if !strings.HasPrefix(killed, "a/web spec.containers{main} Warning GPUProcessKilled GPU 2: process ?[2J?éé") ||
		len(killed) > maxMessage+100 {
		t.Errorf("%q", killed)
	}
	for _, s := range sent() {
		if !strings.Contains(s, "GPUProcessKilled") && !strings.Contains(s, "GPUPaused") || strings.Contains(s, "yesterday") ||
			strings.Contains(s, "AAAA") {
			t.Errorf("%.200q", s)
		}
	}
	stop()
	<-done
}

// A front end warns of a pod that is here, and not of one that has its name now.
func TestTell(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	client := fake.NewClientset()
	p := newPods(answer(t, podOf("a", "web", "main", "id1")), silent)
	p.Tell(&deviceplugin.Pod{Namespace: "a", Name: "web", UID: "uid-web"}, "main", "before there is anybody to tell")
	newPodEvents(ctx, client, "n", p, NewMetrics(), silent)
	go p.run(ctx)
	if !p.synced(ctx, 10*time.Second) {
		t.Fatal("pods are not known")
	}
	p.Tell(&deviceplugin.Pod{Namespace: "a", Name: "web", UID: "uid-before"}, "main", "another's")
	p.Tell(&deviceplugin.Pod{Namespace: "a", Name: "gone", UID: "uid-gone"}, "main", "nobody's")
	p.Tell(&deviceplugin.Pod{Namespace: "a", Name: "web", UID: "uid-web"}, "main", "two GPUs")
	for {
		events, err := client.CoreV1().Events("a").List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(events.Items) == 0 {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		e := events.Items[0]
		if len(events.Items) != 1 || e.Reason != "GPUWarning" || e.Message != "two GPUs" || e.InvolvedObject.UID != "uid-web" ||
			e.InvolvedObject.FieldPath != "spec.containers{main}" {
			t.Errorf("%+v", events.Items)
		}
		return
	}
}

// One pod that has a million allocations refused leaves room for the others, and all together are bounded.
func TestMay(t *testing.T) {
	client := fake.NewClientset()
	p := newPods(answer(t), silent)
	n := newPodEvents(t.Context(), client, "n", p, NewMetrics(), silent)
	count := 0
	for range 100000 {
		if n.may("a", "noisy") {
			count++
		}
	}
	if count < podBurst || count > podBurst+2 {
		t.Errorf("%d Events of one pod at once, want %d", count, podBurst)
	}
	if !n.may("a", "quiet") {
		t.Error("another pod has none left")
	}
	count = 0
	for i := range 100000 { // pods are cheap to make
		if n.may("a", types.UID(fmt.Sprint("a", i))) {
			count++
		}
	}
	if count > spaceBurst {
		t.Errorf("%d Events of one namespace at once, want %d", count, spaceBurst)
	}
	if !n.may("b", "quiet") {
		t.Error("another namespace has none left")
	}
	count = 0
	for i := range 100000 {
		if n.may(fmt.Sprint("ns", i), types.UID(fmt.Sprint(i))) {
			count++
		}
	}
	if count > nodeBurst+10 {
		t.Errorf("%d Events of all pods at once, want %d", count, nodeBurst)
	}
	if len(n.pod) > maxPods || len(n.spaces) > maxPods {
		t.Errorf("remembers %d pods, %d namespaces", len(n.pod), len(n.spaces))
	}
}
