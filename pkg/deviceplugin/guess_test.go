// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Pods of the victim's size, made before it by another tenant, with what he likes in labels and annotations, do not make the
// victim be refused, or be cut in parts, however many of them wait.
func TestForgedPodsRefuseNobody(t *testing.T) {
	forged := func(p *corev1.Pod, index string) {
		p.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Hour))
		p.Annotations[annotationIndex], p.Annotations[annotationAssigned] = index, "false"
		p.Annotations[annotationPod], p.Annotations[annotationDev] = fmt.Sprint(podMemory(p)), "14"
		p.Annotations[annotationAssumeTime] = fmt.Sprint(p.CreationTimestamp.UnixNano() + 1)
	}
	for name, edit := range map[string]func(*corev1.Pod){
		"no such GPU": func(p *corev1.Pod) { forged(p, "99") },
		"no number":   func(p *corev1.Pod) { forged(p, "no-gpu-has-4GiB-to-run") },
		"full GPU":    func(p *corev1.Pod) { forged(p, "0") },
		"indivisible": func(p *corev1.Pod) { forged(p, "1"); p.Labels[ResourceCount] = "5" },
		"two GPUs":    func(p *corev1.Pod) { p.Labels[ResourceCount] = "2"; forged(p, "1") },
		"only memory": func(p *corev1.Pod) { delete(p.Spec.Containers[0].Resources.Limits, ResourcePercent); forged(p, "0") },
		"only percent": func(p *corev1.Pod) {
			delete(p.Spec.Containers[0].Resources.Limits, ResourceMemory)
			forged(p, "0")
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, percent := range []int{0, 40} {
				k := newKubelet(t)
				k.start()
				tab := table("binpack", t4, t4, t4)
				client := fake.NewClientset(node())
				k.begin(Options{Table: tab, Client: client})
				k.until(ResourceMemory, 42, 0)
				k.until(ResourcePercent, 300, 0)
				full := podOf("full", [2]int{12, 80})
				bind(t, client, full, 0)
				k.mustAdmit(full)
				started(t, client, full, corev1.PodRunning)
				for i := range 3 {
					p := podOf(fmt.Sprintf("evil%d", i), [2]int{4, percent})
					edit(p)
					bind(t, client, p, noIndex)
				}
				for i := range 3 { // as many as could be taken for one of those each
					victim := podOf(fmt.Sprintf("victim%d", i), [2]int{4, percent})
					bind(t, client, victim, noIndex)
					k.mustAdmit(victim)
					if s := k.shares(victim, "c0"); len(s) != 1 || s[0].Limit != 4*quota.GiB || s[0].Percent != percent {
						t.Errorf("the victim has %+v", s)
					}
				}
				k.check(limits(tab))
			}
		})
	}
}

// The only pod of its size that waits is followed to the GPU that the extender chose, and refused where that is full; one of
// several is followed where there is room.
func TestExtenderIsFollowed(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
	k.begin(Options{Table: table("binpack", t4, t4, t4), Client: client})
	k.until(ResourceMemory, 42, 0)
	a, b := podOf("a", [2]int{4, 0}), podOf("b", [2]int{4, 0})
	bind(t, client, a, 2)
	bind(t, client, b, 1)
	for i, p := range []*corev1.Pod{a, b} {
		k.mustAdmit(p)
		if got := k.gpuOf(p, "c0"); got != uuid(2-i) {
			t.Errorf("%s is on %s", p.Name, got)
		}
		started(t, client, p, corev1.PodRunning)
	}
	c := podOf("c", [2]int{11, 0})
	bind(t, client, c, 2)
	if err := k.admit(c); err == nil {
		t.Error("is elsewhere than its annotation says")
	}
}

// unbook has the kubelet lose its checkpoint of a pod, and the pod, which is there and was started, be admitted anew.
func (k *kubelet) unbook(p *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b := k.pods[p.UID]
	b.devices, b.answers = map[string]map[string][]string{}, map[string][]*pluginapi.ContainerAllocateResponse{}
}

// The only pod of its size that waits is not taken for the one that is asked for where the kubelet's own list has another: a pod that
// runs and whose units it has lost, or one that is not in the API server, such as a static pod. So what its author wrote on the one that
// waits decides nothing for these.
func TestKubeletAsksForAnother(t *testing.T) {
	for name, other := range map[string]func(k *kubelet, client *fake.Clientset, p *corev1.Pod){
		"lost checkpoint": func(k *kubelet, client *fake.Clientset, p *corev1.Pod) {
			bind(t, client, p, noIndex)
			k.mustAdmit(p)
			started(t, client, p, corev1.PodRunning)
			k.unbook(p)
		},
		"lost checkpoint, init container": func(k *kubelet, client *fake.Clientset, p *corev1.Pod) {
			p.Spec.InitContainers, p.Spec.Containers[0] = []corev1.Container{container("first", 4, 0)}, container("c0", 3, 0)
			bind(t, client, p, noIndex)
			k.mustAdmit(p)
			started(t, client, p, corev1.PodRunning)
			k.unbook(p)
		},
		"static pod": func(*kubelet, *fake.Clientset, *corev1.Pod) {},
		"ending": func(k *kubelet, client *fake.Clientset, p *corev1.Pod) {
			now := metav1.Now()
			p.DeletionTimestamp, p.Finalizers = &now, []string{"a/b"}
			bind(t, client, p, noIndex)
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			tab := table("binpack", t4, t4)
			client := fake.NewClientset(node())
			k.begin(Options{Table: tab, Client: client})
			k.until(ResourceMemory, 28, 0)
			full := podOf("full", [2]int{12, 0})
			bind(t, client, full, 0)
			k.mustAdmit(full)
			started(t, client, full, corev1.PodRunning)
			p := podOf("other", [2]int{4, 0})
			other(k, client, p)
			evil := podOf("evil", [2]int{4, 0})
			bind(t, client, evil, 0)
			k.mustAdmit(p)
			if got := k.gpuOf(p, "c0"); got != uuid(1) {
				t.Errorf("it is on %s", got)
			}
			k.check(limits(tab))
		})
	}
}

