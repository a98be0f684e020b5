// SPDX-License-Identifier: Apache-2.0

package view

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// What is used is known wherever the guard answers, which it does of a container that the engine has paused.
func TestUsageCells(t *testing.T) {
	for state, want := range map[string]bool{snapshot.StateRunning: true, snapshot.StateStarting: true, snapshot.StatePaused: true,
		snapshot.StateNoAnswer: false, snapshot.StateGuardDead: false, snapshot.StateNoPage: false, snapshot.StateGone: false} {
		x := snapshot.VGPU{State: state, Used: 512 * quota.MiB, Slice: quota.Slice{Limit: quota.GiB},
			Compute: &api.ComputeStatus{Exact: true, Utilization: 250}}
		used, _, util, _, known := usageCells(x)
		if known != want || (used == "512MiB") != want || (util == Percent(250)) != want {
			t.Errorf("%s: used %s, util %s, known %v", state, used, util, known)
		}
	}
}
