//go:build integration

package integration

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
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
	table.Mounts = append(slices.Clone(before.Mounts), device.Mount{Host: host, Container: "/drv/libwhose.so.5", Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}})
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
	c := container{env: sizeOf("256MiB"), opts: []string{"-v", dir + ":/t:ro"}, cmd: []string{"sleep", "60"}}
	id := c.start(t)
	for range 2 {
		if r := execIn(id, "/t/whose"); r.Stdout != "driver\n" {
			t.Error(r)
		}
		docker(t, "restart", "-t", "0", id)
	}
	docker(t, "rm", "-f", id)
	// Its cache cannot be written: it starts all the same.
	c.opts, c.cmd = append(c.opts, "--read-only"), []string{"cat", "/drv/libwhose.so.5"}
	c.run(t)
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
	for name, target := range map[string]string{"var/cache/ldconfig": out, "etc/ld.so.cache": out + "/cache", "etc/.ld.so.cache.cgpu": out + "/temp"} {
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
