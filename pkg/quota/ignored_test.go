// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestIgnored(t *testing.T) {
	many := "C=6"
	for i := range 20 {
		many += fmt.Sprintf(" A_X%d=1", i)
	}
	for _, c := range []struct {
		env, annotations string
		dialects         []Dialect
		want             []string
	}{
		{"C=6 A_MEM_DEV=15 A_SCHD_WEIGHT=2 CGPU_RUN_DIR=1 CGPU_AGENT_X=1 CGPU_MEM_SPILL=1 NVIDIA_X=1",
			"priority=high applied.nonce=1 gpu-mem-limit=4Gi placement=spread", nil, nil},
		{"C=6 CGPU_WEIGTH=2 aliyun_com_gpu_schd_weight=3", "", nil,
			[]string{"CGPU_WEIGTH, a name that cgpu does not know", "aliyun_com_gpu_schd_weight, a name that cgpu does not know"}},
		{"C=6 A_WEIGHT=2 A_WEIGHT=3", "", nil, []string{"ALIYUN_COM_GPU_WEIGHT, a name that cgpu does not know"}},
		{"C=6", "gpu-weight=3 a=b", nil, []string{"cgpu.io/a, a name that cgpu does not know",
			"cgpu.io/gpu-weight, a name that cgpu does not know"}},
		{"C=6 A_MEM_IDX=0 A_VISIBLE_DEVICES=1", "", nil,
			[]string{"ALIYUN_COM_GPU_MEM_IDX, because ALIYUN_COM_GPU_VISIBLE_DEVICES names the GPUs"}},
		{"C=6 A_MEM_IDX=0", "", nil, nil},
		{"A_MEM_IDX=0", "gpu-mem-container=6 gpu-visible-devices=1", nil, nil}, // no variable counts there
		{"C=6 A_MEM_RESERVED=1", "", []Dialect{DialectPAI}, nil},
		{"C=6 A_\x1b=1", "", nil, []string{`"ALIYUN_COM_GPU_\x1b", a name that cgpu does not know`}},
	} {
		q, err := FromSpec(expand(c.env), annotate(c.annotations), c.dialects...)
		if err != nil {
			t.Fatalf("%s: %v", c.env, err)
		}
		if !slices.Equal(q.Ignored, c.want) {
			t.Errorf("%s %s: %q, want %q", c.env, c.annotations, q.Ignored, c.want)
		}
	}
	q, err := FromSpec(expand(many), nil)
	if err != nil || len(q.Ignored) != mostIgnored+1 || q.Ignored[mostIgnored] != "12 more names that cgpu does not know" {
		t.Errorf("%v: %q", err, q.Ignored)
	}
	if q, err = Beside([]string{"ALIYUN_COM_GPU_" + strings.Repeat("X", 9999) + "=1"}, nil); err != nil || len(q.Ignored) != 1 ||
		len(q.Ignored[0]) > 120 {
		t.Errorf("%v: %.200q", err, q.Ignored)
	}
}

func TestMissed(t *testing.T) {
	const unknown = ", a name that cgpu does not know"
	for _, c := range []struct {
		env, annotations string
		want             []string
	}{
		{"PATH=/bin N=all CUDA_X=1 CGPU_RUN_DIR=/x CGPU_CONFIG=/y CGPU_DISABLE=1", "applied.nonce=1", nil},
		{"CGPU_EXPORTER_SERVICE_HOST=10.0.0.1 CGPU_EXPORTER_SERVICE_PORT=9471 CGPU_PORT=tcp CGPU_PORT_9471_TCP_ADDR=x", "", nil}, // a Service's
		{"C=6 A_X=1 CGPU_DISABLE=1", "", nil},
		{"A_MEM_CONTAINERS=6", "", []string{"ALIYUN_COM_GPU_MEM_CONTAINERS" + unknown}},
		{"aliyun_com_gpu_mem_container=6 cgpu_mem=6", "", []string{"aliyun_com_gpu_mem_container" + unknown, "cgpu_mem" + unknown}},
		{"CGPU_WEIGHT=3", "gpu-core-percentage=4", []string{"CGPU_WEIGHT, without CGPU_MEM", "cgpu.io/gpu-core-percentage, without CGPU_MEM"}},
		{"", "gpu-mem=6", []string{"cgpu.io/gpu-mem" + unknown}},
	} {
		if got := Missed(expand(c.env), annotate(c.annotations)); !slices.Equal(got, c.want) {
			t.Errorf("%s %s: %q, want %q", c.env, c.annotations, got, c.want)
		}
	}
}
