// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestLeaveCgroups: all hierarchies are left by their own way, and what cannot be left does not keep the others.
func TestLeaveCgroups(t *testing.T) {
	for name, c := range map[string]struct {
		own     string
		folders string // that there are
		entered string
	}{
		"v2":          {"0::/kubepods/pod1/x\n", ".", "."},
		"v2, at home": {"0::/\n", ".", ""},
		"v1": {"5:devices:/a\n4:cpu,cpuacct:/a\n3:freezer:/\n1:name=systemd:/a\n",
			"devices cpu,cpuacct freezer systemd", "devices cpu,cpuacct systemd"},
		"both":         {"4:memory:/a\n1:name=systemd:/a\n0::/b\n", "memory systemd unified", "memory systemd unified"},
		"one is not":   {"4:memory:/a\n3:pids:/a\n0::/b\n", "pids", "pids"},
		"odd":          {"x\n\n::\n", ".", "."},
		"of nobody's":  {"", ".", ""},
		"a name of v1": {"4:memory:/a:b\n", "memory unified", "memory"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, folder := range strings.Fields(c.folders) {
				if err := os.MkdirAll(filepath.Join(root, folder), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, folder, "cgroup.procs"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			own := filepath.Join(root, "own")
			if err := os.WriteFile(own, []byte(c.own), 0o600); err != nil {
				t.Fatal(err)
			}
			leaveCgroups(own, root)
			var entered []string
			for _, folder := range strings.Fields(c.folders) {
				if text(t, filepath.Join(root, folder, "cgroup.procs")) == strconv.Itoa(os.Getpid()) {
					entered = append(entered, folder)
				}
			}
			if got := strings.Join(entered, " "); got != c.entered {
				t.Errorf("entered %s, want %s", got, c.entered)
			}
		})
	}
}

// TestArbiterLog: however many arbiters a GPU has had, their log has a bound.
func TestArbiterLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "arbiter-x.log")
	for range 10 {
		log := arbiterLog(path)
		for i := range 3 * maxLike {
			log.Info("a line " + strings.Repeat("x", 2000) + strconv.Itoa(i))
		}
		log.close()
	}
	for _, file := range []string{path, path + ".old"} {
		if n := len(text(t, file)); n == 0 || n > 2*maxLog {
			t.Errorf("%s has %d bytes", file, n)
		}
	}
}
