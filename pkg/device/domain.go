// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"strings"
)

// Domain is a trust domain of the node: a name under which containers may compute side by side through an MPS server.
type Domain struct {
	Name string `json:"name"`
	// Weight and Percent are the share of a GPU's time of all its members together; 0: as of a container that says nothing.
	Weight  int `json:"weight,omitempty"`
	Percent int `json:"percent,omitempty"`
	// Users may join by sudo cgpu run, by name or number; root and container engines may in any case.
	Users []string `json:"users,omitempty"`
	// Namespaces are those of Kubernetes whose pods may join, "*" all; each has a domain of its own, unless it is Shared.
	Namespaces []string `json:"namespaces,omitempty"`
	Shared     bool     `json:"shared,omitempty"`
}

// Domain finds a domain of cgpu.toml; nil: there is none of the name. Those of a namespace are known as NAMESPACE.NAME, neither of which
// has a dot.
func (c *Config) Domain(known string) *Domain {
	name := known[strings.LastIndexByte(known, '.')+1:]
	for i := range c.Domains {
		if c.Domains[i].Name == name {
			return &c.Domains[i]
		}
	}
	return nil
}

// Lets says whether pods of a namespace may join.
func (d *Domain) Lets(namespace string) bool {
	return d != nil && namespace != "" && (slices.Contains(d.Namespaces, namespace) || slices.Contains(d.Namespaces, "*"))
}

// LetsUser says whether a user may join who comes through sudo.
func (d *Domain) LetsUser(name, number string) bool {
	return slices.ContainsFunc(d.Users, func(u string) bool { return u == number || u == name && name != "" })
}
