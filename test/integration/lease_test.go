// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
)

// TestLeases: a tenant takes leases on all files that were put into its container, and nobody outside meets one of them: neither another
// container's start and commands, nor the node's tools, nor its own guard.
func TestLeases(t *testing.T) {
	for _, m := range []mode{guarded, preloaded} {
		t.Run(m.name, func(t *testing.T) {
			withConfig(t, m.config...)
			noTrace(t)
			hostile := container{env: sizeOf("256MiB"), cmd: []string{"cgpu-probe", "lease"}}.start(t)
			said := func() string { r := lab.Run(nil, "docker", "logs", hostile); return r.Stdout }
			eventually(t, 10*time.Second, func() string {
				if out := said(); !strings.Contains(out, "ready=1") {
					return "not ready: " + out
				}
				return ""
			})
			// Else this test proves nothing.
			if out := said(); !strings.Contains(out, "lease=/etc/ld.so.preload") {
				t.Fatalf("it got no lease even on a file of its own: %s", out)
			}
			other := container{env: sizeOf("256MiB"), cmd: []string{"sleep", "600"}}.start(t)
			for range 2 {
				if r := execIn(other, "cgpu-probe-libc", "self"); r.Code != 0 || !strings.Contains(r.Stdout, "limiter=yes") {
					t.Error(r)
				}
			}
			if r := execIn(other, "cgpu-probe", "hostile", "lease"); r.Code != 0 {
				t.Error(r)
			}
			cgpu(t, "smi")
			cgpu(t, "inspect", hostile)
			time.Sleep(1500 * time.Millisecond) // of the guard's looks at its cgroup
			for line := range strings.Lines(said()) {
				line = strings.TrimSpace(line)
				file, broken := strings.CutPrefix(line, "broken=")
				// A page in preload mode is asked for without waiting (package page); nobody holds the real driver's files open there.
				if broken && !(m.preload && (file == "/run/cgpu/vgpu" || driverFile(file))) {
					t.Errorf("somebody had to wait for the tenant: %s", line)
				}
			}
		})
	}
}

func driverFile(path string) bool {
	return lab.Driver != device.DriverSim && strings.HasPrefix(filepath.Base(path), "lib")
}

// preloadConfined: what a tenant does to the page that it may write neither takes memory of the node nor counts there.
func preloadConfined(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("256MiB"), cmd: []string{"sleep", "600"}}.start(t)
	r, ok := recordOf(t, id)
	if !ok {
		t.Fatal("no record")
	}
	if r := execIn(id, "busybox", "dd", "if=/dev/zero", "of=/run/cgpu/vgpu", "bs=1M", "count=16"); r.Code == 0 {
		t.Errorf("16 MiB went into the page: %s", r)
	}
	if r := execIn(id, "busybox", "chmod", "4755", "/run/cgpu/vgpu"); r.Code != 0 {
		t.Fatal(r)
	}
	var size int64
	_ = filepath.Walk(filepath.Dir(r.Page), func(_ string, info os.FileInfo, err error) error {
		if err == nil {
			size += info.Size()
		}
		return nil
	})
	if size > 1<<20 {
		t.Errorf("a tenant has %d bytes of the host's memory", size)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(r.Page, &fs); err != nil || fs.Flags&unix.ST_NOSUID == 0 {
		t.Errorf("%s is set-uid, on a file system where that counts (flags %#x, %v)", r.Page, fs.Flags, err)
	}
}
