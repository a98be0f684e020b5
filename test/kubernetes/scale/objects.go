// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/dra"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// The objects of the simulation.

const (
	driver        = dra.DriverName
	namespace     = "default"
	sharedClass   = "vgpu.cgpu.io"
	wholeClass    = "gpu.cgpu.io"
	gpuMemUnits   = 80 // of aliyun.com/gpu-mem, GiB
	extendedName  = corev1.ResourceName("aliyun.com/gpu-mem")
	countName     = corev1.ResourceName("aliyun.com/gpu-count")
	claimMemory   = "6Gi"
	claimMemUnits = 6
	claimCores    = "30"
	// As deploy/components/extended-resource names it.
	wholeName = corev1.ResourceName("cgpu.io/gpu")
)

// kind is what the pods ask for.
type kind string

const (
	kindShared   kind = "shared"   // a claim of 6Gi memory and 30 cores of any GPU
	kindNear     kind = "near"     // two-near of deploy/examples/placement.yaml: that of two GPUs, by NVLink, else of one NUMA node, else any
	kindWhole    kind = "whole"    // a claim of all of such a GPU
	kindExtended kind = "extended" // the same by limits: the scheduler makes the claim
	kindClassic  kind = "classic"  // a claim of a device that is not shareable and has no capacity policy
	kindGPUMem   kind = "gpu-mem"  // 6 aliyun.com/gpu-mem, no claim
	kindNone     kind = "none"     // no GPU: what the scheduler does anyway
)

var kinds = []kind{kindShared, kindNear, kindWhole, kindExtended, kindClassic, kindGPUMem, kindNone}

// claims says that pods name claims, which this program makes.
func (k kind) claims() bool {
	return k == kindShared || k == kindNear || k == kindWhole || k == kindClassic
}

// slices says that the scheduler chooses among the nodes' devices.
func (k kind) slices() bool { return k.claims() || k == kindExtended }

// whole says that a pod takes a GPU for itself.
func (k kind) whole() bool { return k == kindWhole || k == kindExtended || k == kindClassic }

func nodeName(i int) string { return fmt.Sprintf("node-%04d", i) }

func node(i, gpus int, k kind) *corev1.Node {
	list := corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse("128"),
		corev1.ResourceMemory: resource.MustParse("1Ti"),
		corev1.ResourcePods:   resource.MustParse("250"),
	}
	if k == kindGPUMem {
		list[extendedName] = *resource.NewQuantity(int64(gpus*gpuMemUnits), resource.DecimalSI)
		list[countName] = *resource.NewQuantity(int64(gpus), resource.DecimalSI)
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName(i),
			Labels: map[string]string{"kubernetes.io/hostname": nodeName(i), "kubernetes.io/os": "linux"}},
		Status: corev1.NodeStatus{Capacity: list, Allocatable: list,
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated"}}},
	}
}

// shape is what of a slice is varied, to find out what it costs.
type shape struct {
	shared     bool // devices may be allocated to several claims
	attributes bool // all of them, else the UUID only
	policy     bool // the capacities have a requestPolicy
	capacities int  // 1: memory; 2: and cores; 3: and containers, as pkg/dra has
}

func slice(i, n int, s shape) *resourceapi.ResourceSlice {
	out := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName(i) + "-" + driver},
		Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: ptr.To(nodeName(i)),
			Pool: resourceapi.ResourcePool{Name: nodeName(i), Generation: 1, ResourceSliceCount: 1}, Devices: gpus(i, n, s)},
	}
	return out
}

