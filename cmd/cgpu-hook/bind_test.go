// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// bindRoot opens a root in which mounts are taken away at the end, and makes a driver file outside of it.
func bindRoot(t *testing.T) (r root, dir, host string) {
	t.Helper()
	testenv.NeedsRoot(t, "mounts")
	r, dir = inRoot(t)
	t.Cleanup(func() {
		for _, m := range mountsBelow(t, dir) {
			_ = unix.Unmount(m.at, unix.MNT_DETACH)
		}
	})
	host = filepath.Join(t.TempDir(), "libcuda.so.580")
	if err := os.WriteFile(host, []byte("driver"), 0o644); err != nil {
		t.Fatal(err)
	}
	return r, dir, host
}

type mountLine struct{ at, flags string }

// mountsBelow are the mounts below a folder.
func mountsBelow(t *testing.T, dir string) (list []mountLine) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], dir+"/") {
			list = append(list, mountLine{f[4], f[5]})
		}
	}
	return list
}

// inert says whether nobody can write by a mount, whoever he is.
func (m mountLine) inert() bool {
	flags := "," + m.flags + ","
	return strings.Contains(flags, ",ro,") && strings.Contains(flags, ",nosuid,") && strings.Contains(flags, ",nodev,")
}

func TestBind(t *testing.T) {
	usrLib := links(link("usr/lib", "lib"), file("usr/lib/b", ""))
	for name, tt := range map[string]struct {
		make func(t *testing.T, dir string) // the image
		path string
		at   string // where it is then, in the root; empty: refused
	}{
		"no folder":            {nil, "/usr/lib/a.so", "usr/lib/a.so"},
		"an empty file":        {file("usr/lib/a.so", ""), "/usr/lib/a.so", "usr/lib/a.so"},
		"a file of the image":  {file("usr/lib/a.so", "image"), "/usr/lib/a.so", "usr/lib/a.so"},
		"an absolute link":     {link("/usr/lib", "lib"), "/lib/a.so", "usr/lib/a.so"},
		"a link to nothing":    {link("/nowhere/a.so", "a.so"), "/a.so", "nowhere/a.so"},
		"relative, to nothing": {links(usrLib, link("../new/a.so", "usr/lib/a.so")), "/lib/a.so", "usr/new/a.so"},
		"a chain of them":      {links(link("b", "a.so"), link("/c/d", "b"), file("c/e", ""), link("../f/g.so", "c/d")), "/a.so", "f/g.so"},
		"below a linked one":   {links(usrLib, link("../lib64", "usr/lib/x86")), "/lib/x86/a.so", "usr/lib64/a.so"},
		"up from a linked one": {links(link("/c/../new", "lib"), link("a/b", "c")), "/lib/a.so", "a/new/a.so"},
		"a link to a file":     {links(file("b.so", "image"), link("b.so", "a.so")), "/a.so", "b.so"},
		"a link that goes up":  {link("../../../../../../../../tmp", "lib"), "/lib/a.so", "tmp/a.so"},
		"a name as in /proc":   {link("/proc/self/root", "lib"), "/lib/a.so", "proc/self/root/a.so"},
		"links to nothing":     {links(link("x/y", "lib"), link("../z", "x")), "/lib/a.so", "z/y/a.so"},
		"links without an end": {links(link("a/a", "a")), "/a/a.so", ""},
		"a link to itself":     {link("a.so", "a.so"), "/a.so", ""},
		"a file for a folder":  {file("usr", "image"), "/usr/lib/a.so", ""},
		"a folder for a file":  {func(t *testing.T, dir string) { try(t, os.MkdirAll(dir+"/a.so", 0o755)) }, "/a.so", ""},
		"a pipe that waits":    {func(t *testing.T, dir string) { try(t, unix.Mkfifo(dir+"/a.so", 0o666)) }, "/a.so", "a.so"},
		"a link out by a name": {links(link("/", "x"), link("x/../../..", "lib")), "/lib/etc/a.so", "etc/a.so"},
	} {
		t.Run(name, func(t *testing.T) {
			r, dir, host := bindRoot(t)
			if tt.make != nil {
				tt.make(t, dir)
			}
			err := bindFiles(r, []bind{{host, tt.path}}, io.Discard)
			list := mountsBelow(t, dir)
			if tt.at == "" {
				if err == nil || !strings.Contains(err.Error(), tt.path) || len(list) > 0 {
					t.Errorf("%v, mounts %v, want it refused", err, list)
				}
				return
			}
			if err != nil || len(list) != 1 || list[0].at != filepath.Join(dir, tt.at) || !list[0].inert() {
				t.Fatalf("%v, mounts %v, want one at %s", err, list, tt.at)
			}
			for _, stray := range []string{"lib64", "new"} {
				if _, err := os.Lstat(filepath.Join(dir, stray)); err == nil {
					t.Errorf("/%s was made", stray)
				}
			}
			if text, err := os.ReadFile(list[0].at); err != nil || string(text) != "driver" {
				t.Errorf("%q, %v", text, err)
			}
			if _, err := os.OpenFile(list[0].at, os.O_WRONLY, 0); !errors.Is(err, unix.EROFS) {
				t.Errorf("can be written to: %v", err)
			}
		})
	}
}

