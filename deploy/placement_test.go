// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package deploy

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestServerPlacement: the real scheduler puts the claims of examples/placement.yaml where they say, on a node of eight GPUs in two NVLink
// domains, the last two of them large.
func TestServerPlacement(t *testing.T) {
	c := newCluster(t)
	const namespace = "placement"
	var devices []string
	for i := range 8 {
		model := "Tesla T4"
		if i > 5 {
			model = "NVIDIA A100-SXM4-16GB"
		}
		devices = append(devices, sliceDevice(i, model, i/4))
	}
	claims := c.placementNode(t, namespace, "eight", devices)
	// Three GPUs of the first domain are taken.
	claims["whole"] = allOf(`["GPU-1", "GPU-2", "GPU-3"]`, 3)
	for i, step := range []struct {
		claim string
		want  []string // the GPUs, of which it has some
		count int
	}{
		{"whole", []string{"gpu-1", "gpu-2", "gpu-3"}, 3},
		{"large-gpu-first", []string{"gpu-6", "gpu-7"}, 1},
		{"large-gpu-first", []string{"gpu-6", "gpu-7"}, 1},
		{"large-gpu-first", []string{"gpu-0", "gpu-4", "gpu-5"}, 1}, // the large ones have 6 GiB left
		{"two-by-nvlink", []string{"gpu-4", "gpu-5"}, 2},
	} {
		name := fmt.Sprintf("%s-%d", step.claim, i)
		got := c.place(t, namespace, name, claims[step.claim])
		slices.Sort(got)
		outside := slices.ContainsFunc(got, func(gpu string) bool { return !slices.Contains(step.want, gpu) })
		if outside || len(slices.Compact(got)) != step.count {
			t.Errorf("%s: has %v, want %d of %v", name, got, step.count, step.want)
		}
	}
}

// TestServerNear: two-near of examples/placement.yaml gets what is nearest, on a node of eight GPUs of two NUMA nodes where NVLink joins
// each to the next but one; and the scheduler tries GPUs in the order of the slice, by which placement = "spread" works.
func TestServerNear(t *testing.T) {
	c := newCluster(t)
	const namespace = "near"
	var devices []string
	for i := range 8 {
		devices = append(devices, sliceDevice(i, "Tesla T4", i/4*2+i%2))
	}
	claims := c.placementNode(t, namespace, "bridged", devices)
	claims["whole"] = allOf(`["GPU-1", "GPU-2"]`, 2)
	for i, step := range []struct {
		claim string
		want  []string
	}{
		{"whole", []string{"gpu-1", "gpu-2"}},
		{"two-near", []string{"gpu-4", "gpu-6"}},
		{"two-near", []string{"gpu-5", "gpu-7"}},
		{"two-near", []string{"gpu-0", "gpu-3"}}, // what NVLink joined them to is taken
	} {
		got := c.place(t, namespace, fmt.Sprintf("%s-%d", step.claim, i), claims[step.claim])
		slices.Sort(got)
		if !slices.Equal(got, step.want) {
			t.Errorf("step %d, %s: has %v, want %v", i, step.claim, got, step.want)
		}
	}
	small := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu",
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "vgpu.cgpu.io",
			Capacity:        &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("64Mi")}}}}}}}
	for _, first := range []int{6, 3} {
		c.applySlice("bridged", slices.Concat(devices[first:], devices[:first]))
		n := 0
		within(t, 60*time.Second, "the order of the slice", func() string { // which the scheduler learns in its time
			n++
			if got := c.place(t, namespace, fmt.Sprintf("small-%d-%d", first, n), small); !slices.Equal(got,
				[]string{fmt.Sprintf("gpu-%d", first)}) {
				return fmt.Sprintf("has %v, want GPU %d", got, first)
			}
			return ""
		})
	}
}

// allOf asks for all memory of so many GPUs of a list.
func allOf(uuids string, count int64) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpus",
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "vgpu.cgpu.io", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.cgpu.io"].uuid in ` +
				uuids}}}}}},
		Constraints: []resourceapi.DeviceConstraint{{Requests: []string{"gpus"},
			DistinctAttribute: new(resourceapi.FullyQualifiedName("gpu.cgpu.io/uuid"))}}}}
}

// sliceDevice is a GPU of 16 GiB; four are of a NUMA node.
func sliceDevice(i int, model string, domain int) string {
	return fmt.Sprintf(`{name: gpu-%[1]d, allowMultipleAllocations: true, attributes: {uuid: {string: GPU-%[1]d}, productName: {string: %[2]s}, nvlinkDomain: {string: domain-%[3]d}, numaNode: {int: %[4]d}},
  capacity: {memory: {value: 16Gi, requestPolicy: {default: 16Gi, validRange: {min: 1Mi, max: 16Gi}}}}}`, i, model, domain, i/4)
}

func (c cluster) applySlice(node string, devices []string) {
	c.Helper()
	c.apply(fmt.Sprintf("{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: %[1]s}, spec: {driver: gpu.cgpu.io, "+
		"nodeName: %[1]s, pool: {name: %[1]s, resourceSliceCount: 1}, devices: [",
		node) + strings.Join(devices, ",\n") + "]}}")
}

// placementNode makes a node with these GPUs, and returns the claims of examples/placement.yaml by their names.
func (c cluster) placementNode(t *testing.T, namespace, name string, devices []string) map[string]resourceapi.ResourceClaimSpec {
	t.Helper()
	classes, err := os.ReadFile("base/deviceclasses.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.apply(string(classes))
	c.apply("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}")
	has := core.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("200")}
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name}, Status: core.NodeStatus{Capacity: has, Allocatable: has,
		Conditions: []core.NodeCondition{{Type: core.NodeReady, Status: core.ConditionTrue}}}}
	if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.mustDelete("node", name)
		c.mustDelete("resourceslice", name)
	})
	c.applySlice(name, devices)
	text, err := os.ReadFile("examples/placement.yaml")
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]resourceapi.ResourceClaimSpec{}
	for _, template := range of[*resourceapi.ResourceClaimTemplate](decode(t, "placement.yaml", string(text))) {
		claims[template.Name] = template.Spec.Spec
	}
	return claims
}

// place makes a claim and a pod that has it, and returns the devices that the scheduler allocates.
func (c cluster) place(t *testing.T, namespace, name string, spec resourceapi.ResourceClaimSpec) (devices []string) {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: meta.ObjectMeta{Name: name, Namespace: namespace}, Spec: spec}
	if _, err := c.admin.ResourceV1().ResourceClaims(namespace).Create(t.Context(), claim, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := pod(name, func(p *core.Pod) {
		p.Namespace = namespace
		p.Spec.ResourceClaims = []core.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
		p.Spec.Containers[0].Resources.Claims = []core.ResourceClaim{{Name: "gpu"}}
	})
	if _, err := c.admin.CoreV1().Pods(namespace).Create(t.Context(), p, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.mustDelete("pod", name, "-n", namespace, "--force", "--grace-period=0") })
	within(t, 60*time.Second, name, func() string {
		claim, err := c.admin.ResourceV1().ResourceClaims(namespace).Get(t.Context(), name, meta.GetOptions{})
		if err != nil || claim.Status.Allocation == nil {
			p, _ := c.admin.CoreV1().Pods(namespace).Get(t.Context(), name, meta.GetOptions{})
			return fmt.Sprintf("is not allocated: %v: %+v", err, p.Status.Conditions)
		}
		devices = nil
		for _, r := range claim.Status.Allocation.Devices.Results {
			devices = append(devices, r.Device)
		}
		return ""
	})
	return devices
}
