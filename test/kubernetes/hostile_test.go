// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// Everything that a pod's author can write claims 15 GiB, and that nothing be done.
const (
	lyingAnnotations = `annotations:
  ALIYUN_COM_GPU_MEM_CONTAINER: "15"
  ALIYUN_COM_GPU_MEM_POD: "15"
  ALIYUN_COM_GPU_MEM_DEV: "15"
  ALIYUN_COM_GPU_MEM_IDX: "0"
  cgpu.io/gpu-mem-container: "15"
  cgpu.io/gpu-mem-dev: "15"
  cgpu.io/gpu-visible-devices: all
  cgpu.io/nvidia-visible-devices: all
  cgpu.io/priority: high
  cgpu.io/disable: "true"
  alloc.cgpu.io/shares: id=mine,memory=16106127360
  alloc.cgpu.io/percent: "100"`
	lyingVariables = `env: [{name: ALIYUN_COM_GPU_MEM_CONTAINER, value: "15"}, {name: ALIYUN_COM_GPU_MEM_DEV, value: "15"},
    {name: ALIYUN_COM_GPU_MEM_POD, value: "15"}, {name: ALIYUN_COM_GPU_VISIBLE_DEVICES, value: all}, {name: NVIDIA_VISIBLE_DEVICES, value: all},
    {name: ALIYUN_COM_GPU_SCHD_WEIGHT, value: "64"}, {name: ALIYUN_COM_GPU_HIGH_PRIO, value: "1"}, {name: CGPU_DISABLE, value: "true"}]`
)

// lying is a pod whose image, variables and annotations lie; it has those resources.
func lying(name, resources, more string) string {
	return podOf(name, lyingAnnotations, `runtimeClassName: cgpu
containers:
- name: c
  image: localhost/liar:cgpu
  command: [sleep, "1000"]
  resources: `+resources+`
  `+lyingVariables+`
`+more)
}

// withoutPolicy takes the admission policy of pods away for a test: what it refuses, the node must not fall for either.
func withoutPolicy(t *testing.T, s session) {
	t.Helper()
	lie := lying("policy", "{}", "")
	s.kubectl("delete", "validatingadmissionpolicybinding", "gpushare-annotations.cgpu.io") // which refuses the lie as well
	t.Cleanup(func() {
		if err := lab.applyOverlay(overlay()); err != nil {
			t.Error(err)
		}
	})
	kube.Until(t, waitLimit, "the policy refuses a pod with alloc.cgpu.io/ annotations", func() error {
		if err := s.tryApply(lie); err == nil || !strings.Contains(err.Error(), "annotations with alloc.cgpu.io/ are for device plugins alone") {
			return fmt.Errorf("it says %v", err)
		}
		return nil
	})
	s.kubectl("delete", "validatingadmissionpolicybinding", "pods.cgpu.io")
	kube.Until(t, waitLimit, "the policy is gone", func() error {
		_, err := lab.kubectl(lie, "-n", s.ns, "apply", "--dry-run=server", "-f", "-")
		return err
	})
}

func TestLyingPodGetsWhatWasAllocated(t *testing.T) {
	s := login(t)
	withoutPolicy(t, s)
	s.apply(lying("units", "{limits: {aliyun.com/gpu-mem: 3}}", ""),
		claim("three", "3Gi", ""), lying("claim", "{claims: [{name: gpu}]}", "resourceClaims: [{name: gpu, resourceClaimName: three}]"))
	if crio() {
		s.pending("units", "Insufficient aliyun.com/gpu-mem")
		s.refused("claim", "below CRI-O a pod's author can write it")
		return
	}
	for _, name := range []string{"units", "claim"} {
		s.reaches(name, corev1.PodRunning)
		seesOnly(t, s.exec(name, "cgpu-probe", "meminfo"), 3*quota.GiB)
		v := s.holds(name)["c"].VGPUs
		if len(v) != 1 || v[0].Limit != 3*quota.GiB || v[0].Weight > 1 || v[0].Priority == quota.PriorityHigh {
			t.Errorf("%s has %+v, want 3 GiB and nothing above the default", name, v)
		}
	}
}

// A pod that was allocated nothing cannot name itself a GPU.
func TestLyingPodWithoutAllocation(t *testing.T) {
	s := login(t)
	withoutPolicy(t, s)
	s.apply(lying("nothing", "{}", ""))
	s.apply(podOf("variables", "", `runtimeClassName: cgpu
containers: [{name: c, image: "localhost/probe:cgpu", command: [sleep, "1000"], env: [{name: ALIYUN_COM_GPU_MEM_CONTAINER, value: "3"}, {name: NVIDIA_VISIBLE_DEVICES, value: "0"}]}]`))
	s.refused("variables", "allocated")
	// CGPU_DISABLE hands the container to runc: it may start, with no GPU.
	kube.Until(t, waitLimit, "an answer to the pod", func() error { return s.settled("nothing") })
	if s.get("nothing").Status.Phase == corev1.PodRunning {
		if dev := s.exec("nothing", "ls", "/dev"); containsAll(dev, []string{"nvidia"}) {
			t.Errorf("the pod that was allocated nothing has\n%s", dev)
		}
	}
	if records, err := lab.ledger(); err != nil || len(records) > 0 {
		t.Errorf("the ledger holds %s %v", describe(records), err)
	}
}

// A claim without the runtime would be no limit, or no GPU: the container does not start, and says what is missing.
func TestClaimWithoutRuntimeClass(t *testing.T) {
	s := login(t)
	s.apply(claim("a", "3Gi", ""), podOf("a", "", withClaim("a", "sleep 1000")))
	s.refused("a", "set runtimeClassName: cgpu")
}
