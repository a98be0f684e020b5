// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal/terminaltest"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/pkg/top"
)

// helperTop is set for a process that is cgpu top, of a node in the folder that it names, or one that comes to grief.
const helperTop = "CGPU_TEST_TOP"

func TestHelperTop(t *testing.T) {
	dir := os.Getenv(helperTop)
	if dir == "" {
		testenv.Skip(t, "no test: the process that TestTopTerminal starts")
	}
	if dir == "panic" {
		n := 0
		p := top.New(100*time.Millisecond, top.Look{}, func() (snapshot.View, error) {
			if n++; n > 2 {
				panic("of a look")
			}
			return snapshot.View{Driver: "sim", DriverVersion: "1"}, nil
		})
		err := p.Run(context.Background(), top.OpenScreen(os.Stdin, os.Stdout))
		t.Fatal("lives after a panic: ", err)
	}
	os.Args = []string{"cgpu", "top", "--interval", "0.1"}
	main()
	os.Exit(0)
}

// leavesScreen is the last that is written.
const leavesScreen = "\x1b[?25h\x1b[?1049l"

// session is cgpu top in a terminal of its own.
type session struct {
	t         *testing.T
	user      *os.File
	cmd       *exec.Cmd
	before    unix.Termios
	mu        sync.Mutex
	model     *terminaltest.Model
	raw, rest string
}

func startTop(t *testing.T, dir string, env ...string) *session {
	t.Helper()
	user, term := terminaltest.Open(t)
	s := &session{t: t, user: user, model: terminaltest.New(24, 80)}
	s.resize(80, 24)
	before, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	s.before = *before
	s.cmd = exec.Command(os.Args[0], "-test.run=^TestHelperTop$")
	s.cmd.Env = append(os.Environ(), append([]string{helperTop + "=" + dir, "CGPU_RUN_DIR=" + dir, "TERM=xterm", "LANG=C.UTF-8", "LC_ALL="},
		env...)...)
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = term, term, term
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() })
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, err := user.Read(buffer)
			s.mu.Lock()
			s.raw += string(buffer[:n])
			s.rest += string(buffer[:n])
			// Whole sequences only: what was read may end in one.
			if i := strings.LastIndexByte(s.rest, '\x1b'); s.model.Other && i >= 0 {
				s.model.Write(s.rest[:i])
				s.rest = s.rest[i:]
			} else if i := strings.Index(s.rest, "\x1b[?1049h"); i >= 0 {
				s.model.Other = true
				s.rest = s.rest[i:]
			}
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

func (s *session) resize(columns, rows uint16) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.model = terminaltest.New(int(rows), int(columns))
	s.model.Other = s.raw != ""
	if err := unix.IoctlSetWinsize(int(s.user.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *session) press(keys string) {
	if _, err := io.WriteString(s.user, keys); err != nil {
		s.t.Fatal(err)
	}
}

// until waits for the screen to be as it should.
func (s *session) until(what string, ok func(screen string) bool) {
	s.t.Helper()
	for range 3000 {
		s.mu.Lock()
		text := s.model.Text()
		s.mu.Unlock()
		if ok(text) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	s.t.Fatalf("waited in vain for %s:\n%s", what, s.model.Text())
}

func shows(parts ...string) func(string) bool {
	return func(screen string) bool {
		return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(screen, p) })
	}
}

// ended waits for the end, and sees that the terminal is as before.
func (s *session) ended(status int) {
	s.t.Helper()
	_ = s.cmd.Wait()
	if got := s.cmd.ProcessState.ExitCode(); got != status {
		s.t.Errorf("exit status %d, want %d", got, status)
	}
	after, err := unix.IoctlGetTermios(int(s.user.Fd()), unix.TCGETS)
	if err != nil {
		s.t.Fatal(err)
	}
	if diff := cmp.Diff(s.before, *after); diff != "" {
		s.t.Errorf("the terminal is not as it was:\n%s", diff)
	}
	s.written(leavesScreen)
}

