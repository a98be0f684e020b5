// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	gocmp "github.com/google/go-cmp/cmp"
	admission "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/quota"
)

const gpu0 = "GPU-00000000-0000-0000-0000-000000000000"

// server is an API server that has these objects, by their paths, and sends them as the real one does.
type server struct {
	objects map[string]runtime.Object
	asked   atomic.Int64        // how often
	fails   metav1.StatusReason // where not empty, each time so
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.asked.Add(1)
	o := s.objects[r.URL.Path]
	codes := map[metav1.StatusReason]int{
		metav1.StatusReasonNotFound: 404, metav1.StatusReasonForbidden: 403, metav1.StatusReasonInternalError: 500}
	reason := s.fails
	if o == nil {
		reason = cmp.Or(reason, metav1.StatusReasonNotFound)
	}
	if reason != "" {
		w.WriteHeader(codes[reason])
		o = &metav1.Status{Status: metav1.StatusFailure, Reason: reason, Code: int32(codes[reason])}
	}
	version := schema.GroupVersion{Version: "v1"}
	if strings.Contains(r.URL.Path, "admissionregistration") {
		version = admission.SchemeGroupVersion
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	_ = scheme.Codecs.EncoderForVersion(info.Serializer, version).Encode(o, w)
}

// at is a moment: the policies are from 100, and the pod from 1000.
func at(sec int64) metav1.Time { return metav1.NewTime(time.Unix(sec, 0)) }

const (
	podPath     = "/api/v1/namespaces/ns/pods/pod"
	policyPath  = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/"
	bindingPath = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/"
)

// newPlugin is one that follows a scheduler, at an API server that has its policy and a pod.
func newPlugin(t *testing.T, name string, annotations map[string]string) (*handler, *server) {
	t.Helper()
	s := decision.Find(name)
	policy, binding := s.Policy(), s.Binding()
	policy.CreationTimestamp, binding.CreationTimestamp = at(100), at(100)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pod", UID: "u1", CreationTimestamp: at(1000),
		Annotations: annotations},
		Spec: corev1.PodSpec{NodeName: "node1", InitContainers: []corev1.Container{{Name: "init"}}, Containers: []corev1.Container{{Name: "side"},
			{Name: "main", Resources: corev1.ResourceRequirements{Limits: asked(), Requests: asked()}}},
			EphemeralContainers: []corev1.EphemeralContainer{{TargetContainerName: "main",
				EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debugger"}}}}}
	fake := &server{objects: map[string]runtime.Object{
		podPath: pod, policyPath + s.PolicyName(): policy, bindingPath + s.PolicyName(): binding}}
	listener := httptest.NewServer(fake)
	t.Cleanup(listener.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: listener.URL, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf}})
	if err != nil {
		t.Fatal(err)
	}
	p := &Plugin{o: Options{Node: "node1", Client: client, Scheduler: s, RunDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}}
	if err := p.Update(t.Context(), tableOf(device.PodsAllocated)); err != nil {
		t.Fatal(err)
	}
	return &handler{p}, fake
}

func tableOf(pods string) *device.Table {
	return &device.Table{Hook: "/opt/cgpu-hook", Config: device.Config{Pods: pods},
		GPUs: []device.GPU{{UUID: gpu0, Memory: 15 * quota.GiB}}}
}

// asked are limits for what is decided, among others.
func asked() corev1.ResourceList {
	list := corev1.ResourceList{"cpu": resource.MustParse("2")}
	for name, n := range map[corev1.ResourceName]string{"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30",
		"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000", "volcano.sh/vgpu-cores": "30"} {
		list[name] = resource.MustParse(n)
	}
	return list
}

var decisions = map[string]map[string]string{
	"hami":    {"hami.io/vgpu-devices-allocated": ";;" + gpu0 + ",NVIDIA,3000,30:;", "hami.io/vgpu-node": "node1"},
	"volcano": {"volcano.sh/vgpu-ids-new": gpu0 + ",NVIDIA,3000,30:", "volcano.sh/vgpu-node": "node1"},
	"kai":     {"nvidia.com/container.main.gpus.devices": gpu0, "nvidia.com/container.main.gpu-memory.request": "3000Mi"},
}

// create is what the engine asks for a container of the pod.
func create(h *handler, annotations map[string]string, container string) (hooks []*api.Hook, err error) {
	pod := &api.PodSandbox{Namespace: "ns", Name: "pod", Uid: "u1", Annotations: annotations}
	adjust, _, err := h.CreateContainer(context.Background(), pod, &api.Container{Id: "id", Name: container})
	return adjust.GetHooks().GetCreateRuntime(), err
}

// Each scheduler's decision becomes the hook of a share, for the container that it was made for.
func TestCreateContainer(t *testing.T) {
	for name, annotations := range decisions {
		h, _ := newPlugin(t, name, annotations)
		for _, container := range []string{"init", "side", "debugger"} {
			if hooks, err := create(h, annotations, container); err != nil || hooks != nil {
				t.Errorf("%s: %s: %v, %v", name, container, hooks, err)
			}
		}
		hooks, err := create(h, annotations, "main")
		if err != nil || len(hooks) != 1 || hooks[0].Path != "/opt/cgpu-hook" {
			t.Fatalf("%s: %v, %v", name, hooks, err)
		}
		s, ours, err := alloc.FromHookArgs(hooks[0].Args)
		if err != nil || !ours || s.UUID != gpu0 || s.Limit != 3000*quota.MiB || s.ID != name+"/u1/main/0" {
			t.Errorf("%s: %+v, %v, %v", name, s, ours, err)
		}
		// Of what the engine says of the pod nothing counts but that there is something to ask for.
		lies := map[string]string{}
		for key := range annotations {
			lies[key] = "GPU-other,NVIDIA,100000,0:"
		}
		if again, err := create(h, lies, "main"); err != nil || !gocmp.Equal(again[0].Args, hooks[0].Args) {
			t.Errorf("%s: %v, %v", name, again, err)
		}
		if hooks, err := create(h, nil, "main"); err != nil || hooks != nil {
			t.Errorf("%s: a pod without a decision: %v, %v", name, hooks, err)
		}
	}
}

// Where it is not certain that the scheduler decided so, the container is not created, and an event says why.
func TestRefused(t *testing.T) {
	policy := policyPath + "scheduler-hami.cgpu.io"
	for name, c := range map[string]struct {
		change func(*server)
		want   string
		node   bool
	}{
		"no policy":  {func(s *server) { delete(s.objects, policy) }, "is missing", true},
		"no binding": {func(s *server) { delete(s.objects, bindingPath+"scheduler-hami.cgpu.io") }, "is missing", true},
		"another policy": {func(s *server) {
			s.objects[policy].(*admission.ValidatingAdmissionPolicy).Spec.Validations[0].Expression = "true"
		}, "is not the one of this version", true},
		"a pod from before the policy": {func(s *server) {
			s.objects[policy].(*admission.ValidatingAdmissionPolicy).CreationTimestamp = at(995)
		}, "is older than the policy", false},
		"no pod":      {func(s *server) { delete(s.objects, podPath) }, "ns/pod", false},
		"another pod": {func(s *server) { s.objects[podPath].(*corev1.Pod).UID = "u2" }, "another one of this name", false},
		"deleted": {func(s *server) {
			now := at(2000)
			s.objects[podPath].(*corev1.Pod).DeletionTimestamp = &now
		}, "is being deleted", false},
		"another node's":        {func(s *server) { s.objects[podPath].(*corev1.Pod).Spec.NodeName = "node2" }, "is bound to node", false},
		"no decision after all": {func(s *server) { s.objects[podPath].(*corev1.Pod).Annotations = nil }, "is missing", false},
		"large": {func(s *server) {
			s.objects[podPath].(*corev1.Pod).Annotations["hami.io/vgpu-devices-allocated"] = strings.Repeat(";", decision.MaxValue+1)
		}, "has more than", false},
		"more than asked": {func(s *server) {
			s.objects[podPath].(*corev1.Pod).Spec.Containers[1].Resources.Limits["nvidia.com/gpumem"] = resource.MustParse("2k")
		}, "nvidia.com/gpumem is 2000 MiB", false},
		"not asked": {func(s *server) {
			delete(s.objects[podPath].(*corev1.Pod).Spec.Containers[1].Resources.Limits, "nvidia.com/gpu")
		}, "nvidia.com/gpu is 0", false},
		"many debuggers, and not its": {func(s *server) {
			pod := s.objects[podPath].(*corev1.Pod)
			pod.Spec.Containers[1].Name = "other"
			pod.Spec.EphemeralContainers = append(make([]corev1.EphemeralContainer, decision.MaxContainers), corev1.EphemeralContainer{
				EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "main"}})
		}, "has no container", false},
		"many containers": {func(s *server) {
			pod := s.objects[podPath].(*corev1.Pod)
			pod.Spec.InitContainers = make([]corev1.Container, 4000)
		}, "more than 128 containers", false},
	} {
		h, s := newPlugin(t, "hami", map[string]string{"hami.io/vgpu-devices-allocated": decisions["hami"]["hami.io/vgpu-devices-allocated"],
			"hami.io/vgpu-node": "node1"})
		c.change(s)
		hooks, err := create(h, decisions["hami"], "main")
		if err == nil || hooks != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v", name, hooks, err)
			continue
		}
		text, _ := os.ReadFile(event.File(h.p.o.RunDir))
		if !strings.Contains(string(text), "ns/pod/main") || !strings.Contains(string(text), `"refused"`) {
			t.Errorf("%s: events: %s", name, text)
		}
		// What is wrong with the policy is the node's trouble, and what is wrong with a pod is not.
		if guarded := h.p.guarded; (guarded != nil) != c.node {
			t.Errorf("%s: healthy: %v", name, guarded)
		}
	}
}

