// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/page"
)

// TestMain makes the test program stand in for cgpu-guard, which has tests of its own.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "cgpu-guard" {
		if err := stubGuard(); err != nil {
			fmt.Fprintln(os.NewFile(3, "ready"), "stub:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// stubGuard answers every notification with EDOM, which the kernel's own ioctl never does on a closed descriptor. The
// file guard-mode in the run directory makes it misbehave. It records what it got in guard.log.
func stubGuard() error {
	var c guardcfg.Config
	if err := json.NewDecoder(os.Stdin).Decode(&c); err != nil {
		return err
	}
	mode, _ := os.ReadFile(filepath.Join(c.RunDir, "guard-mode"))
	switch string(mode) {
	case "die":
		os.Exit(7)
	case "hang":
		time.Sleep(time.Hour)
	case "refuse":
		return fmt.Errorf("no")
	}
	if err := os.MkdirAll(filepath.Dir(c.Socket), 0o711); err != nil {
		return err
	}
	listener, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Bind(listener, &unix.SockaddrUnix{Name: c.Socket}); err != nil {
		return err
	}
	if err := unix.Listen(listener, 8); err != nil {
		return err
	}
	if err := recordStart(c); err != nil {
		return err
	}
	fmt.Fprintln(os.NewFile(3, "ready"), "ok")
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if n, err := unix.Poll(poll, 20_000); n == 0 || (err != nil && err != unix.EINTR) {
			return err // nobody came for a while: the test is over
		}
		conn, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			continue
		}
		state, fd, err := receive(conn)
		if err != nil {
			return err
		}
		os.WriteFile(filepath.Join(c.RunDir, "state.json"), state, 0o644)
		answer(fd)
		// As a guard does. The hook of poststop does too, but not while a guard lives, and the race detector lets a program
		// linger for a second.
		return page.Remove(c.RunDir, c.Nonce)
	}
}

// recordStart writes what the test wants to know of the guard's surroundings.
func recordStart(c guardcfg.Config) error {
	var open []string
	names, _ := os.ReadDir("/proc/self/fd")
	for _, n := range names {
		if target, err := os.Readlink("/proc/self/fd/" + n.Name()); err == nil {
			open = append(open, n.Name()+"="+target)
		}
	}
	cwd, _ := os.Getwd()
	sid, _ := unix.Getsid(0)
	text, err := json.Marshal(map[string]any{"config": c, "env": os.Environ(), "fds": open, "cwd": cwd,
		"leader": sid == os.Getpid(), "pid": os.Getpid()})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.RunDir, "guard.json"), text, 0o644)
}

// receive takes the container's state and the seccomp descriptor from runc's connection.
func receive(conn int) (state []byte, fd int, err error) {
	fd = -1
	buf, oob := make([]byte, 64<<10), make([]byte, 256)
	for {
		n, oobn, _, _, err := unix.Recvmsg(conn, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			return nil, -1, err
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return nil, -1, err
		}
		for _, m := range messages {
			if fds, err := unix.ParseUnixRights(&m); err == nil && len(fds) > 0 {
				fd = fds[0]
			}
		}
		state = append(state, buf[:n]...)
		if n == 0 || json.Valid(state) {
			return state, fd, nil
		}
	}
}

// seccompNotif and seccompResp are the kernel's struct seccomp_notif and seccomp_notif_resp.
type seccompNotif struct {
	id         uint64
	pid, flags uint32
	nr         int32
	arch       uint32
	ip         uint64
	args       [6]uint64
}

type seccompResp struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

// answer serves a listener until its processes are gone.
func answer(fd int) {
	const recv, send = 0xc0502100, 0xc0182101 // SECCOMP_IOCTL_NOTIF_RECV and _SEND
	for {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && err != unix.EINTR {
			return
		}
		if poll[0].Revents&unix.POLLHUP != 0 {
			return
		}
		var n seccompNotif
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), recv, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue
		}
		r := seccompResp{id: n.id, err: -int32(unix.EDOM)}
		unix.Syscall(unix.SYS_IOCTL, uintptr(fd), send, uintptr(unsafe.Pointer(&r)))
	}
}

// started is what recordStart wrote.
type started struct {
	Config guardcfg.Config
	Env    []string
	FDs    []string
	Cwd    string
	Leader bool
	PID    int
}

func readStarted(t *testing.T, runDir string) started {
	t.Helper()
	var s started
	f, err := os.Open(filepath.Join(runDir, "guard.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	text, _ := io.ReadAll(f)
	if err := json.Unmarshal([]byte(strings.ToValidUTF8(string(text), "")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}
