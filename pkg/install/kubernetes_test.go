// SPDX-License-Identifier: Apache-2.0

package install

import (
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/pkg/engine"
)

// Who is killed between two edits leaves no engine with a runtime from which pods may take GPUs that nobody allocated.
func TestPodsFirst(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cgpu.toml")
	t.Setenv("CGPU_CONFIG", file)
	plan := engine.Plan{Edits: []engine.Edit{{Path: "/etc/containerd/config.toml", After: []byte("version = 3\n")}}}
	if err := joinPods(&plan, Target{Name: "containerd"}, engine.PodsAllocated, false); err != nil {
		t.Fatal(err)
	}
	if len(plan.Edits) != 2 || plan.Edits[0].Path != file {
		t.Errorf("edits %+v: want that of %s first", plan.Edits, file)
	}
}
