// SPDX-License-Identifier: Apache-2.0

package dryrun

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

func six(extra ...string) []string {
	return append([]string{"ALIYUN_COM_GPU_MEM_CONTAINER=6", "ALIYUN_COM_GPU_MEM_DEV=15"}, extra...)
}

// TestSpec keeps the reasons as golden files, and of the edited config.json what pkg/spec's own goldens do not cover:
// that it is there, or untouched.
func TestSpec(t *testing.T) {
	for _, tt := range []struct {
		name, config string
		env          []string
		edited       bool
	}{
		{"plain", "docker20-plain", nil, false},
		{"disabled", "docker20-plain", six("CGPU_DISABLE=true"), false},
		{"missed", "docker20-plain", []string{"ALIYUN_COM_GPU_MEM_CONTAINERS=6", "cgpu_weight=3", "CGPU_PERCENT=20"}, false},
		{"native", "docker20-plain", []string{"CGPU_MEM=6g", "CGPU_WEIGHT=3", "CGPU_PERCENT=20", "CGPU_GPUS=1", "CGPU_PRIORITIES=1"}, true},
		{"sandbox", "cri16-default-sandbox", six(), false},
		{"placed", "docker20-plain", six(), true},
		{"named", "docker20-plain", six("ALIYUN_COM_GPU_VISIBLE_DEVICES=1"), true},
		{"both", "docker20-plain", six("ALIYUN_COM_GPU_VISIBLE_DEVICES=0,1", "ALIYUN_COM_GPU_SCHD_WEIGHT=3"), true},
		{"mixed", "docker20-plain", six("ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"), true},
		{"gpus-all", "docker20-gpus-all", six(), true},
		{"injected", "docker29-gpus-dev0-cgpu", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			raw, err := os.ReadFile("testdata/" + tt.config + ".json")
			if err != nil {
				t.Fatal(err)
			}
			d := DryRun{RunDir: "/run/cgpu", Table: "../node/nodetest/node.json", Hook: "/usr/local/bin/cgpu-hook", ID: "c1"}
			edited, reasons, err := d.Edit(raw, tt.env)
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, "spec-"+tt.name+".txt", []byte(reasons))
			if !json.Valid(edited) {
				t.Fatal("not JSON")
			}
			if got := bytes.Contains(edited, []byte("/run/cgpu/g/0000000000000000.sock")); got != tt.edited {
				t.Errorf("edited %v, want %v", got, tt.edited)
			}
			if tt.env == nil && !tt.edited && !bytes.Equal(raw, edited) {
				t.Error("passed through with changes")
			}
		})
	}
}

// dryRunOf is one on a node with this table.
func dryRunOf(t *testing.T, table *device.Table) DryRun {
	t.Helper()
	dir := t.TempDir()
	if err := table.Save(dir); err != nil {
		t.Fatal(err)
	}
	return DryRun{RunDir: "/run/cgpu", Table: device.TableFile(dir), Hook: "/h", ID: "c1"}
}

