// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// TestDomainSeatAnew: a process of a member's that outlives its record has its seat's folder still, and comes to nothing by it when the
// next member has the seat.
func TestDomainSeatAnew(t *testing.T) {
	domainNode(t)
	first := member(t, "0:0")
	first.has(t, "part")
	p := userProgram(t, "cgpu-probe")
	dir := filepath.Dir(p)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	script := `setsid sh -c 'touch "$0/waits"; until [ -e "$0/go" ]; do sleep 0.05; done
		"$0/cgpu-probe" mps-client --size 10MiB --hold 0 >"$0/said" 2>&1; touch "$0/done"' "$0" & sleep 1000`
	startRun(t, "1GiB", "--domain", "team", "--threads", "5", "--user", "1234:1235", "--", "/bin/sh", "-c", script, dir)
	there := func(name string) func() string {
		return func() string {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				return err.Error()
			}
			return ""
		}
	}
	eventually(t, 20*time.Second, there("waits"))
	former := inSeat(t, 2)
	_ = syscall.Kill(former.GuardPID, syscall.SIGKILL)
	_ = syscall.Kill(former.InitPID, syscall.SIGKILL)
	eventually(t, 20*time.Second, func() string {
		if cgpu(t, "gc"); inSeat(t, 2).Nonce == former.Nonce {
			return "the former member's record is there"
		}
		return ""
	})
	next := member(t, "0:0", "--threads", "77")
	if part := next.has(t, "part"); part != 77 || inSeat(t, 2).Threads != 77 {
		t.Fatalf("the next member has %d %%, in seat 2 is %+v", part, inSeat(t, 2))
	}
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, there("done"))
	said, err := os.ReadFile(filepath.Join(dir, "said"))
	if err != nil || strings.Contains(string(said), "part=") || !strings.Contains(string(said), "control") {
		t.Errorf("a process of the former member speaks by the next one's seat: %s, %v", said, err)
	}
}

// inSeat is the record of the member that has a seat.
func inSeat(t *testing.T, seat int) (found ledger.Record) {
	t.Helper()
	for _, r := range records(t) {
		if r.IsMember() && r.Seat == seat {
			found = r
		}
	}
	return found
}
