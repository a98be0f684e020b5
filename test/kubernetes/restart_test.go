//go:build kubernetes

package kubernetes

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// both are two pods that live on, one with a claim and one with units; always says that they are started again.
func (s session) both(always bool) {
	s.Helper()
	for _, manifest := range []string{
		claim("claim", "6Gi", "") + "\n---\n" + pod("claim", withClaim("claim", "sleep 10000")),
		pod("units", withMemory(6, "sleep 10000")),
	} {
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
		until(s.T, waitLimit, "pod "+name+" has its share", func() error {
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
	s.apply(claim("new-claim", "3Gi", ""), pod("new-claim", withClaim("new-claim", "cgpu-probe meminfo")), pod("new-units", withMemory(3, "cgpu-probe meminfo")))
	seesOnly(s.T, s.output("new-claim"), 3*quota.GiB)
	seesOnly(s.T, s.output("new-units"), 3*quota.GiB)
}

func (s session) restarts() string {
	s.Helper()
	return s.kubectl("get", "pods", "claim", "units", "-o", "jsonpath={.items[*].status.containerStatuses[0].restartCount}")
}

// The kubelet restarts below running pods: they do not notice, and new ones come.
func TestKubeletRestarts(t *testing.T) {
	s := login(t)
	s.both(true)
	lab.must(t, "stop", "kubelet")
	s.bothStillHold()
	lab.must(t, "start", "kubelet")
	s.newcomers()
	s.bothHave()
	if n := s.restarts(); n != "0 0" {
		t.Errorf("containers were started again: %s", n)
	}
}

// So does containerd.
func TestContainerdRestarts(t *testing.T) {
	s := login(t)
	s.both(true)
	lab.must(t, "stop", "containerd")
	s.bothStillHold()
	lab.must(t, "start", "containerd")
	s.newcomers()
	s.bothHave()
	if n := s.restarts(); n != "0 0" {
		t.Errorf("containers were started again: %s", n)
	}
}

func (s session) bothStillHold() {
	s.Helper()
	if records, err := lab.ledger(); err != nil || len(records) != 2 {
		s.Errorf("the ledger holds %s %v, want two containers", describe(records), err)
	}
}

// The node's power fails: nothing of /run is left, and each pod is started again with its share.
func TestNodeReboots(t *testing.T) {
	s := login(t)
	s.both(true)
	lab.must(t, "reboot")
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
	s.bothHave()
	s.newcomers()
	if records, err := lab.ledger(); err != nil || len(records) != 2 {
		t.Errorf("the ledger holds %s %v, want two containers", describe(records), err)
	}
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

// The agent is killed over and over while pods come and go: each ends well, and nothing is given twice or left.
func TestAgentKilled(t *testing.T) {
	s := login(t)
	w := watchLedger()
	s.pods(30, "cgpu-probe alloc 2900MiB; sleep 1")
	kills := 0
	for deadline := time.Now().Add(4 * time.Minute); s.phases()[corev1.PodSucceeded] < 30 && time.Now().Before(deadline); kills++ {
		// At another step each time: 0.2 to 2.6 seconds after the last.
		time.Sleep(200*time.Millisecond + time.Duration(kills*700%2400)*time.Millisecond)
		if len(lab.agentPIDs()) == 0 {
			kills--
			continue
		}
		killAgent(t)
		if kills >= 12 {
			break
		}
	}
	s.reach(30, corev1.PodSucceeded, 3*time.Minute)
	w.end(t)
	t.Logf("killed %d times", kills)
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
}

// A claim whose pod is gone while the agent is away is given back when it comes again.
func TestClaimGoesWhileAgentIsAway(t *testing.T) {
	s := login(t)
	s.both(false)
	s.kubectl("-n", "cgpu-system", "patch", "daemonset", "cgpu-agent", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"away":"yes"}}}}}`)
	until(t, waitLimit, "the agent is away", func() error {
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
	until(t, waitLimit, "the ledger is empty", func() error {
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

// agentMemory is the resident memory of the agent.
func agentMemory(t *testing.T) string {
	t.Helper()
	for _, pid := range lab.agentPIDs() {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(status)) {
			if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				return strings.TrimSpace(value)
			}
		}
	}
	return "unknown"
}
