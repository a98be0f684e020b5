// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../.."

// TestPage: docs/support.md is made of what is known now.
func TestPage(t *testing.T) {
	want, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile(filepath.Join(root, page))
	if err != nil || string(have) != want {
		t.Errorf("%s is stale (%v); run: make support", page, err)
	}
}

// TestEvidence: a claim whose evidence is gone is no claim.
func TestEvidence(t *testing.T) {
	dates["abcdef0"] = "2026-11-21"
	defer delete(dates, "abcdef0")
	r := renderer{root: root, measurements: "at ca35970"}
	for name, tt := range map[string]struct {
		fact  fact
		known status
		by    string
		err   string
	}{
		"commit": {fact{commits: []string{"ca35970"}, says: "x"}, measured, "2026-11-22 ca35970; x", ""},
		"commit and test": {fact{commits: []string{"ca35970"}, tests: []string{"hack/support:TestPage"}}, measured,
			"2026-11-22 ca35970; `TestPage` (`hack/support`)", ""},
		"test":                  {fact{tests: []string{"hack/support:TestPage"}}, simulated, "`TestPage` (`hack/support`)", ""},
		"test that only reads":  {fact{tests: []string{"hack/support:TestPage"}, status: read}, read, "`TestPage` (`hack/support`)", ""},
		"nothing":               {fact{}, unknown, "", ""},
		"unmeasured commit":     {fact{commits: []string{"abcdef0"}}, measured, "", "measurements.md has nothing"},
		"undated commit":        {fact{commits: []string{"1234567"}}, measured, "", "no date"},
		"test that is gone":     {fact{tests: []string{"hack/support:TestNothing"}}, simulated, "", "has no TestNothing"},
		"folder that is gone":   {fact{tests: []string{"hack/none:TestPage"}}, simulated, "", "has no TestPage"},
		"read, and on hardware": {fact{commits: []string{"ca35970"}, status: read}, read, "", "and yet"},
	} {
		by, err := r.by(tt.fact)
		if tt.fact.known() != tt.known || by != tt.by || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %s, %q, %v", name, tt.fact.known(), by, err)
		}
	}
}

// TestArchitectures: the tables' architectures are found by their classes' names.
func TestArchitectures(t *testing.T) {
	found, err := classes()
	if err != nil || !found["HOPPER"] || !found["TURING"] || found["KEPLER"] {
		t.Errorf("%v, %v", found, err)
	}
}
