// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	admission "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// settling is how long API servers may take from the writing of a policy to following it. A pod that was made earlier may have been
// made with anything in it.
const settling = 10 * time.Second

// PolicyName is that of the policy that guards the scheduler's annotations, and of its binding.
func (s *Scheduler) PolicyName() string { return "scheduler-" + s.Name + ".cgpu.io" }

// Policy keeps everybody from the annotations but who binds pods to nodes: a new pod has none of those that are decided, and what is there
// only a scheduler changes. Which account that is differs from one installation to the next, but that it may create pods/binding does
// not; the roles admin and edit do not have it.
//
// All fields are set that the API server would set else, so that what it has can be compared.
func (s *Scheduler) Policy() *admission.ValidatingAdmissionPolicy {
	fail, equivalent, all, forbidden := admission.Fail, admission.Equivalent, admission.AllScopes, metav1.StatusReasonForbidden
	return &admission.ValidatingAdmissionPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingAdmissionPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: s.PolicyName()},
		Spec: admission.ValidatingAdmissionPolicySpec{
			FailurePolicy: &fail,
			MatchConstraints: &admission.MatchResources{
				NamespaceSelector: &metav1.LabelSelector{}, ObjectSelector: &metav1.LabelSelector{}, MatchPolicy: &equivalent,
				ResourceRules: []admission.NamedRuleWithOperations{{RuleWithOperations: admission.RuleWithOperations{
					Operations: []admission.OperationType{admission.Create, admission.Update},
					Rule: admission.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods", "pods/status"},
						Scope: &all}}}}},
			Variables: []admission.Variable{
				{Name: "now", Expression: "object.metadata.?annotations.orValue({})"},
				{Name: "was", Expression: `request.operation == "CREATE" ? {} : oldObject.metadata.?annotations.orValue({})`},
				// Written, changed or taken away.
				{Name: "changed", Expression: "(variables.now.map(k, k) + variables.was.filter(k, !(k in variables.now))).filter(k, " +
					"!(k in variables.now && k in variables.was && variables.now[k] == variables.was[k]) && " + s.guarded() + ")"},
			},
			Validations: []admission.Validation{{
				Expression: `size(variables.changed) == 0 || request.operation == "UPDATE" && authorizer.group("").resource("pods")` +
					`.subresource("binding").namespace(request.namespace).check("create").allowed()`,
				Message: "annotations of the scheduler " + s.Name + " are written by who binds pods, and by nobody else",
				MessageExpression: `"annotation " + variables.changed[0] + " is for the scheduler ` + s.Name +
					` alone, at a new pod for nobody: leave it out of the pod, and as it is afterwards"`,
				Reason: &forbidden}},
		}}
}

// Binding puts the policy in force, everywhere.
func (s *Scheduler) Binding() *admission.ValidatingAdmissionPolicyBinding {
	return &admission.ValidatingAdmissionPolicyBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingAdmissionPolicyBinding"},
		ObjectMeta: metav1.ObjectMeta{Name: s.PolicyName()},
		Spec: admission.ValidatingAdmissionPolicyBindingSpec{PolicyName: s.PolicyName(),
			ValidationActions: []admission.ValidationAction{admission.Deny}}}
}

// guarded is the CEL expression for whether k is an annotation that may not be changed so.
func (s *Scheduler) guarded() string {
	any := func(patterns []string) string {
		var list []string
		for _, p := range patterns {
			if before, after, star := strings.Cut(p, "*"); star {
				list = append(list, fmt.Sprintf("k.startsWith(%q) && k.endsWith(%q)", before, after))
			} else {
				list = append(list, fmt.Sprintf("k == %q", p))
			}
		}
		return strings.Join(list, " || ")
	}
	if len(s.Asked) == 0 {
		return "(" + any(s.Decided) + ")"
	}
	return "(" + any(s.Decided) + ` || request.operation == "UPDATE" && (` + any(s.Asked) + "))"
}

// Guarded says since when the scheduler's annotations are nobody's but its own; pods that were made later have no forged ones. The policy
// is the one that this program knows, word for word: whether another one does the same cannot be told.
func (s *Scheduler) Guarded(p *admission.ValidatingAdmissionPolicy, b *admission.ValidatingAdmissionPolicyBinding) (time.Time, error) {
	remedy := "apply deploy/components/scheduler-" + s.Name + "/admission.yaml of this version, then make the pods anew"
	switch {
	case p == nil || b == nil:
		return time.Time{}, fmt.Errorf("decision: policy %s: is missing, or its binding is, and without it authors of pods write themselves "+
			"GPUs: %s", s.PolicyName(), remedy)
	case !equality.Semantic.DeepEqual(p.Spec, s.Policy().Spec):
		return time.Time{}, fmt.Errorf("decision: policy %s: is not the one of this version: %s", s.PolicyName(), remedy)
	case !equality.Semantic.DeepEqual(b.Spec, s.Binding().Spec):
		return time.Time{}, fmt.Errorf("decision: binding %s: does not put the policy in force everywhere: %s", s.PolicyName(), remedy)
	case p.DeletionTimestamp != nil || b.DeletionTimestamp != nil:
		return time.Time{}, errors.New("decision: policy " + s.PolicyName() + ": is being deleted")
	}
	since := slices.MaxFunc(slices.Concat(written(p.ObjectMeta), written(b.ObjectMeta)), time.Time.Compare)
	return since.Add(settling), nil
}

// written are the times at which an object was, as far as it is told. Its status says nothing of what it does.
func written(o metav1.ObjectMeta) []time.Time {
	times := []time.Time{o.CreationTimestamp.Time}
	for _, m := range o.ManagedFields {
		if m.Time != nil && m.Subresource != "status" {
			times = append(times, m.Time.Time)
		}
	}
	return times
}

// Old refuses a pod from before the policy.
func (s *Scheduler) Old(p *Pod, since time.Time) error {
	if p.Created.After(since) {
		return nil
	}
	return fmt.Errorf("decision: pod %s/%s: is older than the policy %s, which is in force since %s: make it anew", p.Namespace, p.Name,
		s.PolicyName(), since.UTC().Format(time.RFC3339))
}
