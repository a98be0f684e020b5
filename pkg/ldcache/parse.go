// SPDX-License-Identifier: Apache-2.0

package ldcache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// The layout. All of it is little-endian on the machines that have GPUs.
const (
	magic          = "glibc-ld.so.cache1.1"
	headerSize     = 48
	entrySize      = 24
	flagsAt        = 28 // of the header: the byte order, and where the extensions are
	extensionsAt   = 32
	littleEndian   = 2
	extensionMagic = 0xeaa42174
	tagHWCaps      = 1 // cache_extension_tag_glibc_hwcaps

	oldMagic      = "ld.so-1.7.0"
	oldHeaderSize = 16
	oldEntrySize  = 12
)

// ErrFormat: the file is no cache that today's linker would read.
var ErrFormat = errors.New("no cache in glibc's format")

// Parse reads a cache. What the linker would not read is an error, and so is what no ldconfig writes; of extensions of that kind, only
// the entries that need them are lost.
//
// Of the extensions only the folders of glibc-hwcaps are read: the others are who wrote the file and, of late,
// settings for malloc and the like, which a cache may be without.
func Parse(file []byte) (Cache, error) {
	if len(file) > MostSize {
		return Cache{}, fmt.Errorf("%d bytes: want at most %d", len(file), MostSize)
	}
	start, ok := begin(file)
	if !ok || len(file)-start < headerSize {
		return Cache{}, ErrFormat
	}
	header := file[start:]
	if order := header[flagsAt]; order != 0 && order&3 != littleEndian {
		return Cache{}, fmt.Errorf("%w: byte order %d", ErrFormat, order&3)
	}
	count := uint64(binary.LittleEndian.Uint32(header[len(magic):]))
	if count > uint64(len(header)-headerSize)/entrySize {
		return Cache{}, fmt.Errorf("%w: %d entries in %d bytes", ErrFormat, count, len(file))
	}
	// One copy, of which every string is a part.
	r := reader{file: file, text: string(file), left: MostSize - int(count)*entrySize}
	c := Cache{Entries: make([]Entry, count)}
	for i := range c.Entries {
		raw := header[headerSize+i*entrySize:]
		c.Entries[i] = Entry{
			Flags:     int32(binary.LittleEndian.Uint32(raw)),
			Name:      r.str(start, raw[4:]),
			Path:      r.str(start, raw[8:]),
			OSVersion: binary.LittleEndian.Uint32(raw[12:]),
			HWCap:     binary.LittleEndian.Uint64(raw[16:]),
		}
		if r.err != nil {
			return Cache{}, fmt.Errorf("entry %d: %w", i, r.err)
		}
	}
	c.HWCaps = r.hwcaps(binary.LittleEndian.Uint32(header[extensionsAt:]))
	if r.err != nil { // the linker goes on without these folders
		c.HWCaps = nil
		c.Entries = slices.DeleteFunc(c.Entries, func(e Entry) bool { return e.HWCap&inHWCaps != 0 })
	}
	return c, nil
}

// begin finds the header. The format of libc5 may be before it, with the same libraries (ldconfig -c compat).
func begin(file []byte) (int, bool) {
	if bytes.HasPrefix(file, []byte(magic)) {
		return 0, true
	}
	if !bytes.HasPrefix(file, []byte(oldMagic)) || len(file) < oldHeaderSize {
		return 0, false
	}
	end := oldHeaderSize + oldEntrySize*uint64(binary.LittleEndian.Uint32(file[12:]))
	for _, align := range []uint64{8, 4} { // of a uint64 in a structure, on 64-bit machines and on i386
		at := (end + align - 1) &^ (align - 1)
		if at < uint64(len(file)) && bytes.HasPrefix(file[at:], []byte(magic)) {
			return int(at), true
		}
	}
	return 0, false
}

// reader takes strings out of a file. After an error all of them are empty.
type reader struct {
	file []byte
	text string // the same
	left int    // of MostSize, for strings
	err  error
}

// str is the string at the offset that raw begins with, counted from start.
func (r *reader) str(start int, raw []byte) string {
	at := uint64(start) + uint64(binary.LittleEndian.Uint32(raw))
	if r.err != nil || at >= uint64(len(r.text)) {
		r.fail("a string at %d of %d bytes", at, len(r.text))
		return ""
	}
	s, _, ended := strings.Cut(r.text[at:], "\x00")
	if r.left -= len(s) + 1; !ended || r.left < 0 {
		r.fail("strings without an end, or too many for %d bytes", MostSize)
		return ""
	}
	return s
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: "+format, append([]any{ErrFormat}, args...)...)
	}
}

// part is what is at an offset of the file.
func (r *reader) part(at, size uint64) []byte {
	if at > uint64(len(r.file)) || size > uint64(len(r.file))-at {
		r.fail("%d bytes at %d of %d", size, at, len(r.file))
		return nil
	}
	return r.file[at : at+size]
}

// hwcaps reads the names of the subfolders of glibc-hwcaps out of the extensions at an offset. A cache that was written before
// glibc 2.33 has none.
func (r *reader) hwcaps(offset uint32) (names []string) {
	if offset == 0 {
		return nil
	}
	const directory, section = 8, 16
	at := uint64(offset)
	head := r.part(at, directory)
	if r.err != nil || at%4 != 0 || binary.LittleEndian.Uint32(head) != extensionMagic {
		r.fail("none at %d", at)
		return nil
	}
	sections := r.part(at+directory, section*uint64(binary.LittleEndian.Uint32(head[4:])))
	for ; len(sections) > 0; sections = sections[section:] {
		data := r.part(uint64(binary.LittleEndian.Uint32(sections[8:])), uint64(binary.LittleEndian.Uint32(sections[12:])))
		if binary.LittleEndian.Uint32(sections) != tagHWCaps || len(data)%4 != 0 {
			continue
		}
		names = nil // the last section counts
		if len(data)/4 > mostHWCaps {
			r.fail("%d folders of glibc-hwcaps, want at most %d", len(data)/4, mostHWCaps)
		}
		// The linker counts from the beginning of the file. ldconfig -c compat of glibc 2.36 counts from the header, so that
		// the names are wrong and the linker takes none of these folders: with us it stays so.
		for ; len(data) > 0 && r.err == nil; data = data[4:] {
			names = append(names, r.str(0, data))
		}
	}
	return names
}
