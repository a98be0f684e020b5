// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"sigs.k8s.io/yaml"

	"github.com/opencgpu/cgpu/pkg/api/v1alpha1"
)

// TestExamples: what users copy is whole, runs through cgpu, and names what is there.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(files) < 8 {
		t.Fatal(files, err)
	}
	for _, file := range append(files, "examples/autoscaling/hpa.yaml") { // the others there have no pods: test/observability
		if filepath.Base(file) == "kustomization.yaml" {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(text), "# ") {
			t.Errorf("%s: says not what it is for", file)
		}
		checkExample(t, file, decode(t, file, string(text)))
	}
}

// TestScaling: both ways scale a Deployment that is there, by a metric that is made.
func TestScaling(t *testing.T) {
	text := map[string]string{}
	for _, name := range []string{"hpa", "keda", "prometheus-adapter"} {
		b, err := os.ReadFile("examples/autoscaling/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		text[name] = string(b)
	}
	list := decode(t, "hpa.yaml", text["hpa"])
	deployment, hpa := of[*apps.Deployment](list)[0], of[*autoscaling.HorizontalPodAutoscaler](list)[0]
	if hpa.Spec.ScaleTargetRef.Name != deployment.Name ||
		!strings.Contains(text["prometheus-adapter"], "{as: "+hpa.Spec.Metrics[0].Pods.Metric.Name+"}") {
		t.Errorf("%+v, Deployment %s", hpa.Spec, deployment.Name)
	}
	spec, _ := decode(t, "keda.yaml", text["keda"])[0].tree["spec"].(map[string]any)
	if target, _ := spec["scaleTargetRef"].(map[string]any); target["name"] != deployment.Name ||
		!strings.Contains(text["keda"], `pod=~"`+deployment.Name+`-.+"`) {
		t.Errorf("keda.yaml scales %v", target)
	}
}

// TestGitOps: what Argo CD and Flux are told to install is the chart, with values that it has, in a namespace that lets the agent in.
func TestGitOps(t *testing.T) {
	for file, at := range map[string]struct{ kind, chart, values string }{
		"argocd": {"Application", "source.path", "source.helm.valuesObject"},
		"flux":   {"HelmRelease", "chart.spec.chart", "values"},
	} {
		text, err := os.ReadFile("examples/gitops/" + file + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "{pod-security.kubernetes.io/enforce: privileged}") {
			t.Errorf("%s: the namespace has no label", file)
		}
		for _, o := range decode(t, file, string(text)) {
			if o.tree["kind"] != at.kind {
				continue
			}
			spec := func(path string) any {
				value := o.tree["spec"]
				for _, name := range strings.Split(path, ".") {
					fields, _ := value.(map[string]any)
					value = fields[name]
				}
				return value
			}
			if spec(at.chart) != "deploy/helm/cgpu" {
				t.Errorf("%s: the chart is %v", file, spec(at.chart))
			}
			values, err := yaml.Marshal(spec(at.values))
			if err != nil {
				t.Fatal(err)
			}
			given := filepath.Join(t.TempDir(), "values.yaml")
			if err := os.WriteFile(given, values, 0o600); err != nil {
				t.Fatal(err)
			}
			made := helm.must(t, "template", "cgpu", "helm/cgpu", "--namespace", "cgpu-system", "--kube-version", kubeVersion, "--values", given)
			set := of[*apps.DaemonSet](decode(t, file, made))
			if len(set) != 1 || set[0].Spec.Template.Spec.Containers[0].Image != "registry.example.com/cgpu-agent:0.1.0" {
				t.Errorf("%s: makes %+v", file, set)
			}
		}
	}
}

// TestDocumented: the manifests that docs/kubernetes.md shows are as good as the examples, and what it names is there.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := 0
	for i, part := range strings.Split(string(text), "```yaml\n")[1:] {
		if part, _, _ = strings.Cut(part, "```"); strings.HasPrefix(part, "apiVersion") {
			where := fmt.Sprintf("docs/kubernetes.md, YAML %d", i+1)
			checkExample(t, where, decode(t, where, part))
			shown++
		}
	}
	if shown != 2 {
		t.Errorf("%d manifests, want 2", shown)
	}
	for _, path := range regexp.MustCompile("deploy/[a-z/.-]+[a-z]").FindAllString(string(text), -1) {
		if _, err := os.Stat(filepath.Join("..", path)); err != nil {
			t.Errorf("docs/kubernetes.md: %v", err)
		}
	}
}

func checkExample(t *testing.T, file string, list []object) {
	t.Helper()
	pods := map[string]core.PodSpec{}
	claims := map[string]resourceapi.ResourceClaimSpec{}
	for _, o := range list {
		switch v := o.typed.(type) {
		case *core.Pod:
			pods[o.name] = v.Spec
		case *apps.Deployment:
			pods[o.name] = v.Spec.Template.Spec
		case *apps.StatefulSet:
			pods[o.name] = v.Spec.Template.Spec
		case *batch.Job:
			pods[o.name] = v.Spec.Template.Spec
		case *resourceapi.ResourceClaim:
			claims["claim "+v.Name] = v.Spec
		case *resourceapi.ResourceClaimTemplate:
			claims["template "+v.Name] = v.Spec.Spec
		}
	}
	if len(pods) == 0 {
		t.Errorf("%s: has no pod", file)
	}
	used := map[string]bool{}
	for name, s := range pods {
		if s.RuntimeClassName == nil || *s.RuntimeClassName != "cgpu" {
			t.Errorf("%s: %s: want runtimeClassName: cgpu", file, name)
		}
		has := map[string]bool{}
		for _, c := range s.ResourceClaims {
			has[c.Name] = true
			switch {
			case c.ResourceClaimName != nil:
				used["claim "+*c.ResourceClaimName] = true
			case c.ResourceClaimTemplateName != nil:
				used["template "+*c.ResourceClaimTemplateName] = true
			}
		}
		gpus := 0
		for _, c := range s.Containers {
			if q, ok := c.Resources.Limits["aliyun.com/gpu-mem"]; ok && !q.IsZero() {
				gpus++
			}
			for _, r := range c.Resources.Claims {
				gpus++
				if !has[r.Name] {
					t.Errorf("%s: %s: container %s: the pod has no claim %s", file, name, c.Name, r.Name)
				}
			}
			if strings.Contains(c.Image, ".") && strings.Contains(c.Image, "/") {
				t.Errorf("%s: %s: image %s names a host", file, name, c.Image)
			}
		}
		if gpus == 0 {
			t.Errorf("%s: %s: no container asks for a GPU", file, name)
		}
	}
	for name, spec := range claims {
		if !used[name] {
			t.Errorf("%s: %s: no pod uses it", file, name)
		}
		for _, r := range spec.Devices.Requests {
			var classes []string
			if r.Exactly != nil {
				classes = append(classes, r.Exactly.DeviceClassName)
			}
			for _, one := range r.FirstAvailable {
				classes = append(classes, one.DeviceClassName)
			}
			for _, class := range classes {
				if class != "vgpu.cgpu.io" && class != "gpu.cgpu.io" {
					t.Errorf("%s: %s: class %s", file, name, class)
				}
			}
		}
		for _, c := range spec.Devices.Config {
			if _, err := v1alpha1.Decode(c.Opaque.Parameters.Raw); err != nil || c.Opaque.Driver != "gpu.cgpu.io" {
				t.Errorf("%s: %s: driver %s: %v", file, name, c.Opaque.Driver, err)
			}
		}
	}
	for name := range used {
		if _, ok := claims[name]; !ok {
			t.Errorf("%s: %s is not in the file", file, name)
		}
	}
}
