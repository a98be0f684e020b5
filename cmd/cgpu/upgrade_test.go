// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// TestUpgradeUsage: what is no command line of cgpu upgrade is refused before any guard is asked.
func TestUpgradeUsage(t *testing.T) {
	t.Setenv("CGPU_RUN_DIR", t.TempDir())
	for line, want := range map[string]string{
		"upgrade":                           "want one CONTAINER, or --all",
		"upgrade --all web":                 "want one CONTAINER, or --all",
		"upgrade web db":                    "want one CONTAINER, or --all",
		"upgrade --all --parallel 0":        "--parallel 0: want 1 to 64",
		"upgrade --all --parallel 65":       "--parallel 65: want 1 to 64",
		"upgrade --all --program /dev/null": `--program "/dev/null": want the path of a cgpu-guard`,
		"upgrade --all --program /nowhere":  `--program "/nowhere": want the path of a cgpu-guard`,
	} {
		if err := run(app(), append([]string{"cgpu"}, strings.Fields(line)...)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", line, err, want)
		}
	}
}
