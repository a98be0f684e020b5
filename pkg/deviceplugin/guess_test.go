package deviceplugin

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

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
					if s := k.shares(victim, "c0"); len(s) != 1 || s[0].Memory != 4*quota.GiB || s[0].Percent != percent {
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