// Where it is not known whose units these are, a label that wants several GPUs is not guessed by; and what ended, or was there before the
// plugin, makes nothing unknown.
func TestUnknownPods(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
	done := podOf("done", [2]int{1, 0}) // as a kubelet before 1.34 lists it
	k.pods[done.UID] = &booking{pod: done}
	var gone atomic.Pointer[Pod]
	k.begin(Options{Table: table("binpack", t4, t4), Client: client, Pods: func() ([]Pod, bool) {
		all := podsOf(t, client)
		if p := gone.Load(); p != nil {
			all = append(all, *p)
		}
		return all, true
	}})
	k.until(ResourceMemory, 28, 0)
	two := func(name string) *corev1.Pod {
		p := podOf(name, [2]int{4, 0})
		p.Labels[ResourceCount] = "2"
		bind(t, client, p, noIndex)
		return p
	}
	admit := func(p *corev1.Pod, want string) {
		t.Helper()
		err := k.admit(p)
		if want == "" && (err != nil || len(k.shares(p, "c0")) != 2) || want != "" && !strings.Contains(errorText(err), want) {
			t.Errorf("%s: %v, %+v, want %q", p.Name, err, k.shares(p, "c0"), want)
		}
		phase := corev1.PodRunning
		if err != nil {
			phase = corev1.PodFailed
		}
		started(t, client, p, phase)
	}
	admit(two("a"), "")
	late := podOf("late", [2]int{1, 0})
	k.mu.Lock()
	k.pods[late.UID] = &booking{pod: late}
	k.mu.Unlock()
	admit(two("b"), "for d/late, of which the API server has not told")
	gone.Store(&Pod{Namespace: "d", Name: "late", Ended: true})
	admit(two("c"), "")
}

// A pod with more containers than are kept of one is refused, and is the concern of no other.
func TestManyContainers(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
	k.begin(Options{Table: table("binpack", t4, t4, t4, t4), Client: client})
	k.until(ResourceMemory, 56, 0)
	evil := podOf("evil")
	for i := range MaxContainers {
		evil.Spec.Containers = append(evil.Spec.Containers, container(fmt.Sprint("c", i), 1, 0))
	}
	evil.Spec.Containers = append(evil.Spec.Containers, container("last", 2, 0))
	bind(t, client, evil, noIndex)
	if err := k.admit(evil); !strings.Contains(errorText(err),
		"more than 32 containers that ask for units of GPUs, or a longer number of them than anybody needs, is not served (d/evil)") {
		t.Errorf("%v", err)
	}
	two := podOf("two", [2]int{4, 0})
	two.Labels[ResourceCount] = "2"
	bind(t, client, two, noIndex)
	k.mustAdmit(two)
	if s := k.shares(two, "c0"); len(s) != 2 {
		t.Errorf("another pod has %+v", s)
	}
}

// A pod that wanted two GPUs, and another of its size that waited at the same time: the amount holds, and the pod's owner is told, once,
// when the kubelet has said whose the units are. One that got what it asked for is told of nothing.
func TestTellsOfAGuessedNumberOfGPUs(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
	var mu sync.Mutex
	var told []string
	p := k.begin(Options{Table: table("binpack", t4, t4), Client: client, Tell: func(pod *Pod, container, text string) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, pod.UID+" "+container+" "+text)
	}})
	k.until(ResourceMemory, 28, 0)
	two := func(name string) *corev1.Pod {
		p := podOf(name, [2]int{4, 0})
		p.Labels[ResourceCount] = "2"
		bind(t, client, p, noIndex)
		return p
	}
	fine := two("fine")
	k.mustAdmit(fine)
	started(t, client, fine, corev1.PodRunning)
	victim := two("victim")
	bind(t, client, podOf("stranger", [2]int{4, 0}), noIndex)
	k.mustAdmit(victim)
	if shares := k.shares(victim, "c0"); len(shares) != 1 || shares[0].Limit != 4*quota.GiB {
		t.Fatalf("%+v", shares)
	}
	for range 3 {
		if err := p.tellPods(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(told) != 1 || !strings.HasPrefix(told[0], "uid-victim c0 the pod's label aliyun.com/gpu-count asks for 2 GPUs, and the container "+
		"has its 4 units of 1:") {
		t.Errorf("%q", told)
	}
}
