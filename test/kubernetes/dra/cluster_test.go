//go:build kubernetes

// Package dra tries the driver against a real apiserver and a real scheduler: a control plane of its own (../k8s.sh), a node
// that is only an object, and the test in the place of the kubelet.
//
// The binaries are those in $CGPU_K8S_DIR/bin (../build.sh control-plane); nothing needs root.
package dra

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const nodeName = "sim1"

var (
	client  *kubernetes.Clientset
	kubectl func(input string, args ...string) (string, error)
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	built := os.Getenv("CGPU_K8S_DIR")
	if built == "" {
		built = filepath.Join(os.TempDir(), "cgpu-k8s")
	}
	dir, err := os.MkdirTemp("", "k8s") // short: sockets lie in it
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	if err := os.Symlink(filepath.Join(built, "bin"), filepath.Join(dir, "bin")); err != nil {
		return 1, err
	}
	port := os.Getenv("PORT_BASE")
	if port == "" {
		port = "17000"
	}
	env := append(os.Environ(), "CGPU_K8S_DIR="+dir, "PORT_BASE="+port)
	script := func(args ...string) error {
		cmd := exec.Command("../k8s.sh", args...)
		cmd.Env, cmd.Stdout, cmd.Stderr = env, os.Stdout, os.Stderr
		return cmd.Run()
	}
	defer func() {
		if downErr := script("down"); err == nil {
			err = downErr
		}
	}()
	if err := script("up", "control-plane"); err != nil {
		return 1, fmt.Errorf("k8s.sh up control-plane: %w", err)
	}
	config := filepath.Join(dir, "run/admin.kubeconfig")
	kubectl = func(input string, args ...string) (string, error) {
		cmd := exec.Command(filepath.Join(dir, "bin/kubectl"), args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+config)
		cmd.Stdin = strings.NewReader(input)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	c, err := clientcmd.BuildConfigFromFlags("", config)
	if err != nil {
		return 1, err
	}
	c.QPS, c.Burst = 200, 400
	if client, err = kubernetes.NewForConfig(c); err != nil {
		return 1, err
	}
	if err := makeNode(); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// makeNode makes the object that a kubelet would.
func makeNode() error {
	ctx := context.Background()
	n, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	room := corev1.ResourceList{"cpu": resource.MustParse("64"), "memory": resource.MustParse("256Gi"), "pods": resource.MustParse("500")}
	n.Status.Capacity, n.Status.Allocatable = room, room
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	n.Status.NodeInfo.ContainerRuntimeVersion = "containerd://2.4.2"
	_, err = client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
	return err
}

// apply gives manifests of the repository to kubectl.
func apply(t *testing.T, files ...string) {
	t.Helper()
	args := []string{"apply"}
	for _, f := range files {
		args = append(args, "-f", filepath.Join("../../../deploy", f))
	}
	if out, err := kubectl("", args...); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// until asks again and again, and fails the test with what was last said.
func until(t *testing.T, limit time.Duration, what string, ask func() error) {
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
