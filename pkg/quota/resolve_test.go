// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

const t4 = 15109 * MiB

var node = []GPU{{0, uuid0, t4}, {1, uuid1, t4}, {2, uuid2, 143771 * MiB}}

func TestLimit(t *testing.T) {
	for _, c := range []struct {
		memory Memory
		card   Bytes
		want   Bytes
	}{
		{Memory{Num: 6, Den: 15}, t4, 6043 * MiB},
		{Memory{Num: 15, Den: 15}, t4, t4},
		{Memory{Num: 1, Den: 1}, t4 + 5, t4},
		{Memory{Num: 1<<64 - 1, Den: 1<<64 - 1}, 1<<64 - 1, Bytes(1<<64 - 1).FloorMiB()},
		{Memory{Num: 64, Den: 15109}, t4, MinMemory},
		{Memory{Fixed: MinMemory}, t4, MinMemory},
		{Memory{Fixed: 6 * GiB}, t4, 6 * GiB},
		{Memory{Fixed: t4}, t4, t4},
	} {
		if got, err := c.memory.Limit(c.card); err != nil || got != c.want {
			t.Errorf("%v of %v: got %v, %v; want %v", c.memory, c.card, got, err, c.want)
		}
	}
	for _, c := range []struct {
		memory Memory
		card   Bytes
		reason string
	}{
		{Memory{Fixed: 15 * GiB}, t4, "is more than the GPU's 15109MiB"},
		{Memory{Num: 16, Den: 15}, t4, "is more than one whole GPU"},
		{Memory{Num: 1, Den: 15110}, t4, "is less than 64MiB"},
		{Memory{Num: 1, Den: 1<<64 - 1}, 1<<64 - 1, "is less than 64MiB"},
		{Memory{Num: 63, Den: 15109}, t4, "is less than 64MiB"},
		{Memory{Fixed: 63 * MiB}, t4, "is less than 64MiB"},
		{Memory{}, t4, "is less than 64MiB"},
		{Memory{Num: 1, Den: 1}, 0, "is less than 64MiB"},
	} {
		_, err := c.memory.Limit(c.card)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(e.Reason, c.reason) {
			t.Errorf("%v of %v: got %v, want %q", c.memory, c.card, err, c.reason)
		}
	}
}

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		env    string
		grants []Grant
		native []int
	}{
		{"C=6 A_MEM_DEV=15", nil, nil},
		{"C=6 A_MEM_DEV=15 A_VISIBLE_DEVICES=0", []Grant{{0, 6043 * MiB}}, nil},
		{"C=6 A_MEM_DEV=15 A_VISIBLE_DEVICES=2,0", []Grant{{0, 6043 * MiB}, {2, 57508 * MiB}}, nil},
		{"C=6 A_VISIBLE_DEVICES=all", []Grant{{0, 6 * GiB}, {1, 6 * GiB}, {2, 6 * GiB}}, nil},
		{"C=6 A_VISIBLE_DEVICES=" + uuid1, []Grant{{1, 6 * GiB}}, nil},
		{"C=6 A_VISIBLE_DEVICES=GPU-AAAAB", []Grant{{1, 6 * GiB}}, nil},
		{"C=6 A_VISIBLE_DEVICES=GPU-c N=1,GPU-aaaaa", []Grant{{2, 6 * GiB}}, []int{0, 1}},
		{"C=6 A_VISIBLE_DEVICES=0 N=all", []Grant{{0, 6 * GiB}}, nil},
		{"C=100 N=02", []Grant{{2, 100 * GiB}}, nil},
	} {
		q, err := FromSpec(expand(c.env), nil)
		if err != nil {
			t.Errorf("%s: %v", c.env, err)
			continue
		}
		grants, native, err := q.Resolve(node)
		if err != nil || !reflect.DeepEqual(grants, c.grants) || !reflect.DeepEqual(native, c.native) {
			t.Errorf("%s: got %v, %v, %v; want %v, %v", c.env, grants, native, err, c.grants, c.native)
		}
	}
}

