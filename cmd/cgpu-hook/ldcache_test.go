package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ldcache"
)

// image is a container's root folder, with this machine's /proc in it as it is while the hook runs.
type image struct {
	t      *testing.T
	bundle string
	root   string
	// outside is a folder of the host, and asProc the way to it through the root's /proc.
	outside, asProc string
}

func newImage(t *testing.T) image {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount /proc and to change the root")
	}
	bundle := t.TempDir()
	im := image{t: t, bundle: bundle, root: filepath.Join(bundle, "rootfs"), outside: t.TempDir()}
	im.asProc = fmt.Sprintf("/proc/%d/root%s", os.Getpid(), im.outside)
	for _, dir := range []string{"etc", "proc", "usr/lib", "drv"} {
		if err := os.MkdirAll(filepath.Join(im.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	im.file("../config.json", `{"root":{"path":"rootfs"}}`)
	if err := os.WriteFile(filepath.Join(im.outside, "victim"), []byte("safe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("/proc", filepath.Join(im.root, "proc"), "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(filepath.Join(im.root, "proc"), unix.MNT_DETACH) })
	return im
}

func (im image) path(name string) string { return filepath.Join(im.root, name) }

func (im image) must(err error) {
	im.t.Helper()
	if err != nil {
		im.t.Fatal(err)
	}
}

func (im image) file(name, content string) {
	im.t.Helper()
	im.must(os.MkdirAll(filepath.Dir(im.path(name)), 0o755))
	im.must(os.WriteFile(im.path(name), []byte(content), 0o644))
}

// link makes a symbolic link in the place of what is there.
func (im image) link(target, name string) {
	im.t.Helper()
	im.must(os.MkdirAll(filepath.Dir(im.path(name)), 0o755))
	im.must(os.RemoveAll(im.path(name)))
	im.must(os.Symlink(target, im.path(name)))
}

// library compiles one whose function tells whose it is.
func (im image) library(name, soname, whose string) {
	im.t.Helper()
	im.must(os.MkdirAll(filepath.Dir(im.path(name)), 0o755))
	im.compile(fmt.Sprintf("const char *whose(void) { return %q; }", whose), "-shared", "-nostdlib", "-Wl,-soname,"+soname, "-o", im.path(name))
}

func (im image) compile(source string, args ...string) {
	im.t.Helper()
	cmd := exec.Command("gcc", append(args, "-x", "c", "-")...)
	cmd.Stdin = strings.NewReader(source)
	if out, err := cmd.CombinedOutput(); err != nil {
		im.t.Fatalf("gcc: %v: %s", err, out)
	}
}

// ldconfig makes the image's cache, as its author would.
func (im image) ldconfig(args ...string) {
	im.t.Helper()
	if out, err := exec.Command("/sbin/ldconfig", append([]string{"-r", im.root}, args...)...).CombinedOutput(); err != nil {
		im.t.Fatalf("ldconfig: %v: %s", err, out)
	}
}

// setup runs the program as the runtime does.
func (im image) setup(libs ...ldcache.Entry) (stderr string, err error) {
	args := []string{"setup", "--link", "libcuda.so.1::/drv/libcuda.so", "--lib-dir", "/drv"}
	for _, l := range libs {
		args = append(args, "--lib", fmt.Sprintf("%#x::%s::%s", l.Flags, l.Name, l.Path))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	state, _ := json.Marshal(state{PID: os.Getpid(), Bundle: im.bundle})
	var text bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(state), &text
	cmd.Env = []string{asHook + "=1", "CGPU_RUN_DIR=" + im.bundle}
	err = cmd.Run()
	if ctx.Err() != nil {
		im.t.Error("setup hangs")
	}
	return text.String(), err
}

// driver are the libraries that setup is to make known.
func driver() []ldcache.Entry {
	flags := map[string]int32{"x86_64": ldcache.X8664, "aarch64": ldcache.AArch64}[machine()]
	return []ldcache.Entry{
		{Name: "libcuda.so.1", Path: "/drv/libcuda.so.580", Flags: flags}, {Name: "libcuda.so", Path: "/drv/libcuda.so.580", Flags: flags},
	}
}

func machine() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return unix.ByteSliceToString(u.Machine[:])
}

// TestLinkerFinds asks glibc's dynamic linker, in a root with libraries of its own.
func TestLinkerFinds(t *testing.T) {
	for name, tt := range map[string]struct {
		make func(image)
		own  string // whether its own libraries outside of the usual folders are found: "before", "no"
	}{
		"an image's cache":      {func(im image) { im.ldconfig() }, "before"},
		"one with both formats": {func(im image) { im.ldconfig("-c", "compat") }, "before"},
		"libc5's alone":         {func(im image) { im.ldconfig("-c", "old") }, "no"},
		"none":                  {func(im image) {}, "no"},
		"a torn one": {func(im image) {
			im.ldconfig()
			im.must(os.Truncate(im.path("/etc/ld.so.cache"), 200))
		}, "no"},
		"a link to it": {func(im image) {
			im.ldconfig("-C", "/usr/cache")
			im.link("../usr/cache", "/etc/ld.so.cache")
		}, "before"},
	} {
		t.Run(name, func(t *testing.T) {
			im := newImage(t)
			im.compile(`#include <dlfcn.h>
				#include <stdio.h>
				int main(int argc, char **argv) {
					while (*++argv) {
						void *l = dlopen(*argv, RTLD_NOW);
						const char *(*whose)(void) = l ? dlsym(l, "whose") : 0;
						printf("%s=%s\n", *argv, whose ? whose() : "none");
					}
				}`, "-o", im.path("/whose"), "-ldl")
			out, err := exec.Command("ldd", im.path("/whose")).Output()
			im.must(err)
			for _, file := range regexp.MustCompile(`/[^ ]+`).FindAllString(string(out), -1) {
				text, err := os.ReadFile(file)
				im.must(err)
				im.file(file, string(text))
				im.must(os.Chmod(im.path(file), 0o755))
			}
			im.library("/drv/libcuda.so.580", "libcuda.so.1", "driver")
			im.link("libcuda.so.580", "/drv/libcuda.so.1")
			im.library("/opt/libcuda.so.1", "libcuda.so.1", "stub")
			im.library("/opt/glibc-hwcaps/x86-64-v2/libcuda.so.1", "libcuda.so.1", "stub for better processors")
			im.library("/opt/libown.so.1", "libown.so.1", "own")
			im.library("/opt/libfast.so.1", "libfast.so.1", "slow")
			im.library("/opt/glibc-hwcaps/x86-64-v2/libfast.so.1", "libfast.so.1", "fast")
			im.file("/etc/ld.so.conf", "/opt\n")
			tt.make(im)
			ask := func() string {
				cmd := exec.Command("/whose", "libcuda.so.1", "libcuda.so", "libown.so.1", "libfast.so.1")
				cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: im.root}
				cmd.Dir = "/"
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				return string(out)
			}
			before := ask()
			_, own, _ := strings.Cut(before, "libown.so.1=")
			if tt.own == "no" {
				own = "none\nlibfast.so.1=none\n"
			} else if !strings.HasPrefix(own, "own\nlibfast.so.1=") || strings.Contains(own, "none") {
				t.Fatalf("before: %s", before)
			}
			for range 2 { // restart
				if stderr, err := im.setup(driver()...); err != nil {
					t.Fatal(err, stderr)
				}
				if after, want := ask(), "libcuda.so.1=driver\nlibcuda.so=driver\nlibown.so.1="+own; after != want {
					t.Errorf("after:\n%swant:\n%sbefore:\n%s", after, want, before)
				}
			}
		})
	}
}

// TestHostileImage: whatever an image is made of, the host stays as it is, and the hook ends.
func TestHostileImage(t *testing.T) {
	replaced := func(im image) {
		text, err := os.ReadFile(im.path("/etc/ld.so.cache"))
		im.must(err)
		if c, err := ldcache.Parse(text); err != nil || len(c.Entries) != 2 || c.Entries[0].Name != "libcuda.so.1" {
			im.t.Errorf("the cache has %+v, %v", c, err)
		}
		if info, err := os.Lstat(im.path("/etc/ld.so.cache")); err != nil || info.Mode() != 0o644 {
			im.t.Errorf("the cache is %v, %v", info.Mode(), err)
		}
	}
	for name, tt := range map[string]struct {
		plant func(image)
		want  string // of the refusal; empty: the container starts, with the driver's libraries alone in the cache
	}{
		"ldconfig's own cache leads out": {func(im image) { im.link(im.asProc, "/var/cache/ldconfig") }, ""},
		"SONAME leads out": {func(im image) {
			im.library("/usr/lib/libevil.so.1", "../.."+im.asProc+"/soname-link", "")
		}, ""},
		"SONAME of two lines": {func(im image) {
			im.library("/usr/lib/libcron.so.1", "\n* * * * * root touch /tmp/x\n", "")
		}, ""},
		"/etc leads out by /proc":             {func(im image) { im.link(im.asProc, "/etc") }, "too many levels of symbolic links"},
		"/etc leads out by an absolute link":  {func(im image) { im.link(im.outside, "/etc") }, "no such file"},
		"/etc leads out by ..":                {func(im image) { im.link("../../../../../../.."+im.outside, "/etc") }, "no such file"},
		"ld.so.conf.d leads out by /proc":     {func(im image) { im.link(im.asProc, "/etc/ld.so.conf.d") }, "too many levels of symbolic links"},
		"ld.so.conf leads out by /proc":       {func(im image) { im.link(im.asProc+"/conf", "/etc/ld.so.conf") }, "too many levels of symbolic links"},
		"ld.so.conf leads out":                {func(im image) { im.link(im.outside+"/conf", "/etc/ld.so.conf") }, ""},
		"the folder of libraries leads out":   {func(im image) { im.link(im.asProc, "/drv") }, "too many levels of symbolic links"},
		"the cache leads out by /proc":        {func(im image) { im.link(im.asProc+"/victim", "/etc/ld.so.cache") }, ""},
		"the cache leads out":                 {func(im image) { im.link(im.outside+"/victim", "/etc/ld.so.cache") }, ""},
		"the cache leads out by ..":           {func(im image) { im.link("../../../../../../.."+im.outside+"/victim", "/etc/ld.so.cache") }, ""},
		"what is to become the cache does":    {func(im image) { im.link(im.asProc+"/victim", "/etc/.ld.so.cache.cgpu") }, ""},
		"what is to become the cache: folder": {func(im image) { im.file("/etc/.ld.so.cache.cgpu/x", "") }, "is a directory"},
		"the cache is a folder":               {func(im image) { im.file("/etc/ld.so.cache/x", "") }, "is a directory"},
		"the cache is a pipe":                 {func(im image) { im.must(unix.Mkfifo(im.path("/etc/ld.so.cache"), 0o666)) }, ""},
		"ld.so.conf is a pipe":                {func(im image) { im.must(unix.Mkfifo(im.path("/etc/ld.so.conf"), 0o666)) }, ""},
		"the cache is a device": {func(im image) {
			im.must(unix.Mknod(im.path("/etc/ld.so.cache"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5)))) // zeroes without end
		}, ""},
		"the cache is huge": {func(im image) {
			im.file("/etc/ld.so.cache", "glibc-ld.so.cache1.1")
			im.must(os.Truncate(im.path("/etc/ld.so.cache"), 1<<40))
		}, ""},
		"the cache points beyond its end": {func(im image) {
			text := ldcache.Cache{Entries: []ldcache.Entry{{Name: "libx.so", Path: "/libx.so"}}}.Encode()
			copy(text[48+4:], []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
			im.file("/etc/ld.so.cache", string(text))
		}, ""},
		"the cache is leased": {func(im image) {
			im.file("/etc/ld.so.cache", "")
			f, err := os.Open(im.path("/etc/ld.so.cache"))
			im.must(err)
			im.t.Cleanup(func() { f.Close() })
			_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
			im.must(err)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			im := newImage(t)
			tt.plant(im)
			stderr, err := im.setup(driver()...)
			switch {
			case tt.want == "" && err != nil, tt.want != "" && err == nil, !strings.Contains(stderr, tt.want):
				t.Errorf("%v, stderr %q, want %q", err, stderr, tt.want)
			case tt.want == "":
				replaced(im)
			}
			entries, err := os.ReadDir(im.outside)
			im.must(err)
			victim, err := os.ReadFile(filepath.Join(im.outside, "victim"))
			im.must(err)
			if len(entries) != 1 || string(victim) != "safe" {
				t.Errorf("outside of the root: %v, victim %q", entries, victim)
			}
		})
	}
}
