// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// both are two pods that live on, one with a claim and one with units; always says that they are started again.
func (s session) both(always bool) {
	s.Helper()
	manifests := []string{claim("claim", "6Gi", ""), pod("claim", withClaim("claim", "sleep 10000"))}
	for _, manifest := range append(manifests, withUnits("units", 6, "sleep 10000")...) {
		if always {
			manifest = strings.Replace(manifest, "restartPolicy: Never", "restartPolicy: Always", 1)
		}
		s.apply(manifest)
	}
	s.reaches("claim", corev1.PodRunning)
	s.reaches("units", corev1.PodRunning)
}

// bothHave their shares, in containers that run.
func (s session) bothHave() {
	s.Helper()
	for _, name := range []string{"claim", "units"} {
		kube.Until(s.T, waitLimit, "pod "+name+" has its share", func() error {
			out, err := lab.kubectl("", "-n", s.ns, "exec", name, "--", "cgpu-probe", "meminfo")
			if err != nil {
				return err
			}
			if got := totals(s.T, out); got[0] != 6*quota.GiB {
				return fmt.Errorf("sees %v", got)
			}
			if held := s.holds(name); len(held) != 1 {
				return fmt.Errorf("holds %v", held)
			}
			return nil
		})
	}
}

// newcomers come after a restart: the front ends work again.
func (s session) newcomers() {
	s.Helper()
	s.apply(claim("new-claim", "3Gi", ""), pod("new-claim", withClaim("new-claim", "cgpu-probe meminfo")))
	s.apply(withUnits("new-units", 3, "cgpu-probe meminfo")...)
	seesOnly(s.T, s.output("new-claim"), 3*quota.GiB)
	seesOnly(s.T, s.output("new-units"), 3*quota.GiB)
}

func (s session) restarts() string {
	s.Helper()
	return s.kubectl("get", "pods", "claim", "units", "-o", "jsonpath={.items[*].status.containerStatuses[0].restartCount}")
}

// The kubelet or the engine restarts below running pods: they do not notice, and new ones come. What is waited for after the kubelet's
// start is Kubernetes': it writes the units into the node's status after 10 seconds (nodeStatusUpdateFrequency), and deletes the slices at
// once. The driver publishes them again within 5 seconds, or 10 seconds after it last did.
func TestRestarts(t *testing.T) {
	for _, component := range []string{"kubelet", cmp.Or(os.Getenv("CGPU_TEST_CRI"), "containerd")} {
		t.Run(component, func(t *testing.T) {
			s := login(t)
			s.both(true)
			lab.must(t, "stop", component)
			s.bothStillHold()
			lab.must(t, "start", component)
			s.newcomers()
			s.bothHave()
			if n := s.restarts(); n != "0 0" {
				t.Errorf("containers were started again: %s", n)
			}
		})
	}
}

// What the driver published is deleted just after it was written, by the kubelet that starts, as any that does, and by hand. It comes
// again, though the library that writes it takes what it wrote to be there for a while.
func TestSlicesDeleted(t *testing.T) {
	for i, c := range []struct {
		name   string
		delete func(*testing.T)
	}{
		{"kubelet", func(t *testing.T) {
			lab.must(t, "stop", "kubelet")
			lab.must(t, "start", "kubelet")
		}},
		{"hand", func(t *testing.T) {
			if _, err := lab.kubectl("", "delete", "resourceslices", "--all"); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := login(t)
			before := published(t)
			withSettings(t, fmt.Sprintf(`headroom = "%dMiB"`, 100+i))
			kube.Until(t, waitLimit, "the slice is written", func() error {
				if now := published(t); now == before {
					return errors.New("it is as before")
				}
				return nil
			})
			c.delete(t)
			s.newcomers()
		})
	}
}

// published are the names of the ResourceSlices with their versions.
func published(t *testing.T) string {
	t.Helper()
	list, err := lab.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for i := range list.Items {
		fmt.Fprintln(&b, list.Items[i].Name, list.Items[i].ResourceVersion)
	}
	return b.String()
}

func (s session) bothStillHold() {
	s.Helper()
	if records, err := lab.ledger(); err != nil || len(records) != 2 {
		s.Errorf("the ledger holds %s %v, want two containers", describe(records), err)
	}
}

