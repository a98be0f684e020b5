// SPDX-License-Identifier: Apache-2.0

package nodump

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestEffect(t *testing.T) {
	got, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil || got != 0 {
		t.Errorf("dumpable %d, %v", got, err)
	}
}

// TestPrograms: every program that runs on nodes is one of these. TestHidden of test/integration looks at them while they run.
func TestPrograms(t *testing.T) {
	const module = "github.com/opencgpu/cgpu/"
	elsewhere := []string{"cgpu-probe", "cgpu-sim", "kubectl-cgpu"} // of tenants and tests, of tests, of users
	out, err := exec.Command("go", "list", "-f", `{{if eq .Name "main"}}{{.ImportPath}} {{join .Deps " "}}{{end}}`, module+"cmd/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue // a package beside its program
		}
		name := strings.TrimPrefix(words[0], module+"cmd/")
		if slices.Contains(words, module+"pkg/nodump") == slices.Contains(elsewhere, name) {
			t.Errorf("%s: want it to import pkg/nodump, unless it does not run on nodes", name)
		}
	}
}
