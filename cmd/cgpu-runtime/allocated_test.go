// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// podBundle makes a bundle as containerd does for a pod's container, with hooks of cgpu-hook that have such arguments.
func (n *node) podBundle(kind string, env []string, annotations map[string]string, hooks ...[]string) string {
	n.t.Helper()
	dir := n.bundle(env, "", "true")
	file := filepath.Join(dir, "config.json")
	raw, err := os.ReadFile(file)
	if err != nil {
		n.t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(raw, &config); err != nil {
		n.t.Fatal(err)
	}
	all := map[string]string{"io.kubernetes.cri.container-type": kind, "io.kubernetes.cri.sandbox-namespace": "ml",
		"io.kubernetes.cri.sandbox-name":   "train",
		"io.kubernetes.cri.container-name": "main", "io.kubernetes.cri.sandbox-uid": "uid-1"}
	for name, value := range annotations {
		all[name] = value
	}
	config["annotations"] = all
	var list []map[string]any
	for _, args := range hooks {
		list = append(list, map[string]any{"path": filepath.Join(n.dir, "cgpu-hook"), "args": args})
	}
	if list != nil {
		config["hooks"] = map[string]any{"createRuntime": list}
	}
	if raw, err = json.Marshal(config); err == nil {
		err = os.WriteFile(file, raw, 0o640)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return dir
}

// remove deletes a container, and gives back what it held: a guard that lives does that itself, the stub does not.
func (n *node) remove(id string) {
	n.run("delete", "--force", id)
	for _, r := range n.records() {
		if r.ID != id {
			continue
		}
		if err := ledger.Open(n.runDir).Release(r.Nonce); err != nil {
			n.t.Error(err)
		}
	}
}

// TestAllocated starts containers of pods by what was allocated to them.
func TestAllocated(t *testing.T) {
	n := newNode(t, "runc")
	share := func(i int) alloc.Share {
		return alloc.Share{ID: fmt.Sprint("claim/", i), UUID: n.table.GPUs[i].UUID,
			Slice: quota.Slice{Limit: 3 * quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1}
	}
	slice := func(i int) ledger.VGPU {
		return ledger.VGPU{UUID: n.table.GPUs[i].UUID,
			Slice: quota.Slice{Limit: 3 * quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}
	}
	whole := alloc.Share{ID: "claim/w", UUID: n.table.GPUs[1].UUID, Whole: true, Containers: 1,
		Slice: quota.Slice{Share: quota.Share{Priority: quota.PriorityDefault}}}
	other := share(0)
	other.ID = "claim/other"
	strange := share(0)
	strange.UUID = "GPU-ffffffff-0000-0000-0000-000000000000"
	lies := []string{"ALIYUN_COM_GPU_MEM_CONTAINER=15", "ALIYUN_COM_GPU_MEM_DEV=15", "CGPU_DISABLE=true", "NVIDIA_VISIBLE_DEVICES=all"}
	forged := map[string]string{"cgpu.io/gpu-mem-container": "15", "cgpu.io/gpu-mem-dev": "15", "cgpu.io/disable": "true"}
	for i, c := range []struct {
		name, pods  string
		env         []string
		annotations map[string]string
		hooks       [][]string
		sandbox     bool
		want        []ledger.VGPU
		native      []string
		refused     string // "": it starts
	}{
		{name: "claim", hooks: [][]string{alloc.HookArgs(share(0))}, want: []ledger.VGPU{slice(0)}},
		{name: "lying pod with a claim", pods: device.PodsAllocated, env: lies, annotations: forged, hooks: [][]string{alloc.HookArgs(share(1))},
			want: []ledger.VGPU{slice(1)}},
		{name: "lying pod with a limit", pods: device.PodsAllocated, env: lies,
			annotations: map[string]string{alloc.AnnotationShares: share(1).Text(), "cgpu.io/disable": "true"}, want: []ledger.VGPU{slice(1)}},
		{name: "share and whole", hooks: [][]string{alloc.HookArgs(share(0)), alloc.HookArgs(whole)}, want: []ledger.VGPU{slice(0)},
			native: []string{n.table.GPUs[1].UUID}},
		{name: "handed on twice", hooks: [][]string{alloc.HookArgs(share(0)), alloc.HookArgs(share(0))}, want: []ledger.VGPU{slice(0)}},
		{name: "twice", hooks: [][]string{alloc.HookArgs(share(0)), alloc.HookArgs(other)}, refused: "twice"},
		{name: "another node's GPU", hooks: [][]string{alloc.HookArgs(strange)}, refused: "is not among the 2 of this node"},
		{name: "garbage", hooks: [][]string{{"cgpu-hook", alloc.HookCommand, alloc.AnnotationShares, "x"}}, refused: "is cgpu-agent newer"},
		{name: "pause container", sandbox: true, env: lies, hooks: [][]string{alloc.HookArgs(share(0))}},
		{name: "pause container of garbage", sandbox: true, hooks: [][]string{{"cgpu-hook", alloc.HookCommand, alloc.AnnotationShares, "x"}}},
		{name: "names itself a GPU", pods: device.PodsAllocated, env: []string{ask},
			refused: `ALIYUN_COM_GPU_MEM_CONTAINER="6": in a pod of this node only what was allocated counts`},
		{name: "names itself a GPU by annotation", pods: device.PodsAllocated, annotations: map[string]string{"cgpu.io/gpu-mem-container": "6"},
			refused: "in a pod of this node"},
		{name: "names itself a GPU where that counts", pods: device.PodsAny, env: []string{ask, "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"},
			want: []ledger.VGPU{{UUID: n.table.GPUs[0].UUID,
				Slice: quota.Slice{Limit: 6 * quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}}},
		{name: "asks for nothing", pods: device.PodsAllocated, env: []string{"A=b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.t = t
			n.table.Config.Pods = c.pods
			n.saveTable()
			kind := "container"
			if c.sandbox {
				kind = "sandbox"
			}
			bundle := n.podBundle(kind, c.env, c.annotations, c.hooks...)
			before, _ := os.ReadFile(filepath.Join(bundle, "config.json"))
			id := fmt.Sprintf("cgpu-test-allocated-%d-%d", os.Getpid(), i)
			r := n.run("create", "--bundle", bundle, id)
			defer n.remove(id)
			if (r.err == nil) != (c.refused == "") || !strings.Contains(r.log, c.refused) &&
				!strings.Contains(r.log, strings.ReplaceAll(c.refused, `"`, `\"`)) {
				t.Fatalf("%v, want %q\n%s\n%s", r.err, c.refused, r.stderr, r.log)
			}
			after := n.given(bundle, id)
			if c.refused != "" {
				if !bytes.Equal(before, after) || len(n.records()) != 0 {
					t.Errorf("left %+v", n.records())
				}
				return
			}
			if bytes.Contains(after, []byte(`"`+alloc.HookCommand+`"`)) {
				t.Error("the hook is still there")
			}
			records := n.records()
			if c.want == nil && c.native == nil {
				if len(records) != 0 {
					t.Errorf("%+v", records)
				}
				return
			}
			if len(records) != 1 || !slices.Equal(records[0].VGPUs, c.want) || !slices.Equal(records[0].Native, c.native) ||
				records[0].Name != "ml/train/main" {
				t.Errorf("%+v", records)
			}
		})
		n.t = t
	}
}

// TestAllocatedShared: ten containers that name one claim at once, which is for three. A fourth starts when one has ended.
func TestAllocatedShared(t *testing.T) {
	n := newNode(t, "runc")
	share := alloc.Share{ID: "claim/1", UUID: n.table.GPUs[0].UUID,
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 3}
	id := func(i int) string { return fmt.Sprintf("cgpu-test-shared-%d-%d", os.Getpid(), i) }
	var bundles []string
	for range 11 {
		bundles = append(bundles, n.podBundle("container", nil, nil, alloc.HookArgs(share)))
	}
	results := make([]result, 10)
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() { results[i] = n.run("create", "--bundle", bundles[i], id(i)) })
	}
	wg.Wait()
	started := -1
	for i, r := range results {
		defer n.run("delete", "--force", id(i))
		if r.err == nil {
			started = i
		} else if !strings.Contains(r.log, "allocation claim/1 is held by 3 containers") {
			t.Errorf("%s\n%s", r.stderr, r.log)
		}
	}
	if records := n.records(); len(records) != 3 || started < 0 {
		t.Fatalf("%d containers have a claim for 3", len(records))
	}
	if r := n.run("delete", "--force", id(started)); r.err != nil {
		t.Fatal(r.stderr)
	}
	defer n.run("delete", "--force", id(10))
	if r := n.run("create", "--bundle", bundles[10], id(10)); r.err != nil {
		t.Errorf("%v\n%s", r.err, r.log)
	}
}

// TestAllocatedNotOurs: where runc itself gets the container, its hook refuses the start and says why.
func TestAllocatedNotOurs(t *testing.T) {
	n := newNode(t, "runc")
	share := alloc.Share{ID: "claim/1", UUID: n.table.GPUs[0].UUID,
		Slice: quota.Slice{Limit: 3 * quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1}
	bundle := n.podBundle("container", nil, nil, alloc.HookArgs(share))
	if err := os.Rename(filepath.Join(n.dir, "cgpu-runtime"), filepath.Join(n.dir, "kept")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(n.low, filepath.Join(n.dir, "cgpu-runtime")); err != nil {
		t.Fatal(err)
	}
	r := n.run("run", "--bundle", bundle, fmt.Sprint("cgpu-test-not-ours-", os.Getpid()))
	if r.err == nil || !strings.Contains(r.stderr+r.log, "set runtimeClassName: cgpu") {
		t.Errorf("%v\n%s\n%s", r.err, r.stderr, r.log)
	}
}

// TestGPUShare starts containers that have gpushare's variables, on a node that asks the kubelet how much that is.
func TestGPUShare(t *testing.T) {
	n := newNode(t, "runc")
	n.table.Config.Pods, n.table.Config.PodResources = device.PodsGPUShare, "/kubelet.sock"
	n.saveTable()
	lies := []string{"ALIYUN_COM_GPU_MEM_CONTAINER=15", "ALIYUN_COM_GPU_MEM_DEV=1", "ALIYUN_COM_GPU_MEM_CONTAINER=3",
		"ALIYUN_COM_GPU_MEM_DEV=15", "ALIYUN_COM_GPU_MEM_IDX=1",
		"ALIYUN_COM_GPU_MEM_CONTAINER=15", "ALIYUN_COM_GPU_MEM_DEV=3", "NVIDIA_VISIBLE_DEVICES=all"}
	var units string
	for _, g := range n.table.GPUs {
		units += "gpu " + g.UUID + " 15\\n"
	}
	third := ledger.VGPU{UUID: n.table.GPUs[1].UUID,
		Slice: quota.Slice{Limit: (15109 * quota.MiB / 5).FloorMiB(),
			Share: quota.Share{Weight: 1, Percent: 30, Priority: quota.PriorityDefault}}}
	for i, c := range []struct {
		name, helper string
		kind         string
		env          []string
		want         []ledger.VGPU
		refused      string
	}{
		{name: "lying pod", helper: `[ "$1 $3 $4 $5" = "/kubelet.sock ml train main" ] && printf 'memory 3\npercent 30\n` + units + `end\n'`,
			env: lies, want: []ledger.VGPU{third}},
		{name: "nothing allocated", helper: `printf 'memory 0\npercent 0\nend\n'`, env: []string{ask},
			refused: "in a pod of this node only what was allocated counts"},
		{name: "nothing allocated, and lies", helper: `printf 'memory 0\npercent 0\nend\n'`, env: lies, refused: "is set a second time"},
		{name: "not placed", helper: `printf 'memory 3\npercent 0\n` + units + `end\n'`, env: []string{ask, "ALIYUN_COM_GPU_MEM_IDX=-1"},
			refused: "means that the device plugin found no GPU"},
		{name: "no answer", helper: `echo "/kubelet.sock: nobody answers"; exit 1`, env: []string{ask},
			refused: "the kubelet did not tell what is allocated: /kubelet.sock: nobody answers"},
		{name: "asks for nothing", helper: "exit 1", env: []string{"A=b"}},
		{name: "no pod", kind: "none", helper: "exit 1", env: []string{ask, "ALIYUN_COM_GPU_VISIBLE_DEVICES=1"},
			want: []ledger.VGPU{{UUID: third.UUID, Slice: quota.Slice{Limit: 6 * quota.GiB,
				Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.t = t
			if err := os.WriteFile(filepath.Join(n.dir, "cgpu-podresources"), []byte("#!/bin/sh\n"+c.helper+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			if c.kind == "" {
				c.kind = "container"
			}
			id := fmt.Sprintf("cgpu-test-gpushare-%d-%d", os.Getpid(), i)
			r := n.run("create", "--bundle", n.podBundle(c.kind, c.env, nil), id)
			defer n.remove(id)
			if (r.err == nil) != (c.refused == "") || !strings.Contains(r.log, c.refused) {
				t.Fatalf("%v, want %q\n%s\n%s", r.err, c.refused, r.stderr, r.log)
			}
			records := n.records()
			if len(records) != min(len(c.want), 1) || len(records) == 1 && !slices.Equal(records[0].VGPUs, c.want) {
				t.Fatalf("%+v", records)
			}
			if len(records) == 1 && c.kind == "container" &&
				(len(records[0].Allocated) != 1 || records[0].Allocated[0].ID != "gpushare/uid-1/main") {
				t.Errorf("%+v", records[0].Allocated)
			}
		})
		n.t = t
	}
}

// BenchmarkCreateAllocated is what a create costs with a vGPU that was asked for by variables, and with one that was
// allocated, up to the low-level runtime.
func BenchmarkCreateAllocated(b *testing.B) {
	n := newNode(b, "runc")
	low := filepath.Join(b.TempDir(), "runc")
	copyFile(b, "/bin/true", low)
	n.table.Config.Runtimes = []string{low}
	n.saveTable()
	share := alloc.Share{ID: "claim/1", UUID: n.table.GPUs[0].UUID,
		Slice: quota.Slice{Limit: 3 * quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1}
	for _, way := range []struct {
		name        string
		env         []string
		annotations map[string]string
		hooks       [][]string
	}{
		{name: "variables", env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"}},
		{name: "annotations", annotations: map[string]string{alloc.AnnotationShares: share.Text()}},
		{name: "hooks", hooks: [][]string{alloc.HookArgs(share)}},
	} {
		bundle := n.podBundle("container", way.env, way.annotations, way.hooks...)
		config := filepath.Join(bundle, "config.json")
		raw, err := os.ReadFile(config)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				os.Remove(ledger.File(n.runDir))
				if err := os.WriteFile(config, raw, 0o640); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				if r := n.run("create", "--bundle", bundle, "x"); r.err != nil {
					b.Fatal(r.err, r.log)
				}
			}
		})
	}
}
