// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

// Package dra tries the driver against a real apiserver and a real scheduler: a control plane of its own
// (../with-control-plane.sh), a node that is only an object, and the test in the place of the kubelet. Nothing needs root.
package dra

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

const nodeName = "sim1"

var (
	dir    = os.Getenv("CGPU_K8S_DIR")
	client kubernetes.Interface
)

func TestMain(m *testing.M) {
	var err error
	if client, err = kube.Client(dir); err == nil {
		err = makeNode()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "CGPU_K8S_DIR=%q: %v: run through test/kubernetes/with-control-plane.sh\n", dir, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
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
	if _, err := kube.Kubectl(dir, "", args...); err != nil {
		t.Fatal(err)
	}
}
