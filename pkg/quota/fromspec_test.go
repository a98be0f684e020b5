// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

const (
	container = "ALIYUN_COM_GPU_MEM_CONTAINER"
	uuid0     = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
	uuid1     = "GPU-aaaabbbb-0000-0000-0000-000000000001"
	uuid2     = "GPU-cccccccc-0000-0000-0000-000000000002"
)

func TestNamesAreSystematic(t *testing.T) {
	for _, n := range names {
		if n.variable == "" {
			continue
		}
		short := strings.TrimPrefix(strings.TrimPrefix(n.variable, "ALIYUN_COM_"), "CGPU_")
		if n.variable == "CGPU_MEM_SPILL" {
			short = "GPU_MEM_SPILL"
		}
		if want := "cgpu.io/" + strings.ReplaceAll(strings.ToLower(short), "_", "-"); n.annotation != want {
			t.Errorf("%s: annotation %s, want %s", n.variable, n.annotation, want)
		}
	}
}

func TestNotAsked(t *testing.T) {
	for name, env := range map[string][]string{
		"nothing":                nil,
		"plain":                  {"PATH=/bin", "A", "", "=x"},
		"nvidia only":            {"NVIDIA_VISIBLE_DEVICES=0,0,MIG-x"},
		"other variables, bad":   {"ALIYUN_COM_GPU_MEM_DEV=x", "ALIYUN_COM_GPU_SCHD_WEIGHT=0", "CGPU_MEM_SPILL=x", "CGPU_LIMITER=x"},
		"case matters":           {"aliyun_com_gpu_mem_container=x"},
		"longer name":            {container + "S=x"},
		"native, without memory": {"CGPU_WEIGHT=x", "CGPU_GPUS=x", "CGPU_MEMORY=6"},
		"off, all else bad":      {container + "=x", container + "=y", "CGPU_DISABLE=true", "ALIYUN_COM_GPU_MEM_IDX=-1"},
		"off with 1":             {container + "=6", "CGPU_DISABLE=1"},
	} {
		if q, err := FromSpec(env, nil); q != nil || err != nil {
			t.Errorf("%s: got %+v, %v; want neither", name, q, err)
		}
	}
	annotations := map[string]string{"cgpu.io/gpu-mem-container": "x", "cgpu.io/disable": "1"}
	if q, err := FromSpec(nil, annotations); q != nil || err != nil {
		t.Errorf("off by annotation: got %+v, %v", q, err)
	}
	// A pod annotation of gpushare is not ours.
	if q, err := FromSpec(nil, map[string]string{container: "6"}); q != nil || err != nil {
		t.Errorf("foreign annotation: got %+v, %v", q, err)
	}
}

