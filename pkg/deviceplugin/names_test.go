// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/alloc"
)

// A pod of another system gets what its own words ask for, and the kubelet knows no others.
func TestNames(t *testing.T) {
	tencent := Names{Memory: "tencent.com/vcuda-memory", Percent: "tencent.com/vcuda-core"}
	k := newKubelet(t)
	k.start()
	k.begin(Options{Table: table("binpack", t4), Names: tencent})
	k.until(tencent.Memory, 14, 0)
	k.until(tencent.Percent, 100, 0)
	p := podOf("p", [2]int{4, 30})
	limits := p.Spec.Containers[0].Resources.Limits
	for _, resource := range []string{ResourceMemory, ResourcePercent} {
		limits[corev1.ResourceName(tencent.Outside(resource))] = limits[corev1.ResourceName(resource)]
		delete(limits, corev1.ResourceName(resource))
	}
	k.mustAdmit(p)
	annotations := map[string]string{}
	for _, a := range k.pods[p.UID].answers["c0"] {
		for key, value := range a.Annotations {
			annotations[key] = value
		}
	}
	shares, err := alloc.FromAnnotations(annotations)
	if err != nil || len(shares) != 1 || shares[0].Limit != 4<<30 || shares[0].Percent != 30 {
		t.Errorf("%+v, %v", shares, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.endpoints[ResourceMemory] != nil || k.endpoints[ResourcePercent] != nil {
		t.Error("is registered under its own names too")
	}
	for name, want := range map[string]string{tencent.Memory: ResourceMemory, tencent.Percent: ResourcePercent, ResourceMemory: "", "": ""} {
		if got := tencent.Inside(name); got != want {
			t.Errorf("%s is %s", name, got)
		}
	}
	err = tencent.tell(errors.New(ResourceMemory + "=5 and " + ResourcePercent + "=1"))
	if err.Error() != "tencent.com/vcuda-memory=5 and tencent.com/vcuda-core=1" {
		t.Error(err)
	}
}

// ACK's labels: shares are for nodes that were given to them, and the placement goes before the node's own.
func TestACKLabels(t *testing.T) {
	for mode, served := range map[string]bool{"": true, "cgpu": true, "core_mem": true, "default": false, "share": false, "topology": false,
		"mps": false, "x": false} {
		labels := map[string]string{}
		if mode != "" {
			labels[labelSchedule] = mode
		}
		err := unserved(labels)
		if (err == nil) != served || err != nil && !strings.Contains(err.Error(), labelSchedule+"="+mode) {
			t.Errorf("%q: %v", mode, err)
		}
	}
	k := newKubelet(t)
	k.start()
	n := node()
	n.Labels[labelPlacement] = spread
	p := k.begin(Options{Table: table(binpack, t4, t4), Client: fake.NewClientset(n)})
	k.until(ResourceMemory, 28, 0)
	for {
		if _, placement, _, changed, _ := p.state(); placement == spread {
			break
		} else {
			<-changed
		}
	}
	p.follow(nil, placementOf("anything"))
	if _, placement, _, _, _ := p.state(); placement != binpack {
		t.Error(placement)
	}
}
