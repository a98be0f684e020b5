// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// claimOn is a claim of a share on the GPU with that index.
func claimOn(name, memory, index, more string) string {
	return strings.Replace(claim(name, memory, more), "deviceClassName: vgpu.cgpu.io",
		`deviceClassName: vgpu.cgpu.io, selectors: [{cel: {expression: 'device.attributes["gpu.cgpu.io"].index == `+index+`'}}]`, 1)
}

// The scheduler gives a GPU's memory to the next claim as soon as a pod is gone from the API, which with --force it is while
// its container still runs. The next pod waits for that on the node; it does not fail.
func TestForcedDeletion(t *testing.T) {
	s := login(t)
	s.apply(claimOn("a", "12Gi", "0", ""), pod("a", withClaim("a", "sleep 1000")))
	s.reaches("a", corev1.PodRunning)
	s.apply(claimOn("b", "12Gi", "0", ""), pod("b", withClaim("b", "sleep 1000")))
	s.pending("b", "cannot allocate all claims")
	s.kubectl("delete", "pod", "a", "--force")
	s.kubectl("delete", "resourceclaim", "a")
	s.reaches("b", corev1.PodRunning)
}

// Two claims of 6Gi share a GPU of 15Gi; the third waits until one of them is gone.
func TestClaimsShareAGPU(t *testing.T) {
	s := login(t)
	for _, name := range []string{"a", "b"} {
		s.apply(claimOn(name, "6Gi", "0", ""), pod(name, withClaim(name, "cgpu-probe meminfo; sleep 1000")))
	}
	s.reaches("a", corev1.PodRunning)
	s.reaches("b", corev1.PodRunning)
	s.apply(claimOn("c", "6Gi", "0", ""), pod("c", withClaim("c", "cgpu-probe meminfo; sleep 1000")))
	s.pending("c", "cannot allocate all claims")
	for _, name := range []string{"a", "b"} {
		seesOnly(t, s.exec(name, "cgpu-probe", "meminfo"), 6*quota.GiB)
	}
	a, b := s.holds("a")["c"], s.holds("b")["c"]
	if len(a.VGPUs) != 1 || len(b.VGPUs) != 1 || a.VGPUs[0].UUID != b.VGPUs[0].UUID {
		t.Errorf("a holds %v, b holds %v, want a share of one GPU each", a.VGPUs, b.VGPUs)
	}
	s.kubectl("delete", "pod,resourceclaim", "a")
	s.reaches("c", corev1.PodRunning)
	seesOnly(t, s.exec("c", "cgpu-probe", "meminfo"), 6*quota.GiB)
}

// An allocation beyond the claim is refused as a card that is full would refuse it, and the neighbour does not notice.
func TestClaimIsALimit(t *testing.T) {
	s := login(t)
	s.apply(claimOn("a", "3Gi", "0", ""), pod("a", withClaim("a", "cgpu-probe oom; echo; cgpu-probe meminfo")))
	filled, after, _ := strings.Cut(s.output("a"), "\n\n")
	if !strings.Contains(filled, "\nmib=3072\n") || !strings.Contains(filled, "NV_ERR_NO_MEMORY") {
		t.Errorf("the pod of 3Gi got:\n%s", filled)
	}
	seesOnly(t, after, 3*quota.GiB)
}

// What the claim's configuration says of the GPU's time is what the node has.
func TestClaimConfiguration(t *testing.T) {
	s := login(t)
	favoured := claim("a", "2Gi", configured("weight: 3, priority: high"))
	if err := s.tryApply(favoured); err == nil || !strings.Contains(err.Error(), "cgpu.io/allow-high-priority=true") {
		t.Errorf("high priority in a namespace without the label: %v", err)
	}
	if _, err := lab.kubectl("", "label", "namespace", s.ns, "cgpu.io/allow-high-priority=true", "cgpu.io/allow-weight=true"); err != nil {
		t.Fatal(err)
	}
	kube.Until(t, time.Minute, "the namespace's labels count", func() error { return s.tryApply(favoured) })
	s.apply(pod("a", withClaim("a", "sleep 1000")))
	s.reaches("a", corev1.PodRunning)
	v := s.holds("a")["c"].VGPUs
	if len(v) != 1 || v[0].Weight != 3 || v[0].Priority != quota.PriorityHigh {
		t.Errorf("the container has %+v, want weight 3 and high priority", v)
	}
	if err := s.tryApply(claim("b", "2Gi", configured("weight: 65"))); err == nil || !strings.Contains(err.Error(), "weight: want 1 to 64") {
		t.Errorf("a weight of 65: %v", err)
	}
}

