// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/spec"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// inRoot calls f on a thread that has a root of its own.
func inRoot(t *testing.T, folders []string, f func()) {
	t.Helper()
	r, dir := Root{Folders: folders}, t.TempDir()
	node := device.Node{Path: "/dev/nvidiactl", HostPath: "/dev/null", Major: 1, Minor: 3}
	p := spec.Plan{DomainServer: true, Common: []device.Node{node}}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and no unlock: the thread ends with its mounts
		done <- func() error {
			for _, step := range []func() error{
				func() error { return newNamespaces(r.namespaces()) },
				func() error { return mountDev(p, dir) },
				func() error { return r.build(filepath.Join(dir, stageName)) },
				func() error { return mountLimiter(spec.Plan{}) },
				r.enter,
			} {
				if err := step(); err != nil {
					return err
				}
			}
			f()
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestRoot: a run with a root of its own has programs of the host's and the folders that it is to have, and no other files; it writes where
// that has a bound.
func TestRoot(t *testing.T) {
	testenv.NeedsRoot(t, "a mount namespace")
	driver, secret := filepath.Join(t.TempDir(), "driver"), filepath.Join(t.TempDir(), "secret")
	if err := errors.Join(os.Mkdir(driver, 0o755), os.WriteFile(driver+"/program", []byte("#!/bin/sh\necho it runs\n"), 0o755),
		os.WriteFile(secret, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	inRoot(t, []string{driver, "/usr/bin", driver}, func() {
		if out, err := exec.Command(driver + "/program").CombinedOutput(); string(out) != "it runs\n" {
			t.Errorf("a program: %q, %v", out, err)
		}
		for _, path := range []string{secret, "/etc/passwd", "/home", "/var", "/root"} {
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s of the host's is seen: %v", path, err)
			}
		}
		for path, want := range map[string][]string{"/run": {"cgpu"}, "/run/cgpu": nil,
			"/dev": append(slices.Clone(plainNodes), "nvidiactl", "shm")} {
			slices.Sort(want)
			if got := names(path); !slices.Equal(got, want) {
				t.Errorf("%s has %v, want %v", path, got, want)
			}
		}
		for _, dir := range []string{"/", "/usr", "/dev", "/run", "/run/cgpu", "/etc", driver} {
			if err := os.WriteFile(filepath.Join(dir, "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("root writes in %s: %v", dir, err)
			}
		}
		for _, dir := range []string{"/tmp", "/dev/shm"} {
			if err := fill(dir); !errors.Is(err, unix.ENOSPC) {
				t.Errorf("%s: %v: want a bound", dir, err)
			}
		}
		if text, err := os.ReadFile("/proc/thread-self/net/dev"); err != nil || strings.Count(string(text), ":") != 1 {
			t.Errorf("its network: %s, %v", text, err)
		}
	})
	if _, err := os.Stat(secret); err != nil {
		t.Errorf("the host: %v", err)
	}
}

func names(dir string) (list []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// fill makes files until it fails.
func fill(dir string) error {
	for i := range 1000 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// TestRootFolderAbove: of two folders of the driver's one may be in the other, in any order.
func TestRootFolderAbove(t *testing.T) {
	testenv.NeedsRoot(t, "a mount namespace")
	driver := filepath.Join(t.TempDir(), "driver")
	if err := errors.Join(os.MkdirAll(driver+"/bin", 0o755), os.WriteFile(driver+"/library", nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, folders := range [][]string{{driver + "/bin", driver}, {driver, driver + "/bin"}} {
		inRoot(t, folders, func() {
			if got := names(driver); !slices.Equal(got, []string{"bin", "library"}) {
				t.Errorf("%v: it has %v", folders, got)
			}
		})
	}
}
