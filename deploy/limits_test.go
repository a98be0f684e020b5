// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package deploy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// The refusals of the policy vgpu-limits.cgpu.io.
const (
	noGPUs       = "takes whole GPUs"
	tooMuch      = "of GPU memory (label cgpu.io/max-memory)"
	tooLong      = "of a GPU's time (label cgpu.io/max-cores)"
	tooMany      = "containers (label cgpu.io/max-containers)"
	tooHeavy     = "(label cgpu.io/max-weight)"
	tooThin      = "for each of its containers (label cgpu.io/min-memory)"
	noWholeUnits = "want whole numbers"
)

// exactly is a request of the class vgpu.cgpu.io; more are fields beside capacity.
func exactly(name, capacity, more string) string {
	return fmt.Sprintf(`{name: %s, exactly: {deviceClassName: vgpu.cgpu.io, capacity: {requests: {%s}}%s}}`, name, capacity, more)
}

// first is one of firstAvailable, of alternatives as in exactly.
func first(alternatives ...string) string {
	list := make([]string, len(alternatives))
	for i, a := range alternatives {
		list[i] = fmt.Sprintf(`{name: s%d, %s}`, i, a)
	}
	return `{name: f, firstAvailable: [` + strings.Join(list, ", ") + `]}`
}

func times(n int, request string) string {
	list := make([]string, n)
	for i := range list {
		list[i] = strings.ReplaceAll(request, "name: n", fmt.Sprintf("name: n%d", i))
	}
	return strings.Join(list, ", ")
}

const (
	share = `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 4Gi, cores: 20}}`
	whole = `{name: g, exactly: {deviceClassName: gpu.cgpu.io}}`
)

