// SPDX-License-Identifier: Apache-2.0

package ldcache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// ldconfig of glibc 2.36 made the files of testdata from one folder, with -c new, compat and old.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	file, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return file
}

const hwcap = 1 << 62 // DL_CACHE_HWCAP_EXTENSION

func entries() []Entry {
	x := func(name, path string) Entry { return Entry{Name: name, Path: path, Flags: X8664} }
	v2, v3 := x("libblas.so.3", "/usr/lib/glibc-hwcaps/x86-64-v2/libblas.so.3"),
		x("libblas.so.3", "/usr/lib/glibc-hwcaps/x86-64-v3/libblas.so.3")
	v2.HWCap, v3.HWCap = hwcap, hwcap+1
	return []Entry{
		x("libz10.so.10", "/usr/lib/libz10.so.10"), x("libz10.so.9", "/usr/lib/libz10.so.9"),
		x("libz.so.1", "/usr/lib/libz.so.1"), x("libz.so", "/usr/lib/libz.so"),
		{Name: "libold.so.1", Path: "/opt/old/libold.so.1", Flags: 1}, // a library for i386 that needs no libc
		x("libcuda.so.1", "/opt/stubs/libcuda.so.1"), x("libcuda.so.1", "/usr/lib/libcuda.so.1"),
		v2, v3, x("libblas.so.3", "/usr/lib/libblas.so.3"),
	}
}

func TestParse(t *testing.T) {
	for name, hwcaps := range map[string][]string{
		"new.cache":    {"x86-64-v2", "x86-64-v3"},
		"compat.cache": {"b/libz10.so.9", ""}, // as ldconfig -p shows them, too
	} {
		c, err := Parse(golden(t, name))
		if err != nil {
			t.Fatal(name, err)
		}
		if diff := cmp.Diff(Cache{Entries: entries(), HWCaps: hwcaps}, c); diff != "" {
			t.Errorf("%s, -want +got:\n%s", name, diff)
		}
		again, err := Parse(c.Encode())
		if err != nil {
			t.Fatal(name, err)
		}
		if diff := cmp.Diff(c, again); diff != "" {
			t.Errorf("%s, -parsed +written and parsed:\n%s", name, diff)
		}
		if !slices.IsSortedFunc(c.Entries, func(a, b Entry) int { return compare(b.Name, a.Name) }) {
			t.Errorf("%s is sorted, but not to compare", name)
		}
	}
	if _, err := Parse(golden(t, "old.cache")); !errors.Is(err, ErrFormat) {
		t.Error("the format of libc5 alone:", err)
	}
}

// driver are libraries as cgpu-hook adds them.
func driver() []Entry {
	const dir = "/usr/lib/"
	return []Entry{
		{Name: "libcuda.so", Path: dir + "libcuda.so.580.159.04", Flags: X8664},
		{Name: "libcuda.so.1", Path: dir + "libcuda.so.580.159.04", Flags: X8664},
		{Name: "libblas.so.3", Path: "/drv/libblas.so.3", Flags: X8664},
		{Name: "libold.so.1", Path: "/drv/libold.so.1", Flags: I386},
		{Name: "libzz.so", Path: "/drv/libzz.so", Flags: X8664},
		{Name: "liba.so", Path: "/drv/liba.so", Flags: X8664},
	}
}

