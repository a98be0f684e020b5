// SPDX-License-Identifier: Apache-2.0

package device

import (
	"os"
	"path/filepath"
	"testing"
)

func TestLimiterNear(t *testing.T) {
	prefix := t.TempDir()
	bin := filepath.Join(prefix, "bin")
	put := func(dir string) string {
		path := filepath.Join(prefix, dir, "libcgpu.so")
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, nil, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	check := func(want string) {
		t.Helper()
		if got := limiterNear(bin); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	check("")
	if err := os.MkdirAll(filepath.Join(bin, "libcgpu.so"), 0o755); err != nil { // a folder is none
		t.Fatal(err)
	}
	check("")
	check(put("lib/cgpu"))
	if err := os.Remove(filepath.Join(bin, "libcgpu.so")); err != nil {
		t.Fatal(err)
	}
	check(put("bin"))
}
