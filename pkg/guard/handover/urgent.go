// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// While the container's calls wait, each thread that has to run, if only to end, would wait for its turn on a busy machine. So as long as
// nobody takes up calls the guard's threads are urgent: they have the least nice value. A guard has no right to that, and must not:
// NVIDIA's driver gives more to who has it. The child by which the program is tried keeps that right, since it makes no call for anybody.
// It is of the program that goes on: who makes a guard urgent is who makes it ordinary again.
//
// Not SCHED_RR, though it would come before whatever else: threads that begin under it have a timer slack of 0 for good, which nobody but
// themselves, or who has CAP_SYS_NICE, can change, and a guard that fails to give it up has a processor for itself.

const (
	urgentNice = -20
	urgentWord = "urgent " // and the guard's pid: what the child is asked to make so
	urgentTime = 100 * time.Millisecond
	// urgentBytes is how large the state of a guard may be that is made urgent: some tenths of a second of one processor. What a container
	// holds beyond that costs its own calls time, not its neighbours'.
	urgentBytes = 1 << 20
)

// MakeUrgent has the child make this process' threads urgent, until ordinary. expected is how many bytes the state will have, about. A
// child that is not urgent itself, because it may not be or is of a program that knows nothing of this, is not asked: calls would wait for
// it.
func (t *Trial) MakeUrgent(expected int) (ordinary func(), err error) {
	if nice, err := niceOf(t.PID()); err != nil || nice != urgentNice || max(t.size, expected) > urgentBytes {
		return func() {}, nil
	}
	return func() { _ = renice(os.Getpid(), t.nice) }, t.ask(urgentWord+strconv.Itoa(os.Getpid()), urgentTime)
}

// Nice is this process' nice value, while it is not urgent.
func (t *Trial) Nice() *int { return &t.nice }

// MakeOrdinary is for the program that goes on, once it serves.
func (p *Process) MakeOrdinary() error {
	if p.Nice == nil { // the program before knew nothing of this
		return nil
	}
	return renice(os.Getpid(), *p.Nice)
}

// serveUrgent is the child's part.
func serveUrgent(request string) error {
	pid, err := strconv.Atoi(strings.TrimPrefix(request, urgentWord))
	if err != nil || pid != os.Getppid() {
		return errors.New("asked by another process than its parent")
	}
	return renice(pid, urgentNice)
}

// niceOf is a process' nice value. The kernel's call has no negative numbers.
func niceOf(pid int) (int, error) {
	n, err := unix.Getpriority(unix.PRIO_PROCESS, pid)
	return 20 - n, err
}

// renice gives all threads of a process a nice value, also those that begin meanwhile: who begins has that of who begins it, and is seen a
// moment later. So it looks until twice there is nobody new, but where calls wait for it: who is missed then is only slower.
func renice(pid, nice int) error {
	done := map[string]bool{}
	looks := 2
	if nice == urgentNice {
		looks = 1
	}
	for quiet := 0; quiet < looks; quiet++ {
		if quiet > 0 {
			time.Sleep(time.Millisecond)
		}
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return err
		}
		for _, thread := range threads {
			if done[thread.Name()] {
				continue
			}
			done[thread.Name()], quiet = true, -1
			tid, err := strconv.Atoi(thread.Name())
			if err == nil {
				err = unix.Setpriority(unix.PRIO_PROCESS, tid, nice)
			}
			if err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("nice value %d: %w", nice, err)
			}
		}
	}
	return nil
}
