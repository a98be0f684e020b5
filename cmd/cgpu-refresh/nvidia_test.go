// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	if g.Index != 1 || g.Minor != 1 || g.BusID != "0001:3b:00.0" || !device.IsUUID(g.UUID) || !strings.Contains(g.Name, "H200") ||
		g.Memory < 140*quota.GiB {
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
	return listGPUs(lib, true, has, func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !strings.Contains(text, "MIG") && !strings.Contains(text, "ERROR") &&
			!strings.Contains(text, "lost") {
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
	list, err := listGPUs(s, true, known, func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) })
	if err != nil || len(list) != 6 || list[0].Index != 1 {
		t.Errorf("%d GPUs, %v", len(list), err)
	}
	if len(warnings) != 2 || !strings.Contains(warnings[0], "GPU 0 is left out: MIG") || !strings.Contains(warnings[1], "GPU 3 is left out") {
		t.Errorf("warnings %q", warnings)
	}

	// A library without MIG functions must not be asked: the call would kill the process.
	migMode := deviceOf(s, 1).GetMigModeFunc
	deviceOf(s, 1).GetMigModeFunc = func() (int, int, nvml.Return) { panic("called a function that the library lacks") }
	lacks := func(symbol string) error { return errors.New("undefined symbol: " + symbol) }
	if list, err = listGPUs(s, true, lacks, t.Logf); err != nil || len(list) != 7 {
		t.Errorf("old library: %d GPUs, %v", len(list), err)
	}

	deviceOf(s, 1).GetMigModeFunc = migMode
	deviceOf(s, 2).GetArchitectureFunc = func() (nvml.DeviceArchitecture, nvml.Return) { return nvml.DEVICE_ARCH_PASCAL, nvml.SUCCESS }
	warnings = nil
	list, err = listGPUs(s, true, known, func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) })
	if err != nil || len(warnings) != 3 || !strings.Contains(warnings[1], "is a GPU of Pascal, and a guard needs Volta") {
		t.Errorf("a Pascal with a guard: %d GPUs, %v, warnings %q", len(list), err, warnings)
	}
	if without, err := listGPUs(s, false, known, t.Logf); err != nil || len(without) != len(list)+1 {
		t.Errorf("a Pascal without a guard: %d GPUs, %v", len(without), err)
	}

	one := dgxh200.NewWithGPUs(gpus.Multiple(1, gpus.H200_SXM5_141GB)...)
	deviceOf(one, 0).MigMode = nvml.DEVICE_MIG_ENABLE
	if _, err := listGPUs(one, true, known, t.Logf); err == nil {
		t.Error("a table without a GPU")
	}
}

const installed = "580.159.04"

