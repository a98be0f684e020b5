// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
)

// TestDomains: a node that names domains must have what they need; of another it is said whether it has.
func TestDomains(t *testing.T) {
	has := []device.Mount{{Host: "/usr/bin/nvidia-cuda-mps-control"}}
	team := []device.Domain{{Name: "a"}, {Name: "b"}}
	for name, c := range map[string]struct {
		mounts      []device.Mount
		domains     []device.Domain
		enforcement string
		sysctl      string // below /proc/sys, = and its value
		status      Status
		says        string
	}{
		"none, and could":     {mounts: has, status: OK, says: "none are named in cgpu.toml; the node could have some"},
		"some":                {mounts: has, domains: team, status: OK, says: "a, b"},
		"none, and could not": {status: Skip, says: "nvidia-cuda-mps-control is not there"},
		"no program":          {domains: team, status: Fail, says: "a, b: nvidia-cuda-mps-control is not there → install"},
		"no guard": {mounts: has, domains: team, enforcement: device.EnforcePreload, status: Fail,
			says: `enforcement = "preload" in cgpu.toml: no guard keeps domains apart → take`},
		"no user namespaces": {mounts: has, domains: team, sysctl: "user/max_user_namespaces=0", status: Fail, says: "is 0: a user without"},
		"AppArmor": {mounts: has, domains: team, sysctl: "kernel/apparmor_restrict_unprivileged_userns=1", status: Fail,
			says: "is 1: a user"},
		"user namespaces": {mounts: has, domains: team, sysctl: "user/max_user_namespaces=1", status: OK, says: "a, b"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PATH", t.TempDir())
			h := &Host{Root: t.TempDir(), loaded: true, table: &device.Table{Mounts: c.mounts}}
			h.table.Config.Domains, h.table.Config.Enforcement = c.domains, c.enforcement
			if path, value, ok := strings.Cut(c.sysctl, "="); ok {
				file := filepath.Join(h.Root, "proc/sys", path)
				if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			expect(t, name, checkDomains(h), c.status, c.says)
		})
	}
}