// gpus are a node's as pkg/dra publishes them, less what the shape leaves out.
func gpus(i, n int, s shape) []resourceapi.Device {
	table := &device.Table{DriverVersion: "580.159.04", Config: device.Config{MaxInst: 20, Policy: sched.PolicyPreempt}}
	places := map[string]dra.Place{}
	for g := range n {
		bus := fmt.Sprintf("0000:%02x:00.0", g)
		table.GPUs = append(table.GPUs, device.GPU{Index: g, Minor: g, BusID: bus, Name: "NVIDIA H100 80GB HBM3", Memory: gpuMemUnits * quota.GiB,
			UUID: fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", i, g), NVLink: fmt.Sprintf("%d-%d", i, g/4)})
		places[bus] = dra.Place{NUMANode: ptr.To(int64(g / 4)), PCIeRoot: fmt.Sprintf("pci0000:%02x", g/2)}
	}
	var devices []resourceapi.Device
	for _, pool := range dra.Resources(table, nodeName(i), nil, places, nil).Pools {
		for _, published := range pool.Slices {
			devices = append(devices, published.Devices...)
		}
	}
	for g := range devices {
		d := &devices[g]
		if !s.shared {
			d.AllowMultipleAllocations = nil
		}
		for name := range d.Attributes {
			if !s.attributes && name != "uuid" {
				delete(d.Attributes, name)
			}
		}
		for n, name := range []resourceapi.QualifiedName{"memory", "cores", "containers"} {
			c, ok := d.Capacity[name]
			switch {
			case !ok || n >= s.capacities:
				delete(d.Capacity, name)
			case !s.shared || !s.policy:
				c.RequestPolicy = nil
				d.Capacity[name] = c
			}
		}
	}
	return devices
}

func classes() []*resourceapi.DeviceClass {
	class := func(name, expression string) *resourceapi.DeviceClass {
		return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}}}
	}
	whole := class(wholeClass, `device.driver == "`+driver+`"`)
	whole.Spec.ExtendedResourceName = ptr.To(string(wholeName))
	return []*resourceapi.DeviceClass{class(sharedClass, `device.driver == "`+driver+`" && device.allowMultipleAllocations`), whole}
}

func claimName(i int) string { return fmt.Sprintf("claim-%05d", i) }

func claim(i int, k kind, capacities int) *resourceapi.ResourceClaim {
	share := &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
		"memory": resource.MustParse(claimMemory)}}
	if capacities > 1 {
		share.Requests["cores"] = resource.MustParse(claimCores)
	}
	var devices resourceapi.DeviceClaim
	switch k {
	case kindShared:
		devices = claimOf(&resourceapi.ExactDeviceRequest{DeviceClassName: sharedClass, Capacity: share})
	case kindNear:
		devices = claimOfTwo(share)
	default:
		devices = claimOf(&resourceapi.ExactDeviceRequest{DeviceClassName: wholeClass})
	}
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: claimName(i)}, Spec: resourceapi.ResourceClaimSpec{Devices: devices}}
}

func claimOf(exact *resourceapi.ExactDeviceRequest) resourceapi.DeviceClaim {
	return resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exact}}}
}

// claimOfTwo is two-near of deploy/examples/placement.yaml.
func claimOfTwo(share *resourceapi.CapacityRequirements) resourceapi.DeviceClaim {
	var near []resourceapi.DeviceSubRequest
	for _, name := range []string{"nvlink", "numa", "any"} {
		near = append(near, resourceapi.DeviceSubRequest{Name: name, DeviceClassName: sharedClass, Count: 2, Capacity: share})
	}
	same := func(request, attribute string) resourceapi.DeviceConstraint {
		name := resourceapi.FullyQualifiedName(driver + "/" + attribute)
		return resourceapi.DeviceConstraint{Requests: []string{request}, MatchAttribute: &name}
	}
	return resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "gpu", FirstAvailable: near}},
		Constraints: []resourceapi.DeviceConstraint{same("gpu/nvlink", "nvlinkDomain"), same("gpu/numa", "numaNode"),
			{Requests: []string{"gpu"}, DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName(driver + "/uuid"))}},
	}
}

func podName(i int) string { return fmt.Sprintf("pod-%05d", i) }

func pod(i int, k kind) *corev1.Pod {
	c := corev1.Container{Name: "main", Image: "none"}
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: podName(i)}}
	switch {
	case k.claims():
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To(claimName(i))}}
		c.Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	case k == kindGPUMem:
		c.Resources.Limits = corev1.ResourceList{extendedName: *resource.NewQuantity(claimMemUnits, resource.DecimalSI)}
	case k == kindExtended:
		c.Resources.Limits = corev1.ResourceList{wholeName: *resource.NewQuantity(1, resource.DecimalSI)}
	}
	p.Spec.Containers = []corev1.Container{c}
	return p
}