// limitCases are hostile and honest claims by the labels of their namespace. want is "" for those that are taken.
var limitCases = []struct{ labels, requests, want string }{
	// Without a label: as ever, but for places that cost nothing.
	{"", exactly("n", "memory: 140Gi", ""), ""},
	{"", exactly("n", "memory: 512Mi", ""), ""},
	{"", exactly("n", "memory: 10Gi, containers: 20", ""), ""},
	{"", exactly("n", "containers: 20", ""), ""}, // all of the GPU's memory
	{"", whole, ""},
	{"", `{name: n, exactly: {deviceClassName: vgpu.cgpu.io}}`, ""},
	{"", `{name: n, exactly: {deviceClassName: vgpu.cgpu.io, allocationMode: All}}`, ""},
	{"", exactly("n", "memory: 20Mi, containers: 20", ""), tooThin},
	{"", exactly("n", "memory: 20Mi", ""), tooThin},
	{"", exactly("n", "memory: 511Mi", ""), tooThin},
	{"", exactly("n", "memory: -1Gi", ""), tooThin},
	{"", exactly("n", "gpu.cgpu.io/memory: 20Mi, gpu.cgpu.io/containers: 20", ""), tooThin},
	{"", exactly("n", "memory: 1Gi, containers: 1, gpu.cgpu.io/containers: 20", ""), tooThin},
	{"", first(share, `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 20Mi, containers: 20}}`), tooThin},
	{"", exactly("a", "memory: 8Gi", "") + ", " + exactly("b", "memory: 8Gi, containers: 17", ""), tooThin},
	{"", exactly("n", "memory: 8Gi, containers: 1500m", ""), noWholeUnits},
	{"", exactly("n", "memory: 8Gi, cores: 500m", ""), noWholeUnits},
	{"", exactly("n", `memory: 8Gi, containers: "1e30"`, ""), noWholeUnits},
	{"min-memory=7Gi", exactly("n", "memory: 8Gi, containers: 2", ""), tooThin},
	{"min-memory=4Mi", exactly("n", "memory: 80Mi, containers: 20", ""), ""},
	{"min-memory=0", exactly("n", "memory: 20Mi, containers: 20", ""), ""},
	// What is not cgpu's is not bounded.
	{"max-memory=1Gi,max-containers=1",
		`{name: n, exactly: {deviceClassName: nic.example.com, count: 8, capacity: {requests: {memory: 999Gi}}}}`, ""},
	{"max-gpus=0", ``, ""},

	{"max-memory=8Gi", exactly("n", "memory: 8Gi", ""), ""},
	{"max-memory=8Gi", exactly("a", "memory: 4Gi", "") + ", " + exactly("b", "memory: 4Gi", ""), ""},
	{"max-memory=8Gi", exactly("n", "memory: 4Gi", ", count: 2"), ""},
	{"max-memory=8Gi", first(share, `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 8Gi}}`), ""}, // not their sum
	{"max-memory=8Gi", exactly("n", "memory: 8193Mi", ""), tooMuch},
	{"max-memory=8Gi", exactly("n", `memory: "8589934592.5"`, ""), tooMuch},
	{"max-memory=8Gi", exactly("n", "memory: 9223372036854775807", ""), tooMuch},
	{"max-memory=8Gi", exactly("n", `memory: "1e40"`, ""), tooMuch},
	{"max-memory=8Gi", exactly("n", "gpu.cgpu.io/memory: 9Gi", ""), tooMuch},
	{"max-memory=8Gi", exactly("n", "memory: 1Gi, gpu.cgpu.io/memory: 9Gi", ""), tooMuch},
	{"max-memory=8Gi", exactly("n", "memory: 4Gi", ", count: 3"), tooMuch},
	{"max-memory=8Gi", exactly("n", "memory: 4Gi", ", count: 9223372036854775807"), tooMuch},
	{"max-memory=8Gi", exactly("n", "memory: 1Gi", ", allocationMode: All"), tooMuch},
	{"max-memory=8Gi", times(9, exactly("n", "memory: 1Gi", "")), tooMuch},
	{"max-memory=8Gi", exactly("a", "memory: 20Gi", "") + ", " + exactly("b", "memory: -12Gi", ""), tooMuch},
	{"max-memory=8Gi", first(share, `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 9Gi}}`), tooMuch},
	{"max-memory=8Gi", first(share, `deviceClassName: vgpu.cgpu.io, count: 3, capacity: {requests: {memory: 4Gi}}`), tooMuch},
	{"max-memory=8Gi", exactly("a", "memory: 4Gi", "") + ", " + first(share,
		`deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 5Gi}}`), tooMuch},
	// an administrator's class
	{"max-memory=8Gi", `{name: n, exactly: {deviceClassName: big.cgpu.io, capacity: {requests: {memory: 9Gi}}}}`, tooMuch},

	// No memory is all of a GPU.
	{"max-memory=8Gi", `{name: n, exactly: {deviceClassName: vgpu.cgpu.io}}`, noGPUs},
	{"max-memory=8Gi", exactly("n", "cores: 10", ""), noGPUs},
	{"max-memory=8Gi", exactly("n", "containers: 1", ""), noGPUs},
	{"max-memory=8Gi", whole, noGPUs},
	{"max-memory=8Gi", first(share, `deviceClassName: gpu.cgpu.io`), noGPUs},
	{"max-memory=8Gi", first(share, `deviceClassName: vgpu.cgpu.io`), noGPUs},
	{"max-memory=8Gi", first(share, `deviceClassName: vgpu.cgpu.io, allocationMode: All`), noGPUs},
	{"max-cores=30", whole, noGPUs},
	{"max-gpus=0", whole, noGPUs},
	{"max-gpus=1", whole, ""},
	{"max-gpus=1,max-memory=8Gi,max-cores=30", whole, ""},
	{"max-gpus=1", whole + ", " + exactly("n", "cores: 1", ""), noGPUs},
	{"max-gpus=2", `{name: g, exactly: {deviceClassName: gpu.cgpu.io, count: 2}}`, ""},
	{"max-gpus=2", `{name: g, exactly: {deviceClassName: gpu.cgpu.io, count: 3}}`, noGPUs},
	{"max-gpus=8", `{name: g, exactly: {deviceClassName: gpu.cgpu.io, allocationMode: All}}`, noGPUs},
	{"max-gpus=1", exactly("n", "memory: 140Gi", ""), ""}, // max-memory's matter

	{"max-cores=30", exactly("n", "memory: 1Gi, cores: 30", ""), ""},
	{"max-cores=30", exactly("n", "memory: 1Gi, cores: 31", ""), tooLong},
	{"max-cores=30", exactly("n", "memory: 1Gi", ""), tooLong},            // no cap is all of the time
	{"max-cores=30", exactly("n", "memory: 1Gi, cores: 0", ""), tooLong},  // and nor is this one
	{"max-cores=30", exactly("n", "memory: 1Gi, cores: -1", ""), tooLong}, // which the scheduler takes for 0
	{"max-cores=30", exactly("n", "memory: 1Gi, gpu.cgpu.io/cores: 0", ""), tooLong},
	{"max-cores=30", first(share, `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 4Gi, cores: 0}}`), tooLong},
	{"max-cores=100", exactly("n", "memory: 1Gi, cores: 0", ""), ""},
	{"max-cores=100", exactly("n", "memory: 1Gi", ""), ""},
	{"max-cores=30", exactly("n", "memory: 1Gi, cores: 16", ", count: 2"), tooLong},
	{"max-cores=30", exactly("a", "memory: 1Gi, cores: 99", "") + ", " + exactly("b", "memory: 1Gi, cores: -99", ""), tooLong},
	{"max-cores=30", first(share, `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 4Gi}}`), tooLong},

	{"max-containers=2", exactly("n", "memory: 4Gi, containers: 2", ""), ""},
	{"max-containers=2", exactly("n", "memory: 4Gi, containers: 3", ""), tooMany},
	{"max-containers=2", exactly("n", "memory: 4Gi", ", count: 3"), tooMany},
	{"max-containers=2", times(3, exactly("n", "memory: 4Gi", "")), tooMany},
	{"max-containers=2", exactly("n", "memory: 4Gi", ", allocationMode: All"), tooMany},
	{"max-containers=2", exactly("a", "memory: 4Gi, containers: 3", "") + ", " + exactly("b", "memory: 4Gi, containers: -1", ""), tooMany},
	{"max-containers=2", exactly("n", "containers: 3", ""), tooMany},
	{"max-containers=2", first(share, `deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 4Gi, containers: 3}}`), tooMany},

	// A label that is no quantity refuses all, not none.
	{"max-memory=lots", exactly("n", "memory: 1Gi", ""), "label cgpu.io/max-memory: want a quantity"},
	{"max-memory=", exactly("n", "memory: 1Gi", ""), "label cgpu.io/max-memory: want a quantity"},
	{"min-memory=", exactly("n", "memory: 20Mi", ""), "label cgpu.io/min-memory: want a quantity"},
	{"max-gpus=true", exactly("n", "memory: 1Gi", ""), "label cgpu.io/max-gpus: want a quantity"},

	// As much as a claim can say: the policy must not be too expensive to be asked.
	{"max-memory=8Gi",
		times(32,
			strings.ReplaceAll(first(slices.Repeat([]string{`deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 256Mi, cores: 1, containers: 1}}`}, 8)...), "name: f", "name: n")), tooThin},
	{"max-memory=16Gi",
		times(32,
			strings.ReplaceAll(first(slices.Repeat([]string{`deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 512Mi, cores: 1, containers: 1}}`}, 8)...), "name: f", "name: n")), ""},
}

