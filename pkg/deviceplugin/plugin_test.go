// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func limits(t *device.Table) map[string]quota.Bytes {
	all := map[string]quota.Bytes{}
	for _, g := range t.GPUs {
		all[g.UUID] = g.Memory
	}
	return all
}

// gpuOf is the GPU of a container with one share.
func (k *kubelet) gpuOf(p *corev1.Pod, container string) string {
	k.t.Helper()
	s := k.shares(p, container)
	if len(s) != 1 {
		k.t.Fatalf("%s/%s: %d shares", p.Name, container, len(s))
	}
	return s[0].UUID
}

func (k *kubelet) mustAdmit(p *corev1.Pod) {
	k.t.Helper()
	if err := k.admit(p); err != nil {
		k.t.Fatalf("%s: %v", p.Name, err)
	}
}

func TestWithoutAPI(t *testing.T) {
	for placement, want := range map[string][]int{"binpack": {0, 0, 1, 0}, "spread": {0, 1, 1, 0}} {
		t.Run(placement, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			tab := table(placement, t4, t4)
			p := k.begin(Options{Table: tab})
			k.until(ResourceMemory, 28, 0)
			k.until(ResourcePercent, 200, 0)
			if err := p.Healthy(); err != nil {
				t.Error(err)
			}
			// The second fits beside the first only where it is packed; the third does not fit there; the last fits both.
			for i, n := range []int{6, 5, 7, 3} {
				pod := podOf(fmt.Sprint(i), [2]int{n, 0})
				k.mustAdmit(pod)
				if got := k.gpuOf(pod, "c0"); got != uuid(want[i]) {
					t.Errorf("pod %d is on %s, want GPU %d", i, got, want[i])
				}
				s := k.shares(pod, "c0")[0]
				if s.Limit != quota.Bytes(n)*quota.GiB || s.Whole || s.ID == "" {
					t.Errorf("%+v", s)
				}
			}
			// 7 of 28 units are left, which only packing has left on one GPU.
			err := k.admit(podOf("big", [2]int{7, 0}))
			if placement == "binpack" && err != nil || placement == "spread" && !strings.Contains(errorText(err),
				"no GPU of this node has 7 units free") {
				t.Errorf("%v", err)
			}
			k.check(limits(tab))
		})
	}
}

func TestAnswer(t *testing.T) {
	k := newKubelet(t)
	k.start()
	k.begin(Options{Table: table("binpack", t4)})
	k.until(ResourceMemory, 14, 0)
	pod := podOf("a", [2]int{6, 0})
	k.mustAdmit(pod)
	a := k.pods[pod.UID].answers["c0"][0]
	for name, want := range map[string]string{
		"NVIDIA_VISIBLE_DEVICES": "void", "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_CONTAINER": "6", "ALIYUN_COM_GPU_MEM_POD": "6",
		"ALIYUN_COM_GPU_MEM_DEV": "14",
	} {
		if a.Envs[name] != want {
			t.Errorf("%s=%q, want %q", name, a.Envs[name], want)
		}
	}
	if len(a.Devices)+len(a.Mounts)+len(a.CdiDevices) != 0 {
		t.Errorf("devices are the runtime's: %v", a)
	}
}

// A kubelet that does not ask what is preferred, or takes something else, gets no share that is not one GPU's.
func TestMixedIDsAreRefused(t *testing.T) {
	k := newKubelet(t)
	k.deaf = true
	k.start()
	tab := table("binpack", t4, t4, t4, t4)
	k.begin(Options{Table: tab})
	k.until(ResourceMemory, 56, 0)
	refused := 0
	for i := range 30 {
		if err := k.admit(podOf(fmt.Sprint(i), [2]int{2, 0})); err != nil {
			refused++
			if !strings.Contains(err.Error(), "of 2 GPUs for one container") {
				t.Error(err)
			}
		}
	}
	if refused == 0 || refused == 30 {
		t.Errorf("%d of 30 were refused", refused)
	}
	k.check(limits(tab))
}

