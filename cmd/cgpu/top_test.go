package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
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

	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/terminal/cells"
	"github.com/opencgpu/cgpu/pkg/terminal/terminaltest"
)

// busyTop has looked at a busy node for a minute and a half, every second.
func busyTop(t *testing.T, how topLook) *top {
	t.Helper()
	v := nodetest.Busy(t)
	p := newTop(time.Second, how, func() (snapshot.View, error) { return v, nil })
	at := time.Date(2026, 11, 21, 2, 0, 0, 0, time.UTC)
	for i := range 90 {
		for j := range v.GPUs[0].VGPUs {
			if c := v.GPUs[0].VGPUs[j].Compute; c != nil {
				c.GPUTime += time.Duration((i+20*j)%100) * 5 * time.Millisecond
				c.Granted += 400 * time.Millisecond
			}
		}
		p.add(v, nil, at.Add(time.Duration(i)*time.Second))
	}
	return p
}

// shown is what a terminal of that size shows.
func shown(t *testing.T, p *top, columns, rows int) *terminaltest.Model {
	t.Helper()
	m := terminaltest.New(rows, columns)
	for r := range m.Cells { // something of before
		m.Cells[r] = []rune(strings.Repeat("~", columns))
	}
	m.Write(string(paint(p.draw(columns, rows), p.color)))
	if m.Unknown != nil {
		t.Errorf("%dx%d: wrote %s", columns, rows, strings.Join(m.Unknown, ", "))
	}
	return m
}

func TestTopGolden(t *testing.T) {
	t.Setenv("TZ", "UTC")
	p := busyTop(t, topLook{color: true, utf8: true})
	for _, size := range [][2]int{{80, 24}, {150, 30}, {50, 14}, {24, 8}} {
		golden.Compare(t, fmt.Sprintf("top-%dx%d.txt", size[0], size[1]), []byte(shown(t, p, size[0], size[1]).Text()))
	}
	golden.Compare(t, "top-once.txt", []byte(plainLines(p.draw(100, 0))))
	p.utf8, p.help = false, true
	golden.Compare(t, "top-help.txt", []byte(shown(t, p, 80, 24).Text()))
	p.help = false
	golden.Compare(t, "top-ascii.txt", []byte(shown(t, p, 80, 24).Text()))
}

// TestTopHostile: nothing that a tenant chooses moves anything or reaches the terminal, at any size.
func TestTopHostile(t *testing.T) {
	evil := []string{"\x1b[2J\x1b[31mred", "a\nb\rc", strings.Repeat("模型", 64), "\u202egnp.exe", "שלום", strings.Repeat("a\u0301", 128), "\u009b2J",
		"\xff\xfe", "", strings.Repeat("x", 256), "👩‍👩‍👧", "\u2028"}
	v := nodetest.Busy(t)
	v.DriverVersion = evil[0]
	v.GPUs[0].Name = evil[2]
	for i, name := range evil {
		v.GPUs[1].VGPUs = append(v.GPUs[1].VGPUs, snapshot.VGPU{ID: name, Nonce: fmt.Sprint(i), Name: name, SharedID: i%2 == 0,
			State: snapshot.StateRunning, Answered: true, Used: 1 << 60})
	}
	p := newTop(time.Second, topLook{color: true, utf8: true}, nil)
	p.add(v, nil, time.Now())
	for columns := 1; columns < 200; columns += 7 {
		for _, rows := range []int{1, 2, 5, 9, 24} {
			shown(t, p, columns, rows)
			p.press(keyDown)
		}
	}
	for _, p.find = range evil {
		p.typing = !p.typing
		shown(t, p, 80, 24)
	}
	p.add(snapshot.View{}, errors.New(strings.Join(evil, " ")), time.Now())
	shown(t, p, 80, 24)
	for line := range strings.Lines(plainLines(p.draw(100, 0))) {
		if line = strings.TrimSuffix(line, "\n"); strings.ContainsFunc(line, terminal.Acts) || cells.Width(line) > 100 {
			t.Errorf("printed %q", line)
		}
	}
	// Nor does what somebody types.
	const keys = "\x1b[OAB~5/qhpr\r\x7fx\xff<>"
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		text := make([]byte, random.IntN(6))
		for i := range text {
			text[i] = keys[random.IntN(len(keys))]
		}
		for _, k := range keysOf(string(text)) {
			p.press(k)
		}
		shown(t, p, 60, 12)
	}
}

// TestTopColor: without color nothing is told by color alone, and nothing is colored.
func TestTopColor(t *testing.T) {
	p := busyTop(t, lookOf(func(name string) string { return map[string]string{"NO_COLOR": "1", "LANG": "C"}[name] }))
	m := shown(t, p, 120, 24)
	for _, line := range m.Styles {
		for _, s := range line {
			if s != "" && s != "0" && s != "1" && s != "2" && s != "7" {
				t.Fatalf("style %s", s)
			}
		}
	}
	if strings.ContainsAny(m.Text(), "▁█") {
		t.Errorf("blocks for a terminal that has none:\n%s", m.Text())
	}
	p.color = true
	if !slices.ContainsFunc(shown(t, p, 120, 24).Styles, func(line []string) bool { return slices.Contains(line, "36") }) {
		t.Error("no color where there may be some")
	}
	if l := lookOf(func(name string) string { return map[string]string{"LC_ALL": "de_DE.UTF-8", "LANG": "C"}[name] }); !l.utf8 || !l.color {
		t.Errorf("%+v", l)
	}
}

