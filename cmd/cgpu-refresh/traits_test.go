// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/opencgpu/cgpu/pkg/device"
)

func TestTraits(t *testing.T) {
	list, err := mockGPUs(t, dgx(), known)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range list {
		if g.Architecture != "Hopper" || g.ComputeCapability != "9.0" || g.NVLink != "nvlink0" {
			t.Errorf("%+v", g)
		}
	}
	// An old library: nothing is called that it lacks.
	list, err = mockGPUs(t, dgx(), func(symbol string) error { return errors.New("no " + symbol) })
	if err != nil || list[0].Architecture != "" || list[0].ComputeCapability != "" || list[0].NVLink != "" {
		t.Errorf("%v, %+v", err, list)
	}
}

func TestLinkedTo(t *testing.T) {
	d := deviceOf(dgx(), 0)
	// Link 0 is down, 1 and 2 go to GPUs, there is no 3.
	d.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
		if link > 2 {
			return 0, nvml.ERROR_INVALID_ARGUMENT
		}
		return nvml.EnableState(min(link, 1)), nvml.SUCCESS
	}
	d.GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
		return nvml.NVLINK_DEVICE_TYPE_GPU, nvml.SUCCESS
	}
	d.GetNvLinkRemotePciInfoFunc = func(link int) (nvml.PciInfo, nvml.Return) {
		return nvml.PciInfo{Bus: uint32(link)}, nvml.SUCCESS
	}
	if got := linkedTo(d); !slices.Equal(got, []string{"0000:01:00.0", "0000:02:00.0"}) {
		t.Errorf("%v", got)
	}
}

func TestGroups(t *testing.T) {
	var list []device.GPU
	for i := range 6 {
		list = append(list, device.GPU{Index: i + 1, BusID: fmt.Sprintf("0000:%02x:00.0", i)})
	}
	bus := func(i int) string { return list[i].BusID }
	for _, c := range []struct {
		peers [][]string
		want  []string
	}{
		{make([][]string, 6), make([]string, 6)},
		{[][]string{{bus(4)}, {bus(2)}, {bus(1)}, nil, {bus(0), bus(5)}, {bus(4)}},
			[]string{"nvlink1", "nvlink2", "nvlink2", "", "nvlink1", "nvlink1"}},
		{[][]string{nil, {aSwitch}, {aSwitch}, nil, {aSwitch}, {"0000:ff:00.0"}}, []string{"", "nvlink2", "nvlink2", "", "nvlink2", ""}},
		{[][]string{{bus(2)}, {bus(3)}, nil, {bus(2)}, nil, nil}, []string{"nvlink1", "nvlink1", "nvlink1", "nvlink1", "", ""}},
	} {
		if got := groups(list, c.peers); !slices.Equal(got, c.want) {
			t.Errorf("%v: %q, want %q", c.peers, got, c.want)
		}
	}
}
