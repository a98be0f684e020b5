// SPDX-License-Identifier: Apache-2.0

package api

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestLinks: who only asks guards, or reads what others asked, links no guard.
func TestLinks(t *testing.T) {
	const module = "github.com/opencgpu/cgpu/"
	for _, name := range []string{"pkg/snapshot", "pkg/doctor", "pkg/exporter", "cmd/cgpu", "cmd/cgpu-agent", "cmd/kubectl-cgpu"} {
		if slices.Contains(dependencies(t, "", module+name), module+"pkg/guard") {
			t.Errorf("%s links the guard", name)
		}
	}
}

// TestPluginIsPortable: kubectl runs on people's own machines, so its plugin links nothing that is Linux's. Building it for them takes
// minutes (make release does).
func TestPluginIsPortable(t *testing.T) {
	for _, system := range []string{"darwin", "windows"} {
		for _, name := range dependencies(t, system, "github.com/opencgpu/cgpu/cmd/kubectl-cgpu") {
			if !strings.HasPrefix(name, "github.com/opencgpu/") {
				continue
			}
			for _, imported := range list(t, system, `{{join .Imports "\n"}}`, name) {
				if strings.HasPrefix(imported, "golang.org/x/sys/") {
					t.Errorf("%s: %s imports %s", system, name, imported)
				}
			}
		}
	}
}

func dependencies(t *testing.T, system, name string) []string {
	t.Helper()
	return list(t, system, "{{.ImportPath}}", "-deps", name)
}

func list(t *testing.T, system, format string, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-f", format}, args...)...)
	cmd.Env = append(cmd.Environ(), "GOOS="+system)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	return strings.Fields(string(out))
}
