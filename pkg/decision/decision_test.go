// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

const (
	gpu0 = "GPU-00000000-0000-0000-0000-000000000000"
	gpu1 = "GPU-00000000-0000-0000-0000-000000000001"
)

var table = []device.GPU{{UUID: gpu0, Memory: 15 * quota.GiB}, {Index: 1, UUID: gpu1, Memory: 15 * quota.GiB}}

// podOf has one init container and two others, of which the last asks for two GPUs, and somebody debugs it.
func podOf(annotations map[string]string) *Pod {
	return &Pod{Namespace: "ns", Name: "pod", UID: "u1", Node: "node1", Annotations: annotations,
		Containers: []Container{{Name: "init", Init: true}, {Name: "side"}, {Name: "main", Limits: map[string]string{
			"nvidia.com/gpu": "2", "volcano.sh/vgpu-number": "2"}}},
		Ephemeral: []string{"debugger"}}
}

func hami(list string) map[string]string {
	return map[string]string{"hami.io/vgpu-devices-allocated": list, "hami.io/vgpu-node": "node1"}
}

func volcano(list string) map[string]string {
	return map[string]string{"volcano.sh/vgpu-ids-new": list, "volcano.sh/vgpu-node": "node1"}
}

func kai(pairs ...string) map[string]string {
	all := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		all["nvidia.com/container."+pairs[i]] = pairs[i+1]
	}
	return all
}

func TestShares(t *testing.T) {
	main := func(scheduler string, n int, uuid string, mib int, more string) string {
		return fmt.Sprintf("id=%s/u1/main/%d,uuid=%s,memory=%d%s", scheduler, n, uuid, mib<<20, more)
	}
	for _, c := range []struct {
		name, scheduler, container string
		annotations                map[string]string
		want                       string
	}{
		{"hami", "hami", "main", hami(";;" + gpu1 + ",NVIDIA,3000,30:;"), main("hami", 0, gpu1, 3000, ",percent=30")},
		{"hami, exclusive", "hami", "main", hami(";;" + gpu1 + ",NVIDIA,3000,100:;"), main("hami", 0, gpu1, 3000, "")},
		{"hami, two GPUs", "hami", "main", hami(";;" + gpu0 + ",NVIDIA,1024,0:" + gpu1 + ",NVIDIA,2048,0:;"),
			main("hami", 0, gpu0, 1024, "") + ";" + main("hami", 1, gpu1, 2048, "")},
		{"hami, without a GPU", "hami", "side", hami(";;" + gpu1 + ",NVIDIA,3000,30:;"), ""},
		{"hami, ephemeral container", "hami", "debugger", hami(";;" + gpu1 + ",NVIDIA,3000,30:;"), ""},
		{"kai, ephemeral container", "kai", "debugger", kai("debugger.gpus.devices", gpu0, "debugger.gpu-memory.request", "2Gi"), ""},
		{"volcano", "volcano", "main", volcano(gpu1 + ",NVIDIA,4096,50:"), main("volcano", 0, gpu1, 4096, ",percent=50")},
		{"volcano, does not ask", "volcano", "side", volcano(gpu1 + ",NVIDIA,4096,50:"), ""},
		{"volcano, init containers cannot", "volcano", "init", volcano(gpu1 + ",NVIDIA,4096,50:"), ""},
		{"kai", "kai", "main", kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "2Gi"), main("kai", 0, gpu0, 2048, "")},
		{"kai, no more than it counted", "kai", "main",
			kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "1Gi", "main.gpu-memory.limit", "12Gi"), main("kai", 0, gpu0, 1024, "")},
		{"kai, a limit is a request", "kai", "main", kai("main.gpus.devices", gpu0, "main.gpu-memory.limit", "4096M"),
			main("kai", 0, gpu0, 3906, "")},
		{"kai, two GPUs", "kai", "main", kai("main.gpus.devices", gpu0+","+gpu1, "main.gpu-memory.request", "2048Mi"),
			main("kai", 0, gpu0, 2048, "") + ";" + main("kai", 1, gpu1, 2048, "")},
		{"kai, another container's", "kai", "side", kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "2Gi"), ""},
		{"kai, asked and not decided", "kai", "main", kai("main.gpu-memory.request", "2Gi"), ""},
	} {
		s := Find(c.scheduler)
		shares, err := s.Shares(podOf(c.annotations), c.container, "node1", table)
		got := ""
		if len(shares) > 0 {
			got = alloc.Annotate(shares)
		}
		if err != nil || got != c.want {
			t.Errorf("%s: %v\n got %s\nwant %s", c.name, err, got, c.want)
		}
		for _, share := range shares {
			if back, err := alloc.Parse(share.Text()); err != nil || back != share {
				t.Errorf("%s: the runtime reads %+v, %v", c.name, back, err)
			}
		}
	}
}

