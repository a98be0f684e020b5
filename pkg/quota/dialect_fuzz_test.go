// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"strings"
	"testing"
)

// FuzzDialects: with every dialect on, a request is none, or refused in one line, or holds what a Quota promises; and what
// cgpu's own words ask for is never more with dialects than without.
func FuzzDialects(f *testing.F) {
	for _, seed := range []string{
		"CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_1=4096m CUDA_DEVICE_SM_LIMIT=30 CUDA_TASK_PRIORITY=0 N=0,1",
		"NVIDIA_GPU_MEMORY_REQUESTS=4096 NVIDIA_GPU_MEMORY_LIMITS=6Gi CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G,1=6144MB " +
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30.5",
		"AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944 GPU_UTIL_PER_DEVICE=50 C=6",
		"tencent.com/vcuda-memory=24 tencent.com/vcuda-core=30 cgpu.io/gpu-mem-container=6 C=7",
		"C=6 A_MEM_DEV=15 @ALIYUN_COM_GPU_MEM_POD=6 @ALIYUN_COM_GPU_MEM_IDX=1 @ALIYUN_COM_GPU_MEM_DEV=15",
		"CUDA_DEVICE_MEMORY_LIMIT_0=0m CUDA_DEVICE_MEMORY_LIMIT_63=6g CGPU_DISABLE=false",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		q, err := speak(text, everything)
		if err != nil {
			checkMessage(t, err)
			if q != nil {
				t.Fatal("a quota and an error")
			}
			return
		}
		own, ownErr := speak(text, "")
		if q == nil {
			if own != nil || ownErr != nil {
				t.Fatalf("dialects hide a request: %+v, %v", own, ownErr)
			}
			return
		}
		if q.Percent < 0 || q.Percent > MaxPercent || q.Priority < PriorityBestEffort || q.Priority > PriorityHigh || len(q.PerGPU) > maxIDs {
			t.Fatalf("out of range: %+v", q)
		}
		if q.Memory == (Memory{}) && q.PerGPU == nil && q.Named == nil {
			t.Fatalf("no limit: %+v", q)
		}
		// gpushare's annotations may change the fraction, and tkestack's beat a variable.
		if own != nil && own.Memory.Den == 0 && q.Memory.Den == 0 && !strings.Contains(text, "tencent.com/") && q.Memory != own.Memory {
			t.Fatalf("%v with dialects, %v without", q.Memory, own.Memory)
		}
		grants, native, err := q.Resolve(node)
		if err != nil {
			checkMessage(t, err)
			return
		}
		if q.NeedsPlacement() {
			if m, err := q.Placed(); err != nil || m == (Memory{}) {
				t.Fatalf("placed: %v, %v", m, err)
			}
		}
		checkGrants(t, grants, native)
	})
}
