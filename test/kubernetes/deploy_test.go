// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// deploy installs cgpu from deploy/ and waits until the node's agent is ready.
func (c *cluster) deploy() error {
	if _, err := c.kubectl("", "label", "node", nodeName, "node-restriction.kubernetes.io/cgpu=true", "gpushare=true",
		"--overwrite"); err != nil {
		return err
	}
	if err := c.applyOverlay(overlay()); err != nil {
		return err
	}
	return c.agentIsReady()
}

// overlay is the kustomization by which cgpu comes.
func overlay() string {
	out, err := exec.Command(cmp.Or(os.Getenv("CONTAINERD_BIN"), "true"), "--version").Output()
	if err == nil && strings.Contains(string(out), " 1.7.") {
		return "crisocket"
	}
	return "deploy"
}

// applyOverlay applies a kustomization of this folder. It names the port of the apiserver, since nothing in this cluster
// stands for the address of the service "kubernetes".
func (c *cluster) applyOverlay(folder string) error {
	manifests, err := c.kubectl("", "kustomize", folder)
	if err != nil {
		return err
	}
	settings, err := os.ReadFile(kube.Config(c.dir))
	if err != nil {
		return err
	}
	_, after, _ := strings.Cut(string(settings), "https://127.0.0.1:")
	port, _, _ := strings.Cut(after, `"`)
	manifests = strings.NewReplacer(`"16443"`, `"`+port+`"`, "RUN/", c.path("run")+"/",
		"path: ENGINE", "path: "+filepath.Dir(cmp.Or(os.Getenv("CONTAINERD_BIN"), c.path("bin/containerd")))).Replace(manifests)
	_, err = c.kubectl(manifests, "apply", "-f", "-")
	return err
}

func (c *cluster) agentIsReady() error {
	out, err := c.kubectl("", "-n", "cgpu-system", "rollout", "status", "daemonset/cgpu-agent", "--timeout=60s")
	if err != nil {
		logs, _ := c.kubectl("", "-n", "cgpu-system", "logs", "daemonset/cgpu-agent", "--tail=20") //nolint:errcheck // there may be none
		return fmt.Errorf("%w\n%s\n%s", err, out, logs)
	}
	return nil
}

// agentPIDs are the numbers of the agent's processes as this machine counts.
func (c *cluster) agentPIDs() []string {
	var pids []string
	links, _ := filepath.Glob("/proc/[0-9]*/exe") //nolint:errcheck // the pattern is right
	for _, link := range links {
		// The file is that of the container's snapshot.
		if target, err := os.Readlink(link); err == nil && target == "/cgpu-agent" {
			pids = append(pids, strings.Split(link, "/")[2])
		}
	}
	return pids
}
