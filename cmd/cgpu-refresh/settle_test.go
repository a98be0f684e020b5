// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

// TestSettled: with too few descriptors, which sudo passes on, this program would write a table without driver files, for the whole node.
func TestSettled(t *testing.T) {
	testenv.NeedsRoot(t, "limits above the caller's")
	if os.Getenv("REFRESH_SETTLED") == "" {
		cmd := exec.Command("sh", "-c", `ulimit -S -f 0; ulimit -S -t 50; exec "$0" -test.run '^TestSettled$'`, os.Args[0])
		cmd.Env = append(os.Environ(), "REFRESH_SETTLED=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	os.Args = []string{"cgpu-refresh", "-version"}
	main()
	for _, resource := range []int{unix.RLIMIT_FSIZE, unix.RLIMIT_CPU, unix.RLIMIT_NOFILE} {
		var l unix.Rlimit
		if err := unix.Getrlimit(resource, &l); err != nil || l.Cur < min(l.Max, 1<<19) {
			t.Errorf("limit %d: %+v, %v", resource, l, err)
		}
	}
}
