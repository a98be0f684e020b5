// SPDX-License-Identifier: Apache-2.0

// Package kube reaches a cluster of ../k8s.sh as its administrator, for the tests on it. dir is the cluster's CGPU_K8S_DIR.
package kube

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// Config is the administrator's kubeconfig.
func Config(dir string) string { return filepath.Join(dir, "run/admin.kubeconfig") }

// Client is one that is hardly held back.
func Client(dir string) (kubernetes.Interface, error) {
	config, err := clientcmd.BuildConfigFromFlags("", Config(dir))
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 200, 400
	return kubernetes.NewForConfig(config)
}

// Kubectl gives input to kubectl.
func Kubectl(dir, input string, args ...string) (string, error) {
	cmd := exec.Command(filepath.Join(dir, "bin/kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+Config(dir))
	cmd.Stdin = strings.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// Until asks again and again, and fails the test with what was last said.
func Until(t *testing.T, limit time.Duration, what string, ask func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