// What the scheduler would not have written, or this node cannot give, is refused as a whole.
func TestSharesRefused(t *testing.T) {
	one := gpu0 + ",NVIDIA,3000,30:"
	for _, c := range []struct {
		name, scheduler string
		change          func(*Pod)
		want            string
	}{
		{"another node's pod", "hami", func(p *Pod) { p.Node = "node2" }, `is bound to node "node2"`},
		{"never bound by it", "hami", func(p *Pod) { p.Annotations = hami(";;" + one + ";"); p.Annotations["hami.io/vgpu-node"] = "node2" },
			"hami.io/vgpu-node=\"node2\": the pod is bound"},
		{"deleted", "hami", func(p *Pod) { p.Ending = true }, "is being deleted"},
		{"no list", "hami", func(p *Pod) { p.Annotations = map[string]string{"hami.io/vgpu-node": "node1"} }, "is missing"},
		{"lists for fewer containers", "hami", func(p *Pod) { p.Annotations = hami(one + ";") }, "has 1 lists of GPUs for 3 containers"},
		{"lists for more", "hami", func(p *Pod) { p.Annotations = hami(";;;" + one + ";") }, "has 4 lists"},
		{"volcano: for all", "volcano", func(p *Pod) { p.Annotations = volcano(";" + one) }, "has 2 lists of GPUs for 1 containers"},
		{"a GPU of another node", "hami", func(p *Pod) { p.Annotations = hami(";;GPU-x,NVIDIA,3000,0:;") }, `GPU "GPU-x": is not among the 2`},
		{"a MIG instance", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + "[0-1],NVIDIA,3000,0:;") }, "is not among"},
		{"more than the GPU", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,15361,0:;") }, "it has 15360MiB"},
		{"as much as wraps", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,17592186044416,0:;") }, "memory: "},
		{"negative", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,-1,0:;") }, "memory: "},
		{"nothing", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,0,0:;") }, "want at least a MiB"},
		{"more than all of the time", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,1,101:;") }, "cores: "},
		{"a field more", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,1,0,x:;") }, "want UUID,kind,MiB,percent"},
		{"not ended", "hami", func(p *Pod) { p.Annotations = hami(";;" + gpu0 + ",NVIDIA,1,0;") }, "does not end with a colon"},
		{"twice", "hami", func(p *Pod) { p.Annotations = hami(";;" + one + one + ";") }, "was given to it twice"},
		{"long", "hami", func(p *Pod) { p.Annotations = hami(strings.Repeat("x", MaxValue+1)) }, "has more than"},
		{"many", "hami", func(p *Pod) {
			p.Annotations = hami(";;" + strings.Repeat("G,NVIDIA,1,0:", alloc.MaxShares+1) + ";")
		}, "parts of 33 GPUs"},
		{"an index", "kai", func(p *Pod) { p.Annotations = kai("main.gpus.devices", "0", "main.gpu-memory.request", "1Gi") }, `GPU "0"`},
		{"a GPU without memory", "kai", func(p *Pod) { p.Annotations = kai("main.gpus.devices", gpu0) }, "request: is missing"},
		{"a huge number", "kai", func(p *Pod) { p.Annotations = kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "1e999999999") },
			"want a whole number"},
		{"one that wraps", "kai", func(p *Pod) { p.Annotations = kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "16777216Ti") },
			"want a whole number"},
		{"a suffix of its own", "kai", func(p *Pod) { p.Annotations = kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "1GiMi") },
			"want a whole number"},
		{"too small", "kai", func(p *Pod) { p.Annotations = kai("main.gpus.devices", gpu0, "main.gpu-memory.request", "4096") },
			"want at least a MiB"},
	} {
		p := podOf(nil)
		c.change(p)
		shares, err := Find(c.scheduler).Shares(p, "main", "node1", table)
		if err == nil || !strings.Contains(err.Error(), c.want) || shares != nil {
			t.Errorf("%s: %v, %v", c.name, shares, err)
		}
	}
	if _, err := Find("hami").Shares(podOf(hami(one)), "other", "node1", table); err == nil {
		t.Error("a container that the pod has not")
	}
}

// What a container was given is within its limits, which nobody writes in the scheduler's name: HAMi's extender once decided for whoever
// asked it, of any pod that he described.
func TestWithin(t *testing.T) {
	one, two := gpu0+",NVIDIA,3000,30:", gpu0+",NVIDIA,3000,30:"+gpu1+",NVIDIA,3000,30:"
	limits := func(s string, of ...string) map[string]string {
		all := map[string]string{}
		for i, name := range Find(s).Limits[:len(of)] {
			if of[i] != "" {
				all[name] = of[i]
			}
		}
		return all
	}
	for _, c := range []struct {
		name, scheduler, list string
		limits                []string
		want                  string
	}{
		{"as asked", "hami", one, []string{"1", "3k", "30"}, ""},
		{"less", "hami", one, []string{"2", "4000", "40"}, ""},
		{"any memory", "hami", two, []string{"2"}, ""},
		{"0 is none", "hami", one, []string{"1", "0", "0"}, ""},
		{"no cap asked for", "hami", gpu0 + ",NVIDIA,3000,0:", []string{"1", "3000"}, ""},
		{"all of the time", "hami", gpu0 + ",NVIDIA,3000,100:", []string{"1", "3000", "100"}, ""},
		{"does not ask", "hami", one, nil, "was given parts of 1 GPUs, and its limit nvidia.com/gpu is 0"},
		{"memory alone", "hami", one, []string{"", "3000"}, "nvidia.com/gpu is 0"},
		{"more GPUs", "hami", two, []string{"1", "3000"}, "parts of 2 GPUs, and its limit nvidia.com/gpu is 1"},
		{"more memory", "hami", one, []string{"1", "2999"}, "its limit nvidia.com/gpumem is 2999 MiB"},
		{"more of the time", "hami", one, []string{"1", "3000", "29"}, "30 percent: its limit nvidia.com/gpucores is 29"},
		{"no cap", "hami", gpu0 + ",NVIDIA,3000,0:", []string{"1", "3000", "30"}, "0 is no cap"},
		{"all of it for a part", "hami", gpu0 + ",NVIDIA,3000,100:", []string{"1", "3000", "30"}, "0 is no cap"},
		{"no number", "hami", one, []string{"1", "3e3"}, `limit nvidia.com/gpumem="3e3": want a whole number`},
		{"nothing at all", "hami", one, []string{"1", " "}, "want a whole number"},
		{"one that wraps", "hami", one, []string{"16777216Ti"}, "want a whole number"},
		{"as asked", "volcano", two, []string{"2", "3000", "30"}, ""},
		{"memory of one", "volcano", one, []string{"", "3000"}, ""},
		{"memory of one", "volcano", two, []string{"", "3000"}, "volcano.sh/vgpu-number is 1"},
		{"a percentage goes before memory", "volcano", one, []string{"1", "1000", "", "50"}, ""},
		{"more memory", "volcano", one, []string{"1", "1000"}, "its limit volcano.sh/vgpu-memory is 1000 MiB"},
		{"more of the time", "volcano", one, []string{"1", "", "10"}, "volcano.sh/vgpu-cores is 10"},
	} {
		p := podOf(map[string]map[string]string{"hami": hami(";;" + c.list + ";"), "volcano": volcano(c.list)}[c.scheduler])
		p.Containers[2].Limits = limits(c.scheduler, c.limits...)
		shares, err := Find(c.scheduler).Shares(p, "main", "node1", table)
		if c.want == "" && err == nil && len(shares) > 0 {
			continue
		}
		if c.want == "" || err == nil || !strings.Contains(err.Error(), c.want) || shares != nil {
			t.Errorf("%s: %s: %v, %v, want %q", c.scheduler, c.name, shares, err, c.want)
		}
	}
	p := podOf(hami(one + ";;;"))
	p.Containers[0].Limits = limits("hami", "1", "3000")
	if shares, err := Find("hami").Shares(p, "init", "node1", table); err != nil || len(shares) != 1 || shares[0].ID != "hami/u1/init/0" {
		t.Errorf("an init container that asks: %v, %v", shares, err)
	}
}

// FuzzShares: whatever annotations say, a container gets no more of a GPU than there is, of no other GPU, and the runtime can read it.
func FuzzShares(f *testing.F) {
	f.Add(";;"+gpu0+",NVIDIA,3000,30:;", "node1", "2Gi")
	f.Add(gpu1+",NVIDIA,1,0:"+gpu0+",NVIDIA,1,100:", "node1", "1024")
	f.Add(gpu0+","+gpu1, "node2", "99999999999999999999Ti")
	f.Fuzz(func(t *testing.T, list, node, size string) {
		for _, s := range Schedulers() {
			annotations := map[string]string{}
			for i, key := range append(s.Decided, s.Asked...) {
				annotations[strings.Replace(key, "*", "main", 1)] = []string{list, node, size}[min(i, 2)]
			}
			if s.Name == "kai" {
				annotations["nvidia.com/container.main.gpu-memory.request"] = size
			}
			for _, c := range podOf(nil).Containers {
				shares, err := s.Shares(podOf(annotations), c.Name, "node1", table)
				if err != nil && shares != nil {
					t.Fatalf("%v with %v", shares, err)
				}
				seen := map[string]bool{}
				for _, share := range shares {
					back, err := alloc.Parse(share.Text())
					if err != nil || back != share || share.Limit > 15*quota.GiB || share.UUID != gpu0 && share.UUID != gpu1 || seen[share.UUID] ||
						share.Whole || share.Containers != 1 {
						t.Fatalf("%s: %+v, %v", s.Name, share, err)
					}
					seen[share.UUID] = true
				}
			}
		}
	})
}

func TestReads(t *testing.T) {
	for key, want := range map[string]bool{"nvidia.com/container.a.gpus.devices": true, "nvidia.com/container..gpus.devices": false,
		"nvidia.com/container.gpus.devices": false, "nvidia.com/container.a.gpu-memory.limit": true, "nvidia.com/container.a.gpus": false} {
		if got := Find("kai").Reads(key); got != want {
			t.Errorf("%s: %v", key, got)
		}
	}
	if Find("kai").Decides(kai("main.gpu-memory.request", "1Gi"), "main") || !Find("kai").Decides(kai("main.gpus.devices", ""), "main") {
		t.Error("what is asked is no decision")
	}
	if Find("kai").Decides(kai("main.gpus.devices", ""), "side") || !Find("hami").Decides(hami(""), "side") {
		t.Error("KAI decides about one container, HAMi about the pod")
	}
	if Find("kube") != nil {
		t.Error("an unknown scheduler")
	}
}
