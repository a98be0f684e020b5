// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

// footing prints what a command finds: its umask, limits, processors, priority, nice value and policy, timer slack and class of I/O.
const footing = `umask; grep -v '^Max \(locks\|msgq\|resident\|nice\|realtime priority\)' /proc/self/limits; cat /proc/self/timerslack_ns
	grep ^Cpus_allowed: /proc/self/status; sed 's/.*) //' /proc/self/stat | cut -d' ' -f16,17,39; ionice -p $$ 2>/dev/null || :`

// hardship is what a caller can do to those that he starts.
func hardship() error {
	runtime.LockOSThread()
	unix.Umask(0o777)
	for resource, soft := range map[int]uint64{
		unix.RLIMIT_FSIZE: 100, unix.RLIMIT_CPU: 50, unix.RLIMIT_NOFILE: 20, unix.RLIMIT_CORE: 1 << 20, unix.RLIMIT_STACK: 1 << 20,
		unix.RLIMIT_AS: 1 << 40, unix.RLIMIT_DATA: 1 << 40, unix.RLIMIT_NPROC: 1000, unix.RLIMIT_MEMLOCK: 0, unix.RLIMIT_SIGPENDING: 10,
	} {
		var l syscall.Rlimit
		if err := syscall.Getrlimit(resource, &l); err != nil {
			return err
		}
		l.Cur = min(soft, l.Max)
		if mayRaise() { // as most of root can, and root in a container cannot
			l.Max = l.Cur + 1
		}
		if err := syscall.Setrlimit(resource, &l); err != nil {
			return fmt.Errorf("limit %d: %w", resource, err)
		}
	}
	var one unix.CPUSet
	one.Set(0)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	if _, _, e := unix.Syscall(unix.SYS_IOPRIO_SET, 1, 0, 3<<13); e != 0 {
		return e
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 3_000_000, 0, 0, 0); err != nil {
		return err
	}
	// Not SCHED_IDLE: on a busy machine the test itself would not come to its turn.
	return unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_BATCH, Nice: 7}, 0)
}

// mayRaise: this process may raise a hard limit.
func mayRaise() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	return unix.Capget(&header, &sets[0]) == nil && sets[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// inherits says what is still the caller's of this process.
func inherits() error {
	for _, l := range rootLimits {
		var got unix.Rlimit
		if err := unix.Getrlimit(l.resource, &got); err != nil || got.Cur != l.limit && (mayRaise() || got.Cur != min(l.limit, got.Max)) {
			return fmt.Errorf("limit %d: %+v, %v: want %d", l.resource, got, err, l.limit)
		}
	}
	if was := unix.Umask(0); was != Umask {
		return fmt.Errorf("umask %#o", was)
	}
	var bad error
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil || len(threads) < 2 {
		return fmt.Errorf("%d threads, %v: the test shows nothing", len(threads), err)
	}
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		attr, err := unix.SchedGetAttr(tid, 0)
		if err != nil || attr.Policy != unix.SCHED_NORMAL || attr.Nice != 0 {
			bad = fmt.Errorf("thread %d: %+v, %v", tid, attr, err)
		}
		var cpus unix.CPUSet
		if err := unix.SchedGetaffinity(tid, &cpus); err != nil || cpus.Count() < runtimeCPUs() {
			bad = fmt.Errorf("thread %d: %d processors, %v", tid, cpus.Count(), err)
		}
		if class, _, e := unix.Syscall(unix.SYS_IOPRIO_GET, 1, uintptr(tid), 0); e != 0 || class>>13 == 3 {
			bad = fmt.Errorf("thread %d: class of I/O %#x, %v", tid, class, e)
		}
		slack, err := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", tid))
		if err != nil || strings.TrimSpace(string(slack)) != strconv.Itoa(timerSlack) {
			bad = fmt.Errorf("thread %d: timer slack %s, %v", tid, slack, err)
		}
	}
	return bad
}

// runtimeCPUs is how many processors the test's parent had.
func runtimeCPUs() int {
	n, _ := strconv.Atoi(os.Getenv("BARE_CPUS"))
	return n
}

// TestResetInherited: whatever the caller has done to himself, this process works without, on all its threads; and the command has it
// again, to the last bit.
func TestResetInherited(t *testing.T) {
	testenv.NeedsRoot(t, "limits above the caller's")
	become := func(stage string, args ...string) error {
		t.Setenv("BARE_STAGE", stage)
		return syscall.Exec(args[0], args, os.Environ())
	}
	var err error
	switch os.Getenv("BARE_STAGE") {
	case "":
	case "bare":
		if err = hardship(); err == nil {
			err = become("", "/bin/sh", "-c", footing)
		}
		t.Fatal(err)
	case "hardship":
		if err = hardship(); err == nil {
			err = become("reset", os.Args[0], "-test.run", "^TestResetInherited$")
		}
		t.Fatal(err)
	case "reset":
		in := ResetInherited()
		if err = inherits(); err == nil {
			runtime.LockOSThread()
			if err = in.GiveBack(); err == nil {
				err = become("", "/bin/sh", "-c", footing)
			}
		}
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, stage := range []string{"bare", "hardship"} {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestResetInherited$")
		cmd.Env = append(os.Environ(), "BARE_STAGE="+stage, fmt.Sprint("BARE_CPUS=", runtime.NumCPU()))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", stage, err, out)
		}
		got[stage] = string(out)
	}
	if got["bare"] != got["hardship"] || !strings.Contains(got["bare"], "0777\n") || !strings.Contains(got["bare"], "3000000\n") {
		t.Errorf("the command has\n%s\nand without us\n%s", got["hardship"], got["bare"])
	}
}

// TestResetInheritedNothing: who asked for nothing gets nothing set.
func TestResetInheritedNothing(t *testing.T) {
	if err := (Inherited{}).GiveBack(); err != nil {
		t.Error(err)
	}
}
