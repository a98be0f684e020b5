// SPDX-License-Identifier: Apache-2.0

// Package limiter_test builds libcgpu.so and runs small C programs (testdata) with it, on every C library and architecture
// for which this machine has a compiler. It has a directory of its own because Go takes no C files beside Go ones without cgo.
package limiter_test

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// target is a place where the limiter has to work.
type target struct {
	name    string
	cc      string   // for the library
	program string   // for the test programs
	run     []string // before a program's name
}

var (
	native  = target{name: "glibc", cc: "gcc", program: "gcc"}
	targets = []target{
		native,
		{name: "musl", cc: "gcc", program: "musl-gcc"},
		{name: "arm64", cc: "aarch64-linux-gnu-gcc", program: "aarch64-linux-gnu-gcc",
			run: []string{"qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"}},
	}
)

// rig is a target with its programs, and a place for the page that all of them look at.
type rig struct {
	target
	dir, page string
}

// each runs a test on all targets.
func each(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, tg := range targets {
		t.Run(tg.name, func(t *testing.T) { test(t, newRig(t, tg)) })
	}
}

func newRig(t testing.TB, tg target) *rig {
	t.Helper()
	for _, tool := range append([]string{tg.cc, tg.program, "make"}, tg.run[:min(1, len(tg.run))]...) {
		testenv.NeedsProgram(t, tool)
	}
	dir := t.TempDir()
	return &rig{tg, dir, filepath.Join(dir, "page")}
}

// define names the page in C. With fake the test program plays the driver.
func (r *rig) define(fake bool) string {
	d := fmt.Sprintf(`-DCGPU_PAGE_PATH='"%s"'`, r.page)
	if fake {
		d += " -DCGPU_TEST_DRIVER"
	}
	return d
}

// library builds libcgpu.so as it ships, but for the place of the page.
func (r *rig) library(t testing.TB, fake bool) string {
	t.Helper()
	out := filepath.Join(r.dir, fmt.Sprintf("lib-%t", fake))
	file := filepath.Join(out, "libcgpu.so")
	command(t, "make", "-s", "-C", "..", "OUT="+out, "CC="+r.cc, "DEFINES="+r.define(fake), file)
	return file
}

// build compiles a test program.
func (r *rig) build(t testing.TB, name string) string {
	t.Helper()
	out := filepath.Join(r.dir, name)
	command(t, "sh", "-c", fmt.Sprintf("%s -std=gnu11 -O1 -Wall -Werror -pthread -rdynamic %s -o %s testdata/%s.c", r.program,
		r.define(false), out, name))
	return out
}

// start runs a program with the library and returns what it wrote. Exit status 77 skips the test.
func (r *rig) start(t testing.TB, library, program string, args ...string) string {
	t.Helper()
	argv := append(slices.Clone(r.run), append([]string{program}, args...)...)
	if len(r.run) > 0 { // not into qemu itself
		argv = append(slices.Clone(r.run), append([]string{"-E", "LD_PRELOAD=" + library, program}, args...)...)
		library = ""
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LD_PRELOAD="+library)
	b, err := cmd.CombinedOutput()
	if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 77 {
		testenv.Lacks(t, "%s %v cannot be done here", filepath.Base(program), args)
	}
	if err != nil {
		t.Errorf("%s %v: %v\n%s", filepath.Base(program), args, err, b)
	}
	return string(b)
}

func command(t testing.TB, name string, args ...string) {
	t.Helper()
	if b, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, b)
	}
}

// put makes the page. processes is how many slots it is said to have; 0: as many as there are.
func (r *rig) put(t testing.TB, h page.Header, processes uint32, vgpus ...page.VGPU) {
	t.Helper()
	if err := page.Create(r.page, h, vgpus); err != nil {
		t.Fatal(err)
	}
	if processes != 0 {
		r.patch(t, 24, processes)
	}
}

// flags makes a page with flags, and returns them.
func (r *rig) flags(t testing.TB, flags uint32, vgpus ...page.VGPU) uint32 {
	t.Helper()
	r.put(t, page.Header{Flags: flags}, 0, vgpus...)
	return flags
}

