// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// The device classes that cgpu's manifests make. Others count that name the driver in their selectors.
const (
	ClassShare = "vgpu.cgpu.io"
	ClassWhole = "gpu.cgpu.io"
)

// waiting lists the pods that want a GPU of ours and do not run yet, and the claims that no such pod explains.
func waiting(o Objects) []Waiting {
	list := []Waiting{}
	ours := oursOf(o.Classes)
	claims := map[string]*resourceapi.ResourceClaim{}
	for i := range o.Claims {
		claims[key(o.Claims[i].Namespace, o.Claims[i].Name)] = &o.Claims[i]
	}
	explained := map[string]bool{}
	for i := range o.Pods {
		p := &o.Pods[i]
		if finished(p) {
			continue
		}
		var wants []string
		if n := limit(p, resourceMemory); n > 0 {
			wants = append(wants, fmt.Sprintf("%s=%d", resourceMemory, n))
		}
		for _, name := range claimsOf(p) {
			c, ok := claims[key(p.Namespace, name)]
			if !ok || len(requests(c, ours)) == 0 {
				continue
			}
			explained[key(p.Namespace, name)] = true
			wants = append(wants, strings.Join(requests(c, ours), ", "))
		}
		// Of a template there may be no claim yet, of which class it will be nobody here knows.
		if why := whyPod(p); why != "" && len(wants) > 0 {
			list = append(list, Waiting{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName,
				Wants: strings.Join(wants, "; "), Why: why})
		}
	}
	for i := range o.Claims {
		c := &o.Claims[i]
		wants := requests(c, ours)
		if len(wants) == 0 || c.Status.Allocation != nil || explained[key(c.Namespace, c.Name)] {
			continue
		}
		list = append(list, Waiting{Kind: "ResourceClaim", Namespace: c.Namespace, Name: c.Name, Wants: strings.Join(wants, ", "),
			Why: "no pod uses it: a claim is allocated for its first pod"})
	}
	slices.SortFunc(list, func(a, b Waiting) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Kind, b.Kind), strings.Compare(a.Name, b.Name))
	})
	return list
}

func key(namespace, name string) string { return namespace + "/" + name }

// oursOf are the names of the classes that select the driver's devices.
func oursOf(classes []resourceapi.DeviceClass) map[string]bool {
	ours := map[string]bool{ClassShare: true, ClassWhole: true}
	for i := range classes {
		for _, s := range classes[i].Spec.Selectors {
			if s.CEL != nil && strings.Contains(s.CEL.Expression, `"`+Driver+`"`) {
				ours[classes[i].Name] = true
			}
		}
	}
	return ours
}

// requests are a claim's requests of our classes, as text.
func requests(c *resourceapi.ResourceClaim, ours map[string]bool) (list []string) {
	add := func(class string, count int64, amounts *resourceapi.CapacityRequirements) {
		if !ours[class] {
			return
		}
		text := class
		if count > 1 {
			text = fmt.Sprintf("%d × %s", count, class)
		}
		var parts []string
		if amounts != nil {
			for name, q := range amounts.Requests {
				parts = append(parts, fmt.Sprintf("%s=%s", name, q.String()))
			}
			slices.SortFunc(parts, func(a, b string) int { return -strings.Compare(a, b) }) // memory before cores
		}
		list = append(list, strings.Join(append([]string{text}, parts...), " "))
	}
	for _, r := range c.Spec.Devices.Requests {
		if r.Exactly != nil {
			add(r.Exactly.DeviceClassName, r.Exactly.Count, r.Exactly.Capacity)
		}
		for _, s := range r.FirstAvailable {
			add(s.DeviceClassName, s.Count, s.Capacity)
		}
	}
	return list
}

// claimsOf are the names of a pod's claims; those of templates as far as they are made.
func claimsOf(p *corev1.Pod) (names []string) {
	for _, c := range p.Spec.ResourceClaims {
		if c.ResourceClaimName != nil {
			names = append(names, *c.ResourceClaimName)
		}
	}
	for _, s := range p.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil {
			names = append(names, *s.ResourceClaimName)
		}
	}
	return names
}

// whyPod says why a pod does not run; empty where it does, or is just starting.
func whyPod(p *corev1.Pod) string {
	if p.Spec.NodeName == "" {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return join(c.Reason, c.Message)
			}
		}
		return "not scheduled yet"
	}
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, s := range list {
			if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
				return "container " + s.Name + ": " + join(w.Reason, w.Message)
			}
		}
	}
	return ""
}

func join(reason, message string) string {
	if message == "" {
		return reason
	}
	return reason + ": " + message
}
