// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// A pod that asks for nothing runs as under runc, but for the filter that makes others' driver files useless in it. No guard
// is near it: not at its container, and not at its sandbox, which containerd starts by the same runtime.
func TestPodWithoutGPU(t *testing.T) {
	s := login(t)
	before := guardLogs(t)
	s.apply(pod("hello", `containers: [{name: c, image: "localhost/probe:cgpu", command: [sh, -c, "echo hello; ls /dev; env; sleep 1000"]}]`))
	s.reaches("hello", corev1.PodRunning)
	out := s.kubectl("logs", "hello")
	if !strings.HasPrefix(out, "hello\n") || strings.Contains(out, "nvidia") || strings.Contains(out, "CGPU") {
		t.Errorf("the pod printed %q", out)
	}
	if seccomp := s.exec("hello", "grep", "Seccomp:", "/proc/1/status"); !strings.Contains(seccomp, "2") {
		t.Errorf("the pod has no filter: %q", seccomp)
	}
	if records, err := lab.ledger(); err != nil || len(records) > 0 {
		t.Errorf("the ledger holds %s %v", describe(records), err)
	}
	if after := guardLogs(t); after != before {
		t.Errorf("guards were started: %d logs before, %d after", before, after)
	}
}

// A pod with a claim or gpu-mem has a sandbox, too, which holds nothing.
func TestSandboxIsUntouched(t *testing.T) {
	s := login(t)
	s.apply(claim("a", "2Gi", ""), pod("a", withClaim("a", "sleep 1000")))
	s.apply(withUnits("b", 2, "sleep 1000")...)
	s.reaches("a", corev1.PodRunning)
	s.reaches("b", corev1.PodRunning)
	records, err := lab.ledger()
	if err != nil || len(records) != 2 {
		t.Fatalf("the ledger holds %s %v, want two containers", describe(records), err)
	}
	for _, name := range []string{"a", "b"} {
		if held := s.holds(name); len(held) != 1 {
			t.Errorf("pod %s holds %v", name, held)
		}
	}
}

func guardLogs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir(lab.node("run/cgpu/log"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return len(entries)
}
