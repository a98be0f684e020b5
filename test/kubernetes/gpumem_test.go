// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// Pods as they are written for ACK and for gpushare: units of memory, and a percentage.
func TestMemoryByDevicePlugin(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	for _, name := range []string{"a", "b"} {
		s.apply(pod(name, withMemory(6, "cgpu-probe meminfo; sleep 1000")))
	}
	s.reaches("a", corev1.PodRunning)
	s.reaches("b", corev1.PodRunning)
	for _, name := range []string{"a", "b"} {
		seesOnly(t, s.exec(name, "cgpu-probe", "meminfo"), 6*quota.GiB)
	}
	s.apply(pod("too-much", withMemory(19, "sleep 1000")))
	s.pending("too-much", "Insufficient aliyun.com/gpu-mem")
	if out := s.exec("a", "sh", "-c", "cgpu-probe oom || true"); !strings.Contains(out, "\nmib=6144\n") {
		t.Errorf("the pod of 6 units got:\n%s", out)
	}
	// gpushare's own programs read these.
	annotations := s.get("a").Annotations
	for name, want := range map[string]string{"ALIYUN_COM_GPU_MEM_POD": "6", "ALIYUN_COM_GPU_MEM_DEV": "15",
		"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"} {
		if annotations[name] != want {
			t.Errorf("annotation %s=%q, want %s", name, annotations[name], want)
		}
	}
}

// CRI-O hands all annotations of a pod to the runtime, so what the device plugin allocated could be the author's word: the node offers
// none.
func TestDevicePluginBelowCRIO(t *testing.T) {
	if !crio() {
		testenv.Skip(t, "below containerd, for CRI-O; CI runs it by test/kubernetes/crio.sh")
	}
	s := login(t)
	kube.Until(t, waitLimit, "a node without units", func() error {
		node, err := lab.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		units := node.Status.Allocatable["aliyun.com/gpu-mem"]
		if !units.IsZero() {
			return fmt.Errorf("it offers %v", units.String())
		}
		for _, c := range node.Status.Conditions {
			if c.Type == "CGPUReady" && c.Reason == "FrontEndLimited" && strings.Contains(c.Message, "below CRI-O") {
				return nil
			}
		}
		return fmt.Errorf("conditions %v", node.Status.Conditions)
	})
	s.apply(pod("a", withMemory(3, "sleep 1000")))
	s.pending("a", "Insufficient aliyun.com/gpu-mem")
}

func TestPercentageByDevicePlugin(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	s.apply(pod("a", strings.Replace(withMemory(3, "sleep 1000"), "aliyun.com/gpu-mem: 3",
		"aliyun.com/gpu-mem: 3, aliyun.com/gpu-core.percentage: 30", 1)))
	s.reaches("a", corev1.PodRunning)
	if v := s.holds("a")["c"].VGPUs; len(v) != 1 || v[0].Percent != 30 || v[0].Limit != 3*quota.GiB {
		t.Errorf("the container has %+v, want 3 GiB and 30 %%", v)
	}
}

// Each container of a pod has its own share.
func TestContainersOfOnePod(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	s.apply(pod("two", `containers:
- {name: small, image: "localhost/probe:cgpu", command: [sleep, "1000"], resources: {limits: {aliyun.com/gpu-mem: 3}}}
- {name: none, image: "localhost/probe:cgpu", command: [sleep, "1000"]}
- {name: large, image: "localhost/probe:cgpu", command: [sleep, "1000"], resources: {limits: {aliyun.com/gpu-mem: 5}}}`))
	s.reaches("two", corev1.PodRunning)
	for name, want := range map[string]quota.Bytes{"small": 3 * quota.GiB, "large": 5 * quota.GiB} {
		seesOnly(t, s.kubectl("exec", "two", "-c", name, "--", "cgpu-probe", "meminfo"), want)
	}
	if dev := s.kubectl("exec", "two", "-c", "none", "--", "ls", "/dev"); strings.Contains(dev, "nvidia") {
		t.Errorf("the container that asked for nothing has\n%s", dev)
	}
}
