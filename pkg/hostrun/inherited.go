// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Inherited is what a process has of whoever started it and what can slow it, cut its writes off or end it: umask, resource
// limits, scheduling class, affinity, timer slack. sudo passes all of it on. A process that takes the node's locks does so
// without: `chrt -i 0 taskset -c 0 sudo cgpu run` beside a busy loop held the ledger's lock for 2.5 s, and under `prlimit
// --fsize=100` a record could be stored but not taken back.
type Inherited struct {
	back []func() error // each gives one thing back
}

// rootLimits are those of a process that works as root: what ends it or cuts its writes off is lifted, and it leaves no image
// of its memory behind. cgpu run's guard has them too: with too few descriptors it could not follow the files of the command.
var rootLimits = []struct {
	resource int
	limit    uint64
}{
	{unix.RLIMIT_NOFILE, descriptors},
	{unix.RLIMIT_CORE, 0},
	{unix.RLIMIT_FSIZE, unix.RLIM_INFINITY},
	{unix.RLIMIT_CPU, unix.RLIM_INFINITY},
	{unix.RLIMIT_AS, unix.RLIM_INFINITY},
	{unix.RLIMIT_DATA, unix.RLIM_INFINITY},
	{unix.RLIMIT_NPROC, unix.RLIM_INFINITY},
	{unix.RLIMIT_MEMLOCK, unix.RLIM_INFINITY},
	{unix.RLIMIT_RTTIME, unix.RLIM_INFINITY},
	{unix.RLIMIT_STACK, 8 << 20},      // a quarter of it is what execve takes of arguments
	{unix.RLIMIT_SIGPENDING, 1 << 14}, // Go's runtime makes timers of threads
}

const (
	descriptors = 1 << 19 // as systemd's for services
	timerSlack  = 50_000  // nanoseconds, what the kernel gives to init. An hour of it would let a guard look late at what it must not miss
)

// Umask is for root's files. The caller's could make a ledger that guards, which have no CAP_DAC_OVERRIDE, cannot read.
const Umask = 0o022

// ResetInherited puts this process, all its threads and what they start on a footing that the caller has no say in. What is not allowed,
// in a container say, is left out. The process goes on to be safe against its end at any moment: its caller can still close
// the terminal.
func ResetInherited() Inherited {
	var in Inherited
	callers := unix.Umask(Umask)
	in.keep(func() error { unix.Umask(callers); return nil })
	for _, l := range rootLimits {
		in.limit(l.resource, l.limit)
	}
	in.schedule()
	in.everywhere()
	in.promptly()
	return in
}

// GiveBack makes it again what it was, for the calling thread, which must be locked and is about to become the caller's command.
func (in Inherited) GiveBack() error {
	for _, back := range in.back {
		if err := back(); err != nil {
			return fmt.Errorf("run: give the caller's limits back: %w", err)
		}
	}
	return nil
}

func (in *Inherited) keep(back func() error) { in.back = append(in.back, back) }

// limit sets the soft limit, and raises a hard one that is lower; one that is higher stays, as not everybody could raise it again.
func (in *Inherited) limit(resource int, limit uint64) {
	var old unix.Rlimit
	if prlimit(resource, nil, &old) != nil {
		return
	}
	if prlimit(resource, &unix.Rlimit{Cur: limit, Max: max(limit, old.Max)}, nil) != nil &&
		prlimit(resource, &unix.Rlimit{Cur: min(limit, old.Max), Max: old.Max}, nil) != nil {
		return
	}
	in.keep(func() error { return prlimit(resource, &old, nil) })
}

// prlimit is the system call itself: by unix.Setrlimit Go's runtime forgets the soft limit of descriptors that it found at the
// start and raised, and gives back at each exec.
func prlimit(resource int, set, old *unix.Rlimit) error {
	_, _, e := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, uintptr(resource), uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(old)), 0, 0)
	if e != 0 {
		return fmt.Errorf("limit %d: %w", resource, e)
	}
	return nil
}

// schedule makes the policy the ordinary one, with nice 0, and takes a thread out of the class whose reads wait for everybody else's.
func (in *Inherited) schedule() {
	old, err := unix.SchedGetAttr(0, 0)
	if err == nil && (old.Policy != unix.SCHED_NORMAL || old.Nice != 0 || old.Flags != 0) {
		eachThread(func(tid int) {
			_ = unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
		})
		in.keep(func() error {
			err := unix.SchedSetAttr(0, old, 0)
			if errors.Is(err, unix.EPERM) { // a negative nice value, without CAP_SYS_NICE
				return nil
			}
			return err
		})
	}
	const whoProcess, classIdle, classShift = 1, 3, 13 // include/uapi/linux/ioprio.h
	class, _, e := unix.Syscall(unix.SYS_IOPRIO_GET, whoProcess, 0, 0)
	if e != 0 || class>>classShift != classIdle {
		return
	}
	eachThread(func(tid int) { _, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, whoProcess, uintptr(tid), 0) })
	in.keep(func() error {
		if _, _, e := unix.Syscall(unix.SYS_IOPRIO_SET, whoProcess, 0, class); e != 0 {
			return fmt.Errorf("ioprio: %w", e)
		}
		return nil
	})
}

// everywhere lets the process run on every processor; the kernel leaves out those that its cpuset has not.
func (in *Inherited) everywhere() {
	var old, all, now unix.CPUSet
	if unix.SchedGetaffinity(0, &old) != nil {
		return // more processors than fit
	}
	for i := range all {
		all[i] = ^all[i]
	}
	eachThread(func(tid int) { _ = unix.SchedSetaffinity(tid, &all) })
	if unix.SchedGetaffinity(0, &now) == nil && now != old {
		in.keep(func() error { return unix.SchedSetaffinity(0, &old) })
	}
}

// promptly makes timers as exact as they usually are.
func (in *Inherited) promptly() {
	old, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil || old <= timerSlack {
		return
	}
	eachThread(func(tid int) {
		_ = os.WriteFile("/proc/"+strconv.Itoa(tid)+"/timerslack_ns", []byte(strconv.Itoa(timerSlack)), 0)
	})
	in.keep(func() error { return unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(old), 0, 0, 0) })
}

// eachThread calls f with the number of each thread of this process. One that is made meanwhile has what its maker had, so the list is
// read until nobody is new in it.
func eachThread(f func(tid int)) {
	seen := map[string]bool{}
	for fresh := true; fresh; {
		fresh = false
		threads, _ := os.ReadDir("/proc/self/task")
		for _, t := range threads {
			tid, err := strconv.Atoi(t.Name())
			if err != nil || seen[t.Name()] {
				continue
			}
			seen[t.Name()], fresh = true, true
			f(tid)
		}
	}
}
