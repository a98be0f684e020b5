// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestLinksLittle holds the program to what lets it start in under two milliseconds, for every container of the node.
func TestLinksLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		for _, heavy := range []string{"go-nvml", "logrus", "log/slog", "toml", "urfave", "crypto/rand", "os/exec", "os/user", "flag"} {
			if strings.Contains(dep, heavy) {
				t.Errorf("links %s", dep)
			}
		}
		if dep == "net" || strings.HasPrefix(dep, "net/") {
			t.Errorf("links %s", dep)
		}
	}
	info, err := os.Stat(build(t, t.TempDir(), "."))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() >= 3e6 {
		t.Errorf("%d bytes, want less than 3 MB", info.Size())
	}
}

// build compiles the package in folder pkg as make does and returns the program's path in dir.
func build(t testing.TB, dir, pkg string) string {
	t.Helper()
	abs, err := filepath.Abs(pkg)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, filepath.Base(abs))
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, ".")
	cmd.Dir = abs
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	return path
}
