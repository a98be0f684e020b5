// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
)

// gate makes a domain's folder with a seat, whose gate has one that listens, and serves seat 0.
func gate(t *testing.T, seat int) (pipes string) {
	t.Helper()
	pipes = filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	gateIn(t, pipes, seat, &mps.Gate{})
	return pipes
}

func gateIn(t *testing.T, pipes string, seat int, g *mps.Gate) {
	t.Helper()
	g.User, g.Patience, g.Refused = mps.AnyUser, 10*time.Second, func(error) {}
	for _, n := range []int{seat, 0} {
		dir := page.Seat(filepath.Join(pipes, page.Members), n)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		fd, err := Bind(dir)
		if err = errors.Join(err, unix.Listen(fd, 8)); err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(fd), "socket")
		l, err := net.FileListener(file)
		if err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
		t.Cleanup(func() { _ = l.Close() })
		g.Sit(n, l.(*net.UnixListener))
	}
}

// TestSit: what somebody has kept of a seat's folder, or of its socket, leads nowhere when the next member has the seat, also where who
// gave it to one in between was killed on the way.
func TestSit(t *testing.T) {
	const seat = 7
	pipes := gate(t, seat)
	dir := page.Seat(filepath.Join(pipes, page.Members), seat)
	socket := filepath.Join(dir, mps.SocketName)
	kill := map[string]func() error{
		"nobody":            func() error { return nil },
		"before the socket": func() error { return os.Mkdir(dir+".new", 0o700) },
		"while it binds": func() error {
			return errors.Join(os.Mkdir(dir+".new", 0o700), os.WriteFile(dir+".new/control.new", nil, 0))
		},
		"before the exchange": func() error { return errors.Join(os.Mkdir(dir+".new", 0o700), bindAndClose(dir+".new")) },
		"before the gate's":   func() error { return bindAndClose(dir) },
		"after the exchange": func() error {
			return errors.Join(os.Mkdir(dir+".new", 0o755), bindAndClose(dir+".new"),
				unix.Renameat2(unix.AT_FDCWD, dir+".new", unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE))
		},
	}
	for when, leave := range kill {
		folder, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
		file, openErr := unix.Open(socket, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err = errors.Join(err, openErr, leave(), sit(pipes, seat)); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if !answers(dir) {
			t.Errorf("%s: the seat does not answer", when)
		}
		if _, err := dial(fmt.Sprintf("/proc/self/fd/%d/.", folder)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: by the former folder: %v", when, err)
		}
		if _, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d", file)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: by the former socket: %v", when, err)
		}
		if _, err := os.Lstat(dir + ".new"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: a folder is left: %v", when, err)
		}
		_, _ = unix.Close(folder), unix.Close(file)
	}
}

func bindAndClose(dir string) error {
	fd, err := Bind(dir)
	return errors.Join(err, unix.Close(fd))
}
