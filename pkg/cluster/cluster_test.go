// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// cmd/kubectl-cgpu's golden files hold the whole accounting; here is what they do not.

func node(name string, amounts map[corev1.ResourceName]string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{}}}
	for k, v := range amounts {
		n.Status.Allocatable[k] = resource.MustParse(v)
	}
	return n
}

func pod(name, on, units, index string) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{annotationIndex: index}}}
	p.Spec.NodeName = on
	p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{resourceMemory: resource.MustParse(units)}}}}
	return p
}

func slice(on string, index ...int64) resourceapi.ResourceSlice {
	s := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: Driver, NodeName: &on,
		Pool: resourceapi.ResourcePool{Name: on, Generation: 1}}}
	for _, i := range index {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: string(rune('a' + i)),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"index": {IntValue: &i}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{capacityMemory: {Value: resource.MustParse("80Gi")}}})
	}
	return s
}

// The guess of the unit: a GPU of 141 GiB is not one of 141 MiB.
func TestUnit(t *testing.T) {
	for units, want := range map[string]quota.Bytes{"141": 141 * quota.GiB, "1023": 1023 * quota.GiB, "1024": quota.GiB,
		"143771": 143771 * quota.MiB} {
		c := Of(Objects{Nodes: []corev1.Node{node("n", map[corev1.ResourceName]string{resourceMemory: units})}})
		if len(c.Nodes) != 1 || c.Nodes[0].Total != want {
			t.Errorf("%s units: %+v, want %v", units, c.Nodes, want)
		}
	}
}

// Both front ends on one node: the plugin's GPUs take the numbers that the driver's leave, and its indices count its own.
func TestBothFrontEnds(t *testing.T) {
	c := Of(Objects{
		Nodes:  []corev1.Node{node("n", map[corev1.ResourceName]string{resourceMemory: "30", resourceCount: "2"})},
		Slices: []resourceapi.ResourceSlice{slice("n", 0, 2)},
		Pods:   []corev1.Pod{pod("p", "n", "6", "1")},
	})
	if len(c.Nodes) != 1 || len(c.Nodes[0].GPUs) != 4 {
		t.Fatalf("%+v", c.Nodes)
	}
	want := []struct {
		by       string
		promised quota.Bytes
	}{{FrontEndDRA, 0}, {FrontEndDevicePlugin, 0}, {FrontEndDRA, 0}, {FrontEndDevicePlugin, 6 * quota.GiB}}
	for i, g := range c.Nodes[0].GPUs {
		if g.Index != i || g.FrontEnd != want[i].by || g.Promised != want[i].promised {
			t.Errorf("GPU %d: %+v, want %+v", i, g, want[i])
		}
	}
	if n := c.Nodes[0]; n.Promised != 6*quota.GiB || n.Total != 190*quota.GiB {
		t.Errorf("sums: %v of %v", n.Promised, n.Total)
	}
}

// What a pod's author writes into the annotation makes no GPU and no column.
func TestHostileIndex(t *testing.T) {
	for _, index := range []string{"", "-1", "2", "999999999999", "1e9", "0x0", " 0"} {
		c := Of(Objects{
			Nodes: []corev1.Node{node("n", map[corev1.ResourceName]string{resourceMemory: "30", resourceCount: "2"})},
			Pods:  []corev1.Pod{pod("p", "n", "6", index)},
		})
		if n := c.Nodes[0]; len(n.GPUs) != 2 || len(n.Unplaced) != 1 || n.Promised != 6*quota.GiB {
			t.Errorf("index %q: %+v", index, n)
		}
	}
}

// A slice may say what it wants of the index, a node of its count.
func TestHostileNumbers(t *testing.T) {
	c := Of(Objects{Slices: []resourceapi.ResourceSlice{slice("n", 0, 1<<40, -5)},
		Nodes: []corev1.Node{node("m", map[corev1.ResourceName]string{resourceMemory: "5", resourceCount: "1000000000"})}})
	for _, n := range c.Nodes {
		if len(n.GPUs) > maxIndex {
			t.Errorf("%s: %d GPUs", n.Name, len(n.GPUs))
		}
		for _, g := range n.GPUs {
			if g.Index < 0 || g.Index >= maxIndex {
				t.Errorf("%s: index %d", n.Name, g.Index)
			}
		}
	}
}
