// SPDX-License-Identifier: Apache-2.0

package ldcache

import (
	"encoding/binary"
	"strings"
)

// Encode writes a cache in the format of struct cache_file_new alone, as ldconfig does since glibc 2.32, and as every linker
// since glibc 2.2 reads it.
func (c Cache) Encode() []byte {
	le := binary.LittleEndian
	base := headerSize + entrySize*len(c.Entries) // of the strings
	var text []byte
	add := func(s string) (at uint32) {
		at = uint32(base + len(text))
		text = append(append(text, s...), 0)
		return at
	}
	file := make([]byte, headerSize, base)
	copy(file, magic)
	file[flagsAt] = littleEndian
	le.PutUint32(file[len(magic):], uint32(len(c.Entries)))
	for _, e := range c.Entries {
		value := add(e.Path)
		key := value + uint32(len(e.Path)-len(e.Name)) // mostly the end of the path
		if !strings.HasSuffix(e.Path, e.Name) {
			key = add(e.Name)
		}
		file = le.AppendUint32(file, uint32(e.Flags))
		file = le.AppendUint32(file, key)
		file = le.AppendUint32(file, value)
		file = le.AppendUint32(file, e.OSVersion)
		file = le.AppendUint64(file, e.HWCap)
	}
	var hwcaps []byte
	for _, name := range c.HWCaps {
		hwcaps = le.AppendUint32(hwcaps, add(name))
	}
	le.PutUint32(file[len(magic)+4:], uint32(len(text)))
	file = append(file, text...)
	if len(hwcaps) == 0 {
		return file
	}
	for len(file)%4 != 0 {
		file = append(file, 0)
	}
	le.PutUint32(file[extensionsAt:], uint32(len(file)))
	for _, v := range []uint32{extensionMagic, 1, tagHWCaps, 0, uint32(len(file)) + 24, uint32(len(hwcaps))} {
		file = le.AppendUint32(file, v)
	}
	return append(file, hwcaps...)
}
