// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"fmt"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/api"
)

// TestUpgradeFewDescriptors: a guard that may have few descriptors more than it has, or none, becomes the other program or stays what it
// is, and serves its container in any case.
func TestUpgradeFewDescriptors(t *testing.T) {
	n := newNode(t)
	guard := n.neighbour.GuardPID
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", guard))
	must(t, err)
	most := 0
	for _, e := range list {
		fd, err := strconv.Atoi(e.Name())
		must(t, err)
		most = max(most, fd)
	}
	outcomes := map[string]int{}
	for limit := most + 16; limit > most-4; limit-- { // a limit that was set cannot be raised again
		program, err := n.otherGuard(outcomes["upgraded"] % 2) // another one than it is
		must(t, err)
		must(t, unix.Prlimit(guard, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(limit), Max: uint64(limit)}, nil))
		list, _ := n.upgrade("--program", program, n.id("neighbour"))
		if len(list) != 1 {
			t.Fatalf("limit %d: %+v", limit, list)
		}
		outcomes[list[0].Outcome]++
		t.Logf("%d: %+v", limit, list[0])
		if err := n.eventually(func() error {
			_, err := api.Ask(n.neighbour)
			return err
		}); err != nil {
			t.Fatalf("limit %d: the guard does not answer any more: %v; %+v", limit, err, list[0])
		}
	}
	if outcomes["upgraded"] == 0 || outcomes["failed"] == 0 || len(outcomes) != 2 {
		t.Errorf("%v: want upgrades, and refusals", outcomes)
	}
}