func TestEachGPUItsOwnCount(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := table("binpack", t4, 40*quota.GiB)
	tab.Config.Overcommit = 2
	k.begin(Options{Table: tab})
	k.until(ResourceMemory, 29+80, 0)
	if err := k.admit(podOf("more", [2]int{41, 0})); err == nil {
		t.Error("a container has more memory than the GPU")
	}
	pod := podOf("a", [2]int{30, 0})
	k.mustAdmit(pod)
	if got := k.gpuOf(pod, "c0"); got != uuid(1) {
		t.Errorf("is on %s", got)
	}
}

func TestKubeletRestarts(t *testing.T) {
	k := newKubelet(t)
	tab := table("binpack", t4, t4)
	p := k.begin(Options{Table: tab}) // before the kubelet
	if err := p.Healthy(); err == nil {
		t.Error("healthy without a kubelet")
	}
	k.start()
	k.until(ResourceMemory, 28, 0)
	a := podOf("a", [2]int{10, 0})
	k.mustAdmit(a)
	k.stop()
	k.start()
	k.until(ResourceMemory, 28, 0)
	k.until(ResourcePercent, 200, 0)
	k.mustAdmit(a) // again: it keeps what it has
	if n := len(k.pods[a.UID].answers["c0"]); n != 1 {
		t.Errorf("%d answers", n)
	}
	b := podOf("b", [2]int{10, 0})
	k.mustAdmit(b)
	if k.gpuOf(a, "c0") == k.gpuOf(b, "c0") {
		t.Error("one GPU for both")
	}
	k.check(limits(tab))
}

func TestPluginRestarts(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := table("binpack", t4, t4)
	p := k.begin(Options{Table: tab})
	k.until(ResourceMemory, 28, 0)
	for i := range 3 {
		k.mustAdmit(podOf(fmt.Sprint(i), [2]int{6, 0}))
	}
	p.Stop()
	if _, err := os.Stat(filepath.Join(k.dir, socket(ResourceMemory))); err == nil {
		t.Error("the socket stays")
	}
	q := k.begin(Options{Table: tab})
	eventually(t, func() string { return fmt.Sprint(errorText(q.Healthy())) })
	k.mustAdmit(podOf("3", [2]int{6, 0}))
	if err := k.admit(podOf("4", [2]int{6, 0})); err == nil {
		t.Error("a fifth fits")
	}
	k.check(limits(tab))
	// Another unit would count what is booked wrongly.
	q.Stop()
	if _, err := start(context.Background(), Options{Node: "n", Table: tab, KubeletDir: k.dir, RunDir: filepath.Join(k.dir, "..", "run"),
		Unit: 512 * quota.MiB}, "/none"); err == nil || !strings.Contains(err.Error(), "4 containers of this node hold units") {
		t.Errorf("%v", err)
	}
}

// From the kubelet's socket to its list of devices it takes little time, and no API server: until then it refuses pods.
func TestRegistersAtOnce(t *testing.T) {
	over := make(chan struct{})
	hangs := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-over }))
	defer hangs.Close()
	defer close(over)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: hangs.URL})
	if err != nil {
		t.Fatal(err)
	}
	k := newKubelet(t)
	k.begin(Options{Table: table("binpack", t4), Client: client})
	time.Sleep(50 * time.Millisecond)
	least := time.Hour // a busy machine may make some of them late
	for range 4 {      // it starts, and is restarted
		began := time.Now()
		k.start()
		k.until(ResourceMemory, 14, 0)
		k.until(ResourcePercent, 100, 0)
		least = min(least, time.Since(began))
		k.stop()
	}
	if least > apiTimeout {
		t.Errorf("each of four registrations took %v or more", least)
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestSocketRemoved(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := k.begin(Options{Table: table("binpack", t4)})
	k.until(ResourceMemory, 14, 0)
	if err := os.Remove(filepath.Join(k.dir, socket(ResourceMemory))); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.registers < 3 {
			return fmt.Sprintf("%d registrations", k.registers)
		}
		return ""
	})
	eventually(t, func() string { return errorText(p.Healthy()) })
}

