// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"container/list"
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// process is a process of the container that has made a trapped call.
type process struct {
	entry
	tgid  int // in the guard's pid namespace, which is the host's
	nspid int // in the container's own
	name  string
	pidfd int // polled for exit
	tasks map[*task]bool
	gone  atomic.Bool // it has exited
}

// task is a thread of the container that has made a trapped call. A thread is in one system call at a time, so its calls
// are served one after the other under mu; a second notification of a thread means that the first one was interrupted.
type task struct {
	tid   int
	proc  *process
	pidfd int  // of the thread where the kernel knows PIDFD_THREAD, else of its process
	exact bool // pidfd is the thread's own
	at    *list.Element
	// users are those who have it from get and have not released it. The descriptor of one that is forgotten stays open for them: its
	// number would be another's.
	users     atomic.Int32
	forgotten atomic.Bool
	closed    atomic.Bool

	mu         sync.Mutex
	saved      *savedCall
	lastAnswer lastAnswer
}

// taskTable finds tasks by thread id.
type taskTable struct {
	books  *books
	mu     sync.Mutex
	tasks  map[int]*task
	used   *list.List // of tasks, those that were used last in front
	procs  map[int]*process
	byNS   map[int]*process
	onProc func(*process) // a process is seen for the first time
	// noThreadPidfd is set once the kernel has refused PIDFD_THREAD (before Linux 6.9).
	noThreadPidfd bool
}

func newTaskTable(onProc func(*process)) *taskTable {
	return &taskTable{tasks: map[int]*task{}, used: list.New(), procs: map[int]*process{}, byNS: map[int]*process{}, onProc: onProc}
}

const (
	// maxTasks is the number of threads remembered: a descriptor each. Then the one whose last call is the longest ago is forgotten, dead
	// or not; nothing is searched for.
	maxTasks = 4096
	// maxProcesses bounds the living processes that have made calls, for the same reason.
	maxProcesses = 16384
)

var errTooManyProcesses = errors.New("too many processes of the container have made driver calls and live")

// acquire returns the task of a thread that is waiting in a notification; the caller must release it. He must check NOTIF_ID_VALID
// before he relies on anything: until then the thread may be gone and its number be someone else's.
func (t *taskTable) acquire(tid int) (*task, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if task := t.tasks[tid]; task != nil {
		if task.exact || t.sameProcess(task) {
			t.used.MoveToFront(task.at)
			task.users.Add(1)
			return task, nil
		}
		t.forget(task)
	}
	tgid, nspid, name, err := readStatus(tid)
	if err != nil {
		return nil, err
	}
	task := &task{tid: tid, pidfd: -1}
	if !t.noThreadPidfd {
		if fd, err := unix.PidfdOpen(tid, pidfdThread); err == nil {
			task.pidfd, task.exact = fd, true
		} else if errors.Is(err, unix.EINVAL) {
			t.noThreadPidfd = true
		} else {
			return nil, os.NewSyscallError("pidfd_open", err)
		}
	}
	if task.proc, err = t.process(tgid, nspid, name); err != nil {
		task.close()
		return nil, err
	}
	if !task.exact {
		task.pidfd = task.proc.pidfd
	}
	for range 1 + len(t.tasks) - maxTasks {
		t.evict()
	}
	t.tasks[tid], task.at = task, t.used.PushFront(task)
	task.proc.tasks[task] = true
	task.users.Add(1)
	return task, nil
}

