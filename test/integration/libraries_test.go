// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ldcache"
)

// fromC compiles a program or a library on the host.
func fromC(t *testing.T, file, text string, args ...string) {
	t.Helper()
	source := filepath.Join(t.TempDir(), "x.c")
	if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	compile(t, "gcc", append([]string{"-o", file, source}, args...)...)
}

// withLibrary gives the node's driver a library that the simulated one has not, so that containers are set up as on a real one.
func withLibrary(t *testing.T) {
	t.Helper()
	host := filepath.Join(t.TempDir(), "libwhose.so.5")
	fromC(t, host, `const char *whose(void) { return "driver"; }`, "-shared", "-nostdlib", "-Wl,-soname,libwhose.so.1")
	run(t, "cgpu", "refresh")
	before, err := device.Load(lab.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	table := *before
	flags := map[string]int32{"amd64": ldcache.X8664, "arm64": ldcache.AArch64}[runtime.GOARCH]
	table.Mounts = append(slices.Clone(before.Mounts),
		device.Mount{Host: host, Container: "/drv/libwhose.so.5", Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}})
	table.Links = append(slices.Clone(before.Links), device.Link{Target: "libwhose.so.5", Path: "/drv/libwhose.so.1"})
	table.LibDirs = append(slices.Clone(before.LibDirs), "/drv")
	table.Libraries = append(slices.Clone(before.Libraries), device.Library{Name: "libwhose.so.1", Path: "/drv/libwhose.so.5", Flags: flags})
	if err := table.Save(lab.RunDir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := before.Save(lab.RunDir); err != nil {
			t.Error(err)
		}
	})
}

// TestDriverLibraries: a program finds the driver's library by its name, also after a restart and below a read-only root.
func TestDriverLibraries(t *testing.T) {
	noTrace(t)
	withLibrary(t)
	dir := t.TempDir()
	fromC(t, filepath.Join(dir, "whose"), `#include <dlfcn.h>
		#include <stdio.h>
		int main(void) {
			void *l = dlopen("libwhose.so.1", RTLD_NOW);
			const char *(*whose)(void) = l ? dlsym(l, "whose") : 0;
			return puts(whose ? whose() : dlerror()) < 0;
		}`, "-ldl")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c := container{env: sizeOf("256MiB"), opts: []string{"-v", dir + ":/t:ro"}, cmd: []string{"sleep", "600"}}
	// In a folder of libraries that is a volume no link is made, and none is needed.
	volume, inVolume := t.TempDir(), c
	inVolume.opts, inVolume.cmd = append(slices.Clone(c.opts), "-v", volume+":/drv"), []string{"/t/whose"}
	if out := inVolume.run(t); out != "driver\n" {
		t.Errorf("with a volume at the library folder: %q", out)
	}
	if entries, err := os.ReadDir(volume); err != nil || len(entries) != 1 || entries[0].Name() != "libwhose.so.5" {
		t.Errorf("in the volume: %v, %v", entries, err) // the runtime's mount point
	}
	// A link in the place of the driver's file may be good on the host alone: it stays.
	link, target := filepath.Join(t.TempDir(), "libwhose.so.5"), "/etc/alternatives/whose"
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	inVolume.opts = append(slices.Clone(c.opts), "-v", filepath.Dir(link)+":/drv")
	if out := inVolume.run(t); out != "driver\n" {
		t.Errorf("with a link in the volume: %q", out)
	}
	if to, err := os.Readlink(link); err != nil || to != target {
		t.Errorf("the link in the volume: %q, %v", to, err)
	}
	id := c.start(t)
	for range 2 {
		if r := execIn(id, "/t/whose"); r.Stdout != "driver\n" {
			t.Error(r)
		}
		docker(t, "restart", "-t", "0", id)
	}
	docker(t, "rm", "-f", id)
	// A volume at /etc is the user's alone.
	volume = t.TempDir()
	inVolume.opts, inVolume.cmd = append(slices.Clone(c.opts), "-v", volume+":/etc"), []string{"cat", "/drv/libwhose.so.5"}
	inVolume.run(t)
	for _, name := range []string{"ld.so.cache", "ld.so.conf", "ld.so.conf.d"} {
		if _, err := os.Lstat(filepath.Join(volume, name)); err == nil {
			t.Errorf("in the volume: %s", name)
		}
	}
	// Its cache cannot be written: it starts all the same.
	c.opts, c.cmd = append(c.opts, "--read-only"), []string{"cat", "/drv/libwhose.so.5"}
	c.run(t)
}

