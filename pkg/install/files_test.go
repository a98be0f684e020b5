// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/engine"
)

// TestApplyUndoes: when the second of two files cannot be written, the first is as it was, and no backup is left.
func TestApplyUndoes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etc")
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := os.MkdirAll(filepath.Join(b, "c"), 0o755); err != nil { // cannot be replaced by a file
		t.Fatal(err)
	}
	if err := os.WriteFile(a, []byte("one"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := apply([]engine.Edit{
		{Path: a, Before: []byte("one"), After: []byte("two")},
		{Path: b, After: []byte("new")},
	})
	if err == nil {
		t.Error("a folder was replaced")
	}
	if text, err := os.ReadFile(a); err != nil || string(text) != "one" {
		t.Errorf("%q, %v", text, err)
	}
	var left []string
	for _, in := range []string{dir, filepath.Dir(dir)} {
		entries, err := os.ReadDir(in)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			left = append(left, e.Name())
		}
	}
	if want := []string{"a", "b", "etc"}; !slices.Equal(left, want) {
		t.Errorf("left: %q, want %q", left, want)
	}
}

func TestWriteError(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&fs.PathError{Op: "open", Path: "/x/.tmp", Err: syscall.EROFS},
			"/x/f: read-only file system: make it writable, or make the change where the file comes from"},
		{&fs.PathError{Op: "open", Path: "/x/.tmp", Err: syscall.EACCES}, "/x/f: permission denied: run as root"},
		{&os.LinkError{Op: "rename", Old: "/x/.tmp", New: "/x/f", Err: syscall.EBUSY}, "/x/f: device or resource busy: it is a mount of its own"},
		{errors.New("odd"), "/x/f: odd"},
	} {
		if got := writeError("/x/f", tt.err).Error(); !strings.HasPrefix(got, tt.want) {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

// TestOutside: new files are not made in the folder that an engine reads.
func TestOutside(t *testing.T) {
	dir := t.TempDir()
	etc := filepath.Join(dir, "etc")
	if err := os.Mkdir(etc, 0o755); err != nil {
		t.Fatal(err)
	}
	if got := outside(etc); got != dir {
		t.Errorf("new files are made in %s, want %s", got, dir)
	}
}
