// SPDX-License-Identifier: Apache-2.0

package slurm

import "testing"

func TestAccountOf(t *testing.T) {
	for lines, want := range map[string]string{
		"7 physics\n":         "physics",
		"9 art\n7 physics\n":  "physics", // a held element of the array comes first
		"7  physics  \n":      "physics",
		"":                    "",
		"9 art\n":             "",
		"77 art\nphysics 7\n": "",
	} {
		if got, err := AccountOf(lines, "7"); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v, want %q", lines, got, err, want)
		}
	}
}

func TestCanEnd(t *testing.T) {
	for text, want := range map[string]bool{
		"0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n": false,
		"0::/system.slice/slurmd.service\n":                            true, // proctrack/linuxproc
		"5:devices:/slurm/uid_1/job_7/step_0/task_0\n0::/\n":           true, // v1
		"": true,
	} {
		if err := canEnd(text); (err == nil) != want {
			t.Errorf("%q: %v", text, err)
		}
	}
}
