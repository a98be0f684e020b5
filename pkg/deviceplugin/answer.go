// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"crypto/rand"
	"fmt"
	"strconv"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// answerMemory is what a container gets for n units on each of the GPUs: the shares for the runtime, and gpushare's
// variables for programs that read them. The runtime lets no variable raise a share.
//
// gpushare names the GPU in NVIDIA_VISIBLE_DEVICES. Here it says void: where a pod came to a runtime that is not cgpu's, such
// as NVIDIA's own as the default one, that variable would be the whole GPU without a limit; and void also stands over the
// "all" that images of NVIDIA's bring.
func answerMemory(used []card, n int, unit quota.Bytes, w *want) (*pluginapi.ContainerAllocateResponse, error) {
	var shares []alloc.Share
	for i, c := range used {
		s := alloc.Share{
			// Two claims of one id would be one to the ledger, so it is drawn, not counted: a counter starts anew.
			ID: "gpu-mem/" + rand.Text() + "/" + strconv.Itoa(i), UUID: c.UUID, Containers: 1,
			Slice: quota.Slice{Limit: quota.Bytes(n) * unit, Share: quota.Share{Priority: quota.PriorityDefault}},
		}
		// The runtime must be able to read it; what it cannot read it would refuse long after the pod was admitted.
		if _, err := alloc.Parse(s.Text()); err != nil {
			return nil, fmt.Errorf("deviceplugin: %s: %w", ResourceMemory, err)
		}
		shares = append(shares, s)
	}
	total := n * len(used)
	if w != nil && w.podMemory > total {
		total = w.podMemory
	}
	envs := map[string]string{
		"NVIDIA_VISIBLE_DEVICES":       "void",
		"ALIYUN_COM_GPU_MEM_CONTAINER": strconv.Itoa(n),
		"ALIYUN_COM_GPU_MEM_POD":       strconv.Itoa(total),
		// The units of the GPU itself: CONTAINER / DEV is the part of its memory, however often it is sold.
		"ALIYUN_COM_GPU_MEM_DEV": strconv.Itoa(used[0].most),
	}
	// The variable holds one index.
	if len(used) == 1 {
		envs["ALIYUN_COM_GPU_MEM_IDX"] = strconv.Itoa(used[0].position)
	}
	return &pluginapi.ContainerAllocateResponse{
		Envs:        envs,
		Annotations: map[string]string{alloc.AnnotationShares: alloc.Annotate(shares)},
	}, nil
}

// answerPercent is what a container gets for n hundredths on each of its GPUs.
func answerPercent(n int) *pluginapi.ContainerAllocateResponse {
	text := strconv.Itoa(n)
	return &pluginapi.ContainerAllocateResponse{
		Envs:        map[string]string{"ALIYUN_COM_GPU_CORE_PERCENTAGE": text},
		Annotations: map[string]string{alloc.AnnotationPercent: text},
	}
}
