// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"maps"
	"strings"
	"testing"
)

func TestFromUnits(t *testing.T) {
	gpus := []GPU{{0, "GPU-a", t4}, {1, "GPU-b", t4}}
	fifteen := map[string]int{"GPU-a": 15, "GPU-b": 15}
	for name, tt := range map[string]struct {
		env         string
		annotations map[string]string
		units       Units
		gpus        []GPU
		want        Grant
		err         string
	}{
		"gpushare's variables": {env: "C=3 A_MEM_DEV=15 A_MEM_IDX=1 A_MEM_POD=3 N=1", units: Units{Memory: 3, PerGPU: fifteen},
			want: Grant{1, t4 / 5}},
		// The image and the pod's spec say 15 of 15 before and behind the plugin's own.
		"all variables lie": {env: "C=15 C=3 C=15 A_MEM_IDX=1 A_MEM_DEV=1 A_MEM_DEV=15 A_MEM_DEV=3 CGPU_DISABLE=true",
			units: Units{Memory: 3, PerGPU: fifteen}, want: Grant{1, t4 / 5}},
		"all annotations lie": {env: "C=3 A_MEM_IDX=1",
			annotations: map[string]string{"cgpu.io/gpu-mem-container": "15", "cgpu.io/gpu-mem-dev": "1", "cgpu.io/gpu-visible-devices": "all",
				"ALIYUN_COM_GPU_MEM_DEV": "1", "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "15"}, units: Units{Memory: 3, PerGPU: fifteen},
			want: Grant{0, t4 / 5}},
		"no whole GPU beside it": {env: "C=3 A_VISIBLE_DEVICES=0 N=1", units: Units{Memory: 3, PerGPU: fifteen}, want: Grant{0, t4 / 5}},
		"unhealthy units are missing": {env: "C=3 A_MEM_DEV=15 A_MEM_IDX=0", units: Units{Memory: 3, PerGPU: map[string]int{"GPU-a": 5}},
			want: Grant{0, t4 / 5}},
		"of the other GPU too": {env: "A_MEM_IDX=0", units: Units{Memory: 3, PerGPU: map[string]int{"GPU-a": 5, "GPU-b": 15}},
			want: Grant{0, t4 / 5}},
		"the only GPU": {env: "C=3", units: Units{Memory: 3, PerGPU: fifteen}, gpus: gpus[:1], want: Grant{0, t4 / 5}},
		"by UUID":      {env: "N=GPU-b", units: Units{Memory: 3, PerGPU: fifteen}, want: Grant{1, t4 / 5}},
		"not placed": {env: "A_MEM_IDX=-1", units: Units{Memory: 3, PerGPU: fifteen},
			err: "means that the device plugin found no GPU"},
		"not placed, by magic": {env: "N=no-gpu-has-3GiB-to-run", units: Units{Memory: 3, PerGPU: fifteen},
			err: "means that the device plugin found no GPU"},
		"no GPU named": {env: "C=3", units: Units{Memory: 3, PerGPU: fifteen},
			err: `aliyun.com/gpu-mem="3": is of one GPU, and the container's variables and annotations name 0`},
		"two GPUs named":         {env: "A_VISIBLE_DEVICES=0,1", units: Units{Memory: 3, PerGPU: fifteen}, err: "name 2"},
		"a GPU that is not here": {env: "A_MEM_IDX=7", units: Units{Memory: 3, PerGPU: fifteen}, err: `there is no GPU "7"`},
		"a GPU that is not healthy": {env: "A_MEM_IDX=0", units: Units{Memory: 3, PerGPU: map[string]int{"GPU-b": 15}},
			err: "of which the device plugin has no healthy unit"},
		"more than a GPU": {env: "A_MEM_IDX=0", units: Units{Memory: 16, PerGPU: fifteen}, err: "is more than one whole GPU"},
	} {
		if tt.gpus == nil {
			tt.gpus = gpus
		}
		annotations := maps.Clone(tt.annotations)
		q, err := FromUnits(expand(tt.env), annotations, tt.units, tt.gpus)
		var grants []Grant
		var native []int
		if err == nil {
			grants, native, err = q.Resolve(tt.gpus)
		}
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want %q", name, err, tt.err)
			}
			continue
		}
		tt.want.Limit = tt.want.Limit.FloorMiB()
		if err != nil || len(grants) != 1 || grants[0] != tt.want || native != nil {
			t.Errorf("%s: %v, %v, %v; want %v", name, grants, native, err, tt.want)
		}
	}
}

// FuzzUnits: whatever a pod's author writes, it is one GPU of the plugin's, and no more of it than the kubelet allocated.
func FuzzUnits(f *testing.F) {
	f.Add("C=15 A_MEM_DEV=1 A_MEM_IDX=1", "ALIYUN_COM_GPU_MEM_DEV", "2", 3)
	f.Add("A_VISIBLE_DEVICES=GPU-a N=1", "cgpu.io/gpu-mem-dev", "1", 15)
	f.Fuzz(func(t *testing.T, env, name, value string, n int) {
		if n < 1 || n > 15 {
			return
		}
		gpus := []GPU{{0, "GPU-a", t4}, {1, "GPU-b", t4}}
		q, err := FromUnits(expand(env), map[string]string{name: value}, Units{Memory: n, PerGPU: map[string]int{"GPU-a": 15, "GPU-b": 15}}, gpus)
		var grants []Grant
		var native []int
		if err == nil {
			grants, native, err = q.Resolve(gpus)
		}
		if err != nil {
			checkMessage(t, err)
			return
		}
		if len(grants) != 1 || len(native) != 0 || grants[0].Limit > t4*Bytes(n)/15 {
			t.Fatalf("%v, %v", grants, native)
		}
	})
}
