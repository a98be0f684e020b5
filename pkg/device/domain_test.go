// SPDX-License-Identifier: Apache-2.0

package device

import "testing"

// TestDomain: a domain of a namespace is found by its name, and is for the namespaces that it names, or for all.
func TestDomain(t *testing.T) {
	c := Config{Domains: []Domain{{Name: "a", Namespaces: []string{"prod"}}, {Name: "b", Namespaces: []string{"*"}}, {Name: "c"}}}
	for known, want := range map[string]string{"a": "a", "prod.a": "a", "x.b": "b", "x": "", "a.x": "", "": "", "a.": ""} {
		if d := c.Domain(known); (d != nil) != (want != "") || d != nil && d.Name != want {
			t.Errorf("%q: %+v", known, d)
		}
	}
	if c.Domain("x").Lets("prod") {
		t.Error("one that there is not")
	}
	for _, test := range []struct {
		i         int
		namespace string
		want      bool
	}{{0, "prod", true}, {0, "dev", false}, {0, "", false}, {1, "dev", true}, {1, "", false}, {2, "prod", false}, {2, "", false}} {
		if got := c.Domains[test.i].Lets(test.namespace); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
}
