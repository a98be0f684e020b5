// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	admission "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// settling is Scheduler.Settling where nothing else is said: a moment is enough, but for a server whose watch hangs. A pod that was made
// earlier may have been made with anything in it.
const settling = time.Minute

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
			Variables: s.variables(),
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

// variables are the policy's: the annotations as they are to be and as they were, and of those that are guarded what is changed. Each is
// looked up: going through all, of which an author can make tens of thousands, cost the API server seconds.
func (s *Scheduler) variables() []admission.Variable {
	list := []admission.Variable{
		{Name: "now", Expression: "object.metadata.?annotations.orValue({})"},
		{Name: "was", Expression: `request.operation == "CREATE" ? {} : oldObject.metadata.?annotations.orValue({})`}}
	if strings.Contains(strings.Join(s.Decided, ""), "*") {
		// A pod of more containers is given nothing (Shares), whatever its annotations say.
		const init = "object.spec.?initContainers.orValue([])"
		list = append(list, admission.Variable{Name: "names", Expression: fmt.Sprintf(
			"size(object.spec.containers) + size(%s) > %d ? [] : (object.spec.containers + %s).map(c, c.name)", init, MaxContainers, init)})
	}
	return append(list, admission.Variable{Name: "changed", Expression: s.keys() +
		".filter(k, (k in variables.now) != (k in variables.was) || k in variables.now && variables.now[k] != variables.was[k])"})
}

// keys is the CEL expression for the annotations that may not be changed so.
func (s *Scheduler) keys() string {
	list := func(patterns []string) string {
		var fixed, named []string
		for _, p := range patterns {
			if before, after, star := strings.Cut(p, "*"); star {
				named = append(named, fmt.Sprintf("variables.names.map(n, %q + n + %q)", before, after))
			} else {
				fixed = append(fixed, strconv.Quote(p))
			}
		}
		if len(fixed) > 0 {
			named = append(named, "["+strings.Join(fixed, ", ")+"]")
		}
		return strings.Join(named, " + ")
	}
	if len(s.Asked) == 0 {
		return list(s.Decided)
	}
	return "(" + list(s.Decided) + ` + (request.operation == "UPDATE" ? ` + list(s.Asked) + " : []))"
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
	return since.Add(cmp.Or(s.Settling, settling)), nil
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
