// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	admission "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/opencgpu/cgpu/pkg/golden"
)

// TestManifests: deploy/ has the policies of this package; -update writes them.
func TestManifests(t *testing.T) {
	for _, s := range Schedulers() {
		text := "# Made by `go test ./pkg/decision -update` from pkg/decision/policy.go. cgpu-agent compares it with what the API server " +
			"has, and\n# gives pods nothing where that differs: docs/schedulers.md.\n"
		for i, o := range []any{s.Policy(), s.Binding()} {
			b, err := yaml.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			if i > 0 {
				text += "---\n"
			}
			for line := range strings.Lines(string(b)) {
				if !strings.HasPrefix(line, "status:") {
					text += line
				}
			}
		}
		file := "../../deploy/components/scheduler-" + s.Name + "/admission.yaml"
		if *golden.Update {
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != text {
			t.Errorf("%s is not what the policy is (%v): go test ./pkg/decision -update", file, err)
		}
	}
}

// TestCost: no policy goes through a pod's annotations, of which its author makes as many as he likes: each key is looked up. Nor does it
// go through more containers than are read. gpushare's policy is written by hand, in the same way.
func TestCost(t *testing.T) {
	texts := map[string]string{}
	for _, s := range Schedulers() {
		for _, v := range s.Policy().Spec.Variables {
			texts[s.Name] += v.Name + ": " + v.Expression + "\n"
		}
		if star := strings.Contains(texts[s.Name], ".map("); star && !strings.Contains(texts[s.Name], "> 128 ? []") {
			t.Errorf("%s: goes through any number of containers:\n%s", s.Name, texts[s.Name])
		}
	}
	b, err := os.ReadFile("../../deploy/components/device-plugin/admission-gpushare.yaml")
	if err != nil {
		t.Fatal(err)
	}
	texts["gpushare"] = string(b)
	through := regexp.MustCompile(`(variables\.(now|was)|annotations[^\n]*)\.(map|filter|all|exists|exists_one|transform\w+)\(`)
	for name, text := range texts {
		if found := through.FindString(text); found != "" || !strings.Contains(text, ".filter(k,") {
			t.Errorf("%s: goes through annotations: %q of\n%s", name, found, text)
		}
	}
}

func TestGuarded(t *testing.T) {
	s := Find("kai")
	at := func(sec int64) metav1.Time { return metav1.NewTime(time.Unix(sec, 0)) }
	made := func() (*admission.ValidatingAdmissionPolicy, *admission.ValidatingAdmissionPolicyBinding) {
		p, b := s.Policy(), s.Binding()
		p.CreationTimestamp, b.CreationTimestamp = at(100), at(200)
		changed, status := at(150), at(900)
		p.ManagedFields = []metav1.ManagedFieldsEntry{{Time: &changed}, {Time: &status, Subresource: "status"}, {}}
		return p, b
	}
	for name, c := range map[string]struct {
		change func(*admission.ValidatingAdmissionPolicy, *admission.ValidatingAdmissionPolicyBinding)
		want   string
	}{
		"failure is no refusal": {func(p *admission.ValidatingAdmissionPolicy, _ *admission.ValidatingAdmissionPolicyBinding) {
			ignore := admission.Ignore
			p.Spec.FailurePolicy = &ignore
		}, "is not the one of this version"},
		"another scheduler's": {func(p *admission.ValidatingAdmissionPolicy, _ *admission.ValidatingAdmissionPolicyBinding) {
			p.Spec = Find("hami").Policy().Spec
		}, "is not the one"},
		"a namespace left out": {func(p *admission.ValidatingAdmissionPolicy, _ *admission.ValidatingAdmissionPolicyBinding) {
			p.Spec.MatchConstraints.NamespaceSelector.MatchLabels = map[string]string{"a": "b"}
		}, "is not the one"},
		"a condition": {func(p *admission.ValidatingAdmissionPolicy, _ *admission.ValidatingAdmissionPolicyBinding) {
			p.Spec.MatchConditions = []admission.MatchCondition{{Name: "x", Expression: "false"}}
		}, "is not the one"},
		"warns only": {func(_ *admission.ValidatingAdmissionPolicy, b *admission.ValidatingAdmissionPolicyBinding) {
			b.Spec.ValidationActions = []admission.ValidationAction{admission.Warn}
		}, "does not put the policy in force"},
		"bound to some": {func(_ *admission.ValidatingAdmissionPolicy, b *admission.ValidatingAdmissionPolicyBinding) {
			b.Spec.MatchResources = &admission.MatchResources{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}
		}, "does not put"},
		"going": {func(_ *admission.ValidatingAdmissionPolicy, b *admission.ValidatingAdmissionPolicyBinding) {
			now := at(300)
			b.DeletionTimestamp = &now
		}, "is being deleted"},
	} {
		p, b := made()
		c.change(p, b)
		if _, err := s.Guarded(p, b); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	p, b := made()
	if _, err := s.Guarded(nil, nil); err == nil || !strings.Contains(err.Error(), "is missing") {
		t.Error(err)
	}
	if _, err := s.Guarded(p, nil); err == nil {
		t.Error("without a binding")
	}
	since, err := s.Guarded(p, b)
	if err != nil || !since.Equal(time.Unix(260, 0)) {
		t.Fatalf("%v, %v", since, err)
	}
	// It was another one until 500.
	changed := at(500)
	b.ManagedFields = []metav1.ManagedFieldsEntry{{Time: &changed}}
	if since, err = s.Guarded(p, b); err != nil || !since.Equal(time.Unix(560, 0)) {
		t.Errorf("%v, %v", since, err)
	}
	for sec, old := range map[int64]bool{400: true, 555: true, 560: true, 561: false} {
		if err := s.Old(&Pod{Created: time.Unix(sec, 0)}, since); (err != nil) != old {
			t.Errorf("a pod of %d: %v", sec, err)
		}
	}
}
