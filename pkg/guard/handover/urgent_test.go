// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// nices are the nice values of this process' threads.
func nices(t *testing.T) (list []int) {
	t.Helper()
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		if nice, err := niceOf(tid); err == nil && !slices.Contains(list, nice) {
			list = append(list, nice)
		}
	}
	return list
}

// TestUrgent: the child makes all threads of the guard urgent, if it is itself. Afterwards all have the nice value that they had, also
// those that have begun meanwhile.
func TestUrgent(t *testing.T) {
	testenv.NeedsRoot(t, "a process that runs before others")
	before := nices(t)
	if len(before) != 1 {
		t.Fatalf("nice values %v", before)
	}
	trial, err := Try(open(t, "/proc/self/exe"))
	if err != nil {
		t.Fatal(err)
	}
	defer trial.Close()
	same := func(when string, want int) {
		t.Helper()
		if now := nices(t); len(now) != 1 || now[0] != want {
			t.Errorf("%s: nice values %v, want %d", when, now, want)
		}
	}
	ask := func(expected int) (ordinary func()) {
		t.Helper()
		ordinary, err := trial.MakeUrgent(expected)
		if err != nil {
			t.Error(err)
		}
		return ordinary
	}
	want := before[0]
	if nice, _ := niceOf(trial.PID()); nice == urgentNice { // as root may do almost everywhere
		want = urgentNice
	}
	ask(urgentBytes + 1)
	same("with a state that will be large", before[0])
	ordinary := ask(urgentBytes)
	same("by a child that has tried nothing", want)
	ordinary()
	if err := tried(t, trial); err != nil {
		t.Fatal(err)
	}
	size := trial.size
	trial.size = urgentBytes + 1
	ask(0)
	same("with a large state", before[0])
	trial.size = size
	ordinary = ask(0)
	same("while it is urgent", want)
	stop := make(chan struct{})
	for range 4 { // threads of their own, which begin now
		go func() {
			runtime.LockOSThread()
			<-stop
		}()
	}
	ordinary()
	same("afterwards", before[0])
	close(stop)
	ask(0)
	if err := (&Process{}).MakeOrdinary(); err != nil { // a state of a program that was never urgent
		t.Error(err)
	}
	same("still", want)
	if err := (&Process{Nice: trial.Nice()}).MakeOrdinary(); err != nil {
		t.Error(err)
	}
	same("by the program that goes on", before[0])
	if err := tried(t, trial); err != nil {
		t.Errorf("once more: %v", err)
	}
}

// TestUrgentHostile: nobody but its parent is made urgent by the child.
func TestUrgentHostile(t *testing.T) {
	for _, request := range []string{"urgent", "urgent ", "urgent 0", "urgent -1", "urgent " + strconv.Itoa(os.Getpid()), "urgent x",
		"urgent 99999999999999999999"} {
		if err := serveUrgent(request); err == nil || !strings.Contains(err.Error(), "than its parent") {
			t.Errorf("%q: %v", request, err)
		}
	}
}