// process finds or makes the record of a process.
func (t *taskTable) process(tgid, nspid int, name string) (*process, error) {
	if p := t.procs[tgid]; p != nil {
		return p, nil
	}
	if len(t.procs) >= maxProcesses {
		return nil, errTooManyProcesses
	}
	fd, err := unix.PidfdOpen(tgid, 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	p := &process{tgid: tgid, nspid: nspid, name: name, pidfd: fd, tasks: map[*task]bool{}}
	t.procs[tgid], t.byNS[nspid] = p, p
	t.books.note(p)
	t.onProc(p)
	return p, nil
}

// evict forgets the task that was used the longest ago, unless somebody is at it or, living, it has a result to come for: then it is the
// next one's turn.
func (t *taskTable) evict() {
	for range evictTries {
		task := t.used.Back().Value.(*task)
		if task.users.Load() == 0 && task.mu.TryLock() {
			waits := task.saved != nil && t.threadLives(task)
			task.mu.Unlock()
			if !waits {
				t.forget(task)
				return
			}
		}
		t.used.MoveToFront(task.at)
	}
}

// evictTries bounds how many are passed over. The table grows then, by as many as there are calls under way.
const evictTries = 8

// release is for who has a task from get.
func (t *task) release() {
	if t.users.Add(-1) == 0 && t.forgotten.Load() {
		t.close()
	}
}

func (t *task) close() {
	if t.exact && t.closed.CompareAndSwap(false, true) {
		_ = unix.Close(t.pidfd)
	}
}

// sameProcess checks that a thread number still belongs to the process it was seen in. Only without PIDFD_THREAD: a pidfd of
// the thread itself answers ESRCH when it is dead.
func (t *taskTable) sameProcess(task *task) bool {
	tgid, _, _, err := readStatus(task.tid)
	return err == nil && tgid == task.proc.tgid
}

// dropTask forgets a task whose thread is dead.
func (t *taskTable) dropTask(task *task) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tasks[task.tid] == task {
		t.forget(task)
	}
}

func (t *taskTable) forget(task *task) {
	delete(t.tasks, task.tid)
	delete(task.proc.tasks, task)
	t.used.Remove(task.at)
	if task.mu.TryLock() { // else a worker is at it, and the last one to look will find the thread gone
		task.dropSaved()
		task.mu.Unlock()
	}
	if task.forgotten.Store(true); task.users.Load() == 0 {
		task.close()
	}
}

// dropProcess forgets an exited process and its threads.
func (t *taskTable) dropProcess(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for task := range p.tasks {
		t.forget(task)
	}
	if t.procs[p.tgid] == p {
		delete(t.procs, p.tgid)
		t.books.end(p)
		t.books.close(p.pidfd)
	}
	if t.byNS[p.nspid] == p {
		delete(t.byNS, p.nspid)
	}
}

// processes copies the list of live processes.
func (t *taskTable) processes() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*process, 0, len(t.procs))
	for _, p := range t.procs {
		list = append(list, p)
	}
	return list
}

// byHostPid and byNSPid translate between the host's and the container's numbers.
func (t *taskTable) byHostPid(pid int) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.procs[pid]
}

// lives says whether the process that has made a trapped call under this number has not ended. Who is told of its end may not have been
// yet.
func (t *taskTable) lives(tgid int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.procs[tgid]
	return p != nil && !hasEnded(p.pidfd)
}

// hasEnded reports that a process, or a thread if the descriptor is one's, has ended, buried or not.
func hasEnded(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n == 1
}

// threadLives reports that a thread has not ended.
func (t *taskTable) threadLives(task *task) bool {
	return task.exact && !hasEnded(task.pidfd) || !task.exact && t.sameProcess(task)
}

func (t *taskTable) byNSPid(pid int) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byNS[pid]
}

// dropSaved lets go of a result that nobody will come for. One that can be taken back has a timer of its own.
func (t *task) dropSaved() {
	if t.saved != nil && t.saved.undo == nil {
		t.saved.release()
		t.saved = nil
	}
}

// sharesFiles reports that the thread uses its process' descriptor table.
func (t *task) sharesFiles() bool {
	if t.tid == t.proc.tgid {
		return true
	}
	r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(t.tid), uintptr(t.proc.tgid), kcmpFiles, 0, 0, 0)
	return e == 0 && r == 0
}

// getFile copies a descriptor of the task into the guard.
func (t *task) getFile(fd int) (int, error) {
	// Never waits, so the Go scheduler need not know (unix.PidfdGetfd would tell it).
	n, _, e := unix.RawSyscall(unix.SYS_PIDFD_GETFD, uintptr(t.pidfd), uintptr(fd), 0)
	if e != 0 {
		return -1, e
	}
	return int(n), nil
}
