// SPDX-License-Identifier: Apache-2.0

// Package proc tells from /proc whether processes and their threads live.
package proc

import (
	"bytes"
	"errors"
	"iter"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Threads lists the threads of a process, the first one too when it has ended before others.
func Threads(tgid int) iter.Seq[int] {
	return func(yield func(int) bool) {
		dir, err := os.Open("/proc/" + strconv.Itoa(tgid) + "/task")
		if err != nil {
			return
		}
		defer dir.Close()
		names, _ := dir.Readdirnames(-1)
		for _, name := range names {
			if tid, err := strconv.Atoi(name); err == nil && !yield(tid) {
				return
			}
		}
	}
}

// Exiting reports that a process has ended, or that all its threads are about to, so that it has lost its descriptors or soon will.
func Exiting(tgid int) bool {
	if !leaving(tgid) {
		return false
	}
	for tid := range Threads(tgid) { // the first thread can end long before others
		if tid != tgid && !leaving(tid) {
			return false
		}
	}
	return true
}

// leaving is Exiting of a thread: PF_EXITING in the ninth field of /proc/TID/stat. The second one is a name, in which there may be
// anything.
func leaving(tid int) bool {
	const pfExiting = 4
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/stat")
	if err != nil { // gone, and not only hidden from the rescuer (hidepid)
		return errors.Is(unix.Kill(tid, 0), unix.ESRCH)
	}
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 7 {
		return false
	}
	flags, err := strconv.ParseUint(string(fields[6]), 10, 32)
	return err == nil && flags&pfExiting != 0
}