// The driver's libraries come before the image's of the same name, whatever those are for; what the image's cache said of the
// same folder is gone, and the second time nothing changes.
func TestWith(t *testing.T) {
	c, err := Parse(golden(t, "new.cache"))
	if err != nil {
		t.Fatal(err)
	}
	c = c.With(driver())
	var got []string
	for _, e := range c.Entries {
		got = append(got, e.Path)
	}
	want := []string{
		"/usr/lib/libz10.so.10", "/usr/lib/libz10.so.9", "/drv/libzz.so", "/usr/lib/libz.so.1", "/usr/lib/libz.so",
		"/drv/libold.so.1", "/opt/old/libold.so.1",
		"/usr/lib/libcuda.so.580.159.04", "/opt/stubs/libcuda.so.1", "/usr/lib/libcuda.so.580.159.04",
		"/drv/libblas.so.3", "/usr/lib/glibc-hwcaps/x86-64-v2/libblas.so.3", "/usr/lib/glibc-hwcaps/x86-64-v3/libblas.so.3",
		"/usr/lib/libblas.so.3",
		"/drv/liba.so",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	first := c.Encode()
	again, err := Parse(first)
	if err != nil {
		t.Fatal(err)
	}
	if second := again.With(driver()).Encode(); !bytes.Equal(first, second) {
		t.Error("a restart changed the cache")
	}
}

// glibc's own program reads what is written.
func TestLdconfigReads(t *testing.T) {
	c, err := Parse(golden(t, "new.cache"))
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		cache Cache
		want  []string
	}{
		"with the image's": {c.With(driver()), []string{
			"15 libs found", "libcuda.so (libc6,x86-64) => /usr/lib/libcuda.so.580.159.04", "libold.so.1 (libc6) => /drv/libold.so.1",
			`libblas.so.3 (libc6,x86-64, hwcap: "x86-64-v3") => /usr/lib/glibc-hwcaps/x86-64-v3/libblas.so.3`,
		}},
		"alone": {Cache{}.With(driver()), []string{"6 libs found", "liba.so (libc6,x86-64) => /drv/liba.so"}},
	} {
		file := filepath.Join(t.TempDir(), "cache")
		if err := os.WriteFile(file, tt.cache.Encode(), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("/sbin/ldconfig", "-p", "-C", file).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, want := range tt.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s: no %q in:\n%s", name, want, out)
			}
		}
	}
}

func TestCompare(t *testing.T) {
	sign := map[bool]int{true: -1, false: 1}[runtime.GOARCH == "amd64"] // of a char above 127
	for _, tt := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"a", "", 1},
		{"libz.so.1", "libz.so.1", 0},
		{"libz.so.2", "libz.so.10", -1},
		{"libz.so.1", "libz.so.01", 0},
		{"libz.so.1", "libz.so.1.2", -1},
		{"libz1", "libz.so", 1}, // a digit is more than all else
		{"libz1", "libz", 1},
		{"liba", "libb", -1},
		{"lib\xc3\xa4", "libz", sign},
		{"lib4294967297", "lib1", 0}, // a C int
	} {
		if got := compare(tt.a, tt.b); got != tt.want {
			t.Errorf("%q, %q: %d, want %d", tt.a, tt.b, got, tt.want)
		}
		if got := compare(tt.b, tt.a); got != -tt.want {
			t.Errorf("%q, %q: %d, want %d", tt.b, tt.a, got, -tt.want)
		}
	}
}

// crowd is a cache of count entries that all name one string of so many bytes.
func crowd(count, length int) []byte {
	file := Cache{Entries: make([]Entry, count)}.Encode()[:headerSize+entrySize*count]
	at := uint32(len(file))
	for i := range count {
		binary.LittleEndian.PutUint32(file[headerSize+i*entrySize+4:], at)
		binary.LittleEndian.PutUint32(file[headerSize+i*entrySize+8:], at)
	}
	return append(append(file, bytes.Repeat([]byte("7"), length)...), 0)
}

// patched is a file with another number at an offset.
func patched(file []byte, at int, v uint32) []byte {
	file = slices.Clone(file)
	binary.LittleEndian.PutUint32(file[at:], v)
	return file
}

const most = 1<<32 - 1

func TestDamaged(t *testing.T) {
	whole := golden(t, "new.cache")
	extensions := int(binary.LittleEndian.Uint32(whole[extensionsAt:]))
	put := func(at int, v uint32) []byte { return patched(whole, at, v) }
	noEnd := slices.Clone(whole[:extensions])
	binary.LittleEndian.PutUint32(noEnd[extensionsAt:], 0)
	noEnd = append(bytes.TrimRight(noEnd, "\x00"), "x"...)
	for name, file := range map[string][]byte{
		"empty":                             nil,
		"text":                              []byte("hello"),
		"magic alone":                       []byte(magic),
		"another version":                   bytes.Replace(whole, []byte("1.1"), []byte("1.2"), 1),
		"cut in the header":                 whole[:headerSize-1],
		"cut in the entries":                whole[:headerSize+entrySize],
		"cut in the strings":                whole[:extensions-40],
		"too large":                         make([]byte, MostSize+1),
		"big-endian":                        put(flagsAt, 3),
		"entries, too many":                 put(len(magic), most),
		"entries that the file has not":     put(len(magic), uint32(len(whole)/entrySize)),
		"name beyond the end":               put(headerSize+4, uint32(len(whole))),
		"path beyond the end":               put(headerSize+8, most),
		"string without an end":             noEnd,
		"libc5's, too many":                 append([]byte(oldMagic+"\x00"), 0xff, 0xff, 0xff, 0xff, 0, 0),
		"libc5's, cut":                      []byte(oldMagic),
		"many entries with one long string": crowd(10000, 4096),
	} {
		if c, err := Parse(file); err == nil {
			t.Errorf("%s: read as %d entries", name, len(c.Entries))
		}
	}
	if c, err := Parse(crowd(100, 4096)); err != nil || len(c.Entries) != 100 {
		t.Error("100 entries with one long string:", err)
	}
}

