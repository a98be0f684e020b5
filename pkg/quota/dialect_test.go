// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// spoken writes a table's variables out; a word with a slash is an annotation, and so is one with @ before it.
func spoken(text string) (env []string, annotations map[string]string) {
	annotations = map[string]string{}
	for entry := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(entry, "=")
		if name == "N" || name == "C" || strings.HasPrefix(name, "A_") {
			name = strings.TrimSuffix(short.Replace(name+"="), "=")
		}
		switch bare, marked := strings.CutPrefix(name, "@"); {
		case marked:
			annotations[bare] = value
		case strings.Contains(name, "/"):
			annotations[name] = value
		default:
			env = append(env, name+"="+value)
		}
	}
	return env, annotations
}

// speak asks in dialects; names are separated by commas.
func speak(text, names string) (*Quota, error) {
	var enabled []Dialect
	for name := range strings.SplitSeq(names, ",") {
		if name != "" {
			enabled = append(enabled, Dialect(name))
		}
	}
	env, annotations := spoken(text)
	return FromSpec(env, annotations, enabled...)
}

const everything = "hami,nvidia,mps,pai,tkestack,gpushare"

// TestDialects holds what docs/dialects.md says of each word.
func TestDialects(t *testing.T) {
	six := Memory{Fixed: 6 * GiB}
	ids := func(ids ...string) Selector { return Selector{IDs: ids} }
	for _, c := range []struct {
		name, dialects, text string
		want                 Quota
	}{
		{"hami: one limit", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g", Quota{Memory: six}},
		{"hami: m", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6144m", Quota{Memory: six}},
		{"hami: M", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6144M", Quota{Memory: six}},
		{"hami: k", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6291456k", Quota{Memory: six}},
		{"hami: bytes", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6442450944", Quota{Memory: six}},
		{"hami: rounds down", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6443499519", Quota{Memory: six}},
		{"hami: as its device plugin writes it", "hami",
			"N=" + uuid1 + " CUDA_DEVICE_MEMORY_LIMIT_0=6144m CUDA_DEVICE_SM_LIMIT=30 CUDA_DEVICE_MEMORY_SHARED_CACHE=/x",
			Quota{PerGPU: []Bytes{6 * GiB}, Slice: Slice{Share: Share{Percent: 30}}, Visible: ids(uuid1)}},
		{"hami: two GPUs", "hami", "N=0,1 CUDA_DEVICE_MEMORY_LIMIT_0=6g CUDA_DEVICE_MEMORY_LIMIT_1=4g",
			Quota{PerGPU: []Bytes{6 * GiB, 4 * GiB}, Visible: ids("0", "1")}},
		{"hami: one for all and another for one", "hami", "N=0,1,2 CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_1=4g",
			Quota{Memory: six, PerGPU: []Bytes{6 * GiB, 4 * GiB}, Visible: ids("0", "1", "2")}},
		{"hami: one for all, repeated", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_0=6144m", Quota{Memory: six}},
		{"hami: zero of one is as all", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_0=0m", Quota{Memory: six}},
		{"hami: percent 0", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=0", Quota{Memory: six}},
		{"hami: percent 100", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=100", Quota{Memory: six}},
		{"hami: percent of one", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT_0=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"hami: percent of all and one", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 CUDA_DEVICE_SM_LIMIT_1=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"hami: percent disabled", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 GPU_CORE_UTILIZATION_POLICY=Disable",
			Quota{Memory: six}},
		{"hami: percent forced", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 GPU_CORE_UTILIZATION_POLICY=force",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"hami: high", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_TASK_PRIORITY=0",
			Quota{Memory: six, Slice: Slice{Share: Share{Priority: PriorityHigh}}}},
		{"hami: low is the default", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_TASK_PRIORITY=1", Quota{Memory: six}},
		{"hami: oversubscription", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_OVERSUBSCRIBE=true CUDA_DISABLE_CONTROL=true",
			Quota{Memory: six, Unmapped: []string{"CUDA_OVERSUBSCRIBE", "CUDA_DISABLE_CONTROL"}}},
		{"hami: with cgpu's spill and weight", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CGPU_MEM_SPILL=2 A_SCHD_WEIGHT=3",
			Quota{Memory: six, Slice: Slice{Spill: 2 * GiB, Share: Share{Weight: 3}}}},
		{"hami: GPUs by cgpu's variable", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g A_VISIBLE_DEVICES=1 N=0",
			Quota{Memory: six, Visible: ids("1"), Native: ids("0")}},
		{"hami: not its number", "hami",
			"CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_01=4g CUDA_DEVICE_MEMORY_LIMIT_64=4g CUDA_DEVICE_MEMORY_LIMIT_x=4g",
			Quota{Memory: six}},
		{"hami: twice the same", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT=6g", Quota{Memory: six}},

		{"nvidia: MiB", "nvidia", "NVIDIA_GPU_MEMORY_LIMIT=6144", Quota{Memory: six}},
		{"nvidia: plural", "nvidia", "NVIDIA_GPU_MEMORY_LIMITS=6144", Quota{Memory: six}},
		{"nvidia: quantity", "nvidia", "NVIDIA_GPU_MEMORY_LIMIT=6Gi", Quota{Memory: six}},
		{"nvidia: quantity in MiB", "nvidia", "NVIDIA_GPU_MEMORY_LIMIT=6144MiB", Quota{Memory: six}},
		{"nvidia: both spellings", "nvidia", "NVIDIA_GPU_MEMORY_LIMIT=6144 NVIDIA_GPU_MEMORY_LIMITS=6Gi", Quota{Memory: six}},
		{"nvidia: request alone", "nvidia", "NVIDIA_GPU_MEMORY_REQUEST=6144", Quota{Memory: six}},
		{"nvidia: request as limit", "nvidia", "NVIDIA_GPU_MEMORY_REQUEST=6144 NVIDIA_GPU_MEMORY_LIMIT=6144", Quota{Memory: six}},
		{"nvidia: request below limit", "nvidia", "NVIDIA_GPU_MEMORY_REQUESTS=4096 NVIDIA_GPU_MEMORY_LIMITS=6144",
			Quota{Memory: six, Unmapped: []string{"NVIDIA_GPU_MEMORY_REQUESTS"}}},

		{"mps: one GPU", "mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G", Quota{PerGPU: []Bytes{6 * GiB}}},
		{"mps: two GPUs", "mps", "N=0,1 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G,1=4096M",
			Quota{PerGPU: []Bytes{6 * GiB, 4 * GiB}, Visible: ids("0", "1")}},
		{"mps: other units", "mps", "N=0,1 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=1=512MB,0=1gb",
			Quota{PerGPU: []Bytes{GiB, 512 * MiB}, Visible: ids("0", "1")}},
		{"mps: by UUID", "mps", "N=0,1 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid1 + "=6G,0=4G",
			Quota{PerGPU: []Bytes{4 * GiB}, Named: []NamedLimit{{uuid1, 6 * GiB}}, Visible: ids("0", "1")}},
		{"mps: by UUID, and nvidia's for all", "nvidia,mps", "N=0 NVIDIA_GPU_MEMORY_LIMIT=6144 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G",
			Quota{Memory: six, Named: []NamedLimit{{uuid0, 6 * GiB}}, Visible: ids("0")}},
		{"mps: percent", "mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
			Quota{PerGPU: []Bytes{6 * GiB}, Slice: Slice{Share: Share{Percent: 30}}}},
		{"mps: percent with decimals", "mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30.9",
			Quota{PerGPU: []Bytes{6 * GiB}, Slice: Slice{Share: Share{Percent: 30}}}},
		{"mps: small percent", "mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=0.5",
			Quota{PerGPU: []Bytes{6 * GiB}, Slice: Slice{Share: Share{Percent: 1}}}},
		{"mps: all threads", "mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100.0",
			Quota{PerGPU: []Bytes{6 * GiB}}},
		{"mps: client priority", "mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_CLIENT_PRIORITY=1",
			Quota{PerGPU: []Bytes{6 * GiB}, Unmapped: []string{"CUDA_MPS_CLIENT_PRIORITY"}}},
		{"mps: percent beside cgpu's memory", "mps", "C=6 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},

		{"pai", "pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944 GPU_UTIL_PER_DEVICE=50 N=1 AMP_USE_HOST_DAEMON=1",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 50}}, Visible: ids("1")}},
		{"pai: decimal bytes round down", "pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=2000000000", Quota{Memory: Memory{Fixed: 1907 * MiB}}},
		{"pai: all of the time", "pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944 GPU_UTIL_PER_DEVICE=100", Quota{Memory: six}},
		{"pai: reserve", "pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944 ALIYUN_COM_GPU_MEM_RESERVED=10",
			Quota{Memory: six, Unmapped: []string{"ALIYUN_COM_GPU_MEM_RESERVED"}}},

		{"tkestack: blocks", "tkestack", "tencent.com/vcuda-memory=24 tencent.com/vcuda-core=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"tkestack: bytes", "tkestack", "tencent.com/vcuda-memory=6442450944 tencent.com/vcuda-core=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"tkestack: one block in bytes", "tkestack", "tencent.com/vcuda-memory=268435456", Quota{Memory: Memory{Fixed: 256 * MiB}}},
		{"tkestack: whole cards' time", "tkestack", "tencent.com/vcuda-memory=24 tencent.com/vcuda-core=200", Quota{Memory: six}},
		{"tkestack: core limit", "tkestack", "tencent.com/vcuda-memory=24 tencent.com/vcuda-core=30 tencent.com/vcuda-core-limit=50",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}, Unmapped: []string{"tencent.com/vcuda-core-limit"}}},
		{"tkestack: variables do not count beside it", everything,
			"tencent.com/vcuda-memory=24 C=15 N=all CGPU_DISABLE=true CUDA_DEVICE_MEMORY_LIMIT=9g NVIDIA_GPU_MEMORY_LIMIT=x", Quota{Memory: six}},
		{"tkestack: cgpu's annotations do", "tkestack", "tencent.com/vcuda-memory=24 cgpu.io/gpu-visible-devices=1 cgpu.io/gpu-schd-weight=2",
			Quota{Memory: six, Visible: ids("1"), Slice: Slice{Share: Share{Weight: 2}}}},
		{"tkestack: time alone is for whoever asks otherwise", "tkestack", "C=6 tencent.com/vcuda-core=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"tkestack: and beats the variable", "tkestack", "C=6 tencent.com/vcuda-core=30 A_CORE_PERCENTAGE=90",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},

		{"gpushare: the scheduler's annotations", "gpushare",
			"C=6 A_MEM_DEV=6 A_MEM_IDX=2 @ALIYUN_COM_GPU_MEM_IDX=1 @ALIYUN_COM_GPU_MEM_DEV=15 @ALIYUN_COM_GPU_MEM_POD=6",
			Quota{Memory: Memory{Num: 6, Den: 15}, Visible: ids("1")}},
		{"gpushare: nothing beside cgpu's annotation", "gpushare",
			"cgpu.io/gpu-mem-container=6 @ALIYUN_COM_GPU_MEM_DEV=6 @ALIYUN_COM_GPU_MEM_IDX=1 @ALIYUN_COM_GPU_MEM_POD=5", Quota{Memory: six}},
		{"gpushare: nothing beside tkestack's", everything,
			"tencent.com/vcuda-memory=24 @ALIYUN_COM_GPU_MEM_DEV=6 @ALIYUN_COM_GPU_MEM_IDX=1 @ALIYUN_COM_GPU_MEM_POD=5", Quota{Memory: six}},
		{"gpushare: off", "", "C=6 A_MEM_DEV=6 @ALIYUN_COM_GPU_MEM_DEV=15", Quota{Memory: Memory{Num: 6, Den: 6}}},

		{"hami and nvidia agree", "hami,nvidia", "CUDA_DEVICE_MEMORY_LIMIT=6g NVIDIA_GPU_MEMORY_LIMIT=6144", Quota{Memory: six}},
		{"nvidia's daemon speaks mps too", "nvidia,mps",
			"N=0,1 NVIDIA_GPU_MEMORY_LIMIT=6144 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6144M,1=6144M CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 40}}, Visible: ids("0", "1")}},
		{"one GPU's and all GPUs' agree", "hami,nvidia", "CUDA_DEVICE_MEMORY_LIMIT_0=6g NVIDIA_GPU_MEMORY_LIMIT=6144", Quota{Memory: six}},
		{"percentages agree", "hami,mps", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"cgpu's memory agrees", "hami", "C=6 CUDA_DEVICE_MEMORY_LIMIT=6g", Quota{Memory: six}},
		{"cgpu's memory agrees with each", "hami", "C=6 CUDA_DEVICE_MEMORY_LIMIT_0=6g CUDA_DEVICE_MEMORY_LIMIT_1=6g", Quota{Memory: six}},
		{"cgpu's percent agrees", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 A_CORE_PERCENTAGE=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"cgpu's priority agrees", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_TASK_PRIORITY=0 A_HIGH_PRIO=1",
			Quota{Memory: six, Slice: Slice{Share: Share{Priority: PriorityHigh}}}},
		{"cgpu's annotation beats a variable's percent", "hami",
			"CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=90 cgpu.io/gpu-core-percentage=30",
			Quota{Memory: six, Slice: Slice{Share: Share{Percent: 30}}}},
		{"and its priority", "hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_TASK_PRIORITY=0 cgpu.io/priority=best-effort",
			Quota{Memory: six, Slice: Slice{Share: Share{Priority: -1}}}},
		{"an annotated request does not listen", everything,
			"cgpu.io/gpu-mem-container=6 CUDA_DEVICE_MEMORY_LIMIT=9g CUDA_DEVICE_SM_LIMIT=x CUDA_TASK_PRIORITY=0", Quota{Memory: six}},
		{"what is not enabled is not heard", "nvidia",
			"NVIDIA_GPU_MEMORY_LIMIT=6144 CUDA_DEVICE_MEMORY_LIMIT=9g CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=x", Quota{Memory: six}},
	} {
		q, err := speak(c.text, c.dialects)
		if err != nil || q == nil {
			t.Errorf("%s: got %v, %v", c.name, q, err)
			continue
		}
		switch c.want.Priority {
		case 0:
			c.want.Priority = PriorityDefault
		case -1:
			c.want.Priority = PriorityBestEffort
		}
		c.want.Asked, c.want.Dialects, c.want.from = q.Asked, q.Dialects, q.from
		if !reflect.DeepEqual(*q, c.want) {
			t.Errorf("%s: got %+v, want %+v", c.name, *q, c.want)
		}
	}
}

// TestDialectsNoted: what was used is told, and by which dialect.
func TestDialectsNoted(t *testing.T) {
	q, err := speak("NVIDIA_GPU_MEMORY_LIMIT=6144 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_DEVICE_SM_LIMIT=30 X=1", "nvidia,mps,pai")
	if err != nil {
		t.Fatal(err)
	}
	if want := []Dialect{DialectNVIDIA, DialectMPS}; !slices.Equal(q.Dialects, want) {
		t.Errorf("dialects %v, want %v", q.Dialects, want)
	}
	want := map[string]string{"NVIDIA_GPU_MEMORY_LIMIT": "6144", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6G"}
	if !reflect.DeepEqual(q.Asked, want) {
		t.Errorf("asked %v, want %v", q.Asked, want)
	}
	if q, err := speak("C=6 @ALIYUN_COM_GPU_MEM_POD=6", everything); err != nil || !slices.Equal(q.Dialects, []Dialect{DialectGPUShare}) {
		t.Errorf("gpushare: %+v, %v", q, err)
	}
	if q, err := speak("cgpu.io/gpu-mem-container=6 @ALIYUN_COM_GPU_MEM_IDX=1", everything); err != nil ||
		q.Dialects != nil || len(q.Asked) != 1 {
		t.Errorf("gpushare beside an annotation: %+v, %v", q, err)
	}
	if q, err := speak("C=6 CUDA_DEVICE_MEMORY_SHARED_CACHE=/x", everything); err != nil || q.Dialects != nil {
		t.Errorf("none: %+v, %v", q, err)
	}
}

func TestDialectsNotAsked(t *testing.T) {
	for _, c := range []struct{ name, dialects, text string }{
		{"none enabled", "", "CUDA_DEVICE_MEMORY_LIMIT=6g NVIDIA_GPU_MEMORY_LIMIT=6144 tencent.com/vcuda-memory=24"},
		{"another enabled", "hami", "NVIDIA_GPU_MEMORY_LIMIT=6144"},
		{"time alone", everything,
			"CUDA_DEVICE_SM_LIMIT=30 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=x AMP_VGPU_ENABLE=1 GPU_UTIL_PER_DEVICE=0 tencent.com/vcuda-core=x"},
		{"no limit", everything,
			"CUDA_DEVICE_MEMORY_LIMIT=0 CUDA_DEVICE_MEMORY_LIMIT_0=0m CUDA_DEVICE_MEMORY_LIMIT_1= NVIDIA_GPU_MEMORY_LIMIT=0 " +
				"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT= tencent.com/vcuda-memory=0"},
		{"pai without its switch", "pai", "GPU_MEM_PER_DEVICE=x GPU_UTIL_PER_DEVICE=x"},
		{"pai switched off", "pai", "AMP_VGPU_ENABLE=0 GPU_MEM_PER_DEVICE=6442450944"},
		{"longer names", everything,
			"CUDA_DEVICE_MEMORY_LIMITS=6g CUDA_DEVICE_MEMORY_LIMIT_=6g CUDA_DEVICE_MEMORY_LIMIT_00=6g CUDA_DEVICE_MEMORY_LIMIT_64=6g " +
				"NVIDIA_GPU_MEMORY_LIMIT_0=6"},
		{"words of the other kind", everything, "tencent.com_vcuda-memory=24 @CUDA_DEVICE_MEMORY_LIMIT=6g @NVIDIA_GPU_MEMORY_LIMIT=6144"},
		{"gpushare's annotations ask nothing", "gpushare", "@ALIYUN_COM_GPU_MEM_IDX=-1 @ALIYUN_COM_GPU_MEM_POD=6 @ALIYUN_COM_GPU_MEM_DEV=15"},
		{"off", everything, "CUDA_DEVICE_MEMORY_LIMIT=x CGPU_DISABLE=true"},
		{"off by annotation", everything, "tencent.com/vcuda-memory=x cgpu.io/disable=true"},
	} {
		if q, err := speak(c.text, c.dialects); q != nil || err != nil {
			t.Errorf("%s: got %+v, %v; want neither", c.name, q, err)
		}
	}
}

func TestDialectsRefused(t *testing.T) {
	huge := strings.Repeat("9", 1<<20)
	for _, c := range []struct{ dialects, text, variable, reason string }{
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=x", "CUDA_DEVICE_MEMORY_LIMIT", "want bytes"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6GiB", "CUDA_DEVICE_MEMORY_LIMIT", "want bytes"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6.5g", "CUDA_DEVICE_MEMORY_LIMIT", "want bytes"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=-1g", "CUDA_DEVICE_MEMORY_LIMIT", "want bytes"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6144", "CUDA_DEVICE_MEMORY_LIMIT", "less than 1MiB"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=" + huge, "CUDA_DEVICE_MEMORY_LIMIT", "too many digits"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=18446744073709551615g", "CUDA_DEVICE_MEMORY_LIMIT", "too large"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT_3=x", "CUDA_DEVICE_MEMORY_LIMIT_3", "want bytes"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT=9g", "CUDA_DEVICE_MEMORY_LIMIT", `second time, to "9g"`},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=0 CUDA_DEVICE_MEMORY_LIMIT=9g", "CUDA_DEVICE_MEMORY_LIMIT", `second time, to "9g"`},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=101", "CUDA_DEVICE_SM_LIMIT", "percentage from 0 to 100"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=x", "CUDA_DEVICE_SM_LIMIT", "percentage from 0 to 100"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 CUDA_DEVICE_SM_LIMIT_1=40", "CUDA_DEVICE_SM_LIMIT_1",
			`differs from CUDA_DEVICE_SM_LIMIT="30"`},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_TASK_PRIORITY=2", "CUDA_TASK_PRIORITY", "want 0 for high"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g A_VISIBLE_DEVICES=x", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "no GPU"},
		{"nvidia", "NVIDIA_GPU_MEMORY_LIMIT=6G", "NVIDIA_GPU_MEMORY_LIMIT", "want a whole number of MiB"},
		{"nvidia", "NVIDIA_GPU_MEMORY_LIMIT=6144 NVIDIA_GPU_MEMORY_LIMITS=4096", "NVIDIA_GPU_MEMORY_LIMITS",
			`disagrees with NVIDIA_GPU_MEMORY_LIMIT="6144"`},
		{"nvidia", "NVIDIA_GPU_MEMORY_LIMIT=4096 NVIDIA_GPU_MEMORY_REQUEST=6144", "NVIDIA_GPU_MEMORY_REQUEST",
			`more than NVIDIA_GPU_MEMORY_LIMIT="4096"`},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=0G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "is zero"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G,0=4G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "GPU 0 twice"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=64=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G,", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=GPU-=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=GPU-a/b=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=MIG-a=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "a limit for each GPU"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G" + strings.Repeat(",1=6G", 64), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "too long a list"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
			"above 0 and up to 100"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100.5", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
			"above 0 and up to 100"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=3.", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
			"above 0 and up to 100"},
		{"mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=" + huge, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
			"above 0 and up to 100"},
		{"pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6g", "GPU_MEM_PER_DEVICE", "number of bytes"},
		{"pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944 GPU_UTIL_PER_DEVICE=0", "GPU_UTIL_PER_DEVICE", "zero"},
		{"pai", "AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944 GPU_UTIL_PER_DEVICE=101", "GPU_UTIL_PER_DEVICE", "from 1 to 100"},
		{"pai", "AMP_VGPU_ENABLE=0 AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944", "AMP_VGPU_ENABLE", "second time"},
		{"pai", "AMP_VGPU_ENABLE=0 AMP_VGPU_ENABLE=2 AMP_VGPU_ENABLE=1 GPU_MEM_PER_DEVICE=6442450944", "AMP_VGPU_ENABLE", "second time"},
		{"tkestack", "tencent.com/vcuda-memory=6GiB", "tencent.com/vcuda-memory", "blocks of 256MiB"},
		{"tkestack", "tencent.com/vcuda-memory=24 tencent.com/vcuda-core=150", "tencent.com/vcuda-core", "whole cards in hundreds"},
		{"tkestack", "tencent.com/vcuda-memory=24 tencent.com/vcuda-core=30% ", "tencent.com/vcuda-core", "hundredths"},
		{"gpushare", "C=15 A_MEM_DEV=15 @ALIYUN_COM_GPU_MEM_POD=6", container, `more than the whole pod has, ALIYUN_COM_GPU_MEM_POD="6"`},
		{"gpushare", "C=6 @ALIYUN_COM_GPU_MEM_IDX=-1", "ALIYUN_COM_GPU_MEM_IDX", "found no GPU"},

		// Two dialects that disagree: both are named.
		{"hami,nvidia", "CUDA_DEVICE_MEMORY_LIMIT=6g NVIDIA_GPU_MEMORY_LIMIT=4096", "NVIDIA_GPU_MEMORY_LIMIT",
			`disagrees (nvidia, 4096MiB) with CUDA_DEVICE_MEMORY_LIMIT="6g" (hami, 6144MiB)`},
		{"hami,nvidia", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_1=4g NVIDIA_GPU_MEMORY_LIMIT=6144", "NVIDIA_GPU_MEMORY_LIMIT",
			`with CUDA_DEVICE_MEMORY_LIMIT_1="4g" (hami, 4096MiB)`},
		{"nvidia,mps", "NVIDIA_GPU_MEMORY_LIMIT=6144 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G,1=4G",
			"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "(mps, 4096MiB)"},
		{"hami,mps", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40",
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", `CUDA_DEVICE_SM_LIMIT="30" (hami)`},
		// A dialect and cgpu's own variables.
		{"hami", "C=4 CUDA_DEVICE_MEMORY_LIMIT=6g", "CUDA_DEVICE_MEMORY_LIMIT", container + `="4" (4096MiB)`},
		{"hami", "C=6 CUDA_DEVICE_MEMORY_LIMIT_0=6g CUDA_DEVICE_MEMORY_LIMIT_1=4g", "CUDA_DEVICE_MEMORY_LIMIT_1", container},
		{"hami", "C=6 A_MEM_DEV=15 CUDA_DEVICE_MEMORY_LIMIT=6g", "CUDA_DEVICE_MEMORY_LIMIT", "a fraction of the card"},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 A_CORE_PERCENTAGE=40", "CUDA_DEVICE_SM_LIMIT",
			`ALIYUN_COM_GPU_CORE_PERCENTAGE="40"`},
		{"hami", "CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_TASK_PRIORITY=0 A_HIGH_PRIO=0", "CUDA_TASK_PRIORITY", `ALIYUN_COM_GPU_HIGH_PRIO="0"`},
		{"tkestack", "tencent.com/vcuda-memory=24 cgpu.io/gpu-mem-container=4", "tencent.com/vcuda-memory", `cgpu.io/gpu-mem-container="4"`},
		{"tkestack", "tencent.com/vcuda-memory=24 tencent.com/vcuda-core=30 cgpu.io/gpu-core-percentage=40", "tencent.com/vcuda-core",
			`cgpu.io/gpu-core-percentage="40"`},
		{"tkestack", "tencent.com/vcuda-memory=24 cgpu.io/disable=perhaps", "cgpu.io/disable", "true or false"},
	} {
		q, err := speak(c.text, c.dialects)
		refusal(t, c.text, q, err, c.variable, c.reason)
	}
}

// refusal checks an error and what it names.
func refusal(t *testing.T, text string, q any, err error, variable, reason string) {
	t.Helper()
	e, ok := errors.AsType[*Error](err)
	if !ok {
		t.Errorf("%.200s: got %+v, %v; want a refusal", text, q, err)
		return
	}
	checkMessage(t, err)
	if e.Variable != variable || !strings.Contains(err.Error(), reason) {
		t.Errorf("%.200s:\ngot  %v\nwant %s and %q", text, err, variable, reason)
	}
}

// TestResolveDialects binds limits of single GPUs to the cards.
func TestResolveDialects(t *testing.T) {
	for _, c := range []struct {
		text   string
		grants []Grant
		native []int
	}{
		{"N=0,2 CUDA_DEVICE_MEMORY_LIMIT_0=6g CUDA_DEVICE_MEMORY_LIMIT_1=40g", []Grant{{0, 6 * GiB}, {2, 40 * GiB}}, nil},
		// the container's order is the node's
		{"N=2,0 CUDA_DEVICE_MEMORY_LIMIT_0=6g CUDA_DEVICE_MEMORY_LIMIT_1=40g", []Grant{{0, 6 * GiB}, {2, 40 * GiB}}, nil},
		{"N=all CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_2=40g", []Grant{{0, 6 * GiB}, {1, 6 * GiB}, {2, 40 * GiB}}, nil},
		{"N=0,1,2 CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_MEMORY_LIMIT_0=4g", []Grant{{0, 4 * GiB}, {1, 6 * GiB}, {2, 6 * GiB}}, nil},
		{"N=1 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G", []Grant{{1, 6 * GiB}}, nil},
		{"N=0,2 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid2 + "=40G," + uuid0 + "=6G", []Grant{{0, 6 * GiB}, {2, 40 * GiB}}, nil},
		{"N=0,2 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=GPU-AAAA=6G,1=40G", []Grant{{0, 6 * GiB}, {2, 40 * GiB}}, nil},
		{"N=0 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G,0=6G", []Grant{{0, 6 * GiB}}, nil},
		{"N=all CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid1 + "=6G",
			[]Grant{{0, 6 * GiB}, {1, 6 * GiB}, {2, 6 * GiB}}, nil},
		{"A_VISIBLE_DEVICES=1 N=0 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid1 + "=6G", []Grant{{1, 6 * GiB}}, []int{0}},
		{"A_VISIBLE_DEVICES=1 N=0 CUDA_DEVICE_MEMORY_LIMIT=6g", []Grant{{1, 6 * GiB}}, []int{0}},
		{"CUDA_DEVICE_MEMORY_LIMIT_0=6g", nil, nil},
	} {
		q, err := speak(c.text, everything)
		if err != nil {
			t.Fatal(c.text, err)
		}
		grants, native, err := q.Resolve(node)
		if err != nil || !reflect.DeepEqual(grants, c.grants) || !reflect.DeepEqual(native, c.native) {
			t.Errorf("%s: got %v %v, %v; want %v %v", c.text, grants, native, err, c.grants, c.native)
		}
	}
	for _, c := range []struct{ text, variable, reason string }{
		{"N=0,1 CUDA_DEVICE_MEMORY_LIMIT_0=6g", "CUDA_DEVICE_MEMORY_LIMIT_0", "no limit for GPU 1 of the container"},
		{"N=0,1 CUDA_DEVICE_MEMORY_LIMIT_1=6g", "CUDA_DEVICE_MEMORY_LIMIT_1", "no limit for GPU 0 of the container"},
		{"N=0 CUDA_DEVICE_MEMORY_LIMIT_0=6g CUDA_DEVICE_MEMORY_LIMIT_1=6g", "CUDA_DEVICE_MEMORY_LIMIT_0",
			"a limit for GPU 1 of a container that has 1"},
		{"N=0,1 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "no limit for GPU 1 of the container"},
		{"N=0 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G," + uuid1 + "=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
			uuid1 + ", of which the container gets no part"},
		{"A_VISIBLE_DEVICES=1 N=0 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
			"of which the container gets no part"},
		{"N=0 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G,0=4G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "says two limits for GPU 0"},
		{"N=0 NVIDIA_GPU_MEMORY_LIMIT=6144 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=4G", "NVIDIA_GPU_MEMORY_LIMIT",
			"says two limits for GPU 0"},
		{"N=0 C=6 A_MEM_DEV=15 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=4G", container, "says two limits for GPU 0"},
		{"N=0 C=6 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=4G", container, "says two limits for GPU 0"},
		{"N=0 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G,GPU-aaaa=4G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "says two limits for GPU 0"},
		{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + uuid0 + "=6G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "limits for 1 GPUs, but no GPU is named"},
		{"CUDA_DEVICE_MEMORY_LIMIT_1=6g", "CUDA_DEVICE_MEMORY_LIMIT_1", "limits for 2 GPUs, but no GPU is named"},
		{"A_VISIBLE_DEVICES=1 N=0 CUDA_DEVICE_MEMORY_LIMIT_0=6g", "CUDA_DEVICE_MEMORY_LIMIT_0", "whole GPUs too"},
		{"N=0 CUDA_DEVICE_MEMORY_LIMIT=16g", "CUDA_DEVICE_MEMORY_LIMIT",
			"on GPU 0 (" + uuid0 + ") the limit 16384MiB is more than the GPU's 15109MiB"},
	} {
		q, err := speak(c.text, everything)
		if err != nil {
			t.Fatal(c.text, err)
		}
		grants, _, err := q.Resolve(node)
		refusal(t, c.text, grants, err, c.variable, c.reason)
	}
	// Refusals of later stages name the dialect's word.
	q, err := speak("CUDA_DEVICE_MEMORY_LIMIT=6g CUDA_DEVICE_SM_LIMIT=30 CUDA_TASK_PRIORITY=0", everything)
	if err != nil {
		t.Fatal(err)
	}
	refusal(t, "time", nil, q.RefuseTime("is not left", ""), "CUDA_DEVICE_SM_LIMIT", "is not left")
	refusal(t, "preload", nil, q.RefuseUnguarded(`enforcement = "preload"`, false), "CUDA_DEVICE_SM_LIMIT", "enforcement")
	q.Percent = 0
	refusal(t, "preload", nil, q.RefuseUnguarded(`enforcement = "preload"`, false), "CUDA_TASK_PRIORITY", "no priorities")
	if m, err := q.Placed(); err != nil || m != (Memory{Fixed: 6 * GiB}) {
		t.Errorf("placed: %v, %v", m, err)
	}
}

func TestParseDialect(t *testing.T) {
	for _, d := range Dialects() {
		if got, err := ParseDialect(string(d)); err != nil || got != d {
			t.Errorf("%s: %v, %v", d, got, err)
		}
		if len(d.Marks()) == 0 {
			t.Errorf("%s has no mark", d)
		}
	}
	for _, name := range []string{"", "HAMi", "4paradigm"} {
		if _, err := ParseDialect(name); err == nil || !strings.Contains(err.Error(), `"tkestack" or "gpushare"`) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if Dialect("x").Marks() != nil {
		t.Error("marks of no dialect")
	}
}

// TestMarksFindWords: whatever a dialect reads as a wish of its own has a mark of it.
func TestMarksFindWords(t *testing.T) {
	for _, d := range dialects {
		for _, word := range append(slices.Clone(d.memory), d.other...) {
			// These only say how to read another word, or nothing at all.
			if slices.Contains([]string{hamiPolicy, hamiOversubscribe, hamiDisable, mpsPriority, paiEnable, paiReserved}, word) {
				continue
			}
			escaped := strings.ReplaceAll(word, "/", `\/`)
			if !slices.ContainsFunc(d.marks, func(m string) bool { return strings.Contains(escaped, m) }) {
				t.Errorf("%s: no mark finds %s", d.name, word)
			}
		}
	}
}

// TestNumbered: only words that are read with a number are words with one.
func TestNumbered(t *testing.T) {
	var numbered []string
	for _, w := range Words() {
		if w.Numbered {
			numbered = append(numbered, w.Name)
		}
	}
	if want := []string{hamiMemory, hamiSM}; !slices.Equal(numbered, want) {
		t.Errorf("numbered are %v, want %v", numbered, want)
	}
	env, annotations := spoken("CUDA_TASK_PRIORITY_0=0 GPU_CORE_UTILIZATION_POLICY_0=disable CUDA_OVERSUBSCRIBE_0=1 CUDA_DISABLE_CONTROL_0=1")
	if said := new(settings).listen(env, annotations, Dialects()); said != nil {
		t.Errorf("heard %+v", said)
	}
	env, annotations = spoken("CUDA_DEVICE_SM_LIMIT_0=30 CUDA_DEVICE_MEMORY_LIMIT_1=6g")
	if said := new(settings).listen(env, annotations, Dialects()); len(said) != 1 || len(said[0].words) != 2 || !said[0].asks {
		t.Errorf("heard %+v", said)
	}
}

// TestDocumented: docs/dialects.md has a section for each dialect with every word in it, and configs/cgpu.toml names them all.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/dialects.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for section := range strings.SplitSeq(string(text), "\n## ") {
		name, _, _ := strings.Cut(section, ":")
		sections[name] = section
	}
	for _, d := range dialects {
		section, words := sections[string(d.name)], append(slices.Clone(d.memory), d.other...)
		if d.name == DialectGPUShare {
			words = []string{names[memIdx].variable, names[memPod].variable, names[memDev].variable}
		}
		for _, word := range words {
			if !strings.Contains(section, "`"+word+"`") {
				t.Errorf("docs/dialects.md does not have %s in section %s", word, d.name)
			}
			if slices.Contains(d.numbered, word) && !strings.Contains(section, "`"+word+"_N`") {
				t.Errorf("docs/dialects.md does not have %s_N", word)
			}
		}
	}
	for _, file := range []string{"../../configs/cgpu.toml", "../../docs/variables.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range Dialects() {
			if !strings.Contains(string(text), `"`+string(d)+`"`) {
				t.Errorf("%s does not name %s", file, d)
			}
		}
	}
}