func TestOldPlugin(t *testing.T) {
	k := newKubelet(t)
	k.start()
	l, err := net.Listen("unix", filepath.Join(k.dir, oldSocket))
	if err != nil {
		t.Fatal(err)
	}
	p := k.begin(Options{Table: table("binpack", t4)})
	eventually(t, func() string {
		if err := p.Healthy(); err == nil || !strings.Contains(err.Error(), "gpushare's own device plugin serves this node") {
			return fmt.Sprint(err)
		}
		return ""
	})
	if h, _ := k.capacity(ResourceMemory); h != 0 {
		t.Error("both serve the resource")
	}
	l.Close()
	k.until(ResourceMemory, 14, 0)
}

func TestGPUVanishes(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := table("binpack", t4, t4)
	p := k.begin(Options{Table: tab})
	k.until(ResourceMemory, 28, 0)
	a := podOf("a", [2]int{6, 0})
	k.mustAdmit(a)
	less := *tab
	less.GPUs = tab.GPUs[1:]
	if err := p.Update(context.Background(), &less); err != nil {
		t.Fatal(err)
	}
	k.until(ResourceMemory, 14, 14)
	b := podOf("b", [2]int{1, 0})
	k.mustAdmit(b)
	if k.gpuOf(b, "c0") != uuid(1) || k.pods[b.UID].answers["c0"][0].Envs[annotationIndex] != "1" {
		t.Errorf("is on %s, index %s", k.gpuOf(b, "c0"), k.pods[b.UID].answers["c0"][0].Envs[annotationIndex])
	}
	// The other GPU keeps its number over a restart of the plugin.
	p.Stop()
	k.begin(Options{Table: &less})
	c := podOf("c", [2]int{1, 0})
	eventually(t, func() string { return errorText(k.admit(c)) })
	if got := k.pods[c.UID].answers["c0"][0].Envs[annotationIndex]; got != "1" {
		t.Errorf("index %s", got)
	}
}

// TestGPUUnhealthy: units of an unhealthy GPU are not given out, who has some keeps them, and they come back.
func TestGPUUnhealthy(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := table("binpack", t4, t4)
	p := k.begin(Options{Table: tab})
	k.until(ResourceMemory, 28, 0)
	a := podOf("a", [2]int{6, 0})
	k.mustAdmit(a)
	sick := *tab
	sick.GPUs = slices.Clone(tab.GPUs)
	sick.GPUs[0].Fault = "Xid 79"
	if err := p.Update(context.Background(), &sick); err != nil {
		t.Fatal(err)
	}
	k.until(ResourceMemory, 14, 14)
	b := podOf("b", [2]int{1, 0})
	k.mustAdmit(b)
	if k.gpuOf(a, "c0") != uuid(0) || k.gpuOf(b, "c0") != uuid(1) {
		t.Errorf("on %s and %s", k.gpuOf(a, "c0"), k.gpuOf(b, "c0"))
	}
	if err := k.admit(podOf("c", [2]int{14, 0})); err == nil {
		t.Errorf("more than the healthy one has: %v", err)
	}
	if err := p.Update(context.Background(), tab); err != nil {
		t.Fatal(err)
	}
	k.until(ResourceMemory, 28, 0)
}

