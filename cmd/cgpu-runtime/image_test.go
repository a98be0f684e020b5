// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/spec"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// plant makes a root folder: "dir/" is a folder, "-> target" a link, "fifo", "null" and "huge" what they say, any other
// value the content of a file.
func plant(t testing.TB, files map[string]string) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		target, link := strings.CutPrefix(content, "-> ")
		switch {
		case err != nil:
		case link:
			err = os.Symlink(target, path)
		case content == "dir/":
			err = os.Mkdir(path, 0o755)
		case content == "fifo":
			err = unix.Mkfifo(path, 0o666)
		case content == "null":
			if err = unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
				testenv.Lacks(t, "cannot make device nodes: %v", err)
			}
		case content == "huge":
			err = os.WriteFile(path, bytes.Repeat([]byte("x\n"), mostPreload), 0o644)
		default:
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestLook(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "shadow")
	if err := os.WriteFile(secret, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	glibc := strings.TrimPrefix(loaders[runtime.GOARCH], "/")
	with := func(name, content string) map[string]string {
		return map[string]string{glibc: "ELF", name: content}
	}
	const preload = "etc/ld.so.preload"
	for name, test := range map[string]struct {
		files   map[string]string
		glibc   bool
		preload string
		err     error
	}{
		"empty":               {nil, false, "", nil},
		"glibc":               {with("etc/passwd", "x"), true, "", nil},
		"musl":                {map[string]string{"lib/ld-musl-x86_64.so.1": "ELF", preload: "/x.so"}, false, "", nil},
		"both":                {with("lib/ld-musl-x86_64.so.1", "ELF"), true, "", nil},
		"own":                 {with(preload, "/a.so /b.so\n"), true, "/a.so /b.so", nil},
		"left by our mount":   {with(preload, ""), true, "", nil},
		"merged usr":          {map[string]string{filepath.Dir(glibc): "-> /usr/lib", "usr/lib/" + filepath.Base(glibc): "ELF"}, true, "", nil},
		"absolute link":       {with(preload, "-> /etc/own"), true, "", nil},
		"link to host":        {with(preload, "-> "+secret), true, "", nil},
		"link up to host":     {with(preload, "-> "+strings.Repeat("../", 30)+secret[1:]), true, "", nil},
		"folder link to host": {with("etc", "-> "+filepath.Dir(secret)), true, "", nil},
		"magic link":          {with(preload, "-> /proc/self/exe"), true, "", nil},
		"loop":                {with(preload, "-> ld.so.preload"), true, "", errUnread},
		"loader loop":         {map[string]string{glibc: "-> " + filepath.Base(glibc)}, false, "", nil},
		"folder":              {with(preload, "dir/"), true, "", errUnread},
		"pipe":                {with(preload, "fifo"), true, "", errUnread},
		"device":              {with(preload, "null"), true, "", errUnread},
		"huge":                {with(preload, "huge"), true, "", errUnread},
		"etc is a file":       {with("etc", "x"), true, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := readImage(plant(t, test.files))
			if got.glibc != test.glibc || string(got.preload) != test.preload || !errors.Is(err, test.err) {
				t.Errorf("%+v, %v, want %+v", got, err, test)
			}
		})
	}
	if got, err := readImage("/nonexistent"); !got.glibc || err != nil {
		t.Errorf("no root: %+v, %v", got, err)
	}
}

// A lease would make whoever opens the file wait for 45 seconds, for each container of the image.
func TestLookAtALeasedFile(t *testing.T) {
	root := plant(t, map[string]string{strings.TrimPrefix(loaders[runtime.GOARCH], "/"): "ELF", "etc/ld.so.preload": "/a.so"})
	f, err := os.Open(filepath.Join(root, "etc/ld.so.preload"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	looked := make(chan error, 1)
	go func() {
		_, err := readImage(root)
		looked <- err
	}()
	select {
	case err := <-looked:
		if !errors.Is(err, errUnread) {
			t.Errorf("%v, want %v", err, errUnread)
		}
	case <-time.After(30 * time.Second):
		t.Error("waits for the lease")
	}
}

func TestPreloadFile(t *testing.T) {
	glibc := strings.TrimPrefix(loaders[runtime.GOARCH], "/")
	own := map[string]string{glibc: "ELF", "etc/ld.so.preload": "/a.so"}
	mount := func(to string) string { return `,"mounts":[{"destination":"` + to + `"}]` }
	for name, test := range map[string]struct {
		files   map[string]string
		mounts  string
		want    string // content of the file; empty: none
		refused bool   // in preload mode
	}{
		"glibc":        {map[string]string{glibc: "ELF"}, "", "/run/cgpu/libcgpu.so\n", false},
		"own":          {own, "", "/run/cgpu/libcgpu.so\n/a.so\n", false},
		"musl":         {map[string]string{"lib/ld-musl-x86_64.so.1": "ELF"}, "", "", false},
		"loader bound": {nil, mount("/lib64"), "/run/cgpu/libcgpu.so\n", false},
		"mounted file": {own, mount("/etc/ld.so.preload"), "", true},
		"mounted etc":  {own, mount("/etc"), "", true},
		"hostile":      {map[string]string{glibc: "ELF", "etc/ld.so.preload": "fifo"}, "", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			root, runDir := plant(t, test.files), t.TempDir()
			record := ledger.Record{Nonce: "n", Page: page.File(runDir, "n")}
			if err := os.MkdirAll(filepath.Dir(record.Page), 0o755); err != nil {
				t.Fatal(err)
			}
			doc, err := spec.Decode([]byte(`{"root":{"path":"rootfs"}` + test.mounts + `}`))
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				path, err := preloadFile(doc, filepath.Dir(root), &record)
				if err != nil {
					t.Fatal(err)
				}
				text, _ := os.ReadFile(path)
				if string(text) != test.want {
					t.Errorf("%s has %q, want %q", path, text, test.want)
				}
				if path != "" {
					if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o444 {
						t.Errorf("%v, %v", info.Mode(), err)
					}
				}
				if path != "" && path != page.PreloadFile(record.Page) { // never a file of two containers
					t.Errorf("in %s", path)
				}
			}
			record.Preload = true
			_, err = preloadFile(doc, filepath.Dir(root), &record)
			if (err != nil) != test.refused || err != nil && !strings.Contains(err.Error(), `enforcement = "guard"`) {
				t.Errorf("in preload mode: %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(runDir, "*", "*.tmp*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func BenchmarkPreloadFile(b *testing.B) {
	root := plant(b, map[string]string{strings.TrimPrefix(loaders[runtime.GOARCH], "/"): "ELF"})
	doc, err := spec.Decode([]byte(`{"root":{"path":"rootfs"}}`))
	if err != nil {
		b.Fatal(err)
	}
	record := ledger.Record{Nonce: "n", Page: page.File(b.TempDir(), "n")}
	if err := os.MkdirAll(filepath.Dir(record.Page), 0o755); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := preloadFile(doc, filepath.Dir(root), &record); err != nil {
			b.Fatal(err)
		}
	}
}