func try(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func file(name, text string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		try(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		try(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
}

func link(target, name string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		try(t, os.Symlink(target, filepath.Join(dir, name)))
	}
}

func links(of ...func(*testing.T, string)) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		t.Helper()
		for _, f := range of {
			f(t, dir)
		}
	}
}

// A folder of the driver's is mounted with what is mounted in it, all of it read-only.
func TestBindFolder(t *testing.T) {
	r, dir, host := bindRoot(t)
	folder := filepath.Dir(host)
	try(t, os.Mkdir(filepath.Join(folder, "sub"), 0o755))
	try(t, unix.Mount("tmpfs", filepath.Join(folder, "sub"), "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(folder, "sub"), unix.MNT_DETACH) })
	try(t, bindFiles(r, []bind{{folder, "/usr/share/driver"}}, io.Discard))
	list := mountsBelow(t, dir)
	if len(list) != 2 || !list[0].inert() || !list[1].inert() {
		t.Errorf("%v", list)
	}
}

// A mount in a container's /proc could take what the runtime writes there before the program begins.
func TestBindInProc(t *testing.T) {
	r, dir, host := bindRoot(t)
	try(t, os.Mkdir(filepath.Join(dir, "proc"), 0o755))
	try(t, unix.Mount("/proc", filepath.Join(dir, "proc"), "", unix.MS_BIND, ""))
	try(t, os.Symlink("/proc/1/attr/exec", filepath.Join(dir, "a.so")))
	try(t, os.Symlink("/proc/1/attr", filepath.Join(dir, "attr")))
	for _, path := range []string{"/a.so", "/attr/exec", "/attr/current"} {
		if err := bindFiles(r, []bind{{host, path}}, io.Discard); !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if list := mountsBelow(t, filepath.Join(dir, "proc")); len(list) > 0 {
		t.Errorf("%v", list)
	}
}

// TestSetupInOrder: driver files are mounted before anything else is done in the root, where a link could lead a file to it.
func TestSetupInOrder(t *testing.T) {
	const params = "/proc/sys/kernel/random/boot_id" // a file of /proc, as the driver's are
	defer unix.Umask(unix.Umask(0o022))
	for name, tt := range map[string]struct {
		link, target string
		refused      bool
	}{
		"over the copy of the driver's parameters": {"lib/zzz", params, true},
		"below a folder that the ld cache makes":   {"etc", "private/etc", false},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				_, dir, host := bindRoot(t)
				try(t, os.Mkdir(filepath.Join(dir, "proc"), 0o755))
				try(t, unix.Mount("proc", filepath.Join(dir, "proc"), "proc", 0, ""))
				try(t, os.Mkdir(filepath.Join(dir, "lib"), 0o755))
				try(t, os.Symlink(tt.target, filepath.Join(dir, tt.link)))
				args := []string{"--root", dir, "--lib-dir", "/lib", "--lib", "0x303::a.so::/lib/a0"}
				for i := range 60 {
					args = append(args, "--mount", fmt.Sprintf("%s::/lib/a%d", host, i))
				}
				args = append(args, "--mount", host+"::/etc/vulkan/icd.d/n.json", "--mount", host+"::/lib/zzz")
				err := setup(args, params, io.Discard)
				if refused := err != nil && strings.Contains(err.Error(), "link to /proc"); refused != tt.refused || err != nil && !refused {
					t.Fatal(err)
				}
				if text, err := os.ReadFile(filepath.Join(dir, params)); err != nil || string(text) == "driver" {
					t.Fatalf("the parameters: %q, %v", text, err)
				}
			}
		})
	}
}

// TestBindTaken: what is mounted already stays, also where a link of the image leads to it: the limiter's files, or the user's own.
func TestBindTaken(t *testing.T) {
	r, dir, host := bindRoot(t)
	own := filepath.Join(t.TempDir(), "own")
	file("run/cgpu/vgpu", "")(t, dir)
	try(t, os.WriteFile(own, []byte("page"), 0o644))
	try(t, os.Mkdir(filepath.Join(dir, "dev"), 0o755))
	try(t, unix.Mount(own, filepath.Join(dir, "run/cgpu/vgpu"), "", unix.MS_BIND, ""))
	try(t, unix.Mount("tmpfs", filepath.Join(dir, "dev"), "tmpfs", 0, "size=64k"))
	link("/run/cgpu/vgpu", "a.so")(t, dir)
	link("/dev", "share")(t, dir)
	var stderr bytes.Buffer
	try(t, bindFiles(r, []bind{{host, "/a.so"}, {filepath.Dir(host), "/share"}, {host, "/b.so"}}, &stderr))
	if text, err := os.ReadFile(filepath.Join(dir, "run/cgpu/vgpu")); err != nil || string(text) != "page" {
		t.Errorf("%q, %v", text, err)
	}
	if list := mountsBelow(t, dir); len(list) != 3 || list[2].at != filepath.Join(dir, "b.so") {
		t.Errorf("mounts %v", list)
	}
	if said := stderr.String(); strings.Count(said, "\n") != 2 || !strings.Contains(said, "without the driver's /a.so: something is mounted") {
		t.Errorf("stderr: %s", said)
	}
}

