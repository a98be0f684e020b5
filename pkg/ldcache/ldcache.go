// SPDX-License-Identifier: Apache-2.0

// Package ldcache reads and writes /etc/ld.so.cache, in which glibc's dynamic linker looks for libraries.
//
// A cache that is read belongs to a container's image, perhaps to an attacker: size, offsets and strings are checked, and
// the work for one is bounded. The format is of glibc's sysdeps/generic/dl-cache.h (struct cache_file_new), what ldconfig
// writes since glibc 2.2. The package is pure: it opens no file.
package ldcache

import (
	"cmp"
	"path"
	"runtime"
	"slices"
)

// MostSize bounds a cache, also when every entry has strings of its own: many may name one. With 600 libraries, as a large image
// has, it is 40 KiB.
const MostSize = 1 << 20

// mostHWCaps bounds the folders of glibc-hwcaps, of which an architecture has three or four.
const mostHWCaps = 64

// What kind of library an entry is (glibc: sysdeps/generic/ldconfig.h, FLAG_ELF_LIBC6 with the architecture's bits).
const (
	I386    int32 = 0x0003
	X8664   int32 = 0x0303
	AArch64 int32 = 0x0a03
)

// Entry says which file a library's name stands for.
type Entry struct {
	Name      string // mostly a SONAME
	Path      string
	Flags     int32 // I386, X8664, …
	OSVersion uint32
	HWCap     uint64 // what the processor must have; 0: nothing
}

// inHWCaps is set in Entry.HWCap of a library in a folder of glibc-hwcaps (glibc: dl_cache_hwcap_extension).
const inHWCaps = 1 << 62

// Cache is what a file says.
type Cache struct {
	Entries []Entry // in the order of the dynamic linker's search
	// HWCaps are the subfolders of glibc-hwcaps, to which Entry.HWCap refers by number.
	HWCaps []string
}

// With is the cache with libs before all others of the same names, also before those for better processors: the linker takes
// the first that needs no such. What the cache said of the same names in the same folders is gone.
func (c Cache) With(libs []Entry) Cache {
	type place struct {
		name, folder string
		flags        int32
	}
	at := func(e Entry) place { return place{e.Name, path.Dir(e.Path), e.Flags} }
	ours := make(map[place]bool, len(libs))
	for _, e := range libs {
		ours[at(e)] = true
	}
	entries := slices.Clone(libs)
	for _, e := range c.Entries {
		if !ours[at(e)] {
			entries = append(entries, e)
		}
	}
	slices.SortStableFunc(entries, func(a, b Entry) int { return compare(b.Name, a.Name) })
	return Cache{Entries: entries, HWCaps: c.HWCaps}
}

// compare is glibc's order of names, after which it searches (elf/dl-cache.c, _dl_cache_libcmp): digits count as numbers.
func compare(a, b string) int {
	isDigit := func(s string) bool { return s != "" && s[0] >= '0' && s[0] <= '9' }
	for a != "" {
		switch {
		case isDigit(a) && isDigit(b):
			var x, y int32 // of a C int, which may overflow
			for ; isDigit(a); a = a[1:] {
				x = x*10 + int32(a[0]-'0')
			}
			for ; isDigit(b); b = b[1:] {
				y = y*10 + int32(b[0]-'0')
			}
			if x != y {
				return cmp.Compare(x-y, 0)
			}
		case isDigit(a):
			return 1
		case isDigit(b):
			return -1
		case b == "" || a[0] != b[0]:
			return cmp.Compare(char(a), char(b))
		default:
			a, b = a[1:], b[1:]
		}
	}
	return cmp.Compare(0, char(b))
}

// char is the first char of a C string as a number; that of x86 has a sign.
func char(s string) int {
	switch {
	case s == "":
		return 0
	case runtime.GOARCH == "amd64":
		return int(int8(s[0]))
	default:
		return int(s[0])
	}
}
