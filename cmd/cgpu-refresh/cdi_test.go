// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
)

// commonOf returns the edits for every container out of a CDI file. The yaml decoder knows no json names, so it goes by
// lower-cased field names, which is all but right for CDI; the aliases below are what differs.
func commonOf(t *testing.T, name string) *specs.ContainerEdits {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	var f struct {
		ContainerEdits struct {
			Env   []string `yaml:"env"`
			Hooks []struct {
				HookName, Path string
				Args           []string `yaml:"args"`
			} `yaml:"hooks"`
			Mounts []struct {
				HostPath      string   `yaml:"hostPath"`
				ContainerPath string   `yaml:"containerPath"`
				Options       []string `yaml:"options"`
			} `yaml:"mounts"`
			DeviceNodes []struct {
				Path string `yaml:"path"`
			} `yaml:"deviceNodes"`
		} `yaml:"containerEdits"`
	}
	if err := yaml.Unmarshal(text, &f); err != nil {
		t.Fatal(err)
	}
	in := f.ContainerEdits
	out := &specs.ContainerEdits{Env: in.Env}
	for _, n := range in.DeviceNodes {
		out.DeviceNodes = append(out.DeviceNodes, &specs.DeviceNode{Path: n.Path})
	}
	for _, h := range in.Hooks {
		out.Hooks = append(out.Hooks, &specs.Hook{HookName: h.HookName, Path: h.Path, Args: h.Args})
	}
	for _, m := range in.Mounts {
		out.Mounts = append(out.Mounts, &specs.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: m.Options})
	}
	if len(out.Hooks) == 0 || len(out.Mounts) == 0 || len(out.DeviceNodes) == 0 {
		t.Fatalf("%s: decoded to %+v", name, out)
	}
	return out
}

var readOnly = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}

func TestTranslateMock(t *testing.T) {
	got := translate(commonOf(t, "nvcdi-mock-one-gpu.yaml"))
	mount := func(path string) device.Mount {
		return device.Mount{Host: path, Container: path, Options: readOnly}
	}
	want := driverFiles{
		mounts: []device.Mount{
			mount("/lib/x86_64-linux-gnu/libcuda.so.999.88.77"),
			mount("/lib/x86_64-linux-gnu/libnvidia-ml.so.999.88.77"),
			mount("/usr/bin/nvidia-smi"),
			mount("/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.999.88.77"),
		},
		links:   []device.Link{{Target: "libcuda.so.1", Path: "/lib/x86_64-linux-gnu/libcuda.so"}},
		libDirs: []string{"/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu/vdpau"},
		env:     []string{"NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(driverFiles{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if lib := got.libcuda("999.88.77"); lib != "/lib/x86_64-linux-gnu/libcuda.so.999.88.77" {
		t.Errorf("libcuda %q", lib)
	}
}

func TestTranslateH200(t *testing.T) {
	edits := commonOf(t, "nvidia-cdi-h200-580.yaml")
	got := translate(edits)
	if len(got.mounts) != len(edits.Mounts) || len(got.mounts) != 35 {
		t.Errorf("%d mounts of %d, want all 35", len(got.mounts), len(edits.Mounts))
	}
	const dir = "/usr/local/nvidia/lib64"
	if !slices.Equal(got.libDirs, []string{dir}) {
		t.Errorf("library folders %q, want %q", got.libDirs, dir)
	}
	if !slices.Equal(got.env, []string{"NVIDIA_CTK_LIBCUDA_DIR=" + dir}) {
		t.Errorf("environment %q", got.env)
	}
	if lib := got.libcuda("580.159.04"); lib != dir+"/libcuda.so.580.159.04" {
		t.Errorf("libcuda %q", lib)
	}
	for _, want := range []device.Link{
		{Target: "../libnvidia-allocator.so.1", Path: dir + "/gbm/nvidia-drm_gbm.so"}, // of the first of two create-symlinks hooks
		{Target: "libcuda.so.580.159.04", Path: dir + "/libcuda.so.1"},
		{Target: "libcuda.so.1", Path: dir + "/libcuda.so"},
		{Target: "libvdpau_nvidia.so.1", Path: dir + "/libvdpau_nvidia.so"}, // the last
	} {
		if !slices.Contains(got.links, want) {
			t.Errorf("no link %+v", want)
		}
	}
	links := 0
	for _, h := range edits.Hooks {
		links += strings.Count(strings.Join(h.Args, " "), "--link ")
	}
	if len(got.links) != links {
		t.Errorf("%d links, want %d", len(got.links), links)
	}
	// What a table made of it must pass.
	tab := device.Table{Version: device.TableVersion, Driver: device.DriverNVIDIA, Config: config.Default().Settings, Mounts: got.mounts,
		Links: got.links, LibDirs: got.libDirs, Env: got.env}
	if err := tab.Validate(); err != nil {
		t.Error(err)
	}
}

func TestTranslateOdd(t *testing.T) {
	got := translate(&specs.ContainerEdits{
		Env: []string{"NVIDIA_VISIBLE_DEVICES=void", "A=", "none"},
		Mounts: []*specs.Mount{
			nil,
			{HostPath: "tmpfs", ContainerPath: "/proc/driver/nvidia", Type: "tmpfs"},
			{HostPath: "/a", ContainerPath: "/x", Type: "bind"},
			{HostPath: "/b", ContainerPath: "/x"},
		},
		Hooks: []*specs.Hook{
			nil,
			{Args: []string{"only"}},
			{Args: []string{"h", "create-symlinks", "--link=a::/p", "--link", "a::/p", "--link", "no-path", "--link", "b::relative", "--link"}},
			{Args: []string{"h", "update-ldcache", "--folder=/l", "--ldconfig-path", "/sbin/ldconfig", "--folder", "/l/", "--folder", "rel"}},
			{Args: []string{"h", "chmod", "--path", "/l", "--link", "c::/q"}},
		},
	})
	want := driverFiles{
		mounts:  []device.Mount{{Host: "/a", Container: "/x"}},
		links:   []device.Link{{Target: "a", Path: "/p"}},
		libDirs: []string{"/l"},
		env:     []string{"A="},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(driverFiles{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
