// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestMayAsk(t *testing.T) {
	for input, want := range map[string]bool{
		"docker20-plain": false, "docker20-gpus-all": false, "docker20-cgpu-env": true, "docker29-gpus-dev0-cgpu": true,
		"docker20-gpus-all-plus-env": true, // no memory limit, which is told
	} {
		if got := MayAsk(recorded(t, input)); got != want {
			t.Errorf("%s: %v, want %v", input, got, want)
		}
	}
	if !MayAsk([]byte(`{"annotations":{"cgpu.io\/gpu-mem-container":"6"}}`)) {
		t.Error("an annotation with an escaped slash was not found")
	}
}

// TestMaySpeak: nobody who asks for nothing is looked at further, and an escaped slash hides nothing.
func TestMaySpeak(t *testing.T) {
	for _, input := range []string{"docker20-plain", "docker20-gpus-all", "docker20-cgpu-env", "docker29-gpus-dev0-cgpu", "cri16-default",
		"cri16-default-sandbox"} {
		if may := MaySpeak(recorded(t, input)); may != nil {
			t.Errorf("%s: %v", input, may)
		}
	}
	for text, want := range map[string][]quota.Dialect{
		`{"env":["CUDA_DEVICE_MEMORY_LIMIT_0=6g"]}`:                                      {quota.DialectHAMi},
		`{"env":["NVIDIA_GPU_MEMORY_LIMITS=6","CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G"]}`: {quota.DialectNVIDIA, quota.DialectMPS},
		`{"env":["GPU_MEM_PER_DEVICE=1"]}`:                                               {quota.DialectPAI},
		`{"annotations":{"tencent.com\/vcuda-memory":"24"}}`:                             {quota.DialectTKEStack},
		`{"annotations":{"ALIYUN_COM_GPU_MEM_POD":"6"}}`:                                 {quota.DialectGPUShare},
		`{"env":["ALIYUN_COM_GPU_MEM_POD=6","ALIYUN_COM_GPU_MEM_IDX=0"]}`:                nil, // cgpu's own variables
	} {
		if got := MaySpeak([]byte(text)); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

// BenchmarkMarks is what a container of other people costs: the search for marks, of cgpu's own words and of dialects.
func BenchmarkMarks(b *testing.B) {
	raw := recorded(b, "docker20-plain")
	b.SetBytes(int64(len(raw)))
	b.Run("own", func(b *testing.B) {
		for b.Loop() {
			MayAsk(raw)
		}
	})
	b.Run("dialects", func(b *testing.B) {
		for b.Loop() {
			MaySpeak(raw)
		}
	})
}

func TestIsSandbox(t *testing.T) {
	for input, want := range map[string]bool{"cri16-default-sandbox": true, "cri16-default": false, "docker20-plain": false} {
		a, err := decode(t, recorded(t, input)).Annotations()
		if err != nil {
			t.Fatal(err)
		}
		if got := IsSandbox(a); got != want {
			t.Errorf("%s: %v, want %v", input, got, want)
		}
	}
}

// TestCRIO: CRI-O copies what a pod's author writes, so containerd's keys there say nothing of what or whose a container is.
func TestCRIO(t *testing.T) {
	crio := func(kind string) map[string]string {
		return map[string]string{
			"io.kubernetes.cri-o.ContainerType": kind, "io.container.manager": "cri-o",
			"io.kubernetes.pod.namespace": "team", "io.kubernetes.pod.name": "train", "io.kubernetes.pod.uid": "u",
			"io.kubernetes.container.name": "main",
		}
	}
	forged := func(kind, says string) map[string]string {
		a := crio(kind)
		a["io.kubernetes.cri.container-type"] = says
		a["io.kubernetes.cri.sandbox-namespace"], a["io.kubernetes.cri.sandbox-name"], a["io.kubernetes.cri.container-name"] = "other", "pod", "c"
		return a
	}
	for name, c := range map[string]struct {
		annotations  map[string]string
		sandbox, pod bool
		called       string
	}{
		"container":                 {crio("container"), false, true, "team/train/main"},
		"says it is a pause one":    {forged("container", "sandbox"), false, true, "team/train/main"},
		"forged name":               {forged("container", "container"), false, true, "team/train/main"},
		"pause":                     {crio("sandbox"), true, false, "team/train/main"},
		"pause that says it is not": {forged("sandbox", "container"), false, true, "team/train/main"},
		"containerd, all passed on": {map[string]string{"io.kubernetes.cri.container-type": "container",
			"io.kubernetes.cri-o.ContainerType": "sandbox"}, false, true, ""},
		"containerd": {map[string]string{"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-namespace": "team",
			"io.kubernetes.cri.sandbox-name":   "train",
			"io.kubernetes.cri.container-name": "main", "io.kubernetes.pod.name": "other", "io.kubernetes.container.name": "c"}, false,
			true, "team/train/main"},
	} {
		if s, p, n := IsSandbox(c.annotations), IsPod(c.annotations), Name(c.annotations); s != c.sandbox || p != c.pod || n != c.called {
			t.Errorf("%s: sandbox %v, pod %v, %q", name, s, p, n)
		}
	}
}

// TestUseInjected reads requests in the three shapes that --gpus has when the runtime sees it.
func TestUseInjected(t *testing.T) {
	gpus := []device.GPU{gpu(0), gpu(1), gpu(2), gpu(3)}
	const ask = "ALIYUN_COM_GPU_MEM_CONTAINER=2"
	for _, test := range []struct {
		input           string
		add             []string
		visible, native quota.Selector
	}{
		{"docker20-gpus-device", nil, quota.Selector{IDs: []string{"1", "2"}}, quota.Selector{}},
		{"docker20-gpus-all", nil, quota.Selector{All: true}, quota.Selector{}},
		{"docker20-gpus-all-plus-env", nil, quota.Selector{IDs: []string{"1"}}, quota.Selector{}}, // all is never native
		{"docker28-gpus-all-plus-cdi-device", nil, quota.Selector{IDs: []string{"0"}}, quota.Selector{}},
		{"docker28-gpus-all-plus-cdi-device", []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=2"}, quota.Selector{IDs: []string{"2"}},
			quota.Selector{IDs: []string{"0"}}},
		{"docker28-gpus-all-plus-cdi-device", []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=GPU-0"},
			quota.Selector{IDs: []string{"GPU-0"}}, quota.Selector{}},
		{"docker29-gpus-dev0-cgpu", nil, quota.Selector{IDs: []string{"0"}}, quota.Selector{}},
		{"docker29-privileged-gpus", nil, quota.Selector{IDs: []string{"0"}}, quota.Selector{}},
		{"docker20-privileged-gpus", nil, quota.Selector{All: true}, quota.Selector{}},
		{"docker20-plain", nil, quota.Selector{}, quota.Selector{}},
	} {
		doc := decode(t, recorded(t, test.input))
		env, err := doc.Env()
		if err != nil {
			t.Fatal(err)
		}
		q, err := quota.FromSpec(append(append(env, ask), test.add...), nil)
		if err != nil {
			t.Fatal(test.input, err)
		}
		if err := UseInjected(doc, q, gpus); err != nil {
			t.Fatal(err)
		}
		same := func(a, b quota.Selector) bool { return a.All == b.All && slices.Equal(a.IDs, b.IDs) }
		if !same(q.Visible, test.visible) || !same(q.Native, test.native) {
			t.Errorf("%s %v: visible %v native %v, want %v %v", test.input, test.add, q.Visible, q.Native, test.visible, test.native)
		}
	}
}
