// SPDX-License-Identifier: Apache-2.0

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

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ldcache"
	"github.com/opencgpu/cgpu/pkg/testenv"
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
	testenv.NeedsRoot(t, "mounts /proc and changes the root")
	bundle := t.TempDir()
	im := image{t: t, bundle: bundle, root: filepath.Join(bundle, "rootfs"), outside: t.TempDir()}
	im.asProc = fmt.Sprintf("/proc/%d/root%s", os.Getpid(), im.outside)
	for _, dir := range []string{"etc", "proc", "usr/lib", "drv"} {
		if err := os.MkdirAll(filepath.Join(im.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
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
	im.compile(fmt.Sprintf("const char *whose(void) { return %q; }", whose), "-shared", "-nostdlib",
		"-Wl,-soname,"+soname, "-o", im.path(name))
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

// volume mounts a folder of the host, with what the image has there.
func (im image) volume(name string) (host string) {
	im.t.Helper()
	host = im.t.TempDir()
	im.must(os.MkdirAll(im.path(name), 0o755))
	im.must(os.CopyFS(host, os.DirFS(im.path(name))))
	im.mount(host, name, "", unix.MS_BIND, "")
	return host
}

func (im image) mount(source, name, kind string, flags uintptr, data string) {
	im.t.Helper()
	im.must(unix.Mount(source, im.path(name), kind, flags, data))
	im.t.Cleanup(func() { unix.Unmount(im.path(name), unix.MNT_DETACH) })
}

// silent mounts a file system that does not answer.
func (im image) silent(name string) {
	im.t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	im.must(err)
	im.t.Cleanup(func() { unix.Close(fd) })
	im.mount("silent", name, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd))
}

// setup runs the program as the runtime does.
func (im image) setup(libs ...ldcache.Entry) (stderr string, err error) {
	args := []string{"setup", "--root", im.root, "--link", "libcuda.so.1::/drv/libcuda.so", "--lib-dir", "/drv"}
	for _, l := range libs {
		args = append(args, "--lib", fmt.Sprintf("%#x::%s::%s", l.Flags, l.Name, l.Path))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	state, _ := json.Marshal(specs.State{Pid: os.Getpid(), Bundle: im.bundle})
	var text bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(state), &text
	cmd.Env = []string{asHook + "=1", "CGPU_RUN_DIR=" + im.bundle, "GORACE=atexit_sleep_ms=0"} // else a second each
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
		}, "no"},
		"a library folder that is a volume": {func(im image) {
			im.ldconfig()
			im.volume("/drv") // below it are the driver's files
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
	const leftAlone = "is in a volume, or leads to one" // and the container starts
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
		"/etc leads out by /proc":            {func(im image) { im.link(im.asProc, "/etc") }, leftAlone},
		"/etc leads out by an absolute link": {func(im image) { im.link(im.outside, "/etc") }, "no such file"},
		"/etc leads out by ..":               {func(im image) { im.link("../../../../../../.."+im.outside, "/etc") }, "no such file"},
		"ld.so.conf.d leads out by /proc":    {func(im image) { im.link(im.asProc, "/etc/ld.so.conf.d") }, leftAlone},
		"ld.so.conf leads out by /proc":      {func(im image) { im.link(im.asProc+"/conf", "/etc/ld.so.conf") }, ""},
		"ld.so.conf leads out":               {func(im image) { im.link(im.outside+"/conf", "/etc/ld.so.conf") }, ""},
		"the folder of libraries leads out":  {func(im image) { im.link(im.asProc, "/drv") }, leftAlone},
		"the cache leads out by /proc":       {func(im image) { im.link(im.asProc+"/victim", "/etc/ld.so.cache") }, ""},
		"the cache leads out":                {func(im image) { im.link(im.outside+"/victim", "/etc/ld.so.cache") }, ""},
		"the cache leads out by ..":          {func(im image) { im.link("../../../../../../.."+im.outside+"/victim", "/etc/ld.so.cache") }, ""},
		"the cache is a folder":              {func(im image) { im.file("/etc/ld.so.cache/x", "") }, "is a directory"},
		"the cache is a pipe":                {func(im image) { im.must(unix.Mkfifo(im.path("/etc/ld.so.cache"), 0o666)) }, ""},
		"ld.so.conf is a pipe":               {func(im image) { im.must(unix.Mkfifo(im.path("/etc/ld.so.conf"), 0o666)) }, ""},
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
			case (tt.want == "" || tt.want == leftAlone) != (err == nil), !strings.Contains(stderr, tt.want):
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

// TestVolumes: what is mounted in a container is another's than the image, whose author may lead there.
func TestVolumes(t *testing.T) {
	lines := func(stderr string) int { return strings.Count(stderr, "\n") }
	for name, tt := range map[string]struct {
		plant  func(image) (host string) // of the volume
		cache  bool                      // it is written
		stderr []string                  // a line each
	}{
		"/etc is a volume": {func(im image) string { return im.volume("/etc") }, false, []string{"/etc is in a volume, or leads to one"}},
		"/etc leads to one": {func(im image) string {
			host := im.volume("/data")
			im.link("/data/etc", "/etc")
			return host
		}, false, []string{"/etc is in a volume, or leads to one"}},
		"/etc leads to one that has it": {func(im image) string {
			host := im.volume("/data")
			im.must(os.Mkdir(filepath.Join(host, "etc"), 0o755))
			im.link("../data/etc", "/etc")
			return host
		}, false, []string{"/etc is in a volume, or leads to one"}},
		"ld.so.conf.d is a volume": {func(im image) string { return im.volume("/etc/ld.so.conf.d") }, true,
			[]string{"/etc/ld.so.conf.d is in a volume"}},
		"ld.so.conf.d leads to one": {func(im image) string {
			host := im.volume("/data")
			im.link("/data", "/etc/ld.so.conf.d")
			return host
		}, true, []string{"/etc/ld.so.conf.d is in a volume"}},
		"the libraries' folder is a volume": {func(im image) string { return im.volume("/drv") }, true, []string{"/drv is in a volume"}},
		"the libraries' folder leads to one": {func(im image) string {
			host := im.volume("/data")
			im.link("/data/drv", "/drv")
			return host
		}, true, []string{"/drv is in a volume"}},
		"the cache leads to the kernel's files": {func(im image) string {
			im.must(os.MkdirAll(im.path("/sys"), 0o755))
			im.mount("/sys", "/sys", "", unix.MS_BIND, "")
			im.link("/sys/kernel/uevent_seqnum", "/etc/ld.so.cache")
			return ""
		}, true, []string{"no regular file"}},
		"the cache is the user's": {func(im image) string {
			file := filepath.Join(t.TempDir(), "cache")
			im.must(os.WriteFile(file, []byte("user's"), 0o644))
			im.file("/etc/ld.so.cache", "")
			im.mount(file, "/etc/ld.so.cache", "", unix.MS_BIND, "")
			return ""
		}, false, []string{"without: /etc: open ld.so.cache: invalid cross-device link"}},
		"ld.so.conf is the user's": {func(im image) string {
			im.file("/etc/ld.so.conf", "")
			im.mount("/dev/null", "/etc/ld.so.conf", "", unix.MS_BIND, "")
			return ""
		}, true, nil},
		"a driver's link is the user's": {func(im image) string {
			im.file("/drv/libcuda.so", "")
			im.mount("/dev/null", "/drv/libcuda.so", "", unix.MS_BIND, "")
			return ""
		}, true, nil},
		"/etc does not answer": {func(im image) string {
			im.silent("/etc")
			return ""
		}, false, []string{"/etc is in a volume"}},
		"the libraries' folder does not answer": {func(im image) string {
			im.silent("/drv")
			return ""
		}, true, []string{"/drv is in a volume"}},
	} {
		t.Run(name, func(t *testing.T) {
			im := newImage(t)
			host := tt.plant(im)
			stderr, err := im.setup(driver()...)
			if err != nil || lines(stderr) != len(tt.stderr) {
				t.Errorf("%v, stderr %q, want %q", err, stderr, tt.stderr)
			}
			for _, want := range tt.stderr {
				if !strings.Contains(stderr, want) {
					t.Errorf("stderr %q, want %q", stderr, want)
				}
			}
			if tt.cache {
				text, err := os.ReadFile(im.path("/etc/ld.so.cache"))
				im.must(err)
				if c, err := ldcache.Parse(text); err != nil || len(c.Entries) != 2 {
					t.Errorf("the cache has %+v, %v", c, err)
				}
			}
			if host == "" {
				return
			}
			im.must(filepath.WalkDir(host, func(path string, d os.DirEntry, err error) error {
				if err == nil && !d.IsDir() {
					t.Errorf("in the volume: %s", path)
				}
				return err
			}))
		})
	}
}

// TestUnwritable: what cannot be written in an image costs this alone, and a restart writes nothing that is there already.
func TestUnwritable(t *testing.T) {
	fill := func(im image) {
		f, err := os.Create(im.path("/fill"))
		im.must(err)
		defer f.Close()
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
	}
	immutable := func(im image, name string) {
		f, err := os.Open(im.path(name))
		im.must(err)
		flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		im.must(err)
		im.must(unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|unix.STATX_ATTR_IMMUTABLE))
		im.t.Cleanup(func() {
			unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
			f.Close()
		})
	}
	for name, tt := range map[string]struct {
		plant  func(image)
		stderr []string // of each line
		cache  bool     // it is there
	}{
		"no room": {fill, []string{"/etc/ld.so.cache: no space left", "00-cgpu.conf: no space left", "ld.so.conf: no space left"}, false},
		"no room at a restart": {func(im image) {
			if stderr, err := im.setup(driver()...); err != nil || stderr != "" {
				im.t.Fatal(err, stderr)
			}
			fill(im)
		}, nil, true},
		"an immutable cache": {func(im image) {
			im.file("/etc/ld.so.cache", "")
			immutable(im, "/etc/ld.so.cache")
		}, []string{"left out of /etc/ld.so.cache", "/etc/ld.so.cache: operation not permitted"}, false},
		"an immutable configuration": {func(im image) {
			im.file("/etc/ld.so.conf.d/a.conf", "")
			immutable(im, "/etc/ld.so.conf.d")
		}, []string{"00-cgpu.conf: operation not permitted"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			im := newImage(t)
			im.mount("small", "/", "tmpfs", 0, "size=256k")
			for _, dir := range []string{"etc/ld.so.conf.d", "drv"} {
				im.must(os.MkdirAll(im.path(dir), 0o755))
			}
			tt.plant(im)
			stderr, err := im.setup(driver()...)
			got := strings.Split(strings.TrimSuffix(stderr, "\n"), "\n")
			if err != nil || len(tt.stderr) == 0 && stderr != "" {
				t.Fatal(err, stderr)
			}
			for i, want := range tt.stderr {
				if len(got) != len(tt.stderr) || !strings.Contains(got[i], want) {
					t.Errorf("stderr %q, want %q", got, tt.stderr)
				}
			}
			info, err := os.Stat(im.path("/etc/ld.so.cache"))
			if there := err == nil && info.Size() > 0; there != tt.cache {
				t.Errorf("cache: %v, %v", there, err)
			}
		})
	}
}
