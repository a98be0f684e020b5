// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// lease takes a write lease on a file, as root in a container can on each file of root's that it sees.
func lease(t *testing.T, path string) error {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	return err
}

// TestHold: on what is held nobody gets a lease, and nothing that is in the way makes a guard wait.
func TestHold(t *testing.T) {
	dir := t.TempDir()
	held, free, leased := filepath.Join(dir, "held"), filepath.Join(dir, "free"), filepath.Join(dir, "leased")
	for _, path := range []string{held, free, leased} {
		if err := os.WriteFile(path, nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := lease(t, leased); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	fds := holdOpen([]string{held, leased, pipe, dir, filepath.Join(dir, "none"), "/dev/null"}, slog.New(slog.NewTextHandler(&log, nil)))
	if len(fds) != 1 {
		t.Errorf("%d are held, want one", len(fds))
	}
	if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), leased) {
		t.Errorf("want a word about the leased one only: %s", &log)
	}
	if err := lease(t, held); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a lease on what is held: %v", err)
	}
	if err := lease(t, free); err != nil {
		t.Errorf("this test proves nothing: %v", err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// TestHoldCgroup: what the guard reads of the container's cgroup while it runs is held.
func TestHoldCgroup(t *testing.T) {
	dir := t.TempDir()
	c := cgroups{procs: dir, cpu: dir}
	for _, name := range []string{"cgroup.procs", "cpu.stat"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	fds := holdOpen(c.leasable(), slog.New(slog.DiscardHandler))
	for _, name := range []string{"cgroup.procs", "cpu.stat"} {
		if err := lease(t, filepath.Join(dir, name)); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("a lease on %s: %v", name, err)
		}
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	if paths := (cgroups{}).leasable(); len(paths) != 0 {
		t.Errorf("of an unknown cgroup: %v", paths)
	}
}