// One claim of two GPUs: the container sees both, with a limit of its own on each.
func TestClaimOfTwoGPUs(t *testing.T) {
	s := login(t)
	s.apply(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: two}
spec:
  devices:
    requests:
    - {name: small, exactly: {deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 2Gi}}}}
    - {name: large, exactly: {deviceClassName: vgpu.cgpu.io, capacity: {requests: {memory: 4Gi}}}}
    constraints: [{requests: [small, large], distinctAttribute: gpu.cgpu.io/uuid}]`,
		pod("two", withClaim("two", "sleep 1000")))
	s.reaches("two", corev1.PodRunning)
	v := s.holds("two")["c"].VGPUs
	if len(v) != 2 || v[0].UUID == v[1].UUID || v[0].Limit+v[1].Limit != 6*quota.GiB {
		t.Fatalf("the container has %+v, want 2 and 4 GiB on two GPUs", v)
	}
	if gpus := s.exec("two", "cgpu-probe", "gpus"); !strings.Contains(gpus, "card1=") {
		t.Errorf("the container sees\n%s", gpus)
	}
}

// A whole GPU is unlimited and nobody else's; shares go on beside it on other GPUs.
func TestWholeGPUBesideShares(t *testing.T) {
	s := login(t)
	s.apply(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: whole}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.cgpu.io}}]}}`,
		pod("whole", withClaim("whole", "sleep 1000")))
	s.reaches("whole", corev1.PodRunning)
	whole := s.holds("whole")["c"]
	if len(whole.Native) != 1 || len(whole.VGPUs) != 0 {
		t.Fatalf("the container has %+v, want one GPU whole", whole)
	}
	for _, name := range []string{"a", "b", "c"} {
		s.apply(claim(name, "6Gi", ""), pod(name, withClaim(name, "sleep 1000")))
	}
	s.reaches("a", corev1.PodRunning)
	s.reaches("b", corev1.PodRunning)
	s.pending("c", "cannot allocate all claims")
	for _, name := range []string{"a", "b"} {
		if v := s.holds(name)["c"].VGPUs; len(v) != 1 || v[0].UUID == whole.Native[0] {
			t.Errorf("%s holds %+v, beside the whole GPU %s", name, v, whole.Native[0])
		}
	}
}

// A claim is one share, of one container. Two use it at once only where it says so, each with half of the memory.
func TestClaimOfTwoContainers(t *testing.T) {
	s := login(t)
	two := func(name string) string {
		return pod(name, `containers:
- {name: first, image: "localhost/probe:cgpu", command: [sleep, "1000"], resources: {claims: [{name: gpu}]}}
- {name: second, image: "localhost/probe:cgpu", command: [sh, -c, "sleep 1000"], resources: {claims: [{name: gpu}]}}
resourceClaims: [{name: gpu, resourceClaimName: `+name+`}]`)
	}
	s.apply(strings.Replace(claim("shared", "4Gi", ""), "memory: 4Gi", "memory: 4Gi, containers: 2", 1), two("shared"))
	s.reaches("shared", corev1.PodRunning)
	for _, c := range []string{"first", "second"} {
		seesOnly(t, s.kubectl("exec", "shared", "-c", c, "--", "cgpu-probe", "meminfo"), 2*quota.GiB)
	}
	s.apply(claim("single", "2Gi", ""), two("single"))
	s.hears("single", "containers")
	time.Sleep(time.Second) // the kubelet may try the second container again
	if held := s.holds("single"); len(held) > 1 {
		t.Errorf("two containers hold one share: %v", held)
	}
}

// The containers of a Job take turns on what claims from a template leave.
func TestJobOfClaims(t *testing.T) {
	s := login(t)
	s.apply(strings.NewReplacer("kind: ResourceClaim\n", "kind: ResourceClaimTemplate\n", "spec:\n  devices:", "spec:\n spec:\n  devices:").
		Replace(claimOn("share", "6Gi", "0", "")),
		`apiVersion: batch/v1
kind: Job
metadata: {name: turns}
spec:
  parallelism: 3
  completions: 3
  template:
    spec:
      runtimeClassName: cgpu
      restartPolicy: Never
      automountServiceAccountToken: false
      containers: [{name: c, image: "localhost/probe:cgpu", command: [sh, -c, "cgpu-probe meminfo; sleep 2"], resources: {claims: [{name: gpu}]}}]
      resourceClaims: [{name: gpu, resourceClaimTemplateName: share}]`)
	s.kubectl("wait", "--for=condition=Complete", "job/turns", "--timeout=90s")
	got := totals(t, s.kubectl("logs", "-l", "job-name=turns", "--tail=-1"))
	for _, size := range got {
		if len(got) != 3 || size != 6*quota.GiB {
			t.Fatalf("the three pods saw %v", got)
		}
	}
}
