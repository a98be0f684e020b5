// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
)

// TestCRISocket: the component mounts the socket where the agent looks for it, and changes nothing else. The chart's value does the
// same.
func TestCRISocket(t *testing.T) {
	dir, err := os.MkdirTemp("overlays", "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.WriteFile(dir+"/kustomization.yaml",
		[]byte("resources: [../dra]\ncomponents: [../../components/cri-socket]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const socket = "/run/containerd/containerd.sock"
	with, without := build(t, dir), build(t, "overlays/dra")
	pod, before := of[*apps.DaemonSet](with)[0].Spec.Template.Spec, of[*apps.DaemonSet](without)[0].Spec.Template.Spec
	i := slices.IndexFunc(pod.Volumes, func(v core.Volume) bool {
		return v.HostPath != nil && v.HostPath.Path == socket && *v.HostPath.Type == core.HostPathSocket
	})
	if i < 0 {
		t.Fatalf("no volume of %s: %+v", socket, pod.Volumes)
	}
	mounted := slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(m core.VolumeMount) bool {
		return m.Name == pod.Volumes[i].Name && m.MountPath == socket && m.ReadOnly
	})
	const set = "DaemonSet cgpu-system/cgpu-agent"
	kustomized, charted := comparable(with)[set], comparable(render(t, "criSocket="+socket))[set]
	if diff := gocmp.Diff(kustomized, charted); diff != "" || kustomized == nil {
		t.Errorf("helm differs (-kustomize +helm):\n%s", diff)
	}
	if out, err := helm.run(t, "template", "cgpu", "helm/cgpu", "--kube-version", kubeVersion, "--set",
		"criSocket=run/cri.sock"); err == nil || !strings.Contains(err.Error(), "criSocket") {
		t.Errorf("a relative path: %v\n%s", err, out)
	}
	if !mounted || len(pod.Volumes) != len(before.Volumes)+1 ||
		len(pod.Containers[0].VolumeMounts) != len(before.Containers[0].VolumeMounts)+1 || len(with) != len(without) {
		t.Errorf("mounts %+v, volumes %+v", pod.Containers[0].VolumeMounts, pod.Volumes)
	}
}
