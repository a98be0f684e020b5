// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestConfine: what is root of a user namespace has no capability and cannot come to any, nor to calls that engines keep from containers.
func TestConfine(t *testing.T) {
	const inside = "CGPU_TEST_CONFINED"
	if os.Getenv(inside) != "" {
		wantConfined(t)
		return
	}
	testenv.NeedsRoot(t, "a user namespace")
	cmd := exec.Command(os.Args[0], asConfined, os.Args[0], "-test.run", "^TestConfine$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = (Server{Command: []string{"d", forAll}}).attributes()
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS: TestConfine") {
		t.Errorf("%v: %s", err, out)
	}
	if err := Confine([]string{"/no/such/program"}); err == nil {
		t.Error("a program that is not there")
	}
}

// TestNarrow: all threads of a process, and its children, are refused what the daemon is, and it starts programs as before.
func TestNarrow(t *testing.T) {
	const inside = "CGPU_TEST_NARROW"
	unshare := func() error { return exec.Command("unshare", "-U", "true").Run() }
	if os.Getenv(inside) == "" {
		if err := unshare(); err != nil {
			testenv.Lacks(t, "a user namespace: %v", err)
		}
		cmd := exec.Command(os.Args[0], "-test.run", "^TestNarrow$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS: TestNarrow") {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	asked, answer := make(chan bool), make(chan error)
	go func() {
		runtime.LockOSThread() // one that is there before
		<-asked
		answer <- unix.Unshare(unix.CLONE_NEWUTS)
	}()
	if err := Narrow(); err != nil {
		t.Fatal(err)
	}
	asked <- true
	if err := <-answer; !errors.Is(err, unix.EPERM) {
		t.Errorf("another thread: %v", err)
	}
	if err := unshare(); err == nil {
		t.Error("a child has a namespace of its own")
	}
	if err := exec.Command("sh", "-c", "true | cat").Run(); err != nil {
		t.Errorf("a program of its own: %v", err)
	}
}

// TestCommandBounded: what the daemon's program prints is bounded, and it does not wait for what that has started.
func TestCommandBounded(t *testing.T) {
	for script, want := range map[string]string{"exec yes": "broken pipe", "echo 1; sleep 5 &": "WaitDelay"} {
		path := filepath.Join(t.TempDir(), "control")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		out, err := (&control{program: path, env: os.Environ(), patience: time.Minute}).command("get_server_list")
		if len(out) > maxSaid || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %d bytes, %v", script, len(out), err)
		}
	}
}

func wantConfined(t *testing.T) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if !regexp.MustCompile("(?m)^" + name + ":\t0+$").Match(status) {
			t.Errorf("%s: %s", name, status)
		}
	}
	if user := os.Geteuid(); user != 0 {
		t.Errorf("user %d: the daemon must be root to serve all", user)
	}
	call := func(nr uintptr, args ...uintptr) syscall.Errno {
		args = append(args, 0, 0, 0)
		_, _, e := unix.Syscall(nr, args[0], args[1], args[2])
		return e
	}
	for _, nr := range refusedCalls {
		if e := call(uintptr(nr)); e != unix.EPERM {
			t.Errorf("call %d: %v", nr, e)
		}
	}
	if e := call(unix.SYS_CLONE3); e != unix.ENOSYS {
		t.Errorf("clone3: %v", e)
	}
	for _, flag := range []uintptr{unix.CLONE_NEWUSER, unix.CLONE_NEWNS, unix.CLONE_NEWNET, unix.CLONE_NEWPID} {
		if err := (&exec.Cmd{Path: "/bin/true", SysProcAttr: &syscall.SysProcAttr{Cloneflags: flag}}).Run(); err == nil {
			t.Errorf("clone with flag %#x", flag)
		}
	}
	if out, err := exec.Command("sh", "-c", "echo it runs").CombinedOutput(); string(out) != "it runs\n" {
		t.Errorf("a program of its own: %s, %v", out, err)
	}
	for family, want := range map[uintptr]syscall.Errno{unix.AF_UNIX: 0, unix.AF_INET: 0, unix.AF_ALG: unix.EAFNOSUPPORT,
		unix.AF_VSOCK: unix.EAFNOSUPPORT, unix.AF_PACKET: unix.EAFNOSUPPORT} {
		if e := call(unix.SYS_SOCKET, family, unix.SOCK_DGRAM); e != want {
			t.Errorf("a socket of family %d: %v", family, e)
		}
		if _, err := unix.Socketpair(int(family), unix.SOCK_DGRAM, 0); (family == unix.AF_UNIX) != (err == nil) ||
			err != nil && err != unix.EAFNOSUPPORT {
			t.Errorf("a pair of sockets of family %d: %v", family, err)
		}
	}
}

// TestConfinedServer: such a daemon serves, and ends with who started it.
func TestConfinedServer(t *testing.T) {
	testenv.NeedsRoot(t, "a user namespace")
	r := started(t, os.Args[0], "-f", forAll)
	if got, err := partOf(r.socket, 1); err != nil || got != fmt.Sprint(100) {
		t.Errorf("%q, %v", got, err)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}
