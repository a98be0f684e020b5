// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
)

// frozen says whether the processes of a container stand still, which its first process is of: docker pause and runc pause freeze its
// cgroup. root is /.
func frozen(root string, pid int) bool {
	paths, err := cgroups.ParseCgroupFile(filepath.Join(root, "proc", strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return false
	}
	for controller, path := range paths {
		if controller == "" && holds(filepath.Join(root, "sys/fs/cgroup", path, "cgroup.events"), "frozen 1") ||
			controller == "freezer" && holds(filepath.Join(root, "sys/fs/cgroup/freezer", path, "freezer.state"), "FROZEN") {
			return true
		}
	}
	return false
}

// holds says whether a file has a line.
func holds(path, line string) bool {
	text, err := os.ReadFile(path)
	return err == nil && strings.Contains("\n"+string(text)+"\n", "\n"+line+"\n")
}
