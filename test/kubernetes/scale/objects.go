package main

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// The objects of the simulation. A slice has what pkg/dra publishes of a node: the same attributes, capacities and policies.

const (
	driver        = "gpu.cgpu.io"
	namespace     = "default"
	sharedClass   = "vgpu.cgpu.io"
	wholeClass    = "gpu.cgpu.io"
	gpuMemory     = "80Gi"
	gpuMemUnits   = 80 // of aliyun.com/gpu-mem, GiB
	extendedName  = corev1.ResourceName("aliyun.com/gpu-mem")
	countName     = corev1.ResourceName("aliyun.com/gpu-count")
	claimMemory   = "6Gi"
	claimMemUnits = 6
	claimCores    = "30"
)

// kind is what the pods ask for.
type kind string

const (
	kindShared  kind = "shared"  // a claim of 6Gi memory and 30 cores of any GPU
	kindWhole   kind = "whole"   // a claim of all of such a GPU
	kindClassic kind = "classic" // a claim of a device that is not shareable and has no capacity policy
	kindGPUMem  kind = "gpu-mem" // 6 aliyun.com/gpu-mem, no claim
	kindNone    kind = "none"    // no GPU: what the scheduler does anyway
)

var kinds = []kind{kindShared, kindWhole, kindClassic, kindGPUMem, kindNone}

func (k kind) claims() bool { return k == kindShared || k == kindWhole || k == kindClassic }

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
		ObjectMeta: metav1.ObjectMeta{Name: nodeName(i), Labels: map[string]string{"kubernetes.io/hostname": nodeName(i), "kubernetes.io/os": "linux"}},
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

func slice(i, gpus int, s shape) *resourceapi.ResourceSlice {
	out := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName(i) + "-" + driver},
		Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: ptr.To(nodeName(i)),
			Pool: resourceapi.ResourcePool{Name: nodeName(i), Generation: 1, ResourceSliceCount: 1}},
	}
	for g := range gpus {
		out.Spec.Devices = append(out.Spec.Devices, gpu(i, g, s))
	}
	return out
}

func gpu(i, g int, s shape) resourceapi.Device {
	text := func(v string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &v} }
	number := func(v int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &v} }
	version := func(v string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: &v} }
	d := resourceapi.Device{
		Name:       fmt.Sprintf("gpu-%d", g),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"uuid": text(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", i, g))},
		Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{},
	}
	if s.attributes {
		for name, a := range map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"index": number(int64(g)), "productName": text("NVIDIA H100 80GB HBM3"), "architecture": text("Hopper"),
			"driverVersion": version("580.159.4"), "numaNode": number(int64(g / 4)), "nvlinkDomain": number(0),
			"resource.kubernetes.io/pcieRoot": text(fmt.Sprintf("pci0000:%02x", g/2)), "mig": {BoolValue: ptr.To(false)},
		} {
			d.Attributes[name] = a
		}
	}
	if s.shared {
		d.AllowMultipleAllocations = ptr.To(true)
	}
	for _, c := range []struct {
		name             resourceapi.QualifiedName
		all, least, none string // none: what who does not name it consumes
	}{{"memory", gpuMemory, "1Mi", gpuMemory}, {"cores", "100", "0", "0"}, {"containers", "20", "1", "1"}}[:s.capacities] {
		capacity := resourceapi.DeviceCapacity{Value: resource.MustParse(c.all)}
		if s.shared && s.policy {
			q := func(s string) *resource.Quantity { v := resource.MustParse(s); return &v }
			capacity.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: q(c.none),
				ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: q(c.least), Max: q(c.all)}}
		}
		d.Capacity[c.name] = capacity
	}
	return d
}

func classes() []*resourceapi.DeviceClass {
	class := func(name, expression string) *resourceapi.DeviceClass {
		return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}}}
	}
	return []*resourceapi.DeviceClass{
		class(sharedClass, `device.driver == "`+driver+`" && device.allowMultipleAllocations`),
		class(wholeClass, `device.driver == "`+driver+`"`),
	}
}

func claimName(i int) string { return fmt.Sprintf("claim-%05d", i) }

func claim(i int, k kind, capacities int) *resourceapi.ResourceClaim {
	exact := &resourceapi.ExactDeviceRequest{DeviceClassName: wholeClass}
	if k == kindShared {
		exact.DeviceClassName = sharedClass
		exact.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			"memory": resource.MustParse(claimMemory)}}
		if capacities > 1 {
			exact.Capacity.Requests["cores"] = resource.MustParse(claimCores)
		}
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: claimName(i)},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exact}}}},
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
	}
	p.Spec.Containers = []corev1.Container{c}
	return p
}
