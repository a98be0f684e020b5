// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
)

// What the API server answers to a patch, which is the whole pod, is not made an object of; what it refuses is an error.
func TestPatchedPodIsNotRead(t *testing.T) {
	code := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPatch || r.URL.Path != "/api/v1/namespaces/d/pods/web" {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		w.WriteHeader(code)
		_, _ = w.Write([]byte("no pod"))
	}))
	defer s.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	p := &Plugin{o: Options{Client: client}}
	if err := p.patchPod(t.Context(), &Pod{Namespace: "d", Name: "web"}, []byte("{}")); err != nil {
		t.Error(err)
	}
	code = http.StatusConflict
	if err := p.patchPod(t.Context(), &Pod{Namespace: "d", Name: "web"}, []byte("{}")); !apierrors.IsConflict(err) {
		t.Errorf("another pod has the name: %v", err)
	}
}

// A pod whose annotations are written is not read again, until another one of its name has its units.
func TestAnnotatedOnce(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
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
	patches := 0
	for _, action := range client.Actions() {
		if action.Matches("patch", "pods") {
			patches++
		}
	}
	if patches != 1 {
		t.Errorf("%d patches of one pod", patches)
	}
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