func TestResolveRefused(t *testing.T) {
	for _, c := range []struct{ env, annotations, variable, reason string }{
		{"C=6 A_VISIBLE_DEVICES=3", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", `no GPU "3" among the 3`},
		{"C=6 A_VISIBLE_DEVICES=99999999999999999999999", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "no GPU"},
		{"C=6 A_VISIBLE_DEVICES=GPU-dddd", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "no GPU"},
		{"C=6 A_VISIBLE_DEVICES=GPU-aaaa", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "more than one UUID: GPU 0 (" + uuid0 + ") and GPU 1"},
		{"C=6 A_VISIBLE_DEVICES=1,GPU-aaaab", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "twice"},
		{"C=6 A_VISIBLE_DEVICES=1,01", "", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "twice"},
		{"C=6 A_VISIBLE_DEVICES=0 N=" + uuid0, "", "NVIDIA_VISIBLE_DEVICES", "sliced too"},
		{"C=6 A_VISIBLE_DEVICES=0 N=7", "", "NVIDIA_VISIBLE_DEVICES", "no GPU"},
		{"C=6 A_MEM_IDX=5", "", "ALIYUN_COM_GPU_MEM_IDX", "no GPU"},
		{"C=6 N=5", "", "NVIDIA_VISIBLE_DEVICES", "no GPU"},
		{"C=15 A_VISIBLE_DEVICES=0", "", container, "on GPU 0 (" + uuid0 + ") the limit 15360MiB is more than the GPU's 15109MiB"},
		{"C=1 A_MEM_DEV=99999 A_VISIBLE_DEVICES=0", "", "ALIYUN_COM_GPU_MEM_DEV", "the limit 1/99999 is less than 64MiB"},
		{"CGPU_MEM=15 CGPU_GPUS=0", "", "CGPU_MEM", "more than the GPU's 15109MiB"},
		{"CGPU_MEM=5 CGPU_GPUS=7", "", "CGPU_GPUS", "no GPU"},
		{"", "gpu-mem-container=15 gpu-visible-devices=0", "cgpu.io/gpu-mem-container", "more than the GPU's"},
	} {
		q, err := FromSpec(expand(c.env), annotate(c.annotations))
		if err != nil {
			t.Errorf("%s: %v", c.env, err)
			continue
		}
		grants, native, err := q.Resolve(node)
		var e *Error
		if !errors.As(err, &e) || grants != nil || native != nil {
			t.Errorf("%s: got %v, %v, %v; want an *Error", c.env, grants, native, err)
			continue
		}
		if e.Variable != c.variable || !strings.Contains(e.Reason, c.reason) {
			t.Errorf("%s: got %v; want %s and %q", c.env, err, c.variable, c.reason)
		}
		checkMessage(t, err)
	}
	for _, selector := range []string{"all", "0"} {
		q, _ := FromSpec([]string{container + "=6", "ALIYUN_COM_GPU_VISIBLE_DEVICES=" + selector}, nil)
		if _, _, err := q.Resolve(nil); err == nil || !strings.Contains(err.Error(), "has no GPU") {
			t.Errorf("no GPU: %v", err)
		}
	}
}

// A number without a unit that no card has was meant as MiB.
func TestMisfitTellsTheUnit(t *testing.T) {
	for env, remedy := range map[string]string{
		"C=6000":                   `a number alone is GiB: write 6000MiB if that is meant`,
		"CGPU_MEM=6000":            `a number alone is GiB: write 6000MiB if that is meant`,
		"C=6000GiB":                "ask for less",
		"C=16":                     "ask for less", // GiB was meant
		"C=6144000 A_MEM_UNIT=MiB": "ask for less",
	} {
		q, err := FromSpec(expand(env+" A_VISIBLE_DEVICES=0"), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = q.Resolve(node)
		var e *Error
		if !errors.As(err, &e) || !strings.HasPrefix(e.Remedy, remedy) {
			t.Errorf("%s: got %v, want %q", env, err, remedy)
		}
	}
}

// A Quota that FromSpec did not make (tests, cgpu spec) must resolve too.
func TestResolveByHand(t *testing.T) {
	q := &Quota{Memory: Memory{Num: 1, Den: 2}, Visible: Selector{IDs: []string{"\x00" + strings.Repeat("x", 9999)}}}
	_, _, err := q.Resolve(node)
	if err == nil {
		t.Fatal("found a GPU")
	}
	checkMessage(t, err)
}
