// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
)

const (
	gpuA = "GPU-0000000a-0000-0000-0000-00000000000a"
	gpuB = "GPU-0000000b-0000-0000-0000-00000000000b"
)

func TestJudgeOffered(t *testing.T) {
	both := []string{gpuA, gpuB}
	dra, plugin := offers{claims: true}, offers{memory: true}
	by := func(resource string, ids ...string) others {
		var o others
		for _, id := range ids {
			o.devices = append(o.devices, offered{resource, id})
		}
		return o
	}
	for name, tt := range map[string]struct {
		agent  offers
		mine   []string
		others others
		status Status
		says   string
	}{
		"nobody": {dra, both, others{}, OK, "nobody else"},
		"NVIDIA's plugin": {dra, both, by("nvidia.com/gpu", gpuB, "GPU-other"), Fail,
			"nvidia.com/gpu has " + gpuB + ", which cgpu-agent offers"},
		"beside gpu-mem":     {plugin, both, by("nvidia.com/gpu", gpuA), Fail, gpuA},
		"replicas":           {dra, both, by("nvidia.com/gpu.shared", gpuB+"::0", gpuB+"::1"), Fail, "nvidia.com/gpu.shared has " + gpuB + ","},
		"HAMi":               {dra, both, by("nvidia.com/gpu", strings.ToUpper(gpuA)+"-3"), Fail, "has " + gpuA},
		"both":               {dra, both, by("nvidia.com/gpu", gpuB, gpuA), Fail, "has " + gpuA + ", nvidia.com/gpu has " + gpuB},
		"divided":            {dra, both[:1], by("nvidia.com/gpu", gpuB), OK, "nvidia.com/gpu has other GPUs"},
		"no agent":           {offers{}, both, by("nvidia.com/gpu", gpuB), Warn, "cgpu shares as well"},
		"cgpu's own":         {plugin, both, by("aliyun.com/gpu-mem", gpuA+"-_-0", gpuB+"-_-1"), OK, "nobody else"},
		"no GPUs":            {dra, both, by("rdma/hca", "0", "1"), OK, "nobody else"},
		"NVIDIA's DRA":       {dra, both, others{nvidia: true}, Warn, "kubectl get resourceslices"},
		"both of NVIDIA's":   {dra, both, others{nvidia: true, devices: by("nvidia.com/gpu", gpuA).devices}, Fail, gpuA},
		"NVIDIA's DRA alone": {offers{}, both, others{nvidia: true}, OK, "nobody else"},
		"no answer":          {dra, both, others{err: "the kubelet does not tell"}, Skip, "does not tell"},
	} {
		expect(t, name, judgeOffered(tt.agent, tt.mine, tt.others), tt.status, tt.says)
	}
}

func TestAgentsGPUs(t *testing.T) {
	gpus := []device.GPU{{UUID: gpuA}, {UUID: gpuB}}
	for text, want := range map[string][]string{
		"":       {gpuA, gpuB},
		"{}":     {gpuA, gpuB},
		"broken": {gpuA, gpuB},
		`{"owners": {"` + gpuA + `": "dra", "` + gpuB + `": "-"}}`:          {gpuA},
		`{"owners": {"` + gpuA + `": "*", "` + gpuB + `": "deviceplugin"}}`: {gpuB},
		`{"owners": {"` + gpuB + `": "dra"}}`:                               {gpuB}, // of one that was not looked up it offers nothing
	} {
		if got := agents(gpus, []byte(text)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

func TestParseOffered(t *testing.T) {
	got, whole := parseOffered("nvidia.com/gpu GPU-a::0\nx y z\nend\n")
	if !whole || !slices.Equal(got, []offered{{"nvidia.com/gpu", "GPU-a::0"}, {"x", "y z"}}) {
		t.Errorf("%+v, %v", got, whole)
	}
	for _, text := range []string{"", "nvidia.com/gpu GPU-a\n", "cgpu-podresources: want SOCKET", "memory"} {
		if _, whole := parseOffered(text); whole {
			t.Errorf("%q is whole", text)
		}
	}
}

// TestOfferedOnce: the kubelet of a node is asked, and the answer compared with what the agent has kept of its lists.
func TestOfferedOnce(t *testing.T) {
	program := func(lines string) string { return "#!/bin/sh\n[ \"$2\" ] || exit 1\nprintf '" + lines + "'\n" }
	look := func(answer, divided string) Result {
		t.Helper()
		h := files(t, map[string]string{"proc/7/comm": "kubelet\n", "bin/cgpu-podresources": program(answer)})
		h.loaded, h.table = true, &device.Table{GPUs: []device.GPU{{UUID: gpuA}, {UUID: gpuB}}}
		if divided != "" {
			path := h.at("/var/lib/kubelet/plugins/gpu.cgpu.io/gpus.json")
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(divided), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return checkOfferedOnce(h)
	}
	expect(t, "both have it", look("nvidia.com/gpu "+gpuB+"\\nend\\n", ""), Warn, gpuB)
	expect(t, "left to others", look("nvidia.com/gpu "+gpuB+"\\nend\\n", `{"owners": {"`+gpuA+`": "dra", "`+gpuB+`": "-"}}`), OK, "other GPUs")
	expect(t, "cut off", look("nvidia.com/gpu "+gpuB+"\\n", ""), Skip, "another version")
	expect(t, "refused", look("nobody answers\\n'; exit 1; '", ""), Skip, "nobody answers")

	h := files(t, map[string]string{"proc/7/comm": "kubelet\n"})
	h.loaded, h.tableErr = true, device.ErrMissing
	expect(t, "no table", checkOfferedOnce(h), Skip, "node table")
	h.kube, h.UID = nil, 1000
	expect(t, "not root", checkOfferedOnce(h), Skip, "root")
	h = files(t, nil)
	h.loaded, h.tableErr = true, device.ErrMissing
	expect(t, "no node", checkOfferedOnce(h), "", "")
}