// patch overwrites a word of the page.
func (r *rig) patch(t testing.TB, off int, v uint32) {
	t.Helper()
	b, err := os.ReadFile(r.page)
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint32(b[off:], v)
	if err := os.WriteFile(r.page, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

const (
	mib     = 1 << 20
	managed = page.FlagManagedLimit | page.FlagNoHMM
)

func TestPassThrough(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		library, program := r.library(t, false), r.build(t, "pass")
		for _, c := range []struct {
			name string
			page func() uint32 // its flags
		}{
			{"no page", func() uint32 { return 0 }},
			{"empty", func() uint32 { r.write(t, nil); return 0 }},
			{"garbage", func() uint32 { r.write(t, bytes.Repeat([]byte("garbage "), 1<<14)); return 0 }},
			{"a directory", func() uint32 { r.mkdir(t); return 0 }},
			{"guard", func() uint32 { return r.flags(t, page.FlagGuard|managed, page.VGPU{Limit: mib}) }},
			{"guard denies", func() uint32 { return r.flags(t, page.FlagGuard|page.FlagManagedDeny, page.VGPU{Limit: mib}) }},
			{"preload", func() uint32 { return r.flags(t, page.FlagPreload|managed, page.VGPU{Limit: mib}) }},
			{"preload, no GPU", func() uint32 { return r.flags(t, page.FlagPreload|managed) }},
		} {
			t.Run(c.name, func(t *testing.T) {
				_ = os.RemoveAll(r.page)
				r.start(t, library, program, fmt.Sprint(c.page()))
			})
		}
	})
}

// A page that says of itself what cannot be is none: a shared mapping may be denied by a good one and must not be by these.
func TestBadPage(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		library, program := r.library(t, false), r.build(t, "memfd")
		good := func() {
			r.put(t, page.Header{Flags: page.FlagPreload | page.FlagManagedDeny}, 0, page.VGPU{Limit: mib})
		}
		good()
		r.start(t, library, program, "denied")
		for _, c := range []struct {
			name   string
			damage func()
		}{
			{"magic", func() { r.patch(t, 0, 1) }},
			{"version", func() { r.patch(t, 4, page.Version+1) }},
			{"size beyond the file", func() { r.patch(t, 8, 1<<30) }},
			{"size before the slots", func() { r.patch(t, 8, 4096) }},
			{"too many vGPUs", func() { r.patch(t, 20, page.MaxVGPUs+1) }},
			{"too many slots", func() { r.patch(t, 24, page.MaxProcesses+1) }},
			{"cut off", func() { r.truncate(t, 4096) }},
			{"cut off in the header", func() { r.truncate(t, 12) }},
			{"a link", func() {
				if err := os.Rename(r.page, r.page+".real"); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(r.page+".real", r.page); err != nil {
					t.Fatal(err)
				}
			}},
		} {
			t.Run(c.name, func(t *testing.T) {
				good()
				c.damage()
				r.start(t, library, program, "maps")
			})
		}
	})
}

func (r *rig) write(t testing.TB, b []byte) {
	if err := os.WriteFile(r.page, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) mkdir(t testing.TB) {
	if err := os.Mkdir(r.page, 0o777); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) truncate(t testing.TB, size int64) {
	if err := os.Truncate(r.page, size); err != nil {
		t.Fatal(err)
	}
}

func TestManagedWithoutGuard(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		library, program := r.library(t, false), r.build(t, "memfd")
		for _, c := range []struct {
			name string
			h    page.Header
			want string
		}{
			{"nobody answers", page.Header{Flags: page.FlagGuard | page.FlagManagedLimit}, "maps"},
			{"denied", page.Header{Flags: page.FlagGuard | page.FlagManagedDeny}, "denied"},
			{"another device", page.Header{Flags: page.FlagGuard | page.FlagManagedDeny, UVMDevice: 0xf0f00}, "maps"},
			{"not looked at", page.Header{Flags: page.FlagGuard}, "maps"},
			{"preload, within", page.Header{Flags: page.FlagPreload | page.FlagManagedLimit}, "maps"},
		} {
			t.Run(c.name, func(t *testing.T) {
				r.put(t, c.h, 0, page.VGPU{Limit: 8 * mib})
				r.start(t, library, program, c.want)
			})
		}
		t.Run("preload, over", func(t *testing.T) {
			r.put(t, page.Header{Flags: page.FlagPreload | page.FlagManagedLimit}, 0, page.VGPU{Limit: 2 * mib})
			r.start(t, library, program, "denied")
		})
	})
}

func TestManagedWithGuard(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		r.put(t, page.Header{Flags: page.FlagGuard | managed}, 0, page.VGPU{Limit: mib})
		r.start(t, r.library(t, true), r.build(t, "guarded"))
	})
}

func TestRefused(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		r.put(t, page.Header{Flags: page.FlagGuard | managed}, 0, page.VGPU{Limit: mib})
		r.start(t, r.library(t, true), r.build(t, "refused"))
	})
}

func TestPreload(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		r.put(t, page.Header{Flags: page.FlagPreload | managed}, 0,
			page.VGPU{Limit: 64 * mib, GPUID: 0x100, TimesliceMicros: 4000}, page.VGPU{Limit: 32 * mib, GPUID: 0x200})
		var args []string
		if len(r.run) > 0 {
			args = []string{"emulated"}
		}
		r.start(t, r.library(t, true), r.build(t, "preload"), args...)
	})
}

