// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

func TestFrozen(t *testing.T) {
	for name, test := range map[string]struct {
		files map[string]string
		want  bool
	}{
		"v2 frozen":  {map[string]string{"proc/7/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cgroup.events": "populated 1\nfrozen 1\n"}, true},
		"v2 running": {map[string]string{"proc/7/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cgroup.events": "populated 1\nfrozen 0\n"}, false},
		"v1 frozen": {map[string]string{"proc/7/cgroup": "3:cpu,cpuacct:/x\n2:freezer:/d:e\n",
			"sys/fs/cgroup/freezer/d:e/freezer.state": "FROZEN\n"}, true},
		"v1 thawed": {map[string]string{"proc/7/cgroup": "2:freezer:/d\n0::/d\n", "sys/fs/cgroup/freezer/d/freezer.state": "THAWED\n"}, false},
		"gone":      {nil, false},
	} {
		root := t.TempDir()
		for file, text := range test.files {
			path := filepath.Join(root, file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := frozen(root, 7); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	a := Answer{Status: api.Status{InitPID: 7}, Frozen: true}
	if got := StateOf(ledger.Record{}, a); got != StatePaused {
		t.Errorf("a frozen container is %s", got)
	}
}
