// SPDX-License-Identifier: Apache-2.0

// Package deploy holds the tests of the manifests: what kustomize and helm make of them is decoded strictly, compared, and
// held to the rules that docs/internals/agent.md and docs/kubernetes.md state.
package deploy

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// The tools, pinned. They are built from the module proxy; CGPU_KUSTOMIZE and CGPU_HELM name programs instead.
const (
	kustomizeModule = "sigs.k8s.io/kustomize/kustomize/v5@v5.8.2"
	helmModule      = "helm.sh/helm/v3/cmd/helm@v3.22.0"
)

// kubeVersion is the cluster's that helm renders for.
const kubeVersion = "1.36.0"

// tool runs a program of a module, and skips the test where it cannot be had.
type tool struct {
	env, module string
	probe       []string
	once        sync.Once
	err         error
}

var (
	kustomize = &tool{env: "CGPU_KUSTOMIZE", module: kustomizeModule, probe: []string{"version"}}
	helm      = &tool{env: "CGPU_HELM", module: helmModule, probe: []string{"version"}}
)

func (k *tool) command(args ...string) *exec.Cmd {
	if program := os.Getenv(k.env); program != "" {
		return exec.Command(program, args...)
	}
	c := exec.Command("go", append([]string{"run", k.module}, args...)...)
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	return c
}

func (k *tool) run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	k.once.Do(func() {
		if out, err := k.command(k.probe...).CombinedOutput(); err != nil {
			k.err = fmt.Errorf("%s cannot be had here: %w: %s", k.module, err, out)
		}
	})
	if k.err != nil {
		testenv.Lacks(t, "%v", k.err)
	}
	c := k.command(args...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	err := c.Run()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", k.module, strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), err
}

func (k *tool) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := k.run(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// build is what kustomize makes of a folder.
func build(t *testing.T, dir string) []object {
	t.Helper()
	return decode(t, dir, kustomize.must(t, "build", dir))
}

// with builds overlays/dra with components.
func with(t *testing.T, components ...string) []object {
	t.Helper()
	return build(t, overlay(t, components...))
}

// overlay is a folder that says overlays/dra with components.
func overlay(t *testing.T, components ...string) string {
	t.Helper()
	// Kustomize wants a folder for a kustomization, and one that is below this for the paths in it.
	dir, err := os.MkdirTemp("overlays", "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	var b strings.Builder
	b.WriteString("resources: [../dra]\ncomponents:\n")
	for _, c := range components {
		fmt.Fprintf(&b, "- ../../components/%s\n", c)
	}
	if err := os.WriteFile(dir+"/kustomization.yaml", []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// render is what helm makes of the chart.
func render(t *testing.T, settings ...string) []object {
	t.Helper()
	args := []string{"template", "cgpu", "helm/cgpu", "--namespace", "cgpu-system", "--kube-version", kubeVersion}
	for _, s := range settings {
		if text, ok := strings.CutPrefix(s, "string:"); ok {
			args = append(args, "--set-string", text)
			continue
		}
		args = append(args, "--set", s)
	}
	return decode(t, "helm "+strings.Join(settings, " "), helm.must(t, args...))
}

// object is one of a manifest: as it is typed, and as it was written.
type object struct {
	name  string // Kind namespace/name
	typed runtime.Object
	tree  map[string]any
}

// documents are those of a YAML stream that say anything.
func documents(text string) (list []string) {
	for d := range strings.SplitSeq("\n"+text, "\n---") {
		for line := range strings.SplitSeq(d, "\n") {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				list = append(list, d)
				break
			}
		}
	}
	return list
}

// decode refuses what the API server would drop: fields that do not exist, and those that occur twice.
func decode(t *testing.T, where, text string) (list []object) {
	t.Helper()
	seen := map[string]bool{}
	for _, d := range documents(text) {
		var o object
		if err := yaml.UnmarshalStrict([]byte(d), &o.tree); err != nil {
			t.Fatalf("%s: %v in\n%s", where, err, d)
		}
		api, _ := o.tree["apiVersion"].(string)
		kind, _ := o.tree["kind"].(string)
		gv, err := schema.ParseGroupVersion(api)
		if err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		meta, _ := o.tree["metadata"].(map[string]any)
		namespace, _ := meta["namespace"].(string)
		o.name = fmt.Sprintf("%s %s/%v", kind, namespace, meta["name"])
		if o.typed, err = scheme.Scheme.New(gv.WithKind(kind)); err == nil {
			err = yaml.UnmarshalStrict([]byte(d), o.typed)
		} else if foreign[gv.Group] {
			o.typed, err = nil, nil // not Kubernetes' own: its schema is not here
		}
		if err != nil {
			t.Fatalf("%s: %s: %v in\n%s", where, o.name, err, d)
		}
		if seen[o.name] {
			t.Errorf("%s: %s is there twice", where, o.name)
		}
		seen[o.name] = true
		list = append(list, o)
	}
	if len(list) == 0 {
		t.Fatalf("%s: no objects", where)
	}
	slices.SortFunc(list, func(a, b object) int { return cmp.Compare(a.name, b.name) })
	return list
}

// foreign are the groups of other projects. What Prometheus' operator reads, test/observability decodes.
var foreign = map[string]bool{"kueue.x-k8s.io": true, "config.kueue.x-k8s.io": true, "monitoring.coreos.com": true, "keda.sh": true,
	"argoproj.io": true, "helm.toolkit.fluxcd.io": true, "source.toolkit.fluxcd.io": true}

// of are the objects of a type.
func of[T runtime.Object](list []object) (typed []T) {
	for _, o := range list {
		if v, ok := o.typed.(T); ok {
			typed = append(typed, v)
		}
	}
	return typed
}