// TestKillAnywhere kills a process after each of its instructions, but for some in between, and wants the memory back.
func TestKillAnywhere(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		testenv.Skip(t, "only amd64 is gone through instruction by instruction")
	}
	r := newRig(t, native)
	r.put(t, page.Header{Flags: page.FlagPreload}, 3, page.VGPU{Limit: 64 * mib})
	t.Log(r.start(t, r.library(t, true), r.build(t, "kill"), "step", "97"))
}

func TestKillStorm(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		if len(r.run) > 0 {
			testenv.Skip(t, "below qemu: the emulator tells lies of when a process began")
		}
		r.put(t, page.Header{Flags: page.FlagPreload}, 12, page.VGPU{Limit: 64 * mib})
		t.Log(r.start(t, r.library(t, true), r.build(t, "kill"), "storm", "2000"))
	})
}

// The library must load into any program: it may need nothing but what every loader has.
func TestELF(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		f, err := elf.Open(r.library(t, false))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		symbols, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		var defined, undefined []string
		for _, s := range symbols {
			switch {
			case elf.ST_BIND(s.Info) == elf.STB_LOCAL: // sections
			case s.Version != "" || s.Library != "":
				t.Errorf("%s has version %q of %q", s.Name, s.Version, s.Library)
			case s.Section == elf.SHN_UNDEF && elf.ST_BIND(s.Info) == elf.STB_WEAK:
				undefined = append(undefined, s.Name)
			case s.Section == elf.SHN_UNDEF:
				t.Errorf("%s is undefined", s.Name)
			default:
				defined = append(defined, s.Name)
			}
		}
		slices.Sort(defined)
		if got, want := strings.Join(defined, " "), "ioctl mmap mmap64 munmap"; got != want {
			t.Errorf("exports %s, want %s", got, want)
		}
		if got, want := strings.Join(undefined, " "), "__errno_location"; got != want {
			t.Errorf("needs %s, want %s", got, want)
		}
		for _, tag := range []elf.DynTag{elf.DT_NEEDED, elf.DT_VERNEED, elf.DT_VERDEF, elf.DT_VERSYM, elf.DT_INIT, elf.DT_INIT_ARRAY, elf.DT_FINI,
			elf.DT_FINI_ARRAY, elf.DT_PREINIT_ARRAY, elf.DT_TEXTREL, elf.DT_RUNPATH, elf.DT_RPATH, 36 /* DT_RELR */} {
			if v, err := f.DynValue(tag); err != nil || len(v) > 0 {
				t.Errorf("has %v: %v %v", tag, v, err)
			}
		}
		for _, tag := range []elf.DynTag{elf.DT_HASH, elf.DT_GNU_HASH} {
			if v, err := f.DynValue(tag); err != nil || len(v) != 1 {
				t.Errorf("has no %v: %v", tag, err)
			}
		}
		stack := false
		for _, p := range f.Progs {
			switch {
			case p.Type == elf.PT_TLS, p.Type == elf.PT_INTERP:
				t.Errorf("has %v", p.Type)
			case p.Flags&(elf.PF_W|elf.PF_X) == elf.PF_W|elf.PF_X:
				t.Errorf("%v is writable and executable", p.Type)
			}
			stack = stack || p.Type == elf.PT_GNU_STACK
		}
		if !stack {
			t.Error("does not say that the stack is not executable")
		}
	})
}

func TestHeader(t *testing.T) {
	got, err := os.ReadFile("../page.h")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, page.CHeader()) {
		t.Error("page.h is old: run go generate ./pkg/page")
	}
}

// The limiter runs in every process of a container: it must stay small enough to be read in one go. Comments and empty lines
// do not count.
func TestSize(t *testing.T) {
	lines := 0
	for _, pattern := range []string{"../*.c", "../*.h"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if filepath.Base(file) == "page.h" {
				continue
			}
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			comment := false
			for line := range strings.Lines(string(b)) {
				line = strings.TrimSpace(line)
				comment = comment || strings.HasPrefix(line, "/*")
				if line != "" && !comment {
					lines++
				}
				comment = comment && !strings.Contains(line, "*/")
			}
		}
	}
	if lines >= 1000 {
		t.Errorf("%d lines, want less than 1000", lines)
	}
}

// BenchmarkTrue is what a program pays for the limiter that never touches a GPU.
func BenchmarkTrue(b *testing.B) {
	r := newRig(b, native)
	library := r.library(b, false)
	for _, c := range []struct{ name, preload string }{{"without", ""}, {"with", library}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				cmd := exec.Command("/bin/true")
				cmd.Env = []string{"LD_PRELOAD=" + c.preload}
				if err := cmd.Run(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
