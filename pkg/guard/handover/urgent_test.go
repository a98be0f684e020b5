// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// policies says how many threads of this process have a policy.
func policies(t *testing.T, pid int) map[uint32]int {
	t.Helper()
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		t.Fatal(err)
	}
	n := map[uint32]int{}
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		if attr, err := unix.SchedGetAttr(tid, 0); err == nil {
			n[attr.Policy]++
		}
	}
	return n
}

// TestUrgent: the child makes all threads of the guard urgent, if it is itself, and whoever begins then is made ordinary again, too, with the
// nice value that it had.
func TestUrgent(t *testing.T) {
	testenv.NeedsRoot(t, "a process that runs before others")
	var nice [2]int
	nice[0], _ = unix.Getpriority(unix.PRIO_PROCESS, 0)
	trial, err := Try(open(t, "/proc/self/exe"))
	if err != nil {
		t.Fatal(err)
	}
	defer trial.Close()
	if err := trial.MakeUrgent(); err != nil || policies(t, os.Getpid())[unix.SCHED_RR] != 0 {
		t.Errorf("by a child that has tried nothing: %v, %v", err, policies(t, os.Getpid()))
	}
	if err := tried(t, trial); err != nil {
		t.Fatal(err)
	}
	may := policies(t, trial.PID())[unix.SCHED_RR] > 0 // not where the cgroup has no realtime
	t.Logf("processes may be urgent: %v", may)
	size := trial.size
	trial.size = urgentBytes + 1
	if err := trial.MakeUrgent(); err != nil || policies(t, os.Getpid())[unix.SCHED_RR] != 0 {
		t.Errorf("with a large state: %v, %v", err, policies(t, os.Getpid()))
	}
	trial.size = size
	if err := trial.MakeUrgent(); err != nil || may && policies(t, os.Getpid())[unix.SCHED_NORMAL] != 0 {
		t.Errorf("%v, %v", err, policies(t, os.Getpid()))
	}
	stop := make(chan struct{})
	for range 4 { // threads of their own, which begin now
		go func() {
			runtime.LockOSThread()
			<-stop
		}()
	}
	if err := MakeOrdinary(); err != nil || policies(t, os.Getpid())[unix.SCHED_RR] != 0 {
		t.Errorf("%v, %v", err, policies(t, os.Getpid()))
	}
	close(stop)
	nice[1], _ = unix.Getpriority(unix.PRIO_PROCESS, 0)
	if nice[0] != nice[1] {
		t.Errorf("nice values %v", nice)
	}
	if err := tried(t, trial); err != nil {
		t.Errorf("once more: %v", err)
	}
}

// TestUrgentHostile: nobody but its parent is made urgent by the child.
func TestUrgentHostile(t *testing.T) {
	for _, request := range []string{"urgent", "urgent ", "urgent 0", "urgent 1", "urgent -1", "urgent " + strconv.Itoa(os.Getpid()),
		"urgent x", "urgent 99999999999999999999"} {
		if os.Getppid() == 1 && request == "urgent 1" {
			continue
		}
		if err := serveUrgent(request); err == nil || !strings.Contains(err.Error(), "than its parent") {
			t.Errorf("%q: %v", request, err)
		}
	}
}
