// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How a process becomes another program with what it has. First that program is tried as a child, which reads the very state (Trial);
// only then the process executes it (Exec). So the process keeps its number, its start time, its cgroup, its children, its locks and its
// descriptors, by which others know it: nothing has to be passed but the state.

// Arguments of the program, after its name.
const (
	StartArg = "start-handover" // of the present one as a child, which executes the one to be tried
	TryArg   = "try-handover"
	TakeArg  = "take-over"
)

// Descriptors of a Trial's child.
const (
	answerFD  = 3
	stateFD   = 4
	goFD      = 5
	programFD = 6 // until it has executed that
)

const (
	helloTime = 10 * time.Second // for the program to be executed, and to say what it can read
	tryTime   = 2 * time.Second  // for it to read the state, and
	tryBytes  = 16 << 20         // a second more for so many bytes
	maxAnswer = 4096
)

// hello is the first line that the child says.
type hello struct {
	Versions []int         `json:"versions"`        // of State
	Errno    syscall.Errno `json:"errno,omitempty"` // why the program cannot be executed
}

// Trial is a program that waits for the state, to try it.
type Trial struct {
	program *os.File
	state   *os.File // memory that both have
	size    int      // of the state in it
	nice    int      // of this process, while it is not urgent
	cmd     *exec.Cmd
	answers *os.File
	lines   *bufio.Reader
	start   *os.File
}

// Try starts a program as a child, and asks what it can read. The file is what is tried and executed, whatever is in its path's place
// later; it is closed with the Trial.
//
// The child is this program at first (ServeStart): a process of Go's that starts another one stands still, all of it, from the next garbage
// collection on, until execve(2) in the child has returned, and that may take as long as the program's file system hangs.
func Try(program *os.File) (_ *Trial, err error) {
	t := &Trial{program: program}
	if t.nice, err = niceOf(os.Getpid()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	fd, err := unix.MemfdCreate("cgpu-guard", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	t.state = os.NewFile(uintptr(fd), "state")
	answers, say, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	t.answers, t.lines = answers, bufio.NewReaderSize(answers, maxAnswer)
	listen, start, err := os.Pipe()
	if err != nil {
		say.Close()
		return nil, err
	}
	defer listen.Close()
	t.start = start
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{"cgpu-guard", StartArg}, Dir: "/",
		ExtraFiles: []*os.File{say, t.state, listen, t.program}}
	err = cmd.Start()
	say.Close() // or its end would not be seen
	if err != nil {
		return nil, fmt.Errorf("start a child: %w", err)
	}
	t.cmd = cmd
	line, err := t.answer(helloTime)
	if err != nil {
		return nil, err
	}
	var h hello
	if json.Unmarshal([]byte(line), &h) != nil {
		return nil, fmt.Errorf("it knows no hand-over: %.200q", line)
	}
	if h.Errno != 0 {
		return nil, notExecuted(h.Errno)
	}
	for _, v := range h.Versions {
		if v == Version {
			return t, nil
		}
	}
	return nil, fmt.Errorf("it reads versions %v of a guard's state, and this guard writes %d", h.Versions, Version)
}

// notExecuted says why a program cannot be executed.
func notExecuted(why syscall.Errno) error {
	hint := ""
	switch why {
	case syscall.EACCES:
		hint = "; is its file system mounted noexec?"
	case syscall.ENOEXEC:
		hint = ": it is for another kind of machine, or not all there"
	}
	return fmt.Errorf("it cannot be executed: %w%s", why, hint)
}

// ServeStart is the child of a Trial as it begins. It returns only if the program cannot be executed.
func ServeStart() error {
	say, program := os.NewFile(answerFD, "answer"), os.NewFile(programFD, "program")
	if say == nil || program == nil {
		return errors.New("started by cgpu-guard only")
	}
	unix.CloseOnExec(programFD)
	err := syscall.Exec(pathOf(program), []string{"cgpu-guard", TryArg}, os.Environ())
	var h hello
	errors.As(err, &h.Errno)
	return json.NewEncoder(say).Encode(h)
}

// pathOf is a path of an open file for this process and its children.
func pathOf(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

func (t *Trial) answer(within time.Duration) (string, error) {
	if err := t.answers.SetReadDeadline(time.Now().Add(within)); err != nil { // Go's poller has no room for it, and calls may wait
		return "", fmt.Errorf("wait for its answer: %w", err)
	}
	b, err := t.lines.ReadSlice('\n') // a line that is too long is none
	line := strings.TrimSpace(string(b))
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return "", fmt.Errorf("its answer is too long: %.40q", line)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "", fmt.Errorf("it does not answer within %v: the machine is busy, or its file system hangs", within)
	case err != nil && line == "":
		return "", errors.New("it ended without a word: it is no cgpu-guard, or crashes")
	}
	return line, nil
}

// Write puts the state where the child, or the program that is executed, reads it.
func (t *Trial) Write(state []byte) error {
	if err := t.state.Truncate(0); err != nil {
		return err
	}
	if _, err := t.state.WriteAt(state, 0); err != nil {
		return fmt.Errorf("write the guard's state: %w", err)
	}
	t.size = len(state)
	return nil
}

// Read has the child read what was written, and make a guard of it that does nothing.
func (t *Trial) Read() error { return t.ask("go", tryTime+time.Duration(t.size)*time.Second/tryBytes) }

// ask has the child do something.
func (t *Trial) ask(what string, within time.Duration) error {
	if _, err := t.start.WriteString(what + "\n"); err != nil {
		return fmt.Errorf("it ended early: %w", err)
	}
	line, err := t.answer(within)
	if err == nil && line != "ok" {
		err = errors.New(line)
	}
	return err
}

// Close ends the child. It does not wait until it has ended: who traces it, or a device that it waits for, may take any time.
func (t *Trial) Close() {
	for _, f := range []*os.File{t.program, t.start, t.answers, t.state} {
		if f != nil {
			f.Close()
		}
	}
	t.end()
}

func (t *Trial) end() {
	if t.cmd != nil {
		_ = t.cmd.Process.Kill()
		go func(cmd *exec.Cmd) {
			_ = cmd.Wait()
			_ = renice(os.Getpid(), t.nice) // should it have made urgent who did not wait for that any more
		}(t.cmd)
		t.cmd = nil
	}
}

// PID is the child's number.
func (t *Trial) PID() int { return t.cmd.Process.Pid }

// Exec executes the program that was tried, with the state and some descriptors. It returns only if that fails. Should the program fail to
// go on with the state it executes the present one again (Back). The child is killed, and is for the program to come to wait for (Bury):
// here calls would wait until it has ended.
func (t *Trial) Exec(fds []int) error {
	_ = t.cmd.Process.Kill()
	former, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer former.Close()
	args := []string{"cgpu-guard", TakeArg, strconv.Itoa(int(t.state.Fd())), strconv.Itoa(int(former.Fd()))}
	return execute(t.program, args, append([]int{int(t.state.Fd()), int(former.Fd())}, fds...))
}

// execute executes a program that has some descriptors.
func execute(program *os.File, args []string, fds []int) error {
	syscall.ForkLock.Lock() // no other child is to have them
	defer syscall.ForkLock.Unlock()
	defer closeOnExec(fds)
	// Go lowers the limit of descriptors to what it found at the program's start, for the next one to begin with, and leaves it there if that
	// is not executed. The system call itself: by unix.Setrlimit Go would forget what it found.
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	defer func() {
		_, _, _ = unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&files)), 0, 0, 0)
	}()
	for _, fd := range fds {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	return os.NewSyscallError("execve", syscall.Exec(pathOf(program), args, alone(os.Environ())))
}