func TestUnits(t *testing.T) {
	h200 := 143771 * quota.MiB
	for _, x := range []struct {
		unit   quota.Bytes
		memory []quota.Bytes
		want   string
	}{
		{quota.GiB, []quota.Bytes{h200, h200, h200, h200, h200, h200, h200, h200}, ""},
		{quota.MiB, []quota.Bytes{t4, t4, t4, t4}, ""},
		{quota.MiB, []quota.Bytes{h200}, "choose a unit of at least 4MiB"},
		{quota.MiB, []quota.Bytes{h200, h200, h200, h200, h200, h200, h200, h200}, "choose a unit of at least 32MiB"},
		{32 * quota.MiB, []quota.Bytes{h200, h200, h200, h200, h200, h200, h200, h200}, ""},
		{64 * quota.GiB, []quota.Bytes{t4}, "choose a smaller unit"},
		{quota.MiB + 1, []quota.Bytes{t4}, "want whole MiB"},
	} {
		p, err := start(context.Background(), Options{Table: table("binpack", x.memory...), Unit: x.unit, KubeletDir: t.TempDir(),
			RunDir: t.TempDir()}, "/none")
		if err == nil {
			p.Stop()
		}
		if x.want == "" && err != nil || x.want != "" && !strings.Contains(errorText(err), x.want) {
			t.Errorf("%v of %d GPUs: %v, want %q", x.unit, len(x.memory), err, x.want)
		}
	}
}

// The longest list that is not refused passes the kubelet's gRPC, and the kubelet's calls pass ours.
func TestLongestList(t *testing.T) {
	k := newKubelet(t)
	k.start()
	k.begin(Options{Table: table("binpack", 60*1024*quota.MiB), Unit: quota.MiB})
	k.until(ResourceMemory, 61440, 0)
	pod := podOf("a", [2]int{40000, 0})
	began := time.Now()
	k.mustAdmit(pod)
	t.Logf("61440 devices, a pod of 40000: %v", time.Since(began))
}

// Memory and percent of a container are of one GPU, whichever the kubelet asks for first, and containers that together want
// more than a GPU's time are on two.
func TestPercent(t *testing.T) {
	for _, api := range []bool{false, true} {
		t.Run(fmt.Sprintf("api=%v", api), func(t *testing.T) {
			for range 5 { // the order is by chance
				k := newKubelet(t)
				k.start()
				tab := table("binpack", t4, t4, t4)
				o := Options{Table: tab}
				client := fake.NewClientset(node())
				if api {
					o.Client = client
				}
				k.begin(o)
				k.until(ResourceMemory, 42, 0)
				k.until(ResourcePercent, 300, 0)
				for i := range 3 {
					p := podOf(fmt.Sprint(i), [2]int{3, 60})
					bind(t, client, p, noIndex)
					k.mustAdmit(p)
					s := k.shares(p, "c0")[0]
					if s.Percent != 60 {
						t.Errorf("%+v", s)
					}
					// Without the API server the plugin cannot know, when it places memory, that a percentage follows.
					if ids := k.pods[p.UID].devices["c0"][ResourcePercent]; api && !strings.HasPrefix(ids[0], s.UUID) {
						t.Errorf("memory on %s, percent on %s", s.UUID, ids[0])
					}
				}
				if api {
					k.check(limits(tab))
				}
			}
		})
	}
}

func TestExtender(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := table("binpack", t4, t4, t4, t4)
	client := fake.NewClientset(node())
	k.begin(Options{Table: tab, Client: client})
	k.until(ResourceMemory, 56, 0)
	// Pods of one size on several GPUs, one with two containers of different size, and one that is not the extender's.
	var pods []*corev1.Pod
	for i, index := range []int{2, 0, 3, 0} {
		p := podOf(fmt.Sprint(i), [2]int{4, 0})
		bind(t, client, p, index)
		pods = append(pods, p)
	}
	two := podOf("two", [2]int{3, 0}, [2]int{4, 0})
	bind(t, client, two, 1)
	for i, p := range append(pods, two) {
		k.mustAdmit(p)
		want := []int{2, 0, 3, 0, 1}[i]
		for _, c := range p.Spec.Containers {
			if got := k.gpuOf(p, c.Name); got != uuid(want) {
				t.Errorf("%s %s: %s, want GPU %d", p.Name, c.Name, got, want)
			}
		}
	}
	if got := k.pods[two.UID].answers["c0"][0].Envs[annotationPod]; got != "7" {
		t.Errorf("POD=%s", got)
	}
	eventually(t, func() string {
		for _, p := range append(pods, two) {
			now, _ := client.CoreV1().Pods("d").Get(context.Background(), p.Name, metav1.GetOptions{})
			if now.Annotations[annotationAssigned] != "true" || now.Annotations[annotationAssignTime] == "" ||
				now.Annotations[annotationIndex] != p.Annotations[annotationIndex] ||
				now.Annotations[annotationAssumeTime] != p.Annotations[annotationAssumeTime] {
				return fmt.Sprint(p.Name, now.Annotations)
			}
		}
		return ""
	})
	k.check(limits(tab))
}