func TestAsked(t *testing.T) {
	ids := func(ids ...string) Selector { return Selector{IDs: ids} }
	all := Selector{All: true}
	const best = Priority(-1) // best effort is 0, which stands for the default below
	for _, c := range []struct {
		name string
		// separated by spaces; C= stands for ALIYUN_COM_GPU_MEM_CONTAINER=, A_ for ALIYUN_COM_GPU_, N= for NVIDIA_VISIBLE_DEVICES=
		env         string
		annotations string // the same, each without cgpu.io/
		want        Quota
	}{
		{"fraction", "C=6 A_MEM_DEV=15", "", Quota{Memory: Memory{Num: 6, Den: 15}}},
		{"whole card", "C=15 A_MEM_DEV=15", "", Quota{Memory: Memory{Num: 15, Den: 15}}},
		{"zeros before", "C=006 A_MEM_DEV=15", "", Quota{Memory: Memory{Num: 6, Den: 15}}},
		{"huge fraction", "C=18446744073709551615 A_MEM_DEV=18446744073709551615", "", Quota{Memory: Memory{Num: 1<<64 - 1, Den: 1<<64 - 1}}},
		{"unit does not matter to a fraction", "C=6144 A_MEM_DEV=15360 A_MEM_UNIT=MiB", "", Quota{Memory: Memory{Num: 6144, Den: 15360}}},
		{"GiB", "C=6", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"unit GiB", "C=6 A_MEM_UNIT=GiB", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"unit MiB", "C=6144 A_MEM_UNIT=MiB", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"own unit beats _MEM_UNIT", "C=6GiB A_MEM_UNIT=MiB", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"decimal", "C=1.5", "", Quota{Memory: Memory{Fixed: 1536 * MiB}}},
		{"decimal GiB", "C=1.5GiB", "", Quota{Memory: Memory{Fixed: 1536 * MiB}}},
		{"decimal rounds down", "C=0.0019", "", Quota{Memory: Memory{Fixed: MiB}}},
		{"nine places", "C=1.999999999", "", Quota{Memory: Memory{Fixed: 2047 * MiB}}},
		{"decimal of MiB", "C=2.9 A_MEM_UNIT=MiB", "", Quota{Memory: Memory{Fixed: 2 * MiB}}},
		{"MiB", "C=6144MiB", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"G and M are binary", "C=6G", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"m", "C=512m", "", Quota{Memory: Memory{Fixed: 512 * MiB}}},
		{"GB is binary, as in docker's --memory", "C=6gb", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"native names", "CGPU_MEM=6GiB CGPU_WEIGHT=3 CGPU_PERCENT=40 CGPU_GPUS=0,1", "",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Weight: 3, Percent: 40}}, Visible: ids("0", "1")}},
		{"both names, the same value", "CGPU_MEM=6 C=6", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"native name and units", "CGPU_MEM=6 A_MEM_DEV=15", "", Quota{Memory: Memory{Num: 6, Den: 15}}},
		{"a pod cannot lift an annotated limit by native names", "CGPU_MEM=15 CGPU_GPUS=all CGPU_WEIGHT=64 CGPU_PERCENT=100",
			"gpu-mem-container=3",
			Quota{Memory: Memory{Fixed: 3 * GiB}}},
		{"Mi", "C=512Mi", "", Quota{Memory: Memory{Fixed: 512 * MiB}}},
		{"largest", "C=17179869183", "", Quota{Memory: Memory{Fixed: 17179869183 * GiB}}},
		{"twice the same", "C=6 C=6", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"not switched off", "C=6 CGPU_DISABLE=false", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},

		{"indices", "C=6 A_VISIBLE_DEVICES=0,2", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("0", "2")}},
		{"UUIDs", "C=6 A_VISIBLE_DEVICES=GPU-aaaa," + uuid2, "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("GPU-aaaa", uuid2)}},
		{"all", "C=6 A_VISIBLE_DEVICES=all", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: all}},
		{"mixed", "C=6 A_VISIBLE_DEVICES=1 N=0,2", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("1"), Native: ids("0", "2")}},
		{"all is never native", "C=6 A_VISIBLE_DEVICES=1 N=all", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("1")}},
		{"all and all", "C=6 A_VISIBLE_DEVICES=all N=all", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: all}},
		{"--gpus all after the user's", "C=6 A_VISIBLE_DEVICES=1 N=0 N=all", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("1")}},
		{"void after CDI", "C=6 A_VISIBLE_DEVICES=0 N=3 N=void", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("0"), Native: ids("3")}},
		{"NVIDIA's list is sliced", "C=6 N=1,2", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("1", "2")}},
		{"NVIDIA's all is sliced", "C=6 N=all", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: all}},
		{"NVIDIA's last", "C=6 N=all N=2", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("2")}},
		{"void, then a list", "C=6 N=void N=2 N=void N=void", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("2")}},
		{"only void", "C=6 N=void", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"none", "C=6 N=none", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"empty", "C=6 N=", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"gpushare", "C=6 A_MEM_DEV=15 A_MEM_IDX=1 A_MEM_POD=6 N=1", "", Quota{Memory: Memory{Num: 6, Den: 15}, Visible: ids("1")}},
		{"gpushare, one GPU", "C=6 A_MEM_DEV=15 A_MEM_IDX=0 A_MEM_POD=6 N=" + uuid0, "",
			Quota{Memory: Memory{Num: 6, Den: 15}, Visible: ids("0")}},
		{"a pod cannot add whole GPUs to gpushare's", "C=6 A_MEM_IDX=1 N=0,1,2", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("1")}},
		{"the list beats the index", "C=6 A_MEM_IDX=1 A_VISIBLE_DEVICES=2 N=1", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Visible: ids("2")}},

		{"weight", "C=6 A_SCHD_WEIGHT=64", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Weight: 64}}}},
		{"percent", "C=6 A_CORE_PERCENTAGE=100", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Percent: 100}}}},
		{"high", "C=6 A_HIGH_PRIO=1", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: PriorityHigh}}}},
		{"high", "C=6 A_HIGH_PRIO=true", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: PriorityHigh}}}},
		{"not high", "C=6 A_HIGH_PRIO=0", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},

		{"spill", "C=6 CGPU_MEM_SPILL=4", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Spill: 4 * GiB}}},
		{"spill of a size", "C=6 CGPU_MEM_SPILL=512MiB", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Spill: 512 * MiB}}},
		{"spill of a decimal rounds down", "C=6 CGPU_MEM_SPILL=0.0019", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Spill: MiB}}},
		{"no spill", "C=6 CGPU_MEM_SPILL=0", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"spill is no fraction", "C=6 A_MEM_DEV=15 A_MEM_UNIT=MiB CGPU_MEM_SPILL=4", "",
			Quota{Memory: Memory{Num: 6, Den: 15}, Slice: Slice{Spill: 4 * GiB}}},
		{"spill is no part of the pod's", "C=6 A_MEM_POD=6 CGPU_MEM_SPILL=7", "",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Spill: 7 * GiB}}},
		{"spill beyond any card", "C=6 CGPU_MEM_SPILL=999999", "", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Spill: 999999 * GiB}}},
		{"annotated spill beats the variable", "C=6 CGPU_MEM_SPILL=4 CGPU_MEM_SPILL=5", "gpu-mem-spill=1GiB",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Spill: GiB}}},
		{"a pod cannot add spill to an annotated request", "CGPU_MEM_SPILL=4", "gpu-mem-container=6", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"limiter off", "C=6 CGPU_LIMITER=off", "", Quota{Memory: Memory{Fixed: 6 * GiB}, NoLimiter: true}},
		{"limiter false", "C=6 CGPU_LIMITER=false", "", Quota{Memory: Memory{Fixed: 6 * GiB}, NoLimiter: true}},
		{"limiter 0", "C=6", "limiter=0", Quota{Memory: Memory{Fixed: 6 * GiB}, NoLimiter: true}},
		{"limiter on", "C=6 CGPU_LIMITER=on", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"limiter true", "C=6 CGPU_LIMITER=true", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"limiter 1 by annotation beats off", "C=6 CGPU_LIMITER=off", "limiter=1", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"a pod cannot switch an annotated request's limiter off", "CGPU_LIMITER=off", "gpu-mem-container=6",
			Quota{Memory: Memory{Fixed: 6 * GiB}}},

		{"annotations", "",
			"gpu-mem-container=6 gpu-mem-dev=15 gpu-visible-devices=1 nvidia-visible-devices=0 gpu-schd-weight=2 gpu-high-prio=1 " +
				"gpu-core-percentage=20",
			Quota{Memory: Memory{Num: 6, Den: 15}, Visible: ids("1"), Native: ids("0"),
				Slice: Slice{Share: Share{Weight: 2, Percent: 20, Priority: PriorityHigh}}}},
		{"best effort", "C=6", "priority=best-effort", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: best}}}},
		{"priority by name", "C=6", "priority=high", Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: PriorityHigh}}}},
		{"the name beats the variable", "C=6 A_HIGH_PRIO=1", "priority=default", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"the name beats the variable, which is not looked at", "C=6 A_HIGH_PRIO=x A_HIGH_PRIO=y", "priority=high",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: PriorityHigh}}}},
		{"a pod can lower itself", "", "gpu-mem-container=6 gpu-high-prio=1 priority=best-effort",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: best}}}},
		{"a pod cannot raise itself", "", "gpu-mem-container=6 gpu-high-prio=0 priority=high", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"a variable cannot raise an annotated request", "A_HIGH_PRIO=1", "gpu-mem-container=6 priority=best-effort",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Priority: best}}}},
		{"there is no such variable", "C=6 CGPU_PRIORITY=high A_PRIORITY=high", "", Quota{Memory: Memory{Fixed: 6 * GiB}}},
		{"annotation beats variable", "C=15 A_MEM_DEV=15", "gpu-mem-container=3 gpu-mem-dev=15", Quota{Memory: Memory{Num: 3, Den: 15}}},
		{"annotation settles a duplicate", "C=3 C=15", "gpu-mem-container=3", Quota{Memory: Memory{Fixed: 3 * GiB}}},
		{"a pod cannot lift an annotated limit", "CGPU_DISABLE=1 A_MEM_DEV=3 A_MEM_UNIT=GiB A_VISIBLE_DEVICES=0,1 N=2",
			"gpu-mem-container=3 gpu-mem-dev=15 gpu-visible-devices=1",
			Quota{Memory: Memory{Num: 3, Den: 15}, Visible: ids("1")}},
		{"a pod cannot multiply an annotated limit", "N=all A_MEM_DEV=3 A_SCHD_WEIGHT=64", "gpu-mem-container=3GiB",
			Quota{Memory: Memory{Fixed: 3 * GiB}}},
		{"annotation beside a variable request", "C=6 A_SCHD_WEIGHT=5 A_SCHD_WEIGHT=6", "gpu-schd-weight=2",
			Quota{Memory: Memory{Fixed: 6 * GiB}, Slice: Slice{Share: Share{Weight: 2}}}},
	} {
		q, err := FromSpec(expand(c.env), annotate(c.annotations))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if q == nil {
			t.Errorf("%s: not asked", c.name)
			continue
		}
		switch c.want.Priority {
		case 0:
			c.want.Priority = PriorityDefault
		case best:
			c.want.Priority = PriorityBestEffort
		}
		c.want.Asked, c.want.Ignored = q.Asked, q.Ignored // TestIgnored
		if !reflect.DeepEqual(*q, c.want) {
			t.Errorf("%s: got %+v, want %+v", c.name, *q, c.want)
		}
		if want := c.want.Visible.IsZero(); q.NeedsPlacement() != want {
			t.Errorf("%s: needs placement: %v, want %v", c.name, !want, want)
		}
	}
}