// oneProcessor has a program of Go's begin with one processor, and so with few threads: each has to be woken, at least once, on a machine
// that has other things to do, while the container's calls wait.
const oneProcessor = "GOMAXPROCS"

func alone(env []string) []string {
	env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, oneProcessor+"=") })
	return append(env, oneProcessor+"=1")
}

// Bury waits for the end of a child that was killed, so that it does not stay as a zombie; 0: there is none.
func Bury(child int) {
	if p, err := os.FindProcess(child); child > 0 && err == nil {
		_, _ = p.Wait()
	}
}

func closeOnExec(fds []int) {
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
}

// ServeTry is the child of a Trial: restore makes a guard of the state.
func ServeTry(restore func(*State) error) error {
	// Where memory is short this one ends, neither the guard nor a program of the container's in the same cgroup.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	say, state, listen := os.NewFile(answerFD, "answer"), os.NewFile(stateFD, "state"), os.NewFile(goFD, "go")
	if say == nil || state == nil || listen == nil {
		return errors.New("started by cgpu-guard only")
	}
	for _, fd := range []int{answerFD, stateFD, goFD} {
		unix.CloseOnExec(fd)
	}
	_, _ = Decode([]byte("{}")) // package json learns the types now, and not while the container's calls wait
	ordinary, err := niceOf(os.Getpid())
	if err != nil {
		return err
	}
	_ = renice(os.Getpid(), urgentNice) // requests come while calls wait
	if err := json.NewEncoder(say).Encode(hello{Versions: Versions()}); err != nil {
		return err
	}
	lines := bufio.NewScanner(listen)
	for lines.Scan() {
		text := "ok"
		if err := serveRequest(lines.Text(), ordinary, state, restore); err != nil {
			text = oneLine(err)
		}
		if _, err := fmt.Fprintln(say, text); err != nil {
			return err
		}
	}
	return nil
}

