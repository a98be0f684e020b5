// SPDX-License-Identifier: Apache-2.0

package tally

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestResume: who goes on in a process' place counts on in the same file, under the same lock.
func TestResume(t *testing.T) {
	dir := t.TempDir()
	f, err := Create(dir, "n", []string{"GPU-1"})
	if err != nil {
		t.Fatal(err)
	}
	f.Calls.Add(5)
	fd, err := syscall.Dup(f.FD())
	if err != nil {
		t.Fatal(err)
	}
	next, err := Resume(fd, dir, "n")
	if err != nil {
		t.Fatal(err)
	}
	next.Calls.Add(2)
	f.f.Close() // the lock is next's
	other, err := os.Open(filepath.Join(dir, folder, "n"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if v, err := values(other); err != nil || v.Calls != 7 {
		t.Errorf("%+v, %v", v, err)
	}
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		t.Error("the file is not locked")
	}
	next.Release()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Error(err)
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Resume(int(null.Fd()), dir, "n"); err == nil {
		t.Error("another file is taken")
	}
}
