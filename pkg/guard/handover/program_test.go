// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// modeEnv says what this program does when it is tried.
const modeEnv = "CGPU_TEST_HANDOVER"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == limitsArg {
		failToExecute()
	}
	if len(os.Args) > 1 && os.Args[1] == backArg {
		giveBack()
	}
	if len(os.Args) > 1 && os.Args[1] == TakeArg {
		goOnAgain()
	}
	if len(os.Args) > 1 && os.Args[1] == traceArg {
		traceParent()
	}
	if len(os.Args) > 1 && os.Args[1] == StartArg {
		_ = ServeStart()
		os.Exit(1)
	}
	if len(os.Args) < 2 || os.Args[1] != TryArg {
		os.Exit(m.Run())
	}
	say := os.NewFile(answerFD, "answer")
	switch mode := os.Getenv(modeEnv); mode {
	case "ends":
	case "other":
		fmt.Fprintln(say, "parse the configuration on standard input: unexpected end of JSON input")
	case "newer":
		fmt.Fprintln(say, `{"versions":[7,8]}`)
	case "long":
		fmt.Fprintln(say, strings.Repeat("x", 3*maxAnswer))
	default:
		_ = ServeTry(func(s *State) error {
			switch {
			case mode == "refuses":
				return errors.New("not\nthis")
			case mode == "held":
				return beTraced()
			case mode == "dies":
				os.Exit(9)
			case s.Process.InitPID == 0:
				return errors.New("no first process")
			}
			return nil
		})
	}
	os.Exit(0)
}

// TestTry: whatever a program does when it is tried, the guard hears in time whether it can go on, and goes on itself if not.
func TestTry(t *testing.T) {
	for mode, want := range map[string]string{
		"fine": "", "ends": "ended without a word", "other": "knows no hand-over", "newer": "reads versions [7 8]", "refuses": "not; this",
		"dies": "ended without a word", "long": "too long",
	} {
		t.Run(mode, func(t *testing.T) {
			t.Setenv(modeEnv, mode)
			trial, err := Try(open(t, "/proc/self/exe"))
			if err == nil {
				defer trial.Close()
				adj, _ := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", trial.cmd.Process.Pid))
				if strings.TrimSpace(string(adj)) != "1000" && mode == "fine" {
					t.Errorf("where memory is short others end first: %s", adj)
				}
				for range 2 { // it may be asked again
					if err = tried(t, trial); err != nil {
						break
					}
				}
			}
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%v: want %q", err, want)
			}
		})
	}
}

func tried(t *testing.T, trial *Trial) error {
	t.Helper()
	if err := trial.Write(state(t, "v1")); err != nil {
		return err
	}
	return trial.Read()
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestTryNoProgram: what the child cannot execute it says why.
func TestTryNoProgram(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/dev/null": "it cannot be executed: permission denied; is its file system mounted noexec?",
		empty:       "it cannot be executed: exec format error: it is for another kind of machine, or not all there",
	} {
		if _, err := Try(open(t, path)); err == nil || err.Error() != want {
			t.Errorf("%s: %v; want %q", path, err, want)
		}
	}
}

// limitsArg has this program say what its limit of descriptors is before and after it has failed to execute another one.
const limitsArg = "limits"

func failToExecute() {
	var before, after unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &before)
	no, err := os.Open("/dev/null")
	if err == nil {
		err = execute(no, []string{"nobody"}, nil)
	}
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &after)
	if !errors.Is(err, unix.EACCES) || before.Cur <= lowLimit || after != before {
		fmt.Printf("%v; %v descriptors before, %v after", err, before, after)
		os.Exit(1)
	}
	os.Exit(0)
}

const lowLimit = 64

