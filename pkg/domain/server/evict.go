// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// NVIDIA's server is a child of its daemon's and outlives it. It ends with its run, by the run's guard; where that was killed too, here.

// Evict kills what is left of servers that no record names: nothing of theirs is served, and what they hold of the GPU nobody counts. It
// returns how many processes there were. Other runs are not its to end, nor those of another run dir.
func Evict(runDir string) (n int, err error) {
	folders, err := filepath.Glob(filepath.Join(root(runDir), "*", "*"))
	if err != nil || len(folders) == 0 {
		return 0, err
	}
	runs := hostrun.Cgroups() // before the records: who makes one has a record by then
	records, err := ledger.Open(runDir).List()
	if err != nil {
		return 0, err
	}
	for dir, nonce := range runs {
		if slices.ContainsFunc(records, func(r ledger.Record) bool { return r.Nonce == nonce }) {
			continue
		}
		for _, pid := range processesIn(dir) {
			if user, ok := userOf(pid); ok && isServers(user) && has(pid, folders) {
				n++
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	return n, nil
}

// has reports that a process has one of the folders as its pipes.
func has(pid int, folders []string) bool {
	its, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "root", page.PipesPath))
	return err == nil && slices.ContainsFunc(folders, func(path string) bool {
		one, err := os.Stat(path)
		return err == nil && os.SameFile(one, its)
	})
}

// processesIn are those of a cgroup.
func processesIn(dir string) (pids []int) {
	text, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	for _, field := range strings.Fields(string(text)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// heldUsers are the users of servers that a process has, be it one that is just ending.
func heldUsers() (map[int]bool, error) {
	held := map[int]bool{}
	all, err := os.ReadDir("/proc")
	for _, e := range all {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if user, ok := userOf(pid); ok && isServers(user) {
				held[user] = true
			}
		}
	}
	return held, err
}

// userOf is the real user of a process. Whose /proc/PID is says nothing of one that is not dumpable.
func userOf(pid int) (user int, ok bool) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if numbers, found := strings.CutPrefix(lines.Text(), "Uid:"); found {
			_, err := fmt.Sscan(numbers, &user)
			return user, err == nil
		}
	}
	return 0, false
}
