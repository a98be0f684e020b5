// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/sim"
)

// TestFullRunDir: where the run dir's filesystem is full, containers are refused in one line, what runs goes on, and once there is room
// again all is as before.
func TestFullRunDir(t *testing.T) {
	n := newNode(t)
	n.bundle(t, "tenant", tenant, fourGiB, onFirst)
	n.bundle(t, "brief", "cgpu-probe alloc 100MiB >/dev/null", fourGiB, onFirst)
	ballast := filepath.Join(n.runDir, "g", "ballast")
	// Pages that are left: from none to enough for some of what a start writes.
	pages := []int64{0, 3, 8}
	if os.Getenv("CGPU_FAULTS") == "all" {
		pages = []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64}
	}
	for _, left := range pages {
		must(t, n.runtime("create", "--bundle", n.path("tenant"), n.id("tenant")))
		must(t, n.runtime("start", n.id("tenant")))
		for _, args := range [][]string{
			{"cgpu", "set", n.id("tenant"), "--weight", "3", "--memory", "3GiB"},
			{"cgpu", "pause", n.id("tenant")},
			{"cgpu", "resume", n.id("tenant")},
			{"cgpu-runtime", "delete", "--force", n.id("tenant")},
			{"cgpu-runtime", "create", "--bundle", n.path("tenant"), n.id("tenant")},
			{"cgpu-runtime", "start", n.id("tenant")},
		} {
			fill(t, ballast, left*int64(os.Getpagesize()))
			if err := n.quick(args[0], args[1:]...); err != nil && strings.Count(err.Error(), "cgpu: ") > 1 {
				t.Errorf("%d pages left: not one line: %v", left, err)
			} else if err != nil {
				t.Logf("%d pages left: %.300v", left, err)
			}
		}
		must(t, n.neighbourWorks())
		_ = n.quick("cgpu-runtime", "delete", "--force", n.id("tenant"))
		must(t, os.Remove(ballast))
		for _, check := range []func() error{n.quiet, n.neighbourWorks, n.another, n.quiet, n.clean} {
			if err := n.eventually(check); err != nil {
				t.Fatalf("%d pages left: %v", left, err)
			}
		}
	}
}

// fill takes all of a file's filesystem but for so many bytes.
func fill(t *testing.T, file string, left int64) {
	t.Helper()
	f, err := os.Create(file)
	must(t, err)
	defer f.Close()
	for err = unix.ENOSPC; errors.Is(err, unix.ENOSPC); { // who runs may have taken some meanwhile
		var fs unix.Statfs_t
		must(t, unix.Fstatfs(int(f.Fd()), &fs))
		err = unix.Fallocate(int(f.Fd()), 0, 0, max(1, int64(fs.Bavail)*fs.Bsize-left))
	}
	must(t, err)
}

// TestHungDriver: where the driver answers nobody any more, no command of ours hangs with it, containers can be removed, and once it
// answers again all is as before.
func TestHungDriver(t *testing.T) {
	n := newNode(t)
	n.bundle(t, "tenant", tenant, fourGiB, onFirst)
	n.bundle(t, "brief", "cgpu-probe alloc 100MiB >/dev/null", fourGiB, onFirst)
	must(t, n.runtime("create", "--bundle", n.path("tenant"), n.id("tenant")))
	must(t, n.runtime("start", n.id("tenant")))
	delay := func(d time.Duration) {
		c, err := sim.Dial(filepath.Join(n.runDir, "sim.sock"), nil)
		must(t, err)
		defer c.Close()
		must(t, c.SetDelay(sim.Delay{Alloc: d, Free: d, Control: d, Other: d}))
	}
	const hung = 20 * time.Second
	delay(hung)
	for _, args := range [][]string{
		{"cgpu", "smi", "-o", "json"},
		{"cgpu", "set", n.id("tenant"), "--weight", "3", "--memory", "3GiB"},
		{"cgpu-runtime", "delete", "--force", n.id("tenant")},
		{"cgpu-runtime", "create", "--bundle", n.path("tenant"), n.id("tenant")},
		{"cgpu-runtime", "start", n.id("tenant")},
		{"cgpu-runtime", "delete", "--force", n.id("tenant")},
		{"cgpu", "gc"},
	} {
		begin := time.Now()
		err := n.quick(args[0], args[1:]...)
		t.Logf("%v: %v, %.200v", args, time.Since(begin).Round(time.Millisecond), err)
		if time.Since(begin) >= hung {
			t.Errorf("waits for the driver: %v", args)
		}
	}
	delay(0)
	for _, check := range []func() error{n.quiet, n.neighbourWorks, n.another, n.quiet, n.clean} {
		if err := n.eventually(check); err != nil {
			t.Fatal(fmt.Errorf("the driver answers again: %w", err))
		}
	}
}