// serveRequest serves one that is to make the guard urgent, or else to read its state: that takes as long as the container's holdings have
// it take, and nobody waits.
func serveRequest(request string, ordinary int, state *os.File, restore func(*State) error) error {
	if strings.HasPrefix(request, urgentWord) {
		return serveUrgent(request)
	}
	_ = renice(os.Getpid(), ordinary)
	defer func() { _ = renice(os.Getpid(), urgentNice) }()
	s, err := read(state)
	if err == nil {
		err = restore(s)
	}
	return err
}

func read(f *os.File) (*State, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > MaxSize {
		return nil, fmt.Errorf("a state of %d bytes: %d are the most", info.Size(), MaxSize)
	}
	b := make([]byte, info.Size())
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the guard's state: %w", err)
	}
	return Decode(b)
}

// Takeover is what a program was executed with.
type Takeover struct {
	*State
	state  *os.File
	former *os.File // nil: there is none that could go on instead
	// Failed says why the program that was to go on did not, of the one that it gave the process back to.
	Failed string
}

// Take reads the arguments that come after TakeArg, and the state.
func Take(args []string) (*Takeover, error) {
	_ = os.Unsetenv(oneProcessor) // this program's children have what they need
	if len(args) < 2 || len(args) > 3 {
		return nil, fmt.Errorf("%s: %d arguments; it is executed by cgpu-guard only", TakeArg, len(args))
	}
	t := &Takeover{}
	for i, to := range []**os.File{&t.state, &t.former} {
		fd, err := strconv.Atoi(args[i])
		if err != nil || fd < 0 || fd >= maxFD {
			return nil, fmt.Errorf("%s: descriptor %.20q", TakeArg, args[i])
		}
		if fd > 0 {
			*to = os.NewFile(uintptr(fd), TakeArg)
		}
	}
	if t.state == nil {
		return nil, fmt.Errorf("%s: no state", TakeArg)
	}
	if t.former != nil { // should it get the process back, it does not know of this one
		unix.CloseOnExec(int(t.former.Fd()))
	}
	if len(args) == 3 {
		t.Failed = args[2]
	}
	var err error
	t.State, err = read(t.state)
	return t, err
}

// Back gives the process back to the program that had it, with the reason. It returns only if there is none, or it cannot be executed. The
// state, and every descriptor in it, must be as it was.
func (t *Takeover) Back(reason error) error {
	if t.former == nil {
		return reason
	}
	defer runtime.KeepAlive(t) // files that nobody has any more are closed, and the caller may have no use for it
	fds := []int{int(t.state.Fd())}
	if t.State != nil {
		fds = append(fds, t.Descriptors()...)
	}
	args := []string{"cgpu-guard", TakeArg, strconv.Itoa(int(t.state.Fd())), "0", oneLine(reason)}
	return errors.Join(reason, execute(t.former, args, fds))
}

// Within calls f, and gives the process back if that takes longer than d. Where there is nobody to give it to, f has the time that it
// takes.
func (t *Takeover) Within(d time.Duration, f func() error) error {
	over := make(chan struct{})
	late := time.AfterFunc(d, func() {
		defer close(over)
		_ = t.Back(errors.New("the other program did not come up in time"))
	})
	err := f()
	if !late.Stop() {
		<-over // not, if the former program is executed
	}
	return err
}

// oneLine is an error as a line of an answer, or as an argument of a program: that has no NUL, and is short.
func oneLine(err error) string {
	text := strings.NewReplacer("\n", "; ", "\x00", "?").Replace(err.Error())
	return text[:min(len(text), maxAnswer-1)]
}

// Copy is a descriptor of a state's for the program that goes on. The one in the state stays open until that serves: should it not come so
// far, the program before finds its own.
func Copy(fd int, name string) (*os.File, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("copy the descriptor of the %s: %w", name, err)
	}
	return os.NewFile(uintptr(n), name), nil
}

// Keep ends the way back: from now on no child gets a descriptor of the state's.
func (t *Takeover) Keep() {
	closeOnExec(t.Descriptors())
	t.state.Close()
	if t.former != nil {
		t.former.Close()
	}
}
