// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"os/exec"
	"strings"
	"testing"
)

// TestLinks: programs of which one runs for each container have nothing of this.
func TestLinks(t *testing.T) {
	for _, name := range []string{"cgpu-guard", "cgpu-runtime", "cgpu-hook", "cgpu-podresources", "cgpu-refresh"} {
		out, err := exec.Command("go", "list", "-deps", "../../cmd/"+name).Output()
		must(t, err)
		if strings.Contains(string(out), "prometheus") {
			t.Errorf("%s links Prometheus' libraries", name)
		}
	}
}
