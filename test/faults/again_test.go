// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestNumberAgain: who traces goes on although the number of the first process, which has ended, is given to others of its tree.
func TestNumberAgain(t *testing.T) {
	testenv.NeedsRoot(t, "the next process' number")
	busybox, file := testenv.NeedsProgram(t, "busybox"), filepath.Join(t.TempDir(), "over")
	// The loop has a session of its own: a number is not free as long as it is a session's.
	const script = `export R=$$; $0 setsid $0 sh -c 'while kill -0 $R 2>/dev/null; do $0 usleep 1000; done
		for i in 1 2 3; do
			until echo $((R-1)) >/proc/sys/kernel/ns_last_pid; $0 true & [ $! = $R ]; do wait; done
			wait
		done
		echo over >$1' $0 $1 &`
	r := new(watch).run(patience, os.Environ(), os.DevNull, busybox, "sh", "-c", script, busybox, file)
	if r.code != 0 {
		t.Fatal(r)
	}
	n := &node{}
	must(t, n.eventually(func() error {
		_, err := os.Stat(file)
		return err
	}))
}