// A container that gets nothing does not wait for the API server: KAI's has no annotation of its own, the others' is asked for once.
func TestAskedOnce(t *testing.T) {
	for name, want := range map[string]int64{"kai": 0, "hami": 3, "volcano": 3} {
		h, s := newPlugin(t, name, decisions[name])
		for range 5 {
			if hooks, err := create(h, decisions[name], "side"); err != nil || hooks != nil {
				t.Errorf("%s: %v, %v", name, hooks, err)
			}
		}
		if n := s.asked.Load(); n != want {
			t.Errorf("%s: %d requests, want %d", name, n, want)
		}
		if hooks, err := create(h, decisions[name], "main"); err != nil || len(hooks) != 1 {
			t.Errorf("%s: %v, %v", name, hooks, err)
		}
	}
	h, _ := newPlugin(t, "hami", nil)
	for i := range 3 * maxNothing {
		h.p.remember(&api.PodSandbox{Uid: fmt.Sprint(i)}, &api.Container{Name: "side"})
	}
	if n := len(h.p.nothing); n > maxNothing {
		t.Errorf("%d are remembered", n)
	}
}

// That the API server does not answer is no word on the policy; that it does not let the agent see it is what an administrator must know.
func TestAway(t *testing.T) {
	h, s := newPlugin(t, "hami", decisions["hami"])
	s.fails = metav1.StatusReasonInternalError
	if hooks, err := create(h, decisions["hami"], "main"); err == nil || hooks != nil || h.p.guarded != nil {
		t.Errorf("%v, %v; healthy: %v", hooks, err, h.p.guarded)
	}
	s.fails = metav1.StatusReasonForbidden
	if hooks, err := create(h, decisions["hami"], "main"); err == nil || hooks != nil || h.p.guarded == nil {
		t.Errorf("%v, %v; healthy: %v", hooks, err, h.p.guarded)
	}
}

