// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

func testTasks() (*taskTable, *int) {
	seen := new(int)
	return newTaskTable(func(*process) { *seen++ }), seen
}

func sleeper(t *testing.T, flags uintptr) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "100")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	if err := cmd.Start(); err != nil {
		testenv.Lacks(t, "%v", err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

func TestTasks(t *testing.T) {
	for _, old := range []bool{false, true} { // true: a kernel without PIDFD_THREAD
		name := map[bool]string{false: "thread pidfd", true: "process pidfd"}[old]
		t.Run(name, func(t *testing.T) {
			table, seen := testTasks()
			table.noThreadPidfd = old
			self, err := table.acquire(os.Getpid())
			if err != nil {
				t.Fatal(err)
			}
			tid, stop := make(chan int), make(chan struct{})
			ended := make(chan struct{})
			var thread func()
			thread = func() {
				runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
				if unix.Gettid() == os.Getpid() {
					go thread() // on another one: the first thread would not end
					<-ended
					runtime.UnlockOSThread()
					return
				}
				tid <- unix.Gettid()
				<-stop
				close(ended)
			}
			go thread()
			id := <-tid
			task, err := table.acquire(id)
			if err != nil {
				t.Fatal(err)
			}
			if again, _ := table.acquire(id); again != task {
				t.Error("a thread has two records")
			}
			if task.proc != self.proc || *seen != 1 || task.proc.tgid != os.Getpid() {
				t.Errorf("two threads of one process: %+v, %+v, %d seen", task.proc, self.proc, *seen)
			}
			if exact := !old && !table.noThreadPidfd; task.exact != exact {
				t.Errorf("exact %v", task.exact)
			}
			fd, err := task.getFile(0)
			if err != nil {
				t.Fatal(err)
			}
			unix.Close(fd)
			if _, err := task.getFile(1 << 20); !errors.Is(err, unix.EBADF) {
				t.Errorf("a descriptor that is not open: %v", err)
			}
			close(stop)
			<-ended
			for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
				if unix.Tgkill(os.Getpid(), id, 0) == unix.ESRCH {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("the thread does not end")
				}
			}
			if task.exact {
				if _, err := task.getFile(0); !errors.Is(err, unix.ESRCH) {
					t.Errorf("a dead thread: %v", err) // else another thread with its number would be taken for it
				}
				table.dropTask(task)
			}
			if _, err := table.acquire(id); err == nil {
				t.Error("a dead thread has a record")
			}
			if table.tasks[id] != nil {
				t.Error("the record of a dead thread is kept")
			}
		})
	}
}

// TestReusedNumber: without PIDFD_THREAD a number that went to another process gets a new record.
func TestReusedNumber(t *testing.T) {
	table, _ := testTasks()
	table.noThreadPidfd = true
	a, b := sleeper(t, 0).Process.Pid, sleeper(t, 0).Process.Pid
	task, err := table.acquire(a)
	if err != nil {
		t.Fatal(err)
	}
	delete(table.tasks, a)
	task.tid = b // as if a's thread had been b's number before
	table.tasks[b] = task
	n, err := table.acquire(b)
	if err != nil || n == task || n.proc.tgid != b {
		t.Errorf("%+v, %v", n, err)
	}
}

func TestProcessNumbers(t *testing.T) {
	table, seen := testTasks()
	inner := sleeper(t, unix.CLONE_NEWPID)
	outer := sleeper(t, 0)
	for _, cmd := range []*exec.Cmd{inner, outer} {
		if _, err := table.acquire(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	}
	p := table.byNSPid(1)
	if p == nil || p.tgid != inner.Process.Pid || p.nspid != 1 {
		t.Errorf("%+v", p)
	}
	q := table.byHostPid(outer.Process.Pid)
	if q == nil || q.nspid != q.tgid || table.byHostPid(1<<22+1) != nil || table.byNSPid(1<<22+1) != nil {
		t.Errorf("%+v", q)
	}
	if *seen != 2 || len(table.processes()) != 2 {
		t.Errorf("%d processes", *seen)
	}
	table.dropProcess(p)
	if table.byNSPid(1) != nil || table.tasks[inner.Process.Pid] != nil || len(table.processes()) != 1 {
		t.Error("the process is still there")
	}
	table.dropProcess(p) // twice must not close a descriptor that is someone else's by now
}

// TestEvict: of more threads than are remembered, the one whose last call is the longest ago is forgotten, without a look at the others;
// but none that somebody is at, and none for which a result is kept.
func TestEvict(t *testing.T) {
	table, _ := testTasks()
	proc := &process{tgid: 1, pidfd: -1, tasks: map[*task]bool{}}
	add := func(tid int) *task {
		task := &task{tid: tid, proc: proc, pidfd: -1}
		table.tasks[tid], task.at = task, table.used.PushFront(task)
		proc.tasks[task] = true
		return task
	}
	for tid := range maxTasks {
		add(-1 - tid)
	}
	table.tasks[-1].users.Add(1)
	table.tasks[-2].saved, table.tasks[-2].exact = &savedCall{fd: -1}, true
	table.tasks[-3].mu.Lock()
	table.used.MoveToFront(table.tasks[-4].at) // it has called again
	task, err := table.acquire(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if len(table.tasks) != maxTasks || table.used.Len() != maxTasks || len(proc.tasks) != maxTasks-1 || table.tasks[-5] != nil {
		t.Errorf("%d threads, %d in order, %d of the process; -5: %v", len(table.tasks), table.used.Len(), len(proc.tasks), table.tasks[-5])
	}
	for _, tid := range []int{-1, -2, -3, -4, -6} {
		if table.tasks[tid] == nil {
			t.Errorf("%d is forgotten", tid)
		}
	}
	// One that is forgotten while somebody is at it keeps its descriptor until then.
	table.dropTask(task)
	fd, err := task.getFile(0)
	if err != nil {
		t.Errorf("forgotten while in use: %v", err)
	}
	unix.Close(fd)
	pidfd := task.pidfd
	task.release()
	if _, err := unix.FcntlInt(uintptr(pidfd), unix.F_GETFD, 0); task.exact && err != unix.EBADF {
		t.Errorf("the descriptor of a forgotten thread: %v", err)
	}
}

// TestEvictDead: a result that nobody can come for any more keeps no thread from being forgotten.
func TestEvictDead(t *testing.T) {
	for _, exact := range []bool{true, false} {
		table, _ := testTasks()
		p := startIdle(t)
		fd, err := unix.PidfdOpen(p.pid(), 0)
		if err != nil {
			t.Fatal(err)
		}
		proc := &process{tgid: p.pid(), pidfd: -1, tasks: map[*task]bool{}}
		task := &task{tid: p.pid(), proc: proc, pidfd: fd, exact: exact, saved: &savedCall{fd: -1}}
		table.tasks[task.tid], task.at = task, table.used.PushFront(task)
		if table.evict(); table.tasks[task.tid] == nil {
			t.Error("a living thread's result is dropped")
		}
		_ = p.Process.Kill()
		_ = p.Wait()
		if table.evict(); table.tasks[task.tid] != nil || task.saved != nil {
			t.Error("a dead thread is remembered for its result")
		}
	}
}

// TestSavedBound: results are bounded by number, too, however small.
func TestSavedBound(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	c := newFakeCall(t, g, fakeControl)
	c.call.Outer = fakeFree(fakeMemory)
	c.before = [][]byte{c.call.Outer}
	kept := 0
	for range 2 * maxSaved / savedCost {
		c.task = &task{}
		if g.saveResult(&c.trappedCall, replyDone); c.task.saved != nil {
			kept++
		}
	}
	if kept < maxSaved/savedCost/2 || kept > maxSaved/savedCost {
		t.Errorf("%d results are kept", kept)
	}
}

// TestProcessBound: those that live and have made calls are bounded.
func TestProcessBound(t *testing.T) {
	table, _ := testTasks()
	for i := range maxProcesses {
		table.procs[-1-i] = &process{}
	}
	if _, err := table.acquire(os.Getpid()); !errors.Is(err, errTooManyProcesses) || len(table.tasks) != 0 {
		t.Errorf("%v, %d threads", err, len(table.tasks))
	}
}

func TestReadStatus(t *testing.T) {
	tgid, nspid, name, err := readStatus(os.Getpid())
	if err != nil || tgid != os.Getpid() || nspid <= 0 || name == "" {
		t.Error(tgid, nspid, name, err)
	}
	if _, _, _, err := readStatus(1<<22 + 1); err == nil {
		t.Error("a thread that does not exist has a status")
	}
}
