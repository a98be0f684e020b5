// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestWrite(t *testing.T) {
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	dir := t.TempDir()
	path, other := filepath.Join(dir, "file"), filepath.Join(dir, "other")
	for _, left := range []string{"", "a killed writer's", "a link"} {
		switch left {
		case "":
		case "a link":
			must(t, os.Symlink(other, path+TempSuffix))
		default:
			must(t, os.WriteFile(path+TempSuffix, []byte(left), 0))
		}
		for _, mode := range []fs.FileMode{0o600, 0o644, 0o666} {
			write := Write
			if mode == 0o644 {
				write = WriteSynced
			}
			must(t, write(path, []byte(left+"x"), mode))
			content, err := os.ReadFile(path)
			must(t, err)
			st, err := os.Lstat(path)
			must(t, err)
			if string(content) != left+"x" || st.Mode() != mode {
				t.Errorf("%q: %q, %v; want mode %v", left, content, st.Mode(), mode)
			}
		}
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 {
		t.Errorf("left %v", list)
	}
}

// TestWriteFails: the old file stays, and nothing else.
func TestWriteFails(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, "folder") // which no file replaces
	must(t, os.Mkdir(folder, 0o700))
	if err := Write(folder, nil, 0o600); err == nil {
		t.Error("replaced a folder")
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 {
		t.Errorf("left %v", list)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