// TestDriverFilesOfRuntimes: driver files are there whoever mounts them, also where the root is read-only and has no place for them: crun
// has made it so when it runs hooks, by whatever name.
func TestDriverFilesOfRuntimes(t *testing.T) {
	other := filepath.Join(t.TempDir(), "oci")
	if err := os.Symlink(filepath.Join(lab.Dir, "lab", "crun"), other); err != nil {
		t.Fatal(err)
	}
	for _, low := range []string{filepath.Join(lab.Dir, "lab", "crun"), filepath.Join(lab.Dir, "lab", "runc"), other} {
		runtime := filepath.Base(low)
		t.Run(runtime, func(t *testing.T) {
			noTrace(t)
			_, config, _ := strings.Cut(withRuntimes(t, low)[0], "=")
			t.Setenv("CGPU_CONFIG", config)
			withLibrary(t)
			place := filepath.Join(lab.Dir, "image", "rootfs", "drv")
			if err := os.RemoveAll(place); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(place) })
			bundle, root := t.TempDir(), t.TempDir()
			quotaBundle(t, bundle, sizeOf("256MiB"), "grep", "-c", "driver", "/drv/libwhose.so.5")
			id := fmt.Sprintf("files-%s%d", runtime, os.Getpid())
			if out := run(t, filepath.Join(lab.Bin, "cgpu-runtime"), "--root", root, "run", "--bundle", bundle, id); strings.TrimSpace(out) == "0" {
				t.Errorf("%q lines of the driver's library", out)
			}
		})
	}
}

// TestImageOutside: an image that is made to lead who works on it out of its root folder, by /proc and by "..".
func TestImageOutside(t *testing.T) {
	noTrace(t)
	withLibrary(t)
	host, root, tar := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "image.tar")
	for _, dir := range []string{"bin", "etc", "usr/lib", "var/cache", "proc", "sys", "dev", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	run(t, "sh", "-c", `cp "$(command -v busybox)" "$0/bin/busybox"`, root)
	out := "/proc/1/root" + host
	for name, target := range map[string]string{"var/cache/ldconfig": out, "etc/ld.so.cache": out + "/cache"} {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	fromC(t, filepath.Join(root, "usr/lib/libevil.so.1"), "int x;", "-shared", "-nostdlib", "-Wl,-soname,../.."+out+"/soname-link")
	run(t, "tar", "-C", root, "-cf", tar, ".")
	docker(t, "import", tar, "outside")
	t.Cleanup(func() { lab.Run(nil, "docker", "rmi", "-f", "outside") })
	for _, user := range []string{"0", "1000"} {
		run(t, "docker", "run", "--rm", "--network", "none", "--user", user, "-e", sizeOf("256MiB")[0], "outside", "/bin/busybox", "true")
	}
	if entries, err := os.ReadDir(host); err != nil || len(entries) > 0 {
		t.Errorf("on the host: %v, %v", entries, err)
	}
}

// TestHookOfAnother: with a user namespace the runtime starts cgpu-hook as that namespace's root, who may write nowhere on the host. The
// node of this test has the file that a real driver has.
func TestHookOfAnother(t *testing.T) {
	dir := t.TempDir()
	for parent := dir; parent != os.TempDir(); parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	run(t, "sh", "-c", `cd "$0" && runc spec && mkdir -p rootfs/bin rootfs/proc rootfs/sys rootfs/dev rootfs/etc && cp "$(command -v busybox)" rootfs/bin &&
		cp "$(command -v cgpu-hook)" . && chown -R 100000:100000 rootfs && mkdir -m 711 run`, dir)
	type object = map[string]any
	file := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var config object
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	delete(config, "hostname")
	config["root"] = object{"path": "rootfs"}
	process := config["process"].(object)
	process["terminal"], process["args"] = false,
		[]string{"/bin/busybox", "sh", "-c", "busybox cat /proc/driver/nvidia/params && busybox ls /etc"}
	ids := []object{{"containerID": 0, "hostID": 100000, "size": 65536}}
	config["linux"] = object{"uidMappings": ids, "gidMappings": ids,
		"namespaces": []object{{"type": "pid"}, {"type": "mount"}, {"type": "user"}}}
	config["mounts"] = []object{{"destination": "/proc", "type": "bind", "source": "/proc", "options": []string{"rbind"}}}
	config["hooks"] = object{"createContainer": []object{{
		"path": filepath.Join(dir, "cgpu-hook"), "env": []string{"CGPU_RUN_DIR=" + filepath.Join(dir, "run")},
		"args": []string{"cgpu-hook", "setup", "--root", filepath.Join(dir, "rootfs"), "--link", "x.so.1::/drv/x.so", "--lib-dir", "/drv",
			"--lib", "0x303::x.so::/drv/x.so.1"},
	}}}
	if text, err = json.Marshal(config); err == nil {
		err = os.WriteFile(file, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	out := run(t, "unshare", "--mount", "--propagation", "private", "sh", "-c", `mount -t tmpfs node /proc/driver && mkdir /proc/driver/nvidia &&
		echo "ModifyDeviceFiles: 1" >/proc/driver/nvidia/params && exec runc --root "$0/state" run --bundle "$0" cgpu-another`, dir)
	if want := "ModifyDeviceFiles: 0\nld.so.cache\nld.so.conf\nld.so.conf.d\n"; out != want {
		t.Errorf("%q, want %q", out, want)
	}
}
