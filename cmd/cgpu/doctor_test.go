// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"strings"
	"testing"
)

// The whole command is tested in test/integration: it starts itself again, which a test's program must not.

func TestDoctorUsage(t *testing.T) {
	for args, want := range map[string]string{
		"doctor -o yaml":                               `doctor: -o "yaml": want table or json`,
		"doctor now":                                   `doctor: "now": want no arguments`,
		"doctor --force":                               `doctor: --force: goes with --measure`,
		"doctor --engine moby=/x":                      `"moby" is no engine: want NAME=FILE with one of docker, containerd, crio, podman`,
		"doctor --engine docker":                       `--engine "docker": want docker=FILE with an absolute path`,
		"doctor --engine docker=daemon.json":           `want docker=FILE with an absolute path`,
		"doctor --engine docker=/a,docker=/b --bad":    `doctor: --bad: no such option (cgpu doctor --help lists them)`,
		"doctor --try harder":                          `doctor: --try "harder": this is for doctor's own children`,
		"doctor --engine docker=/a --engine docker=/b": "docker is given twice",
	} {
		if out := cgpu(args); !strings.Contains(out, "error: ") || !strings.Contains(out, want) {
			t.Errorf("cgpu %s: printed %s, want %s", args, out, want)
		}
	}
	if out := cgpu("doctor --help"); !strings.Contains(out, "Examples:") || strings.Contains(out, "--try") {
		t.Error(out)
	}
	files, err := engineFiles([]string{"docker=/a,b", "crio=/c=d"})
	if want := map[string]string{"docker": "/a,b", "crio": "/c=d"}; err != nil || !maps.Equal(files, want) {
		t.Errorf("%v, %v", files, err)
	}
}