func TestWithoutExtender(t *testing.T) {
	k := newKubelet(t)
	k.start()
	client := fake.NewClientset(node())
	k.begin(Options{Table: table("binpack", t4, t4), Client: client})
	k.until(ResourceMemory, 28, 0)
	p := podOf("a", [2]int{3, 0}, [2]int{4, 0})
	bind(t, client, p, noIndex)
	k.mustAdmit(p)
	eventually(t, func() string {
		now, _ := client.CoreV1().Pods("d").Get(context.Background(), "a", metav1.GetOptions{})
		for name, want := range map[string]string{annotationIndex: "0", annotationPod: "7", annotationDev: "14", annotationAssigned: "true"} {
			if now.Annotations[name] != want {
				return fmt.Sprint(now.Annotations)
			}
		}
		return ""
	})
	eventually(t, func() string {
		n, _ := client.CoreV1().Nodes().Get(context.Background(), "n", metav1.GetOptions{})
		c, a := n.Status.Capacity[ResourceCount], n.Status.Allocatable[ResourceCount]
		if c.Value() != 2 || a.Value() != 2 {
			return fmt.Sprint(n.Status)
		}
		return ""
	})
}

func TestHostileAnnotations(t *testing.T) {
	for name, x := range map[string]struct {
		edit func(*corev1.Pod)
		want string // of the error; empty: it is served
	}{
		"no GPU":       {func(p *corev1.Pod) { p.Annotations[annotationIndex] = "-1" }, ""},
		"magic":        {func(p *corev1.Pod) { p.Annotations[annotationIndex] = "no-gpu-has-4GiB-to-run" }, ""},
		"no such GPU":  {func(p *corev1.Pod) { p.Annotations[annotationIndex] = "7" }, ""},
		"huge":         {func(p *corev1.Pod) { p.Annotations[annotationIndex] = strings.Repeat("9", 4000) }, ""},
		"full GPU":     {func(p *corev1.Pod) { p.Annotations[annotationIndex] = "0" }, "bound to has not 4 units free"},
		"more":         {func(p *corev1.Pod) { p.Annotations[annotationPod], p.Annotations[annotationDev] = "99", "4" }, ""},
		"assigned":     {func(p *corev1.Pod) { p.Annotations[annotationAssigned] = "true" }, ""},
		"time":         {func(p *corev1.Pod) { p.Annotations[annotationAssumeTime] = "-5" }, ""},
		"many GPUs":    {func(p *corev1.Pod) { p.Labels[ResourceCount] = "64" }, "no multiple"},
		"three GPUs":   {func(p *corev1.Pod) { p.Labels[ResourceCount] = "4" }, "no 4 GPUs of this node"},
		"our own name": {func(p *corev1.Pod) { p.Annotations["alloc.cgpu.io/shares"] = "id=x,memory=99999999999" }, ""},
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
			p := podOf("p", [2]int{4, 0})
			bind(t, fake.NewClientset(), p, 1)
			x.edit(p)
			bind(t, client, p, noIndex)
			err := k.admit(p)
			if x.want == "" && err != nil || x.want != "" && !strings.Contains(errorText(err), x.want) {
				t.Errorf("%v, want %q", err, x.want)
			}
			if x.want == "" && k.shares(p, "c0")[0].Limit != 4*quota.GiB {
				t.Errorf("%v", k.shares(p, "c0"))
			}
			// It stands in nobody's way.
			next := podOf("next", [2]int{4, 0})
			bind(t, client, next, 1)
			k.mustAdmit(next)
			k.check(limits(tab))
		})
	}
}

