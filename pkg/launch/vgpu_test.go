// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestVGPUPage(t *testing.T) {
	table := &device.Table{Driver: device.DriverSim,
		Nodes: []device.Node{{Path: "/dev/nvidiactl", Major: 195, Minor: 255}, {Path: "/dev/nvidia-uvm", Major: 510}}}
	for i := range 3 {
		table.GPUs = append(table.GPUs, device.GPU{Index: i, Minor: 7 - i, UUID: fmt.Sprint("GPU-", i), BusID: fmt.Sprintf("0001:a%d:01.0", i)})
	}
	record := ledger.Record{
		Native: []string{"GPU-2"},
		VGPUs: []ledger.VGPU{{UUID: "GPU-1", Slice: quota.Slice{Limit: quota.GiB, Spill: quota.MiB, Share: quota.Share{Weight: 2}}},
			{UUID: "GPU-0", Slice: quota.Slice{Limit: quota.MiB, Share: quota.Share{Weight: 1}}}},
	}
	want := []page.VGPU{
		{Minor: 7, GPUID: 1<<16 | 0xa001, Weight: 1, Limit: uint64(quota.MiB)},
		{Minor: 6, GPUID: 1<<16 | 0xa101, Weight: 2, Limit: uint64(quota.GiB), Spill: uint64(quota.MiB)},
		{Minor: 5, GPUID: 1<<16 | 0xa201, Flags: page.VGPUNative},
	}
	for _, test := range []struct {
		config device.Config
		flags  uint32
	}{
		{device.Config{}, page.FlagGuard | page.FlagManagedLimit | page.FlagNoHMM},
		{device.Config{Managed: device.ManagedDeny, HMM: true}, page.FlagGuard | page.FlagManagedDeny},
		{device.Config{Managed: device.ManagedAllow}, page.FlagGuard | page.FlagNoHMM},
	} {
		table.Config = test.config
		h, vgpus, err := vgpuPage(record, table, nil)
		if err != nil || h.Flags != test.flags || h.UVMDevice != 0 || h.ControlDevice != 0 || !reflect.DeepEqual(vgpus, want) {
			t.Errorf("%+v: %+v, %+v, %v", test.config, h, vgpus, err)
		}
	}
	table.Driver = device.DriverNVIDIA
	if h, _, _ := vgpuPage(record, table, nil); h.UVMDevice != 510<<8 || h.ControlDevice != 195<<8|255 {
		t.Errorf("%+v", h)
	}
	table.GPUs[0].BusID = "x"
	if _, _, err := vgpuPage(record, table, nil); err == nil {
		t.Error("a GPU without an address")
	}
}

// TestGuardHolds: the guard is told all files that its container has in common with others.
func TestGuardHolds(t *testing.T) {
	table := &device.Table{Driver: device.DriverSim,
		Mounts: []device.Mount{{Host: "/lib/libcuda.so.1", Container: "/x"}, {Host: "/bin/nvidia-smi", Container: "/y"}}}
	want := []string{"/lib/libcuda.so.1", "/bin/nvidia-smi"}
	if library := device.Limiter(); library != "" {
		want = append(want, library)
	}
	if got := GuardConfig(ledger.Record{ID: "a", Nonce: "n"}, table, "/r").Hold; !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestGPUID(t *testing.T) {
	for address, want := range map[string]uint32{
		"0000:01:00.0": 0x100, "00000000:17:00.0": 0x1700, "0001:a0:1f.3": 1<<16 | 0xa01f, "0:0:0": 0,
		"": 0, "x": 0, "0000:01": 0, "0000:01:00:00.0": 0, "0000::00.0": 0, "0000:01:-1.0": 0, "100000000:01:00.0": 0, "0000:0x1:00.0": 0,
	} {
		good := want != 0 || address == "0:0:0"
		if got, err := gpuID(address); got != want || (err == nil) != good {
			t.Errorf("%q: %#x, %v, want %#x", address, got, err, want)
		}
	}
}