// install makes a driver's files up, in one folder of libraries and one of programs.
func install(t *testing.T, lib, bin string) {
	t.Helper()
	for _, dir := range []string{lib, bin} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"libcuda.so." + installed, "libnvidia-ml.so." + installed, "libcuda.so.1.1"} {
		if err := os.WriteFile(filepath.Join(lib, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libcuda.so."+installed, lib+"/libcuda.so.1"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(bin+"/nvidia-smi", nil, 0o755); err != nil {
		t.Fatal(err)
	}
}

// TestDiscover runs nvcdi itself over a made-up driver installation.
func TestDiscover(t *testing.T) {
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
			install(t, lib, bin)
			s := dgx()
			s.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return installed, nvml.SUCCESS }
			files, err := discover(s, root, []string{"/nowhere", lib}, t.Logf)
			if err != nil {
				t.Fatal(err)
			}
			if got := files.libcuda(installed); got != lib+"/libcuda.so."+installed {
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

// TestDriverRoot: of a driver below another root a container gets the files where the driver has them, not where the machine does.
func TestDriverRoot(t *testing.T) {
	t.Setenv("PATH", "/usr/bin")
	t.Setenv("LD_LIBRARY_PATH", "")
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib"} {
		t.Run(folder, func(t *testing.T) {
			root := filepath.Join(top, strings.ReplaceAll(folder, "/", "-"))
			install(t, filepath.Join(root, folder), root+"/usr/bin")
			// A library that can be loaded and says nothing but that all is well.
			c := filepath.Join(t.TempDir(), "nvml.c")
			if err := os.WriteFile(c, []byte("int nvmlInit_v2(void) { return 0; }\nint nvmlShutdown(void) { return 0; }\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			nvmlPath := filepath.Join(root, folder, nvmlFile)
			if out, err := exec.Command(cmp.Or(os.Getenv("CC"), "cc"), "-shared", "-fPIC", "-o", nvmlPath, c).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			link := root + "-link"
			if err := os.Symlink(root, link); err != nil {
				t.Fatal(err)
			}
			_, found, shutdown, err := openNVML(link)
			if err != nil || found != root {
				t.Fatalf("root %q, %v", found, err)
			}
			shutdown()

			s := dgx()
			s.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return installed, nvml.SUCCESS }
			files, err := discover(s, found, foldersOf(found), t.Logf)
			if err != nil {
				t.Fatal(err)
			}
			if got := files.libcuda(installed); got != filepath.Join(root, folder, "libcuda.so."+installed) {
				t.Errorf("libcuda %q", got)
			}
			smi := false
			for _, m := range files.mounts {
				if m.Container != strings.TrimPrefix(m.Host, root) {
					t.Errorf("%s is at %s in the container", m.Host, m.Container)
				}
				smi = smi || m.Container == "/usr/bin/nvidia-smi"
			}
			if !smi {
				t.Errorf("no nvidia-smi: %+v", files.mounts)
			}
			if !slices.Equal(files.libDirs, []string{"/" + folder}) {
				t.Errorf("library folders %q", files.libDirs)
			}
		})
	}
	if _, _, _, err := openNVML(top + "/nowhere"); err == nil || !strings.Contains(err.Error(), "driver_root") {
		t.Errorf("a root without a driver: %v", err)
	}
}

// TestCapabilities: whatever NVIDIA_DRIVER_CAPABILITIES says, a container has the driver's files for all of them, as with NVIDIA's toolkit
// in CDI mode, at the places where the loaders in its image look. The loaders themselves (libglvnd, libOpenCL.so.1) are the image's.
func TestCapabilities(t *testing.T) {
	t.Setenv("PATH", "/usr/bin")
	t.Setenv("LD_LIBRARY_PATH", "")
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	const lib = "/usr/lib/x86_64-linux-gnu"
	install(t, root+lib, root+"/usr/bin")
	files := map[string]string{}
	loaders := []string{lib + "/libEGL.so.1", lib + "/libOpenCL.so.1", lib + "/libGL.so.1"}
	for _, name := range loaders {
		files[name] = ""
	}
	so := func(name string) string { return lib + "/lib" + name + ".so." + installed }
	want := map[string][]string{ // where the container has it
		"OpenCL":        {so("nvidia-opencl"), "/etc/OpenCL/vendors/nvidia.icd"},
		"NVDEC, NVENC":  {so("nvcuvid"), so("nvidia-encode"), lib + "/vdpau/libvdpau_nvidia.so." + installed},
		"EGL, OpenGL":   {so("EGL_nvidia"), so("GLX_nvidia"), "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"},
		"EGL, surfaces": {lib + "/libnvidia-egl-gbm.so.1.1.2", "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json"},
		"Vulkan":        {so("nvidia-glvkspirv"), "/etc/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/implicit_layer.d/nvidia_layers.json"},
		"OptiX":         {so("nvoptix"), "/usr/share/nvidia/nvoptix.bin"},
	}
	for _, list := range want {
		for _, name := range list {
			files[name] = ""
		}
	}
	put(t, root, files)
	s := dgx()
	s.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return installed, nvml.SUCCESS }
	found, err := discover(s, root, foldersOf(root), t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	in := map[string]bool{}
	for _, m := range found.mounts {
		in[m.Container] = true
	}
	for what, list := range want {
		for _, name := range list {
			if !in[name] {
				t.Errorf("%s: the container has no %s", what, name)
			}
		}
	}
	for _, name := range loaders {
		if in[name] {
			t.Errorf("%s is the image's, not the driver's", name)
		}
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
