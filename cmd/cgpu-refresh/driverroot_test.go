// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// put makes empty files, or such with a text.
func put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPlaces(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	put(t, dir, map[string]string{
		"hosted/lib64/" + nvmlFile:                           "",
		"operator/usr/lib/x86_64-linux-gnu/" + nvmlFile:      "",
		"flatcar-1/usr/lib64/" + nvmlFile:                    "",
		"operator/usr/lib/aarch64-linux-gnu/libother.so":     "",
		"empty/usr/lib64/libcuda.so.1":                       "",
		"operator/usr/share/elsewhere/lib64/not/" + nvmlFile: "",
	})
	if err := os.Symlink("flatcar-1", dir+"/flatcar"); err != nil {
		t.Fatal(err)
	}
	known := []string{dir + "/absent", dir + "/empty", dir + "/operator", dir + "/flatcar"}
	machine := []place{{root: "/"}, {"/", dir + "/hosted/lib64/" + nvmlFile}}
	operator := place{dir + "/operator", dir + "/operator/usr/lib/x86_64-linux-gnu/" + nvmlFile}
	flatcar := place{dir + "/flatcar-1", dir + "/flatcar-1/usr/lib64/" + nvmlFile}
	for _, tt := range []struct {
		configured string
		want       []place
	}{
		{"", append(machine, operator, flatcar)},
		{"/", machine},
		{dir + "/flatcar", []place{flatcar}},
		{dir + "/operator", []place{operator}},
		{dir + "/empty", nil},
		{dir + "/absent", nil},
	} {
		got := places(tt.configured, known, []string{dir + "/hosted/lib64", dir + "/hosted/lib"})
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(place{})); diff != "" {
			t.Errorf("driver_root = %q: -want +got:\n%s", tt.configured, diff)
		}
	}
}

const (
	oldDevices = "Character devices:\n  1 mem\n195 nvidia-frontend\n511 nvidia-uvm\n\nBlock devices:\n  7 nvidia\n"
	newDevices = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n195 nvidia-modeset\n234 nvidia-uvm\n235 nvidia-caps\n\nBlock " +
		"devices:\n"
	gpuInfo = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0\nDevice Minor: \t 3\nGPU Excluded:\t No\n"
)

func TestModuleNodes(t *testing.T) {
	node := func(name string, major, minor uint32) device.Node {
		return device.Node{Path: "/dev/" + name, Major: major, Minor: minor}
	}
	for name, tt := range map[string]struct {
		modules
		want []device.Node
	}{
		"515": {modules{devices: oldDevices, gpus: []string{gpuInfo}},
			[]device.Node{node("nvidiactl", 195, 255), node("nvidia-uvm", 511, 0), node("nvidia3", 195, 3)}},
		"580": {modules{devices: newDevices, gpus: []string{gpuInfo}},
			[]device.Node{node("nvidiactl", 195, 255), node("nvidia-uvm", 234, 0), node("nvidia3", 195, 3)}},
		"no uvm":       {modules{devices: "Character devices:\n195 nvidia\n"}, []device.Node{node("nvidiactl", 195, 255)}},
		"not loaded":   {modules{devices: "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n"}, nil},
		"nothing":      {modules{}, nil},
		"not our task": {modules{devices: newDevices, params: "DeviceFileMode: 438\nModifyDeviceFiles: 0\n", gpus: []string{gpuInfo}}, nil},
		"odd minors": {modules{devices: newDevices, gpus: []string{"Device Minor: \t 255\n", "Device Minor: x\n", "Device Minor: -1\n", ""}},
			[]device.Node{node("nvidiactl", 195, 255), node("nvidia-uvm", 234, 0)}},
	} {
		if diff := cmp.Diff(tt.want, tt.nodes()); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}

// TestMakeNodes: nodes that a machine lacks are made as the module's parameters say, and those that are there stay.
func TestMakeNodes(t *testing.T) {
	testenv.NeedsRoot(t, "mknod")
	proc, dev := t.TempDir(), t.TempDir()
	put(t, proc, map[string]string{
		"devices":              newDevices,
		"driver/nvidia/params": "ModifyDeviceFiles: 1\nDeviceFileUID: 7\nDeviceFileGID: 44\nDeviceFileMode: 432\n",
		"driver/nvidia/gpus/0000:3a:00.0/information":  gpuInfo,
		"driver/nvidia/gpus/0000:3a:00.0/registry":     "Device Minor: 9\n",
		"driver/nvidia/gpus/broken/information/nobody": "",
	})
	put(t, dev, map[string]string{"nvidiactl": "there already"})
	m := readModules(proc)
	for range 2 {
		if err := m.makeNodes(dev); err != nil {
			t.Fatal(err)
		}
	}
	for name, minor := range map[string]uint32{"nvidia-uvm": 0, "nvidia3": 3} {
		var st syscall.Stat_t
		if err := syscall.Lstat(filepath.Join(dev, name), &st); err != nil || st.Mode != syscall.S_IFCHR|0o660 || st.Uid != 7 || st.Gid != 44 ||
			device.Minor(st.Rdev) != minor {
			t.Errorf("%s: %+v, %v", name, st, err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(dev, "nvidiactl")); err != nil || string(text) != "there already" {
		t.Errorf("nvidiactl: %q, %v", text, err)
	}
	if list, err := os.ReadDir(dev); err != nil || len(list) != 3 {
		t.Errorf("%v, %v", list, err)
	}
}
