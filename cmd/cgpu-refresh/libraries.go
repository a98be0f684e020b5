// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"debug/elf"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ldcache"
)

// library is what the dynamic linker goes by.
type library struct {
	soname string // empty: the file's name
	flags  int32  // as in an ld cache
}

// addLibraries adds what ldconfig would find in the library folders: a link for each SONAME, and the names of all links to
// libraries, such as libcuda.so. It is done here, of the host's files, since ldconfig must not run on a tenant's.
func (d *driverFiles) addLibraries(read func(host string) (library, error), warn func(string, ...any)) {
	type target struct {
		file  string
		flags int32
	}
	targets := map[string]target{} // of paths in the container
	for _, m := range d.mounts {
		folder, file := filepath.Split(m.Container)
		folder = filepath.Clean(folder)
		if !slices.Contains(d.libDirs, folder) {
			continue
		}
		lib, err := read(m.Host)
		if err != nil {
			warn("%s is left out of containers' ld caches: %v", m.Host, err)
			continue
		}
		targets[m.Container] = target{m.Container, lib.flags}
		soname := cmp.Or(lib.soname, file)
		if link := (device.Link{Target: file, Path: filepath.Join(folder, soname)}); soname != file &&
			!slices.ContainsFunc(d.links, func(l device.Link) bool { return l.Path == link.Path }) {
			d.links = append(d.links, link)
		}
		if soname == file {
			d.libraries = append(d.libraries, device.Library{Name: soname, Path: m.Container, Flags: lib.flags})
		}
	}
	// A link may come before the one that it leads to.
	for again := true; again; {
		again = false
		for _, l := range d.links {
			folder, name := filepath.Split(l.Path)
			folder = filepath.Clean(folder)
			to := l.Target
			if !filepath.IsAbs(to) {
				to = filepath.Join(folder, to)
			}
			found, ok := targets[to]
			if _, known := targets[l.Path]; known || !ok || !slices.Contains(d.libDirs, folder) {
				continue
			}
			targets[l.Path], again = found, true
			d.libraries = append(d.libraries, device.Library{Name: name, Path: found.file, Flags: found.flags})
		}
	}
}

// readELF reads a library's header.
func readELF(path string) (library, error) {
	f, err := elf.Open(path)
	if err != nil {
		return library{}, err
	}
	defer f.Close()
	flags := map[elf.Machine]int32{elf.EM_X86_64: ldcache.X8664, elf.EM_386: ldcache.I386, elf.EM_AARCH64: ldcache.AArch64}[f.Machine]
	if f.Type != elf.ET_DYN || flags == 0 || f.Machine != elf.EM_386 && f.Class != elf.ELFCLASS64 {
		return library{}, fmt.Errorf("%v of %v %v: want a library for this machine", f.Type, f.Class, f.Machine)
	}
	names, err := f.DynString(elf.DT_SONAME)
	if err != nil || len(names) == 0 {
		return library{flags: flags}, err
	}
	if filepath.Base(names[0]) != names[0] {
		return library{}, fmt.Errorf("SONAME %q: want a file name", names[0])
	}
	return library{names[0], flags}, nil
}
