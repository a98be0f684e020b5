package deviceplugin

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// Pods are asked for few at a time, and only such as can be meant: who may make pods could fill the agent's memory otherwise.
func TestPodsAreReadInPages(t *testing.T) {
	client := fake.NewClientset()
	var pods []corev1.Pod
	for i := range 30 {
		pods = append(pods, *podOf(fmt.Sprint(i), [2]int{1, 0}))
	}
	for range 5000 {
		pods[3].Spec.Containers = append(pods[3].Spec.Containers, container("c", 1, 0))
	}
	var asked []string
	client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		o := action.(clienttesting.ListActionImpl).GetListOptions()
		asked = append(asked, o.FieldSelector)
		if o.Limit < 1 || o.Limit > 8 {
			t.Fatalf("limit %d", o.Limit)
		}
		from := 0
		if o.Continue != "" {
			if _, err := fmt.Sscan(o.Continue, &from); err != nil {
				t.Fatal(err)
			}
		}
		to := min(from+int(o.Limit), len(pods))
		list := &corev1.PodList{Items: pods[from:to]}
		if to < len(pods) {
			list.Continue = fmt.Sprint(to)
		}
		return true, list, nil
	})
	a := &api{client: client, node: "n"}
	all, err := a.pending(context.Background())
	if err != nil || len(all) != 29+containersMost || len(asked) != 4 {
		t.Errorf("%d containers in %d pages, %v", len(all), len(asked), err)
	}
	for _, selector := range asked {
		if !strings.Contains(selector, "spec.nodeName=n") || !strings.Contains(selector, "status.phase=Pending") {
			t.Errorf("asked for %s", selector)
		}
	}
	for i := range 600 {
		pods = append(pods, *podOf(fmt.Sprint("more", i), [2]int{1, 0}))
	}
	if _, err := a.pending(context.Background()); err == nil || !strings.Contains(err.Error(), "more than 512 pods wait") {
		t.Errorf("%v", err)
	}
}

// A pod whose annotations are written is not read again, until another one of its name has its units.
func TestAnnotatedOnce(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
	var mu sync.Mutex
	reads := map[string]int{}
	client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		reads[action.(clienttesting.ListActionImpl).GetListOptions().FieldSelector]++
		return false, nil, nil
	})
	p := k.begin(Options{Table: table("binpack", t4), Client: client})
	k.until(ResourceMemory, 14, 0)
	assigned := func(name string) {
		t.Helper()
		eventually(t, func() string {
			now, err := client.CoreV1().Pods("d").Get(context.Background(), name, metav1.GetOptions{})
			if err != nil || now.Annotations[annotationAssigned] != "true" {
				return fmt.Sprint(err, now)
			}
			return ""
		})
	}
	a := podOf("a", [2]int{1, 0})
	bind(t, client, a, noIndex)
	k.mustAdmit(a)
	assigned("a")
	for range 3 {
		if err := p.tellPods(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	if n := reads["metadata.name=a,spec.nodeName=n"]; n < 1 || n > 2 {
		t.Errorf("read %v", reads)
	}
	mu.Unlock()
	k.remove(a)
	if err := client.CoreV1().Pods("d").Delete(context.Background(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	again := podOf("a", [2]int{1, 0})
	again.UID = "uid-again"
	bind(t, client, again, noIndex)
	k.mustAdmit(again)
	assigned("a")
}
