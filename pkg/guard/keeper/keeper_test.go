// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// This binary as a guard with a keeper, and as what goes on in its place.

const roleEnv = "CGPU_TEST_KEEPER"

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 2 && os.Args[1] == ReviveArg:
		nextGuard()
	case os.Getenv(roleEnv) != "":
		guardMain(os.Getenv(roleEnv))
	default:
		os.Exit(m.Run())
	}
}

// guardMain keeps a keeper, opens a file after that is there, says so, and ends when it is told to.
func guardMain(role string) {
	m, err := NewMemory()
	check(err)
	program, err := os.Open("/proc/self/exe")
	check(err)
	p, err := Start(program, m)
	check(err)
	read, write, err := os.Pipe() // on this one others wait for what is left of the guard
	check(err)
	_, err = write.WriteString("kept")
	check(err)
	m.SetFiles([2]int{int(read.Fd()), int(program.Fd())})
	garbage := make([][]byte, 0) // the keeper has no part in what this process does
	for range 64 {
		garbage = append(garbage, make([]byte, 1<<20))
	}
	fmt.Println("ready", p.PID, len(garbage), int(write.Fd()))
	defer runtime.KeepAlive([]*os.File{program, read})
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		switch lines.Text() {
		case "ended":
			m.Ended().Store(1)
			fmt.Println("ok")
		case "panic":
			panic(role)
		case "kill":
			p.Kill()
			fmt.Println("ok")
		case "wait":
			p.Wait()
			fmt.Println("ok")
		}
	}
}

// nextGuard says what it has.
func nextGuard() {
	fd, err := strconv.Atoi(os.Args[2])
	check(err)
	m, err := OpenMemory(fd)
	check(err)
	files := m.Files()
	check(Left([]int{fd, files[0]}))
	b, pipe := make([]byte, 4), os.NewFile(uintptr(files[0]), "pipe")
	defer pipe.Close()
	_, err = io.ReadFull(pipe, b)
	check(err)
	var open []string
	for _, name := range dir("/proc/self/fd") {
		if target, err := os.Readlink("/proc/self/fd/" + name); err == nil && strings.HasPrefix(target, "pipe:") &&
			!slices.Contains([]string{"0", "1", "2"}, name) {
			open = append(open, name)
		}
	}
	fmt.Println("next", string(b), files[0], strings.Join(open, ","), m.Restarted(time.Hour))
}

func dir(path string) (names []string) {
	list, err := os.ReadDir(path)
	check(err)
	for _, x := range list {
		names = append(names, x.Name())
	}
	return names
}

func check(err error) {
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

type victim struct {
	cmd    *exec.Cmd
	in     io.Writer
	lines  *bufio.Scanner
	keeper int
}

func startVictim(t *testing.T) *victim {
	t.Helper()
	v := &victim{cmd: exec.Command(os.Args[0])}
	v.cmd.Env = append(os.Environ(), roleEnv+"=1")
	out, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	v.cmd.Stdout = write
	if v.in, err = v.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close()
	v.lines = bufio.NewScanner(out)
	words := v.line(t)
	if words[0] != "ready" {
		t.Fatal(words)
	}
	v.keeper, _ = strconv.Atoi(words[1])
	t.Cleanup(func() { _ = v.cmd.Process.Kill(); _ = unix.Kill(v.keeper, unix.SIGKILL); out.Close() })
	return v
}

func (v *victim) line(t *testing.T) []string {
	t.Helper()
	if !v.lines.Scan() {
		return nil
	}
	return strings.Fields(v.lines.Text())
}

// TestKilled: what a guard that is killed had open, however it came by it, the next one has under the same numbers, and nothing else.
func TestKilled(t *testing.T) {
	for _, how := range []string{"kill", "panic"} {
		t.Run(how, func(t *testing.T) {
			v := startVictim(t)
			name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", v.keeper))
			if err != nil || strings.TrimSpace(string(name)) != Name {
				t.Errorf("the keeper is called %q, %v", name, err)
			}
			if how == "kill" {
				_ = v.cmd.Process.Kill()
			} else {
				fmt.Fprintln(v.in, "panic")
			}
			_ = v.cmd.Wait()
			words := v.line(t)
			if len(words) != 5 || words[0] != "next" || words[1] != "kept" || words[2] != words[3] || words[4] != "true" {
				t.Errorf("%q", words)
			}
		})
	}
}

// TestEnded: a guard that ends as it should is not started again, and one whose keeper is stopped neither.
func TestEnded(t *testing.T) {
	for _, how := range []string{"ended", "kill"} {
		t.Run(how, func(t *testing.T) {
			v := startVictim(t)
			fmt.Fprintln(v.in, how)
			if words := v.line(t); !slices.Equal(words, []string{"ok"}) {
				t.Fatal(words)
			}
			_ = v.cmd.Process.Kill()
			_ = v.cmd.Wait()
			if words := v.line(t); words != nil { // the end of all who could write
				t.Errorf("%q", words)
			}
		})
	}
}

// TestKeptByTracer: a keeper whose end somebody else is told first is killed at once, and is no zombie afterwards.
func TestKeptByTracer(t *testing.T) {
	runtime.LockOSThread() // who traces is a thread
	defer runtime.UnlockOSThread()
	v := startVictim(t)
	if err := unix.PtraceSeize(v.keeper); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(10*time.Second, func() { _ = v.cmd.Process.Kill() })
	defer late.Stop()
	fmt.Fprintln(v.in, "kill")
	if words := v.line(t); !slices.Equal(words, []string{"ok"}) { // never, if it is waited for
		t.Fatal(words)
	}
	fmt.Fprintln(v.in, "wait")
	if _, err := unix.Wait4(v.keeper, nil, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	if words := v.line(t); !slices.Equal(words, []string{"ok"}) {
		t.Fatal(words)
	}
	if err := unix.Kill(v.keeper, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the keeper is there: %v", err)
	}
}

// TestRestarted: three in an hour, and then no more until the first of them is an hour ago.
func TestRestarted(t *testing.T) {
	m, err := NewMemory()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for i, x := range []struct {
		at time.Duration
		ok bool
	}{{0, true}, {time.Minute, true}, {59 * time.Minute, true}, {59 * time.Minute, false}, {61 * time.Minute, true}, {61 * time.Minute, true},
		{62 * time.Minute, false}, {118 * time.Minute, false}, {200 * time.Minute, true}} {
		if got := m.Restarted(x.at); got != x.ok {
			t.Errorf("%d, at %v: %v", i, x.at, got)
		}
	}
}

// TestRights: those that are open are found, and places are used again.
func TestRights(t *testing.T) {
	m, err := NewMemory()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for i := range MaxRights {
		if got := m.SetRight(Right{uint32(i), 2, 3}); got != i {
			t.Fatalf("%d: %d", i, got)
		}
	}
	if m.SetRight(Right{}) != -1 {
		t.Error("one more")
	}
	for i := range MaxRights - 1 {
		m.ClearRight(i)
	}
	if got := m.Rights(); !slices.Equal(got, []Right{{MaxRights - 1, 2, 3}}) {
		t.Errorf("%+v", got)
	}
}

// TestOpenMemory: what is no guard's memory is refused.
func TestOpenMemory(t *testing.T) {
	for name, size := range map[string]int64{"short": 4096, "empty": memorySize} {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err == nil {
			err = f.Truncate(size)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := OpenMemory(int(f.Fd())); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
}
