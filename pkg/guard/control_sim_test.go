// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/sim"
)

// TestSimControls holds the guard's copy of the simulated driver's controls to pkg/sim.
func TestSimControls(t *testing.T) {
	for cmd, size := range map[uint32]int{sim.CtrlSubmit: sim.SubmitSize, sim.CtrlWork: sim.WorkSize} {
		if ctl, ok := simControl(cmd); !ok || ctl.Size != size {
			t.Errorf("%#x: %+v, want %d bytes", cmd, ctl, size)
		}
	}
}