func TestSeveralGPUs(t *testing.T) {
	k := newKubelet(t)
	sys := filepath.Join(k.dir, "..", "sys")
	// GPUs 0 and 3 are below one switch, 1 and 2 below another.
	for i, above := range []string{"pci0000:00/0000:00:01.0", "pci0000:40/0000:40:01.0", "pci0000:40/0000:40:01.0",
		"pci0000:00/0000:00:01.0"} {
		bus := fmt.Sprintf("0000:%02x:00.0", i+1)
		real := filepath.Join(sys, "devices", above, bus)
		if err := os.MkdirAll(real, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(sys, "bus/pci/devices"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(real, filepath.Join(sys, "bus/pci/devices", bus)); err != nil {
			t.Fatal(err)
		}
	}
	k.start()
	tab := table("binpack", t4, t4, t4, t4)
	client := fake.NewClientset(node())
	k.begin(Options{Table: tab, Client: client})
	k.until(ResourceMemory, 56, 0)
	k.until(ResourcePercent, 400, 0)
	p := podOf("p", [2]int{8, 60})
	p.Labels[ResourceCount] = "2"
	bind(t, client, p, noIndex)
	k.mustAdmit(p)
	shares := k.shares(p, "c0")
	if len(shares) != 2 || shares[0].UUID != uuid(0) || shares[1].UUID != uuid(3) || shares[0].ID == shares[1].ID {
		t.Fatalf("%v", shares)
	}
	for _, s := range shares {
		if s.Limit != 4*quota.GiB || s.Percent != 30 {
			t.Errorf("%+v", s)
		}
	}
	odd := podOf("odd", [2]int{7, 0})
	odd.Labels[ResourceCount] = "2"
	bind(t, client, odd, noIndex)
	if err := k.admit(odd); err == nil || !strings.Contains(err.Error(), "no multiple") {
		t.Errorf("%v", err)
	}
}

// Containers take over the units of init containers; where those do not make a share of one GPU, the pod is refused.
func TestInitContainers(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := table("spread", t4, t4)
	k.begin(Options{Table: tab})
	k.until(ResourceMemory, 28, 0)
	for i, x := range []struct{ init, first, second int }{{4, 6, 0}, {6, 4, 4}, {2, 2, 2}} {
		p := podOf(fmt.Sprint(i), [2]int{x.first, 0})
		if x.second > 0 {
			p.Spec.Containers = append(p.Spec.Containers, container("c1", x.second, 0))
		}
		p.Spec.InitContainers = []corev1.Container{container("init", x.init, 0)}
		k.mustAdmit(p)
		if k.gpuOf(p, "init") != k.gpuOf(p, "c0") {
			t.Errorf("pod %d: init container and container on two GPUs", i)
		}
		k.check(limits(tab))
		k.remove(p)
	}
	// GPU 0 has 6 left, 5 of them the init container's; the container wants 8, and GPU 1 has 14.
	k.mustAdmit(podOf("a", [2]int{8, 0}))
	k.mustAdmit(podOf("b", [2]int{9, 0}))
	p := podOf("p", [2]int{8, 0})
	p.Spec.InitContainers = []corev1.Container{container("init", 5, 0)}
	if err := k.admit(p); err == nil {
		t.Error("a share across GPUs")
	}
}

func TestNoIsolationLabel(t *testing.T) {
	k := newKubelet(t)
	k.start()
	n := node()
	n.Labels[labelShared] = "true"
	p := k.begin(Options{Table: table("binpack", t4), Client: fake.NewClientset(n)})
	k.until(ResourceMemory, 0, 14)
	if err := p.Healthy(); !errors.Is(err, errShared) {
		t.Errorf("%v", err)
	}
}

// Below CRI-O no pod can have what the plugin would allocate: the node has no unit, the condition tells why, and nothing else is wrong.
func TestBelowCRIO(t *testing.T) {
	for runtime, offered := range map[string]int{"cri-o://1.34.3": 0, "containerd://2.4.2": 14, "": 14} {
		k := newKubelet(t)
		k.start()
		n := node()
		n.Status.NodeInfo.ContainerRuntimeVersion = runtime
		p := k.begin(Options{Table: table("binpack", t4), Client: fake.NewClientset(n)})
		k.until(ResourceMemory, offered, 14-offered)
		if limited := strings.Contains(p.Limited(), "below CRI-O no pod can have aliyun.com/gpu-mem"); limited != (offered == 0) {
			t.Errorf("%q: limited: %q", runtime, p.Limited())
		}
		if err := p.Healthy(); errors.Is(err, errCRIO) {
			t.Errorf("%q: %v: another front end may serve the node", runtime, err)
		}
		if err := k.admit(podOf("p", [2]int{1, 0})); (err == nil) != (offered > 0) {
			t.Errorf("%q: a pod with a unit: %v", runtime, err)
		}
	}
}

// An API server that hangs or fails delays a first call by its timeout, and nothing after it.
func TestAPIDown(t *testing.T) {
	over := make(chan struct{})
	hangs := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-over }))
	defer hangs.Close()
	defer close(over)
	fails := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	defer fails.Close()
	for name, host := range map[string]string{"hangs": hangs.URL, "fails": fails.URL, "gone": "http://127.0.0.1:1"} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			tab := table("binpack", t4)
			client, err := kubernetes.NewForConfig(&rest.Config{Host: host})
			if err != nil {
				t.Fatal(err)
			}
			k.begin(Options{Table: tab, Client: client})
			k.until(ResourceMemory, 14, 0)
			began := time.Now()
			for i := range 5 {
				k.mustAdmit(podOf(fmt.Sprint(i), [2]int{2, 0}))
			}
			if d := time.Since(began); d > 4*apiTimeout {
				t.Errorf("five pods took %v", d)
			}
			k.check(limits(tab))
		})
	}
}

