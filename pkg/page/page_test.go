// SPDX-License-Identifier: Apache-2.0

package page

import (
	"bytes"
	"errors"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

// newPage creates a page with two vGPUs.
func newPage(t *testing.T, flags uint32) string {
	t.Helper()
	path := File(t.TempDir(), "nonce")
	if err := Create(path, Header{Flags: flags, UVMDevice: 7},
		[]VGPU{{Minor: 3, Limit: 1 << 30}, {Flags: VGPUNative, Minor: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCreate(t *testing.T) {
	for _, c := range []struct {
		name      string
		flags     uint32
		umask     int
		size      int
		mode      os.FileMode
		processes uint32
	}{
		{"with a guard", FlagGuard | FlagManagedLimit, 0o022, sizeGuard, 0o444, 0},
		{"with a guard, under a tight umask", FlagGuard, 0o777, sizeGuard, 0o444, 0},
		{"preload mode", FlagPreload, 0o022, sizePreload, 0o666, MaxProcesses},
		{"preload mode, under a tight umask", FlagPreload | FlagNoHMM, 0o077, sizePreload, 0o666, MaxProcesses},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := File(dir, "nonce")
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			old := unix.Umask(c.umask)
			err := Create(path, Header{Flags: c.flags, UVMDevice: 7}, []VGPU{{Minor: 3, Limit: 1 << 30}, {Flags: VGPUNative}})
			unix.Umask(old)
			if err != nil {
				t.Fatal(err)
			}
			st, err := os.Stat(path)
			if err != nil || st.Mode() != c.mode || st.Size() != int64(c.size) {
				t.Fatalf("%v with %d bytes, %v; want %v with %d", st.Mode(), st.Size(), err, c.mode, c.size)
			}
			p, err := Read(path)
			if err != nil {
				t.Fatal(err)
			}
			want := Header{Magic: Magic, Version: Version, Size: uint32(c.size), Flags: c.flags, VGPUs: 2, Processes: c.processes, UVMDevice: 7}
			if *p.Header() != want {
				t.Errorf("header %+v, want %+v", *p.Header(), want)
			}
			if p.VGPU(0).Limit != 1<<30 || p.VGPU(0).Minor != 3 || p.VGPU(1).Flags != VGPUNative || *p.VGPU(2) != (VGPU{}) {
				t.Errorf("vGPUs %+v %+v %+v", *p.VGPU(0), *p.VGPU(1), *p.VGPU(2))
			}
			// Again, over the old one and over what a killed runtime left.
			if err := os.WriteFile(path+".tmp", []byte("half"), 0o000); err != nil {
				t.Fatal(err)
			}
			if err := Create(path, Header{Flags: c.flags}, nil); err != nil {
				t.Fatal(err)
			}
			if p, err := Read(path); err != nil || p.Header().VGPUs != 0 {
				t.Errorf("the second page: %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "page", "*", "*")); !slices.Equal(left, []string{path}) {
				t.Errorf("left in the folder: %v", left)
			}
		})
	}
}

// TestCreateReplaces: what somebody put in the temporary name's place is not followed.
func TestCreateReplaces(t *testing.T) {
	path := File(t.TempDir(), "nonce")
	other := filepath.Join(t.TempDir(), "other")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{path, path + ".tmp"} {
		if err := os.Symlink(other, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := Create(path, Header{Flags: FlagGuard}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(other); !os.IsNotExist(err) {
		t.Error("a page was written through a link")
	}
	if st, err := os.Lstat(path); err != nil || !st.Mode().IsRegular() {
		t.Errorf("%v, %v", st, err)
	}
}

func TestCreateRefuses(t *testing.T) {
	path := File(t.TempDir(), "nonce")
	if err := Create(path, Header{}, make([]VGPU, MaxVGPUs)); err != nil {
		t.Error(err)
	}
	err := Create(path, Header{}, make([]VGPU, MaxVGPUs+1))
	if err == nil || !strings.Contains(err.Error(), "17 GPUs") || !strings.Contains(err.Error(), "16") {
		t.Errorf("%v", err)
	}
}

// TestOpen: a guard's page is mapped, and what it writes is in the file.
func TestOpen(t *testing.T) {
	path := newPage(t, FlagGuard)
	p, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	atomic.StoreUint64(&p.VGPU(1).Used, 42)
	p.Changed()
	seen, err := Read(path)
	if err != nil || seen.VGPU(1).Used != 42 || seen.Header().Change != 1 {
		t.Errorf("%v, %+v", err, seen)
	}
	p.Close()
	p.Close() // twice is once
}

// TestDamaged: neither Open nor Read takes anything but a page.
func TestDamaged(t *testing.T) {
	header := func(change func(h *Header)) func(b []byte) []byte {
		return func(b []byte) []byte {
			change((&Page{b}).Header())
			return b
		}
	}
	for _, c := range []struct {
		name   string
		flags  uint32
		damage func(b []byte) []byte
		read   string // in the error of Read; empty: none
		open   string
	}{
		{"a guard's page", FlagGuard, nil, "", ""},
		{"a page of preload mode", FlagPreload, nil, "", "want 4096"},
		{"empty", FlagGuard, func(b []byte) []byte { return nil }, "EOF", "has 0 bytes"},
		{"a byte", FlagGuard, func(b []byte) []byte { return b[:1] }, "has 1 bytes", "has 1 bytes"},
		{"a byte less", FlagGuard, func(b []byte) []byte { return b[:sizeGuard-1] }, "has 4095 bytes", "has 4095 bytes"},
		{"a byte more", FlagGuard, func(b []byte) []byte { return append(b, 0) }, "", "has 4097 bytes"},
		{"preload mode, its slots cut off", FlagPreload, func(b []byte) []byte { return b[:sizePreload-1] }, "no vGPU page", "want 4096"},
		{"preload mode, longer", FlagPreload, func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) }, "", "want 4096"},
		{"zeroes", FlagGuard, func(b []byte) []byte { clear(b); return b }, "no vGPU page", "no vGPU page"},
		{"all bits set", FlagGuard, func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) }, "no vGPU page", "no vGPU page"},
		{"another version", FlagGuard, header(func(h *Header) { h.Version++ }), "version 1", "version 1"},
		{"too many vGPUs", FlagGuard, header(func(h *Header) { h.VGPUs = MaxVGPUs + 1 }), "no vGPU page", "no vGPU page"},
		{"slots that are not there", FlagGuard, header(func(h *Header) { h.Processes = 1 }), "no vGPU page", "no vGPU page"},
		{"too many slots", FlagPreload, header(func(h *Header) { h.Processes = MaxProcesses + 1 }), "no vGPU page", "want 4096"},
		{"another size in the header", FlagGuard, header(func(h *Header) { h.Size = math.MaxUint32 }), "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := newPage(t, c.flags)
			if c.damage != nil {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, c.damage(b), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			_, err := Read(path)
			wantError(t, "Read", err, c.read)
			p, err := Open(path)
			wantError(t, "Open", err, c.open)
			if err == nil {
				p.Close()
			}
		})
	}
}

func wantError(t *testing.T, what string, err error, text string) {
	t.Helper()
	switch {
	case text == "" && err != nil:
		t.Errorf("%s: %v", what, err)
	case text != "" && (err == nil || !strings.Contains(err.Error(), text)):
		t.Errorf("%s: %v, want %q in it", what, err, text)
	}
}

// TestOpenNoLink: a guard writes only into the file itself.
func TestOpenNoLink(t *testing.T) {
	path := newPage(t, FlagGuard)
	if err := os.Symlink(path, path+"2"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path + "2"); err == nil || !strings.Contains(err.Error(), "too many levels") {
		t.Errorf("%v", err)
	}
	if _, err := Open(path + "3"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a page that is not there: %v", err)
	}
}

// TestUpdate changes what the host sets, and leaves the slots, which change meanwhile, alone.
func TestUpdate(t *testing.T) {
	path := newPage(t, FlagPreload)
	slot := int64(unsafe.Sizeof(Header{}) + MaxVGPUs*unsafe.Sizeof(VGPU{}))
	err := Update(path, func(p *Page) {
		p.VGPU(0).Limit = 5
		// A process takes its slot just now.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte{9}, slot); err != nil {
			t.Fatal(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	p, err := Read(path)
	if err != nil || p.VGPU(0).Limit != 5 || p.VGPU(1).Minor != 1<<20 || p.Header().Change != 1 || p.Slot(0).Owner != 9 {
		t.Errorf("%v: %+v %+v", err, *p.Header(), *p.Slot(0))
	}
	if st, _ := os.Stat(path); st.Size() != int64(sizePreload) {
		t.Errorf("%d bytes", st.Size())
	}
	if err := Update(path+"2", func(*Page) { t.Error("called") }); err == nil {
		t.Error("a page that is not there was changed")
	}
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	if err := Create(File(dir, "a"), Header{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := Create(File(dir, "b"), Header{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(PreloadFile(File(dir, "a")), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	// Of a container that the version before started.
	for _, name := range []string{"old", "old.preload"} {
		if err := os.WriteFile(filepath.Join(dir, "page", name), nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	if err := Remove(dir, "old"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to remove
		if err := Remove(dir, "a"); err != nil {
			t.Fatal(err)
		}
	}
	left, _ := filepath.Glob(filepath.Join(dir, "page", "*"))
	if !slices.Equal(left, []string{filepath.Dir(File(dir, "b"))}) {
		t.Errorf("left: %v", left)
	}
}

// TestConfine is a tenant at work on his page: what he does to it stays below a bound, and does not count on the host.
func TestConfine(t *testing.T) {
	testenv.NeedsRoot(t, "a mount")
	dir := t.TempDir()
	path := File(dir, "n")
	if err := Confine(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = Remove(dir, "n") })
	if err := Create(path, Header{Flags: FlagPreload}, make([]VGPU, MaxVGPUs)); err != nil {
		t.Fatal(err)
	}
	// As large as they can be.
	for _, beside := range []string{PreloadFile(path), LimiterFile(path)} {
		if err := os.WriteFile(beside, make([]byte, 128<<10), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	written, err := f.Write(make([]byte, 1<<20))
	if f.Close(); written > 512<<10 || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the page grew by %d bytes, %v", written, err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil || fs.Flags&unix.ST_NOSUID == 0 || fs.Flags&unix.ST_NODEV == 0 {
		t.Errorf("flags %#x, %v", fs.Flags, err)
	}
	// A guard, which may not unmount, leaves all as it is: it would be as new to whoever may.
	if err := withoutPowers(t, func() error { return Remove(dir, "n") }); !errors.Is(err, unix.EBUSY) {
		t.Error(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 3 {
		t.Errorf("left: %v", left)
	}
	for range 2 {
		if err := Remove(dir, "n"); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "page")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// A runtime that was killed before it could mount.
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		t.Fatal(err)
	}
	if err := Remove(dir, "n"); err != nil {
		t.Error(err)
	}
}

// withoutPowers calls f as root without capabilities.
func withoutPowers(t *testing.T, f func() error) error {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all, none [2]unix.CapUserData
	if err := unix.Capget(&header, &all[0]); err != nil {
		t.Fatal(err)
	}
	for i := range none {
		none[i].Permitted = all[i].Permitted
	}
	if err := unix.Capset(&header, &none[0]); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Capset(&header, &all[0]); err != nil {
			t.Fatal(err)
		}
	}()
	return f()
}

// TestLeased: a tenant who holds a lease on his page makes nobody wait for him.
func TestLeased(t *testing.T) {
	path := newPage(t, FlagPreload)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(path); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("read: %v", err)
	}
	if err := Update(path, func(*Page) {}); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("update: %v", err)
	}
}

// TestSlotUse sums the slots that are taken.
func TestSlotUse(t *testing.T) {
	p, err := Read(newPage(t, FlagPreload))
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range []Slot{{Owner: 1, Used: [MaxVGPUs]uint64{10, 20}, Managed: 3}, {Used: [MaxVGPUs]uint64{500}},
		{Owner: 1 << 63, Used: [MaxVGPUs]uint64{1, 2}, Managed: 4}} {
		*p.Slot(i * 200) = s
	}
	for vgpu, want := range []uint64{11, 22, 0} {
		if used, managed, n := p.SlotUse(vgpu); used != want || managed != 7 || n != 2 {
			t.Errorf("vGPU %d: %d, %d managed, %d processes", vgpu, used, managed, n)
		}
	}
	if q, err := Read(newPage(t, FlagGuard)); err != nil {
		t.Error(err)
	} else if used, managed, n := q.SlotUse(0); used|managed != 0 || n != 0 {
		t.Error("a guard's page has slots")
	}
}

// TestCHeader: limiter/page.h is what the generator writes.
func TestCHeader(t *testing.T) {
	b, err := os.ReadFile("../../limiter/page.h")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, CHeader()) {
		t.Error("limiter/page.h is out of date: run `go generate ./pkg/page`")
	}
}

// TestCompiles: the C compiler lays the structures out as Go does (page.h has assertions), also in C++ and beside other headers.
func TestCompiles(t *testing.T) {
	cc := testenv.NeedsProgram(t, "gcc")
	src := filepath.Join(t.TempDir(), "x.c")
	text := "#include <string.h>\n#include \"page.h\"\n#include \"page.h\"\n" +
		"_Static_assert(sizeof(struct cgpu_header) + CGPU_MAX_VGPUS * sizeof(struct cgpu_vgpu) <= 4096, \"one memory page\");\n" +
		"const char *path = CGPU_PAGE_PATH;\n"
	if err := os.WriteFile(src, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I../../limiter", src).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestSnake(t *testing.T) {
	for name, want := range map[string]string{"Magic": "magic", "VGPUs": "vgpus", "VGPU": "vgpu", "GPUID": "gpuid", "UVMDevice": "uvm_device",
		"TimesliceMicros": "timeslice_micros", "ManagedCall": "managed_call", "ControlDevice": "control_device"} {
		if got := snake(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// FuzzRead: whatever a tenant writes into a page of preload mode, cgpu reads it without harm.
func FuzzRead(f *testing.F) {
	dir := f.TempDir()
	path := File(dir, "seed")
	for _, flags := range []uint32{FlagGuard, FlagPreload} {
		if err := Create(path, Header{Flags: flags}, make([]VGPU, 2)); err != nil {
			f.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, uint16(0), uint64(0))
		f.Add(b, uint16(3*8), uint64(math.MaxUint64))
		f.Add(b[:4000], uint16(0), uint64(1))
	}
	f.Fuzz(func(t *testing.T, b []byte, at uint16, value uint64) {
		if len(b) > 2*sizePreload {
			return
		}
		if int(at)+8 <= len(b) {
			*(*[8]byte)(b[at:]) = *(*[8]byte)(unsafe.Pointer(&value))
		}
		path := filepath.Join(dir, "page", "fuzzed")
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		p, err := Read(path)
		if err != nil {
			return
		}
		h := p.Header()
		if h.VGPUs > MaxVGPUs || h.Processes > MaxProcesses || h.Processes > 0 && len(b) < sizePreload {
			t.Errorf("taken: %+v of %d bytes", *h, len(b))
		}
		for i := range int(h.VGPUs) {
			_ = *p.VGPU(i)
			p.SlotUse(i)
		}
		for i := range int(h.Processes) {
			_ = *p.Slot(i)
		}
		if err := Update(path, func(p *Page) { p.VGPU(MaxVGPUs - 1).Limit = 1 }); err != nil {
			t.Error(err)
		}
	})
}