// With extensions that the linker would not read, it does without what needs them, and so do we.
func TestDamagedExtensions(t *testing.T) {
	whole := golden(t, "new.cache")
	at := int(binary.LittleEndian.Uint32(whole[extensionsAt:]))
	section := at + 8
	data := int(binary.LittleEndian.Uint32(whole[section+16+8:])) // of the second one, the folders
	names := func(count int, last string) []byte {
		return Cache{Entries: entries(), HWCaps: append(slices.Repeat([]string{"x"}, count-1), last)}.Encode()
	}
	long := names(mostHWCaps, strings.Repeat("x", 2*MostSize/mostHWCaps))
	want := slices.DeleteFunc(entries(), func(e Entry) bool { return e.HWCap != 0 })
	for name, file := range map[string][]byte{
		"cut":                          whole[:at+4],
		"beyond the end":               patched(whole, extensionsAt, most&^3),
		"at an odd place":              patched(whole, extensionsAt, uint32(at+1)),
		"elsewhere":                    patched(whole, extensionsAt, 4),
		"sections, too many":           patched(whole, at+4, most),
		"section beyond the end":       patched(whole, section+8, most),
		"section longer than the file": patched(whole, section+12, most),
		"folder's name beyond the end": patched(whole, data, most),
		"too many folders":             names(mostHWCaps+1, "x"),
		"folders with one long name":   slices.Concat(long[:len(long)-4*mostHWCaps], bytes.Repeat(long[len(long)-4:], mostHWCaps)),
	} {
		c, err := Parse(file)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(Cache{Entries: want}, c); diff != "" {
			t.Errorf("%s, -want +got:\n%s", name, diff)
		}
	}
	if c, err := Parse(names(mostHWCaps, "x")); err != nil || len(c.HWCaps) != mostHWCaps || len(c.Entries) != len(entries()) {
		t.Errorf("%d folders: %+v, %v", mostHWCaps, c, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"new.cache", "compat.cache", "old.cache"} {
		f.Add(golden(f, name))
	}
	f.Add(crowd(10, 10))
	// Names are not asked to be in order: numbers beyond a C int have none.
	f.Fuzz(func(t *testing.T, file []byte) {
		c, err := Parse(file)
		if err != nil {
			return
		}
		c = c.With(driver())
		written := c.Encode()
		if len(written) > MostSize {
			return
		}
		again, err := Parse(written)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.Entries, again.Entries); diff != "" {
			t.Errorf("-written +read:\n%s", diff)
		}
		if !slices.Equal(c.HWCaps, again.HWCaps) {
			t.Errorf("folders %q, read as %q", c.HWCaps, again.HWCaps)
		}
	})
}

// BenchmarkWith: a large image's cache, and the dearest that passes.
func BenchmarkWith(b *testing.B) {
	var large Cache
	for i := range 600 {
		name := fmt.Sprintf("lib%x.so.%d", i*2654435761%1000, i)
		large.Entries = append(large.Entries, Entry{Name: name, Path: "/usr/lib/x86_64-linux-gnu/" + name, Flags: X8664})
	}
	for name, file := range map[string][]byte{
		"large":   large.With(nil).Encode(),
		"dearest": crowd(MostSize/(entrySize+2*11)-100, 10),
		"long":    crowd(100, 4000),
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				c, err := Parse(file)
				if err != nil {
					b.Fatal(err)
				}
				c.With(driver()).Encode()
			}
		})
	}
}
