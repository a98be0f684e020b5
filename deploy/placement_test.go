// SPDX-License-Identifier: Apache-2.0

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
	classes, err := os.ReadFile("base/deviceclasses.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.apply(string(classes))
	c.apply("{apiVersion: v1, kind: Namespace, metadata: {name: placement}}")
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: "eight"}, Status: core.NodeStatus{
		Capacity:    core.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("20")},
		Allocatable: core.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("20")},
		Conditions:  []core.NodeCondition{{Type: core.NodeReady, Status: core.ConditionTrue}}}}
	if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.mustDelete("node", "eight")
		c.mustDelete("resourceslice", "eight")
	})
	var devices []string
	for i := range 8 {
		model := "Tesla T4"
		if i > 5 {
			model = "NVIDIA A100-SXM4-16GB"
		}
		devices = append(devices, fmt.Sprintf(`{name: gpu-%[1]d, allowMultipleAllocations: true, attributes: {uuid: {string: GPU-%[1]d}, productName: {string: %[2]s}, nvlinkDomain: {string: domain-%[3]d}},
  capacity: {memory: {value: 16Gi, requestPolicy: {default: 16Gi, validRange: {min: 1Mi, max: 16Gi}}}}}`, i, model, i/4))
	}
	c.apply("{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: eight}, spec: {driver: gpu.cgpu.io, nodeName: eight, pool: {name: eight, resourceSliceCount: 1}, devices: [" +
		strings.Join(devices, ",\n") + "]}}")

	text, err := os.ReadFile("examples/placement.yaml")
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]resourceapi.ResourceClaimSpec{}
	for _, template := range of[*resourceapi.ResourceClaimTemplate](decode(t, "placement.yaml", string(text))) {
		claims[template.Name] = template.Spec.Spec
	}
	// Three GPUs of the first domain are taken.
	claims["whole"] = resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "vgpu.cgpu.io", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 3,
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.cgpu.io"].uuid in ["GPU-1", "GPU-2", "GPU-3"]`}}}}}},
		Constraints: []resourceapi.DeviceConstraint{{Requests: []string{"gpus"}, DistinctAttribute: new(resourceapi.FullyQualifiedName("gpu.cgpu.io/uuid"))}}}}
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
