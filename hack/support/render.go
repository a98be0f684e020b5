// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// render is docs/support.md. root is the repository's.
func render(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "docs/measurements.md"))
	if err != nil {
		return "", err
	}
	r := renderer{root: root, measurements: string(text)}
	r.b.WriteString(`# What cgpu was tried with

<!-- made by make support from hack/support/facts.go: do not edit -->

Each row says how it is known, and nothing is known that no row has:

| | |
|---|---|
| **hardware** | on a real GPU, with date and commit; [measurements.md](measurements.md) has command and result of that commit |
| simulated | by tests with the real engines on the simulated driver; the test is named |
| read | in source or documentation, or tried on made-up files: it should work |
| unknown | nobody looked |
| refused | cgpu starts no container with a quota, or refuses the call |
| fails | tried, and does not work yet |

## Together

Whole machines on which it ran. Any other pair of what stands below has not been tried as a pair.

| driver | GPU | Linux | engine | low-level runtime | orchestrator | when, at | what |
|---|---|---|---|---|---|---|---|
`)
	for _, row := range together {
		when, err := r.commits(strings.Fields(row[6]))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&r.b, "| %s | %s | %s |\n", strings.Join(row[:6], " | "), when, row[7])
	}
	known, err := driverFacts()
	if err != nil {
		return "", err
	}
	gpus, err := gpuFacts()
	if err != nil {
		return "", err
	}
	all := []section{{"Drivers", "", known}}
	all = append(all, afterDrivers...)
	all = append(all, section{"GPUs", "", gpus})
	for _, s := range append(all, afterGPUs...) {
		if err := r.section(s); err != nil {
			return "", err
		}
	}
	return r.b.String(), nil
}

type renderer struct {
	b            strings.Builder
	root         string
	measurements string
}

func (r *renderer) section(s section) error {
	fmt.Fprintf(&r.b, "\n## %s\n\n", s.title)
	if s.before != "" {
		fmt.Fprintf(&r.b, "%s\n\n", s.before)
	}
	fmt.Fprint(&r.b, "| what | known | by |\n|---|---|---|\n")
	for _, f := range s.facts {
		by, err := r.by(f)
		if err != nil {
			return fmt.Errorf("%s: %s: %w", s.title, f.what, err)
		}
		fmt.Fprintf(&r.b, "| %s | %s | %s |\n", f.what, f.known(), by)
	}
	return nil
}

// known is the best way by which a fact is known.
func (f fact) known() status {
	switch {
	case f.status != "":
		return f.status
	case len(f.commits) > 0:
		return measured
	case len(f.tests) > 0:
		return simulated
	}
	return unknown
}

// by is the evidence: each test and each commit is looked up.
func (r *renderer) by(f fact) (string, error) {
	if f.status != "" && len(f.commits) > 0 {
		return "", fmt.Errorf("%s, and yet on hardware", f.status)
	}
	var list []string
	if len(f.commits) > 0 {
		when, err := r.commits(f.commits)
		if err != nil {
			return "", err
		}
		list = append(list, when)
	}
	for _, test := range f.tests {
		folder, name, _ := strings.Cut(test, ":")
		if !r.hasTest(folder, name) {
			return "", fmt.Errorf("%s has no %s", folder, name)
		}
		list = append(list, fmt.Sprintf("`%s` (`%s`)", name, folder))
	}
	if f.says != "" {
		list = append(list, f.says)
	}
	return strings.Join(list, "; "), nil
}

func (r *renderer) hasTest(folder, name string) bool {
	files, _ := filepath.Glob(filepath.Join(r.root, folder, "*_test.go")) // the pattern is ours
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), "\nfunc "+name+"(t *testing.T)") {
			return true
		}
	}
	return false
}

// commits tells when something was tried on hardware. A commit of which docs/measurements.md has nothing is no evidence.
func (r *renderer) commits(list []string) (string, error) {
	var out []string
	for _, c := range list {
		if dates[c] == "" {
			return "", fmt.Errorf("commit %s has no date", c)
		}
		if !strings.Contains(r.measurements, c) {
			return "", fmt.Errorf("docs/measurements.md has nothing of commit %s", c)
		}
		if n := len(out); n > 0 && strings.HasPrefix(out[n-1], dates[c]) {
			out[n-1] += ", " + c
			continue
		}
		out = append(out, dates[c]+" "+c)
	}
	return strings.Join(out, "; "), nil
}

// driverFacts has a row for each branch of pkg/rm's.
func driverFacts() (list []fact, err error) {
	left := len(branches)
	for _, b := range rm.KnownBranches() {
		f, said := branches[b]
		if said {
			left--
		} else {
			f = otherBranches
		}
		f.what = "branch " + b
		list = append(list, f)
	}
	if left > 0 {
		return nil, fmt.Errorf("facts.go speaks of a branch that pkg/rm does not know")
	}
	return list, nil
}

// gpuFacts has a row for each architecture: without compute classes CUDA does not run.
func gpuFacts() (list []fact, err error) {
	found, err := classes()
	if err != nil {
		return nil, err
	}
	for _, a := range architectures {
		f := a.fact
		f.what = fmt.Sprintf("%s (%s)", a.name[:1]+strings.ToLower(a.name[1:]), a.cards)
		switch {
		case !found[a.name]:
			f.status = refused
		case len(f.commits) == 0:
			f.status, f.says = read, strings.Join(append([]string{readArchitecture}, f.says), "; ")
			f.says = strings.TrimSuffix(f.says, "; ")
		}
		delete(found, a.name)
		list = append(list, f)
	}
	for name := range found {
		return nil, fmt.Errorf("facts.go has no row for %s, of which pkg/rm has compute classes", name)
	}
	return list, nil
}

// classes are the architectures of which the newest branch's tables have compute classes that are let through.
func classes() (map[string]bool, error) {
	known := rm.KnownBranches()
	abi, err := rm.ForDriver(known[len(known)-1]+".999.99", false)
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	for id := range uint32(0x10000) {
		if c, ok := abi.Class(id); ok && c.Kind == rm.ClassCompute {
			name, _, _ := strings.Cut(c.Name, "_COMPUTE")
			found[name] = true
		}
	}
	return found, nil
}
