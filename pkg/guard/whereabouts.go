// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// whereabouts say where a thread is.
type whereabouts int

const (
	threadUnseen  whereabouts = iota // it runs, or waits for a processor
	threadInside                     // it sleeps in the call that it was let make
	threadOutside                    // it has left it, or has ended
)

func (p *pendingRoot) whereabouts() whereabouts {
	return threadIn(p.task.tid, p.args, &p.began, cpuTime.leftRootAlloc)
}

// threadIn tells whether a thread is inside the call that it was allowed to make, by the registers. What it had computed at the first look
// is kept in began; left says whether it has left the call when it has computed so much since.
func threadIn(tid int, args [3]uint64, began **cpuTime, left func(cpuTime) bool) whereabouts {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/syscall")
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH):
		return threadOutside
	case err != nil, bytes.HasPrefix(b, []byte("running")):
		// On its way in or out, or far away. Only what it computes tells.
		now, ok := cpuTimeOf(tid)
		switch {
		case !ok:
		case *began == nil:
			*began = &now
		case now.user < (*began).user || now.system < (*began).system: // another thread of that number
			return threadOutside
		case left(now.since(**began)):
			return threadOutside
		}
		return threadUnseen
	case bytes.HasPrefix(b, fmt.Appendf(nil, "%d %#x %#x %#x ", unix.SYS_IOCTL, args[0], args[1], args[2])):
		return threadInside
	}
	return threadOutside
}

// isLeaving reports that a thread is stopped or ends, both of which are on the way out of a call; its registers still tell of that.
func isLeaving(tid int) bool {
	fields := statOf(tid)
	if len(fields) < 7 {
		return false
	}
	const ending = 0x4 | 0x8 // PF_EXITING, PF_POSTCOREDUMP (include/linux/sched.h); flags are field 9 (proc_pid_stat(5))
	flags, err := strconv.ParseUint(string(fields[6]), 10, 64)
	return bytes.ContainsAny(fields[0], "TtXZ") || err == nil && flags&ending != 0
}

// statOf is /proc/TID/stat from the third field, the state, on: what is before is a number, and a name, in parentheses, that can have
// anything in it.
func statOf(tid int) [][]byte {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/stat")
	if err != nil {
		return nil
	}
	return bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
}

// userTicks in user mode are enough to say that a thread is not in the kernel.
const userTicks = 10

// cpuTime is what a thread has used, in ticks of 10 ms.
type cpuTime struct{ user, system uint64 }

func (t cpuTime) since(began cpuTime) cpuTime {
	return cpuTime{t.user - began.user, t.system - began.system}
}

// leftRootAlloc reports that a thread which has used so much since its root alloc was let through has left that: in user mode, or in the
// kernel, where no call of RM's computes for so long but to make memory. The kernel splits its exact sum by samples.
func (t cpuTime) leftRootAlloc() bool {
	return t.user >= userTicks && t.user > t.system || t.system >= uint64(stallTime/(10*time.Millisecond))
}

// leftMemoryCall is the same of RM_ALLOC_MEMORY, which computes in the kernel for as long as it clears or pins memory. Who polls by system
// calls (sched_yield, as CUDA does) has left it, and has little time in user mode, too.
func (t cpuTime) leftMemoryCall() bool { return t.user >= userTicks && 16*t.user > t.system }

func cpuTimeOf(tid int) (t cpuTime, ok bool) {
	fields := statOf(tid)
	if len(fields) < 13 {
		return t, false
	}
	var err error
	t.user, err = strconv.ParseUint(string(fields[11]), 10, 64) // utime, field 14; stime is the next
	if err == nil {
		t.system, err = strconv.ParseUint(string(fields[12]), 10, 64)
	}
	return t, err == nil
}