// TestExecuteFails: a program that cannot be executed leaves the guard as many descriptors as it had.
func TestExecuteFails(t *testing.T) {
	cmd := exec.Command("sh", "-c", fmt.Sprintf("ulimit -Sn %d && exec /proc/%d/exe %s", lowLimit, os.Getpid(), limitsArg))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// backArg has this program give the process back to one that goes on as goOnAgain.
const backArg = "back"

func giveBack() {
	former, err := os.Open("/proc/self/exe")
	text, readErr := os.ReadFile("testdata/v1.json")
	fd, makeErr := unix.MemfdCreate("state", unix.MFD_CLOEXEC)
	_, writeErr := unix.Write(fd, text)
	if err = errors.Join(err, readErr, makeErr, writeErr); err == nil {
		err = (&Takeover{state: os.NewFile(uintptr(fd), "state"), former: former}).Back(errors.New("it cannot"))
	}
	fmt.Println(err)
	os.Exit(1)
}

// goOnAgain is the program that gets the process back.
func goOnAgain() {
	t, err := Take(os.Args[2:])
	if err != nil || t.Failed != "it cannot" {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// TestBackCollects: the program that gets the process back is there, and has the state, although garbage is collected while the process
// executes it: files that nobody has any more are closed.
func TestBackCollects(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", backArg)
	cmd.Env = append(os.Environ(), "GOGC=1") // and each variable below is copied
	for i := range 50_000 {
		cmd.Env = append(cmd.Env, fmt.Sprintf("V%d=", i))
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestWithin: who takes long, and has nobody to give the process back to, goes on when he is ready.
func TestWithin(t *testing.T) {
	over := false
	err := (&Takeover{}).Within(1, func() error {
		time.Sleep(10 * time.Millisecond) // the timer has fired, or fires now: both are right
		over = true
		return errors.New("this")
	})
	if !over || err == nil || err.Error() != "this" {
		t.Errorf("over: %v, %v", over, err)
	}
}

// TestOneLine: whatever an error says can be an argument of a program and a line of an answer.
func TestOneLine(t *testing.T) {
	if s := oneLine(errors.New("a\nb\x00c" + strings.Repeat("d", 1<<20))); !strings.HasPrefix(s, "a; b?cd") || len(s) >= maxAnswer {
		t.Errorf("%d bytes: %.20q", len(s), s)
	}
}

// TestTrialEnds: the child is killed before the other program is executed, which has only to wait for it.
func TestTrialEnds(t *testing.T) {
	trial, err := Try(open(t, "/proc/self/exe"))
	if err != nil {
		t.Fatal(err)
	}
	defer trial.Close()
	child := trial.PID()
	if err := trial.Exec([]int{maxFD}); !errors.Is(err, unix.EBADF) { // no such descriptor: it stays what it is
		t.Fatal(err)
	}
	Bury(child) // for ever, were it not killed
	if err := unix.Kill(child, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the child is there: %v", err)
	}
}

// traceArg has this program trace its parent, and be told of that's end before others.
const traceArg = "trace"

func traceParent() {
	runtime.LockOSThread()
	if err := unix.PtraceSeize(os.Getppid()); err == nil {
		fmt.Println("traced")
	}
	time.Sleep(time.Hour)
	os.Exit(1)
}

func beTraced() error {
	if err := unix.Prctl(unix.PR_SET_PTRACER, ^uintptr(0), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) { // no Yama
		return err
	}
	tracer := exec.Command("/proc/self/exe", traceArg)
	out, err := tracer.StdoutPipe()
	if err == nil {
		err = tracer.Start()
	}
	if err == nil {
		_, err = fmt.Fscanln(out, new(string))
	}
	return err
}

// TestHeldTrial: the end of a child that is not told of it is not waited for: the guard would never take up another request.
func TestHeldTrial(t *testing.T) {
	t.Setenv(modeEnv, "held")
	trial, err := Try(open(t, "/proc/self/exe"))
	if err == nil {
		err = tried(t, trial)
	}
	if err != nil {
		t.Fatal(err)
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", trial.PID()))
	_, rest, _ := strings.Cut(string(status), "TracerPid:")
	tracer := 0
	_, _ = fmt.Sscan(rest, &tracer)
	if tracer == 0 {
		t.Fatal("nobody traces it")
	}
	over := time.AfterFunc(10*time.Second, func() { _ = unix.Kill(tracer, unix.SIGKILL) })
	trial.Close()
	if !over.Stop() {
		t.Error("it is waited for until nobody traces it")
	}
	_ = unix.Kill(tracer, unix.SIGKILL)
}

// TestNoDeadline: an answer for which no time can be set is not waited for.
func TestNoDeadline(t *testing.T) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	answers, say := os.NewFile(uintptr(pipe[0]), "blocks"), os.NewFile(uintptr(pipe[1]), "say")
	defer answers.Close()
	over := time.AfterFunc(10*time.Second, func() { say.Close() })
	defer over.Stop()
	trial := &Trial{answers: answers, lines: bufio.NewReader(answers)}
	if _, err := trial.answer(time.Millisecond); !errors.Is(err, os.ErrNoDeadline) {
		t.Errorf("%v, want %v", err, os.ErrNoDeadline)
	}
}

// TestTakeHostile: arguments that nobody gives are refused.
func TestTakeHostile(t *testing.T) {
	for _, args := range [][]string{nil, {"5"}, {"x", "0"}, {"-1", "0"}, {"0", "0"}, {"99999999999999999999", "0"}, {"1", "2", "3", "4"}} {
		if _, err := Take(args); err == nil {
			t.Errorf("%q is taken", args)
		}
	}
}

// TestExecutedWithOneProcessor: the program that goes on begins with one processor, whatever this one was told, and what it starts does
// not know of that.
func TestExecutedWithOneProcessor(t *testing.T) {
	env := alone([]string{"A=1", "GOMAXPROCS=7", "GOMAXPROCS_=2", "GOMAXPROCS=8"})
	if want := []string{"A=1", "GOMAXPROCS_=2", "GOMAXPROCS=1"}; !slices.Equal(env, want) {
		t.Errorf("%q, want %q", env, want)
	}
	t.Setenv(oneProcessor, "1")
	if _, err := Take(nil); err == nil {
		t.Error("there is no state")
	}
	if v, ok := os.LookupEnv(oneProcessor); ok {
		t.Errorf("its children begin with %q", v)
	}
}

// TestBury: a child that was killed is waited for, once, and where there is none nobody waits.
func TestBury(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, trial := range []int{pid, pid, 0} {
		Bury(trial)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the child is there: %v", err)
	}
}
