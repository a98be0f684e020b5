// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// shared is a node whose GPUs are for so many containers.
func shared(maxInst int, policy sched.Policy, memory ...quota.Bytes) *device.Table {
	t := table("binpack", memory...)
	t.Config.MaxInst, t.Config.Policy, t.Config.PrioRatio = maxInst, policy, sched.DefaultPrioRatio
	return t
}

// setCard is what cgpu policy does.
func (k *kubelet) setCard(t *device.Table, gpu int, f func(*sched.Card)) {
	k.t.Helper()
	g := t.GPUs[gpu]
	_, err := ledger.Open(k.runDir()).SetCard(ledger.GPU{Index: g.Index, UUID: g.UUID, Memory: g.Memory}, t.Config.Card(),
		func(c *sched.Card) error {
			f(c)
			return nil
		})
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *kubelet) runDir() string { return filepath.Join(k.dir, "..", "run") }

// A GPU that has as many containers as it may gets no other, however much memory is left, also when the plugin is another
// one, and gets one again when one ends.
func TestMaxInst(t *testing.T) {
	k := newKubelet(t)
	k.start()
	tab := shared(3, sched.PolicyPreempt, t4, t4)
	p := k.begin(Options{Table: tab})
	k.until(ResourceMemory, 28, 0)
	var pods []*corev1.Pod
	on := map[string]int{}
	for i := range 6 {
		if i == 4 {
			p.Stop()
			p = k.begin(Options{Table: tab})
			eventually(t, func() string { return errorText(p.Healthy()) })
		}
		pod := podOf(fmt.Sprint(i), [2]int{1, 0})
		// Its init container ends before it, and so counts no second time.
		pod.Spec.InitContainers = []corev1.Container{container("init", 1, 0)}
		k.mustAdmit(pod)
		pods = append(pods, pod)
		on[k.gpuOf(pod, "c0")]++
	}
	if on[uuid(0)] != 3 || on[uuid(1)] != 3 {
		t.Errorf("containers per GPU: %v", on)
	}
	if err := k.admit(podOf("more", [2]int{1, 0})); err == nil || !strings.Contains(err.Error(),
		"GPU 0: 11 of 14, 3 containers share it, the most allowed (max_inst)") {
		t.Errorf("%v", err)
	}
	k.remove(pods[3])
	next := podOf("next", [2]int{1, 0})
	k.mustAdmit(next)
	if got := k.gpuOf(next, "c0"); got != uuid(1) {
		t.Errorf("is on %s", got)
	}
	// A GPU's own setting stands over the node's.
	k.setCard(tab, 0, func(c *sched.Card) { c.MaxInst = 4 })
	own := podOf("own", [2]int{1, 0})
	k.mustAdmit(own)
	if got := k.gpuOf(own, "c0"); got != uuid(0) {
		t.Errorf("is on %s", got)
	}
}

// Allocate, too, refuses where a kubelet does not ask for a preference, and containers that no plugin served count.
func TestMaxInstUnasked(t *testing.T) {
	k := newKubelet(t)
	k.deaf = true
	k.start()
	tab := shared(2, sched.PolicyPreempt, t4)
	k.begin(Options{Table: tab})
	k.until(ResourceMemory, 14, 0)
	g := tab.GPUs[0]
	if _, err := ledger.Open(k.runDir()).Reserve(ledger.Request{
		Record: ledger.Record{ID: "docker", Nonce: strings.Repeat("0", 16), Bundle: "/b", LauncherPID: os.Getpid(),
			VGPUs: []ledger.VGPU{{UUID: g.UUID, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}},
		GPUs: []ledger.GPU{{Index: 0, UUID: g.UUID, Memory: g.Memory}}, Card: tab.Config.Card(), Overcommit: 1,
	}); err != nil {
		t.Fatal(err)
	}
	k.mustAdmit(podOf("a", [2]int{1, 0}))
	if err := k.admit(podOf("b", [2]int{1, 0})); err == nil || !strings.Contains(err.Error(), "2 containers share it") {
		t.Errorf("%v", err)
	}
}

// A percentage that a GPU's policy does not promise is refused when the pod is admitted, or placed where it is.
func TestPercentByPolicy(t *testing.T) {
	for _, x := range []struct {
		policy  sched.Policy
		percent int
		want    string
	}{
		{sched.PolicyNative, 5, "enforces no share"},
		{sched.PolicyFair, 6, "under policy fair each of its 20 places has 5 %"},
		{sched.PolicyFair, 5, ""},
		{sched.PolicyPreempt, 60, ""},
	} {
		for _, deaf := range []bool{false, true} {
			k := newKubelet(t)
			k.deaf = deaf
			k.start()
			k.begin(Options{Table: shared(20, x.policy, t4)})
			k.until(ResourceMemory, 14, 0)
			k.until(ResourcePercent, 100, 0)
			err := k.admit(podOf("a", [2]int{1, x.percent}))
			if x.want == "" && err != nil || x.want != "" && !strings.Contains(errorText(err), x.want) {
				t.Errorf("%v, %d %%: %v, want %q", x.policy, x.percent, err, x.want)
			}
		}
	}
}

// Of GPUs with policies of their own the one is chosen that promises the percentage, also where memory is asked for first.
func TestPercentChoosesPolicy(t *testing.T) {
	for range 6 { // the order is by chance
		k := newKubelet(t)
		k.start()
		tab := shared(20, sched.PolicyPreempt, t4, t4)
		k.setCard(tab, 0, func(c *sched.Card) { c.Policy = sched.PolicyNative })
		client := fake.NewClientset(node())
		k.begin(Options{Table: tab, Client: client})
		k.until(ResourceMemory, 28, 0)
		k.until(ResourcePercent, 200, 0)
		p := podOf("a", [2]int{1, 30})
		bind(t, client, p, noIndex)
		k.mustAdmit(p)
		if got := k.gpuOf(p, "c0"); got != uuid(1) {
			t.Errorf("is on %s", got)
		}
	}
}

func TestHolders(t *testing.T) {
	h := holders{}
	id := func(i int) string { return card{GPU: device.GPU{UUID: uuid(0)}}.id(ResourcePercent, i) }
	h.allocate([]string{id(0), id(1)})
	h.allocate([]string{id(2)})
	h.adopt([]string{id(2)})
	h.adopt([]string{id(3), card{GPU: device.GPU{UUID: uuid(1)}}.id(ResourcePercent, 0)})
	if n := h.count(nil); n[uuid(0)] != 3 || n[uuid(1)] != 1 {
		t.Errorf("%v", n)
	}
	if n := h.count([]string{id(1)}); n[uuid(0)] != 2 {
		t.Errorf("without the one that makes way: %v", n)
	}
	h.allocate([]string{id(1), id(4)})
	if n := h.count(nil); n[uuid(0)] != 3 {
		t.Errorf("an init container counts beside its successor: %v", n)
	}
	h.free([]string{id(2), id(3), id(4), id(5)}, []string{id(4)})
	if n := h.count(nil); n[uuid(0)] != 1 || n[uuid(1)] != 1 {
		t.Errorf("%v", n)
	}
}
