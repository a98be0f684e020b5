// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func known(string) error { return nil }

// dgx is a machine with 8 H200 whose mock tells PCI addresses.
func dgx() *server.Server {
	s := dgxh200.New()
	for i := range 8 {
		deviceOf(s, i).GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
			return nvml.PciInfo{Domain: 0x1, Bus: uint32(0x3a + i)}, nvml.SUCCESS
		}
		deviceOf(s, i).GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return nvml.FEATURE_ENABLED, nvml.SUCCESS }
		deviceOf(s, i).GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
			return nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS
		}
	}
	return s
}

func deviceOf(s *server.Server, i int) *server.Device {
	d, _ := s.DeviceGetHandleByIndex(i)
	return d.(*server.Device)
}

func TestGPUs(t *testing.T) {
	list, err := mockGPUs(t, dgx(), known)
	if err != nil || len(list) != 8 {
		t.Fatalf("%d GPUs, %v", len(list), err)
	}
	g := list[1]
	if g.Index != 1 || g.Minor != 1 || g.BusID != "0001:3b:00.0" || !device.IsUUID(g.UUID) || !strings.Contains(g.Name, "H200") || g.Memory < 140*quota.GiB {
		t.Errorf("second GPU %+v", g)
	}
	tab := device.Table{Version: device.TableVersion, Driver: device.DriverNVIDIA, Config: config.Default().Settings, GPUs: list}
	for i := range list {
		path := fmt.Sprintf("/dev/nvidia%d", i)
		list[i].Node = device.Node{Path: path, HostPath: path}
	}
	if err := tab.Validate(); err != nil {
		t.Error(err)
	}
}

// mockGPUs fails the test for a warning that names no reason.
func mockGPUs(t *testing.T, lib nvml.Interface, has func(string) error) ([]device.GPU, error) {
	return listGPUs(lib, has, func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !strings.Contains(text, "MIG") && !strings.Contains(text, "ERROR") && !strings.Contains(text, "lost") {
			t.Errorf("warning without a reason: %s", text)
		}
	})
}

func TestGPUsLeftOut(t *testing.T) {
	s := dgx()
	deviceOf(s, 0).MigMode = nvml.DEVICE_MIG_ENABLE
	s.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if i == 3 {
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return s.Devices[i], nvml.SUCCESS
	}
	var warnings []string
	list, err := listGPUs(s, known, func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) })
	if err != nil || len(list) != 6 || list[0].Index != 1 {
		t.Errorf("%d GPUs, %v", len(list), err)
	}
	if len(warnings) != 2 || !strings.Contains(warnings[0], "GPU 0 is left out: MIG") || !strings.Contains(warnings[1], "GPU 3 is left out") {
		t.Errorf("warnings %q", warnings)
	}

	// A library without MIG functions must not be asked: the call would kill the process.
	deviceOf(s, 1).GetMigModeFunc = func() (int, int, nvml.Return) { panic("called a function that the library lacks") }
	lacks := func(symbol string) error { return errors.New("undefined symbol: " + symbol) }
	if list, err = listGPUs(s, lacks, t.Logf); err != nil || len(list) != 7 {
		t.Errorf("old library: %d GPUs, %v", len(list), err)
	}

	one := dgxh200.NewWithGPUs(gpus.Multiple(1, gpus.H200_SXM5_141GB)...)
	deviceOf(one, 0).MigMode = nvml.DEVICE_MIG_ENABLE
	if _, err := listGPUs(one, known, t.Logf); err == nil {
		t.Error("a table without a GPU")
	}
}

// TestDiscover runs nvcdi itself over a made-up driver installation.
func TestDiscover(t *testing.T) {
	const version = "580.159.04"
	for _, tt := range []struct{ name, dir string }{
		{"standard folder", "/usr/lib/x86_64-linux-gnu"},
		{"outside of the ld cache", "/usr/local/nvidia/lib64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("PATH", "/usr/bin")
			// nvcdi resolves links, and the folder for temporary files may lie below one.
			root, err := filepath.EvalSymlinks(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			lib := root + tt.dir
			bin := filepath.Join(filepath.Dir(lib), "bin")
			for _, dir := range []string{lib, bin} {
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range []string{"libcuda.so." + version, "libnvidia-ml.so." + version, "libcuda.so.1.1"} {
				if err := os.WriteFile(filepath.Join(lib, f), nil, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Symlink("libcuda.so."+version, lib+"/libcuda.so.1"); err != nil {
				t.Fatal(err)
			}
			s := dgx()
			s.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return version, nvml.SUCCESS }
			files, err := discover(s, root, []string{"/nowhere", lib}, t.Logf)
			if err != nil {
				t.Fatal(err)
			}
			if got := files.libcuda(version); got != lib+"/libcuda.so."+version {
				t.Errorf("libcuda %q of %+v", got, files.mounts)
			}
			if len(files.libDirs) == 0 || len(files.mounts) < 2 {
				t.Errorf("%+v", files)
			}
			if !slices.ContainsFunc(files.links, func(l device.Link) bool { return strings.HasSuffix(l.Path, "/libcuda.so") }) {
				t.Errorf("links %+v", files.links)
			}
		})
	}
}

func TestDiscoverNothing(t *testing.T) {
	s := dgx()
	files, err := discover(s, t.TempDir(), nil, t.Logf)
	if err == nil || files.mounts != nil {
		t.Errorf("found %+v (%v) in an empty folder", files, err)
	}
}

func TestAddBinaries(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(root+"/bin", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/bin/nvidia-smi", nil, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", "/usr/bin")
	for range 2 {
		if err := addBinaries([]string{"/nowhere/lib64", root + "/lib64"}); err != nil {
			t.Fatal(err)
		}
	}
	if got := os.Getenv("PATH"); got != "/usr/bin:"+root+"/bin" {
		t.Errorf("PATH=%s", got)
	}
}
