package guard

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// process is a process of the container that has made a trapped call.
type process struct {
	tgid  int // in the guard's pid namespace, which is the host's
	nspid int // in the container's own
	name  string
	pidfd int // polled for exit
}

// task is a thread of the container that has made a trapped call. A thread is in one system call at a time, so its calls
// are served one after the other under mu; a second notification of a thread means that the first one was interrupted.
type task struct {
	tid   int
	proc  *process
	pidfd int  // of the thread where the kernel knows PIDFD_THREAD, else of its process
	exact bool // pidfd is the thread's own

	mu    sync.Mutex
	saved *savedCall
	last  answered
}

// taskTable finds tasks by thread id.
type taskTable struct {
	mu     sync.Mutex
	tasks  map[int]*task
	procs  map[int]*process
	onProc func(*process) // a process is seen for the first time
	// noThreadPidfd is set once the kernel has refused PIDFD_THREAD (before Linux 6.9).
	noThreadPidfd bool
}

// maxTasks is the number of threads remembered before dead ones are swept out.
const maxTasks = 4096

// get returns the task of a thread that is waiting in a notification. The caller must check NOTIF_ID_VALID afterwards,
// before it relies on anything: until then the thread may be gone and its number be someone else's.
func (t *taskTable) get(tid int) (*task, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.tasks[tid]; k != nil {
		if k.exact || t.stillOf(k) {
			return k, nil
		}
		t.forget(k)
	}
	if len(t.tasks) >= maxTasks {
		t.sweep()
	}
	tgid, nspid, name, err := readStatus(tid)
	if err != nil {
		return nil, err
	}
	k := &task{tid: tid, pidfd: -1}
	if !t.noThreadPidfd {
		if fd, err := unix.PidfdOpen(tid, pidfdThread); err == nil {
			k.pidfd, k.exact = fd, true
		} else if errors.Is(err, unix.EINVAL) {
			t.noThreadPidfd = true
		} else {
			return nil, os.NewSyscallError("pidfd_open", err)
		}
	}
	if k.proc = t.procs[tgid]; k.proc == nil {
		fd, err := unix.PidfdOpen(tgid, 0)
		if err != nil {
			if k.exact {
				_ = unix.Close(k.pidfd)
			}
			return nil, os.NewSyscallError("pidfd_open", err)
		}
		k.proc = &process{tgid: tgid, nspid: nspid, name: name, pidfd: fd}
		t.procs[tgid] = k.proc
		t.onProc(k.proc)
	}
	if !k.exact {
		k.pidfd = k.proc.pidfd
	}
	t.tasks[tid] = k
	return k, nil
}

// stillOf checks that a thread number still belongs to the process it was seen in. Only without PIDFD_THREAD: a pidfd of
// the thread itself answers ESRCH when it is dead.
func (t *taskTable) stillOf(k *task) bool {
	tgid, _, _, err := readStatus(k.tid)
	return err == nil && tgid == k.proc.tgid
}

// drop forgets a task whose thread is dead.
func (t *taskTable) drop(k *task) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tasks[k.tid] == k {
		t.forget(k)
	}
}

func (t *taskTable) forget(k *task) {
	delete(t.tasks, k.tid)
	if k.mu.TryLock() { // else a worker is at it, and the last one to look will find the thread gone
		k.dropSaved()
		k.mu.Unlock()
	}
	if k.exact {
		_ = unix.Close(k.pidfd)
	}
}

func (t *taskTable) sweep() {
	for _, k := range t.tasks {
		dead := false
		if k.exact {
			dead = errors.Is(unix.PidfdSendSignal(k.pidfd, 0, nil, 0), unix.ESRCH)
		} else {
			dead = !t.stillOf(k)
		}
		if dead && k.mu.TryLock() {
			k.mu.Unlock()
			t.forget(k)
		}
	}
}

// dropProcess forgets an exited process and its threads.
func (t *taskTable) dropProcess(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range t.tasks {
		if k.proc == p {
			t.forget(k)
		}
	}
	if t.procs[p.tgid] == p {
		delete(t.procs, p.tgid)
		_ = unix.Close(p.pidfd)
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

// lives says whether the process that has made a trapped call under this number still has it.
func (t *taskTable) lives(tgid int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.procs[tgid]
	return p != nil && !errors.Is(unix.PidfdSendSignal(p.pidfd, 0, nil, 0), unix.ESRCH)
}

func (t *taskTable) byNSPid(pid int) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.procs {
		if p.nspid == pid {
			return p
		}
	}
	return nil
}

// dropSaved lets go of a result that nobody will come for. One that can be taken back has a timer of its own.
func (k *task) dropSaved() {
	if k.saved != nil && k.saved.undo == nil {
		k.saved.release()
		k.saved = nil
	}
}

// sharesFiles reports that the thread uses its process' descriptor table.
func (k *task) sharesFiles() bool {
	if k.tid == k.proc.tgid {
		return true
	}
	r, _, e := unix.RawSyscall6(unix.SYS_KCMP, uintptr(k.tid), uintptr(k.proc.tgid), kcmpFiles, 0, 0, 0)
	return e == 0 && r == 0
}

// getFile copies a descriptor of the task into the guard.
func (k *task) getFile(fd int) (int, error) {
	// Never waits, so the Go scheduler need not know (unix.PidfdGetfd would tell it).
	n, _, e := unix.RawSyscall(unix.SYS_PIDFD_GETFD, uintptr(k.pidfd), uintptr(fd), 0)
	if e != 0 {
		return -1, e
	}
	return int(n), nil
}

// readStatus reads what /proc/TID/status says of a thread: its process, that process' number in the innermost pid
// namespace, and its name.
func readStatus(tid int) (tgid, nspid int, name string, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
	if err != nil {
		return 0, 0, "", err
	}
	for line := range bytes.Lines(b) {
		key, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch string(key) {
		case "Name":
			name = string(value)
		case "Tgid":
			tgid, _ = strconv.Atoi(string(value))
		case "NStgid":
			fields := bytes.Fields(value)
			if len(fields) > 0 {
				nspid, _ = strconv.Atoi(string(fields[len(fields)-1]))
			}
		}
	}
	if tgid == 0 {
		return 0, 0, "", fmt.Errorf("/proc/%d/status has no Tgid", tid)
	}
	if nspid == 0 {
		nspid = tgid
	}
	return tgid, nspid, name, nil
}