func TestRefused(t *testing.T) {
	huge := strings.Repeat("9", 10<<20)
	for _, c := range []struct{ env, annotations, variable, reason string }{
		{"C=", "", container, "want a positive number"},
		{"C", "", container, "want a positive number"},
		{"C=0", "", container, "zero"},
		{"C=0.0", "", container, "zero"},
		{"C=0MiB", "", container, "zero"},
		{"C=-1", "", container, "want a positive number"},
		{"C=+1", "", container, "want a positive number"},
		{"C=7x", "", container, "want a positive number of GiB, or a size such as 6GiB or 6144MiB"},
		{"C=six", "", container, "want a positive number"},
		{"C=6TB", "", container, "want a positive number"},
		{"C=6 CGPU_MEM=7", "", container, `disagrees with CGPU_MEM="7"`},
		{"CGPU_MEM=7 C=6", "", "CGPU_MEM", `disagrees with ALIYUN_COM_GPU_MEM_CONTAINER="6"`},
		{"CGPU_MEM=6 CGPU_MEM=7", "", "CGPU_MEM", `is set a second time, to "7"`},
		{"CGPU_MEM=x", "", "CGPU_MEM", "want a positive number of GiB"},
		{"CGPU_MEM=6 CGPU_WEIGHT=65", "", "CGPU_WEIGHT", "1 to 64"},
		{"CGPU_MEM=6 A_SCHD_WEIGHT=2 CGPU_WEIGHT=3", "", "ALIYUN_COM_GPU_SCHD_WEIGHT", `disagrees with CGPU_WEIGHT="3"`},
		{"CGPU_MEM=6 CGPU_GPUS=x", "", "CGPU_GPUS", "no GPU"},
		{"CGPU_MEM=6 CGPU_PERCENT=0", "", "CGPU_PERCENT", "zero"},
		{"C=6KiB", "", container, "want a positive number"},
		{"C=GiB", "", container, "want a positive number"},
		{"C=.5", "", container, "want a positive number"},
		{"C=5.", "", container, "want a positive number"},
		{"C=1.2.3", "", container, "want a positive number"},
		{"C=1e3", "", container, "want a positive number"},
		{"C=0x10", "", container, "want a positive number"},
		{"C=٣", "", container, "want a positive number"},
		{"C=6,0", "", container, "want a positive number"},
		{"C=0.0000001", "", container, "less than 1MiB"},
		{"C=1.0000000001", "", container, "too many digits"},
		{"C=17179869184", "", container, "too large"},
		{"C=17179869183.999999999GiB", "", "", ""}, // just below 2^64
		{"C=99999999999999999999", "", container, "too large"},
		{"C=" + huge, "", container, "too many digits"},
		{"C=" + huge + " A_MEM_DEV=15", "", container, "too many digits"},
		{"C=6 A_MEM_DEV=" + huge, "", "ALIYUN_COM_GPU_MEM_DEV", "too many digits"},
		{"C=6 A_MEM_DEV=0", "", "ALIYUN_COM_GPU_MEM_DEV", "zero"},
		{"C=0 A_MEM_DEV=15", "", container, "zero"},
		{"C=6 A_MEM_DEV=", "", "ALIYUN_COM_GPU_MEM_DEV", "whole number"},
		{"C=6 A_MEM_DEV=15GiB", "", "ALIYUN_COM_GPU_MEM_DEV", "whole number"},
		{"C=6GiB A_MEM_DEV=15", "", container, "whole number of its units"},
		{"C=1.5 A_MEM_DEV=15", "", container, "whole number of its units"},
		{"C=16 A_MEM_DEV=15", "", container, "more than one whole GPU"},
		{"C=6 A_MEM_DEV=18446744073709551616", "", "ALIYUN_COM_GPU_MEM_DEV", "too large"},
		{"C=6 A_MEM_UNIT=KiB", "", "ALIYUN_COM_GPU_MEM_UNIT", "want GiB or MiB"},
		{"C=6 A_MEM_UNIT=", "", "ALIYUN_COM_GPU_MEM_UNIT", "want GiB or MiB"},
		{"C=3 C=15", "", container, "second time, to \"15\""},
		{"C=3 C=15 C=3", "", container, "second time, to \"15\""},
		{"C=3 C=" + huge, "", container, "second time"},
		{"C=3 A_MEM_DEV=15 A_MEM_DEV=3", "", "ALIYUN_COM_GPU_MEM_DEV", "second time"},
		{"C=3 CGPU_DISABLE=false CGPU_DISABLE=true", "", "CGPU_DISABLE", "second time"},
		{"C=3 CGPU_DISABLE=yes", "", "CGPU_DISABLE", "true or false"},
		{"C=3 A_VISIBLE_DEVICES=0 A_VISIBLE_DEVICES=1", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "second time"},
		{"C=6 A_MEM_POD=0", "", "ALIYUN_COM_GPU_MEM_POD", "zero"},
		{"C=6 A_MEM_POD=5", "", container, "more than the whole pod"},
		{"C=6 A_MEM_IDX=-1 N=no-gpu-has-6GiB-to-run", "", "NVIDIA_VISIBLE_DEVICES", "found no GPU"},
		{"C=6 A_MEM_IDX=-1", "", "ALIYUN_COM_GPU_MEM_IDX", "found no GPU"},
		{"C=6 N=no-gpu-has-6GiB-to-run", "", "NVIDIA_VISIBLE_DEVICES", "found no GPU"},
		{"C=6 A_MEM_IDX=-1 A_VISIBLE_DEVICES=0", "", "ALIYUN_COM_GPU_MEM_IDX", "found no GPU"},
		{"C=6 A_MEM_IDX=0,1", "", "ALIYUN_COM_GPU_MEM_IDX", "one GPU"},
		{"C=6 A_MEM_IDX=", "", "ALIYUN_COM_GPU_MEM_IDX", "one GPU"},
		{"C=6 A_VISIBLE_DEVICES=", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "names no GPU"},
		{"C=6 A_VISIBLE_DEVICES=none", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "names no GPU"},
		{"C=6 A_VISIBLE_DEVICES=0,0", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "twice"},
		{"C=6 A_VISIBLE_DEVICES=0,", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", `has "" in it`},
		{"C=6 A_VISIBLE_DEVICES=0,all", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", `has "all" in it`},
		{"C=6 A_VISIBLE_DEVICES=-1", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "no GPU"},
		{"C=6 A_VISIBLE_DEVICES=GPU-", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "no GPU"},
		{"C=6 A_VISIBLE_DEVICES=GPU-a/b", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "no GPU"},
		{"C=6 A_VISIBLE_DEVICES=MIG-1234", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "MIG"},
		{"C=6 A_VISIBLE_DEVICES=0:1", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "MIG"},
		{"C=6 N=MIG-1234", "", "NVIDIA_VISIBLE_DEVICES", "MIG"},
		{"C=6 N=0,void", "", "NVIDIA_VISIBLE_DEVICES", `has "void" in it`},
		{"C=6 A_VISIBLE_DEVICES=" + huge, "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "too long"},
		{"C=6 A_VISIBLE_DEVICES=" + strings.Repeat("1,", 64) + "1", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "too long"},
		{"C=6 A_VISIBLE_DEVICES=0 N=0,1", "", "NVIDIA_VISIBLE_DEVICES", `names GPU "0", which is to be sliced too`},
		{"C=6 A_VISIBLE_DEVICES=all N=1", "", "NVIDIA_VISIBLE_DEVICES", "sliced too"},
		{"C=6 A_VISIBLE_DEVICES=GPU-AA N=GPU-aa N=void", "", "NVIDIA_VISIBLE_DEVICES", "sliced too"},
		{"C=6 A_SCHD_WEIGHT=0", "", "ALIYUN_COM_GPU_SCHD_WEIGHT", "zero; want a whole number from 1 to 64"},
		{"C=6 A_SCHD_WEIGHT=65", "", "ALIYUN_COM_GPU_SCHD_WEIGHT", "from 1 to 64"},
		{"C=6 A_SCHD_WEIGHT=1.5", "", "ALIYUN_COM_GPU_SCHD_WEIGHT", "from 1 to 64"},
		{"C=6 A_SCHD_WEIGHT=" + huge, "", "ALIYUN_COM_GPU_SCHD_WEIGHT", "from 1 to 64"},
		{"C=6 A_CORE_PERCENTAGE=101", "", "ALIYUN_COM_GPU_CORE_PERCENTAGE", "from 1 to 100"},
		{"C=6 A_HIGH_PRIO=2", "", "ALIYUN_COM_GPU_HIGH_PRIO", "want 1 or true"},
		{"C=6 A_HIGH_PRIO=", "", "ALIYUN_COM_GPU_HIGH_PRIO", "want 1 or true"},
		{"C=6", "gpu-mem-container=x", "cgpu.io/gpu-mem-container", "want a positive number"},
		{"C=6", "gpu-schd-weight=0", "cgpu.io/gpu-schd-weight", "zero"},
		{"A_MEM_DEV=15", "gpu-mem-container=3", "cgpu.io/gpu-mem-container", "only a variable"},
		{"C=6", "priority=low", "cgpu.io/priority", "want best-effort, default or high"},
		{"C=6", "priority=", "cgpu.io/priority", "want best-effort, default or high"},
		{"C=6", "priority=best-effort gpu-high-prio=x", "cgpu.io/gpu-high-prio", "want 1 or true"},
		{"C=6 CGPU_MEM_SPILL=", "", "CGPU_MEM_SPILL", "want a positive number of GiB, a size such as 4GiB or 512MiB, or 0 for none"},
		{"C=6 CGPU_MEM_SPILL=-1", "", "CGPU_MEM_SPILL", "want a positive number"},
		{"C=6 CGPU_MEM_SPILL=4TB", "", "CGPU_MEM_SPILL", "or 0 for none"},
		{"C=6 CGPU_MEM_SPILL=0.0", "", "CGPU_MEM_SPILL", "is zero; want a positive number"},
		{"C=6 CGPU_MEM_SPILL=0.0000001", "", "CGPU_MEM_SPILL", "less than 1MiB; want"},
		{"C=6 CGPU_MEM_SPILL=" + huge, "", "CGPU_MEM_SPILL", "too many digits; want"},
		{"C=6 CGPU_MEM_SPILL=17179869184", "", "CGPU_MEM_SPILL", "too large"},
		{"C=6 CGPU_MEM_SPILL=4 CGPU_MEM_SPILL=5", "", "CGPU_MEM_SPILL", "second time"},
		{"C=6", "gpu-mem-spill=x", "cgpu.io/gpu-mem-spill", "or 0 for none"},
		{"C=6 CGPU_LIMITER=", "", "CGPU_LIMITER", "want on or off"},
		{"C=6 CGPU_LIMITER=OFF", "", "CGPU_LIMITER", "want on or off"},
		{"C=6 CGPU_LIMITER=on CGPU_LIMITER=off", "", "CGPU_LIMITER", "second time"},
		{"C=6", "limiter=no", "cgpu.io/limiter", "want on or off"},
		{"", "gpu-mem-container=3 disable=x", "cgpu.io/disable", "true or false"},
		{"C=1\n2", "", container, "want a positive number"},
		{"C=" + strings.Repeat("\x00", 999), "", container, "want a positive number"},
	} {
		// Values here may hold control characters, so only spaces separate.
		q, err := FromSpec(expand(c.env), annotate(c.annotations))
		show := c.env[:min(len(c.env), 60)]
		if c.variable == "" {
			if err != nil {
				t.Errorf("%q: %v", show, err)
			}
			continue
		}
		var e *Error
		if !errors.As(err, &e) || q != nil {
			t.Errorf("%q: got %+v, %v; want an *Error", show, q, err)
			continue
		}
		if e.Variable != c.variable || !strings.Contains(e.Reason, c.reason) {
			t.Errorf("%q: got %v; want %s and %q", show, err, c.variable, c.reason)
		}
		checkMessage(t, err)
	}
}

func TestPriorityNames(t *testing.T) {
	for name, p := range map[string]Priority{"best-effort": PriorityBestEffort, "default": PriorityDefault, "high": PriorityHigh} {
		if got, err := ParsePriority(name); err != nil || got != p || got.String() != name {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "0", "High"} {
		if p, err := ParsePriority(name); err == nil {
			t.Errorf("%q read as %v", name, p)
		}
	}
	if got := Priority(7).String(); got != "7" {
		t.Errorf("an unknown priority is called %s", got)
	}
}

func TestRefuse(t *testing.T) {
	time := func(q *Quota) error { return q.RefuseTime("no", "why not") }
	spill := func(q *Quota) error { return q.RefuseSpill("no", "why not") }
	for _, c := range []struct {
		refuse                 func(*Quota) error
		env, annotations, want string
	}{
		{time, "C=6 A_CORE_PERCENTAGE=60 A_SCHD_WEIGHT=3", "", `ALIYUN_COM_GPU_CORE_PERCENTAGE="60": no; why not`},
		{time, "C=6 A_SCHD_WEIGHT=3", "gpu-core-percentage=60", `cgpu.io/gpu-core-percentage="60": no; why not`},
		{time, "C=6 A_SCHD_WEIGHT=3", "", `ALIYUN_COM_GPU_SCHD_WEIGHT="3": no; why not`},
		{time, "C=6 A_HIGH_PRIO=1", "", ""},
		{spill, "C=6 CGPU_MEM_SPILL=4", "", `CGPU_MEM_SPILL="4": no; why not`},
		{spill, "C=6 CGPU_MEM_SPILL=4", "gpu-mem-spill=3GiB", `cgpu.io/gpu-mem-spill="3GiB": no; why not`},
		{spill, "C=6 CGPU_MEM_SPILL=0", "", ""},
		{spill, "C=6", "", ""},
	} {
		q, err := FromSpec(expand(c.env), annotate(c.annotations))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := c.refuse(q); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s %s: got %q, want %q", c.env, c.annotations, got, c.want)
		}
	}
}

func TestRefuseUnguarded(t *testing.T) {
	for _, c := range []struct{ env, annotations, want string }{
		{"C=6", "", ""},
		{"C=6 A_SCHD_WEIGHT=3 CGPU_MEM_SPILL=0 CGPU_LIMITER=on A_HIGH_PRIO=0", "priority=default", ""},
		{"C=6 CGPU_MEM_SPILL=4", "", `CGPU_MEM_SPILL="4": with enforcement = "preload"`},
		{"C=6", "gpu-mem-spill=4", `cgpu.io/gpu-mem-spill="4": with`},
		{"C=6 A_CORE_PERCENTAGE=100", "", `ALIYUN_COM_GPU_CORE_PERCENTAGE="100": with`},
		{"C=6 A_HIGH_PRIO=1", "", `ALIYUN_COM_GPU_HIGH_PRIO="1": with`},
		{"C=6", "priority=best-effort", `cgpu.io/priority="best-effort": with`},
		{"C=6 CGPU_LIMITER=off", "", `CGPU_LIMITER="off": with`},
	} {
		q, err := FromSpec(expand(c.env), annotate(c.annotations))
		if err != nil {
			t.Fatal(err)
		}
		err = q.RefuseUnguarded(`enforcement = "preload"`, false)
		only := q.RefuseUnguarded(`limits = "driver"`, true)
		want := strings.Contains(c.env, "WEIGHT=3") || c.want != "" && !strings.Contains(c.env, "LIMITER=off")
		if (only != nil) != want || want && (!strings.Contains(only.Error(), `with limits = "driver" in cgpu.toml `) ||
			!strings.Contains(only.Error(), `set limits = "guard" in cgpu.toml, or leave it out`)) {
			t.Errorf("%s %s: by the driver alone: %v, refused %v", c.env, c.annotations, only, want)
		}
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s %s: %v", c.env, c.annotations, err)
		case c.want != "" && (err == nil || !strings.HasPrefix(err.Error(), c.want) ||
			!strings.Contains(err.Error(), `set enforcement = "guard"`)):
			t.Errorf("%s %s: got %v, want %q and the remedy", c.env, c.annotations, err, c.want)
		}
		if err != nil {
			checkMessage(t, err)
		}
	}
}

func TestErrorText(t *testing.T) {
	for value, want := range map[string]string{
		"7x": `ALIYUN_COM_GPU_MEM_CONTAINER="7x": want a positive number of GiB, or a size such as 6GiB or 6144MiB`,
		strings.Repeat("1",
			10<<20): `ALIYUN_COM_GPU_MEM_CONTAINER="1111111111111111111111111111111111111111"…(10485760 bytes): has too many digits; want a positive number of GiB, or a size such as 6GiB or 6144MiB`,
		"\x1b[2J\n{\"level\":\"error\"}": `ALIYUN_COM_GPU_MEM_CONTAINER="\x1b[2J\n{\"level\":\"error\"}": want a positive number of GiB, or a size such as 6GiB or 6144MiB`,
	} {
		if _, err := FromSpec([]string{container + "=" + value}, nil); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// checkMessage holds every refusal to one short printable line.
func checkMessage(t *testing.T, err error) {
	t.Helper()
	text := err.Error()
	if len(text) >= 1024 {
		t.Errorf("message of %d bytes: %.200s", len(text), text)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		t.Errorf("control characters in %q", text)
	}
	if name, _, ok := strings.Cut(text, "="); !ok || strings.Contains(name, " ") {
		t.Errorf("begins with no name: %s", text)
	}
}

var short = strings.NewReplacer("C=", container+"=", "A_", "ALIYUN_COM_GPU_", "N=", "NVIDIA_VISIBLE_DEVICES=")

// expand writes a table's variables out.
func expand(env string) (out []string) {
	if env == "C" {
		return []string{container}
	}
	for entry := range strings.SplitSeq(env, " ") {
		name, value, _ := strings.Cut(entry, "=")
		out = append(out, short.Replace(name+"=")+value)
	}
	return out
}

func annotate(annotations string) map[string]string {
	out := map[string]string{}
	for entry := range strings.SplitSeq(annotations, " ") {
		if name, value, ok := strings.Cut(entry, "="); ok {
			out["cgpu.io/"+name] = value
		}
	}
	return out
}
