// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memory is what the garbage collector tries to stay below. The agent lives on a third of it; the rest is for the moment in
// which all pods of the node are read.
const memory = 24 << 20

// boundMemory has the collector run early rather than let the heap double, unless the environment says otherwise.
func boundMemory() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memory)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	go func() {
		for {
			time.Sleep(shedEvery)
			shed()
		}
	}()
}

// shedEvery is how often pages are given back. To fetch those again that are needed takes a millisecond.
const shedEvery = 15 * time.Second

// shed gives back the pages of the program: Kubernetes' libraries register some thousand types at its start, for which they go
// through most of its file, and later whatever is done touches a little of it everywhere, and the kernel maps sixteen pages for
// each one. The pages are the file's, so what is needed again comes back from there. Without /proc it does nothing.
func shed() {
	self, err := os.Executable()
	if err != nil {
		return
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for _, r := range fileRanges(string(maps), self) {
		// Not by unix.Madvise, which wants memory of Go's.
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, r[0], r[1]-r[0], unix.MADV_DONTNEED)
	}
}

// fileRanges are the places at which a file is mapped and cannot be written to. Of those that can, pages are the process's own.
func fileRanges(maps, file string) (list [][2]uintptr) {
	for line := range strings.SplitSeq(maps, "\n") {
		// 00400000-01a59000 r-xp 00000000 fd:00 1234   /usr/bin/cgpu-agent
		f := strings.Fields(line)
		if len(f) != 6 || f[5] != file || len(f[1]) != 4 || f[1][0] != 'r' || f[1][1] != '-' || f[1][3] != 'p' {
			continue
		}
		from, to, _ := strings.Cut(f[0], "-")
		a, err1 := strconv.ParseUint(from, 16, 8*int(unsafe.Sizeof(uintptr(0))))
		b, err2 := strconv.ParseUint(to, 16, 8*int(unsafe.Sizeof(uintptr(0))))
		if err1 == nil && err2 == nil && a < b {
			list = append(list, [2]uintptr{uintptr(a), uintptr(b)})
		}
	}
	return list
}