// TestSpecDialects keeps what is said of containers that ask in other systems' words.
func TestSpecDialects(t *testing.T) {
	all := quota.Dialects()
	for _, tt := range []struct {
		name    string
		enabled []quota.Dialect
		env     []string
		notes   map[string]string // annotations
	}{
		{"hami", all, []string{"NVIDIA_VISIBLE_DEVICES=1", "CUDA_DEVICE_MEMORY_LIMIT_0=6144m", "CUDA_DEVICE_SM_LIMIT=30",
			"CUDA_TASK_PRIORITY=0", "CUDA_OVERSUBSCRIBE=true"}, nil},
		{"hami-two", all, []string{"NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT_0=6g", "CUDA_DEVICE_MEMORY_LIMIT_1=40g"}, nil},
		{"nvidia", all, []string{"NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_GPU_MEMORY_REQUEST=6144", "NVIDIA_GPU_MEMORY_LIMIT=6144",
			"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6144M"}, nil},
		{"mps", all, []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=6G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30"}, nil},
		{"pai", all, []string{"AMP_VGPU_ENABLE=1", "GPU_MEM_PER_DEVICE=6442450944", "GPU_UTIL_PER_DEVICE=50", "NVIDIA_VISIBLE_DEVICES=0"}, nil},
		{"tkestack", all, nil, map[string]string{"tencent.com/vcuda-memory": "24", "tencent.com/vcuda-core": "30"}},
		{"gpushare", all, six("ALIYUN_COM_GPU_MEM_IDX=0"), map[string]string{"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "6",
			"ALIYUN_COM_GPU_MEM_DEV": "15"}},
		{"off", nil, []string{"CUDA_DEVICE_MEMORY_LIMIT=6g"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			raw, err := os.ReadFile("testdata/docker20-plain.json")
			if err != nil {
				t.Fatal(err)
			}
			var root map[string]any
			if err := json.Unmarshal(raw, &root); err != nil {
				t.Fatal(err)
			}
			root["annotations"] = tt.notes
			if raw, err = json.Marshal(root); err != nil {
				t.Fatal(err)
			}
			table := nodetest.Table(t)
			table.Config.Dialects = tt.enabled
			d := dryRunOf(t, table)
			_, reasons, err := d.Edit(raw, tt.env)
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, "spec-dialect-"+tt.name+".txt", []byte(reasons))
		})
	}
}