// written waits until the process has written something, and returns all that it wrote.
func (s *session) written(text string) string {
	s.t.Helper()
	var all string
	for range 3000 {
		s.mu.Lock()
		all = s.raw
		s.mu.Unlock()
		if strings.Contains(all, text) {
			return all
		}
		time.Sleep(10 * time.Millisecond)
	}
	s.t.Errorf("wrote no %q: %q", text, all)
	return all
}

// TestTopTerminal: in a real terminal it draws, hears keys, follows its size, and leaves everything as it was, however it ends.
func TestTopTerminal(t *testing.T) {
	n := nodetest.New(t)
	for _, name := range []string{"web", "evil\x1b[2J"} {
		r := n.Reserve(ledger.Record{ID: strings.Repeat(name[:1], 64), Name: name,
			VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 6 * quota.GiB, Share: quota.Share{Weight: 3}}}}})
		nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, nodetest.Status(r)))
	}
	first := shows("cgpu top", "2 vGPUs", "web", "evil?[2J", "6.0G", "running")
	t.Run("keys", func(t *testing.T) {
		s := startTop(t, n.Dir)
		s.until("the first screen", first)
		s.press("h")
		s.until("help", shows("cgpu top: keys"))
		s.press("x")
		s.until("the end of help", first)
		s.press("/ev")
		s.until("one container", func(screen string) bool {
			return shows("/ev_", "1 container")(screen) && !strings.Contains(screen, "web ")
		})
		s.press("\x1b")
		s.until("both", first)
		s.press("p")
		s.until("a pause", shows("paused"))
		s.press("\x1b[B")
		s.until("details", shows("denied 0"))
		s.resize(132, 40)
		s.until("a wide screen", shows("PRIO", "PCT", "default"))
		s.resize(40, 10)
		s.until("a narrow screen", func(screen string) bool { return shows("web")(screen) && !strings.Contains(screen, "PRIO") })
		s.press("q")
		s.ended(0)
	})
	t.Run("SIGTERM", func(t *testing.T) {
		s := startTop(t, n.Dir)
		s.until("the first screen", first)
		if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		s.ended(0)
	})
	t.Run("Ctrl-C", func(t *testing.T) {
		s := startTop(t, n.Dir, "NO_COLOR=1")
		s.until("the first screen", first)
		s.press("\x03")
		s.ended(0)
	})
	t.Run("panic", func(t *testing.T) {
		s := startTop(t, "panic")
		s.ended(2)
		const report = "panic: of a look"
		if text := s.written(report); strings.LastIndex(text, leavesScreen) > strings.Index(text, report) {
			t.Errorf("the screen is left after the report: %q", text)
		}
	})
	t.Run("Ctrl-Z", func(t *testing.T) {
		s := startTop(t, n.Dir)
		s.until("the first screen", first)
		s.press("\x1a")
		stopped := func() bool {
			text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(s.cmd.Process.Pid), "stat"))
			return err == nil && strings.Contains(string(text), ") T ")
		}
		for range 3000 {
			if stopped() {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		if !stopped() {
			t.Error("does not stop")
		}
		if err := s.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		s.press("h")
		s.until("help", shows("cgpu top: keys"))
		s.press("qq")
		s.ended(0)
	})
}

// TestTopOnce: where there is no terminal, a frame of two looks.
func TestTopOnce(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: strings.Repeat("a", 64), Name: "web",
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 6 * quota.GiB}}}})
	nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, nodetest.Status(r)))
	got := cgpu("top --once --interval 0.1")
	if !shows("1 vGPU\n", "web", "6.0G", "Tesla T4")(strings.ReplaceAll(got, "  ", "\n")+got) || strings.Contains(got, "\x1b") {
		t.Errorf("%s", got)
	}
	if got := cgpu("top --interval abc"); !strings.Contains(got, "top: --interval \"abc\": want a number, such as 0.5 (see") {
		t.Error(got)
	}
	if got := cgpu("top --interval 0"); !strings.Contains(got, "want 0.1 to 3600 seconds") {
		t.Error(got)
	}
	if got := cgpu("top --gpu 9 --once"); !strings.Contains(got, "GPU \"9\": there is none") {
		t.Error(got)
	}
}
