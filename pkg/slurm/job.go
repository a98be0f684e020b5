// SPDX-License-Identifier: Apache-2.0

package slurm

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
)

// AccountOf finds a job's account in lines of squeue, "JOB ACCOUNT". Where the number is an array's there is a line for each element.
func AccountOf(lines, job string) (string, error) {
	for line := range strings.Lines(lines) {
		if number, account, ok := strings.Cut(strings.TrimSpace(line), " "); ok && number == job {
			return strings.TrimSpace(account), nil
		}
	}
	return "", errors.New("it does not know the job")
}

// CanEnd refuses a task that Slurm could not end any more if it were moved into a cgroup of its own: proctrack/cgroup of cgroup v2 signals
// the processes of the folder task_N alone, not of those below it (cgroup_v2.c, _get_task_pids).
func CanEnd(pid int) error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return fmt.Errorf("slurm: %w", err)
	}
	return canEnd(string(text))
}

func canEnd(cgroups string) error {
	for line := range strings.Lines(cgroups) {
		dir, v2 := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if v2 && strings.HasPrefix(path.Base(dir), "task_") && strings.Contains(dir, "/step_") {
			return errors.New("ProctrackType=proctrack/cgroup on cgroup v2 could not end a task with a slice: use proctrack/linuxproc (slurm.conf)")
		}
	}
	return nil
}
