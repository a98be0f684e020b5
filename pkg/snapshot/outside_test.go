// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestMeasureOutside: what the driver has given out beside what containers use, of the GPUs that they have and of which all is known.
func TestMeasureOutside(t *testing.T) {
	known, unknown := []VGPU{{Answered: true}, {Answered: true}}, []VGPU{{Answered: true}, {}}
	v := View{GPUs: []GPU{
		{Index: 0, UUID: "shared", Used: 5, VGPUs: known},
		{Index: 1, UUID: "unused"},
		{Index: 2, UUID: "silent guard", Used: 5, VGPUs: unknown},
		{Index: 3, UUID: "lost", Fault: "lost", VGPUs: known},
		{Index: 4, UUID: "managed memory on the host", Used: 9, VGPUs: known},
		{Index: 5, UUID: "not told", VGPUs: known},
	}}
	v.MeasureOutside(func([]int) (map[string]quota.Bytes, error) { return nil, errors.New("NVML: no answer") })
	if v.GPUs[0].Outside != nil {
		t.Error("known without an answer")
	}
	var asked []int
	v.MeasureOutside(func(gpus []int) (map[string]quota.Bytes, error) {
		asked = gpus
		return map[string]quota.Bytes{"shared": 12, "unused": 12, "silent guard": 12, "lost": 12, "managed memory on the host": 7}, nil
	})
	if want := []int{0, 2, 4, 5}; !slices.Equal(asked, want) {
		t.Errorf("asked for GPUs %v, want %v", asked, want)
	}
	for i, want := range []*quota.Bytes{new(quota.Bytes(7)), nil, nil, nil, new(quota.Bytes(0)), nil} {
		if i == 1 || i == 3 {
			continue
		}
		if got := v.GPUs[i].Outside; (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Errorf("%s: %v", v.GPUs[i].UUID, got)
		}
	}
	(&View{GPUs: []GPU{{}}}).MeasureOutside(func([]int) (map[string]quota.Bytes, error) {
		t.Error("NVML is asked though no container has a GPU")
		return nil, nil
	})
}
