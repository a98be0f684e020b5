// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestHostile: everything cgpu-probe knows to try against its guard, while a neighbour holds memory and keeps it.
func TestHostile(t *testing.T) {
	ways := []struct {
		name  string
		opts  []string
		tries string // of each race: the full number once, since the races do not depend on the way
	}{
		{"default", nil, "50000"},
		{"unconfined", []string{"--security-opt", "seccomp=unconfined"}, "500"},
		{"unprivileged user", []string{"--user", "1000", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"}, "500"},
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			noTrace(t)
			neighbour := holding(t, container{env: sizeOf("512MiB")}, "200MiB")
			before := driverUsed(t)
			c := container{env: sizeOf("256MiB"), opts: way.opts, cmd: []string{"cgpu-probe", "hostile", "all", "--tries", way.tries}}
			r := lab.RunFor(10*time.Minute, nil, c.args("--rm")...) // it takes two
			if r.Code != 0 {
				t.Error(r)
			}
			t.Logf("%v\n%s", r.Took.Round(time.Second), r.Stdout)
			if got := execIn(neighbour, "cgpu-probe", "alloc", "200MiB"); got.Code != 0 {
				t.Errorf("the neighbour suffers: %s", got)
			}
			eventually(t, 2*time.Second, func() string {
				if after := driverUsed(t); after != before {
					return fmt.Sprintf("the driver holds %v, before the attacks %v", after, before)
				}
				return ""
			})
		})
	}
}

// TestHostileAlone: cases for a guard that has not seen another's attacks. It forgives one call in an hour, and after that is harder to
// fool.
func TestHostileAlone(t *testing.T) {
	for _, name := range []string{"toctou-root-file", "toctou-root-rights"} {
		t.Run(name, func(t *testing.T) {
			noTrace(t)
			if r := (container{env: sizeOf("256MiB"), cmd: []string{"cgpu-probe", "hostile", name, "--tries", "500"}}).try(t); r.Code != 0 {
				t.Error(r)
			}
		})
	}
}

// TestStolenSpace: UVM of one container is not given the address spaces and channels of another one, whatever that one shares, and the
// answer does not tell whether they exist. (The driver itself gives what is shared to all, or to the same user.)
func TestStolenSpace(t *testing.T) {
	noTrace(t)
	for _, share := range [][]string{nil, {"--share", "1"}, {"--share", "2"}, {"--share", "1", "--client"}, {"--share", "2", "--client"}} {
		t.Run(strings.Join(share, " "), func(t *testing.T) {
			victim := container{env: sizeOf("256MiB"), cmd: append([]string{"cgpu-probe", "vas-hold"}, share...)}.ready(t)
			thief := container{env: sizeOf("256MiB"), cmd: []string{"cgpu-probe", "steal"}}
			for _, handle := range regexp.MustCompile("(?m)^(client|vaspace|channel)=(.*)$").FindAllStringSubmatch(docker(t, "logs", victim), -1) {
				thief.cmd = append(thief.cmd, handle[2]) // in the order in which steal wants them
			}
			if r := thief.try(t); r.Code != 0 {
				t.Error(r)
			}
		})
	}
}

// TestBooksAgree: what the guards have charged and what the driver has given out are the same to the byte, while memory
// is held in several ways, and after. (A CUDA context's hidden memory is charged by a set amount, so none is made here.)
func TestBooksAgree(t *testing.T) {
	noTrace(t)
	if driverUsed(t) != 0 {
		t.Fatal("the driver is not empty at the start")
	}
	empty := quota.Bytes(0)
	if lab.Driver != device.DriverSim {
		empty = cardUsed(t)
	}
	sizes := []string{"123MiB", "77MiB", "1MiB"}
	var ids []string
	for _, size := range sizes {
		ids = append(ids, holding(t, container{env: sizeOf("512MiB")}, size))
	}
	for _, id := range ids {
		docker(t, "exec", "-d", id, "cgpu-probe", "hold", "33MiB")
		execIn(id, "cgpu-probe", "export")
		execIn(id, "cgpu-probe", "dup")
	}
	agree := func() string {
		var sum quota.Bytes
		for _, id := range ids {
			sum += smiOf(t, id).Used
		}
		driver, slack := driverUsed(t), quota.Bytes(0)
		if lab.Driver != device.DriverSim {
			driver, slack = cardUsed(t)-empty, 16*quota.MiB
		}
		if driver > sum+slack || sum > driver+slack || sum < (123+77+1+3*33)*quota.MiB {
			return fmt.Sprintf("guards have charged %d, the driver has given out %d", sum, driver)
		}
		return ""
	}
	eventually(t, 5*time.Second, agree)
}
