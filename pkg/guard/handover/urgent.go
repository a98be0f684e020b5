// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// While the container's calls wait, each thread that has to run, if only to end, would wait for its turn on a busy machine. So from the
// moment that the guard is at rest until the program that goes on serves, its threads run before ordinary ones (SCHED_RR). A guard has no
// right to that, and must not: NVIDIA's driver gives more to who has it. The child by which the program was tried keeps that right, since
// it makes no call for anybody. It is of the program that goes on: who makes a guard urgent is who makes it ordinary again.

const (
	urgentWord = "urgent " // and the guard's pid: what the child is asked to make so
	urgentTime = 100 * time.Millisecond
	// urgentBytes is how large the state of a guard may be that is made urgent: some tenths of a second of one processor. What a container
	// holds beyond that costs its own calls time, not its neighbours'.
	urgentBytes = 1 << 20
)

// MakeUrgent has the child make this process' threads urgent. Of a child that is not urgent itself, because it may not be or is of a program
// that knows nothing of this, it is not asked: calls would wait for it.
func (t *Trial) MakeUrgent() error {
	child, err := unix.SchedGetAttr(t.PID(), 0)
	if err != nil || child.Policy != unix.SCHED_RR || t.size > urgentBytes {
		return nil
	}
	return t.ask(urgentWord+strconv.Itoa(os.Getpid()), urgentTime)
}

// serveUrgent is the child's part.
func serveUrgent(request string) error {
	pid, err := strconv.Atoi(strings.TrimPrefix(request, urgentWord))
	if err != nil || pid != os.Getppid() {
		return errors.New("asked by another process than its parent")
	}
	return schedule(pid, unix.SCHED_NORMAL, unix.SCHED_RR)
}

// MakeOrdinary undoes MakeUrgent.
func MakeOrdinary() error { return schedule(os.Getpid(), unix.SCHED_RR, unix.SCHED_NORMAL) }

// schedule gives all threads of a process that have one policy another one, also those that begin meanwhile: who begins has the policy of
// who begins it. Their nice values stay.
func schedule(pid int, from, to uint32) error {
	done := map[string]bool{}
	for more := true; more; {
		more = false
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return err
		}
		for _, thread := range threads {
			if done[thread.Name()] {
				continue
			}
			done[thread.Name()], more = true, true
			if err := scheduleThread(thread.Name(), from, to); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
	return nil
}

func scheduleThread(name string, from, to uint32) error {
	tid, err := strconv.Atoi(name)
	if err != nil {
		return err
	}
	has, err := unix.SchedGetAttr(tid, 0)
	if err != nil || has.Policy != from {
		return err
	}
	var priority int32
	if to == unix.SCHED_RR {
		priority = 1
	}
	// Not sched_setattr(2), by which the nice value would have to be set, too.
	if _, _, e := unix.Syscall(unix.SYS_SCHED_SETSCHEDULER, uintptr(tid), uintptr(to), uintptr(unsafe.Pointer(&priority))); e != 0 {
		return os.NewSyscallError("sched_setscheduler", e)
	}
	return nil
}
