// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"errors"
	"strings"
)

// Names are what pods call the two resources, where that is not ResourceMemory and ResourcePercent: pods that were written for another
// system ask by its names. Inside they have the same names everywhere; only what the kubelet and the API server see has these.
type Names struct{ Memory, Percent string }

// Outside is what pods call a resource.
func (n Names) Outside(resource string) string {
	switch resource {
	case ResourceMemory:
		return cmp.Or(n.Memory, resource)
	case ResourcePercent:
		return cmp.Or(n.Percent, resource)
	}
	return resource
}

// Inside is the resource that pods call so; "" for what is none of ours.
func (n Names) Inside(name string) string {
	for _, resource := range []string{ResourceMemory, ResourcePercent} {
		if name != "" && name == n.Outside(resource) {
			return resource
		}
	}
	return ""
}

// List has both, as pods call them.
func (n Names) List() []string {
	return []string{n.Outside(ResourceMemory), n.Outside(ResourcePercent)}
}

// tell is an error in the words of the pod that it is about.
func (n Names) tell(err error) error {
	if err == nil || n == (Names{}) {
		return err
	}
	return errors.New(strings.NewReplacer(ResourceMemory, n.Outside(ResourceMemory), ResourcePercent, n.Outside(ResourcePercent)).
		Replace(err.Error()))
}
