// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package deploy

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// crds are those of other projects that examples are for, by the module that has them.
var crds = map[string][]string{
	"sigs.k8s.io/kueue@v0.19.0": {"config/components/crd/bases/kueue.x-k8s.io_clusterqueues.yaml",
		"config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml", "config/components/crd/bases/kueue.x-k8s.io_resourceflavors.yaml"},
	"github.com/fluxcd/helm-controller@v1.6.1":   {"config/crd/bases/helm.toolkit.fluxcd.io_helmreleases.yaml"},
	"github.com/fluxcd/source-controller@v1.9.6": {"config/crd/bases/source.toolkit.fluxcd.io_gitrepositories.yaml"},
}

// others: an API server with the CRDs of Kueue and Flux takes the examples. Their controllers do not run here. Argo CD's CRD is in a
// module of 56 MB, so that example was held to it by hand (v3.6.1).
func (c cluster) others(t *testing.T) {
	for name, files := range crds {
		cmd := exec.Command("go", "mod", "download", "-json", name)
		cmd.Env = append(os.Environ(), "GOFLAGS=")
		cmd.Dir = t.TempDir()
		out, err := cmd.Output()
		var module struct{ Dir string }
		if err != nil || json.Unmarshal(out, &module) != nil {
			t.Fatalf("%s cannot be had: %v: %s", name, err, out)
		}
		for _, file := range files {
			text, err := os.ReadFile(filepath.Join(module.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			c.apply(string(text))
		}
	}
	for _, namespace := range []string{"team-a, labels: {team: a, cgpu.io/max-memory: 16Gi}", "flux-system"} {
		c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + namespace + "}\n")
	}
	for _, file := range []string{"examples/kueue.yaml", "examples/gitops/flux.yaml"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, file, func() string {
			cmd := exec.Command("kubectl", "--kubeconfig", os.Getenv("CGPU_TEST_KUBECONFIG"), "apply", "--dry-run=server",
				"--validate=strict", "-f", "-")
			cmd.Stdin = bytes.NewReader(text)
			if out, err := cmd.CombinedOutput(); err != nil {
				return string(out)
			}
			return ""
		})
	}
}

// quota: a team has as many bytes as its ResourceQuota and its namespace's labels say together, by claims and by the device plugin.
func (c cluster) quota(t *testing.T) {
	text, err := os.ReadFile("examples/quota.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const ns = "team-b"
	c.apply(string(text))
	list := decode(t, "examples/quota.yaml", string(text))
	// As the controller does that does not run here.
	hard := of[*core.ResourceQuota](list)[0].Spec.Hard
	used := core.ResourceList{}
	for name := range hard {
		used[name] = resource.MustParse("0")
	}
	q, err := c.admin.CoreV1().ResourceQuotas(ns).Get(t.Context(), "gpus", meta.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	q.Status = core.ResourceQuotaStatus{Hard: hard, Used: used}
	if _, err := c.admin.CoreV1().ResourceQuotas(ns).UpdateStatus(t.Context(), q, meta.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	spec := of[*resourceapi.ResourceClaimTemplate](list)[0].Spec.Spec
	claim := func(change func(*resourceapi.ExactDeviceRequest)) error {
		spec := *spec.DeepCopy()
		change(spec.Devices.Requests[0].Exactly)
		_, err := c.admin.ResourceV1().ResourceClaims(ns).
			Create(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: meta.ObjectMeta{GenerateName: "c-"}, Spec: spec}, meta.CreateOptions{})
		return err
	}
	for range 6 {
		eventually(t, "a claim within the quota", func() string {
			if err := claim(func(*resourceapi.ExactDeviceRequest) {}); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	const over = "exceeded quota: gpus"
	for what, tt := range map[string]struct {
		change func(*resourceapi.ExactDeviceRequest)
		want   string
	}{
		"a seventh": {func(*resourceapi.ExactDeviceRequest) {}, over},
		"a larger":  {func(r *resourceapi.ExactDeviceRequest) { r.Capacity.Requests["memory"] = resource.MustParse("9Gi") }, tooMuch},
		"a whole":   {func(r *resourceapi.ExactDeviceRequest) { r.DeviceClassName, r.Capacity = "gpu.cgpu.io", nil }, noGPUs},
	} {
		if err := claim(tt.change); !refused(err, tt.want) {
			t.Errorf("%s: %v, want %q", what, err, tt.want)
		}
	}
	units := func(memory, percent string) error {
		limits := core.ResourceList{"aliyun.com/gpu-mem": resource.MustParse(memory),
			"aliyun.com/gpu-core.percentage": resource.MustParse(percent)}
		p := pod("", func(p *core.Pod) {
			class := "cgpu"
			p.Namespace, p.GenerateName, p.Spec.RuntimeClassName = ns, "p-", &class
			p.Spec.Containers[0].Resources = core.ResourceRequirements{Limits: limits, Requests: limits}
		})
		_, err := c.admin.CoreV1().Pods(ns).Create(t.Context(), p, meta.CreateOptions{})
		return err
	}
	if err := units("40", "100"); err != nil {
		t.Error(err)
	}
	for memory, percent := range map[string]string{"9": "10", "8": "101"} {
		if err := units(memory, percent); !refused(err, over) {
			t.Errorf("%s units, %s percent: %v, want %q", memory, percent, err, over)
		}
	}
	if err := units("8", "100"); err != nil {
		t.Error(err)
	}
}
