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
		case left(now.since(**began)):
			return threadOutside
		}
		return threadUnseen
	case bytes.HasPrefix(b, fmt.Appendf(nil, "%d %#x %#x %#x ", unix.SYS_IOCTL, args[0], args[1], args[2])):
		return threadInside
	}
	return threadOutside
}

// cpuTime is what a thread has used, in ticks of 10 ms.
type cpuTime struct{ user, system uint64 }

func (t cpuTime) since(began cpuTime) cpuTime {
	return cpuTime{t.user - began.user, t.system - began.system}
}

// leftCall reports that a thread which has used so much since its call was let through has left the call: in user mode. The kernel splits
// its exact sum by samples.
func (t cpuTime) leftCall() bool {
	const userTicks = 10
	return t.user >= userTicks && t.user > t.system
}

// leftRootAlloc is leftCall of a call that does not compute for long in the kernel. One that clears or pins memory does.
func (t cpuTime) leftRootAlloc() bool {
	return t.leftCall() || t.system >= uint64(stallTime/(10*time.Millisecond))
}

func cpuTimeOf(tid int) (t cpuTime, ok bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/stat")
	if err != nil {
		return t, false
	}
	// The name, in parentheses, can have anything in it. utime and stime are fields 14 and 15, the state behind the name is 3.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 13 {
		return t, false
	}
	t.user, err = strconv.ParseUint(string(fields[11]), 10, 64)
	if err == nil {
		t.system, err = strconv.ParseUint(string(fields[12]), 10, 64)
	}
	return t, err == nil
}
