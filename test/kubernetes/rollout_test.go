// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// sockets are the DRA driver's, those by which it registers and those by which it is called.
func sockets() (list []string) {
	for _, pattern := range []string{"plugins_registry/gpu.cgpu.io*", "plugins/gpu.cgpu.io/*.sock"} {
		files, _ := filepath.Glob(lab.node("var/lib/kubelet/" + pattern)) //nolint:errcheck // the pattern is right
		list = append(list, files...)
	}
	return list
}

// The DaemonSet is updated as deploy/overlays/dra has it: the next agent is there before the last one goes, so that there always is one,
// and claims are prepared all the while. What a killed agent left in the kubelet's folders, the next one removes.
func TestRollout(t *testing.T) {
	s := login(t)
	time.Sleep(6 * time.Second) // a socket that was made just now stays
	left := sockets()
	killAgent(t)
	kube.Until(t, waitLimit, "another agent", func() error {
		now := sockets()
		if len(now) != 2 || slices.ContainsFunc(now, func(path string) bool { return slices.Contains(left, path) }) {
			return fmt.Errorf("sockets %v, were %v", now, left)
		}
		return nil
	})
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := lab.deploy(); err != nil {
			t.Error(err)
		}
	}()
	// In this cluster agents have the host's network: without its port two of them fit in it.
	s.kubectl("-n", "cgpu-system", "patch", "daemonset", "cgpu-agent", "--type=json", "-p", `[
		{"op": "remove", "path": "/spec/template/spec/containers/0/ports"},
		{"op": "replace", "path": "/spec/updateStrategy/rollingUpdate", "value": {"maxSurge": 1, "maxUnavailable": 0}},
		{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["--frontends=dra", "--health-address=none", "--hook=/opt/cgpu/bin/cgpu-hook"]}]`)
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		s.kubectl("-n", "cgpu-system", "rollout", "restart", "daemonset/cgpu-agent")
		most, done, made := 0, false, 0
		for deadline := time.Now().Add(waitLimit); !done && time.Now().Before(deadline); time.Sleep(300 * time.Millisecond) {
			n := len(lab.agentPIDs())
			if most = max(most, n); n == 0 {
				t.Error("there is no agent")
			}
			if name := fmt.Sprintf("r%d-%d", round, made); made < 4 {
				s.apply(claim(name, "1Gi", ""), pod(name, withClaim(name, "sleep 1000")))
				made++
			}
			out, err := lab.kubectl("", "-n", "cgpu-system", "rollout", "status", "daemonset/cgpu-agent", "--watch=false")
			done = err == nil && strings.Contains(out, "successfully rolled out") && n == 1
		}
		if most < 2 || !done {
			t.Errorf("at most %d agents at a time, rolled out: %v", most, done)
		}
		for i := range made {
			s.reaches(fmt.Sprintf("r%d-%d", round, i), corev1.PodRunning)
		}
		kube.Until(t, waitLimit, "the sockets of one agent", func() error {
			if now := sockets(); len(now) != 2 {
				return fmt.Errorf("after the rollout there are %v", now)
			}
			return nil
		})
	}
}
