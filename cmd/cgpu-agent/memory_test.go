// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"
)

func TestFileRanges(t *testing.T) {
	maps := `00400000-01a59000 r-xp 00000000 fd:00 12 /usr/bin/cgpu-agent
01a59000-03439000 r--p 01659000 fd:00 12 /usr/bin/cgpu-agent
03439000-034cd000 rw-p 03039000 fd:00 12 /usr/bin/cgpu-agent
034cd000-05518000 rw-p 00000000 00:00 0
05600000-05601000 r--s 00000000 fd:00 12 /usr/bin/cgpu-agent
05700000-05701000 r--p 00000000 fd:00 13 /usr/bin/cgpu-agent (deleted)
7f0000000000-7f0000001000 r-xp 00000000 fd:00 14 /lib/other
zz-1 r--p 0 fd:00 12 /usr/bin/cgpu-agent
`
	want := [][2]uintptr{{0x400000, 0x1a59000}, {0x1a59000, 0x3439000}}
	if got := fileRanges(maps, "/usr/bin/cgpu-agent"); !slices.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}

// What was given back comes back.
func TestShed(t *testing.T) {
	for range 3 {
		shed()
		TestFileRanges(t)
	}
}
