// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"fmt"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// withSettings has the node's cgpu.toml begin with further lines until the test ends.
func withSettings(t *testing.T, lines string) {
	t.Helper()
	file := lab.node("etc/cgpu/cgpu.toml")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	set := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		lab.must(t, "exec", "cgpu", "refresh")
	}
	t.Cleanup(func() { set(string(before)) })
	set(lines + "\n" + string(before))
}

// A running pod's share is raised beyond what was allocated as far as the namespace may and the node keeps for it, and lowered again: its
// programs see and get that at once.
func TestRaise(t *testing.T) {
	withSettings(t, `headroom = "3GiB"`)
	s := login(t)
	s.apply(claimOn("a", "4Gi", "0", ""), pod("a", withClaim("a", "sleep 1000")))
	s.reaches("a", corev1.PodRunning)
	limit := func(size string, want quota.Bytes) {
		t.Helper()
		s.kubectl("annotate", "pod", "a", "cgpu.io/gpu-mem-limit="+size, "--overwrite")
		kube.Until(t, time.Minute, "the limit is "+size, func() error {
			if got := totals(t, s.exec("a", "cgpu-probe", "meminfo")); got[0] != want {
				return fmt.Errorf("it is %v", got[0])
			}
			return nil
		})
	}
	s.kubectl("annotate", "pod", "a", "cgpu.io/gpu-mem-limit=6Gi")
	s.told("a", "GPUChangeRefused", "cgpu.io/max-resize-memory")
	seesOnly(t, s.exec("a", "cgpu-probe", "meminfo"), 4*quota.GiB)
	if _, err := lab.kubectl("", "label", "namespace", s.ns, "cgpu.io/max-resize-memory=3Gi"); err != nil {
		t.Fatal(err)
	}
	limit("7Gi", 7*quota.GiB)
	s.exec("a", "cgpu-probe", "alloc", "6GiB")
	s.kubectl("annotate", "pod", "a", "cgpu.io/gpu-mem-limit=8Gi", "--overwrite") // beyond the namespace's 3
	s.told("a", "GPUChangeRefused", "8Gi")
	seesOnly(t, s.exec("a", "cgpu-probe", "meminfo"), 7*quota.GiB)
	limit("2Gi", 2*quota.GiB)
	if out, err := lab.kubectl("", "-n", s.ns, "exec", "a", "--", "cgpu-probe", "alloc", "3GiB"); err == nil {
		t.Errorf("3 GiB of 2 were allocated: %s", out)
	}
}
