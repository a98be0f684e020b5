// SPDX-License-Identifier: Apache-2.0

package inside

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Somebody who renames folders all the time ends no start, and does not hold it for ever.
func TestRetry(t *testing.T) {
	for _, tt := range []struct {
		fail  error
		times int // how often it fails
		calls int
		err   bool
	}{
		{unix.EAGAIN, 0, 1, false},
		{unix.EAGAIN, 5, 6, false},
		{unix.EAGAIN, 20, 21, false},
		{unix.EINTR, 5, 6, false},
		{unix.EAGAIN, 1 << 30, tries, true},
		{unix.ENOENT, 1 << 30, 1, true},
	} {
		calls := 0
		err := retry(func() error {
			if calls++; calls > tt.times {
				return nil
			}
			return tt.fail
		})
		if calls != tt.calls || (err != nil) != tt.err || err != nil && !errors.Is(err, tt.fail) {
			t.Errorf("%v %d times: %v after %d calls", tt.fail, tt.times, err, calls)
		}
	}
}

func TestOpenAndRead(t *testing.T) {
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, text string) { must(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)) }
	write("text", "hello")
	write("empty", "")
	write("large", strings.Repeat("x", 101))
	must(os.Mkdir(filepath.Join(dir, "folder"), 0o755))
	must(unix.Mkfifo(filepath.Join(dir, "pipe"), 0o644))
	must(os.Symlink("/text", filepath.Join(dir, "link")))
	must(os.Symlink("../../../../../../../../etc/passwd", filepath.Join(dir, "out")))
	write("leased", "hello")
	leased, err := os.Open(filepath.Join(dir, "leased"))
	must(err)
	defer leased.Close()
	_, err = unix.FcntlInt(leased.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	must(err)
	root, err := unix.Open(dir, unix.O_PATH, 0)
	must(err)
	defer unix.Close(root)
	for name, want := range map[string]struct{ text, err string }{
		"/text":   {"hello", ""},
		"link":    {"hello", ""},
		"../text": {"hello", ""},
		"empty":   {"", ""},
		"large":   {"", "no regular file of at most 100 bytes"},
		"folder":  {"", "no regular file"},
		"pipe":    {"", "no regular file"},
		"leased":  {"", "resource temporarily unavailable"},
		"none":    {"", "open none: no such file"},
		"out":     {"", "open out: no such file"},
	} {
		text, err := read(root, name)
		if string(text) != want.text || (err != nil) != (want.err != "") || err != nil && !strings.Contains(err.Error(), want.err) {
			t.Errorf("%s: %q, %v, want %q", name, text, err, want)
		}
	}
}

func read(root int, name string) ([]byte, error) {
	fd, err := Open(root, name, unix.O_PATH, SameMount)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return Read(fd, 100)
}
