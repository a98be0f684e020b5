// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// pod is a config.json as containerd's CRI plugin writes it, with what an allocator and the pod's author add.
type pod struct {
	env         []string
	annotations map[string]string
	hooks       [][]string // arguments of cgpu-hook
	sandbox     bool
}

func (p pod) config(t testing.TB) []byte {
	t.Helper()
	name := "cri16-default"
	if p.sandbox {
		name = "cri16-default-sandbox"
	}
	raw, err := os.ReadFile("../spec/testdata/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(raw, &config); err != nil {
		t.Fatal(err)
	}
	process := config["process"].(map[string]any)
	var env []any
	recorded, _ := process["env"].([]any)
	for _, e := range recorded {
		if !strings.HasPrefix(e.(string), "ALIYUN_") { // the recorded pod has a request of its own
			env = append(env, e)
		}
	}
	for _, e := range p.env {
		env = append(env, e)
	}
	process["env"] = env
	for name, value := range p.annotations {
		config["annotations"].(map[string]any)[name] = value
	}
	var hooks []any
	for _, args := range p.hooks {
		hooks = append(hooks, map[string]any{"path": "/usr/local/bin/cgpu-hook", "args": args})
	}
	if hooks != nil {
		config["hooks"] = map[string]any{"createRuntime": hooks}
	}
	raw, err = json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// share is a share of GPU n with so many GiB.
func share(n int, gib quota.Bytes) alloc.Share {
	return alloc.Share{ID: fmt.Sprint("claim/", n), UUID: fmt.Sprint("GPU-", n),
		Slice: quota.Slice{Limit: gib * quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1}
}

func hooks(shares ...alloc.Share) (all [][]string) {
	for _, s := range shares {
		all = append(all, alloc.HookArgs(s))
	}
	return all
}

// liar are a pod's lies: in its image or its spec, and in its annotations.
var liar = pod{
	env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=15", "ALIYUN_COM_GPU_MEM_DEV=15", "ALIYUN_COM_GPU_MEM_IDX=1", "NVIDIA_VISIBLE_DEVICES=all",
		"ALIYUN_COM_GPU_VISIBLE_DEVICES=0,1", "ALIYUN_COM_GPU_SCHD_WEIGHT=64", "ALIYUN_COM_GPU_HIGH_PRIO=1", "ALIYUN_COM_GPU_CORE_PERCENTAGE=100",
		"CGPU_MEM_SPILL=64", "CGPU_DISABLE=true"},
	annotations: map[string]string{"cgpu.io/gpu-mem-container": "15", "cgpu.io/gpu-mem-dev": "15", "cgpu.io/gpu-visible-devices": "all",
		"cgpu.io/priority": "high",
		"cgpu.io/disable":  "true", "cgpu.io/nvidia-visible-devices": "1", "cgpu.io/gpu-core-percentage": "100"},
}

func TestAllocated(t *testing.T) {
	slice := func(n int, gib quota.Bytes) ledger.VGPU {
		return ledger.VGPU{UUID: fmt.Sprint("GPU-", n),
			Slice: quota.Slice{Limit: gib * quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}
	}
	held := func(n int) ledger.Allocation {
		return ledger.Allocation{ID: fmt.Sprint("claim/", n), UUID: fmt.Sprint("GPU-", n), Containers: 1}
	}
	lies := func(p pod) pod {
		p.env = append(p.env, liar.env...)
		annotations := map[string]string{}
		for _, from := range []map[string]string{liar.annotations, p.annotations} {
			for name, value := range from {
				annotations[name] = value
			}
		}
		p.annotations = annotations
		return p
	}
	annotated := func(shares ...alloc.Share) map[string]string {
		return map[string]string{alloc.AnnotationShares: alloc.Annotate(shares)}
	}
	whole := alloc.Share{ID: "claim/1", UUID: "GPU-1", Whole: true, Containers: 1,
		Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}
	rich := share(0, 3)
	rich.Weight, rich.Percent, rich.Priority, rich.Spill, rich.Containers = 4, 40, quota.PriorityHigh, 2*quota.GiB, 3
	richSlice := slice(0, 3)
	richSlice.Weight, richSlice.Percent, richSlice.Priority, richSlice.Spill = 4, 40, quota.PriorityHigh, 2*quota.GiB
	for _, tt := range []struct {
		name     string
		pod      pod
		settings []quota.Choice
		want     ledger.Record
	}{
		{name: "a claim", pod: pod{hooks: hooks(share(0, 3))},
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(0, 3)}, Allocated: []ledger.Allocation{held(0)}}},
		{name: "a claim that was prepared twice", pod: pod{hooks: hooks(share(0, 3), whole, share(0, 3), whole)},
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(0, 3)}, Native: []string{"GPU-1"}, Allocated: []ledger.Allocation{held(0), held(1)}}},
		{name: "a lying pod with a claim", pod: lies(pod{hooks: hooks(share(0, 3))}),
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(0, 3)}, Allocated: []ledger.Allocation{held(0)}}},
		{name: "a lying pod with a limit", pod: lies(pod{annotations: annotated(share(1, 3))}),
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(1, 3)}, Allocated: []ledger.Allocation{held(1)}}},
		{name: "settings are of no use beside a claim", settings: quota.Choices(), pod: lies(pod{hooks: hooks(share(0, 3))}),
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(0, 3)}, Allocated: []ledger.Allocation{held(0)}}},
		{
			name: "a node that lets authors choose priority and weight", settings: []quota.Choice{quota.ChoosePriority, quota.ChooseWeight},
			pod: lies(pod{annotations: annotated(share(1, 3))}),
			want: ledger.Record{VGPUs: []ledger.VGPU{{UUID: "GPU-1",
				Slice: quota.Slice{Limit: 3 * quota.GiB, Share: quota.Share{Weight: 64, Priority: quota.PriorityHigh}}}},
				Allocated: []ledger.Allocation{held(1)}},
		},
		{name: "all that a claim says", pod: pod{hooks: hooks(rich)}, want: ledger.Record{VGPUs: []ledger.VGPU{richSlice},
			Allocated: []ledger.Allocation{{ID: "claim/0", UUID: "GPU-0", Containers: 3}}}},
		{
			name: "claim and limit", pod: pod{hooks: hooks(share(0, 3)), annotations: annotated(share(1, 5))},
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(0, 3), slice(1, 5)}, Allocated: []ledger.Allocation{held(0), held(1)}},
		},
		{
			name: "a whole GPU beside a share", pod: lies(pod{hooks: hooks(share(0, 3), whole)}),
			want: ledger.Record{VGPUs: []ledger.VGPU{slice(0, 3)}, Native: []string{"GPU-1"}, Allocated: []ledger.Allocation{held(0), held(1)}},
		},
		{
			name: "the plugin's percentage", pod: pod{annotations: map[string]string{alloc.AnnotationShares: share(0, 3).Text(),
				alloc.AnnotationPercent: "30"}},
			want: ledger.Record{VGPUs: []ledger.VGPU{{UUID: "GPU-0",
				Slice: quota.Slice{Limit: 3 * quota.GiB, Share: quota.Share{Weight: 1, Percent: 30, Priority: quota.PriorityDefault}}}},
				Allocated: []ledger.Allocation{held(0)}},
		},
	} {
		for _, pods := range []string{"", device.PodsAny, device.PodsAllocated, device.PodsGPUShare} {
			a, err := Read(tt.pod.config(t))
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
				continue
			}
			if !a.Pod || a.Edited != (len(tt.pod.hooks) > 0) {
				t.Errorf("%s: %+v", tt.name, a)
			}
			tab := table()
			tab.Config.Pods, tab.Config.PodSettings = pods, tt.settings
			tab.HostMemory = 1 << 40
			if err := a.Settle(tab, nil); err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			got, err := a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, tab, "/r")
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
				continue
			}
			r := got.Record
			for i, s := range a.Shares {
				given := r.Allocated[i].Given
				if given.Limit != s.Limit || given.Percent != s.Percent || given.Weight > max(s.Weight, 1) || r.Allocated[i].Plugin != s.Plugin {
					t.Errorf("%s: %+v of %+v", tt.name, r.Allocated[i], s)
				}
				r.Allocated[i].Given, r.Allocated[i].Plugin = ledger.VGPU{}, false
			}
			if got.Place != nil || !reflect.DeepEqual(r.VGPUs, tt.want.VGPUs) || !reflect.DeepEqual(r.Native, tt.want.Native) ||
				!reflect.DeepEqual(r.Allocated, tt.want.Allocated) {
				t.Errorf("%s: %+v\nwant %+v", tt.name, r, tt.want)
			}
			if strings.Contains(string(a.Doc.Encode()), `"`+alloc.HookCommand+`"`) {
				t.Errorf("%s: the hook is still there", tt.name)
			}
		}
	}
}