// TestSpecAllocated keeps what is said of pods, and holds the dry run to the rules for them.
func TestSpecAllocated(t *testing.T) {
	table := nodetest.Table(t)
	table.Config.Pods = device.PodsAllocated
	d := dryRunOf(t, table)
	share := func(n int) alloc.Share {
		return alloc.Share{ID: "0b5e/s1", UUID: table.GPUs[n].UUID, Slice: quota.Slice{Limit: 3 * quota.GiB,
			Share: quota.Share{Percent: 30, Priority: quota.PriorityDefault}}, Containers: 1}
	}
	whole := alloc.Share{ID: "0b5e/s2", UUID: table.GPUs[1].UUID, Whole: true, Containers: 1,
		Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}
	// The recorded pod asks for 2 GiB itself.
	for _, tt := range []struct {
		name, kind  string
		env         []string
		annotations map[string]string
		shares      []alloc.Share
		refused     string
	}{
		{name: "claims", kind: "container", shares: []alloc.Share{share(0), whole}},
		{name: "plugin-liar", kind: "container", env: six("ALIYUN_COM_GPU_CORE_PERCENTAGE=20", "ALIYUN_COM_GPU_HIGH_PRIO=1"),
			annotations: map[string]string{alloc.AnnotationShares: share(1).Text(), "cgpu.io/gpu-mem-container": "15"}},
		{name: "sandbox", kind: "sandbox", shares: []alloc.Share{share(0)}},
		{name: "unallocated", kind: "container", env: six(),
			refused: `ALIYUN_COM_GPU_MEM_CONTAINER="6": in a pod of this node only what was allocated counts`},
	} {
		raw, err := os.ReadFile("testdata/cri16-default.json")
		if err != nil {
			t.Fatal(err)
		}
		var root map[string]any
		if err := json.Unmarshal(raw, &root); err != nil {
			t.Fatal(err)
		}
		annotations := root["annotations"].(map[string]any)
		annotations["io.kubernetes.cri.container-type"] = tt.kind
		for name, value := range tt.annotations {
			annotations[name] = value
		}
		var hooks []any
		for _, s := range tt.shares {
			hooks = append(hooks, map[string]any{"path": "/usr/local/bin/cgpu-hook", "args": alloc.HookArgs(s)})
		}
		root["hooks"] = map[string]any{"createRuntime": hooks}
		if raw, err = json.Marshal(root); err != nil {
			t.Fatal(err)
		}
		edited, reasons, err := d.Edit(raw, tt.env)
		if tt.refused != "" {
			if err == nil || !strings.Contains(err.Error(), tt.refused) {
				t.Errorf("%s: %v, want %q", tt.name, err, tt.refused)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, "spec-pod-"+tt.name+".txt", []byte(reasons))
		if !json.Valid(edited) || bytes.Contains(edited, []byte(`"`+alloc.HookCommand+`"`)) {
			t.Errorf("%s: the hook is still there", tt.name)
		}
	}
}

// TestSpecAllocatedIsAlike: what was allocated is edited into config.json as what a container asks for itself is.
func TestSpecAllocatedIsAlike(t *testing.T) {
	table := nodetest.Table(t)
	raw, err := os.ReadFile("testdata/cri16-default.json")
	if err != nil {
		t.Fatal(err)
	}
	d := DryRun{RunDir: "/run/cgpu", Table: "../node/nodetest/node.json", Hook: "/h", ID: "c1"}
	asked, _, err := d.Edit(raw, []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=1"})
	if err != nil {
		t.Fatal(err)
	}
	share := alloc.Share{ID: "claim/1", UUID: table.GPUs[1].UUID, Slice: quota.Slice{Limit: 2 * quota.GiB,
		Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1}
	// The variable that asked stays in the environment of both.
	raw, err = setEnv(raw, []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=1"})
	if err != nil {
		t.Fatal(err)
	}
	var root map[string]any
	if err := json.Unmarshal(raw, &root); err != nil {
		t.Fatal(err)
	}
	for _, way := range []string{"hooks", "annotations"} {
		given := maps.Clone(root)
		notes := maps.Clone(root["annotations"].(map[string]any))
		if way == "hooks" {
			given["hooks"] = map[string]any{"createRuntime": []any{map[string]any{"path": "/b/cgpu-hook", "args": alloc.HookArgs(share)}}}
		} else {
			notes[alloc.AnnotationShares] = share.Text()
		}
		given["annotations"] = notes
		raw, err := json.Marshal(given)
		if err != nil {
			t.Fatal(err)
		}
		edited, _, err := d.Edit(raw, nil)
		if err != nil {
			t.Fatal(err)
		}
		var got, want map[string]any
		if err := errors.Join(json.Unmarshal(edited, &got), json.Unmarshal(asked, &want)); err != nil {
			t.Fatal(err)
		}
		delete(got["annotations"].(map[string]any), alloc.AnnotationShares)
		if hooks := got["hooks"].(map[string]any); way == "hooks" && len(hooks["createRuntime"].([]any)) == 0 {
			delete(hooks, "createRuntime")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-asked +allocated):\n%s", way, diff)
		}
	}
}

func TestSpecRefuses(t *testing.T) {
	raw, err := os.ReadFile("testdata/docker20-plain.json")
	if err != nil {
		t.Fatal(err)
	}
	for want, env := range map[string][]string{
		`ALIYUN_COM_GPU_MEM_CONTAINER="7x"`:  {"ALIYUN_COM_GPU_MEM_CONTAINER=7x"},
		`ALIYUN_COM_GPU_MEM_CONTAINER="400"`: {"ALIYUN_COM_GPU_MEM_CONTAINER=400", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"},
		`ALIYUN_COM_GPU_VISIBLE_DEVICES="9"`: six("ALIYUN_COM_GPU_VISIBLE_DEVICES=9"),
	} {
		d := DryRun{RunDir: "/run/cgpu", Table: "../node/nodetest/node.json", Hook: "/h", ID: "c1"}
		if _, _, err := d.Edit(raw, env); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want an error with %s", env, err, want)
		}
	}
}

// TestSpecEnforcement tells who enforces, and what spill is granted.
func TestSpecEnforcement(t *testing.T) {
	raw, err := os.ReadFile("testdata/docker20-plain.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		enforcement, driver string
		env                 []string
		want                []string // in the reasons, or in the error
		refused             bool
	}{
		{"guard", "nvidia", six("CGPU_MEM_SPILL=4"), []string{"spill    4096MiB of host memory beyond the limit",
			"enforced by the guard, which answers the driver calls over /"}, false},
		{"guard", "nvidia", six("CGPU_MEM_SPILL=9"), []string{`CGPU_MEM_SPILL="9": asked for 9216MiB of spill, but 8192MiB are free`}, true},
		{"preload", "nvidia", six("CGPU_MEM_SPILL=4"), []string{`CGPU_MEM_SPILL="4": with enforcement = "preload"`}, true},
		// Nothing else enforces there, and no library lies beside this test.
		{"preload", "nvidia", six(), []string{"libcgpu.so is not installed"}, true},
	} {
		table := nodetest.Table(t)
		table.Driver, table.Config.Enforcement = tt.driver, tt.enforcement
		table.HostMemory, table.Config.MaxSpill = 2*nodetest.MaxSpill, device.Part{Bytes: nodetest.MaxSpill}
		d := dryRunOf(t, table)
		_, reasons, err := d.Edit(raw, tt.env)
		if err != nil {
			reasons = err.Error()
		}
		if (err != nil) != tt.refused {
			t.Errorf("%s %v: %v", tt.enforcement, tt.env, err)
		}
		for _, want := range tt.want {
			if !strings.Contains(reasons, want) {
				t.Errorf("%s %v: got\n%s\nwant %q", tt.enforcement, tt.env, reasons, want)
			}
		}
	}
	// What is said of a container without a guard, or beside one.
	preload := ledger.Record{Preload: true}
	for _, tt := range []struct {
		record            ledger.Record
		socket, want, not string
	}{
		{preload, "", "enforced by the preload library only; a program can walk around it (enforcement in cgpu.toml)\n", "guard"},
		{ledger.Record{Preload: true, DriverLimits: true}, "",
			"enforced by the preload library, and memory by NVIDIA's driver; a program can walk around both", "only"},
		{ledger.Record{Preload: true, DriverLimits: true, DriverOnly: true}, "",
			"enforced by NVIDIA's driver, memory alone; time is not shared out (limits in", "preload"},
		{ledger.Record{DriverLimits: true}, "/s", "over /s\n         and memory by NVIDIA's driver, too (limits in cgpu.toml)\n", "preload"},
		{ledger.Record{}, "/s", "enforced by the guard, which answers the driver calls over /s\n", "limits in"},
		{preload, "/run/cgpu/g/n.sock",
			"guard    plays the kernel for the simulated driver over /run/cgpu/g/n.sock, and enforces nothing\n", "answers"},
	} {
		got := explain(&admit.Ask{Quota: &quota.Quota{}}, tt.record, spec.Plan{Socket: tt.socket, Limiter: "/usr/lib/cgpu/libcgpu.so"})
		if !strings.Contains(got, tt.want) || strings.Contains(got, tt.not) || !strings.Contains(got, "limiter  /usr/lib/cgpu/libcgpu.so\n") {
			t.Errorf("%q: got\n%s\nwant %q", tt.socket, got, tt.want)
		}
	}
}

func TestSetEnv(t *testing.T) {
	const in = `{"ociVersion":"1.0.2","process":{"env":["A=1","AB=2","A=3"],"x":{"unknown":[1.50]}},"zzz":1}`
	got, err := setEnv([]byte(in), []string{"A=4=5", "C="})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"ociVersion":"1.0.2","process":{"env":["AB=2","A=4=5","C="],"x":{"unknown":[1.50]}},"zzz":1}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, err := setEnv([]byte(in), nil); err != nil || string(got) != in {
		t.Errorf("without variables: %s, %v", got, err)
	}
	if _, err := setEnv([]byte(`{}`), []string{"A=1"}); err == nil {
		t.Error("set a variable for no process")
	}
}
