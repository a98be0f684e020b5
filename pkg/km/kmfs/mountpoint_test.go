// SPDX-License-Identifier: Apache-2.0

package kmfs

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestKMPlace: nobody but root has a say in where root mounts and unmounts.
func TestKMPlace(t *testing.T) {
	root := t.TempDir()
	dir := func(name string, mode os.FileMode, owner int) {
		path := filepath.Join(root, name)
		if err := errors.Join(os.Mkdir(path, 0o755), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		if owner != 0 && os.Geteuid() == 0 {
			if err := os.Chown(path, owner, owner); err != nil {
				t.Fatal(err)
			}
		}
	}
	link := func(name, target string) {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	dir("good", 0o755, 0)
	dir("open", 0o777, 0)
	dir("group", 0o775, 0)
	dir("sticky", 0o777|os.ModeSticky, 0)
	dir("theirs", 0o755, 4711)
	dir("sticky/theirs", 0o755, 4711)
	link("link", "good")
	link("far", filepath.Join(root, "open"))
	link("round", "round")
	link("sticky/link", filepath.Join(root, "good"))
	for name, want := range map[string]string{
		"good/km": "", "good/new/km": "", "sticky/km": "", "link/km2": "", "sticky/link/km3": "",
		"open/km":       "has mode 0777",
		"open/a/km":     "has mode 0777",
		"open":          "has mode 0777",
		"far/km":        "has mode 0777",
		"group/km":      "has mode 0775",
		"theirs/km":     "belongs to user 4711",
		"theirs":        "belongs to user 4711",
		"sticky/theirs": "belongs to user 4711",
		"link":          "is no folder",
		"round/km":      "too many levels of symbolic links",
	} {
		if strings.Contains(name, "theirs") && os.Geteuid() != 0 {
			continue
		}
		p, err := newMountPoint(filepath.Join(root, name))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
		if err == nil {
			if !p.made {
				t.Errorf("%s: not made", name)
			}
			p.remove()
			p.close()
		}
	}
	for _, name := range []string{"open/a", "good/km", "sticky/km"} {
		if _, err := os.Lstat(filepath.Join(root, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want none", name, err)
		}
	}
}

// TestKMUnmount: at its end cgpu km takes away its own mount, whatever stands at the path by then.
func TestKMUnmount(t *testing.T) {
	n := nodetest.New(t)
	root := t.TempDir()
	dir, moved, away := filepath.Join(root, "a/km"), filepath.Join(root, "b"), filepath.Join(root, "away")
	if err := os.MkdirAll(filepath.Join(away, "km"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", filepath.Join(away, "km"), "tmpfs", 0, "size=4k"); err != nil {
		testenv.Lacks(t, "no mounts here: %v", err)
	}
	defer unix.Unmount(filepath.Join(away, "km"), unix.MNT_DETACH)
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		testenv.Lacks(t, "no FUSE here: %v", err)
	} else {
		f.Close()
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	said, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := Serve(ctx, out, &Source{RunDir: n.Dir, Log: io.Discard}, dir, false)
		out.Close()
		ended <- err
	}()
	if _, err := said.Read(make([]byte, 200)); err != nil {
		t.Fatal(err, <-ended)
	}
	defer unix.Unmount(filepath.Join(moved, "km"), unix.MNT_DETACH)
	if err := errors.Join(os.Rename(filepath.Join(root, "a"), moved), os.Symlink(away, filepath.Join(root, "a"))); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if text := string(mounts); strings.Contains(text, moved+"/km ") || !strings.Contains(text, away+"/km ") {
		t.Errorf("ours stayed, or another's went:\n%s", text)
	}
	if _, err := os.Lstat(filepath.Join(moved, "km")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s/km: %v, want none", moved, err)
	}
}

// TestKMDead: a dead mount that is another's stays; a dead one of cgpu km goes.
func TestKMDead(t *testing.T) {
	dead := func(dir, kind string) {
		f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
		if err != nil {
			testenv.Lacks(t, "no FUSE here: %v", err)
		}
		defer f.Close()
		option := "fd=" + strconv.Itoa(int(f.Fd())) + ",rootmode=40000,user_id=0,group_id=0"
		if err := unix.Mount("x", dir, kind, 0, option); err != nil {
			testenv.Lacks(t, "no mounts here: %v", err)
		}
	}
	for kind, gone := range map[string]bool{fsType: true, "fuse.sshfs": false} {
		dir := filepath.Join(t.TempDir(), "km")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		dead(dir, kind)
		p, err := newMountPoint(dir)
		if err == nil {
			p.close()
		}
		_, stat := os.Stat(dir)
		if (err == nil) != gone || errors.Is(stat, syscall.ENOTCONN) == gone {
			t.Errorf("%s: %v; then %v", kind, err, stat)
		}
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}

func TestMountType(t *testing.T) {
	const text = `29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
412 29 0:55 / /run/a\040-\040b rw,nosuid - fuse.cgpu_km cgpu rw,user_id=0
41 29 0:56 / /x rw master:2 shared:3 - tmpfs none rw
`
	for id, want := range map[int]string{29: "ext4", 412: fsType, 41: "tmpfs", 4: ""} {
		if got, err := mountType(strings.NewReader(text), id); got != want || (err == nil) != (want != "") {
			t.Errorf("%d: %q, %v, want %q", id, got, err, want)
		}
	}
}
