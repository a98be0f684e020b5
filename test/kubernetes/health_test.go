// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// A GPU that reports an Xid, or is lost, is tainted, the pod that has it is told and goes on, the next one waits; when it was mended it is
// offered again.
func TestUnhealthyGPU(t *testing.T) {
	s := login(t)
	lab.must(t, "exec", "sh", "-c", "setsid cgpu health watch >/run/cgpu/watch.log 2>&1 & echo $! >/run/cgpu/watch.pid")
	t.Cleanup(func() {
		lab.must(t, "exec", "sh", "-c", "cgpu health clear all; kill $(cat /run/cgpu/watch.pid)")
	})
	kube.Until(t, waitLimit, "the GPUs are watched", func() error {
		if out, err := lab.script("exec", "cgpu", "health", "-o", "json"); err != nil || !strings.Contains(out, `"watched": true`) {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	s.apply(claimOn("a", "2Gi", "0", ""), pod("a", withClaim("a", "sleep 1000")))
	s.reaches("a", corev1.PodRunning)

	lab.must(t, "exec", "cgpu-sim", "xid", "--gpu", "0", "31", "79")
	start := time.Now()
	tainted(t, 1)
	t.Logf("the taint came %v after the Xid", time.Since(start).Round(100*time.Millisecond))
	s.apply(claimOn("b", "2Gi", "0", ""), pod("b", withClaim("b", "sleep 1000")))
	s.told("a", "GPUUnhealthy", "GPU 0: Xid 79")
	if events := lab.must(t, "exec", "cgpu", "events", "--kind", "unhealthy"); !strings.Contains(events, s.ns+"/a/c: GPU 0: Xid 79") {
		t.Errorf("the node tells\n%s", events)
	}
	condition(t, "GPUsUnhealthy")
	if minor(t) >= 36 { // before, the kubelet does not tell
		kube.Until(t, waitLimit, "the kubelet says that the claim's GPU is unhealthy", func() error {
			for _, c := range s.get("a").Status.ContainerStatuses {
				for _, r := range c.AllocatedResourcesStatus {
					if len(r.Resources) == 1 && r.Resources[0].Health == corev1.ResourceHealthStatusUnhealthy {
						return nil
					}
				}
			}
			return fmt.Errorf("%+v", s.get("a").Status.ContainerStatuses)
		})
	}
	s.pending("b", "cannot allocate all claims")
	if p := s.get("a"); p.Status.Phase != corev1.PodRunning {
		t.Errorf("the pod that has the GPU is %s", p.Status.Phase)
	}

	lab.must(t, "exec", "cgpu", "health", "clear", "0")
	tainted(t, 0)
	s.reaches("b", corev1.PodRunning)
	s.told("a", "GPUHealthy", "healthy again")
	condition(t, "Ready")

	// One that the driver cannot reach is offered again by itself, once it answers.
	t.Cleanup(func() { lab.must(t, "exec", "cgpu-sim", "restore", "--gpu", "0") })
	lab.must(t, "exec", "cgpu-sim", "lose", "--gpu", "0")
	tainted(t, 1)
	s.told("a", "GPUUnhealthy", "GPU 0: the driver cannot reach the GPU")
	lab.must(t, "exec", "cgpu-sim", "restore", "--gpu", "0")
	tainted(t, 0)
	condition(t, "Ready")
}

// tainted waits until so many devices of the node have a taint.
func tainted(t *testing.T, want int) {
	t.Helper()
	kube.Until(t, waitLimit, fmt.Sprintf("%d taints", want), func() error {
		list, err := lab.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		n := 0
		for _, slice := range list.Items {
			for _, d := range slice.Spec.Devices {
				n += len(d.Taints)
			}
		}
		if n != want {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
}

// told waits for an Event of the pod's container.
func (s session) told(pod, reason, text string) {
	s.Helper()
	kube.Until(s.T, waitLimit, reason+" of "+pod, func() error {
		list, err := lab.client.CoreV1().Events(s.ns).List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Name == pod && e.InvolvedObject.FieldPath == "spec.containers{c}" && e.Reason == reason &&
				strings.Contains(e.Message, text) {
				return nil
			}
		}
		return errors.New("no such Event")
	})
}

// condition waits until the node's condition has that reason.
func condition(t *testing.T, reason string) {
	t.Helper()
	kube.Until(t, waitLimit, "condition "+reason, func() error {
		n, err := lab.client.CoreV1().Nodes().Get(context.Background(), nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == "CGPUReady" && c.Reason == reason && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%+v", n.Status.Conditions)
	})
}
