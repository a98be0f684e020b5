// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

const otherClass = `apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: other}
handler: other
`

// installerDir is where the test's installer puts the programs: a folder of which the node has a copy of its own.
const installerDir = "/var/lib/cni/cgpu"

// TestInstaller: the DaemonSet cgpu-installer puts cgpu onto the node a second time, as another runtime, waits for containerd's restart,
// labels the node; a pod runs by what it put there; and the uninstaller waits for that pod, and takes back all of it.
func TestInstaller(t *testing.T) {
	if crio() {
		testenv.Skip(t, "below CRI-O: its file for CRI-O would be one that CRI-O reads beside the suite's")
	}
	s := login(t)
	config := lab.path("run/containerd/config.toml")
	before := fileText(t, config)
	s.kubectl("label", "node", nodeName, "node-restriction.kubernetes.io/cgpu-install=true")
	t.Cleanup(func() { // in any case the next test finds the node as it was
		_, _ = lab.kubectl("", "-n", "cgpu-system", "delete", "daemonset", "cgpu-installer", "--ignore-not-found")
		_, _ = lab.kubectl("", "label", "node", nodeName, "node-restriction.kubernetes.io/cgpu-install-")
		_, _ = lab.kubectl("", "delete", "runtimeclass", "other", "--ignore-not-found")
		lab.must(t, "stop", "containerd", "TERM")
		lab.must(t, "start", "containerd") // and with it the node's own configuration
		if err := lab.deploy(); err != nil {
			t.Error(err)
		}
	})
	if err := lab.applyOverlay("installer"); err != nil {
		t.Fatal(err)
	}
	installerSays(t, "install", "next: restart containerd", "waits until /run/containerd/containerd.sock is a new one")
	restartContainerd(t)
	s.rolledOut("cgpu-installer")
	if label := nodeLabels(t)["node-restriction.kubernetes.io/cgpu"]; label != "true" {
		t.Errorf("the node's label is %q", label)
	}

	s.kubectlInput(otherClass, "apply", "-f", "-")
	p := strings.Replace(pod("a", withClaim("gib", "sleep 10000")), "runtimeClassName: cgpu", "runtimeClassName: other", 1)
	s.apply(claim("gib", "3Gi", ""), p)
	s.reaches("a", corev1.PodRunning)
	seesOnly(t, s.exec("a", "cgpu-probe", "meminfo"), 3*quota.GiB)
	guards := 0
	links, _ := filepath.Glob("/proc/[0-9]*/exe") //nolint:errcheck // the pattern is right
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.Contains(target, "/cgpu/versions/") && filepath.Base(target) == "cgpu-guard" {
			guards++
		}
	}
	if guards == 0 {
		t.Error("no guard is one of the installer's")
	}

	if err := lab.applyOverlay("uninstaller"); err != nil {
		t.Fatal(err)
	}
	installerSays(t, "uninstall", "waits for the end of what runs by programs of "+installerDir)
	seesOnly(t, s.exec("a", "cgpu-probe", "meminfo"), 3*quota.GiB)
	s.kubectl("-n", s.ns, "delete", "pod", "a")
	installerSays(t, "uninstall", "waits until /run/containerd/containerd.sock is a new one")
	restartContainerd(t)
	s.rolledOut("cgpu-installer")
	kube.Until(t, waitLimit, "a node without the label", func() error {
		if label, ok := nodeLabels(t)["node-restriction.kubernetes.io/cgpu"]; ok {
			return fmt.Errorf("it is %q", label)
		}
		return nil
	})
	if left, _ := os.ReadDir(lab.node(installerDir)); len(left) > 0 {
		t.Errorf("%s still has %v", installerDir, left)
	}
	if after := fileText(t, config); after != before {
		t.Errorf("containerd's configuration is\n%s\nand was\n%s", after, before)
	}
}

func fileText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// installerSays waits until a container of the installer has said all of it.
func installerSays(t *testing.T, container string, words ...string) {
	t.Helper()
	kube.Until(t, waitLimit, "cgpu-installer: "+strings.Join(words, ", "), func() error {
		out, err := lab.kubectl("", "-n", "cgpu-system", "logs", "daemonset/cgpu-installer", "-c", container)
		if err == nil && !containsAll(out, words) {
			err = fmt.Errorf("it says:\n%s", out)
		}
		return err
	})
}

// restartContainerd is the administrator's part.
func restartContainerd(t *testing.T) {
	t.Helper()
	lab.must(t, "stop", "containerd", "TERM")
	if out, err := lab.scriptWith([]string{"KEEP_CONFIGURATION=1"}, "start", "containerd"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func nodeLabels(t *testing.T) map[string]string {
	t.Helper()
	node, err := lab.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return node.Labels
}

func (s session) rolledOut(set string) {
	s.Helper()
	if out, err := lab.kubectl("", "-n", "cgpu-system", "rollout", "status", "daemonset/"+set, "--timeout=120s"); err != nil {
		s.Fatalf("%v\n%s", err, out)
	}
}

func (s session) kubectlInput(input string, args ...string) {
	s.Helper()
	if out, err := lab.kubectl(input, args...); err != nil {
		s.Fatalf("%v\n%s", err, out)
	}
}
