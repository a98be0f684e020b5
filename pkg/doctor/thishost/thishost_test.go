// SPDX-License-Identifier: Apache-2.0

package thishost

import (
	"os"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// TestFare: doctor takes the states as smi shows them.
func TestFare(t *testing.T) {
	n := nodetest.New(t)
	table, err := device.Load(n.Dir)
	if err != nil {
		t.Fatal(err)
	}
	vgpu := []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	list := containers(table, []ledger.Record{
		{ID: "gone", VGPUs: vgpu, LauncherPID: 1 << 29},
		{ID: "starting", VGPUs: vgpu, LauncherPID: os.Getpid(), LauncherStart: start},
		{ID: "orphan", Name: "web", VGPUs: vgpu, GuardPID: 1 << 29, InitPID: os.Getpid(), InitStart: start},
	})
	want := []doctor.Container{{Name: "gone", State: snapshot.StateGone, Dead: true}, {Name: "starting", State: snapshot.StateStarting},
		{Name: "orphan (web)", State: snapshot.StateGuardDead, Bad: true}}
	for i := range want {
		if list[i] != want[i] {
			t.Errorf("got %+v, want %+v", list[i], want[i])
		}
	}
}
