// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestOpenProgram: a guard does not become what others than root could change, nor what is no program.
func TestOpenProgram(t *testing.T) {
	testenv.NeedsRoot(t, "it gives files to others")
	dir := t.TempDir()
	write := func(name string, mode os.FileMode, uid, gid int) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := write("good", 0o755, 0, 0)
	link := filepath.Join(dir, "link")
	pipe := filepath.Join(dir, "pipe")
	if err := os.Symlink(good, link); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(pipe, 0o755); err != nil {
		t.Fatal(err)
	}
	const others = "others than root can write it"
	for path, want := range map[string]string{
		good: "", link: "", write("private", 0o700, 0, 0): "", write("group", 0o775, 0, 0): "",
		write("theirs", 0o755, 1000, 0): others, write("foreign group", 0o775, 0, 1000): others, write("all", 0o757, 0, 0): others,
		write("text", 0o644, 0, 0): "is no program", dir: "is no program", pipe: "is no program", filepath.Join(dir, "none"): "no such file",
	} {
		f, same, err := openProgram(path)
		if same || want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: same %v, %v; want %q", path, same, err, want)
		}
		if err == nil {
			f.Close()
		}
	}
	f, same, err := openProgram("/proc/self/exe")
	if err != nil || !same {
		t.Errorf("this program: %v, %v", same, err)
	} else {
		f.Close()
	}
}