// limits: what a claim and a template may take is bounded by their namespace, whatever they leave out.
func (c cluster) limits(t *testing.T) {
	dry := meta.CreateOptions{DryRun: []string{meta.DryRunAll}}
	names := map[string]string{}
	namespace := func(labels string) string {
		if names[labels] == "" {
			names[labels] = fmt.Sprintf("limits-%d", len(names))
			list := ""
			for l := range strings.SplitSeq(labels, ",") {
				if name, value, ok := strings.Cut(l, "="); ok {
					list += fmt.Sprintf("cgpu.io/%s: %q, ", name, value)
				}
			}
			c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {%s}}\n", names[labels], list))
		}
		return names[labels]
	}
	both := func(namespace string, spec resourceapi.ResourceClaimSpec) []error {
		named := meta.ObjectMeta{GenerateName: "c-", Namespace: namespace}
		_, claim := c.admin.ResourceV1().ResourceClaims(namespace).
			Create(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: named, Spec: spec}, dry)
		_, template := c.admin.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(),
			&resourceapi.ResourceClaimTemplate{ObjectMeta: named, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec}}, dry)
		return []error{claim, template}
	}
	for _, tt := range limitCases {
		var spec resourceapi.ResourceClaimSpec
		if err := yaml.UnmarshalStrict([]byte("devices: {requests: ["+tt.requests+"]}"), &spec); err != nil {
			t.Fatalf("%s: %v", tt.requests, err)
		}
		eventually(t, fmt.Sprintf("%s: %.300s: want %q", tt.labels, tt.requests, tt.want), func() string {
			for _, err := range both(namespace(tt.labels), spec) {
				if tt.want == "" && err != nil || tt.want != "" && !refused(err, tt.want) {
					return text(err)
				}
			}
			return ""
		})
	}
	weighted := func(weight string) resourceapi.ResourceClaimSpec {
		var spec resourceapi.ResourceClaimSpec
		if err := yaml.UnmarshalStrict([]byte("devices: {requests: ["+exactly("n", "memory: 1Gi", "")+
			"], config: [{opaque: {driver: gpu.cgpu.io, parameters: {apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig"+weight+"}}}]}"),
			&spec); err != nil {
			t.Fatal(err)
		}
		return spec
	}
	for _, tt := range []struct{ labels, weight, want string }{
		{"max-weight=2", "", ""},
		{"max-weight=2", ", weight: 2", ""},
		{"max-weight=2", ", weight: 3", tooHeavy},
		{"max-weight=20", ", weight: 20", ""}, // the label is enough: what allow-weight allows is all
		{"max-weight=20", ", weight: 21", tooHeavy},
		{"max-weight=20,allow-weight=true", ", weight: 21", tooHeavy},
	} {
		eventually(t, fmt.Sprintf("%s%s: want %q", tt.labels, tt.weight, tt.want), func() string {
			for _, err := range both(namespace(tt.labels), weighted(tt.weight)) {
				if tt.want == "" && err != nil || tt.want != "" && !refused(err, tt.want) {
					return text(err)
				}
			}
			return ""
		})
	}
}

