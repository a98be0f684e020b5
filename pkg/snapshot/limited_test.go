// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestMeasureLimited: what the driver counts of containers that it alone limits, and of no others.
func TestMeasureLimited(t *testing.T) {
	of := func(cgroup string) VGPU { return VGPU{Enforcement: device.EnforceDriver, LimitedCgroup: cgroup} }
	guarded, whole := of("/guarded"), of("/whole")
	guarded.Enforcement, whole.Native = device.EnforceGuard, true
	v := View{GPUs: []GPU{
		{UUID: "GPU-a", Total: 9, VGPUs: []VGPU{of("/x"), of("/y"), of("/z"), of(""), guarded, whole}},
		{UUID: "GPU-b", Total: 9, Used: 1, VGPUs: []VGPU{of("/x")}},
	}}
	v.MeasureLimited(func([]string) (map[string]quota.Bytes, error) { return nil, errors.New("NVML: no answer") })
	if v.GPUs[0].VGPUs[0].Answered {
		t.Error("known without an answer")
	}
	var asked []string
	v.MeasureLimited(func(list []string) (map[string]quota.Bytes, error) {
		asked = list
		return map[string]quota.Bytes{"GPU-a=/x": 3, "GPU-a=/y": 100, "GPU-b=/x": 2, "GPU-a": 5, "GPU-a=": 5}, nil
	})
	if want := []string{"GPU-a=/x", "GPU-a=/y", "GPU-a=/z", "GPU-b=/x"}; !slices.Equal(asked, want) {
		t.Errorf("asked for %q, want %q", asked, want)
	}
	type use struct {
		used  quota.Bytes
		known bool
	}
	var got []use
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			got = append(got, use{x.Used, x.Answered})
		}
	}
	if want := []use{{3, true}, {9, true}, {}, {}, {}, {}, {2, true}}; !slices.Equal(got, want) ||
		v.GPUs[0].Used != 12 || v.GPUs[1].Used != 3 {
		t.Errorf("%v, want %v; in all %d and %d", got, want, v.GPUs[0].Used, v.GPUs[1].Used)
	}
	(&View{GPUs: []GPU{{VGPUs: []VGPU{guarded}}}}).MeasureLimited(func([]string) (map[string]quota.Bytes, error) {
		t.Error("NVML is asked though no container is limited by it alone")
		return nil, nil
	})
}