// replicas are n pods with units that a Deployment makes anew where one fails. Bare ones may: the kubelet fails a pod for good
// whose device plugin is away while it is admitted, as each is after a reboot.
func (s session) replicas(n int) {
	s.Helper()
	s.apply(fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: units}
spec:
  replicas: %d
  selector: {matchLabels: {app: units}}
  template:
    metadata: {labels: {app: units}}
    spec:
      runtimeClassName: cgpu
      terminationGracePeriodSeconds: 1
      automountServiceAccountToken: false
%s`, n, indent(indent(indent(withMemory(3, "sleep 1000"))))))
}

// replicasHave their shares, each its own.
func (s session) replicasHave(n int) {
	s.Helper()
	kube.Until(s.T, 2*waitLimit, "the replicas have their shares", func() error {
		out, err := lab.kubectl("", "-n", s.ns, "get", "pods", "-l", "app=units", "--field-selector=status.phase=Running", "-o", "name")
		if err != nil {
			return err
		}
		pods := strings.Fields(out)
		if len(pods) != n {
			return fmt.Errorf("%d pods run, want %d", len(pods), n)
		}
		for _, pod := range pods {
			out, err := lab.kubectl("", "-n", s.ns, "exec", pod, "--", "cgpu-probe", "meminfo")
			if err != nil {
				return err
			}
			if got := totals(s.T, out); got[0] != 3*quota.GiB {
				return fmt.Errorf("%s sees %v", pod, got)
			}
		}
		return nil
	})
}

// The node's power fails: nothing of /run is left. Pods with claims are started again with their shares, others are replaced.
func TestNodeReboots(t *testing.T) {
	s := login(t)
	s.apply(claim("claim", "6Gi", ""), strings.Replace(pod("claim", withClaim("claim", "sleep 10000")), "restartPolicy: Never",
		"restartPolicy: Always", 1))
	units := 2
	if crio() {
		units = 0
	}
	s.replicas(units)
	s.reaches("claim", corev1.PodRunning)
	s.replicasHave(units)
	if out, err := lab.script("reboot"); err != nil {
		// Power may fail twice, and the rest must hold all the same. What the first time met is told.
		t.Logf("%v\n%s", err, out)
		lab.must(t, "reboot")
	}
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
	s.replicasHave(units)
	kube.Until(t, waitLimit, "the claim's container", func() error {
		out, err := lab.kubectl("", "-n", s.ns, "exec", "claim", "--", "cgpu-probe", "meminfo")
		if err == nil && totals(t, out)[0] != 6*quota.GiB {
			err = fmt.Errorf("it sees %s", out)
		}
		return err
	})
	if records, err := lab.ledger(); err != nil || len(records) != 1+units || overbooked(records) != "" {
		t.Errorf("the ledger holds %s %v, want %d containers", describe(records), err, 1+units)
	}
	s.kubectl("delete", "deployment", "units")
	s.newcomers()
}

// killAgent kills cgpu-agent at this moment, and has a new pod of it made at once: the kubelet would wait longer each time.
func killAgent(t *testing.T) {
	t.Helper()
	for _, pid := range lab.agentPIDs() {
		exec.Command("kill", "-KILL", pid).Run() //nolint:errcheck // it may be gone
	}
	if _, err := lab.kubectl("", "-n", "cgpu-system", "delete", "pods", "--all", "--force", "--wait=false"); err != nil {
		t.Error(err)
	}
}

// The agent is killed over and over while pods come and go: each gets its share, and nothing is given twice or left.
func TestAgentKilled(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	w := watchLedger()
	var manifests []string
	for i := range 16 {
		name := fmt.Sprintf("p%d", i)
		manifests = append(manifests, claim(name, "3Gi", ""), pod(name, withClaim(name, "cgpu-probe alloc 2900MiB")))
	}
	s.apply(manifests...)
	s.replicas(4)
	kills := 0
	for deadline := time.Now().Add(time.Minute); kills < 12 && time.Now().Before(deadline); {
		// At another step each time.
		time.Sleep(time.Duration(kills*700%1900) * time.Millisecond)
		if len(lab.agentPIDs()) == 0 {
			time.Sleep(50 * time.Millisecond)
			continue
		}
		killAgent(t)
		kills++
		if kills%3 == 0 {
			s.kubectl("delete", "pods", "-l", "app=units", "--wait=false")
		}
	}
	t.Logf("killed %d times", kills)
	kube.Until(t, 3*time.Minute, "16 pods with claims end", func() error {
		out := s.kubectl("get", "pods", "--field-selector=status.phase=Succeeded", "-o", "name")
		if n := len(strings.Fields(out)); n != 16 {
			return fmt.Errorf("%d have", n)
		}
		return nil
	})
	s.replicasHave(4)
	w.end(t)
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
}

// A claim whose pod is gone while the agent is away is given back when it comes again.
func TestClaimGoesWhileAgentIsAway(t *testing.T) {
	s := login(t)
	s.both(false)
	s.kubectl("-n", "cgpu-system", "patch", "daemonset", "cgpu-agent", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"away":"yes"}}}}}`)
	kube.Until(t, waitLimit, "the agent is away", func() error {
		if pids := lab.agentPIDs(); len(pids) > 0 {
			return fmt.Errorf("it runs: %v", pids)
		}
		return nil
	})
	// Running containers have no need of it.
	for _, name := range []string{"claim", "units"} {
		seesOnly(t, s.exec(name, "cgpu-probe", "meminfo"), 6*quota.GiB)
	}
	s.kubectl("delete", "pods", "--all", "--wait=false")
	kube.Until(t, waitLimit, "the ledger is empty", func() error {
		records, err := lab.ledger()
		if err == nil && len(records) > 0 {
			err = fmt.Errorf("it holds %s", describe(records))
		}
		return err
	})
	s.kubectl("-n", "cgpu-system", "patch", "daemonset", "cgpu-agent", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"away":null}}}}}`)
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
}

// agentMemory is the resident memory of the agent, now and at the most since its start.
func agentMemory(t *testing.T) string {
	t.Helper()
	for _, pid := range lab.agentPIDs() {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil {
			continue
		}
		now, most := "", ""
		for line := range strings.Lines(string(status)) {
			if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				now = strings.TrimSpace(value)
			} else if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
				most = strings.TrimSpace(value)
			}
		}
		return now + ", at the most " + most
	}
	return "unknown"
}
