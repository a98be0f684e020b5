// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// BenchmarkStart compares a call that passes through with the same program without us, and with the least that a Go
// program can do in our place. See docs/measurements.md.
func BenchmarkStart(b *testing.B) {
	bin := b.TempDir()
	low := filepath.Join(bin, "runc")
	program, err := os.ReadFile("/bin/true")
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(low, program, 0o755); err != nil {
		b.Fatal(err)
	}
	source := filepath.Join(b.TempDir(), "floor")
	if err := os.Mkdir(source, 0o755); err != nil {
		b.Fatal(err)
	}
	for name, text := range map[string]string{
		"go.mod":  "module floor\n",
		"main.go": "package main\n\nimport \"syscall\"\n\nfunc main() { syscall.Exec(\"" + low + "\", []string{\"runc\"}, syscall.Environ()) }\n",
	} {
		if err := os.WriteFile(filepath.Join(source, name), []byte(text), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	for _, way := range []struct{ name, path string }{
		{"runtime-alone", low},
		{"go-execve", build(b, bin, source)},
		{"cgpu-runtime", build(b, bin, ".")},
	} {
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				cmd := exec.Command(way.path, "state", "x")
				cmd.Env = []string{"PATH=" + bin, "CGPU_RUN_DIR=" + bin}
				if err := cmd.Run(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
