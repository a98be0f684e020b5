// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

var update = flag.Bool("update", false, "write the golden files anew")

// recorded reads a config.json that an engine wrote.
func recorded(t testing.TB, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func decode(t testing.TB, raw []byte) *Document {
	t.Helper()
	doc, err := Decode(raw)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// value decodes JSON to compare.
func value[T any](t testing.TB, raw []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatalf("%v in %s", err, clip(raw))
	}
	return v
}

// edited is what tests look at in a config.json.
type edited struct {
	Process struct{ Env []string }
	Mounts  []specs.Mount
	Hooks   map[string][]specs.Hook
	Linux   struct {
		Devices   []specs.LinuxDevice
		Resources struct{ Devices []specs.LinuxDeviceCgroup }
		Seccomp   *profile
	}
	Annotations map[string]string
}

func (e edited) nvidiaNodes() []string {
	var paths []string
	for _, n := range e.Linux.Devices {
		if strings.Contains(n.Path, "nvidia") {
			paths = append(paths, n.Path)
		}
	}
	slices.Sort(paths)
	return paths
}

// gpu is a GPU of the test node: driver 580 with the numbers of the recordings.
func gpu(index int) device.GPU {
	n := string(rune('0' + index))
	return device.GPU{
		Index: index, UUID: "GPU-" + n + "0000000-0000-0000-0000-000000000000", Minor: index, Memory: 15109 * quota.MiB,
		Node: device.Node{Path: "/dev/nvidia" + n, HostPath: "/dev/nvidia" + n, Major: 195, Minor: uint32(index)},
	}
}

// plan grants GPUs as on a node with four real ones; the limit 0 is a native GPU.
func plan(limits map[int]quota.Bytes) Plan {
	p := Plan{
		ID: "c1", Nonce: "0123456789abcdef",
		Common: []device.Node{
			{Path: "/dev/nvidiactl", HostPath: "/dev/nvidiactl", Major: 195, Minor: 255},
			{Path: "/dev/nvidia-uvm", HostPath: "/dev/nvidia-uvm", Major: 510, Minor: 0},
		},
		Mounts: []device.Mount{{
			Host: "/lib/x86_64-linux-gnu/libcuda.so.580.159.04", Container: "/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
			Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		}},
		Links:   []device.Link{{Target: "libcuda.so.1", Path: "/lib/x86_64-linux-gnu/libcuda.so"}},
		LibDirs: []string{"/lib/x86_64-linux-gnu"},
		Libraries: []device.Library{
			{Name: "libcuda.so.1", Path: "/lib/x86_64-linux-gnu/libcuda.so.580.159.04", Flags: 0x303},
			{Name: "libcuda.so", Path: "/lib/x86_64-linux-gnu/libcuda.so.580.159.04", Flags: 0x303},
		},
		Env:    []string{"NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu", "NVIDIA_VISIBLE_DEVICES=all"},
		Socket: "/run/cgpu/g/0123456789abcdef.sock", Hook: "/usr/bin/cgpu-hook", RunDir: "/run/cgpu", Version: "test",
	}
	for i := range 4 {
		if limit, ok := limits[i]; ok {
			p.GPUs = append(p.GPUs, GPU{GPU: gpu(i), Native: limit == 0, Slice: quota.Slice{Limit: limit}})
		} else {
			p.Hidden = append(p.Hidden, gpu(i).Node)
		}
	}
	return p
}

// simulated is p on the simulated driver, which has no files and whose nodes are bind mounted.
func simulated(p Plan) Plan {
	p.Mounts, p.Links, p.LibDirs, p.Libraries, p.Env = nil, nil, nil, nil, nil
	sim := func(d device.Node) device.Node {
		return device.Node{Path: d.Path, HostPath: strings.Replace(d.Path, "/dev/", "/dev/cgpu-sim/", 1), Major: 1, Minor: 3, Bind: true}
	}
	p.GPUs, p.Hidden = slices.Clone(p.GPUs), slices.Clone(p.Hidden)
	p.Common = []device.Node{sim(p.Common[0]), sim(p.Common[1])}
	for i := range p.GPUs {
		p.GPUs[i].Node = sim(p.GPUs[i].Node)
	}
	for i := range p.Hidden {
		p.Hidden[i] = sim(p.Hidden[i])
	}
	return p
}

// withLimiter is p with the limiter, for an image with glibc.
func withLimiter(p Plan) Plan {
	p.Limiter, p.Page, p.Preload = "/usr/lib/cgpu/libcgpu.so", "/run/cgpu/page/0123456789abcdef", "/run/cgpu/ld.so.preload"
	return p
}

// withoutPreload is p for an image with musl.
func withoutPreload(p Plan) Plan {
	p.Preload = ""
	return p
}

// preloadMode is p without a guard, onSimulated with the one that plays the kernel for the simulated driver.
func preloadMode(p Plan) Plan {
	p.PageWritable, p.Socket = true, ""
	return p
}

func onSimulated(p Plan) Plan {
	p.Socket = "/run/cgpu/g/0123456789abcdef.sock"
	return p
}

// apply edits raw and decodes the result.
func apply(t testing.TB, raw []byte, p Plan) edited {
	t.Helper()
	doc := decode(t, raw)
	if err := Apply(doc, p); err != nil {
		t.Fatal(err)
	}
	return value[edited](t, doc.Encode())
}