func TestAllocatedWithoutGPU(t *testing.T) {
	s := share(0, 3)
	s.UUID = ""
	a, err := Read(pod{annotations: map[string]string{alloc.AnnotationShares: s.Text()}}.config(t))
	if err != nil {
		t.Fatal(err)
	}
	got, err := a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, table(), "/r")
	if err != nil || got.Place == nil || got.Place.Memory.Fixed != 3*quota.GiB || got.Place.Slice.Weight != 1 ||
		len(got.Record.Allocated) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := ledger.Open(t.TempDir()).Reserve(got); err != nil {
		t.Error(err)
	}
}

func TestAllocatedRefuses(t *testing.T) {
	anywhere := share(0, 3)
	anywhere.UUID = ""
	elsewhere := anywhere
	elsewhere.ID = "claim/9"
	other := share(0, 3)
	other.ID = "claim/other"
	var many []alloc.Share
	for n := range 40 {
		many = append(many, share(n, 1))
	}
	spilling := share(0, 3)
	spilling.Spill = quota.GiB
	for name, tt := range map[string]struct {
		pod     pod
		preload bool
		want    string
	}{
		"two hooks for one GPU":  {pod{hooks: hooks(share(0, 3), other)}, false, "GPU GPU-0 was allocated to this container twice"},
		"one share of two sizes": {pod{hooks: hooks(share(0, 3), share(0, 4))}, false, "GPU GPU-0 was allocated to this container twice"},
		"a plugin's as a claim's": {pod{hooks: hooks(share(0, 3)),
			annotations: map[string]string{alloc.AnnotationShares: share(0, 3).Text()}}, false, "twice"},
		"claim and limit for one GPU": {pod{hooks: hooks(share(0, 3)),
			annotations: map[string]string{alloc.AnnotationShares: share(0, 1).Text()}}, false, "twice"},
		"40 shares": {pod{hooks: hooks(many...)}, false,
			"40 shares of GPUs were allocated to this container: it can have 32"},
		"a GPU of another node": {pod{hooks: hooks(share(7, 3))}, false, "share claim/7: GPU GPU-7 is not among the 2 of this node"},
		"garbage": {pod{hooks: [][]string{{"cgpu-hook", alloc.HookCommand, alloc.AnnotationShares, "\x00"}}}, false,
			"is cgpu-agent newer"},
		"garbage in the annotation":      {pod{annotations: map[string]string{alloc.AnnotationShares: "x"}}, false, "is cgpu-agent newer"},
		"a percentage of nothing":        {pod{annotations: map[string]string{alloc.AnnotationPercent: "30"}}, false, "ask for GPU memory too"},
		"two GPUs that the node chooses": {pod{hooks: hooks(anywhere, elsewhere)}, false, "two shares of the container name no GPU"},
		"one named, one not":             {pod{hooks: hooks(share(1, 3), anywhere)}, false, "names no GPU, and others do"},
		"spill in preload mode":          {pod{hooks: hooks(spilling)}, true, "device memory is not served from host memory; set enforcement"},
		"no limiter in preload mode": {pod{hooks: hooks(share(0, 3)), env: []string{"CGPU_LIMITER=off"}}, true,
			"and CGPU_LIMITER leaves it out"},
		"a setting that cannot be read": {pod{hooks: hooks(share(0, 3)), env: []string{"ALIYUN_COM_GPU_SCHD_WEIGHT=x"}}, false,
			`ALIYUN_COM_GPU_SCHD_WEIGHT="x"`},
	} {
		a, err := Read(tt.pod.config(t))
		if err == nil {
			tab := table()
			if tt.preload {
				tab.Config.Enforcement = device.EnforcePreload
			}
			_, err = a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, tab, "/r")
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// A pause container gets nothing, whatever there is in its config.json, and hooks of ours do not run in it.
func TestAllocatedSandbox(t *testing.T) {
	for name, p := range map[string]pod{
		"share":      {hooks: hooks(share(0, 3)), sandbox: true},
		"garbage":    {hooks: [][]string{{"cgpu-hook", alloc.HookCommand, alloc.AnnotationShares, "x"}}, sandbox: true},
		"annotation": {annotations: map[string]string{alloc.AnnotationShares: "x"}, sandbox: true},
	} {
		a, err := Read(p.config(t))
		if err != nil || a.Quota != nil || a.Shares != nil || !a.Sandbox || a.Pod || a.Edited != (len(p.hooks) > 0) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
		if strings.Contains(string(a.Doc.Encode()), `"`+alloc.HookCommand+`"`) {
			t.Errorf("%s: the hook is still there", name)
		}
	}
}

func TestSettle(t *testing.T) {
	six := []string{"ALIYUN_COM_GPU_MEM_CONTAINER=6"}
	for name, tt := range map[string]struct {
		config  func(*testing.T) []byte
		enabled []quota.Dialect
		refused string
	}{
		"a variable": {config: func(t *testing.T) []byte { return pod{env: six}.config(t) },
			refused: `ALIYUN_COM_GPU_MEM_CONTAINER="6": in a pod of this node only what was allocated counts`},
		"an annotation": {config: func(t *testing.T) []byte {
			return pod{annotations: map[string]string{"cgpu.io/gpu-mem-container": "6"}}.config(t)
		}, refused: `cgpu.io/gpu-mem-container="6": in a pod`},
		"a dialect": {config: func(t *testing.T) []byte { return pod{env: []string{"CUDA_DEVICE_MEMORY_LIMIT=6g"}}.config(t) },
			enabled: quota.Dialects(), refused: `CUDA_DEVICE_MEMORY_LIMIT="6g": in a pod`},
		"nothing":           {config: func(t *testing.T) []byte { return pod{env: []string{"NVIDIA_VISIBLE_DEVICES=all"}}.config(t) }},
		"disabled":          {config: func(t *testing.T) []byte { return pod{env: append([]string{"CGPU_DISABLE=1"}, six...)}.config(t) }},
		"a pause container": {config: func(t *testing.T) []byte { return pod{env: six, sandbox: true}.config(t) }},
		"no pod":            {config: func(t *testing.T) []byte { return []byte(`{"process":{"env":["ALIYUN_COM_GPU_MEM_CONTAINER=6"]}}`) }},
	} {
		a, err := Read(tt.config(t), tt.enabled...)
		if err != nil {
			t.Fatal(err)
		}
		tab := table()
		if err := a.Settle(tab, nil); err != nil {
			t.Errorf("%s: by default: %v", name, err)
		}
		tab.Config.Pods = device.PodsAllocated
		err = a.Settle(tab, nil)
		if (err != nil) != (tt.refused != "") || err != nil &&
			(!strings.Contains(err.Error(), tt.refused) || !strings.Contains(err.Error(), "aliyun.com/gpu-mem")) {
			t.Errorf("%s: %v, want %q", name, err, tt.refused)
		}
	}
}

// With pods = "gpushare" the kubelet's word counts, and fails closed.
func TestSettleGPUShare(t *testing.T) {
	units := quota.Units{Memory: 3, Percent: 30, PerGPU: map[string]int{"GPU-0": 15, "GPU-1": 15}}
	uid := map[string]string{"io.kubernetes.cri.sandbox-uid": "u-1"}
	with := func(extra map[string]string) map[string]string {
		all := map[string]string{}
		for _, m := range []map[string]string{uid, liar.annotations, extra} {
			for name, value := range m {
				all[name] = value
			}
		}
		return all
	}
	for name, tt := range map[string]struct {
		pod   pod
		units quota.Units
		fails error
		want  []ledger.VGPU
		err   string
	}{
		"a lying pod": {pod: pod{env: append([]string{"ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_IDX=1"},
			"ALIYUN_COM_GPU_MEM_CONTAINER=15", "ALIYUN_COM_GPU_SCHD_WEIGHT=9", "ALIYUN_COM_GPU_CORE_PERCENTAGE=20"),
			annotations: with(map[string]string{"cgpu.io/disable": "false", "cgpu.io/gpu-core-percentage": "20"})}, units: units,
			want: []ledger.VGPU{{UUID: "GPU-1", Slice: quota.Slice{Limit: 3 * quota.GiB,
				Share: quota.Share{Weight: 1, Percent: 20, Priority: quota.PriorityDefault}}}}},
		"an own claim is not asked about": {pod: pod{env: liar.env, annotations: with(nil), hooks: hooks(share(0, 3))}, fails: fmt.Errorf("no"),
			want: []ledger.VGPU{{UUID: "GPU-0", Slice: quota.Slice{Limit: 3 * quota.GiB,
				Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}}},
		"nothing allocated": {pod: pod{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=3"}, annotations: uid},
			err: "only what was allocated counts"},
		"the kubelet is mute": {pod: pod{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=3"}, annotations: uid},
			fails: fmt.Errorf("mute"), err: "mute"},
		"no UID": {pod: pod{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=3"}, annotations: map[string]string{"io.kubernetes.cri.sandbox-uid": ""}},
			units: units, err: "works below containerd"},
		"CRI-O": {pod: pod{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=3"},
			annotations: map[string]string{"io.kubernetes.cri-o.ContainerType": "container"}}, units: units, err: "works below containerd"},
	} {
		a, err := Read(tt.pod.config(t))
		if err != nil {
			t.Fatal(name, err)
		}
		tab := table()
		tab.Config.Pods = device.PodsGPUShare
		err = a.Settle(tab, func(c spec.PodContainer) (quota.Units, error) {
			if c.UID != "u-1" || c.Namespace != "default" || c.Pod == "" || c.Container == "" {
				t.Errorf("%s: %+v", name, c)
			}
			return tt.units, tt.fails
		})
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want %q", name, err, tt.err)
			}
			continue
		}
		var got ledger.Request
		if err == nil {
			got, err = a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, tab, "/r")
		}
		if err != nil || !reflect.DeepEqual(got.Record.VGPUs, tt.want) {
			t.Errorf("%s: %+v, %v", name, got.Record.VGPUs, err)
		}
	}
}

// Below CRI-O a pod's author can write any annotation. A claim's hooks are the engine's there, too.
func TestAllocatedCRIO(t *testing.T) {
	crio := map[string]string{"io.kubernetes.cri-o.ContainerType": "container", alloc.AnnotationShares: share(0, 15).Text()}
	if _, err := Read(pod{annotations: crio}.config(t)); err == nil ||
		!strings.Contains(err.Error(), "below CRI-O a pod's author can write it") {
		t.Error(err)
	}
	delete(crio, alloc.AnnotationShares)
	if a, err := Read(pod{annotations: crio, hooks: hooks(share(0, 3))}.config(t)); err != nil || len(a.Shares) != 1 || !a.Pod {
		t.Errorf("%+v, %v", a, err)
	}
}

// A pod's own words that cannot be read refuse it as ever, unless they do not count.
func TestFaultOfAPod(t *testing.T) {
	for _, pods := range []string{"", device.PodsAny, device.PodsAllocated, device.PodsGPUShare} {
		a, err := Read(pod{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=7x"},
			annotations: map[string]string{"io.kubernetes.cri.sandbox-uid": "u"}}.config(t))
		if err != nil || a.Quota == nil {
			t.Fatal(err)
		}
		tab := table()
		tab.Config.Pods = pods
		err = a.Settle(tab, func(spec.PodContainer) (quota.Units, error) { return quota.Units{}, nil })
		if err == nil || !strings.Contains(err.Error(), `"7x"`) {
			t.Errorf("%s: %v", pods, err)
		}
	}
}

// BenchmarkAsk is what a create does with config.json, without what the node and the guard take: a container that asks for
// itself, and the same with a share.
func BenchmarkAsk(b *testing.B) {
	s := share(0, 3)
	for _, way := range []struct {
		name string
		pod  pod
	}{
		{"variables", pod{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"}}},
		{"annotations", pod{annotations: map[string]string{alloc.AnnotationShares: s.Text()}}},
		{"hooks", pod{hooks: hooks(s)}},
	} {
		raw := way.pod.config(b)
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				a, err := Read(raw)
				if err != nil {
					b.Fatal(err)
				}
				tab := table()
				if err := a.Settle(tab, nil); err != nil {
					b.Fatal(err)
				}
				r, err := a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, tab, "/r")
				if err != nil {
					b.Fatal(err)
				}
				plan, err := a.Plan(r.Record, tab)
				if err != nil {
					b.Fatal(err)
				}
				if err := spec.Apply(a.Doc, plan); err != nil {
					b.Fatal(err)
				}
				a.Doc.Encode()
			}
		})
	}
}