func TestTopKeys(t *testing.T) {
	p := busyTop(t, topLook{})
	type list = []string
	names := func() (all list) {
		for _, r := range p.rows() {
			all = append(all, r.x.ID[:1]+fmt.Sprint(r.gpu.Index))
		}
		return all
	}
	unsorted := names()
	for _, x := range []struct {
		typed string
		want  list
	}{
		{"m", list{"a1", "a0", "e1"}},
		{"r", nil},
		{"rl", list{"a1", "a0"}},
		{"u", list{"a0", "e0"}},
		{"w", list{"a1"}},
		{"s", list{"00", "c0"}},
		{"g", unsorted},
		{"\x1b[D", list{"00"}},
		{"\x1b[C\x1bOC", nil},
		{"g/PAUS\r", list{"e0"}},
		{"/zzz", nil},
		{"\x7f\x7f\x7ftrain", list{"a0", "a1"}},
		{"\x1b", unsorted},
		{"/a\x1b", unsorted},
	} {
		for _, k := range keysOf(x.typed) {
			if p.press(k) {
				t.Errorf("%q ends it", x.typed)
			}
		}
		if got := names(); len(got) < len(x.want) || !slices.Equal(got[:len(x.want)], x.want) {
			t.Errorf("%q: %v, want %v", x.typed, got, x.want)
		}
	}
	for _, end := range []string{"q", "\x03", "/abc\x03", "hq", "h\x03"} {
		p, ended := newTop(time.Second, topLook{}, nil), false
		for _, k := range keysOf(end) {
			ended = p.press(k)
		}
		if !ended {
			t.Errorf("%q does not end it", end)
		}
	}
}

// TestTopScroll: the row that is chosen stays on the screen, and is the same container when the order changes.
func TestTopScroll(t *testing.T) {
	var v snapshot.View
	v.GPUs = []snapshot.GPU{{UUID: nodetest.T4}}
	for i := range 64 {
		v.GPUs[0].VGPUs = append(v.GPUs[0].VGPUs, snapshot.VGPU{ID: fmt.Sprintf("c%02d", i), Nonce: fmt.Sprint(i), Answered: true, Used: quota.Bytes(i)})
	}
	p := newTop(time.Second, topLook{}, nil)
	p.add(v, nil, time.Now())
	for _, x := range []struct{ typed, want string }{
		{"", ""}, {"j", "c00"}, {"jj", "c02"}, {"\x1b[6~", "c15"}, {"\x1b[F", "c63"}, {"k", "c62"}, {"m", "c62"}, {"r", "c62"}, {"\x1b[H", "c00"}, {"k", "c00"}, {"g\x1b[6~", "c13"}, {"\x1b", ""},
	} {
		for _, k := range keysOf(x.typed) {
			p.press(k)
		}
		m := shown(t, p, 80, 20)
		got := ""
		for i, line := range m.Styles {
			if line[0] == "7" {
				got += strings.Fields(string(m.Cells[i]))[0]
			}
		}
		if got != x.want {
			t.Errorf("%q: chose %q, want %q\n%s", x.typed, got, x.want, m.Text())
		}
	}
}

// helperTop is set for a process that is cgpu top, of a node in the folder that it names, or one that comes to grief.
const helperTop = "CGPU_TEST_TOP"

func TestHelperTop(t *testing.T) {
	dir := os.Getenv(helperTop)
	if dir == "" {
		t.Skip("for TestTopTerminal")
	}
	if dir == "panic" {
		n := 0
		p := newTop(100*time.Millisecond, topLook{}, func() (snapshot.View, error) {
			if n++; n > 2 {
				panic("of a look")
			}
			return snapshot.View{Driver: "sim", DriverVersion: "1"}, nil
		})
		err := p.run(context.Background(), openScreen(os.Stdin, os.Stdout))
		t.Fatal("lives after a panic: ", err)
	}
	os.Args = []string{"cgpu", "top", "--interval", "0.1"}
	main()
	os.Exit(0)
}

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
	s.cmd.Env = append(os.Environ(), append([]string{helperTop + "=" + dir, "CGPU_RUN_DIR=" + dir, "TERM=xterm", "LANG=C.UTF-8", "LC_ALL="}, env...)...)
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
	s.written(leaveScreen)
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
		r := n.Reserve(ledger.Record{ID: strings.Repeat(name[:1], 64), Name: name, VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Limit: 6 * quota.GiB, Weight: 3}}})
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
		if text := s.written(report); strings.LastIndex(text, leaveScreen) > strings.Index(text, report) {
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
	r := n.Reserve(ledger.Record{ID: strings.Repeat("a", 64), Name: "web", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Limit: 6 * quota.GiB}}})
	nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, nodetest.Status(r)))
	got := cgpu("top --once --interval 0.1")
	if !shows("1 vGPU\n", "web", "6.0G", "Tesla T4")(strings.ReplaceAll(got, "  ", "\n")+got) || strings.Contains(got, "\x1b") {
		t.Errorf("%s", got)
	}
	if got := cgpu("top --interval 0"); !strings.Contains(got, "want 0.1 to 3600 seconds") {
		t.Error(got)
	}
	if got := cgpu("top --gpu 9 --once"); !strings.Contains(got, "GPU \"9\": there is none") {
		t.Error(got)
	}
}
