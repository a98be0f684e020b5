// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// minor is the API server's minor version.
func minor(t *testing.T) (n int) {
	t.Helper()
	v, err := lab.client.Discovery().ServerVersion()
	if err == nil {
		_, err = fmt.Sscan(strings.TrimRight(v.Minor, "+"), &n)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// With an extended resource's name on the class (deploy/components/extended-resource) limits are a whole GPU, without a claim of the
// author's.
func TestExtendedResource(t *testing.T) {
	if minor(t) < 36 {
		testenv.Skip(t, "Kubernetes before 1.36, which has extended resources of claims off")
	}
	s := login(t)
	named := func(name string) {
		if _, err := lab.kubectl("", "patch", "deviceclass", "gpu.cgpu.io", "--type=merge", "-p",
			`{"spec":{"extendedResourceName":`+name+`}}`); err != nil {
			t.Fatal(err)
		}
	}
	named(`"cgpu.io/gpu"`)
	t.Cleanup(func() { s.deleteAll(); named("null") })
	s.apply(pod("a",
		`containers: [{name: c, image: "localhost/probe:cgpu", command: [sleep, "1000"], resources: {limits: {cgpu.io/gpu: 1}}}]`))
	s.reaches("a", corev1.PodRunning)
	if r := s.holds("a")["c"]; len(r.Native) != 1 || len(r.VGPUs) != 0 {
		t.Errorf("the container has %+v, want one GPU whole", r)
	}
	if gpus := s.exec("a", "cgpu-probe", "gpus"); !strings.Contains(gpus, "card0=") || strings.Contains(gpus, "card1=") {
		t.Errorf("the container sees\n%s", gpus)
	}
}

// What a ResourceQuota counts of claims and of units is refused beyond it.
func TestResourceQuota(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	s.apply(`apiVersion: v1
kind: ResourceQuota
metadata: {name: gpus}
spec: {hard: {vgpu.cgpu.io.deviceclass.resource.k8s.io/devices: "1", requests.aliyun.com/gpu-mem: "4"}}`)
	kube.Until(t, waitLimit, "the quota is counted", func() error {
		q, err := lab.client.CoreV1().ResourceQuotas(s.ns).Get(context.Background(), "gpus", metav1.GetOptions{})
		if err == nil && len(q.Status.Hard) < 2 {
			err = fmt.Errorf("%+v", q.Status)
		}
		return err
	})
	s.apply(claim("a", "2Gi", ""), pod("a", withClaim("a", "sleep 1000")), pod("units", withMemory(3, "sleep 1000")))
	s.reaches("a", corev1.PodRunning)
	s.reaches("units", corev1.PodRunning)
	for what, manifest := range map[string]string{"a second claim": claim("b", "2Gi", ""),
		"5 units": pod("more", withMemory(2, "sleep 1000"))} {
		if err := s.tryApply(manifest); err == nil || !strings.Contains(err.Error(), "exceeded quota: gpus") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