// A link to the root itself, or a folder in a file's place, is refused in words.
func TestBindWords(t *testing.T) {
	r, dir, host := bindRoot(t)
	link("/", "share")(t, dir)
	file("a.so/b", "")(t, dir)
	for _, tt := range []struct{ host, path, want string }{
		{filepath.Dir(host), "/share", "mount the driver's /share: the image has a link to its root folder"},
		{filepath.Dir(host), "/share/..", "mount the driver's /share/..: the image has a link to its root folder"},
		{host, "/a.so", "mount the driver's /a.so: the image has a folder in its place: is a directory"},
		{filepath.Dir(host), "/a.so/b", "not a directory"},
	} {
		if err := bindFiles(r, []bind{{tt.host, tt.path}}, io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", tt.path, err, tt.want)
		}
	}
	if list := mountsBelow(t, filepath.Dir(dir)); len(list) > 0 {
		t.Errorf("mounts %v", list)
	}
}

// In a volume the place is made, as the runtime does; below a read-only root it must be there.
func TestBindPlaces(t *testing.T) {
	r, dir, host := bindRoot(t)
	volume := t.TempDir()
	try(t, os.Mkdir(filepath.Join(dir, "drv"), 0o755))
	try(t, unix.Mount(volume, filepath.Join(dir, "drv"), "", unix.MS_BIND, ""))
	try(t, bindFiles(r, []bind{{host, "/drv/a.so"}}, io.Discard))
	if info, err := os.Lstat(filepath.Join(volume, "a.so")); err != nil || !info.Mode().IsRegular() || info.Size() != 0 {
		t.Errorf("in the volume: %v, %v", info, err)
	}
	// A link there may be the host's, and lead nowhere in the container alone: it stays.
	try(t, os.Symlink("/etc/alternatives/smi", filepath.Join(volume, "smi")))
	try(t, bindFiles(r, []bind{{host, "/drv/smi"}}, io.Discard))
	if target, err := os.Readlink(filepath.Join(volume, "smi")); err != nil || target != "/etc/alternatives/smi" {
		t.Errorf("the link in the volume: %q, %v", target, err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "etc/alternatives/smi")); err != nil || string(text) != "driver" {
		t.Errorf("where it leads: %q, %v", text, err)
	}
	try(t, unix.Mount("tmpfs", filepath.Join(dir, "drv"), "tmpfs", unix.MS_RDONLY, ""))
	if err := bindFiles(r, []bind{{host, "/drv/a.so"}}, io.Discard); !errors.Is(err, unix.EROFS) ||
		!strings.Contains(err.Error(), "/drv/a.so") {
		t.Errorf("read-only: %v", err)
	}
	if err := bindFiles(r, []bind{{host + ".gone", "/a.so"}}, io.Discard); !errors.Is(err, unix.ENOENT) ||
		!strings.Contains(err.Error(), ".gone") {
		t.Errorf("a driver file that is not there: %v", err)
	}
}

// While the tenant of another container renames folders of an image or of a volume that both have, nothing is made or mounted outside, and
// nothing is ever there that can be written to.
func TestBindMeanwhile(t *testing.T) {
	r, dir, host := bindRoot(t)
	outside := t.TempDir()
	try(t, os.MkdirAll(filepath.Join(dir, "usr/lib"), 0o755))
	try(t, os.Symlink(outside, filepath.Join(dir, "evil")))
	try(t, os.Symlink(strings.Repeat("../", 20)+outside[1:], filepath.Join(dir, "evil2")))
	stop, usr, evil, evil2 := make(chan struct{}), filepath.Join(dir, "usr"), filepath.Join(dir, "evil"), filepath.Join(dir, "evil2")
	var tenant sync.WaitGroup
	tenant.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(-1, usr, -1, evil, unix.RENAME_EXCHANGE)
				_ = unix.Renameat2(-1, usr, -1, evil2, unix.RENAME_EXCHANGE)
			}
		}
	})
	done := 0
	for range 300 {
		if err := bindFiles(r, []bind{{host, "/usr/lib/a.so"}}, io.Discard); err == nil {
			done++
		}
		for _, m := range mountsBelow(t, dir) {
			if !m.inert() {
				t.Fatalf("%+v", m)
			}
			_ = unix.Unmount(m.at, unix.MNT_DETACH)
		}
	}
	close(stop)
	tenant.Wait()
	if list := mountsBelow(t, outside); len(list) > 0 {
		t.Errorf("mounted outside: %v", list)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("made outside: %v, %v", entries, err)
	}
	t.Logf("%d of 300 were mounted", done)
}