// Many pods come and go on four GPUs at once, with and without percentages, placed by nobody or as the extender does.
func TestManyPods(t *testing.T) {
	for _, placed := range []bool{false, true} {
		t.Run(fmt.Sprintf("extender=%v", placed), func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			tab := table("binpack", t4, t4, 40*quota.GiB, 40*quota.GiB)
			client := fake.NewClientset(node())
			k.begin(Options{Table: tab, Client: client})
			k.until(ResourceMemory, 14+14+40+40, 0)
			k.until(ResourcePercent, 400, 0)
			var mu sync.Mutex
			var wg sync.WaitGroup
			served, refused := 0, 0
			for i := range 100 {
				size := [][2]int{{1 + rand.IntN(4), 0}, {1 + rand.IntN(4), 5 * (1 + rand.IntN(6))}}[rand.IntN(2)]
				pod := podOf(fmt.Sprint(i), size)
				if rand.IntN(4) == 0 {
					pod.Spec.Containers = append(pod.Spec.Containers, container("second", 1, 0))
				}
				index := noIndex
				if placed {
					index = rand.IntN(4)
				}
				wg.Go(func() {
					bind(t, client, pod, index)
					err := k.admit(pod)
					phase := corev1.PodRunning
					if err != nil {
						phase = corev1.PodFailed
					}
					started(t, client, pod, phase)
					mu.Lock()
					if err == nil {
						served++
					} else {
						refused++
					}
					mu.Unlock()
					if rand.IntN(3) == 0 {
						k.remove(pod)
					}
				})
			}
			wg.Wait()
			sum, percent := k.check(limits(tab))
			t.Logf("%d served, %d refused; booked %v, %v", served, refused, sum, percent)
			if served < 20 {
				t.Errorf("only %d pods were served", served)
			}
		})
	}
}
