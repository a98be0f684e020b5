// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// oldContainerd is a containerd 1.6 of the machine's, or the test is skipped.
func oldContainerd(t *testing.T) string {
	t.Helper()
	for _, path := range []string{os.Getenv("CGPU_OLD_CONTAINERD"), "/usr/bin/containerd"} {
		if out, err := exec.Command(path, "--version").Output(); err == nil && strings.Contains(string(out), " 1.6.") {
			return path
		}
	}
	testenv.Skip(t, "no containerd 1.6, which Debian 12 has; CGPU_OLD_CONTAINERD names another")
	return ""
}

// containerd 1.6 ignores the CDI devices of claims without a word. On such a node the DRA driver does not start and says why,
// so no claim is allocated there; the device plugin works.
func TestContainerdWithoutCDI(t *testing.T) {
	needsDevicePlugin(t)
	old := oldContainerd(t)
	t.Cleanup(func() {
		if out, err := lab.scriptWith([]string{"CONTAINERD_BIN="}, "reboot"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if err := lab.agentIsReady(); err != nil {
			t.Error(err)
		}
	})
	s := login(t)
	if out, err := lab.scriptWith([]string{"CONTAINERD_BIN=" + old}, "reboot"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	kube.Until(t, waitLimit, "the node says that it cannot have claims", func() error {
		out, err := lab.kubectl("", "get", "node", nodeName, "-o", `jsonpath={.status.conditions[?(@.type=="CGPUReady")]}`)
		if err != nil || !containsAll(out, []string{`"False"`, "CDI"}) {
			return errorOf(err, "condition CGPUReady: %s", out)
		}
		return nil
	})
	s.apply(claim("a", "3Gi", ""), pod("a", withClaim("a", "sleep 1000")))
	s.apply(pod("units", withMemory(3, "cgpu-probe meminfo")))
	seesOnly(t, s.output("units"), 3*quota.GiB)
	if p := s.get("a"); p.Status.Phase != corev1.PodPending {
		t.Errorf("the pod with a claim is %s", p.Status.Phase)
	}
}
