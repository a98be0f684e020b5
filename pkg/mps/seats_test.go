// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// named is a socket that has its name, at which nobody listens.
func named(t *testing.T) (path string, fd int) {
	t.Helper()
	path = filepath.Join(t.TempDir(), SocketName)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err = errors.Join(err, unix.Bind(fd, &unix.SockaddrUnix{Name: path})); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return path, fd
}

// hand connects to the gate's seat 0, as a user, and hands it a socket.
func hand(r *running, seat, socket, user int) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // which ends with this
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(user), ^uintptr(0)); e != 0 {
			err = e
			return
		}
		path := filepath.Join(page.Seat(membersOf(r.socket), 0), SocketName)
		var c *net.UnixConn
		if c, err = net.DialUnix(network, nil, &net.UnixAddr{Name: path, Net: network}); err == nil {
			err = errors.Join(Hand(c, seat, socket), c.Close())
		}
	}()
	<-done
	return err
}

// TestHand: a seat's next container comes by a socket of its own, and nobody by the former one, not even by a descriptor of that. Only root
// hands one to the gate.
func TestHand(t *testing.T) {
	testenv.NeedsRoot(t, "another user")
	r := started(t, os.Args[0], "-f")
	kept, err := unix.Open(r.socket, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(kept)
	byKept := fmt.Sprintf("/proc/self/fd/%d", kept)
	path, socket := named(t)
	// A folder of root's is in the way of another user, but who is in the domain's server's root comes there.
	for dir := page.Seat(membersOf(r.socket), 0); dir != filepath.Dir(os.TempDir()); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			break
		}
	}
	_ = os.Chmod(filepath.Join(page.Seat(membersOf(r.socket), 0), SocketName), 0o666)
	for what, try := range map[string][3]int{"another user": {1, socket, 1234}, "seat 0": {0, socket, 0},
		"no such seat": {page.Seats + 1, socket, 0},
		"no socket":    {1, kept, 0}} {
		if err := hand(r, try[0], try[1], try[2]); err == nil {
			t.Errorf("%s: it is taken", what)
		}
		if !answers(byKept) || answers(path) {
			t.Fatalf("%s: the seat has the socket", what)
		}
	}
	if err := hand(r, 1, socket, 0); err != nil {
		t.Fatal(err)
	}
	if answers(byKept) || answers(r.socket) {
		t.Error("the former socket is served")
	}
	if got, err := partBy(path); err != nil || got != "100" {
		t.Errorf("the next container: part %q, %v", got, err)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}
