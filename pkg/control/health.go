// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"io"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
)

// ClearHealth forgets what was reported of GPUs, and prints what that was.
func ClearHealth(w io.Writer, runDir string, t *device.Table, gpus []device.GPU) error {
	for _, g := range gpus {
		cleared, err := health.Clear(runDir, g.UUID)
		if err != nil {
			return err
		}
		if len(cleared) == 0 {
			fmt.Fprintf(w, "GPU %d: nothing was reported of it\n", g.Index)
			continue
		}
		before := health.State{GPUs: map[string][]health.Fault{g.UUID: cleared}}
		if err := health.Tell(runDir, t, before, health.State{}); err != nil {
			return err
		}
		fmt.Fprintf(w, "GPU %d: forgotten: %s\n", g.Index, before.Why(g.UUID))
	}
	return nil
}
