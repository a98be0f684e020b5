// SPDX-License-Identifier: Apache-2.0

package node

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/node/nodetest"
)

func TestFindGPU(t *testing.T) {
	table := nodetest.Table(t)
	for name, want := range map[string]int{"0": 0, "1": 1, nodetest.T4: 0, strings.ToUpper(nodetest.H200): 1, "GPU-1": 1, "gpu-0000": 0} {
		if g, err := FindGPU(table, name); err != nil || g.Index != want {
			t.Errorf("%q: GPU %d, %v", name, g.Index, err)
		}
	}
	for _, name := range []string{"", "2", "-1", "GPU-", "G", "1000", nodetest.H200 + "0", "all"} {
		if g, err := FindGPU(table, name); err == nil || !strings.Contains(err.Error(), "there is none") {
			t.Errorf("%q: GPU %d, %v", name, g.Index, err)
		}
	}
	table.GPUs[0].UUID = "GPU-10000000-0000-0000-0000-00000000000a"
	if g, err := FindGPU(table, "GPU-1"); err == nil || !strings.Contains(err.Error(), "more than one UUID") {
		t.Errorf("ambiguous: GPU %d, %v", g.Index, err)
	}
}
