// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestDialects: other systems' variables give the limit that cgpu's own give, in what a program sees and in what it can
// have; and only where cgpu.toml has them on.
func TestDialects(t *testing.T) {
	noTrace(t)
	sized := func(env ...string) container {
		return container{env: append(env, "NVIDIA_VISIBLE_DEVICES=0"), cmd: []string{"cgpu-probe", "meminfo"}}
	}
	off := sized("CUDA_DEVICE_MEMORY_LIMIT=1g").try(t)
	if strings.Contains(off.Stdout, "total_mib") {
		t.Errorf("a container in a dialect that is off got a GPU: %s", off)
	}

	withConfig(t, `dialects = ["hami", "nvidia", "mps", "pai"]`)
	own := total(t, container{env: sizeOf("1GiB"), cmd: []string{"cgpu-probe", "meminfo"}}.run(t))
	for name, env := range map[string][]string{
		"hami":           {"CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DEVICE_SM_LIMIT=30"},
		"hami's plugin":  {"CUDA_DEVICE_MEMORY_LIMIT_0=1024m", "CUDA_DEVICE_SM_LIMIT=0"},
		"nvidia":         {"NVIDIA_GPU_MEMORY_LIMIT=1024"},
		"nvidia and mps": {"NVIDIA_GPU_MEMORY_LIMIT=1Gi", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M"},
		"mps":            {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30"},
		"pai":            {"AMP_VGPU_ENABLE=1", "GPU_MEM_PER_DEVICE=1073741824", "GPU_UTIL_PER_DEVICE=30"},
	} {
		if got := total(t, sized(env...).run(t)); got != own || got != quota.GiB {
			t.Errorf("%s: total = %v, and with cgpu's own variables %v", name, got, own)
		}
	}
	c := sized("CUDA_DEVICE_MEMORY_LIMIT=64m")
	c.cmd = []string{"sleep", "600"}
	id := c.start(t)
	if r := execIn(id, "cgpu-probe", "alloc", "64MiB"); r.Code != 0 {
		t.Errorf("the whole limit must be had: %s", r)
	}
	wantRefused(t, execIn(id, "cgpu-probe", "alloc", "65MiB"), noMemory)
	docker(t, "rm", "-f", id)

	wantRefused(t, sized("CUDA_DEVICE_MEMORY_LIMIT=1g", "NVIDIA_GPU_MEMORY_LIMIT=2048").try(t), "CUDA_DEVICE_MEMORY_LIMIT",
		"NVIDIA_GPU_MEMORY_LIMIT", "disagrees")
	wantRefused(t, sized("ALIYUN_COM_GPU_MEM_CONTAINER=2", "CUDA_DEVICE_MEMORY_LIMIT=1g").try(t), "ALIYUN_COM_GPU_MEM_CONTAINER", "disagrees")
}

// TestDialectLimits: a container has another limit on each of its GPUs.
func TestDialectLimits(t *testing.T) {
	if len(gpus(t)) < 2 {
		testenv.Lacks(t, "needs two GPUs")
	}
	noTrace(t)
	withConfig(t, `dialects = ["hami"]`)
	id := container{
		env: []string{"NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT_0=1g", "CUDA_DEVICE_MEMORY_LIMIT_1=2g"},
		cmd: []string{"sleep", "600"},
	}.start(t)
	r, ok := recordOf(t, id)
	if !ok || len(r.VGPUs) != 2 || r.VGPUs[0].Limit != quota.GiB || r.VGPUs[1].Limit != 2*quota.GiB {
		t.Errorf("reserved: %+v", r)
	}
	docker(t, "rm", "-f", id)
}
