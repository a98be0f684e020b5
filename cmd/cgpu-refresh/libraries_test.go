// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ldcache"
)

func TestAddLibraries(t *testing.T) {
	const dir = "/drv"
	mount := func(path string) device.Mount { return device.Mount{Host: "/host" + path, Container: path} }
	d := driverFiles{
		mounts: []device.Mount{
			mount("/drv/libcuda.so.5"), mount("/drv/libgl.so.5"), mount("/drv/libown.so.1"), mount("/drv/libnone.so"),
			mount("/drv/readme"), mount("/bin/nvidia-smi"), mount("/drv/firmware/gsp.bin"),
		},
		links: []device.Link{
			{Target: "libcuda.so.1", Path: "/drv/libcuda.so"}, // before the one that it leads to, which nobody has asked for
			{Target: "/drv/libgl.so.5", Path: "/drv/libgl.so.0"},
			{Target: "../libgl.so.0", Path: "/drv/gbm/gbm.so"},    // not in a library folder
			{Target: "elsewhere.so", Path: "/drv/libelse.so"},     // to nothing of the driver's
			{Target: "libloop.so.1", Path: "/drv/libloop.so"},     // to each other
			{Target: "libloop.so", Path: "/drv/libloop.so.1"},     //
			{Target: "libgl.so.5", Path: "/drv/libown.so.1"},      // where a file is
			{Target: "libgl.so.5", Path: "/drv/libgl_indirect.0"}, // of a name that is nobody's SONAME
		},
		libDirs: []string{dir},
	}
	links := slices.Clone(d.links)
	var warned []string
	d.addLibraries(func(host string) (library, error) {
		switch host {
		case "/host/drv/libcuda.so.5":
			return library{"libcuda.so.1", ldcache.X8664}, nil
		case "/host/drv/libgl.so.5":
			return library{"libgl.so.0", ldcache.I386}, nil
		case "/host/drv/libown.so.1":
			return library{"libown.so.1", ldcache.X8664}, nil
		case "/host/drv/libnone.so":
			return library{flags: ldcache.X8664}, nil
		case "/host/drv/readme":
			return library{}, errors.New("bad magic number")
		}
		t.Errorf("%s was read", host)
		return library{}, nil
	}, func(_ string, args ...any) { warned = append(warned, args[0].(string)) })
	want := []device.Library{
		{Name: "libown.so.1", Path: "/drv/libown.so.1", Flags: ldcache.X8664},
		{Name: "libnone.so", Path: "/drv/libnone.so", Flags: ldcache.X8664},
		{Name: "libgl.so.0", Path: "/drv/libgl.so.5", Flags: ldcache.I386},
		{Name: "libgl_indirect.0", Path: "/drv/libgl.so.5", Flags: ldcache.I386},
		{Name: "libcuda.so.1", Path: "/drv/libcuda.so.5", Flags: ldcache.X8664},
		{Name: "libcuda.so", Path: "/drv/libcuda.so.5", Flags: ldcache.X8664},
	}
	if diff := cmp.Diff(want, d.libraries); diff != "" {
		t.Errorf("libraries, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(append(links, device.Link{Target: "libcuda.so.5", Path: "/drv/libcuda.so.1"}), d.links); diff != "" {
		t.Errorf("links, -want +got:\n%s", diff)
	}
	if !slices.Equal(warned, []string{"/host/drv/readme"}) {
		t.Errorf("warned of %q", warned)
	}
}

// On the H200, whose table names all links, ldconfig has nothing to add but the cache.
func TestAddLibrariesH200(t *testing.T) {
	d := translate(commonOf(t, "nvidia-cdi-h200-580.yaml"))
	links := len(d.links)
	d.addLibraries(func(host string) (library, error) {
		name, _, _ := strings.Cut(filepath.Base(host), ".so.")
		for _, l := range d.links {
			if l.Target == filepath.Base(host) && strings.HasPrefix(filepath.Base(l.Path), name+".so.") {
				return library{filepath.Base(l.Path), ldcache.X8664}, nil
			}
		}
		return library{flags: ldcache.X8664}, nil
	}, t.Errorf)
	if len(d.links) != links {
		t.Errorf("new links: %+v", d.links[links:])
	}
	for _, want := range []string{"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1",
		"libnvidia-glcore.so.580.159.04", "libGLX_indirect.so.0"} {
		if !slices.ContainsFunc(d.libraries, func(l device.Library) bool { return l.Name == want && strings.HasSuffix(l.Path, ".580.159.04") }) {
			t.Errorf("no %s in %+v", want, d.libraries)
		}
	}
}

func TestReadELF(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "x.c")
	if err := os.WriteFile(source, []byte("int x;"), 0o644); err != nil {
		t.Fatal(err)
	}
	made := func(args ...string) string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "lib.so.5")
		if out, err := exec.Command("gcc", append([]string{"-nostdlib", "-o", file, source}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return file
	}
	native := map[string]int32{"x86_64": ldcache.X8664, "aarch64": ldcache.AArch64}[machine(t)]
	for name, tt := range map[string]struct {
		file string
		want library
		err  string
	}{
		"with a SONAME":     {made("-shared", "-Wl,-soname,lib.so.1"), library{"lib.so.1", native}, ""},
		"without":           {made("-shared"), library{"", native}, ""},
		"SONAME of a path":  {made("-shared", "-Wl,-soname,../x"), library{}, "want a file name"},
		"an object":         {made("-c"), library{}, "ET_REL"},
		"text":              {source, library{}, "EOF"},
		"what is not there": {source + "x", library{}, "no such file"},
	} {
		got, err := readELF(tt.file)
		if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func machine(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("uname", "-m").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
