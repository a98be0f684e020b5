// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestHostMemory(t *testing.T) {
	for _, tt := range []struct {
		text string
		want quota.Bytes
		err  string
	}{
		{"MemTotal:       16384256 kB\nMemFree:         1024 kB\n", 16384256 * quota.KiB, ""},
		{"MemFree:         1024 kB\nMemTotal: 1 kB", quota.KiB, ""},
		{"MemFree:         1024 kB\n", 0, "no line MemTotal"},
		{"MemTotal:       16384256\n", 0, "no line MemTotal"},
		{"MemTotal:       many kB\n", 0, "MemTotal: "},
		{"MemTotal:       18014398509481984 kB\n", 0, "MemTotal: "},
		{"", 0, "no line MemTotal"},
	} {
		path := filepath.Join(t.TempDir(), "meminfo")
		if err := os.WriteFile(path, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := hostMemory(path)
		if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q: got %v, %v; want %v, %q", tt.text, got, err, tt.want, tt.err)
		}
	}
	if got, err := hostMemory(memInfo); err != nil || got < quota.MiB {
		t.Errorf("this machine: %v, %v", got, err)
	}
}
