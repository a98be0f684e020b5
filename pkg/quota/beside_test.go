// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"strings"
	"testing"
)

func TestBeside(t *testing.T) {
	given := Slice{Share: Share{Weight: 2, Percent: 30, Priority: PriorityDefault}, Spill: 2 * GiB}
	for _, tt := range []struct {
		name, env   string // joined by spaces
		annotations map[string]string
		free        []Choice
		given       Slice
		want        Slice
	}{
		{name: "nothing said", given: given, want: given},
		{
			name:  "nothing can be raised",
			env:   "A_SCHD_WEIGHT=9 A_CORE_PERCENTAGE=90 A_HIGH_PRIO=1 CGPU_MEM_SPILL=64 C=15 A_MEM_DEV=15 N=all CGPU_DISABLE=true",
			given: given, want: given,
		},
		{
			name: "nor by annotations",
			annotations: map[string]string{"cgpu.io/gpu-schd-weight": "9", "cgpu.io/gpu-core-percentage": "90", "cgpu.io/priority": "high",
				"cgpu.io/gpu-mem-spill": "64", "cgpu.io/gpu-mem-container": "15", "cgpu.io/disable": "true"},
			given: given, want: given,
		},
		{
			name:  "all can be lowered",
			env:   "A_SCHD_WEIGHT=1 A_CORE_PERCENTAGE=10 CGPU_MEM_SPILL=0",
			given: given, annotations: map[string]string{"cgpu.io/priority": "best-effort"},
			want: Slice{Share: Share{Weight: 1, Percent: 10, Priority: PriorityBestEffort}},
		},
		{name: "no high priority any more", env: "A_HIGH_PRIO=0", given: Slice{Share: Share{Priority: PriorityHigh}},
			want: Slice{Share: Share{Priority: PriorityDefault}}},
		{name: "the default is not higher", env: "A_HIGH_PRIO=0", given: Slice{Share: Share{Priority: PriorityBestEffort}},
			want: Slice{Share: Share{Priority: PriorityBestEffort}}},
		{name: "a percentage where there is none is a promise", env: "A_CORE_PERCENTAGE=10", given: Slice{}, want: Slice{}},
		{
			name: "free", env: "A_SCHD_WEIGHT=9 A_CORE_PERCENTAGE=90 A_HIGH_PRIO=1 CGPU_MEM_SPILL=64", free: Choices(),
			given: given, want: Slice{Share: Share{Weight: 9, Percent: 90, Priority: PriorityHigh}, Spill: 64 * GiB},
		},
		{
			name: "only the weight is free", env: "A_SCHD_WEIGHT=9 A_CORE_PERCENTAGE=90 A_HIGH_PRIO=1 CGPU_MEM_SPILL=64",
			free:  []Choice{ChooseWeight},
			given: given, want: Slice{Share: Share{Weight: 9, Percent: 30, Priority: PriorityDefault}, Spill: 2 * GiB},
		},
		{name: "the plugin's variable, then the author's lower one", env: "A_CORE_PERCENTAGE=30 A_CORE_PERCENTAGE=20", given: given,
			want: Slice{Share: Share{Weight: 2, Percent: 20, Priority: PriorityDefault}, Spill: 2 * GiB}},
		{name: "the plugin's variable, then the author's higher one", env: "A_CORE_PERCENTAGE=30 A_CORE_PERCENTAGE=100",
			given: given, want: given},
	} {
		q, err := Beside(expand(tt.env), tt.annotations)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got := q.Within(tt.given, tt.free); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
	if q, err := Beside([]string{"CGPU_LIMITER=off"}, nil); err != nil || !q.NoLimiter {
		t.Errorf("%+v, %v", q, err)
	}
	if _, err := Beside(expand("A_SCHD_WEIGHT=x"), nil); err == nil || !strings.Contains(err.Error(), "ALIYUN_COM_GPU_SCHD_WEIGHT") {
		t.Error(err)
	}
}

// FuzzBeside: whatever the author of a pod writes, what was allocated gets no larger.
func FuzzBeside(f *testing.F) {
	f.Add("A_SCHD_WEIGHT=9 A_CORE_PERCENTAGE=90 A_HIGH_PRIO=1 CGPU_MEM_SPILL=64", "cgpu.io/priority", "high", 2, 30, 1, uint64(GiB))
	f.Add("C=15 A_MEM_DEV=15", "cgpu.io/gpu-mem-spill", "0", 0, 0, 0, uint64(0))
	f.Fuzz(func(t *testing.T, env, name, value string, weight, percent, priority int, spill uint64) {
		q, err := Beside(expand(env), map[string]string{name: value})
		if err != nil {
			checkMessage(t, err)
			return
		}
		given := Slice{Share: Share{Weight: weight, Percent: percent, Priority: Priority(priority)}, Spill: Bytes(spill)}
		got := q.Within(given, nil)
		if got.Weight > given.Weight || got.Percent > given.Percent || got.Priority > given.Priority || got.Spill > given.Spill {
			t.Fatalf("%+v of %+v", got, given)
		}
	})
}