// extended: a pod that names a class in its limits writes no claim, but the scheduler does it for him, and is refused what the
// namespace may not have.
func (c cluster) extended(t *testing.T) {
	free, bound := "extended-free", "extended-bound"
	c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s}\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: %s, "+
		"labels: {cgpu.io/max-memory: 8Gi}}\n", free, bound))
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: "gpus"}, Status: core.NodeStatus{
		Capacity:    core.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("20")},
		Allocatable: core.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("20")},
		Conditions:  []core.NodeCondition{{Type: core.NodeReady, Status: core.ConditionTrue}}}}
	if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.mustDelete("node", "gpus"); c.mustDelete("resourceslice", "gpus") })
	c.apply(`{apiVersion: resource.k8s.io/v1, kind: ResourceSlice, metadata: {name: gpus}, spec: {driver: gpu.cgpu.io, nodeName: gpus, pool: {name: gpus, resourceSliceCount: 1},
  devices: [{name: gpu-a, allowMultipleAllocations: true, capacity: {memory: {value: 15Gi, requestPolicy: {default: 15Gi, validRange: {min: 1Mi, max: 15Gi}}}}},
            {name: gpu-c, allowMultipleAllocations: true, capacity: {memory: {value: 15Gi, requestPolicy: {default: 15Gi, validRange: {min: 1Mi, max: 15Gi}}}}},
            {name: gpu-b, allowMultipleAllocations: true, capacity: {memory: {value: 15Gi, requestPolicy: {default: 15Gi, validRange: {min: 1Mi, max: 15Gi}}}}}]}}`)
	named := slices.IndexFunc(of[*resourceapi.DeviceClass](with(t, "extended-resource")), func(d *resourceapi.DeviceClass) bool {
		return d.Name == "gpu.cgpu.io" && d.Spec.ExtendedResourceName != nil && *d.Spec.ExtendedResourceName == "cgpu.io/gpu"
	})
	if named < 0 {
		t.Fatal("components/extended-resource does not name the class")
	}
	c.apply(`{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: gpu.cgpu.io}, spec: {extendedResourceName: cgpu.io/gpu, selectors: [{cel: {expression: 'device.driver == "gpu.cgpu.io"'}}]}}`)
	t.Cleanup(func() { c.apply(kustomize.must(t, "build", "overlays/both")) })
	for _, p := range []struct{ namespace, name, asks string }{
		{free, "implicit", "deviceclass.resource.kubernetes.io/gpu.cgpu.io"}, {free, "named", "cgpu.io/gpu"}, {bound, "implicit", "cgpu.io/gpu"},
	} {
		asks := pod(p.name, func(pod *core.Pod) {
			pod.Namespace = p.namespace
			pod.Spec.Containers[0].Resources.Limits = core.ResourceList{core.ResourceName(p.asks): resource.MustParse("1")}
		})
		if _, err := c.admin.CoreV1().Pods(p.namespace).Create(t.Context(), asks, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.mustDelete("pod", p.name, "-n", p.namespace, "--force", "--grace-period=0") })
	}
	within(t, 60*time.Second, "a pod of a bounded namespace", func() string {
		for _, name := range []string{"implicit", "named"} {
			p, err := c.admin.CoreV1().Pods(free).Get(t.Context(), name, meta.GetOptions{})
			if err != nil || p.Spec.NodeName == "" {
				return fmt.Sprintf("%s, without labels: %v, on node %q: %+v", name, err, p.Spec.NodeName, p.Status.Conditions)
			}
		}
		p, err := c.admin.CoreV1().Pods(bound).Get(t.Context(), "implicit", meta.GetOptions{})
		if err != nil || p.Spec.NodeName != "" {
			return fmt.Sprintf("%v: is on node %q", err, p.Spec.NodeName)
		}
		list, err := c.admin.CoreV1().Events(bound).List(t.Context(), meta.ListOptions{})
		if err != nil || !slices.ContainsFunc(list.Items, func(e core.Event) bool { return strings.Contains(e.Message, noGPUs) }) {
			return fmt.Sprintf("%v: %+v", err, p.Status.Conditions)
		}
		return ""
	})
}
