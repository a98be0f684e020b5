// SPDX-License-Identifier: Apache-2.0

package suggest

import "testing"

func TestDidYouMean(t *testing.T) {
	known := []string{"", "smi", "set", "spec", "doctor", "gpu", "CGPU_MEM", "CGPU_WEIGHT", "ALIYUN_COM_GPU_MEM_CONTAINER",
		"ALIYUN_COM_GPU_SCHD_WEIGHT", "ALIYUN_COM_GPU_MEM_POD"}
	for word, want := range map[string]string{
		"sim": "smi", "docter": "doctor", "gpus": "gpu", "CGPU_WEIGTH": "CGPU_WEIGHT", "cgpu_mem": "CGPU_MEM",
		"ALIYUN_COM_GPU_MEM_CONTAINERS": "ALIYUN_COM_GPU_MEM_CONTAINER", "aliyun_com_gpu_mem_container": "ALIYUN_COM_GPU_MEM_CONTAINER",
		"ALIYUN_COM_GPU_WEIGHT": "ALIYUN_COM_GPU_SCHD_WEIGHT",
		"smi":                   "", "x": "", "": "", "frobnicate": "", "ALIYUN_COM_GPU_FOO": "",
	} {
		got := DidYouMean(word, known)
		if want != "" {
			want = "; did you mean " + want + "?"
		}
		if got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
}