// Refusals of one pod do not push all else out of the node's events.
func TestManyRefused(t *testing.T) {
	h, s := newPlugin(t, "hami", decisions["hami"])
	delete(s.objects, podPath)
	for range 3 * event.RefusedOfOne {
		if _, err := create(h, decisions["hami"], "main"); err == nil {
			t.Fatal("no pod, and no refusal")
		}
	}
	text, err := os.ReadFile(event.File(h.p.o.RunDir))
	if n := strings.Count(string(text), "ns/pod/main"); err != nil || n == 0 || n > 2*event.RefusedOfOne { // two minutes at most
		t.Errorf("%d events, %v", n, err)
	}
}

// An engine that does not take the plugin in is asked ever less often, one that is away as often as before.
func TestNextWait(t *testing.T) {
	away := errors.New("no such file")
	for _, c := range []struct {
		last       time.Duration
		registered bool
		err        error
		want       time.Duration
	}{
		{0, false, away, retryAfter}, {retryAfter, false, away, retryAfter}, {0, false, errNotTaken, retryAfter},
		{retryAfter, false, errNotTaken, 2 * retryAfter}, {2 * retryAfter, false, away, 2 * retryAfter},
		{2 * retryAfter, false, fmt.Errorf("nri: %w", errNotTaken), 4 * retryAfter}, {retryAtMost - 1, false, errNotTaken, retryAtMost},
		{retryAtMost, false, errNotTaken, retryAtMost}, {retryAtMost, true, away, retryAfter},
	} {
		if got := nextWait(c.last, c.registered, c.err); got != c.want {
			t.Errorf("after %v, %v, %v: %v, want %v", c.last, c.registered, c.err, got, c.want)
		}
	}
}

// On a node where pods take GPUs as they like, a decision would be worth nothing.
func TestUpdateRefused(t *testing.T) {
	h, _ := newPlugin(t, "hami", nil)
	if err := h.p.Update(t.Context(), tableOf(device.PodsAny)); err == nil || !strings.Contains(err.Error(), `want "allocated"`) {
		t.Error(err)
	}
	none := tableOf(device.PodsAllocated)
	none.Hook = ""
	if err := h.p.Update(t.Context(), none); err == nil || !strings.Contains(err.Error(), "cgpu-hook") {
		t.Error(err)
	}
	if _, err := Start(t.Context(), Options{Socket: "nri.sock"}); err == nil || !strings.Contains(err.Error(), "want an absolute path") {
		t.Error(err)
	}
}

// Without an engine it says so, and ends when it is told to.
func TestNoEngine(t *testing.T) {
	h, _ := newPlugin(t, "kai", nil)
	o := h.p.o
	o.Socket, o.Table = t.TempDir()+"/nri.sock", tableOf(device.PodsAllocated)
	p, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if err := p.Healthy(); strings.Contains(fmt.Sprint(err), "is NRI switched on") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(p.Healthy())
		}
	}
}
